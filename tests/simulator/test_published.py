"""Published values, where the recorded traces are at hand: they are not part of this repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator import reproduce

DATA = Path(__file__).parents[3] / "shared/data"


@pytest.mark.skipif(not DATA.is_dir(), reason="the recorded traces are not at hand")
def test_oobleck_s_artifact() -> None:
    rows = reproduce.oobleck(DATA)
    assert len(rows) == 5 * 7 * 3
    known = [row for row in rows if row["published"] is not None]
    assert len(known) == len(reproduce.OOBLECK_PUBLISHED) * 3
    for row in known:
        assert row["value"] == pytest.approx(row["published"], rel=0.01, abs=0.006), row
