"""The coordinator's table: every phase with every event, and the main decisions with reasons.

The states come from simulated jobs (`tests.core.world.world`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic.core.coordinator.event_handlers import EVENT_HANDLERS
from elastic.core.coordinator.transitions import RULES, transition
from elastic.core.job import state as job
from elastic.core.job.state import (
    Cause,
    CauseKind,
    JobPhase,
    JobState,
    LogEntry,
    Send,
)
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import (
    CertificateEnd,
    DeviceHealth,
    DiskSpace,
    FailedOperation,
    HealthReport,
    LinkTraffic,
    UnreachablePeer,
)
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import NodeInfo, StepRecord
from tests.core.state_access import assignment_of, change_of, on_gpus, plan_of, spec_of
from tests.core.world.world import Fault, World


@functools.cache
def samples() -> dict[JobPhase, tuple[JobState, ...]]:
    """States of every phase, taken when the phase or the epoch had just begun."""
    found: dict[JobPhase, list[JobState]] = {phase: [] for phase in JobPhase}
    stories = (
        (1, 3, [Fault("kill", 2.0, 1), Fault("join", 0.9), Fault("drain", 3.0, 0, 30.0)]),
        (2, 2, [Fault("back", 3.2, 0, 1.0), Fault("back", 3.21, 1, 1.0)]),
        (3, 2, [Fault("crash", 2.0), Fault("coordinator-kill", 2.01)]),
    )
    for seed, nodes, faults in stories:
        world = World(seed, nodes)
        found[JobPhase.WAITING].append(world.coordinator.state)
        for fault in faults:
            world.inject(fault)
        world.run()
        for phase, states in world.coordinator.samples.items():
            found[phase] += states
    return {phase: tuple(states) for phase, states in found.items()}


def events(state: JobState) -> list[tuple[Any, float]]:
    """(event, delay in seconds) for every kind of event and its important values."""
    made: list[tuple[Any, float]] = [
        (job.Tick(), 0.05),
        (job.Tick(), 60.0),
        (job.CoordinatorFailover(), 5.0),
        (job.DrainRequested("nobody", 1.0), 0.1),
        (m.Notice("nobody", "x", m.NoticeKind.LEAVE, "aws", 1.0), 0.1),
        (job.Heartbeat("nobody", "x", 0, 0), 0.1),
        (job.Heartbeats((job.Heartbeat("nobody", "x", 0, 0),)), 0.1),
        (job.ConnectionClosed("nobody", "x"), 0.1),
        (job.PortRefused("nobody", "x"), 0.1),
        (m.StepDone(1, StepRecord(99, 1.0, 1.0, 1.0), 0.0, 0.1), 0.1),
        (m.CheckpointPart(2, ((0, 0), (1, 0))), 0.1),
        (m.CheckpointPart(2, tuple((layer, 0) for layer in range(4))), 0.1),
        (m.CheckpointPart(5, (), 1, "node0", "no space"), 0.1),
        (job.CheckpointCommitted("/c/step-2", 2), 0.1),
        (job.CheckpointFailed(2, "no space"), 0.1),
        (job.CertificatesRead((CertificateEnd("tls.crt", "CN=x", 0.0, "1970"),)), 0.1),
        (m.BackupNote("backup-short", "node0", "node1", "full"), 0.1),
        (HealthReport("nobody", "x", 0.0), 0.1),
        (m.AgentFailed("nobody", "x", "OSError: no room"), 0.1),
        (
            m.NodeReport(NodeInfo("new", "n.1", "new:1"), NodePhase.EMPTY, 0),
            0.1,
        ),
        (
            m.NodeReport(NodeInfo("old", "o.1", "old:1"), NodePhase.RUNNING, 3),
            0.1,
        ),
    ]
    for node, member in state.members.items():
        incarnation = member.report.info.incarnation
        made += [
            (job.Heartbeat(node, incarnation, 3, 1), 0.1),
            (job.Heartbeat(node, "former", 3, 1), 0.1),
            (
                job.Heartbeats(
                    (job.Heartbeat(node, incarnation, 3, 2), job.Heartbeat("nobody", "x", 0, 0))
                ),
                0.1,
            ),
            (job.ConnectionClosed(node, incarnation), 0.1),
            (job.ConnectionClosed(node, "former"), 0.1),
            (job.PortRefused(node, incarnation), 0.1),
            (job.DrainRequested(node, 0.5), 0.1),
            (job.DrainRequested(node, 60.0), 0.1),
            *((report, 0.1) for report in health_reports(node, incarnation, state)),
            (m.Notice(node, "former", m.NoticeKind.LEAVE, "aws", 60.0), 0.1),
        ]
        made += [(m.Notice(node, incarnation, kind, "aws", 60.0), 0.1) for kind in m.NoticeKind]
        made += [(m.Notice(node, incarnation, m.NoticeKind.LEAVE, "signal", 0.5, final=True), 0.1)]
        for phase in NodePhase:
            for epoch in sorted({0, max(state.epoch - 1, 0), state.epoch}):
                report = replace(
                    member.report, phase=phase, epoch=epoch, able=phase not in NOT_ABLE
                )
                made.append((report, 0.1))
                made.append((replace(report, failures=("VaultError: gone",)), 0.1))
                made.append((replace(report, suspects=("node1",)), 0.1))
        made.append((replace(member.report, failed=m.Failed("bad", 7)), 0.1))
        made.append((replace(member.report, failed=m.Failed("", 7)), 0.1))
        made.append((m.AgentFailed(node, incarnation, "OSError: no room"), 0.1))
        made.append((replace(member.report, finished=m.Finished(5, "sha")), 0.1))
    return made


def health_reports(node: str, incarnation: str, state: JobState) -> tuple[HealthReport, ...]:
    """Reports of a healthy node, of a node with every problem, and of a former member."""
    well = HealthReport(node, incarnation, state.updated_at, state.epoch)
    wrong = replace(
        well,
        at=0.0,
        memory_free_bytes=1,
        memory_total_bytes=1 << 30,
        disks=(DiskSpace("checkpoints", "/c", 0, 1 << 30, "own"),),
        devices=(DeviceHealth(0, "toy", 99.0, "too hot", 3, "XID 79"),),
        links=(LinkTraffic("node0", 4, 4 << 20, 4.0, 1e6),),
        failed_operations=(FailedOperation("checkpoint", "/c", "no space", 2),),
        unreachable=(UnreachablePeer("node0", "node0:1", 4.0, "timed out"),),
    )
    return well, wrong, replace(wrong, incarnation="former")


NOT_ABLE = (NodePhase.EMPTY, NodePhase.STARTING, NodePhase.FAILED)


def declared(before: JobState, actions: tuple[job.JobAction, ...]) -> JobPhase:
    """Last phase in the log entries. Each change must be in the table."""
    phase = before.phase
    for action in actions:
        if isinstance(action, LogEntry) and action.kind == "phase":
            following = JobPhase(action.data["phase"])
            assert following in RULES[phase][1], f"{phase} -> {following}"
            phase = following
    return phase


def causes_of(state: JobState, actions: tuple[job.JobAction, ...]) -> Iterator[str]:
    """The texts of causes, losses, pauses and ends that users read."""
    for action in actions:
        if isinstance(action, job.JobFinished):
            yield action.reason
        elif isinstance(action, job.ChangeCompleted):
            yield action.change.cause
        elif isinstance(action, LogEntry):
            yield from (str(action.data[key]) for key in ("cause", "why") if key in action.data)
    if state.change is not None:
        yield from (cause.text for cause in state.change.causes)


@pytest.mark.parametrize("phase", JobPhase)
def test_every_event_in_every_phase(phase: JobPhase) -> None:
    """No exception; only declared successors; a reason for each change; epochs only grow."""
    states = samples()[phase]
    assert states
    seen = set()
    for state in states[:4]:
        for event, later in events(state):
            after, actions, reason = transition(state, event, state.updated_at + later)
            seen.add(type(event))
            assert declared(state, actions) is after.phase
            assert after.epoch in (state.epoch, state.epoch + 1)
            if after.phase is not state.phase or after.epoch != state.epoch:
                assert reason
            for text in causes_of(after, actions):
                assert text.strip(": ;") and "?" not in text, text
            for action in actions:
                if isinstance(action, Send) and isinstance(action.message, m.Install):
                    assert action.message.epoch == after.epoch
    assert seen == {*EVENT_HANDLERS, job.Tick}


@pytest.mark.parametrize("phase", [p for p in JobPhase if p is not JobPhase.WAITING])
def test_a_former_incarnation_changes_nothing(phase: JobPhase) -> None:
    """Its reports and heartbeats have no effect, and it is fenced."""
    for state in samples()[phase][:4]:
        for node, member in state.members.items():
            info = replace(member.report.info, incarnation="former")
            for about in NodePhase:
                if about is NodePhase.EMPTY:
                    continue  # has nothing yet, and joins
                report = replace(
                    member.report, info=info, phase=about, suspects=("x",), epoch=state.epoch
                )
                after, actions, _ = transition(state, report, state.updated_at + 0.01)
                settled, plain, _ = transition(state, job.Tick(), state.updated_at + 0.01)
                assert after.of(crowd=settled.crowd) == settled
                told = [a for a in actions if a not in plain]
                assert [a.node for a in told if isinstance(a, Send)] == [node]
                assert any(isinstance(a, Send) and isinstance(a.message, m.Fenced) for a in told)


# ---- single decisions --------------------------------------------------------------------------


@functools.cache
def world() -> World:
    """Three nodes in the middle of a long job."""
    found = World(5, 3, steps=400)
    found.run(limit=4.0)
    return found


def running(*, gpus: bool = True) -> JobState:
    """Three nodes, one epoch, protected."""
    state = world().coordinator.state
    state = on_gpus(state) if gpus else state
    assert (
        state.phase is JobPhase.RUNNING
        and state.trimmed == state.epoch == 1
        and state.change is None
    )
    return state.of(
        start_s=3600.0
    )  # workers that crash are not waited for (tests/core/policy/test_restart_policy.py)


def sent(actions: tuple[job.JobAction, ...], kind: type) -> list[Any]:
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def entries(actions: tuple[job.JobAction, ...], kind: str) -> list[dict[str, Any]]:
    return [a.data for a in actions if isinstance(a, LogEntry) and a.kind == kind]


def send_report(
    state: JobState, node: str, **changes: Any
) -> tuple[JobState, tuple[job.JobAction, ...], str]:
    report = replace(state.members[node].report, **changes)
    return transition(state, report, state.updated_at + 0.01)


def halt(state: JobState, node: str, phase: NodePhase = NodePhase.HALTED) -> JobState:
    """The node has halted for the running change."""
    inventory = world().agents[node].inventory()
    return send_report(
        state, node, phase=phase, epoch=state.epoch, inventory=inventory, able=phase not in NOT_ABLE
    )[0]


def test_a_closed_connection_is_lost_when_its_port_refuses_connections() -> None:
    state = running()
    incarnation = state.members["node1"].report.info.incarnation
    state, actions, _ = transition(
        state, job.ConnectionClosed("node1", incarnation), state.updated_at
    )
    assert not sent(actions, m.Fenced)
    after, actions, _ = transition(state, job.Tick(), state.updated_at + 0.4)
    assert after.phase is JobPhase.RUNNING and not actions
    after, actions, reason = transition(
        state, job.PortRefused("node1", incarnation), state.updated_at + 0.01
    )
    why = "connection closed and its port refuses connections"
    assert f"node1 lost: {why}; epoch 2: node1 lost: {why}" in reason
    assert after.phase is JobPhase.HALTING and not change_of(after).boundary
    assert sent(actions, m.Halt) == [m.Halt(2)] * 2
    assert change_of(after).causes == (Cause(CauseKind.LOST, f"node1 lost: {why}", ("node1",)),)
    assert entries(actions, "lost") == [{"node": "node1", "loss": "closed", "why": why}]
    assert entries(actions, "halt") == [
        {
            "epoch": 2,
            "cause": f"node1 lost: {why}",
            "cause_kind": "lost",
            "cause_nodes": ["node1"],
            "boundary": False,
        }
    ]


def test_a_closed_and_accused_node_is_lost_soon() -> None:
    state = running()
    state, _, _ = transition(
        state,
        job.ConnectionClosed("node1", state.members["node1"].report.info.incarnation),
        state.updated_at,
    )
    state, _, reason = send_report(state, "node0", suspects=("node1",))
    assert "lost: " not in reason
    incarnation = state.members["node0"].report.info.incarnation
    beat = job.Heartbeat("node0", incarnation, 3, 1)
    for _ in range(2):
        state, _, reason = transition(state, beat, state.updated_at + 0.4)
        assert not reason, "no epoch begins before the evidence is complete"
    _after, _, reason = transition(state, beat, state.updated_at + 0.3)
    assert "node1 lost: connection closed and neighbours lost contact" in reason


def test_a_closed_and_accused_node_that_is_back_delays_no_epoch() -> None:
    state = running()
    report = state.members["node1"].report
    closed = job.ConnectionClosed("node1", report.info.incarnation)
    state, _, _ = transition(state, closed, state.updated_at)
    state, _, _ = send_report(state, "node0", suspects=("node1",))
    state, _, _ = transition(state, report, state.updated_at + 0.2)
    state, _, reason = transition(state, job.Tick(), state.updated_at + 0.4)
    assert reason == "epoch 2: contact lost with node1"


def test_an_accusation_alone_ends_the_epoch_but_loses_no_node() -> None:
    """Neighbours may be wrong, so the node stays a member."""
    state, _, reason = send_report(running(), "node0", suspects=("node1",))
    assert state.phase is JobPhase.RUNNING
    after, _, reason = transition(state, job.Tick(), state.updated_at + 0.3)
    assert after.phase is JobPhase.RUNNING
    after, _, reason = transition(after, job.Tick(), after.updated_at + 0.3)
    assert reason == "epoch 2: contact lost with node1" and "node1" in after.members


def test_an_error_without_a_suspect_ends_the_epoch_with_its_text() -> None:
    """The cause names the node and the error, and accuses nobody."""
    error = "VaultError: vault of node2 at h:1: TLS handshake failed"
    state, _, _ = send_report(running(), "node0", failures=(error,))
    for _ in range(2):
        state, _, reason = transition(state, job.Tick(), state.updated_at + 0.3)
    assert reason == f"epoch 2: node0: {error}"
    assert change_of(state).causes == (Cause(CauseKind.CONTACT, f"node0: {error}"),)


def test_silence_while_the_coordinator_does_not_run_is_excused() -> None:
    """A silent member is lost after its lease, without the time of the stall."""
    state = running()
    late, _, _ = transition(state, job.Tick(), state.updated_at + 30.0)
    assert late.phase is JobPhase.RUNNING
    lost = list[str]()
    for _ in range(10):
        late, actions, _ = transition(late, job.Tick(), late.updated_at + 0.4)
        lost += [note["loss"] for note in entries(actions, "lost")]
    assert late.phase is JobPhase.RUNNING and not lost and late.doubt_reported, "it hears nobody"
    first, *_ = send_report(state, "node0")
    held_up, _, _ = transition(state, first.members["node0"].report, state.updated_at + 30.0)
    assert held_up.members.keys() == state.members.keys(), (
        "the first event after the pause accuses nobody"
    )


def test_dead_workers_end_the_epoch() -> None:
    after, _, reason = send_report(
        running(), "node2", phase=NodePhase.STARTING, cause="worker 0 ended with signal -9"
    )
    assert reason == "node2: starting; epoch 2: node2: worker 0 ended with signal -9"
    assert change_of(after).lost == ("node2",)
    (cause,) = change_of(after).causes
    assert (cause.kind, cause.nodes) == (CauseKind.WORKER, ("node2",))


def test_workers_restarted_during_a_failover_end_the_epoch() -> None:
    """The node looks healthy but does not train."""
    _, _, reason = send_report(running(), "node2", phase=NodePhase.IDLE)
    assert "epoch 2: node2: workers were started anew" in reason


def test_install_waits_for_every_member() -> None:
    state, *_ = send_report(running(), "node2", phase=NodePhase.STARTING)
    state = halt(halt(state, "node0"), "node2", NodePhase.STARTING)
    assert state.phase is JobPhase.HALTING
    state, *_ = send_report(state, "node1", phase=NodePhase.HALTING, epoch=2)
    assert state.phase is JobPhase.HALTING, "halting is not halted"
    away, *_ = transition(
        state,
        job.ConnectionClosed("node0", state.members["node0"].report.info.incarnation),
        state.updated_at,
    )
    away = halt(away, "node1")
    assert away.phase is JobPhase.HALTING, "who is just away may be back at once"
    back, actions, reason = send_report(away, "node0")
    assert back.phase is JobPhase.INSTALLING and plan_of(back).nodes() == ("node0", "node1")
    assert sent(actions, m.Install) == [m.Install(2, assignment_of(back))] * 3
    assert "layers" in reason and assignment_of(back).recipes


def test_planned_changes_wait_for_the_boundary() -> None:
    state = running()
    after, actions, reason = transition(state, job.DrainRequested("node1", 60.0), state.updated_at)
    assert change_of(after).causes == (Cause(CauseKind.DRAIN, "drain node1", ("node1",)),)
    assert reason == "drain of node1 requested; epoch 2: drain node1"
    assert sent(actions, m.Halt) == [m.Halt(2, boundary=True)] * 3
    _hasty, actions, reason = transition(state, job.DrainRequested("node1", 1.0), state.updated_at)
    assert sent(actions, m.Halt) == [m.Halt(2)] * 3, "too little notice for the end of a step"


def test_a_fault_turns_a_planned_halt_into_an_immediate_one() -> None:
    state, *_ = transition(running(), job.DrainRequested("node1", 60.0), 4.0)
    after, actions, reason = send_report(state, "node0", phase=NodePhase.STARTING, cause="oops")
    assert (
        after.epoch == 3
        and sent(actions, m.Halt)[-3:] == [m.Halt(3)] * 3
        and "epoch 3: node0: oops" in reason
    )


def test_a_planned_halt_does_not_wait_beyond_the_notice() -> None:
    state = running()
    state, *_ = transition(state, job.DrainRequested("node1", 2.6), state.updated_at)
    assert change_of(state).boundary
    for _ in range(2):
        state, _actions, reason = transition(state, job.Tick(), state.updated_at + 0.35)
    assert (
        state.epoch == 3 and not change_of(state).boundary and "notice of node1 runs out" in reason
    )
    assert change_of(state).causes == (
        Cause(CauseKind.NOTICE, "notice of node1 runs out", ("node1",)),
    )


def test_a_spare_that_keeps_backups_is_replaced_before_it_leaves() -> None:
    """Otherwise its departure would be a loss in the middle of a step."""
    state = running()
    spare = replace(plan_of(state), peers=tuple((node, "node2") for node in ("node0", "node1")))
    first = replace(plan_of(state).pipelines[0], stages=tuple(
        replace(s, unit=replace(s.unit, node="node0")) if s.unit.node == "node2" else s
        for s in plan_of(state).pipelines[0].stages))  # fmt: skip
    rest = tuple(
        p for p in plan_of(state).pipelines[1:] if all(s.unit.node != "node2" for s in p.stages)
    )
    state = state.of(plan=replace(spare, pipelines=(first, *rest), spares=("node2",)))
    after, actions, reason = transition(state, job.DrainRequested("node2", 60.0), state.updated_at)
    assert "node2" in after.members and "epoch 2: drain node2" in reason
    assert sent(actions, m.Halt)[0].boundary and not sent(actions, m.Stop)


def test_another_model_ends_the_job() -> None:
    state = running()
    other = replace(spec_of(state), n_steps=1)
    after, actions, reason = send_report(state, "node1", spec=other)
    assert after.phase is JobPhase.FAILED and "another model or configuration" in reason
    assert {a.code for a in sent(actions, m.Stop)} == {2}


def test_a_node_of_the_former_version_may_not_describe_the_layers() -> None:
    """It does not know the fields. What the others tell completes the description."""
    state = running()
    told = replace(spec_of(state), contents=("a", "b"), optimizer="Adam")
    plain = replace(told, contents=(), optimizer="")
    for first, second in ((told, plain), (plain, told)):
        after, *_ = send_report(state.of(spec=first), "node1", spec=second)
        assert after.phase is JobPhase.RUNNING and after.spec == told
    other = replace(told, optimizer="SGD")
    after, _, reason = send_report(state.of(spec=told), "node1", spec=other)
    assert after.phase is JobPhase.FAILED and "another model or configuration" in reason


def test_missed_orders_are_sent_again() -> None:
    """Halt, Install and Launch follow any report that shows them missing."""
    state, *_ = send_report(running(), "node2", phase=NodePhase.STARTING)
    _, actions, _ = send_report(state, "node0")
    assert sent(actions, m.Halt) == [m.Halt(2)]
    state = halt(halt(halt(state, "node0"), "node1"), "node2", NodePhase.STARTING)
    assert state.phase is JobPhase.INSTALLING
    _, actions, _ = send_report(state, "node0")
    assert sent(actions, m.Install) == [m.Install(2, assignment_of(state))]
    launched = samples()[JobPhase.LAUNCHED][0]
    node, member = next((n, mb) for n, mb in launched.members.items() if mb.launch is not None)
    _, actions, _ = send_report(launched, node)
    assert sent(actions, m.Launch) == [member.launch]


def test_a_node_that_joins_during_a_halt_gets_the_halt_order() -> None:
    """The halt waits for it too, so it needs the order."""
    state, *_ = send_report(running(), "node2", phase=NodePhase.STARTING)
    fresh = m.NodeReport(NodeInfo("node9", "n9", "node9:1"), NodePhase.EMPTY, 0)
    _after, actions, _ = transition(state, fresh, state.updated_at)
    assert [type(a.message) for a in actions if isinstance(a, Send)] == [m.Launch, m.Halt]


def test_a_node_that_joins_after_the_end_is_stopped() -> None:
    state = samples()[JobPhase.FINISHED][0]
    fresh = m.NodeReport(NodeInfo("node9", "n9", "node9:1"), NodePhase.EMPTY, 0)
    _, actions, _ = transition(state, fresh, state.updated_at)
    assert sent(actions, m.Stop) and not sent(actions, m.Launch)
    after, actions, _ = transition(state, job.Tick(), state.updated_at + 99.0)
    assert after.members.keys() == state.members.keys() and not actions, "nobody is lost any more"


def test_a_new_coordinator_repeats_the_end() -> None:
    state = samples()[JobPhase.FINISHED][0]
    _, actions, _ = transition(state, job.CoordinatorFailover(), state.updated_at + 1.0)
    assert state.ending in actions
    node = next(iter(state.members))
    _, actions, _ = send_report(state, node)
    assert sent(actions, m.Stop) == [m.Stop(0, state.ending.reason)]


def test_a_checkpoint_is_committed_when_all_parts_are_written() -> None:
    state = running()
    state, actions, _ = transition(state, m.CheckpointPart(2, ((0, 0), (1, 0))), state.updated_at)
    assert not actions
    state, actions, _ = transition(state, m.CheckpointPart(2, ((2, 0), (3, 0))), state.updated_at)
    assert actions == (job.CommitCheckpoint(2),)
    state, actions, reason = transition(
        state, job.CheckpointCommitted("/c/step-2", 2), state.updated_at
    )
    assert state.checkpoint == ("/c/step-2", 2) and reason == "checkpoint of step 2"


# ---- a store that lost its last writes ---------------------------------------------------------


@pytest.mark.parametrize("phase", [NodePhase.HALTED, NodePhase.RUNNING, NodePhase.STARTING])
def test_nodes_in_an_unknown_epoch_get_a_newer_one(phase: NodePhase) -> None:
    after, actions, reason = send_report(running(), "node0", epoch=4, phase=phase)
    assert after.epoch == 5 and sent(actions, m.Halt)[-3:] == [m.Halt(5)] * 3
    (cause,) = change_of(after).causes
    assert cause.kind is CauseKind.STORE and cause.nodes == ("node0",)
    assert f"node0 is {phase.value} in epoch 4" in reason
    assert f"the saved state is {JobPhase.RUNNING.value} in epoch 1" in reason


@pytest.mark.parametrize("phase", [NodePhase.INSTALLING, NodePhase.RUNNING, NodePhase.FINISHED])
def test_an_epoch_gets_no_second_assignment(phase: NodePhase) -> None:
    """The saved state waits for the nodes to halt, but they have installed a plan already."""
    state, *_ = send_report(running(), "node2", phase=NodePhase.STARTING)
    assert state.phase is JobPhase.HALTING and state.epoch == 2
    after, actions, _ = send_report(state, "node0", epoch=2, phase=phase)
    assert after.epoch == 3 and sent(actions, m.Halt)[-3:] == [m.Halt(3)] * 3
    ended, _, _ = send_report(state, "node0", epoch=2, phase=phase, able=False)
    assert ended.epoch == 2, "its workers have ended: no order would change that"


def test_a_new_epoch_is_above_all_that_nodes_know() -> None:
    state = running()
    report = replace(state.members["node0"].report, epoch=7)
    away = replace(state.members["node0"], report=report, connected=False, closed_at=1e9)
    state = state.of(members={**state.members, "node0": away})
    after, _, _ = send_report(state, "node1", phase=NodePhase.STARTING, cause="oops")
    assert after.epoch == 8 and change_of(after).epoch == 8
