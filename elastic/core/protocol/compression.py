"""Whether compressing a copy before it is sent pays. Pure: what was measured in, decision and reason out.

Compressing takes time in the sender, and a core away from training; so it must win on the wire with a margin, and
as if the two did not overlap:

    1 / codec + fraction / link  <  MARGIN / link        (seconds per byte)
"""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("auto", "off", "on")
MARGIN = 0.9
"""Compressed, a copy must take at most this part of the time that it takes as it is."""
SMALL_BYTES = 64 << 10
"""Copies below this are a matter of latency."""


@dataclass(frozen=True, slots=True)
class CompressionSample:
    """What compressing pieces of a copy gave."""

    bytes_per_s: float
    """Bytes put in per second."""
    fraction: float
    """Bytes that came out for each that was put in."""


def should_compress(mode: str, nbytes: int, link_bytes_per_s: float, sample: CompressionSample | None) -> tuple[bool, str]:
    """Whether to compress a copy of `nbytes`, and why.

    `link_bytes_per_s` is what the link was seen to carry, 0: unknown; `sample` is of copies of this kind, None: none.
    """
    if mode != "auto":
        return mode == "on", f"--compress {mode}"
    if nbytes < SMALL_BYTES:
        return False, f"copies below {SMALL_BYTES} bytes are not worth it"
    if link_bytes_per_s <= 0 or sample is None or sample.bytes_per_s <= 0:
        return False, "nothing is known of the link yet"
    codec, link = 1e6 / sample.bytes_per_s, 1e6 / link_bytes_per_s
    pays = codec + sample.fraction * link < MARGIN * link
    raw = f"{link * 1e3:.2f} ms/MB on a link of {link_bytes_per_s / 1e6:.0f} MB/s"
    packed = f"{(codec + sample.fraction * link) * 1e3:.2f} compressed (to {sample.fraction:.0%}, at"
    return pays, f"{raw}, {packed} {sample.bytes_per_s / 1e6:.0f} MB/s)"
