"""Decides whether to compress a copy before it is sent.

Compression takes time and a core of the sender. A copy is compressed if compressing and then
sending takes less time than sending the whole copy, by a margin (in seconds per byte):

    1 / codec + fraction / link  <  MARGIN / link
"""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("auto", "off", "on")
MARGIN = 0.9
"""Limit on the time of a compressed copy, as a fraction of the time of the uncompressed one."""
SMALL_BYTES = 64 << 10
"""Smaller copies are not compressed, because latency determines their time."""


@dataclass(frozen=True, slots=True)
class CompressionSample:
    """Measured result of compressing pieces of a copy."""

    bytes_per_s: float
    """Input bytes per second."""
    fraction: float
    """Output bytes per input byte."""


def should_compress(
    mode: str, nbytes: int, link_bytes_per_s: float, sample: CompressionSample | None
) -> tuple[bool, str]:
    """Return (whether to compress a copy of `nbytes`, reason).

    `link_bytes_per_s`: measured rate of the link; 0: unknown. `sample`: measured for copies of the
    same kind; None: unknown.
    """
    if mode != "auto":
        return mode == "on", f"--compress {mode}"
    if nbytes < SMALL_BYTES:
        return False, f"copies below {SMALL_BYTES} bytes are not worth it"
    if link_bytes_per_s <= 0 or sample is None or sample.bytes_per_s <= 0:
        return False, "nothing is known of the link yet"
    codec, link = 1e6 / sample.bytes_per_s, 1e6 / link_bytes_per_s
    compressed = codec + sample.fraction * link
    reason = (
        f"{link * 1e3:.2f} ms/MB on a link of {link_bytes_per_s / 1e6:.0f} MB/s, "
        f"{compressed * 1e3:.2f} compressed (to {sample.fraction:.0%}, "
        f"at {sample.bytes_per_s / 1e6:.0f} MB/s)"
    )
    return compressed < MARGIN * link, reason
