"""The node's table: every phase with every event, single decisions, detection of hangs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elastic.core.node import node as node_core
from elastic.core.node.node import (
    PHASE_CHANGES,
    NodeState,
    WorkerMessage,
    WorkerState,
    hang_reason,
    transition,
)
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase as Phase
from elastic.core.protocol.version import PROTOCOL, ProtocolVersion, this_version
from elastic.domain.types import Assignment, NodeInfo, Pipeline, Plan, Stage, Unit
from tests.core.recovery.job_model import make_spec

SPEC = make_spec(2, 2, 4)
LAUNCH = m.Launch(0, 1, 0, 2, "127.0.0.1", 29500, 0)
ATTACH = [m.Attach(rank, 100 + rank, SPEC, "h:1") for rank in range(2)]
HALTED = m.Halted(1, 0)


def plan(node: str, epoch: int) -> Assignment:
    stages = (Stage(Unit(node), 0, 2),)
    return Assignment(Plan(epoch, 2, 2, 2, (Pipeline(stages, (0, 1)),)), 0)


def play(*events: Any, state: NodeState | None = None, now: float = 10.0) -> NodeState:
    state = state or NodeState(NodeInfo("a", "a.1", "a:1", workers=2))
    for event in events:
        state, _, _ = transition(state, event, now)
    return state


def both(*messages: Any) -> list[WorkerMessage]:
    return [WorkerMessage(rank, message) for message in messages for rank in range(2)]


START = [LAUNCH, WorkerMessage(0, ATTACH[0]), WorkerMessage(1, ATTACH[1])]
RUN = [*START, m.Halt(1), m.Install(1, plan("a", 1)), *both(m.Ready(1, 0.0, 0.0))]
CRASH = [node_core.WorkerExited(0, -9), *START[1:]]
STATES = {
    Phase.EMPTY: [],
    Phase.STARTING: START[:1],
    Phase.IDLE: START,
    Phase.INSTALLING: [*START, m.Halt(1), m.Install(1, plan("a", 1))],
    Phase.RUNNING: RUN,
    Phase.HALTING: [*RUN, m.Halt(2)],
    Phase.HALTED: [*RUN, m.Halt(2), *both(HALTED)],
    Phase.FINISHED: [*RUN, WorkerMessage(0, m.Finished(4, "sha")), WorkerMessage(1, m.Finished(4))],
    Phase.FAILED: [*START, *CRASH * 3, node_core.WorkerExited(1, 1)],
}
EVENTS: list[Any] = [
    LAUNCH,
    replace(LAUNCH, restart=1),
    *(m.Halt(epoch, boundary) for epoch in (0, 1, 2, 3) for boundary in (False, True)),
    *(m.Install(epoch, plan(node, epoch)) for epoch in (1, 2, 3) for node in ("a", "b")),
    m.Stop(0),
    m.Fenced("lost"),
    m.Trim(1),
    *both(
        ATTACH[0],
        m.Progress(5, "compute", 1, 1),
        *(m.Halted(epoch, 1) for epoch in (1, 2)),
        *(m.Ready(epoch, 0.1, 0.1) for epoch in (1, 2)),
        *(m.Resumed(epoch, 1.0) for epoch in (1, 2)),
        m.Protected(1),
        *(m.CommFailed(epoch, nodes, "x") for epoch in (1, 2) for nodes in ((), ("b",))),
        m.Diverged(1, 0, ()),
        *(m.CheckpointUnreadable(epoch, "/c/6", "corrupt") for epoch in (1, 2)),
        m.Finished(4, "sha"),
        m.Failed("bad"),
        m.Crashed("bad"),
        m.Hello(0, 1, this_version()),
        m.Hello(0, 1, ProtocolVersion(99)),
        m.BundleAcknowledged(1),
    ),
    *(node_core.WorkerExited(rank, code) for rank in (0, 1) for code in (0, 1, -9)),
    node_core.WorkersPolled(
        (node_core.ProcessSample(0, False, 1.0), node_core.ProcessSample(1, True, 1.0))
    ),
    node_core.PrefetchDone(1),
    object(),
]


@pytest.mark.parametrize(
    ("told", "code"),
    [(0, 0), (3, 3), (4, 4), (130, 130), (143, 143), (1, 5), (2, 5), (7, 5), (137, 5)],
)
def test_the_agent_exits_without_an_error_after_a_failed_job(told: int, code: int) -> None:
    """Otherwise a job runner would restart the agent."""
    assert node_core.EndAgent(code) in transition(play(LAUNCH), m.Stop(told), 10.0)[1]


@pytest.mark.parametrize("phase", STATES)
def test_every_event_in_every_phase(phase: Phase) -> None:
    """A reason and no exception; only the changes in `PHASE_CHANGES`; the epoch never falls."""
    moves = {(before, after) for sources, _, after in PHASE_CHANGES for before in sources}
    state = play(*STATES[phase])
    assert state.phase is phase
    for event in EVENTS:
        after, actions, reason = transition(state, event, 11.0)
        assert reason, event
        assert after.epoch >= state.epoch
        assert after.phase is phase or (phase, after.phase) in moves, (
            f"{phase} -> {after.phase} on {event}"
        )
        if after.phase is not phase and not any(
            isinstance(a, node_core.SendToWorkers) for a in actions
        ):
            assert node_core.SendReport() in actions, f"{phase} -> {after.phase} is not reported"
        node_core.report(after)


def test_the_whole_table_is_tested() -> None:
    assert set(STATES) == set(Phase)


# ---- single decisions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "known"),
    [
        (LAUNCH, True),
        (m.Halt(1), True),
        (m.Install(1, plan("a", 1)), True),
        (m.Halt(0), False),
        (m.Install(2, plan("a", 2)), False),
    ],
)
def test_old_and_repeated_orders_change_nothing(order: Any, known: bool) -> None:
    """A known order is not answered: otherwise the answers to repeated orders would cause others.
    One of another epoch shows that the coordinator knows something else than this node."""
    state = play(*RUN)
    after, actions, reason = transition(state, order, 11.0)
    assert after == state and actions == (() if known else (node_core.SendReport(),)), reason


def test_a_second_halt_needs_no_second_answer() -> None:
    """A worker answers once per epoch, then waits for an assignment."""
    state = play(*RUN, m.Halt(2), WorkerMessage(0, HALTED), m.Halt(3))
    assert state.phase is Phase.HALTING
    state, actions, _ = transition(state, WorkerMessage(1, HALTED), 11.0)
    assert state.phase is Phase.HALTED and actions == (
        node_core.FenceVault(3),
        node_core.SendReport(),
    )
    assert len(node_core.report(state).halted) == 2


def test_an_answer_counts_for_its_epoch_only() -> None:
    state = play(
        *STATES[Phase.HALTED], m.Install(2, plan("a", 2)), *both(m.Ready(2, 0.0, 0.0)), m.Halt(3)
    )
    assert state.phase is Phase.HALTING and not node_core.report(state).halted


def test_a_crash_before_and_after_the_assignment() -> None:
    """Before it, the node may enter with new workers; after it, they do not know the epoch."""
    before = play(*STATES[Phase.HALTED], *CRASH)
    assert before.phase is Phase.HALTED
    assert play(m.Install(2, plan("a", 2)), state=before).phase is Phase.INSTALLING
    after = play(*RUN, *CRASH)
    assert after.phase is Phase.IDLE
    again, _, reason = transition(after, m.Install(1, plan("a", 1)), 11.0)
    assert again.phase is Phase.IDLE and "does not fit" in reason


def test_a_crash_restarts_all_workers_and_keeps_the_vault() -> None:
    state, actions, reason = transition(play(*RUN), node_core.WorkerExited(1, -11), 11.0)
    assert reason == "worker 1 ended with signal 11 (SIGSEGV)"
    assert actions == (
        node_core.KillWorkers(reason),
        node_core.SpawnWorkers(LAUNCH),
        node_core.SendReport(),
    )
    assert state.phase is Phase.STARTING and state.epoch == 1


def test_a_node_gives_up_after_too_many_crashes_in_a_row() -> None:
    state, _actions, reason = transition(
        play(*START, *CRASH * 3), node_core.WorkerExited(0, 1), 11.0
    )
    assert state.phase is Phase.FAILED and "4 crashes without" in reason
    enter = [m.Halt(2), m.Install(2, plan("a", 2)), *both(m.Ready(2, 0.0, 0.0))]
    assert play(*START, *CRASH * 3, *enter, node_core.WorkerExited(0, 1)).phase is Phase.STARTING


def test_the_reported_error_is_the_cause() -> None:
    """The error of the first worker that ended counts, until its process is replaced."""
    state = play(*RUN, WorkerMessage(1, m.Crashed("CUDA error: ECC", 1)))
    assert state.phase is Phase.RUNNING and node_core.report(state).failed is None, (
        "its exit comes next"
    )
    state, actions, reason = transition(state, node_core.WorkerExited(1, 1), 11.0)
    assert (
        reason == node_core.report(state).cause == "CUDA error: ECC"
        and node_core.report(state).crash_count == 1
    )
    assert actions == (
        node_core.KillWorkers(reason),
        node_core.SpawnWorkers(LAUNCH),
        node_core.SendReport(),
    )
    assert not any(worker.error for worker in state.workers)


def test_fenced() -> None:
    """A node with state begins anew and offers its copies; an empty one only reports again."""
    _, actions, _ = transition(play(*RUN), m.Fenced("silent"), 11.0)
    assert actions == (node_core.KillWorkers("silent"), node_core.Rejoin(keep_vault=True))
    _, actions, _ = transition(play(m.Halt(2)), m.Fenced("silent"), 11.0)
    assert actions == (node_core.KillWorkers("silent"), node_core.Rejoin(keep_vault=True))
    _, actions, _ = transition(play(*RUN), m.Released("drained"), 11.0)
    assert actions == (node_core.KillWorkers("drained"), node_core.Rejoin(keep_vault=False))
    _, actions, _ = transition(play(), m.Fenced("who?"), 11.0)
    assert actions == (node_core.SendReport(),)


def test_spares_and_boundaries() -> None:
    """A spare enters without its workers; its vault accepts copies until a planned change."""
    state, actions, _ = transition(play(*START, m.Halt(1)), m.Install(1, plan("b", 1)), 11.0)
    assert state.phase is Phase.IDLE and [type(a) for a in actions] == [
        node_core.EnterEpoch,
        node_core.SendReport,
    ]
    _, actions, _ = transition(state, m.Halt(2, boundary=True), 11.0)
    assert actions == (node_core.SendReport(),)
    _, actions, _ = transition(state, m.Halt(2), 11.0)
    assert actions == (node_core.FenceVault(2), node_core.SendReport())


def test_messages_of_unknown_workers_are_ignored() -> None:
    empty = play()
    for event in (
        WorkerMessage(0, m.Protected(1)),
        node_core.WorkerExited(1, 0),
        node_core.WorkersPolled((node_core.ProcessSample(0, True, 0.0),)),
    ):
        assert replace(transition(empty, event, 11.0)[0], polled_at=0.0) == empty


def test_an_unreadable_checkpoint_is_reported_until_the_next_epoch() -> None:
    installing = play(*STATES[Phase.INSTALLING])
    problem = m.CheckpointUnreadable(1, "/c/6", "corrupt")
    state = play(WorkerMessage(0, problem), state=installing)
    assert node_core.report(state).unreadable == problem and state.phase is Phase.INSTALLING
    assert play(m.Halt(2), state=state).unreadable is None
    assert play(m.Halt(2), WorkerMessage(0, problem), state=installing).unreadable is None


def test_suspects_are_cleared_with_the_epoch() -> None:
    state = play(
        *RUN,
        WorkerMessage(0, m.CommFailed(1, ("b",), "reset")),
        WorkerMessage(1, m.CommFailed(1, ("b", "c"), "reset")),
    )
    assert state.suspects == ("b", "c") and state.failures == ("reset",)
    halted = play(m.Halt(2), state=state)
    assert halted.suspects == halted.failures == ()
    assert (
        play(m.Halt(2), WorkerMessage(0, m.CommFailed(1, ("b",), "late")), state=state).suspects
        == ()
    )


def test_evidence_of_a_divergence_stays_until_the_next_installation() -> None:
    """Also if it comes after the order to halt, which another node's report has caused."""
    first, second = (m.Diverged(1, 3, (), (("a", layer, 0, True),)) for layer in range(2))
    state = play(*RUN, WorkerMessage(0, first), m.Halt(2), WorkerMessage(1, second))
    state = play(*both(m.Halted(2, 3)), state=state)
    assert state.phase is Phase.HALTED and node_core.report(state).diverged == (first, second)
    assert play(m.Install(2, plan("a", 2)), state=state).diverged == ()


