"""A job that lacks copies waits for nodes that may have them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from elastic.core.coordinator.authorization import check_message
from elastic.core.coordinator.transitions import transition
from elastic.core.job import absent_nodes
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState, LogEntry, Send
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.core.recovery.lineage import with_start
from elastic.domain.errors import EXIT_UNRECOVERABLE, Unrecoverable
from tests.core.state_access import assignment_of, change_of, plan_of, spec_of
from tests.core.world.world import World

Told = tuple[job.JobAction, ...]


@functools.cache
def world() -> World:
    """Three nodes train one pipeline; each layer is on one of them and its peer."""
    found = World(5, 3, steps=400, shape="1", backup="stream+snapshot")
    found.run(limit=4.0)
    return found


def running() -> JobState:
    state = world().coordinator.state
    assert state.phase is JobPhase.RUNNING and len(plan_of(state).pipelines) == 1
    assert state.trimmed == state.epoch == 1 and len(plan_of(state).nodes()) == 3
    return state.of(start_s=3600.0)


def lose(state: JobState, *nodes: str, proven: bool) -> tuple[JobState, Told]:
    """The nodes are silent until they are lost, or their agents end."""
    told: Told = ()
    if proven:
        for node in nodes:
            incarnation = state.members[node].report.info.incarnation
            for event in (job.ConnectionClosed, job.PortRefused):
                state, actions, _ = transition(state, event(node, incarnation), state.updated_at)
                told += actions
        return state, told
    while set(nodes) & state.members.keys():
        here = [mb for node, mb in state.members.items() if node not in nodes]
        beats = tuple(
            job.Heartbeat(mb.node, mb.report.info.incarnation, mb.report.step, 0) for mb in here
        )
        state, actions, _ = transition(state, job.Heartbeats(beats), state.updated_at + 0.4)
        told += actions
    return state, told


def halted(state: JobState, node: str) -> tuple[JobState, Told]:
    report = replace(
        state.members[node].report,
        phase=NodePhase.HALTED,
        epoch=state.epoch,
        inventory=world().agents[node].inventory(),
        halted=(m.Halted(state.epoch, -1),),
    )
    state, actions, _ = transition(state, report, state.updated_at + 0.01)
    return state, actions


def returning(state: JobState, node: str) -> m.NodeReport:
    """First report of a node that was fenced and kept its vault."""
    former = running().members[node].report.info
    info = replace(former, incarnation=f"{former.incarnation}-again")
    return m.NodeReport(info, NodePhase.EMPTY, 0, inventory=world().agents[node].inventory())


def entries(actions: Told, kind: str) -> list[dict[str, Any]]:
    return [a.data for a in actions if isinstance(a, LogEntry) and a.kind == kind]


def waiting() -> JobState:
    """node1 and node2 are lost without proof, and node0 alone lacks layers."""
    state, told = lose(running(), "node1", "node2", proven=False)
    assert entries(told, "doubt"), "the coordinator suspected itself first"
    assert {node for node, _ in state.absent} == {"node1", "node2"}
    state, actions = halted(state, "node0")
    assert state.phase is JobPhase.PAUSED and state.missing is not None
    (paused,) = entries(actions, "paused")
    assert "no copy of state" in paused["why"] and "waiting for node1 node2" in paused["why"]
    return state


def test_a_job_waits_for_a_majority_without_a_limit_and_without_new_epochs() -> None:
    state = waiting()
    epoch = state.epoch
    for _ in range(100):
        beat = job.Heartbeat("node0", state.members["node0"].report.info.incarnation, 0, 0)
        for event in (beat, job.Tick()):
            state, actions, _ = transition(state, event, state.updated_at + 0.4)
            assert not actions
    state = state.of(updated_at=state.updated_at + 1e5)
    state, actions, _ = transition(state, job.Tick(), state.updated_at)
    assert state.phase is JobPhase.PAUSED and state.epoch == epoch


def crashing(state: JobState, *nodes: str, times: int) -> JobState:
    """The agents of the nodes have given up: their workers crashed too often."""
    for node in nodes:
        was = state.members[node].report
        failed = replace(was, phase=NodePhase.FAILED, elastic=True, able=False, cause="signal 11")
        failed = replace(failed, crash_count=was.crash_count + times)
        state, _, _ = transition(state, failed, state.updated_at + 0.01)
    return state


def later(state: JobState, seconds: float) -> JobState:
    """The members are heard for so long, and nothing else happens."""
    at = state.updated_at + seconds
    members = {node: replace(mb, seen=at) for node, mb in state.members.items()}
    state, _, _ = transition(state.of(updated_at=at, members=members), job.Tick(), at)
    return state


@pytest.mark.parametrize("times", [1, 4])
def test_crashes_on_all_other_nodes_do_not_end_a_job_whose_majority_is_absent(times: int) -> None:
    state, _ = lose(running(), "node1", "node2", proven=False)
    state = later(crashing(state, "node0", times=times), 1e5)
    assert state.ending is None, state.ending


def test_crashes_on_all_nodes_end_the_job_after_the_wait_for_absent_nodes() -> None:
    state, _ = lose(running(), "node2", proven=False)
    state = later(crashing(state, "node0", "node1", times=1), state.limits.return_s - 1.0)
    assert state.ending is None, state.ending
    state = later(state, 2.0)
    assert state.ending is not None and "crash on every node" in state.ending.reason
    state, _ = lose(running(), "node2", proven=True)
    state = crashing(state, "node0", "node1", times=1)
    assert state.ending is not None and "signal 11" in state.ending.reason


def test_the_copies_of_a_node_that_returns_are_used() -> None:
    """With node1, every layer is in a vault again. Nothing is lost but the step that ran."""
    state = waiting()
    before = max(copy.step for copy in world().agents["node1"].inventory())
    state, actions, _ = transition(state, returning(state, "node1"), state.updated_at + 0.1)
    assert state.phase is JobPhase.HALTING and "node1" not in dict(state.absent)
    halts = [a.node for a in actions if isinstance(a, Send) and isinstance(a.message, m.Halt)]
    assert sorted(halts) == ["node0", "node1"]
    report = replace(returning(state, "node1"), epoch=state.epoch, phase=NodePhase.STARTING)
    state, _, _ = transition(state, report, state.updated_at + 0.01)
    state, _ = halted(state, "node0")
    assert state.phase is JobPhase.INSTALLING and state.missing is None
    assert before - 1 <= assignment_of(state).step <= before
    used = {copy.node for _, r in assignment_of(state).recipes for copy in r.states}
    assert "node1" in used, "its vault is a source"


@pytest.mark.parametrize("undone", [False, True])
def test_copies_of_steps_that_were_undone_are_not_used(undone: bool) -> None:
    """Since node1 was cut off in epoch 1, another epoch began: at the version that its copies give,
    or two steps before. Then its states and gradients are of another history."""
    state = waiting()
    version = assignment_of(restored(state)).step
    first = version - 2 if undone else version
    after = restored(state.of(starts=with_start(state.starts, state.epoch, first)))
    if undone:
        assert after.phase is JobPhase.PAUSED and after.missing is not None
        assert "no copy of state" in after.missing.error
    else:
        assert after.phase is JobPhase.INSTALLING and assignment_of(after).step == version


def restored(state: JobState) -> JobState:
    """node1 returns, and all nodes halt."""
    state, _, _ = transition(state, returning(state, "node1"), state.updated_at + 0.1)
    report = replace(returning(state, "node1"), epoch=state.epoch, phase=NodePhase.STARTING)
    state, _, _ = transition(state, report, state.updated_at + 0.01)
    return halted(state, "node0")[0]


def test_the_copies_of_absent_nodes_do_not_matter_once_the_rest_is_protected() -> None:
    state = running().of(absent=(("node7", 1.0),), trimmed=0)
    state, actions, _ = transition(state, job.Tick(), state.updated_at + 0.05)
    assert entries(actions, "protected") and state.absent == ()


def test_a_job_whose_nodes_have_ended_fails_at_once() -> None:
    """Their ports refused connections: nobody will bring the copies back."""
    state, _ = lose(running(), "node1", "node2", proven=True)
    assert state.absent == ()
    state, actions = halted(state, "node0")
    assert state.phase is JobPhase.FAILED
    (finish,) = [a for a in actions if isinstance(a, job.JobFinished)]
    assert finish.code == EXIT_UNRECOVERABLE and "no copy of state" in finish.reason


@pytest.mark.parametrize(("absent", "members"), [(1, 3), (1, 1), (2, 3)])
def test_a_job_waits_for_a_minority_for_a_while(absent: int, members: int) -> None:
    names = tuple(f"lost{number}" for number in range(absent))
    state = running()
    present = dict(list(state.members.items())[:members])
    state = state.of(
        members=present,
        absent=tuple((name, 4.0) for name in names),
        change=change_of(waiting()),
    )
    error = Unrecoverable("no copy of state 3 is left")
    now = state.updated_at
    state, actions, _ = absent_nodes.wait_or_fail(state, change_of(state), error, now)
    assert state.phase is JobPhase.PAUSED and entries(actions, "paused")
    assert absent_nodes.end_if_hopeless(state, now + state.limits.return_s - 1) is None
    ended = absent_nodes.end_if_hopeless(state, now + state.limits.return_s + 1)
    assert ended is not None and ended[0].phase is JobPhase.FAILED
    (finish,) = [a for a in ended[1] if isinstance(a, job.JobFinished)]
    assert finish.code == EXIT_UNRECOVERABLE and "no node returned within 60" in finish.reason


def test_a_second_wait_continues_the_first() -> None:
    state = waiting()
    assert state.missing is not None
    since, error = state.missing.since, Unrecoverable("still")
    again, _, _ = absent_nodes.wait_or_fail(state, change_of(state), error, since + 50.0)
    assert again.missing is not None and again.missing.since == since


def test_a_majority_that_returns_one_by_one_is_waited_for() -> None:
    """The wait for a majority has no limit; that for the rest begins when the first one is back."""
    state = waiting()
    assert state.missing is not None and state.missing.count == 3
    later = state.updated_at + 2 * state.limits.return_s
    error = Unrecoverable("no copy of state 3 is left")
    back = replace(state.members["node0"], rank=7)
    state = absent_nodes.with_returned(state, "node1")
    state = state.of(members={**state.members, "node1": back})
    state, actions, _ = absent_nodes.wait_or_fail(state, change_of(state), error, later)
    assert state.phase is JobPhase.PAUSED and entries(actions, "paused")
    assert absent_nodes.end_if_hopeless(state, later + state.limits.return_s - 1) is None
    assert absent_nodes.end_if_hopeless(state, later + state.limits.return_s + 1) is not None


def test_a_new_node_does_not_shorten_the_wait_for_a_majority() -> None:
    state = waiting()
    joined = {f"new{n}": replace(state.members["node0"], rank=n) for n in range(4)}
    state = state.of(members={**state.members, **joined})
    assert absent_nodes.end_if_hopeless(state, state.updated_at + 1e6) is None


def test_a_member_that_joins_a_protected_job_drops_its_old_copies() -> None:
    state, _ = lose(running(), "node1", proven=False)
    state = running().of(members={n: mb for n, mb in running().members.items() if n != "node1"})
    state = state.of(plan=replace(plan_of(state)), phase=JobPhase.RUNNING)
    _, actions, _ = transition(state, returning(state, "node1"), state.updated_at + 0.01)
    trims = [a for a in actions if isinstance(a, Send) and isinstance(a.message, m.Trim)]
    assert [(send.node, send.message.epoch) for send in trims] == [("node1", state.epoch)]


def test_a_healthy_majority_of_a_large_job_is_waited_for() -> None:
    """600 of 1000 nodes are cut off."""
    state = waiting()
    members = {f"here{n}": replace(state.members["node0"], rank=n) for n in range(400)}
    state = state.of(members=members, absent=(), missing=None)
    for number in range(600):
        state = absent_nodes.with_absent(state, f"lost{number}", state.updated_at)
    error, now = Unrecoverable("no copy of state 3 is left"), state.updated_at
    state, actions, _ = absent_nodes.wait_or_fail(state, change_of(state), error, now)
    assert absent_nodes.end_if_hopeless(state, now + 1e6) is None
    back = {**members, "lost0": state.members["here0"]}
    assert absent_nodes.returned_nodes(state.of(members=back)) == ("lost0",)
    (paused,) = entries(actions, "paused")
    assert "lost15 and 584 more" in paused["why"]


def lacking() -> JobState:
    """Of five nodes, two are lost without proof; the others lack copies."""
    world = five()
    state = world.coordinator.state.of(start_s=3600.0)
    first = plan_of(state).nodes()[1]
    gone = (first, dict(plan_of(state).peers)[first])
    state, _ = lose(state, *gone, proven=False)
    state = halt_all(state)
    assert state.phase is JobPhase.PAUSED and state.missing is not None
    assert len(state.members) == 3 and len(state.missing.nodes) == 2
    return state


@functools.cache
def five() -> World:
    found = World(5, 5, steps=400, shape="1", backup="stream+snapshot")
    found.run(limit=5.0)
    assert found.coordinator.state.phase is JobPhase.RUNNING
    return found


def halt_all(state: JobState) -> JobState:
    for node in tuple(state.members):
        report = replace(
            state.members[node].report,
            phase=NodePhase.HALTED,
            epoch=state.epoch,
            inventory=five().agents[node].inventory(),
            halted=(m.Halted(state.epoch, -1),),
        )
        state, _, _ = transition(state, report, state.updated_at + 0.01)
    return state


def beating(state: JobState, seconds: float) -> JobState:
    """Time passes with heartbeats."""
    until = state.updated_at + seconds
    while state.updated_at < until and state.ending is None:
        beats = tuple(
            job.Heartbeat(node, mb.report.info.incarnation, mb.report.step, 0)
            for node, mb in state.members.items()
        )
        state, _, _ = transition(state, job.Heartbeats(beats), state.updated_at + 0.4)
    return state


def test_time_without_a_coordinator_is_no_time_to_return() -> None:
    """The coordinator is suspended, or another one takes over much later."""
    state = lacking()
    for event in (job.Tick(), job.CoordinatorFailover()):
        later, _, _ = transition(state, event, state.updated_at + 900.0)
        assert later.phase is JobPhase.PAUSED
    later = beating(transition(state, job.Tick(), state.updated_at + 900.0)[0], 590.0)
    assert later.phase is JobPhase.PAUSED
    assert beating(later, 20.0).phase is JobPhase.FAILED


def test_after_a_failover_the_wait_does_not_end_before_nodes_can_report() -> None:
    state = beating(lacking(), 598.0)
    state, _, _ = transition(state, job.CoordinatorFailover(), state.updated_at + 0.1)
    for node in tuple(state.members):
        state, _, _ = transition(state, state.members[node].report, state.updated_at + 0.01)
    assert beating(state, state.limits.adopt_s + 1.5).phase is JobPhase.PAUSED
    assert beating(state, 10.0).phase is JobPhase.FAILED


def test_a_checkpoint_that_is_committed_ends_the_wait() -> None:
    state = lacking()
    event = job.CheckpointCommitted("/run/step-2", 2)
    state, actions, _ = transition(state, event, state.updated_at + 0.1)
    assert state.phase is JobPhase.HALTING
    (halt,) = entries(actions, "halt")
    assert halt["cause"] == "the checkpoint of step 2 came" and halt["cause_kind"] == "resume"
    state = halt_all(state)
    assert state.phase is JobPhase.INSTALLING
    assert all(recipe.checkpoint == "/run/step-2" for _, recipe in assignment_of(state).recipes)


def committing() -> JobState:
    """All files of a checkpoint are written, and then the only copies of a layer are lost."""
    state = five().coordinator.state.of(start_s=3600.0)
    slots = tuple((layer, 0) for layer in range(spec_of(state).n_layers))
    part = m.CheckpointPart(4, slots, state.epoch, "node0")
    state, actions, _ = transition(state, part, state.updated_at + 0.01)
    assert actions == (job.CommitCheckpoint(4),)
    first = plan_of(state).nodes()[1]
    state, _ = lose(state, first, dict(plan_of(state).peers)[first], proven=True)
    return halt_all(state)


def test_a_job_waits_for_a_checkpoint_that_is_being_committed() -> None:
    state = committing()
    assert state.phase is JobPhase.PAUSED and state.absent == ()
    state = beating(state, 5.0)
    event = job.CheckpointCommitted("/run/step-4", 4)
    state, _, _ = transition(state, event, state.updated_at + 0.1)
    assert halt_all(state).phase is JobPhase.INSTALLING


def test_a_job_does_not_wait_for_ever_for_a_commit() -> None:
    state = beating(committing(), 58.0)
    assert state.phase is JobPhase.PAUSED
    state = beating(state, 4.0)
    assert state.ending is not None and state.ending.code == EXIT_UNRECOVERABLE


def test_a_commit_that_fails_ends_the_wait() -> None:
    state = committing()
    event = job.CheckpointFailed(4, "OSError: no room")
    state, _, _ = transition(state, event, state.updated_at + 0.1)
    assert state.ending is not None and state.ending.code == EXIT_UNRECOVERABLE


@pytest.mark.parametrize("first", [True, False], ids=["before the others", "after the others"])
def test_nodes_that_the_saved_state_does_not_know_are_waited_for(first: bool) -> None:
    """The store lost the writes with which they joined. They are fenced and bring copies."""
    full = five().coordinator.state.of(start_s=3600.0)
    one = plan_of(full).nodes()[1]
    unknown = (one, dict(plan_of(full).peers)[one])
    members = {node: mb for node, mb in full.members.items() if node not in unknown}
    saved = full.of(members=members, epoch=full.epoch - 1, trimmed=full.epoch - 1)
    state, _, _ = transition(saved, job.CoordinatorFailover(), saved.updated_at + 0.5)
    order = (*unknown, *members) if first else (*members, *unknown)
    for node in order:
        assert check_message(state, node, full.members[node].report) is None
        state, actions, _ = transition(state, full.members[node].report, state.updated_at + 0.01)
        fenced = [a for a in actions if isinstance(a, Send) and isinstance(a.message, m.Fenced)]
        assert len(fenced) == (node in unknown)
        if node == order[len(members) - 1] and not first:
            state = halt_all(state)
            assert state.phase is JobPhase.PAUSED and not state.absent
    state = halt_all(state) if first else state
    assert state.phase is JobPhase.PAUSED and [node for node, _ in state.absent] == [*unknown]
    for node in unknown:
        info = replace(full.members[node].report.info, incarnation=f"{node}-again")
        copies = five().agents[node].inventory()
        report = m.NodeReport(info, NodePhase.EMPTY, 0, inventory=copies)
        state, _, _ = transition(state, report, state.updated_at + 0.01)
        assert state.phase is JobPhase.HALTING and node in state.members
