"""`node.PHASE_CHANGES`, the source of docs/design/states.md, matches the transition."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from elastic.core.node import node
from elastic.core.node.node import MAX_CRASHES
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.core.protocol.version import ProtocolVersion
from elastic.domain.types import Assignment, JobSpec, NodeInfo, Pipeline, Plan, Stage, Unit

Event = tuple[str, Any]
INFO = NodeInfo("node0", "first", "127.0.0.1:1")
SPEC = JobSpec(layers=(), n_microbatches=1, n_steps=1)
EPOCHS = (1, 2)


def _install(epoch: int, holder: str) -> m.Install:
    stage = Stage(Unit(holder), 0, 1)
    return m.Install(epoch, Assignment(Plan(epoch, 1, 1, 1, (Pipeline((stage,), (0,)),)), 0))


def _orders(state: node.NodeState) -> Iterator[Event]:
    """Messages that the coordinator may send."""
    if state.phase is NodePhase.EMPTY:
        yield "launch", m.Launch(0, 1, 0, 1, "127.0.0.1", 1, 0)
        return
    if not state.elastic:
        yield "group restart", m.Launch(0, 1, 0, 1, "127.0.0.1", 1, 1)
    for epoch in EPOCHS:
        yield "halt, nothing runs here" if state.phase is NodePhase.IDLE else "halt", m.Halt(epoch)
        yield "install", _install(epoch, "node0")
        yield "install, as a spare", _install(epoch, "node1")


def _worker_events(state: node.NodeState) -> Iterator[Event]:
    """Messages and ends of the one worker."""
    if not state.workers or not state.workers[0].alive:
        return
    if not state.able:
        waits = ", an epoch change waits" if state.waiting else ""
        yield f"all workers attached{waits}", node.WorkerMessage(0, m.Attach(0, 1, SPEC, ""))
    elif state.phase is NodePhase.INSTALLING:
        yield "all workers ready", node.WorkerMessage(0, m.Ready(state.epoch, 0.0, 0.0))
    elif state.phase is NodePhase.RUNNING:
        yield "all steps done", node.WorkerMessage(0, m.Finished(1))
    elif state.phase is NodePhase.HALTING:
        yield "all workers halted", node.WorkerMessage(0, m.Halted(state.epoch, 0))
    if state.phase is NodePhase.STARTING:
        other = node.WorkerMessage(0, m.Hello(0, 1, ProtocolVersion(99)))
        yield "workers of another version", other
    limit = state.crashes >= MAX_CRASHES
    died = "crashed too often" if limit else "a worker died"
    yield died if state.elastic else "script failed", node.WorkerExited(0, 1)
    if not state.elastic:
        yield "script ended", node.WorkerExited(0, 0)


def _changes() -> set[tuple[NodePhase, str, NodePhase]]:
    """Explore every state that these events lead to."""
    start = node.NodeState(INFO)
    seen, queue, found = {start}, deque([start]), set()
    while queue:
        state = queue.popleft()
        for why, event in (*_orders(state), *_worker_events(state)):
            after, _, _ = node.transition(state, event, 0.0)
            if after.phase is not state.phase or (why == "group restart" and after != state):
                found.add((state.phase, why, after.phase))
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return found


def test_moves_match_the_transition() -> None:
    declared = {
        (before, why, after) for befores, why, after in node.PHASE_CHANGES for before in befores
    }
    assert _changes() == declared