def test_an_error_without_a_suspect_keeps_its_text() -> None:
    """Nobody is accused, and the report has the errors, a few of them."""
    errors = [m.CommFailed(1, (), f"VaultError: copy {n} is gone") for n in range(9)]
    state = play(*RUN, *(WorkerMessage(0, error) for error in errors))
    report = node_core.report(state)
    assert report.suspects == ()
    assert report.failures == tuple(error.detail for error in errors[: node_core.MAX_FAILURES])
    assert node_core.report(play(*RUN, WorkerMessage(0, m.CommFailed(1, (), "")))).failures != ("",)


@pytest.mark.parametrize("number", [0, PROTOCOL - 2, PROTOCOL + 2])
def test_workers_of_another_version_fail_the_node_with_both_versions(number: int) -> None:
    hello = m.Hello(1, 101, ProtocolVersion(number, "9.9"))
    state, actions, reason = transition(play(LAUNCH), WorkerMessage(1, hello), 11.0)
    assert state.phase is Phase.FAILED and actions[0] == node_core.KillWorkers(reason)
    report = node_core.report(state)
    assert report.elastic and report.cause == reason and report.crash_count == 1
    assert "worker 1" in reason and f"protocol {PROTOCOL}" in reason and "install" in reason
    later = play(node_core.WorkerExited(0, -9), node_core.WorkerExited(1, -9), state=state)
    assert node_core.report(later).cause == reason and later.phase is Phase.FAILED


