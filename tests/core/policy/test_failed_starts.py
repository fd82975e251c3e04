"""Nodes whose workers end before they attach, while the others train or start.

The rules of the node and those of the coordinator run together; a message between them takes no
time. The other nodes train, or have halted, and send heartbeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from elastic.core.coordinator.transitions import SCRIPT_S, transition
from elastic.core.job import quarantine
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState
from elastic.core.node import node as agent
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import Preflight
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import NodeInfo
from tests.core.coordinator.test_transitions import halt, running
from tests.core.recovery.job_model import make_spec

NODE = "node9"
STEP_S = 0.25


class Newcomer:
    """A node that joins a job of three nodes."""

    def __init__(self) -> None:
        state = running()
        assert state.record is not None
        done = m.StepDone(1, replace(state.record, step=state.newest_step + 1), 0.5, 0.1)
        self.state, _, _ = transition(state, done, state.updated_at)
        self.others = tuple(state.members)
        self.now, self.begin = state.updated_at, state.updated_at
        self.info = replace(
            state.members["node1"].report.info, node=NODE, incarnation="0", release=""
        )
        self.node, self.lives = agent.NodeState(self.info), 0
        self.spawned: list[float] = []
        self.orders: list[Any] = []
        self._act((agent.SendReport(),))

    def event(self, event: Any) -> None:
        """The coordinator handles an event."""
        self.state, actions, _ = transition(self.state, event, self.now)
        self.orders += [a.message for a in actions if isinstance(a, job.Send) and a.node == NODE]

    def apply(self, event: Any) -> None:
        """The node handles an event."""
        self.node, actions, _ = agent.transition(self.node, event, self.now)
        self._act(actions)

    def _act(self, actions: Sequence[agent.NodeAction]) -> None:
        for action in actions:
            match action:
                case agent.SendReport():
                    joins = self.node.phase is NodePhase.EMPTY
                    checked = Preflight("on", 0.1, (), 1.0) if joins else None
                    self.event(replace(agent.report(self.node), preflight=checked))
                case agent.SpawnWorkers():
                    self.spawned.append(self.now)
                case agent.Rejoin():
                    self.lives += 1
                    self.node = agent.NodeState(replace(self.info, incarnation=str(self.lives)))
                    self._act((agent.SendReport(),))

    def pass_time(self, *others: str) -> None:
        """Deliver the orders, then let `STEP_S` pass with heartbeats of the node and `others`."""
        while self.orders:
            self.apply(self.orders.pop(0))
        self.now += STEP_S
        beats = []
        for name in others:
            report = self.state.members[name].report
            signs = int(self.now * 4)
            incarnation = report.info.incarnation
            beats.append(m.Heartbeat(name, incarnation, report.step, 0, signs=signs))
        if NODE in self.state.members:
            beats.append(agent.heartbeat(self.node))
        self.event(job.Heartbeats(tuple(beats)))
        self.event(job.Tick())


def test_workers_that_fail_before_they_attach_are_started_after_growing_pauses() -> None:
    bench = Newcomer()
    while bench.now < bench.begin + 120.0:
        bench.pass_time(*bench.others)
        starts = bench.node.phase is NodePhase.STARTING
        if starts and bench.now >= bench.spawned[-1] + 2.0:
            bench.apply(agent.WorkerExited(0, 1, "ModuleNotFoundError: no module named 'foo'"))
    assert bench.state.phase is JobPhase.RUNNING, "the others train on"
    pauses = [b - a for a, b in pairwise(bench.spawned)]
    assert 2 <= len(bench.spawned) <= 4 and pauses == sorted(pauses), pauses
    finding, *_ = quarantine.record_of(bench.state, NODE).findings
    assert "ModuleNotFoundError" in finding.reason


def test_a_node_whose_script_ended_does_not_hold_up_a_recovery() -> None:
    """The script of a node that joins ends with code 0 before it takes part."""
    bench = Newcomer()
    bench.pass_time(*bench.others)
    bench.apply(agent.WorkerExited(0, 0))
    assert bench.state.members[NODE].report.phase is NodePhase.FINISHED
    incarnation = bench.state.members["node1"].report.info.incarnation
    bench.event(job.ConnectionClosed("node1", incarnation))
    bench.event(job.PortRefused("node1", incarnation))
    assert bench.state.phase is JobPhase.HALTING
    rest = [name for name in bench.others if name != "node1"]
    for name in rest:
        bench.state = halt(bench.state, name)
    began = bench.now
    while bench.state.phase is JobPhase.HALTING and bench.now < began + 60.0:
        bench.pass_time(*rest)
    assert bench.state.phase is JobPhase.INSTALLING and bench.now <= began + 1.0
    assert NODE in bench.state.members and NODE not in _plan_of(bench.state)


def _plan_of(state: JobState) -> tuple[str, ...]:
    assert state.plan is not None
    return (*state.plan.nodes(), *state.plan.spares)


class Start:
    """Four nodes start, and two are enough. Nobody knows yet whether the script uses elastic."""

    def __init__(self) -> None:
        self.state, self.now = JobState(job.Policy(min_nodes=2, max_nodes=4)), 100.0
        infos = (NodeInfo(f"node{i}", f"i{i}", f"h:{i}") for i in range(4))
        self.nodes = {info.node: agent.NodeState(info) for info in infos}
        for name in self.nodes:
            self._event(agent.report(self.nodes[name]))
        self.wait(1.5)
        assert self.state.phase is JobPhase.LAUNCHED

    def wait(self, seconds: float) -> None:
        """Let time pass, with heartbeats of all nodes."""
        end = self.now + seconds
        while self.now < end and self.state.ending is None:
            self.now += STEP_S
            self._event(job.Heartbeats(tuple(map(agent.heartbeat, self.nodes.values()))))
            self._event(job.Tick())

    def exit(self, name: str, code: int = 1) -> None:
        self._apply(name, agent.WorkerExited(0, code, "ImportError: libcuda" if code else ""))

    def attach(self, name: str) -> None:
        self._apply(name, agent.WorkerMessage(0, m.Attach(0, 1, make_spec(4, 3, 5, 1), "x:1")))

    def train(self) -> None:
        """The workers of the plan install it, and compute a micro-batch."""
        epoch = self.state.epoch
        for message in (m.Ready(epoch, 0.0, 0.0), m.Protected(epoch), m.Resumed(epoch, self.now)):
            for name in _plan_of(self.state):
                self._apply(name, agent.WorkerMessage(0, message))
        assert self.state.stable

    def _event(self, event: Any) -> None:
        self.state, actions, _ = transition(self.state, event, self.now)
        for action in actions:
            if isinstance(action, job.Send):
                self._apply(action.node, action.message)

    def _apply(self, name: str, event: Any) -> None:
        self.nodes[name], actions, _ = agent.transition(self.nodes[name], event, self.now)
        if any(isinstance(action, agent.SendReport) for action in actions):
            self._event(agent.report(self.nodes[name]))


def test_a_node_that_fails_before_any_worker_attaches_is_left_out() -> None:
    bench = Start()
    bench.exit("node3")
    bench.wait(20.0)
    assert bench.state.spec is None and bench.state.ending is None, "it may use elastic"
    for name in ("node0", "node1", "node2"):
        bench.attach(name)
    bench.wait(1.0)
    assert bench.state.phase is JobPhase.INSTALLING
    assert set(_plan_of(bench.state)) == {"node0", "node1", "node2"}


def test_a_node_that_failed_before_any_worker_attached_begins_anew_once_the_others_train() -> None:
    """Nothing is known about its health: it had no pre-flight."""
    bench = Start()
    bench.exit("node3")
    for name in ("node0", "node1", "node2"):
        bench.attach(name)
    bench.wait(1.0)
    assert "node3" not in bench.state.health
    bench.train()
    bench.wait(1.0)
    assert "node3" not in bench.state.members, "it joins again as another incarnation"


@pytest.mark.parametrize("others", [0, 1, None])
def test_a_script_without_elastic_that_fails_on_one_node_ends(others: int | None) -> None:
    """At once if the workers of the others have ended (code `others`), else after `SCRIPT_S`."""
    bench = Start()
    bench.exit("node3")
    bench.wait(0.2)
    assert bench.state.ending is None
    for name in ("node0", "node1", "node2"):
        if others is not None:
            bench.exit(name, others)
    bench.wait(1.0 if others is not None else SCRIPT_S)
    assert bench.state.ending is not None and bench.state.ending.code == 1
    reason = bench.state.ending.reason
    assert reason.startswith("node3: "), "the first error, of which others may only be effects"
    assert reason.endswith("ImportError: libcuda"), "nothing was restarted"


def test_workers_that_crash_on_every_node_end_the_job() -> None:
    """On one node they never attached."""
    state = running()
    crashed: dict[str, Any] = {"phase": NodePhase.FAILED, "able": False, "cause": "signal 11"}
    members = {
        name: replace(mb, report=replace(mb.report, elastic=name != "node2", **crashed))
        for name, mb in state.members.items()
    }
    state, _, _ = transition(state.of(members=members), job.Tick(), state.updated_at + STEP_S)
    assert state.ending is not None
    assert state.ending.reason == "workers crash on every node; node0: signal 11"
