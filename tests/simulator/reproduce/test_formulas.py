"""Formulas of single published figures."""

from __future__ import annotations

import pytest
from elastic_sim.reproduce.formulas import (
    committed_share,
    expected_ettr,
    mttf_hours,
    wasted_s_per_failure,
)


def test_torchft_on_300_gpus() -> None:
    committed = committed_share(1100 * 60 / 6249, 60)
    assert 100 * committed == pytest.approx(82.3, abs=1)
    assert 100 * committed * 29.6 / 30 == pytest.approx(81.2, abs=1)


def test_meta_s_clusters() -> None:
    """16,384 GPUs, eight per node: 1.8 h on RSC-1."""
    assert mttf_hours(16_384 / 8, 6.50) == pytest.approx(1.8, rel=0.01)
    assert mttf_hours(16_384 / 8, 2.34) == pytest.approx(5.0, rel=0.01)
    perfect = expected_ettr(2048, 0.0065, restart_days=0, interval_days=1e-9)
    assert perfect == pytest.approx(1.0)
    hourly = expected_ettr(2048, 0.0065, restart_days=5 / 1440, interval_days=60 / 1440)
    assert hourly == pytest.approx(1 - 13.312 * 35 / 1440)
    writing = expected_ettr(
        2048, 0.0065, restart_days=5 / 1440, interval_days=60 / 1440, write_days=3 / 1440
    )
    assert writing == pytest.approx(hourly / 1.05)


def test_gemini() -> None:
    """A hidden checkpoint in every step of 65 s, fetched in 2.5 s."""
    assert wasted_s_per_failure(0.0, 1 / 65, 2.5) == pytest.approx(35.0)