@pytest.mark.parametrize("number", [PROTOCOL - 1, PROTOCOL, PROTOCOL + 1])
def test_workers_of_a_neighbouring_version_start(number: int) -> None:
    hello = m.Hello(0, 100, ProtocolVersion(number))
    assert play(LAUNCH, WorkerMessage(0, hello), *START[1:]).phase is Phase.IDLE


def test_a_worker_that_never_attached_says_why() -> None:
    """The error comes from the worker, or from the end of its output."""
    told = play(LAUNCH, WorkerMessage(0, m.Crashed("RuntimeError: no device")))
    told = play(node_core.WorkerExited(0, 1, "the last line"), state=told)
    assert told.cause == "worker 0: exit code 1: RuntimeError: no device"
    written = play(LAUNCH, node_core.WorkerExited(1, 1, "ImportError: no module"))
    assert written.cause == "worker 1: exit code 1: ImportError: no module"
    assert play(LAUNCH, node_core.WorkerExited(1, -9)).cause == "worker 1: signal 9 (SIGKILL)"
    crashed = play(*RUN, node_core.WorkerExited(1, 70, "the last line"))
    assert crashed.cause == "worker 1 ended with exit code 70: the last line"


def test_the_error_of_another_worker_of_the_node_is_the_cause() -> None:
    """The agent kills all workers of a node, and the exit of any of them may come first."""
    state = play(*RUN, WorkerMessage(1, m.Crashed("it announced a copy that does not exist")))
    _, _, reason = transition(state, node_core.WorkerExited(0, -9), 11.0)
    assert reason == "it announced a copy that does not exist"


