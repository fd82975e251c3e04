"""The comparison with other systems: its figures, and a small run of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare.__main__ import run
from benchmarks.compare.cluster import Kill
from benchmarks.compare.figures import figures
from benchmarks.compare.job import MICROBATCHES, NODES
from benchmarks.compare.systems import SYSTEMS, Ours


def computed(at: float, step: int, index: int) -> dict[str, Any]:
    return {"kind": "microbatch", "at": at, "step": step, "index": index, "node": 0}


def committed(at: float, step: int, microbatches: int = MICROBATCHES) -> dict[str, Any]:
    return {"kind": "step", "at": at, "step": step, "microbatches": microbatches, "node": 0}


def test_work_that_is_computed_again_was_lost() -> None:
    """Before step 1 is done, a kill at 2.5 undoes the two micro-batches computed after it."""
    steps = [committed(1.0, 0), committed(1.01, 0), committed(6.0, 1), committed(7.0, 2, 12)]
    steps += [committed(8.0, number) for number in range(3, 7)]
    steps += [{"kind": "end", "at": 8.1, "loss": 0.5, "node": 0}]
    again = [computed(2.6, 1, 0), computed(2.7, 1, 1), computed(5.0, 1, 0), computed(5.1, 1, 1)]
    records = [computed(0.5, 0, 0), *again, *(computed(5.2, 1, i) for i in range(2, MICROBATCHES))]
    records += [computed(6.5, 2, i) for i in range(12)]
    records += [computed(7.5, step, i) for step in range(3, 7) for i in range(MICROBATCHES)]
    found = figures(records, steps, [2.5])
    assert found.seconds == 7.0, "from the first whole step to the last one"
    assert [*found.idle_s, *found.pause_s] == pytest.approx([2.5, 3.5])
    assert found.lost == 2 and found.small_steps == 1 and found.loss == 0.5


def test_a_kill_waits_until_all_nodes_take_part() -> None:
    kill = Kill(node=2, step=5)
    there = {(node, 5): 4 for node in range(NODES)}
    assert kill.is_due({**there, (2, 6): 2}, NODES)
    assert not kill.is_due({**there, (2, 6): 1}, NODES), "two micro-batches"
    assert not kill.is_due({**there, (1, 6): 2}, NODES), "another node"
    late = {at: number for at, number in there.items() if at[0] != 3}
    assert not kill.is_due({**late, (2, 6): 2}, NODES), "node 3 has not joined yet"
    assert not Kill(node=2, step=7).is_due({**there, (2, 6): 2}, NODES)


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPARE_STEPS", "12")
    found = run(Ours(), (Kill(node=2, step=3),), tmp_path / "run")
    assert found.small_steps == 0 and len(found.idle_s) == len(found.pause_s) == 1
    assert 0 <= found.idle_s[0] <= found.pause_s[0] and found.lost <= MICROBATCHES
    assert found.loss > 0


def test_each_setting_has_a_name_of_its_own() -> None:
    names = [(system.name, system.settings) for system in SYSTEMS]
    assert len(set(names)) == len(names)
