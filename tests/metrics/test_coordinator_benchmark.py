"""The coordinator's benchmark with a handful of agents."""

from __future__ import annotations

from pathlib import Path

from benchmarks.coordinator import LEASE_S, QUICK, measure, rows


def test_a_small_part_of_everything(tmp_path: Path) -> None:
    (agents,) = QUICK.agents
    found = measure(agents, QUICK, tmp_path)
    assert found.agents == agents
    assert 0.15 <= found.closed_s < 30, "a closed connection is waited for before it is a loss"
    assert LEASE_S - 1 < found.silent_s < 30
    assert 0 < found.decide_s <= found.told_s + 1
    assert found.cpu > 0 and found.memory_bytes > 1 << 20
    assert all(row.value >= 0 for row in rows([found]))
