"""The coordinator's benchmark with a handful of agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.control_plane.coordinator import QUICK, measure, rows
from elastic.telemetry import read_events


@pytest.mark.parametrize("mode", ["plain", pytest.param("secure", marks=pytest.mark.chaos)])
def test_a_small_part_of_everything(tmp_path: Path, mode: str) -> None:
    (agents,) = QUICK.agents
    found = measure(mode, agents, QUICK, tmp_path)
    assert (found.mode, found.agents) == (mode, agents)
    whys = [
        e["why"]
        for e in read_events(tmp_path / f"run-{mode}-{agents}" / "events.jsonl")
        if e["kind"] == "lost"
    ]
    # The agents end before the coordinator does, which may notice it.
    assert [why.split()[0] for why in whys[:3]] == ["connection", "silent", "silent"]
    assert found.wrongly_lost == 0
    assert 0 < found.closed_s < found.silent_s, "the port of a node that ended is refused"
    assert found.silent_s > QUICK.lease_s - 1
    assert found.decide_s > 0 and found.told_s > 0
    assert found.cpu > 0 and found.memory_bytes > 1 << 20
    assert all(row.value >= 0 for row in rows([found], QUICK.lease_s))
