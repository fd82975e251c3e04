"""The wait for the last checkpoint: disks that hang are reported, and end the job at last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.coordinator.queries import status
from elastic.core.job import quarantine
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain import codec
from tests.core.coordinator.test_transitions import entries
from tests.core.job.test_checkpoints import pipeline, slots_of
from tests.core.policy.test_progress_watchdog import NODES, Bench
from tests.core.recovery.copies import state as copy_of
from tests.core.state_access import assignment_of, change_of, spec_of

DISK_S, RETURN_S = 3.0, 40.0
"""`Timeouts.disk_s` and `Timeouts.return_s` of these jobs, short for a fast test."""


def finishing(*writers: str) -> Bench:
    """All steps are done. The parts of the last checkpoint that `writers` write are on disk."""
    state = pipeline()
    limits = replace(state.limits, disk_s=DISK_S, return_s=RETURN_S)
    state = state.of(timeouts=limits)
    bench = Bench(state.of(spec=replace(spec_of(state), checkpoint_every=100), start_s=0.5))
    for node in writers:
        write(bench, node)
    for node in sorted(state.members, reverse=True):
        done = m.Finished(400, "sha" if node == "node0" else "")
        bench.report(node, phase=NodePhase.FINISHED, finished=done)
    return bench


def write(bench: Bench, node: str) -> tuple[job.JobAction, ...]:
    """The part of the node is on disk."""
    return bench.apply(m.CheckpointPart(400, slots_of(bench.state, node), 1, node))


def install(bench: Bench) -> None:
    """All nodes enter the new epoch, and have nothing left to train."""
    for node in NODES:
        layers = [layer for layer, _ in slots_of(bench.state, node)]
        copies = tuple(copy_of(layer, 400, node, epoch=1) for layer in layers)
        halted = (m.Halted(bench.state.epoch, 400),)
        phase, epoch = NodePhase.HALTED, bench.state.epoch
        bench.report(node, phase=phase, epoch=epoch, inventory=copies, halted=halted)
    assert assignment_of(bench.state).step == 400
    epoch = bench.state.epoch
    for node in bench.state.members:
        done = m.Finished(400, "sha" if node == "node0" else "")
        bench.report(node, phase=NodePhase.FINISHED, epoch=epoch, finished=done, protected=epoch)
    assert bench.state.phase is JobPhase.RUNNING


def attention(bench: Bench) -> str:
    return str(status(bench.state)["attention"])


def late(bench: Bench) -> list[Any]:
    return entries(tuple(bench.actions), "checkpoint-late")


def test_a_hanging_commit_is_shown_and_nobody_is_blamed() -> None:
    """The disk of the coordinator does not answer."""
    bench = finishing(*NODES)
    assert job.CommitCheckpoint(400) in bench.actions
    bench.wait(3 * RETURN_S)
    assert bench.state.phase is JobPhase.RUNNING and not bench.kinds("stalled")
    assert "the checkpoint of step 400 waits for its commit for 120 s" in attention(bench)


def test_the_wait_for_a_disk_is_reported_once() -> None:
    bench = finishing("node0", "node2")
    bench.wait(DISK_S - 1.0)
    assert not late(bench) and not attention(bench)
    bench.wait(20.0)
    (event,) = late(bench)
    assert event["step"] == 400 and event["patience_s"] == RETURN_S
    assert event["why"].startswith("node1 has written no part for 3 s")
    text = attention(bench)
    assert "node1 has written no part for 22 s" in text
    assert "the job ends when they are on disk; if not, others write them in 18 s" in text


def test_progress_of_a_node_that_has_not_written_is_no_wait() -> None:
    bench = finishing("node0", "node2")
    bench.wait(RETURN_S + 10.0, "node1")
    assert bench.state.epoch == 1 and not late(bench) and not attention(bench)


@pytest.mark.parametrize(("writers", "left_out"), [(NODES[::2], ["node1"]), (NODES[:1], [])])
def test_others_write_unless_most_nodes_do_not(
    writers: tuple[str, ...], left_out: list[str]
) -> None:
    """Most of the nodes may use the same disk."""
    bench = finishing(*writers)
    bench.wait(RETURN_S - 5.0)
    assert bench.state.epoch == 1
    bench.wait(6.0)
    assert bench.state.epoch == 2
    (cause,) = change_of(bench.state).causes
    assert cause.nodes == tuple(node for node in NODES if node not in writers)
    assert "written no part for 40 s, a disk may hang" in cause.text
    assert [node for node in NODES if quarantine.is_quarantined(bench.state, node)] == left_out


@pytest.mark.parametrize("writers", [(), NODES[:1]])
def test_a_disk_that_never_answers_ends_the_job_after_one_more_epoch(
    writers: tuple[str, ...],
) -> None:
    bench = finishing(*writers)
    bench.wait(RETURN_S + 1.0)
    install(bench)
    bench.wait(RETURN_S - 5.0)
    assert "the job ends with an error in" in attention(bench)
    bench.wait(6.0)
    end = bench.state.ending
    assert end is not None and end.code == 1 and bench.state.epoch == 2
    waiting = " ".join(node for node in NODES if node not in writers)
    assert f"step could not be written: {waiting} have written no part for 40 s" in end.reason


@pytest.mark.parametrize("epoch", [1, 2])
def test_the_job_ends_as_soon_as_the_disk_answers(epoch: int) -> None:
    """The parts are of the first epoch, in which the disk began to hang."""
    bench = finishing()
    bench.wait(20.0)
    if epoch == 2:
        bench.wait(RETURN_S)
        install(bench)
        bench.wait(20.0)
    for node in NODES:
        write(bench, node)
    assert job.CommitCheckpoint(400) in bench.actions
    bench.apply(job.CheckpointCommitted("/c/400", 400))
    end = bench.state.ending
    assert end is not None and end.code == 0, end


def test_each_part_begins_the_wait_anew() -> None:
    bench = finishing()
    for node in NODES[:2]:
        bench.wait(RETURN_S - 10.0)
        write(bench, node)
    bench.wait(RETURN_S - 10.0)
    assert bench.state.epoch == 1 and len(late(bench)) == 3


@pytest.mark.parametrize("disturbed", ["late", "held", "failover"])
def test_the_wait_does_not_count_while_the_coordinator_cannot_act(disturbed: str) -> None:
    bench = finishing()
    bench.wait(RETURN_S - 10.0)
    match disturbed:
        case "late":
            bench.apply(job.Tick(30.0), 30.0)
        case "held":
            bench.held = True
            bench.wait(30.0)
            bench.held = False
        case "failover":
            bench.apply(job.CoordinatorFailover())
            for node in NODES:
                bench.report(node)
            bench.wait(30.0)
    assert bench.state.epoch == 1 and bench.state.phase is JobPhase.RUNNING


def test_a_node_that_was_left_out_does_not_join_again() -> None:
    """Its quarantine is over before the others have written."""
    bench = finishing("node0", "node2")
    bench.wait(RETURN_S + 1.0)
    install(bench)
    bench.wait(35.0)
    assert not quarantine.is_quarantined(bench.state, "node1")
    assert bench.state.epoch == 2 and not bench.state.joining


def test_the_wait_is_saved_with_the_state() -> None:
    bench = finishing()
    bench.wait(30.0)
    state = bench.state
    assert state.watch.final is not None and state.watch.final.reported
    assert codec.loads(job.JobState, codec.dumps(state)) == state