def test_script_without_elastic() -> None:
    """A failed worker ends the group; the coordinator decides on a restart."""
    launched = play(LAUNCH)
    assert play(node_core.WorkerExited(0, 0), state=launched).phase is Phase.STARTING
    assert (
        play(node_core.WorkerExited(0, 0), node_core.WorkerExited(1, 0), state=launched).phase
        is Phase.FINISHED
    )
    state, actions, _ = transition(launched, node_core.WorkerExited(1, 3), 11.0)
    assert state.phase is Phase.FAILED and node_core.KillWorkers("a worker failed") in actions
    again, actions, _ = transition(state, replace(LAUNCH, restart=1), 11.0)
    assert (
        again.phase is Phase.STARTING
        and node_core.SpawnWorkers(replace(LAUNCH, restart=1)) in actions
    )


# ---- hung --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "stopped", "silent", "idle", "activity", "expected"),
    [
        ("just stopped", True, 0.3, 0.3, "compute", ""),
        ("stopped", True, 0.5, 0.5, "compute", "stopped and silent for 0.5 s"),
        ("stopped while waiting", True, 0.5, 0.5, "wait", "stopped"),
        ("late heartbeat", False, 9.0, 9.0, "compute", ""),
        ("silent", False, 16.0, 16.0, "compute", "silent and without CPU time for 16 s"),
        (
            "silent while waiting: the heartbeat thread is stuck too",
            False,
            16.0,
            40.0,
            "wait",
            "silent and without CPU time for 16 s",
        ),
        ("silent but using CPU (starved heartbeat)", False, 100.0, 0.1, "compute", ""),
        ("slow but alive", False, 0.1, 59.0, "compute", ""),
        ("slow, using CPU, for an hour", False, 0.1, 0.1, "compute", ""),
        (
            "stuck",
            False,
            0.1,
            61.0,
            "compute",
            "no progress and no CPU time for 61 s while computing",
        ),
        ("waiting for others for an hour", False, 0.1, 3600.0, "wait", ""),
        ("installing from a slow disk", False, 0.1, 3600.0, "install", ""),
        ("idle spare", False, 0.1, 3600.0, "idle", ""),
    ],
)
def test_hung(
    what: str, stopped: bool, silent: float, idle: float, activity: str, expected: str
) -> None:
    now = 10_000.0
    progress = m.Progress(1, activity, 0, 0)
    worker = WorkerState(
        True, ATTACH[0], progress=progress, seen=now - silent, active_at=now - idle
    )
    found = hang_reason(worker, stopped, now)
    assert bool(found) is bool(expected) and expected in found, what


