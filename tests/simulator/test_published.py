"""Published values, where the recorded traces are at hand: they are not part of this repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator import reproduce

DATA = Path(__file__).parents[3] / "shared/data"


@pytest.mark.skipif(not DATA.is_dir(), reason="the recorded traces are not at hand")
def test_parcae_s_optimizer() -> None:
    """Within what the draws of which nodes are lost make of it."""
    rows = reproduce.parcae(DATA)
    values = {(row["model"], row["trace"], row["system"]): row["value"] for row in rows}
    for (model, trace), published in reproduce.PARCAE_PUBLISHED.items():
        for system, value in zip(("ideal", "reactive", "parcae"), published, strict=True):
            found = 100 * values[model, trace, system] / values[model, trace, "ideal"]
            assert found == pytest.approx(100 * value / published[0], abs=0.5), (model, trace, system)
            assert values[model, trace, system] == pytest.approx(value, rel=0.003)


@pytest.mark.skipif(not DATA.is_dir(), reason="the recorded traces are not at hand")
def test_oobleck_s_artifact() -> None:
    rows = reproduce.oobleck(DATA)
    assert len(rows) == 5 * 7 * 3
    known = [row for row in rows if row["published"] is not None]
    assert len(known) == len(reproduce.OOBLECK_PUBLISHED) * 3
    for row in known:
        assert row["value"] == pytest.approx(row["published"], rel=0.01, abs=0.006), row
