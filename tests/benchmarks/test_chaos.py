"""The chaos benchmark: its cases, its judgement, and (slow) two of its runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.__main__ import rows
from benchmarks.chaos.case import (
    DISKS,
    NETWORK_KINDS,
    OWN_KINDS,
    Case,
    OuterFault,
    parse_outer,
    random_case,
)
from benchmarks.chaos.injector import Injection, unsupported
from benchmarks.chaos.verdict import (
    FAILED,
    IDLE,
    REFUSED,
    RIGHT,
    Finished,
    Partition,
    destroyed_nodes,
    healthy_lost,
    judge,
    layers_lost,
    partitions,
    read_checkpoints,
)
from elastic.core.protocol.fault_spec import FaultKind
from tests.agent.vault.checkpoints import whole
from tests.kubernetes.network import missing

ROOT = Path(__file__).resolve().parents[2]
CASES = [random_case(seed) for seed in range(600)]
PLAN = """plan epoch=1 layers=4 microbatches=6 tp=1 backup=stream+snapshot
pipeline 0 microbatches=0-5: node0[0:2] node1[2:3] node2[3:4]
peers node0>node1 node1>node2 node2>node0"""
NEXT = """plan epoch=2 layers=4 microbatches=6 tp=1 backup=stream+snapshot
pipeline 0 microbatches=0-5: node0[0:2] node2[2:4]
peers node0>node2 node2>node0"""
REPLICAS = """plan epoch=1 layers=4 microbatches=6 tp=1 backup=stream+replica
pipeline 0 microbatches=0-2: node0[0:4]
pipeline 1 microbatches=3-5: node1[0:4]
peers node0>node2 node1>node2
spares node2"""


# ---- cases ----


def test_a_seed_always_gives_the_same_case() -> None:
    assert [random_case(seed) for seed in range(50)] == CASES[:50]
    assert len(set(CASES)) == len(CASES)


def test_all_kinds_of_faults_and_shapes_occur() -> None:
    kinds = Counter(text.split()[0] for case in CASES for text in case.faults)
    assert set(kinds) == {*FaultKind, *OWN_KINDS, *NETWORK_KINDS}
    assert {disk for case in CASES for disk in case.disks} == set(DISKS)
    assert {len(case.faults) for case in CASES} == {1, 2, 3, 4}
    assert {case.nodes for case in CASES} == {3, 4, 5, 6}
    assert {case.place for case in CASES} == {"machine", "network"}


def test_every_case_leaves_a_node_and_has_readable_faults() -> None:
    for case in CASES:
        gone = {spec.node for spec in case.injected if spec.kind in ("kill", "drain")}
        gone |= {f.node for f in case.own if f.kind == "drain" or f.target == "agent"}
        assert len(gone) < case.nodes, case
        assert len(case.injected) + len(case.own) == len(case.faults), case


def test_the_text_of_a_fault_is_parsed() -> None:
    text = "cut node=1 peer=2 step=3 microbatch=4 duration=9 both=1"
    assert parse_outer(text) == OuterFault(
        kind="cut", node="node1", peer="node2", step=3, microbatch=4, duration_s=9.0, both=True
    )
    assert parse_outer("oom node=0 target=agent step=2 phase=recovery") == OuterFault(
        kind="oom", node="node0", target="agent", step=2, recovery=True
    )


# ---- judgement ----


def case(*faults: str, every: int = 4) -> Case:
    return Case(
        seed=0, place="machine", model="linear", nodes=3, joins=0, flags=(),
        checkpoint_every=every, faults=faults,
    )  # fmt: skip


def plan(text: str, at: float) -> dict[str, Any]:
    return {"at": at, "kind": "plan", "text": text}


def finished(**changes: Any) -> Finished:
    one = case()
    summary = {"params_sha256": "good", "steps": one.steps, "reason": "all steps done"}
    ledger = {"double": 0, "missing": 0, "proved": one.steps}
    whole = Finished(
        case=one, code=0, summary={**summary, "ledger": ledger},
        events=[plan(PLAN, 1.0), {"at": 2.0, "kind": "protected", "epoch": 1}],
        destroyed=[], fired=("kill node=0 step=3",), checkpoints=dict.fromkeys(one.due, "good"),
        agent_codes={"node0": 0, "node1": 0},
    )  # fmt: skip
    return replace(whole, **changes)


BOTH = [(3.0, "node1"), (3.1, "node2")]
LOST = {"at": 3.0, "kind": "lost", "node": "node2", "why": "silent"}
JOINED = {"at": 0.5, "kind": "joined", "node": "node0"}
DRAINED = {"at": 3.0, "kind": "drained", "node": "node0"}
RETURN = {"at": 3.0, "kind": "lost-steps", "why": "layer 1"}


def lacking(step: int, *, named: bool, **changes: Any) -> Finished:
    run = finished(**changes)
    events = run.events
    if named:
        events = [*events, {"at": 4.0, "kind": "checkpoint-lost", "step": step, "why": "no room"}]
    left = {due: sha for due, sha in run.checkpoints.items() if due != step}
    return replace(run, checkpoints=left, events=events)


CUT = [Injection(parse_outer("partition node=0 duration=4"), 3.0)]
FULL = [Injection(parse_outer("full disk=checkpoints step=3"), 3.0)]


@pytest.mark.parametrize(
    ("run", "outcome", "why"),
    [
        (finished(), RIGHT, ""),
        (finished(fired=()), IDLE, "no fault"),
        (finished(events=[*finished().events, LOST]), FAILED, "no fault explains it: node2"),
        (finished(events=[*finished().events, LOST], destroyed=[(2.9, "node2")]), RIGHT, ""),
        (finished(summary={**finished().summary, "params_sha256": "bad"}), FAILED, "parameters"),
        (finished(summary={**finished().summary, "steps": 59}), FAILED, "59 steps"),
        (finished(code=1), FAILED, "exit code 1"),
        (finished(code=None), FAILED, "did not end"),
        (finished(processes=("python",)), FAILED, "processes are left"),
        (finished(files=("/dev/shm/elastic-x",)), FAILED, "files are left"),
        (finished(agent_codes={"node0": None}), FAILED, "node0"),
        (finished(agent_codes={"node0": 1}), FAILED, "agent of node0 ended with exit code 1"),
        (finished(agent_codes={"node0": 4}), FAILED, "exit code 4"),
        (finished(agent_codes={"node0": 4}, events=[*finished().events, DRAINED]), RIGHT, ""),
        (finished(agent_codes={"node3": 143}), RIGHT, ""),  # it began too late
        (finished(agent_codes={"node0": 143}, events=[*finished().events, JOINED]), FAILED, "143"),
        (finished(agent_codes={"node0": 137}), FAILED, "exit code 137"),
        (finished(agent_codes={"node0": 137}, destroyed=[(3.0, "node0")]), RIGHT, ""),
        (finished(agent_codes={"node0": None}, injections=CUT), RIGHT, ""),
        (lacking(8, named=False), FAILED, "no event names it"),
        (lacking(8, named=True), FAILED, "was given up"),
        (lacking(8, named=True, injections=FULL), RIGHT, ""),
        (lacking(60, named=True, injections=FULL), FAILED, "last step"),
        (finished(damaged=("step-00000008: x",)), FAILED, "checkpoints are damaged"),
        (finished(checkpoints={**finished().checkpoints, 60: "bad"}), FAILED, "other parameters"),
        (finished(events=[*finished().events, RETURN]), FAILED, "without need"),
        (finished(events=[*finished().events, RETURN], destroyed=BOTH), RIGHT, "1 returns"),
        (finished(code=3), FAILED, "copies of every layer were left"),
        (finished(code=3, destroyed=BOTH), FAILED, "there is a checkpoint"),
        (finished(code=3, destroyed=BOTH, checkpoints={}), REFUSED, "layers [2]"),
    ],
)
def test_the_outcome_of_a_run(run: Finished, outcome: str, why: str) -> None:
    found = judge(run, "good")
    assert found.outcome == outcome, found
    assert why in found.why


FILLED = [Injection(parse_outer("full disk=run duration=4"), 20.0)]
REPLAY = PLAN.replace("stream+snapshot", "stream+replay:4")


@pytest.mark.parametrize(
    ("changes", "given_up", "excused"),
    [
        ({"destroyed": [(29.0, "node1")]}, 33.0, True),
        ({"destroyed": [(32.0, "node1")]}, 33.0, True),
        ({"destroyed": [(20.0, "node1")]}, 33.0, False),
        ({"destroyed": [(34.0, "node1")]}, 33.0, False),
        ({"destroyed": [(60.0, "node1")]}, 61.0, False),
        ({"destroyed": [(20.0, "node1")], "fired": ("pause-coordinator",)}, 33.0, True),
        ({"injections": FILLED}, 33.0, False),
        ({"injections": [replace(FILLED[0], at=25.0)]}, 33.0, True),
        ({"injections": [replace(FILLED[0], at=40.0)]}, 50.0, True),
        ({"injections": [replace(FILLED[0], at=40.0)]}, 33.0, False),
        ({"injections": [replace(FILLED[0], at=25.0, note="not possible")]}, 33.0, False),
    ],
)
def test_a_checkpoint_may_be_given_up_by_a_fault_of_its_time(
    changes: Any, given_up: float, excused: bool
) -> None:
    """The step before the checkpoint is finished at 30 s."""
    run = finished(
        events=[
            plan(REPLAY, 1.0),
            {"at": 30.0, "kind": "step", "step": 7},
            {"at": given_up, "kind": "checkpoint-lost", "step": 8, "why": "x"},
        ],
        **changes,
    )
    del run.checkpoints[8]
    assert judge(run, "good").outcome == (RIGHT if excused else FAILED)


@pytest.mark.parametrize(
    "fault",
    [
        "kill node=2 step=50",
        "kill-worker node=2",
        "stop node=2",
        "slow node=2",
        "slow-link node=2",
        "corrupt node=2",
        "drain node=2",
        "oom node=2 target=worker",
        "cut node=2 peer=1",
        "cut node=1 peer=2",
    ],
)
def test_a_fault_that_neither_destroys_nor_silences_a_node_explains_no_loss(
    fault: str, tmp_path: Path
) -> None:
    """All but the first were carried out."""
    one = replace(case(fault), place="network")
    if not fault.startswith("kill node=2"):
        (tmp_path / "faults").mkdir()
        (tmp_path / "faults" / "0.fired").touch()
    done = [Injection(fault, 2.5) for fault in one.own]
    run = finished(
        case=one,
        events=[*finished().events, {**LOST, "at": time.time() + 1.0}],
        destroyed=destroyed_nodes(one, [tmp_path], done),
        partitions=partitions(one, [tmp_path], done),
        injections=done,
    )
    assert healthy_lost(run) == ["node2"]


def cut_off(at: float, seconds: float, node: str = "node2", dropped: bool = False) -> Partition:
    return Partition(at, at + seconds, node, dropped)


@pytest.mark.parametrize(
    ("changes", "excused"),
    [
        ({"destroyed": [(99.0, "node2")]}, True),
        ({"destroyed": [(101.0, "node2")]}, False),
        ({"destroyed": [(99.0, "node1")]}, False),
        ({"partitions": [cut_off(96.0, 4.0)]}, True),
        ({"partitions": [cut_off(96.0, 4.0, "node1")]}, False),
        ({"partitions": [cut_off(96.0, 2.0)]}, False),
        ({"partitions": [cut_off(96.0, 2.0), cut_off(98.2, 1.0)]}, True),
        ({"partitions": [cut_off(96.0, 2.0), cut_off(99.0, 1.0)]}, False),
        ({"partitions": [cut_off(96.0, 2.0, dropped=True)]}, True),
        ({"partitions": [cut_off(96.0, 1.0, dropped=True)]}, False),
        ({"partitions": [cut_off(101.0, 9.0)]}, False),
        ({"partitions": [cut_off(70.0, 9.0)]}, False),
    ],
)
def test_a_loss_is_explained_by_a_fault_of_its_time(changes: Any, excused: bool) -> None:
    """Node 2 is lost at 100 s. A node is lost after 3 s of silence."""
    run = finished(events=[*finished().events, {**LOST, "at": 100.0}], **changes)
    assert healthy_lost(run) == ([] if excused else ["node2"])


def test_partitions_of_both_places_are_found(tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "0.fired").touch()
    text = "partition node=1 duration=4"
    (muted,) = partitions(case(text), [tmp_path], [])
    assert (muted.node, muted.until - muted.at, muted.dropped) == ("node1", 4.0, False)
    pulled = replace(case(text, "partition node=coordinator"), place="network")
    done = [Injection(fault, 3.0) for fault in pulled.own]
    found = partitions(pulled, [], [*done, Injection(done[0].fault, 9.0, "not possible")])
    assert Partition(3.0, 7.0, "node1", True) in found and len(found) == 2


def test_a_checkpoint_counts_only_if_all_its_files_can_be_read(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        whole(tmp_path, step)
    name = "layer-0001-tp-0-*.safetensors"
    (gone,), (flipped,) = ((tmp_path / f"step-0000000{step}").glob(name) for step in (4, 6))
    gone.unlink()
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    (tmp_path / "step-00000008").mkdir()
    (tmp_path / "step-00000008" / "manifest.json").write_text("{}")
    (tmp_path / "step-00000010.tmp").mkdir()
    found, damaged = read_checkpoints(tmp_path)
    assert list(found) == [2]
    names = [text.partition(":")[0] for text in damaged]
    assert names == ["step-00000004", "step-00000006", "step-00000008"]


def test_copies_are_lost_with_their_last_holder() -> None:
    def lost(*destroyed: tuple[float, str], text: str = PLAN, more: Any = ()) -> str:
        events = [plan(text, 1.0), {"at": 2.0, "kind": "protected", "epoch": 1}, *more]
        return layers_lost(finished(events=events, destroyed=list(destroyed)))

    assert not lost((3.0, "node1"))
    assert "layers [2]" in lost((3.0, "node1"), (4.0, "node2"))
    assert "layers [3]" in lost((3.0, "node0"), (4.0, "node2"))
    newer = (plan(NEXT, 3.5), {"at": 3.8, "kind": "protected", "epoch": 2})
    assert not lost((3.0, "node1"), more=newer)
    assert "epoch 2" in lost((3.0, "node1"), (4.0, "node2"), (4.1, "node0"), more=newer)
    assert not lost((3.0, "node0"), (4.0, "node2"), text=REPLICAS)
    assert "layers [0, 1, 2, 3]" in lost((3.0, "node0"), (4.0, "node1"), text=REPLICAS)
    refused = ({"at": 2.5, "kind": "backup-short"},)
    assert "layers [2]" in lost((3.0, "node1"), more=refused)
    wrong = finished(destroyed=[(3.0, "node1")], corrupted=[2.5])
    assert "layers [2]" in layers_lost(wrong)


@pytest.mark.parametrize(("at", "whole_again"), [(2.5, True), (3.2, False), (4.5, False)])
@pytest.mark.parametrize("kind", ["backup-short", "copy-corrupt", "corrupt"])
def test_copies_at_peers_count_again_after_a_newer_plan(
    kind: str, at: float, whole_again: bool
) -> None:
    """A newer plan is protected although first copies of it are refused: workers wait for two
    updates only."""
    newer = [plan(PLAN.replace("epoch=1", "epoch=2"), 3.0)]
    newer += [{"at": 4.0, "kind": "protected", "epoch": 2}]
    events, corrupted = [*finished().events, *newer], [at] if kind == "corrupt" else []
    if not corrupted:
        events.append({"at": at, "kind": kind})
    run = finished(events=events, corrupted=corrupted, destroyed=[(100.0, "node1")])
    assert bool(layers_lost(run)) is not whole_again


def test_a_job_with_a_checkpoint_does_not_wait_for_the_copies_of_a_node_that_is_cut_off() -> None:
    """Its keeper was killed. A node that is lost without a fault excuses nothing."""
    lost = {**LOST, "at": 6.5}
    events = [*finished().events, lost, {**RETURN, "at": 6.6}]
    killed = [(3.0, "node1")]
    cut = [Partition(3.0, 8.0, "node2", False)]
    assert judge(finished(events=events, destroyed=killed, partitions=cut), "good").outcome == RIGHT
    alone = judge(finished(events=events, destroyed=killed), "good")
    assert alone.outcome == FAILED and "without need" in alone.why


def test_a_node_that_joins_again_keeps_the_copies_of_later_plans() -> None:
    joined = {"at": 3.2, "kind": "joined", "node": "node1"}
    later = [plan(PLAN.replace("epoch=1", "epoch=2"), 3.5)]
    later += [{"at": 3.8, "kind": "protected", "epoch": 2}]
    run = finished(
        events=[*finished().events, joined, *later],
        destroyed=[(3.0, "node1"), (4.0, "node2")],
    )
    assert not layers_lost(run)


def test_a_newer_plan_whose_copies_are_not_whole_keeps_the_older_ones() -> None:
    events = [*finished().events, plan(NEXT, 3.5)]
    run = finished(events=events, destroyed=[(3.0, "node1"), (4.0, "node0")])
    assert "layers [0, 1] of epoch 1" in layers_lost(run)


# ---- results ----


def test_the_two_kinds_of_partitions_are_counted_apart() -> None:
    """On one machine an agent is mute, and no packet is lost."""
    cut = "partition node=1 step=3 duration=4"
    runs = [
        {"outcome": RIGHT, "place": place, "fired": fired, "healthy_lost": (), "recoveries": 0}
        for place, fired in (("machine", (cut, "kill node=2")), ("machine", (cut,)))
    ]
    runs.append({**runs[0], "place": "network"})
    found = {row.metric: row.value for row in rows(runs) if row.metric.startswith("faults")}
    assert found == {
        "faults: kill": 2,
        "faults: partition, agent muted": 2,
        "faults: partition, cable pulled": 1,
    }


# ---- real runs ----


@pytest.mark.slow
@pytest.mark.parametrize("place", ["machine", pytest.param("network", marks=pytest.mark.chaos)])
def test_a_run_of_each_place(place: str, tmp_path: Path) -> None:
    why = missing() or next(
        (text for text in map(unsupported, random_case(SEEDS[place]).own) if text), ""
    )
    if why:
        pytest.skip(why)
    assert random_case(SEEDS[place]).place == place
    command = [sys.executable, "-m", "benchmarks.chaos", "--seed", str(SEEDS[place])]
    command += ["--runs", "1", "--json", str(tmp_path / "found.json"), "--keep", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    (run,) = found["runs"]
    assert run["outcome"] == RIGHT and len(run["fired"]) == len(run["faults"]), run
    assert run["command"].endswith(f"--seed {SEEDS[place]}")
    rows = {row["metric"]: row["value"] for row in found["rows"]}
    assert rows["runs"] == rows["runs with the right result"] == 1
    assert rows["runs that failed"] == 0


SEEDS = {"machine": 1516, "network": 3369}
"""Small cases."""