def test_a_hung_worker_is_killed_with_its_cause() -> None:
    """CPU time counts as activity; a worker that has not attached is never hung."""
    state = play(*RUN)
    stopped = node_core.WorkersPolled((node_core.ProcessSample(1, True, 0.0),))
    state, actions, reason = transition(state, stopped, 11.0)
    assert actions == (node_core.KillWorkers(f"hang: {reason}"),) and state.detect_s == 1.0
    hang_reason = node_core.report(play(node_core.WorkerExited(1, -9), state=state))
    assert hang_reason.cause == f"hang: {reason}" and hang_reason.hung
    broke = node_core.report(
        play(
            WorkerMessage(1, m.Crashed("CUDA error: ECC", 1)),
            node_core.WorkerExited(1, 1),
            state=state,
        )
    )
    assert broke.cause == "CUDA error: ECC" and not broke.hung, "the worker's last words"
    installed = [m.Halt(2), m.Install(2, plan("a", 2))]
    assert not node_core.report(
        play(node_core.WorkerExited(1, -9), *START[1:], *installed, state=state)
    ).hung
    assert transition(play(LAUNCH), stopped, 99.0)[1] == ()


def test_a_worker_that_does_not_halt_is_hung() -> None:
    """Only time after an immediate halt order counts; a planned halt waits for all workers."""
    waiting = node_core.WorkerMessage(0, m.Progress(1, "wait", 0, 0))
    for boundary, after, why in [
        (False, 59.0, ""),
        (False, 61.0, "order to halt"),
        (True, 3600.0, ""),
    ]:
        state, _, _ = transition(play(*RUN, waiting), node_core.WorkersPolled(()), 1000.0)
        state, _, _ = transition(state, m.Halt(state.epoch + 1, boundary), 1000.0)
        now = 1000.0 + after
        state, _, _ = transition(
            state, node_core.WorkerMessage(0, m.Progress(1, "wait", 0, 0)), now
        )
        state = replace(state, polled_at=now)
        _, actions, reason = transition(
            state, node_core.WorkersPolled((node_core.ProcessSample(0, False, 0.0),)), now
        )
        assert bool(actions) is bool(why) and why in reason, (boundary, after, reason)


# ---- healthy workers are never killed ----------------------------------------------------


def kills(
    *,
    activity: str,
    cpu: Callable[[float], float],
    seconds: float,
    gap: tuple[float, float] = (0, 0),
    family: Callable[[float], float] = lambda t: 0.0,
    disk: tuple[float, float] = (0, 0),
) -> list[str]:
    """Reasons for kills of a worker that is polled every 0.1 s and sends progress every 0.2 s.

    The agent does not run from `gap[0]` to `gap[1]`. `cpu` and `family` give the CPU seconds until
    a time, by the worker and by its child processes. From `disk[0]` to `disk[1]` the worker is in
    disk sleep and sends nothing.
    """
    state, done, heard = play(*RUN), [], 0.0
    for tick in range(int(seconds * 10)):
        now = 10.0 + tick / 10
        if gap[0] <= now - 10.0 < gap[1]:
            continue
        at = now - 10.0
        sleeps = disk[0] <= at < disk[1]
        look = node_core.WorkersPolled(
            tuple(
                node_core.ProcessSample(rank, False, cpu(at), sleeps, family(at)) for rank in (0, 1)
            )
        )
        state, actions, _ = transition(state, look, now)
        done += [action.reason for action in actions if isinstance(action, node_core.KillWorkers)]
        if now - heard >= 0.2 and not sleeps:
            heard = now
            for rank in (0, 1):
                state, _, _ = transition(
                    state, WorkerMessage(rank, m.Progress(1, activity, 3, 1)), now
                )
    return done


