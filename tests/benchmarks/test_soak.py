"""The soak: its judgement, and (slow) a short one."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from benchmarks.soak import (
    PROCESSES,
    TOLERANCES,
    Sampler,
    Series,
    Soaked,
    SoakJob,
    prune,
    rows,
    soak,
    verdict,
)
from tests.kubernetes.network import missing


@pytest.mark.parametrize("figure", TOLERANCES)
def test_growth_is_found(figure: str) -> None:
    assert Series("job", figure, [100.0 + i % 2 for i in range(100)]).flat
    assert not Series("job", figure, [100.0 + i for i in range(100)]).flat
    once = [100.0] * 20 + [300.0] + [100.0] * 79
    assert Series("job", figure, once).flat, "a peak is no growth"
    assert Series("job", figure, [0.0, 50.0] + [100.0] * 98).flat, "neither is the start"


def soaked(*more: Series, **changes: Any) -> Soaked:
    """A soak in which nothing was wrong, with more series."""
    series = [Series(name, "memory", [40.0] * 100, newest=100) for name in PROCESSES]
    events = {"recovery": 2}
    right = Soaked([*more, *series], 10, 1.0, {"kill": 1}, events, 1000, [], 8.0)
    return replace(right, **changes)


def test_the_verdict_names_what_grew_and_what_is_left() -> None:
    assert verdict(soaked()) == ""
    grown = Series("coordinator", "threads", [float(i) for i in range(100)], newest=100)
    done = soaked(grown, left=["a vault"])
    assert verdict(done) == "coordinator: threads from 37 to 87; left: a vault"
    kinds = [Counter(socket=3, pipe=5 + i) for i in range(100)]
    files = [float(one.total()) for one in kinds]
    text = verdict(soaked(Series("coordinator", "descriptors", files, 100, kinds)))
    assert text == "coordinator: descriptors from 45 to 95 (pipe from 42 to 92)"
    missed = [row.metric for row in rows(done, 1.0, 8) if row.met == "missed"]
    assert missed == ["processes and files left", "coordinator: threads, growth until the last"]


CORES = os.cpu_count() or 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"longest_s": 59.0}, ""),
        ({"longest_s": 61.0, "load": 10.0 * CORES}, "no step for 61 s, the limit is 60 s"),
        ({"longest_s": 61.0, "load": 20.0 * CORES}, ""),
        ({"longest_s": 121.0, "load": 20.0 * CORES}, "no step for 121 s, the limit is 120 s"),
        ({"faults": {"kill": 3, "kill (not possible)": 3}}, ""),
        ({"faults": {"kill": 30, "drain": 1, "drain (not possible)": 2}}, "drain was mostly"),
        ({"faults": {"kill-worker (not possible)": 25}}, "no fault struck"),
        ({"faults": {}}, "no fault struck"),
    ],
)
def test_a_soak_needs_steps_and_faults(changes: dict[str, Any], why: str) -> None:
    found = verdict(soaked(**changes))
    assert why in found and bool(why) == bool(found)


def test_impossible_faults_are_no_faults() -> None:
    found = rows(soaked(faults={"kill": 3, "kill (not possible)": 2}), 1.0, 8)
    values = {row.metric: row.value for row in found}
    assert values["faults"] == 3 and values["faults that were not possible"] == 2


@pytest.mark.parametrize(
    ("ended", "absent"),
    [("agent of node2", "agent of node2"), ("coordinator", "coordinator"), ("nothing", "")],
)
def test_a_process_that_ended_early_is_not_flat(ended: str, absent: str, tmp_path: Path) -> None:
    """Its series ends, so nothing in it grows."""
    me = psutil.Process()
    here = dict.fromkeys(PROCESSES, True)

    def process(name: str) -> psutil.Process:
        if not here[name]:
            raise psutil.NoSuchProcess(1)
        return me

    job = SimpleNamespace(
        folder=tmp_path,
        coordinator=lambda: process("coordinator"),
        agent=lambda node: process(f"agent of {node}"),
        launchers={"coordinator": SimpleNamespace(pid=me.pid)},
        shared_bytes=lambda: 0,
    )
    sampler = Sampler(cast(SoakJob, job))
    for number in range(20):
        here[ended] = number < 10
        sampler.sample()
    done = soaked(series=sampler.newest())
    assert done.absent == ([absent] if absent else [])
    assert verdict(done) == (f"{absent} did not live until the end" if absent else "")


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
    assert done.steps >= 8 and done.left == [] and done.absent == []
    assert done.events["recovery"] >= 1
    names = {(series.name, series.figure) for series in done.series}
    for name in ("coordinator", "launcher", "agent of node0", "agent of node1", "agent of node2"):
        assert {(name, "memory"), (name, "threads"), (name, "descriptors")} <= names
    assert {("job", "shared memory"), ("job", "disk")} <= names
