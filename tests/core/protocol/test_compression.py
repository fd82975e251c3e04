"""Decision whether to compress a copy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.protocol.compression import (
    MARGIN,
    MODES,
    SMALL_BYTES,
    CompressionSample,
    should_compress,
)

GRADIENT, STATE = CompressionSample(1.3e9, 0.55), CompressionSample(1.6e9, 0.87)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("link", "sample", "pays"),
    [
        (12.5e6, GRADIENT, True),
        (12.5e6, STATE, True),
        (125e6, GRADIENT, True),
        (125e6, STATE, False),
        (1.25e9, GRADIENT, False),
        (3e9, GRADIENT, False),
        (12.5e6, CompressionSample(1e9, 1.0), False),
        (12.5e6, CompressionSample(1e6, 0.1), False),
    ],
)
def test_slow_links_compress_and_fast_ones_do_not(
    link: float, sample: CompressionSample, pays: bool
) -> None:
    found, reason = should_compress("auto", 4 * MIB, link, sample)
    assert found is pays
    assert f"on a link of {link / 1e6:.0f} MB/s" in reason and f"to {sample.fraction:.0%}" in reason


def test_without_measurements_nothing_is_compressed() -> None:
    for link, sample in ((0.0, GRADIENT), (1e6, None), (1e6, CompressionSample(0.0, 0.5))):
        assert should_compress("auto", 4 * MIB, link, sample) == (
            False,
            "nothing is known of the link yet",
        )
    found, reason = should_compress("auto", SMALL_BYTES - 1, 1e6, GRADIENT)
    assert not found and "not worth it" in reason


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "auto"])
def test_on_and_off_override_the_measurements(mode: str) -> None:
    for link in (0.0, 1e6, 1e12):
        assert should_compress(mode, 1, link, None) == (mode == "on", f"--compress {mode}")


@given(st.floats(1e3, 1e12), st.floats(1e3, 1e12), st.floats(0.001, 1.1))
def test_compression_is_used_only_if_it_wins_by_the_margin(
    link: float, codec: float, fraction: float
) -> None:
    found, _ = should_compress("auto", MIB, link, CompressionSample(codec, fraction))
    raw, packed = 1 / link, 1 / codec + fraction / link
    if found:
        assert packed < raw
    else:
        assert packed > MARGIN * raw * (1 - 1e-9)