@pytest.mark.parametrize(
    ("situation", "activity", "cpu", "gap"),
    [
        ("a loaded machine: a trickle of CPU", "compute", lambda t: t / 100, (0, 0)),
        ("a long step", "compute", lambda t: t, (0, 0)),
        (
            "a long checkpoint, a big transfer: it waits for the disk or for others",
            "wait",
            lambda t: 0.0,
            (0, 0),
        ),
        ("installing from a slow disk", "install", lambda t: 0.0, (0, 0)),
        ("the agent is stopped while the worker waits", "wait", lambda t: 0.0, (20, 90)),
        (
            "the agent is stopped while the worker computes",
            "compute",
            lambda t: min(t, 20.0) + max(0, t - 90),
            (20, 90),
        ),
        (
            "the machine is suspended",
            "compute",
            lambda t: t if t < 20 else 20 + max(0.0, t - 90),
            (20, 90),
        ),
    ],
)
def test_healthy_workers_are_not_killed(
    situation: str, activity: str, cpu: Any, gap: tuple[float, float]
) -> None:
    """Each situation lasts two minutes."""
    assert kills(activity=activity, cpu=cpu, seconds=120.0, gap=gap) == [], situation


@pytest.mark.parametrize("activity", ["compute", "install", "wait"])
def test_a_worker_that_waits_for_storage_is_not_killed(activity: str) -> None:
    """A shared file system stalls for 90 s, so all workers are silent and idle."""
    killed = kills(activity=activity, cpu=lambda t: min(t, 20.0), seconds=120.0, disk=(20, 110))
    assert killed == []


def test_a_worker_that_waits_for_its_compilers_is_not_killed() -> None:
    """The main thread is idle for two minutes while child processes compile in turn."""

    def compilers(t: float) -> float:
        return t if t < 50 else t - 40

    assert kills(activity="compute", cpu=lambda t: 0.0, seconds=120.0, family=compilers) == []


@pytest.mark.parametrize("family", [lambda t: 7.0, lambda t: 7.0 + t / 1000])
def test_idle_children_do_not_hide_a_hang(family: Callable[[float], float]) -> None:
    """Idle data loaders use very little CPU time."""
    (reason, *_) = kills(activity="compute", cpu=lambda t: 0.0, seconds=120.0, family=family)
    assert "no progress and no CPU time" in reason


def test_a_stuck_worker_is_killed() -> None:
    """The same schedule of polls finds a stuck worker."""
    (reason, *_) = kills(activity="compute", cpu=lambda t: 0.0, seconds=120.0)
    assert "no progress and no CPU time" in reason


# ---- signs of progress for the coordinator's watchdog ----------------------------------------


def poll(*cpu_s: float) -> node_core.WorkersPolled:
    samples = (node_core.ProcessSample(rank, False, used) for rank, used in enumerate(cpu_s))
    return node_core.WorkersPolled(tuple(samples))


def test_a_busy_machine_does_not_hide_that_a_worker_spins() -> None:
    """It gets one fifth of a processor, and waits for one the rest of the time."""
    state = at(play(*RUN), (10.0, poll(1.0, 1.0)))
    for number, now in ((5, 10.1), (6, 11.0)):
        progress = [
            WorkerMessage(rank, m.Progress(number, "compute", number - 5, 0)) for rank in (0, 1)
        ]
        state = at(state, *((now, one) for one in progress))
    sample = node_core.ProcessSample(0, False, 1.2, queued_s=0.8)
    state = at(state, (12.0, node_core.WorkersPolled((sample,))))
    assert node_core.heartbeat(state).spun_s == pytest.approx(1.0)


