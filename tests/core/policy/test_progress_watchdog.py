"""The progress watchdog: stalls of the whole job, and the back-off for epochs that fail."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.coordinator.transitions import record_event, transition
from elastic.core.health.path_fault import PathFault
from elastic.core.job import quarantine
from elastic.core.job import state as job
from elastic.core.job.epoch_change import begin_change
from elastic.core.job.state import CauseKind, JobPhase, JobState
from elastic.core.policy import progress_watchdog as watchdog
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.core.protocol.timeouts import NO_DURATIONS
from elastic.domain import codec
from elastic.domain.errors import Unanswered, VaultUnreachable, describe
from elastic.domain.types import NodeInfo, Plan, StepRecord, Unit
from tests.core.coordinator.test_transitions import entries, halt, running, sent
from tests.core.state_access import assignment_of, change_of, plan_of, spec_of
from tests.core.world.world import Fault, World

STEP_S = 0.25
NODES = ("node0", "node1", "node2")
Actions = tuple[job.JobAction, ...]


class Bench:
    """A job whose nodes send heartbeats, but show no progress unless the test says so."""

    def __init__(self, state: JobState) -> None:
        self.state, self.actions = state, list[job.JobAction]()
        self.signs = dict.fromkeys(state.members, 1)
        self.activity = dict.fromkeys(state.members, "wait")
        self.spun = dict.fromkeys(state.members, 0.0)
        """CPU seconds since the last sign of progress."""
        self.cpu = dict.fromkeys(state.members, 0.0)
        """Share of the time for which the main thread uses the CPU."""
        self.held = False
        self.cut = set[str]()
        """Nodes whose heartbeats do not arrive."""
        self.begin = state.updated_at
        self.beat()

    @property
    def now(self) -> float:
        return self.state.updated_at

    def apply(self, event: Any, later_s: float = 0.0) -> Actions:
        self.state, actions, _ = transition(self.state, event, self.now + later_s)
        self.actions += actions
        return actions

    def beat(self) -> None:
        beats = tuple(
            job.Heartbeat(
                node,
                member.report.info.incarnation,
                member.report.step,
                member.report.microbatch,
                signs=self.signs[node],
                activity=self.activity[node],
                spun_s=self.spun[node],
            )
            for node, member in self.state.members.items()
            if self.signs.get(node) is not None and node not in self.cut
        )
        self.apply(job.Heartbeats(beats))

    def move(self, node: str) -> None:
        """The node shows progress."""
        self.signs[node], self.spun[node] = self.signs[node] + 1, 0.0

    def report(self, node: str, **changes: Any) -> Actions:
        return self.apply(replace(self.state.members[node].report, **changes), 0.01)

    def wait(self, seconds: float, *moving: str) -> list[job.JobAction]:
        """Let time pass, with heartbeats and ticks; return the actions of this time."""
        first, until = len(self.actions), self.now + seconds
        while self.now < until and self.state.ending is None:
            for node in moving:
                self.move(node)
            for node, share in self.cpu.items():
                self.spun[node] += share * STEP_S
            self.apply(job.Tick(held=self.held), STEP_S)
            self.beat()
        return self.actions[first:]

    def spin(self, node: str) -> None:
        self.activity[node], self.cpu[node] = "compute", 0.9

    def obey(self, node: str) -> None:
        """The agent restarts the workers of the node."""
        report = self.state.members[node].report
        self.cpu[node], self.activity[node] = 0.0, "start"
        count, cause = report.crash_count + 1, "hang: ordered"
        phase = NodePhase.STARTING
        self.report(node, phase=phase, crash_count=count, cause=cause, hung=True, able=False)

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return entries(tuple(self.actions), kind)


def trained(**changes: Any) -> JobState:
    """Three nodes that train, with measured steps of 0.5 s; the bound on a stall is 7.5 s."""
    state = running()
    state, _, _ = transition(
        state,
        m.StepDone(1, StepRecord(state.newest_step + 1, 1.0, 1.0, 1.0), 0.5, 0.1),
        state.updated_at,
    )
    assert state.limits.progress_s == 7.5 and state.seen.step_s == 0.5
    return state.of(**changes)


def restarts(actions: Any) -> list[str]:
    orders = [a for a in actions if isinstance(a, job.Send)]
    return [a.node for a in orders if isinstance(a.message, m.RestartWorkers)]


# ---- stalls: a worker spins -----------------------------------------------------------------


def test_a_spinning_worker_is_restarted_and_its_node_left_out() -> None:
    bench = Bench(trained())
    bench.spin("node1")
    assert not restarts(bench.wait(7.0)) and bench.state.phase is JobPhase.RUNNING
    assert restarts(bench.wait(1.0)) == ["node1"]
    (stall,) = bench.kinds("stalled")
    assert (stall["suspects"], stall["action"], stall["phase"]) == (["node1"], "restart", "running")
    assert "CPU time without progress" in stall["evidence"]["node1"]
    assert quarantine.is_quarantined(bench.state, "node1")
    (cause,) = change_of(bench.state).causes
    assert (cause.kind, cause.nodes) == (CauseKind.STALLED, ("node1",))
    bench.obey("node1")
    bench.report("node1", epoch=2)
    for node in ("node0", "node2"):
        bench.state = halt(bench.state, node)
    assert bench.state.phase is JobPhase.INSTALLING
    assert plan_of(bench.state).nodes() == ("node0", "node2"), "training goes on without it"


def test_progress_of_any_awaited_node_is_progress_of_the_job() -> None:
    bench = Bench(trained())
    bench.spin("node1")
    assert not bench.wait(60.0, "node0") and bench.state.phase is JobPhase.RUNNING


def test_a_step_begins_the_bound_anew() -> None:
    bench = Bench(trained())
    bench.spin("node1")
    for _ in range(4):
        assert not bench.wait(7.0)
        step = bench.state.newest_step + 1
        bench.apply(m.StepDone(1, StepRecord(step, 1.0, 1.0, 1.0), 0.5, 0.1))
        bench.move("node1")


def test_the_bound_follows_the_measured_step() -> None:
    state = trained()
    state = state.of(seen=state.seen.grown(step_s=10.0), timeouts=None)
    bench = Bench(state)
    bench.spin("node1")
    assert not restarts(bench.wait(49.0)) and restarts(bench.wait(2.0)) == ["node1"]


def test_before_the_first_step_the_bound_is_longer() -> None:
    """Its agent counts the CPU time of a first step as progress; this is the case without any."""
    bench = Bench(running().of(seen=NO_DURATIONS))
    bench.spin("node1")
    assert not restarts(bench.wait(59.0)) and restarts(bench.wait(2.0)) == ["node1"]


def test_a_worker_without_cpu_time_is_left_to_its_agent() -> None:
    """It may wait for storage. The agent kills a hung worker after `stuck_s`."""
    bench = Bench(trained())
    bench.activity["node1"] = "compute"
    assert not bench.wait(30.0)


def test_what_most_nodes_do_is_reported_before_all_are_restarted() -> None:
    """All nodes may compile, or read the same slow file system. So nobody is left out. If only one
    were restarted, the others would have to show once more that they do not halt either."""
    bench = Bench(trained())
    for node in NODES:
        bench.spin(node)
    assert not restarts(bench.wait(11.0))
    assert [stall["action"] for stall in bench.kinds("stalled")] == ["wait"]
    assert not restarts(bench.wait(8.0))
    assert [stall["action"] for stall in bench.kinds("stalled")] == ["wait", "wait"]
    assert sorted(restarts(bench.wait(8.0))) == sorted(NODES)
    assert not any(quarantine.is_quarantined(bench.state, node) for node in NODES)
    assert bench.state.phase is JobPhase.HALTING


def test_workers_that_all_spin_after_a_restart_have_twice_the_time() -> None:
    bench = Bench(trained())
    for node in NODES:
        bench.spin(node)
    bench.wait(23.0)
    ordered = sorted(restarts(bench.actions))
    assert ordered == sorted(NODES)
    bench.actions.clear()
    bench.wait(13.0)
    assert not bench.kinds("stalled")
    bench.wait(4.0)
    assert bench.kinds("stalled")


def test_the_only_node_is_restarted_but_not_left_out() -> None:
    state = trained()
    bench = Bench(state.of(members={"node0": state.members["node0"]}, plan=_alone(state)))
    bench.spin("node0")
    assert restarts(bench.wait(8.0)) == ["node0"]
    assert not quarantine.is_quarantined(bench.state, "node0")


def _alone(state: JobState) -> Plan:
    """The plan of a single node."""
    plan = plan_of(state)
    (first, *_) = plan.pipelines
    stage = replace(first.stages[0], unit=Unit("node0"), first=0, last=plan.n_layers)
    whole = replace(first, stages=(stage,), microbatches=tuple(range(plan.n_microbatches)))
    return replace(plan, pipelines=(whole,), peers=(), spares=())


# ---- stalls: all wait -----------------------------------------------------------------------


def test_if_all_wait_a_new_epoch_begins() -> None:
    bench = Bench(trained())
    bench.wait(1.0, "node0", "node2")
    assert not bench.wait(58.0) and bench.state.epoch == 1
    bench.wait(3.0)
    assert bench.state.epoch == 2 and bench.state.phase is JobPhase.HALTING
    (cause,) = change_of(bench.state).causes
    assert (cause.kind, cause.nodes) == (CauseKind.STALLED, ("node1",))
    assert "no progress for" in cause.text and "it stopped first (wait)" in cause.text
    assert [stall["action"] for stall in bench.kinds("stalled")] == ["new-epoch"]
    assert not quarantine.is_quarantined(bench.state, "node1")


def test_the_second_stall_leaves_the_suspect_out() -> None:
    state = trained()
    bench = Bench(state.of(watch=replace(state.watch, stalls=1)))
    bench.wait(1.0, "node0", "node1")
    bench.wait(122.0)
    assert [stall["action"] for stall in bench.kinds("stalled")] == ["leave-out"]
    assert quarantine.is_quarantined(bench.state, "node2")


def test_an_accused_node_is_the_suspect() -> None:
    state = trained()
    members = dict(state.members)
    report = replace(members["node0"].report, suspects=("node2",))
    members["node0"] = replace(members["node0"], report=report)
    bench = Bench(state.of(members=members))
    bench.wait(1.0, "node0", "node2")
    bench.wait(62.0)
    assert change_of(bench.state).causes[-1].nodes == ("node2",)


def test_the_end_of_the_job_has_more_time() -> None:
    """All steps are done; the last checkpoint is written and hashed."""
    state = trained()
    spec = replace(spec_of(state), n_steps=state.newest_step + 1)
    bench = Bench(state.of(spec=spec))
    assert not bench.wait(590.0)
    bench.wait(15.0)
    assert bench.state.epoch == 2


def test_an_agent_that_counts_no_signs_is_not_blamed() -> None:
    """An agent of the former version. The job does not wait for ever, though."""
    bench = Bench(trained())
    bench.signs = dict.fromkeys(NODES, 0)
    bench.state = bench.state.of(watch=replace(bench.state.watch, signs={}))
    bench.spin("node1")
    assert not restarts(bench.wait(59.0))
    bench.wait(3.0)
    assert bench.state.epoch == 2


# ---- stalls: halting and installing ---------------------------------------------------------


def halting() -> Bench:
    """node2 crashed; node0 has halted, node1 has not."""
    bench = Bench(trained())
    bench.report("node2", phase=NodePhase.STARTING, cause="oops", able=False)
    bench.state = halt(bench.state, "node0")
    bench.state = halt(bench.state, "node2", NodePhase.STARTING)
    assert bench.state.phase is JobPhase.HALTING
    return bench


@pytest.mark.parametrize("activity", ["compute", "wait", "install"])
def test_a_node_that_does_not_halt_is_reminded_then_restarted(activity: str) -> None:
    bench = halting()
    bench.activity["node1"] = activity
    assert not bench.wait(3.5)
    assert sent(tuple(bench.wait(1.0)), m.Halt) == [m.Halt(2)], "the order may be lost"
    assert not bench.wait(2.0)
    order = bench.wait(1.5)
    assert restarts(order) == ["node1"]
    (stall,) = bench.kinds("stalled")
    assert "it has not halted" in stall["evidence"]["node1"]
    bench.obey("node1")
    bench.report("node1", epoch=2)
    assert bench.state.phase is JobPhase.INSTALLING and plan_of(bench.state).nodes() == ("node0",)


def test_nobody_is_blamed_while_the_coordinator_hears_nobody() -> None:
    """Its own network has failed: orders reach no node, and no node can show progress."""
    bench = Bench(trained())
    while bench.now < bench.begin + 300.0 and bench.state.ending is None:
        bench.apply(job.Tick(), STEP_S)
    assert bench.state.doubt_since and not bench.kinds("stalled")
    assert bench.state.phase is JobPhase.RUNNING and set(bench.state.members) == set(NODES)
    bench.beat()
    bench.wait(5.0)
    assert not bench.state.doubt_since and not bench.kinds("stalled")


def test_a_node_that_does_not_obey_is_dropped() -> None:
    bench = halting()
    bench.wait(8.0)
    assert restarts(bench.actions) == ["node1"]
    bench.wait(14.0)
    assert "node1" in bench.state.members
    bench.wait(3.0)
    assert "node1" not in bench.state.members and bench.state.phase is JobPhase.INSTALLING
    assert [lost["loss"] for lost in bench.kinds("lost")] == ["stalled"]
    assert [node for node, _ in bench.state.absent] == ["node1"], "its vault may live"
    assert [s.node for s in bench.actions if isinstance(s, job.Send)
            and isinstance(s.message, m.Fenced)] == ["node1"]  # fmt: skip


def test_a_node_that_shows_progress_has_time_to_halt() -> None:
    """It publishes large copies."""
    bench = halting()
    assert not restarts(bench.wait(60.0, "node1", "node2"))


def test_a_coordinator_that_hears_no_answer_suspects_nobody() -> None:
    bench = Bench(trained())
    bench.report("node1", suspects=("node0",))
    bench.wait(1.0)
    assert bench.state.phase is JobPhase.HALTING
    bench.wait(20.0)
    assert not restarts(bench.actions) and "wait" in bench.kinds("stalled")[0]["action"]


def test_a_missed_installation_is_sent_again() -> None:
    bench = halting()
    bench.state = halt(bench.state, "node1")
    assert bench.state.phase is JobPhase.INSTALLING
    bench.report("node0", phase=NodePhase.RUNNING)
    bench.actions.clear()
    bench.wait(4.5)
    again = [a.node for a in bench.actions if isinstance(a, job.Send)
             and a.message == m.Install(2, assignment_of(bench.state))]  # fmt: skip
    assert again == ["node1"]


def test_a_worker_that_spins_while_it_installs_is_restarted() -> None:
    bench = halting()
    bench.state = halt(bench.state, "node1")
    bench.report("node0", phase=NodePhase.INSTALLING)
    bench.report("node1", phase=NodePhase.INSTALLING)
    bench.spin("node1")
    bench.activity["node1"] = "install"
    assert restarts(bench.wait(9.0)) == ["node1"]


@pytest.mark.parametrize("phase", ["running", "halting"])
def test_nobody_is_blamed_while_orders_cannot_be_sent(phase: str) -> None:
    bench = Bench(trained()) if phase == "running" else halting()
    bench.spin("node1")
    bench.held = True
    assert not restarts(bench.wait(60.0, "node2"))
    bench.held = False
    assert not restarts(bench.wait(6.0)) and restarts(bench.wait(2.0)) == ["node1"]


def test_nobody_is_blamed_for_a_late_coordinator() -> None:
    bench = halting()
    bench.apply(job.Tick(), 3600.0)
    assert not bench.kinds("stalled")
    bench.apply(job.CoordinatorFailover(), 0.1)
    assert not bench.kinds("stalled") and bench.state.watch.signs == {}


@pytest.mark.parametrize("phase", ["running", "halting"])
def test_nobody_is_blamed_by_a_coordinator_that_is_cut_off(phase: str) -> None:
    """It hears nobody for 10 min, and suspects its own network."""
    bench = Bench(trained()) if phase == "running" else halting()
    bench.spin("node1")
    bench.cut = set(NODES)
    bench.wait(600.0)
    assert [a.kind for a in bench.actions if isinstance(a, job.LogEntry)][-1] == "doubt"
    assert not restarts(bench.actions) and not bench.kinds("stalled") and not bench.kinds("lost")
    assert set(bench.state.members) == set(NODES) and not bench.kinds("health")
    bench.cut.clear()
    assert not restarts(bench.wait(6.0)), "the bound begins anew"
    assert restarts(bench.wait(3.0)) == ["node1"]


def test_a_node_that_is_not_heard_is_no_evidence() -> None:
    """Its lease decides about it."""
    bench = halting()
    bench.wait(5.5)
    bench.cut = {"node1"}
    bench.wait(4.0)
    assert not bench.kinds("stalled") and not restarts(bench.actions)
    assert [lost["loss"] for lost in bench.kinds("lost")] == ["silent"]


# ---- workers that do not attach -------------------------------------------------------------


def test_a_worker_that_hangs_before_it_attaches_is_restarted() -> None:
    state = trained()
    report = replace(state.members["node2"].report, phase=NodePhase.STARTING, able=False)
    members = {**state.members, "node2": replace(state.members["node2"], report=report)}
    bench = Bench(state.of(members=members, start_s=2.0))
    bench.activity["node2"] = "start"
    assert not restarts(bench.wait(9.0, "node0", "node1"))
    assert restarts(bench.wait(2.0, "node0", "node1")) == ["node2"]
    assert not restarts(bench.wait(8.0, "node0", "node1"))
    assert restarts(bench.wait(2.0, "node0", "node1")) == ["node2"], "the order may be lost"
    assert restarts(bench.wait(52.0, "node0", "node1")) == ["node2"], "with growing pauses"
    record = StepRecord(bench.state.newest_step + 1, 1.0, 1.0, 1.0)
    assert not restarts(bench.apply(m.StepDone(1, record, 0.5, 0.1)))
    assert not restarts(bench.wait(5.0, "node0", "node1")), "a step changes nothing"
    bench.obey("node2")
    assert not restarts(bench.wait(9.0, "node0", "node1"))


def test_a_node_that_reconnects_gets_the_order_to_restart_again() -> None:
    bench = halting()
    bench.wait(8.0)
    bench.actions.clear()
    incarnation = bench.state.members["node1"].report.info.incarnation
    bench.report("node1")
    assert not restarts(bench.actions)
    bench.apply(job.ConnectionClosed("node1", incarnation), 0.01)
    bench.report("node1")
    assert restarts(bench.actions) == ["node1"] and "node1" in bench.state.members
    bench.obey("node1")
    bench.apply(job.ConnectionClosed("node1", incarnation), 0.01)
    bench.actions.clear()
    bench.report("node1")
    assert not restarts(bench.actions)


def test_an_order_that_was_sent_once_is_no_disobedience() -> None:
    """It was lost, and its repetition was not due yet when the next stall began."""
    bench = halting()
    bench.wait(8.0)
    watch = bench.state.watch
    assert watch.orders["node1"].unanswered == 1
    bench.state = bench.state.of(watch=replace(watch, reminded=True))
    bench.wait(15.0)
    assert "node1" in bench.state.members
    assert bench.state.watch.orders["node1"].unanswered == 2


def starting(start_s: float, *nodes: str) -> Bench:
    """The workers of these nodes start again, and show no activity."""
    state = trained(start_s=start_s)
    members = dict(state.members)
    for node in nodes:
        report = replace(members[node].report, phase=NodePhase.STARTING, able=False, epoch=2)
        members[node] = replace(members[node], report=report)
    bench = Bench(state.of(members=members))
    for node in nodes:
        bench.activity[node] = "start"
    return bench


def test_restarted_workers_may_be_quiet_for_twice_the_first_start() -> None:
    bench = starting(40.0, "node2")
    assert not restarts(bench.wait(79.0, "node0", "node1"))
    assert restarts(bench.wait(2.0, "node0", "node1")) == ["node2"]


def test_the_pause_grows_with_each_order_that_is_obeyed() -> None:
    """The workers may need longer than the first start did."""
    bench, orders = starting(2.0, "node2"), list[float]()
    while bench.now < bench.begin + 300.0 and bench.state.ending is None:
        if restarts(bench.wait(STEP_S, "node0", "node1")):
            orders.append(bench.now - bench.begin)
            bench.obey("node2")
            bench.move("node2")
    assert [round((b - a) / 10.0) for a, b in pairwise([0.0, *orders])] == [1, 2, 4, 8]
    bench.report("node2", phase=NodePhase.HALTED, able=True)
    assert not bench.state.watch.orders, "workers that attach begin anew"


def test_ordered_restarts_are_no_crashes() -> None:
    """All nodes start slowly after a fault, for example from a busy file system."""
    bench = starting(2.0, *NODES)
    while bench.now < bench.begin + 300.0 and bench.state.ending is None:
        for node in restarts(bench.wait(STEP_S)):
            bench.obey(node)
            bench.move(node)
    assert bench.state.ending is None
    assert all(bench.state.members[node].report.crash_count in (5, 6) for node in NODES)
    for node in NODES:
        record = quarantine.record_of(bench.state, node)
        assert (record.stuck, record.crashes, record.quarantined) == (0, (), False)
    count = bench.state.members["node2"].report.crash_count + 1
    bench.report("node2", crash_count=count, cause="worker 0 ended with signal 7", hung=False)
    assert quarantine.record_of(bench.state, "node2").stuck == 1, "this one is a crash"


def test_a_starting_worker_that_uses_the_cpu_is_not_restarted() -> None:
    state = trained()
    report = replace(state.members["node2"].report, phase=NodePhase.STARTING, able=False)
    members = {**state.members, "node2": replace(state.members["node2"], report=report)}
    bench = Bench(state.of(members=members, start_s=2.0))
    assert not restarts(bench.wait(300.0, *NODES))


def test_a_worker_that_hangs_before_the_job_begins_is_restarted() -> None:
    """One of three workers hangs before it attaches, at the first launch. The others show how long
    a start takes."""
    world = World(3, 3, steps=40)
    world.agents["node1"].mute_starts = 1
    world.run()
    world.check_end()
    assert world.coordinator.state.phase is JobPhase.FINISHED
    assert 10.0 < world.now < 40.0


def test_a_job_begins_without_a_node_whose_worker_hangs() -> None:
    """The minimum of nodes is ready, and the rest has had 10 s. It joins when it is ready."""
    world = World(3, 3, steps=200, min_nodes=2)
    world.agents["node1"].mute_starts = 1
    while world.coordinator.state.phase is not JobPhase.RUNNING:
        world.run(world.now + 0.1)
    assert 10.0 < world.now < 14.0
    assert "node1" not in plan_of(world.coordinator.state).nodes()
    world.run()
    world.check_end()
    assert "node1" in plan_of(world.coordinator.state).nodes()


# ---- epochs that fail -----------------------------------------------------------------------


def fail(bench: Bench, node: str = "node0", **changes: Any) -> float:
    """The running epoch fails by a report of `node`; all halt and install again, at once. Return
    the time at which the next epoch began."""
    epoch = bench.state.epoch
    bench.report(node, **changes)
    while bench.state.epoch == epoch and bench.state.ending is None:
        bench.wait(STEP_S, *NODES)
    began = bench.now
    for name in tuple(bench.state.members):
        bench.state = halt(bench.state, name)
    while bench.state.phase is JobPhase.HALTING:
        bench.wait(STEP_S)
        assert bench.now < began + 70.0
    if bench.state.ending is None:
        for name in plan_of(bench.state).nodes():
            bench.report(name, phase=NodePhase.RUNNING, suspects=(), failures=())
    return began


FULL = "OSError: [Errno 28] No space left on device: slot 17"


def test_a_keeper_that_refuses_copies_is_left_out() -> None:
    bench = Bench(trained())
    fail(bench, suspects=("node1",), failures=("VaultError: node1: no slot",))
    assert "node1" in plan_of(bench.state).nodes(), "a single failure may be chance"
    fail(bench, suspects=("node1",), failures=("VaultError: node1: no slot",))
    assert "node1" not in plan_of(bench.state).nodes()
    assert all(peer != "node1" for _, peer in plan_of(bench.state).peers)
    assert quarantine.is_quarantined(bench.state, "node1")
    assert bench.now - bench.begin < 10.0
    (note,) = bench.kinds("retry")
    assert note["attempt"] == 2 and note["pause_s"] == 0.0
    assert "contact lost with node1" in note["cause"]


def test_an_error_on_all_nodes_ends_the_job_with_its_text() -> None:
    bench = Bench(trained())
    for attempt in range(watchdog.MAX_ATTEMPTS):
        assert bench.state.ending is None, attempt
        for node in NODES:
            text = FULL.replace("17", f"{attempt}")
            report = replace(bench.state.members[node].report, failures=(text,))
            members = {**bench.state.members}
            members[node] = replace(members[node], report=report)
            bench.state = bench.state.of(members=members)
        fail(bench, failures=(FULL,))
    assert bench.state.ending is not None and bench.state.phase is JobPhase.FAILED
    assert "No space left on device" in bench.state.ending.reason
    assert "on every node, in 4 attempts" in bench.state.ending.reason
    assert bench.state.ending.code == 1 and bench.now - bench.begin < 12.0


def fail_together(bench: Bench, nodes: tuple[str, ...], text: str) -> None:
    """The running epoch fails with the same error on several nodes."""
    for node in nodes[1:]:
        report = replace(bench.state.members[node].report, failures=(text,))
        member = replace(bench.state.members[node], report=report)
        bench.state = bench.state.of(members={**bench.state.members, node: member})
    fail(bench, nodes[0], failures=(text,))


def test_of_nodes_that_are_blamed_equally_often_one_is_left_out_in_turn() -> None:
    bench, text = Bench(trained()), "LinkFailed: epoch 7 could not be opened: it timed out"
    for _ in range(3):
        fail_together(bench, ("node1", "node2"), text)
        assert len(plan_of(bench.state).nodes()) == 3
    fail_together(bench, ("node1", "node2"), text)
    assert plan_of(bench.state).nodes() == ("node0", "node2")
    assert quarantine.is_quarantined(bench.state, "node1") and bench.state.ending is None


@pytest.mark.parametrize(
    "error",
    [
        "LinkFailed: epoch 7 could not be opened: timed out",
        describe(VaultUnreachable("vault of node1 at h:1: ConnectionRefusedError: refused")),
        describe(VaultUnreachable("vault of node1 at h:1: TLS handshake failed: expired")),
        describe(Unanswered("vault of node1 at h:1 made no progress for 10 s")),
    ],
)
def test_an_error_of_contact_on_all_nodes_never_ends_the_job(error: str) -> None:
    """The network comes back, or expired certificates are renewed."""
    bench = Bench(trained())
    for _ in range(12):
        fail_together(bench, NODES, error)
    assert bench.state.ending is None and bench.state.watch.attempts == 12


@pytest.mark.parametrize(
    "accused", [("node0", "node1", "node2"), ("node2", "node2", "node2"), ("node1", "node2", "")]
)
def test_one_kill_after_another_in_a_step_leaves_no_node_out(accused: tuple[str, ...]) -> None:
    """Workers of the three nodes are killed. In each epoch one report of lost contact comes before
    that of the crash. It may accuse a node that only closed its links, or be of no use at all."""
    bench = Bench(trained())
    for victim, suspect in zip(NODES, accused, strict=True):
        accuser = next(node for node in NODES if node not in (victim, suspect))
        suspects = (suspect,) if suspect else ()
        bench.report(accuser, suspects=suspects, failures=("LinkFailed: reset by peer",))
        crash(bench, victim)
        bench.report(victim, phase=NodePhase.HALTED, able=True)
        bench.wait(1.0)
        for node in plan_of(bench.state).nodes():
            bench.report(node, phase=NodePhase.RUNNING, suspects=(), failures=())
        assert bench.state.phase is JobPhase.RUNNING
    assert bench.state.watch.attempts == 3 and bench.state.ending is None
    assert not any(quarantine.is_quarantined(bench.state, node) for node in NODES)


def test_an_error_that_may_pass_ends_the_job_only_after_real_pauses() -> None:
    bench, text = Bench(trained()), "VaultError: layer 3: no record of step 7"
    while bench.state.ending is None:
        fail_together(bench, NODES, text)
    assert 120.0 < bench.now - bench.begin < 300.0
    assert "no record of step 7 (on every node, in 8 attempts)" in bench.state.ending.reason


def test_an_error_of_one_node_does_not_end_the_job() -> None:
    bench = Bench(trained())
    for _ in range(3):
        fail(bench, failures=(FULL,))
        if "node0" not in plan_of(bench.state).nodes():
            break
    assert bench.state.ending is None
    assert set(plan_of(bench.state).nodes()) == {"node1", "node2"}


def test_an_error_that_did_not_come_again_is_no_error_of_all_nodes() -> None:
    """node0 had no room once. Later the network fails, and the workers of all others crash."""
    bench = Bench(trained())
    fail(bench, failures=(FULL,))
    assert bench.state.watch.failures == {"node0": FULL}
    for _ in range(2):
        fail(bench, suspects=("node1",), failures=("LinkFailed: reset by peer",))
        assert not bench.state.watch.failures
    crash(bench, "node1", "node2")
    assert bench.state.watch.attempts == 4 and bench.state.ending is None


def test_an_error_of_one_node_is_not_common_while_the_others_start() -> None:
    bench = Bench(trained())
    for _ in range(3):
        fail(bench, suspects=("node1",), failures=("LinkFailed: reset by peer",))
    member = bench.state.members["node0"]
    member = replace(member, report=replace(member.report, failures=(FULL,)))
    bench.state = bench.state.of(members={**bench.state.members, "node0": member})
    crash(bench, "node1", "node2")
    assert bench.state.watch.attempts == 4 and bench.state.watch.failures == {"node0": FULL}
    assert bench.state.ending is None


def crash(bench: Bench, *nodes: str) -> None:
    """The workers of these nodes crash, and start again. All nodes halt."""
    for node in nodes:
        report = bench.state.members[node].report
        bench.report(
            node,
            phase=NodePhase.STARTING,
            able=False,
            crash_count=report.crash_count + 1,
            cause="worker 0 ended with signal 9",
        )
    for node in NODES:
        phase = NodePhase.STARTING if node in nodes else NodePhase.HALTED
        bench.state = halt(bench.state, node, phase)
    bench.wait(1.0)


def test_nodes_that_come_to_a_paused_job_are_no_failure() -> None:
    bench = Bench(trained())
    fail(bench, suspects=("node1",))
    before, now = bench.state.watch, bench.now
    resume = job.Cause(CauseKind.RESUME, "nodes came")
    state, _, _ = begin_change(bench.state, resume, now)
    after, entries_of_log = watchdog.epoch_began(state, now)
    assert not entries_of_log and not watchdog.is_paused(after, now)
    assert (after.watch.attempts, after.watch.cause) == (before.attempts, before.cause)
    assert after.watch.retry_at == 0.0, "the clock of the next coordinator may be behind"


def test_failed_epochs_are_at_most_five_per_minute() -> None:
    """Two nodes accuse each other for ever: nobody is blamed alone, nothing is given up."""
    bench = Bench(trained())
    began = list[float]()
    for _ in range(14):
        report = replace(bench.state.members["node1"].report, suspects=("node0",))
        members = {**bench.state.members}
        members["node1"] = replace(members["node1"], report=report)
        bench.state = bench.state.of(members=members)
        began.append(fail(bench, suspects=("node1",), failures=("LinkFailed: reset by peer",)))
    assert bench.state.ending is None
    for at in began:
        assert sum(at <= other < at + 60.0 for other in began) <= 5
    pauses = [note["pause_s"] for note in bench.kinds("retry")]
    assert pauses == sorted(pauses) and pauses[-1] == 60.0
    told = watchdog.summary(bench.state, bench.now)
    assert told["attempts"] == 14 and "contact lost" in told["cause"]


@given(
    st.lists(
        st.sampled_from(["contact", "path", "late path", "late loss", "step", "join", "lost"]),
        min_size=1,
        max_size=40,
    )
)
def test_five_failed_epochs_per_minute_in_any_order(events: list[str]) -> None:
    """Each failure comes at once after the installation. Progress may lie between. A node with a
    new name ends the pause, but only so far."""
    state, now, failed = trained(), 100.0, list[float]()
    for event in events:
        match event:
            case "step":
                record = StepRecord(state.newest_step + 1, 1.0, 1.0, 1.0)
                state, failed = watchdog.observe(state.of(record=record), now), []
            case "join":
                state = watchdog.member_joined(state, "node9", now, known=False)
                while watchdog.is_paused(state, now):
                    now += 0.5
            case _:
                kind = CauseKind.LOST if event == "lost" else CauseKind.CONTACT
                paths = (PathFault(("node0", "node1"), (), "", now),) if event == "path" else ()
                state = with_failed_epoch(state.of(paths=paths), kind, now)
                failed += [] if event == "lost" else [now]
                if event == "late path":
                    now += 0.5
                    late = PathFault(("node0", "node1"), (), "", now)
                    after_pause = watchdog.retry(state.of(paths=(late,), plan=None), now)
                    state = after_pause[0] if after_pause is not None else state
                if event == "late loss":
                    now += 0.5
                    state = watchdog.member_lost(state.of(phase=JobPhase.HALTING), "node1", now)
                while watchdog.is_paused(state, now):
                    now += 0.5
        assert all(sum(at <= other < at + 60.0 for other in failed) <= 5 for at in failed)


@pytest.mark.parametrize(
    ("found_at", "well_since", "pause_s"), [(20.0, 0.0, 0.0), (5.0, 0.0, 10.0), (20.0, 21.0, 10.0)]
)
def test_a_bad_path_that_was_just_found_leaves_the_first_pause_out(
    found_at: float, well_since: float, pause_s: float
) -> None:
    """A path that was known before the last attempt, or is well again, explains nothing."""
    fault = PathFault(("node0", "node1"), (), "", found_at, well_since)
    state = with_failed_epoch(trained(), CauseKind.CONTACT, 1.0)
    for now in (2.0, 10.0):
        state, _ = watchdog.epoch_began(state, now)
    state, (note,) = watchdog.epoch_began(state.of(paths=(fault,)), 22.0)
    assert isinstance(note, job.LogEntry) and note.data["attempt"] == watchdog.EXPLAINED_ATTEMPT
    assert note.data["pause_s"] == pause_s


@pytest.mark.parametrize(("attempts", "ends"), [(4, True), (5, False)])
def test_a_bad_path_that_is_found_during_the_first_pause_ends_it(attempts: int, ends: bool) -> None:
    """The next pause is not shortened: it keeps the number of epochs per minute low."""
    state = trained()
    for now in range(1, attempts + 1):
        state = with_failed_epoch(state, CauseKind.CONTACT, float(now))
    found_at = state.watch.failed_times[-1] + 0.2
    assert watchdog.is_paused(state, found_at) and watchdog.retry(state, found_at) is None
    state = state.of(paths=(PathFault(("node0", "node1"), (), "", found_at),))
    verdict = watchdog.retry(state, found_at)
    state = verdict[0] if verdict is not None else state
    assert watchdog.is_paused(state, found_at) is not ends
    assert watchdog.is_paused(state, state.watch.failed_times[-1] + 9.0) is not ends


def test_nobody_is_blamed_for_an_epoch_that_a_bad_path_explains() -> None:
    state = with_failed_epoch(accusing(trained(), "node1", "node0"), CauseKind.CONTACT, 1.0)
    assert state.watch.blamed == {"node0": 1}
    fault = PathFault(("node0", "node1"), (), "", 2.0)
    state = with_failed_epoch(state.of(paths=(fault,)), CauseKind.CONTACT, 2.0)
    assert state.watch.blamed == {}, "nor for the epochs before: more paths may be bad"
    state = with_failed_epoch(state, CauseKind.CONTACT, 3.0)
    assert state.watch.blamed == {"node0": 1}, "this epoch avoided the path"


def accusing(state: JobState, accuser: str, accused: str) -> JobState:
    member = state.members[accuser]
    member = replace(member, report=replace(member.report, suspects=(accused,)))
    return state.of(members={**state.members, accuser: member})


def with_failed_epoch(state: JobState, kind: CauseKind, now: float) -> JobState:
    """Return the state after an epoch that failed by a cause of this kind."""
    change = job.EpochChange(
        epoch=2, causes=(job.Cause(kind, "x"),), boundary=False, lost=(),
        nodes_before=3, began=now, old_plan=None, step=0, microbatch=0,
    )  # fmt: skip
    return watchdog.epoch_began(state.of(change=change), now)[0]


def test_progress_ends_the_back_off() -> None:
    bench = Bench(trained())
    fail(bench, suspects=("node1",))
    assert bench.state.watch.attempts == 1 and watchdog.summary(bench.state, bench.now)
    step = bench.state.newest_step + 1
    stepped, _, _ = transition(
        bench.state, m.StepDone(2, StepRecord(step, 1.0, 1.0, 1.0), 0.5, 0.1), bench.now
    )
    assert stepped.watch.attempts == 0 and not watchdog.summary(stepped, bench.now)
    fresh = m.NodeReport(NodeInfo("node9", "n9", "node9:1"), NodePhase.EMPTY, 0)
    joined, _, _ = transition(bench.state, fresh, bench.now)
    assert joined.watch.attempts == 0


def test_a_node_that_joins_again_clears_only_its_own_blame() -> None:
    bench = Bench(trained())
    fail(bench, "node0", suspects=("node1",), failures=(FULL,))
    watch = replace(bench.state.watch, blamed={"node1": 2, "node2": 1}, retry_at=bench.now + 50.0)
    before = bench.state.of(watch=watch)
    former = before.members["node2"].report.info.incarnation
    before, _, _ = record_event(before, job.ConnectionClosed("node2", former), bench.now)
    again = m.NodeReport(NodeInfo("node2", "n2", "node2:2"), NodePhase.EMPTY, 0)
    joined, _, _ = record_event(before, again, bench.now)
    assert joined.members["node2"].report.info.incarnation == "n2"
    assert (joined.watch.attempts, joined.watch.retry_at) == (watch.attempts, watch.retry_at)
    assert joined.watch.blamed == {"node1": 2} and joined.watch.cause == watch.cause
    fresh = m.NodeReport(NodeInfo("node9", "n9", "node9:1"), NodePhase.EMPTY, 0)
    joined, _, _ = record_event(before, fresh, bench.now)
    assert joined.watch.attempts == 0 and not watchdog.is_paused(joined, bench.now)
    assert joined.watch.blamed == watch.blamed


def test_a_lost_node_is_no_failed_epoch() -> None:
    bench = Bench(trained())
    incarnation = bench.state.members["node1"].report.info.incarnation
    bench.apply(job.ConnectionClosed("node1", incarnation))
    bench.apply(job.PortRefused("node1", incarnation))
    bench.wait(1.0, "node0", "node2")
    assert bench.state.epoch == 2 and bench.state.watch.attempts == 0


@pytest.mark.parametrize(
    ("node", "ago_s", "waits_s"),
    [("node1", 100.0, 0.0), ("node1", 20.0, 40.0), ("node9", 100.0, 60.0)],
)
def test_the_pause_ends_with_the_loss_of_a_node_that_took_part(
    node: str, ago_s: float, waits_s: float
) -> None:
    """The oldest of five failed epochs began `ago_s` ago. node9 is a spare."""
    bench = Bench(trained())
    bench.report("node0", suspects=("node1",))
    while bench.state.phase is JobPhase.RUNNING:
        bench.wait(STEP_S, *NODES)
    spare = NodeInfo("node9", "n9", "node9:1")
    bench.apply(m.NodeReport(spare, NodePhase.EMPTY, 0))
    bench.report("node9", epoch=bench.state.epoch)
    began, watch = bench.now, bench.state.watch
    times = tuple(began - ago_s + i for i in range(5))
    watch = replace(watch, attempts=5, failed_times=times, retry_at=began + 60.0)
    bench.state = bench.state.of(watch=watch)
    for name in NODES:
        bench.state = halt(bench.state, name)
    assert bench.state.phase is JobPhase.HALTING
    incarnation = bench.state.members[node].report.info.incarnation
    bench.apply(job.ConnectionClosed(node, incarnation))
    bench.apply(job.PortRefused(node, incarnation))
    assert node not in bench.state.members
    while bench.state.phase is JobPhase.HALTING:
        bench.wait(STEP_S)
        assert bench.now < began + 70.0
    assert waits_s <= bench.now - began <= waits_s + 1.0


def test_the_watch_is_saved_with_the_state() -> None:
    bench = halting()
    bench.wait(9.0)
    assert bench.state.watch.orders
    assert codec.loads(JobState, codec.dumps(bench.state)) == bench.state


# ---- whole jobs -----------------------------------------------------------------------------


def ended(world: World) -> World:
    world.run(limit=600.0)
    world.check_end()
    return world


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["spin", "mute", "no-slots"])
def test_a_job_continues_with_a_broken_node(kind: str, seed: int) -> None:
    world = World(seed, 3, steps=20)
    world.inject(Fault(kind, 3.0, seed))
    assert ended(world).coordinator.state.phase is JobPhase.FINISHED
    assert longest_pause(world) < 10.5


def longest_pause(world: World) -> float:
    """Longest time without a finished step."""
    ends = sorted(at for at, _ in world.coordinator.steps)
    return max(b - a for a, b in pairwise(ends))


@pytest.mark.parametrize("seed", range(4))
def test_a_job_ends_if_no_node_has_memory(seed: int) -> None:
    world = World(seed, 3, steps=40)
    for node in range(3):
        world.inject(Fault("no-memory", 3.0, node))
    world.inject(Fault("kill", 3.1, 1))
    world.run(limit=600.0)
    finish = world.coordinator.finish
    assert finish is not None and "No space left on device" in finish.reason and finish.code == 1
    assert world.now < 16.0 and len(world.coordinator.halts) < 8


@pytest.mark.parametrize("seed", range(12))
def test_a_store_that_lost_its_last_writes_stalls_nothing(seed: int) -> None:
    world = World(seed, 3, steps=12)
    world.inject(Fault("crash", 3.0, seed))
    world.inject(Fault("coordinator-amnesia", 3.0 + 0.06 * seed, 0, 0.4))
    assert ended(world).coordinator.state.phase is JobPhase.FINISHED
    assert longest_pause(world) < 6.0
