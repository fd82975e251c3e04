"""The soak: what counts as flat, and (slow) a short one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.soak import TOLERANCES, Series, Soaked, prune, rows, soak, verdict
from tests.kubernetes.network import missing


@pytest.mark.parametrize("figure", TOLERANCES)
def test_growth_is_found(figure: str) -> None:
    assert Series("job", figure, [100.0 + i % 2 for i in range(100)]).flat
    assert not Series("job", figure, [100.0 + i for i in range(100)]).flat
    once = [100.0] * 20 + [300.0] + [100.0] * 79
    assert Series("job", figure, once).flat, "a peak is no growth"
    assert Series("job", figure, [0.0, 50.0] + [100.0] * 98).flat, "neither is the start"


def test_the_verdict_names_what_grew_and_what_is_left() -> None:
    grown = Series("coordinator", "threads", [float(i) for i in range(100)])
    flat = Series("coordinator", "memory", [40.0] * 100)
    done = Soaked([grown, flat], 10, 1.0, {"kill": 1}, {"recovery": 2}, 1000, ["a vault"], 8.0)
    assert verdict(done) == "coordinator: threads from 37 to 87; left: a vault"
    missed = [row.metric for row in rows(done, 1.0, 8) if row.met == "missed"]
    assert missed == ["processes and files left", "coordinator: threads, growth until the last"]


def test_only_old_whole_checkpoints_are_deleted(tmp_path: Path) -> None:
    for name in ("step-00000002", "step-00000004", "step-00000006", "step-00000008.tmp"):
        (tmp_path / name).mkdir()
        if not name.endswith("tmp"):
            (tmp_path / name / "manifest.json").touch()
    prune(tmp_path)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["step-00000004", "step-00000006", "step-00000008.tmp"]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_a_short_soak(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    done = soak(tmp_path / "run", faults=3, every_s=4.0, load=0)
    assert done.faults == {"kill-worker": 1, "kill": 1, "pause-coordinator": 1}
    assert done.steps >= 8 and done.left == []
    assert done.events["recovery"] >= 1
    names = {(series.name, series.figure) for series in done.series}
    for name in ("coordinator", "launcher", "agent of node0", "agent of node1", "agent of node2"):
        assert {(name, "memory"), (name, "threads"), (name, "descriptors")} <= names
    assert {("job", "shared memory"), ("job", "disk")} <= names