def at(state: NodeState, *events: tuple[float, Any]) -> NodeState:
    for now, event in events:
        state, _, _ = transition(state, event, now)
    return state


def test_cpu_time_is_progress_until_the_first_step_is_done() -> None:
    """Kernels may be compiled then. Later only the worker's own counter is progress."""
    state = at(play(*RUN), (10.1, poll(1.0, 1.0)))
    first = [WorkerMessage(rank, m.Progress(5, "compute", 0, 0)) for rank in (0, 1)]
    state = at(state, (10.2, first[0]), (10.2, first[1]), (10.3, poll(1.1, 1.1)))
    before = node_core.heartbeat(state)
    after = node_core.heartbeat(at(state, (10.4, poll(1.2, 1.2))))
    assert after.signs > before.signs and after.spun_s == 0.0
    second = [WorkerMessage(rank, m.Progress(6, "compute", 1, 0)) for rank in (0, 1)]
    state = at(state, (11.0, second[0]), (11.0, second[1]))
    assert state.first_step_s == pytest.approx(0.9, abs=0.2)
    before = node_core.heartbeat(state)
    after = node_core.heartbeat(at(state, (11.1, poll(1.1, 3.0))))
    assert (after.signs, after.activity) == (before.signs, "compute")
    assert node_core.heartbeat(at(state, (11.1, poll(3.1, 1.1)))).spun_s == pytest.approx(2.0)
    moved = at(state, (11.2, WorkerMessage(0, m.Progress(7, "wait", 1, 0))))
    assert node_core.heartbeat(moved).signs > before.signs


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.INSTALLING, Phase.RUNNING, Phase.HALTING])
def test_disk_sleep_is_neither_a_hang_nor_progress(phase: Phase) -> None:
    """The disk of one node hangs. Its workers are not killed, but the coordinator sees no signs of
    progress, so that its watchdog can act."""
    state, signs = play(*STATES[phase]), list[int]()
    asleep = node_core.WorkersPolled(
        tuple(node_core.ProcessSample(rank, False, 1.0, on_disk=True) for rank in (0, 1))
    )
    for second in range(200):
        now = 10.0 + second
        state, actions, _ = transition(state, asleep, now)
        assert not actions
        signs.append(node_core.heartbeat(state).signs)
    assert len(set(signs[2:])) == 1, "the first poll and the first CPU time are signs"


def test_the_first_step_may_not_take_for_ever() -> None:
    state = at(play(*RUN), (10.1, poll(1.0, 1.0)))
    signs = list[int]()
    for second in range(0, 1200, 10):
        state = replace(state, polled_at=10.0 + second)
        state = at(state, (10.0 + second, poll(2.0 + second, 2.0 + second)))
        signs.append(node_core.heartbeat(state).signs)
    limit = int(node_core.FIRST_STEP_S / 10)
    assert len(set(signs[:limit])) == limit and len(set(signs[limit + 1 :])) == 1


@pytest.mark.parametrize("activity", ["evaluate", "compute"])
def test_a_forward_pass_of_an_evaluation_may_compile_its_kernels(activity: str) -> None:
    """In the middle of an epoch only CPU time in an evaluation is progress, for a limited time."""
    state = at(
        play(*RUN),
        (10.1, poll(1.0, 1.0)),
        (11.0, WorkerMessage(0, m.Progress(90, activity, 50, 0))),
        (11.0, WorkerMessage(1, m.Progress(90, "wait", 50, 0))),
    )
    signs = list[int]()
    for second in range(20, 1200, 10):
        state = replace(state, polled_at=float(second))
        state = at(state, (float(second), poll(float(second), 1.0)))
        signs.append(node_core.heartbeat(state).signs)
    limit = int(node_core.FIRST_STEP_S / 10) - 1 if activity == "evaluate" else 1
    assert len(set(signs[:limit])) == limit and len(set(signs[limit + 1 :])) == 1


def test_a_worker_that_starts_again_has_as_much_time_as_the_first() -> None:
    """The measured first step begins with the installation, so it has no imports in it."""
    state = replace(play(LAUNCH), first_step_s=3.0)
    signs = list[int]()
    for second in range(10, 590, 10):
        state = replace(state, polled_at=float(second))
        state = at(state, (float(second), poll(float(second), float(second))))
        signs.append(node_core.heartbeat(state).signs)
    assert len(set(signs)) == len(signs)


def test_a_heartbeat_names_the_worker_that_others_wait_for() -> None:
    state = at(play(*RUN), (10.1, poll(1.0, 1.0)))
    state = at(
        state,
        (20.0, WorkerMessage(0, m.Progress(5, "compute", 1, 0))),
        (21.0, WorkerMessage(1, m.Progress(5, "wait", 1, 0))),
    )
    assert node_core.heartbeat(state).activity == "compute"
    state = at(state, (22.0, WorkerMessage(0, m.Progress(6, "wait", 1, 0))))
    assert node_core.heartbeat(state).activity == "wait"
    assert node_core.heartbeat(play(LAUNCH)).activity == "start"
    assert node_core.heartbeat(play()).signs == 1 and node_core.heartbeat(play()).activity == ""


@pytest.mark.parametrize("events", [START[:1], RUN], ids=["starting", "running"])
def test_an_order_restarts_the_workers_once(events: list[Any]) -> None:
    """A worker that hangs before it attaches is restarted too, although it never used elastic."""
    state = play(*events)
    order = m.RestartWorkers("no progress", state.crash_count)
    state, actions, _ = transition(state, order, 20.0)
    assert actions == (node_core.KillWorkers("hang: no progress"),)
    state, actions, _ = transition(state, node_core.WorkerExited(0, -9), 20.1)
    assert node_core.SpawnWorkers(LAUNCH) in actions and state.phase is Phase.STARTING
    assert (state.cause, state.hung, state.crash_count) == ("hang: no progress", True, 1)
    again, actions, _ = transition(state, order, 20.2)
    assert again == state and actions == (node_core.SendReport(),), "repeated, or late"


@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("boundary", [True, False])
def test_failures_of_the_running_epoch_count_during_a_planned_halt(
    boundary: bool, epoch: int
) -> None:
    """The workers still run epoch 1, and its copies must be acknowledged before they can halt."""
    state = play(*RUN, m.Halt(2, boundary))
    failed = WorkerMessage(0, m.CommFailed(epoch, ("b",), "backup of bundle 3: refused"))
    after, actions, _ = transition(state, failed, 11.0)
    told = node_core.report(after)
    if epoch == 2 or (epoch == 1 and boundary):
        assert (told.suspects, told.failures) == (("b",), ("backup of bundle 3: refused",))
        assert told.epoch == 2 and node_core.SendReport() in actions
    else:
        assert not told.suspects and not told.failures and actions == ()
    after, _, _ = transition(state, WorkerMessage(0, m.Ready(1, 0.0, 0.0)), 11.0)
    assert not node_core.report(after).ready, "no other message of a former epoch counts"


# ---- the coordinator is away -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "events", "elastic", "ends"),
    [
        ("never launched", [], False, True),
        ("finished", [*RUN, *both(m.Finished(4, "sha"))], True, True),
        ("waits for orders", [*RUN, *both(m.CommFailed(1, ("b",), "x"))], True, True),
        ("a plain script runs", START[:1], False, False),
        ("a plain script has ended", [LAUNCH, node_core.WorkerExited(0, 0),
                                      node_core.WorkerExited(1, 0)], False, True),
    ],
)  # fmt: skip
def test_an_agent_that_is_cut_off_ends(
    what: str, events: list[Any], elastic: bool, ends: bool
) -> None:
    state = play(*events)
    limit_s = state.limits.orphan_s
    for away_s in (0.0, 3.0, limit_s - 1):
        assert transition(state, node_core.CoordinatorAway(away_s), 10.0 + away_s)[1] == ()
    away = node_core.CoordinatorAway(limit_s + 1)
    _, actions, reason = transition(state, away, 10.0 + limit_s + 1)
    assert (node_core.EndAgent(1) in actions) is ends, what
    assert not ends or f"no coordinator was reached for {limit_s + 1:.0f} s" in reason


def test_an_agent_whose_workers_train_needs_no_coordinator() -> None:
    state = at(play(*RUN), (10.1, poll(1.0, 1.0)))
    for minute in range(1, 60):
        now = 60.0 * minute
        state = at(state, (now, WorkerMessage(0, m.Progress(minute, "compute", minute, 0))))
        assert transition(state, node_core.CoordinatorAway(now), now + 1.0)[1] == ()
    assert transition(state, node_core.CoordinatorAway(4000.0), now + 1300.0)[1] != ()
