"""What an agent does: the node's side of every epoch change, as a pure transition.

    EMPTY --Launch--> STARTING --all attached--> IDLE --Install--> INSTALLING --all ready--> RUNNING
    RUNNING | INSTALLING --Halt--> HALTING --all halted--> HALTED --Install--> INSTALLING (or IDLE, as a spare)
    any --worker died--> STARTING (workers of this node alone are started again; its vault stays)

The agent reports its whole condition after every change (`Report`), so messages may be lost and repeated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.core.node.node_state import (
    BLIND_S,
    MAX_CRASHES,
    Action,
    Enter,
    Evidence,
    Exited,
    Fence,
    KillWorkers,
    Leave,
    Looked,
    NodeState,
    PrefetchDone,
    Rejoin,
    Report,
    Result,
    Said,
    Spawn,
    Tell,
    Worker,
    heartbeat,
    hung,
    moved,
    report,
)
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase as Phase
from elastic.core.protocol.timeouts import budget
from elastic.domain.errors import service_exit

__all__ = [
    "MOVES", "Action", "Enter", "Evidence", "Exited", "Fence", "KillWorkers", "Leave", "Looked", "NodeState",
    "PrefetchDone", "Rejoin", "Report", "Result", "Said", "Spawn", "Tell", "Worker", "heartbeat", "hung", "report",
    "transition",
]  # fmt: skip

_ATTACHED = (Phase.IDLE, Phase.INSTALLING, Phase.HALTING, Phase.HALTED)
MOVES: tuple[tuple[tuple[Phase, ...], str, Phase], ...] = (
    ((Phase.EMPTY,), "launch", Phase.STARTING),
    ((Phase.STARTING,), "all workers attached", Phase.IDLE),
    ((Phase.STARTING,), "all workers attached, an epoch change waits", Phase.HALTED),
    ((Phase.HALTED,), "install", Phase.INSTALLING),
    ((Phase.INSTALLING,), "all workers ready", Phase.RUNNING),
    ((Phase.INSTALLING, Phase.RUNNING, Phase.FINISHED), "halt", Phase.HALTING),
    ((Phase.HALTING,), "all workers halted", Phase.HALTED),
    ((Phase.IDLE,), "halt, nothing runs here", Phase.HALTED),
    ((Phase.HALTED,), "install, as a spare", Phase.IDLE),
    ((Phase.RUNNING,), "all steps done", Phase.FINISHED),
    ((*_ATTACHED, Phase.RUNNING, Phase.FINISHED), "a worker died", Phase.STARTING),
    ((*_ATTACHED, Phase.STARTING), "crashed too often", Phase.FAILED),
    ((Phase.STARTING,), "script ended", Phase.FINISHED),
    ((Phase.STARTING,), "script failed", Phase.FAILED),
    ((Phase.STARTING, Phase.FINISHED, Phase.FAILED), "group restart", Phase.STARTING),
)
"""(from, why, to): every change of phase that `transition` makes. docs/design/states.md is drawn from this table."""


def transition(state: NodeState, event: Any, now: float) -> Result:
    """Return the node's next state, what to do, and why. Unknown or stale events change nothing."""
    match event:
        case m.Launch():
            return _launch(state, event)
        case m.Halt():
            return _halt(state, event, now)
        case m.Install():
            return _install(state, event)
        case m.Stop():
            return state, (Tell(event), Leave(service_exit(event.code))), "the job is over for this node"
        case m.Fenced() if state.phase is Phase.EMPTY:
            return state, (Report(),), f"nothing to give up: {event.reason}"
        case m.Fenced():
            return state, (KillWorkers(event.reason), Rejoin()), f"no longer a member: {event.reason}"
        case m.Released():
            return state, (KillWorkers(event.reason), Rejoin()), f"released: {event.reason}"
        case Said():
            return _said(state, event, now)
        case Exited():
            return _exited(state, event)
        case Looked():
            return _looked(state, event, now)
        case PrefetchDone():
            return replace(state, prefetched=event.epoch), (Report(),), "prefetch complete"
        case _:
            return state, (), "not for the node"


def _launch(state: NodeState, event: m.Launch) -> Result:
    if state.launch is not None and event.restart <= state.launch.restart:
        return state, (Report(),), "already launched"
    actions: tuple[Action, ...] = (Spawn(event),)
    if any(w.alive for w in state.workers):
        actions = (KillWorkers("group restart"), Spawn(event))
    return _fresh(replace(state, launch=event, elastic=False, crashes=0)), (*actions, Report()), "launch"


def _fresh(state: NodeState) -> NodeState:
    """The node with all its workers just started."""
    workers = tuple(Worker(alive=True) for _ in range(state.info.workers))
    return replace(state, phase=Phase.STARTING, workers=workers, suspects=(), finished=None, failed=None)


def _halt(state: NodeState, event: m.Halt, now: float) -> Result:
    if event.epoch <= state.epoch:
        return state, (Report(),), f"halt of epoch {event.epoch} is not newer than {state.epoch}"
    workers = tuple(replace(w, ready=None, moved=now) for w in state.workers)
    state = replace(
        state,
        epoch=event.epoch,
        workers=workers,
        resumed_at=0.0,
        prefetched=-1,
        finished=None,
        suspects=(),
        waiting=True,
        boundary=event.boundary,
    )
    if state.able and state.phase in (Phase.INSTALLING, Phase.RUNNING, Phase.HALTING, Phase.FINISHED):
        return replace(state, phase=Phase.HALTING), (Tell(event),), "workers are told to halt"
    # Until a planned change others still finish their step, and may need this vault for it.
    fence = () if event.boundary else (Fence(event.epoch),)
    if state.phase in (Phase.IDLE, Phase.HALTED):
        return replace(state, phase=Phase.HALTED), (*fence, Report()), "nothing ran here"
    return state, (*fence, Report()), "no worker to halt; the vault answers"


def _install(state: NodeState, event: m.Install) -> Result:
    if event.epoch != state.epoch or state.phase is not Phase.HALTED:
        return (
            state,
            (Report(),),
            f"install of epoch {event.epoch} does not fit epoch {state.epoch} ({state.phase})",
        )
    workers = tuple(replace(w, halted=None) for w in state.workers)
    state = replace(state, workers=workers, suspects=(), cause="", hung=False, detect_s=0.0)
    state = replace(state, waiting=False, finished=None)
    if state.info.node not in event.assignment.plan.nodes():
        return replace(state, phase=Phase.IDLE), (Enter(event), Report()), "spare in this epoch"
    return replace(state, phase=Phase.INSTALLING), (Enter(event), Tell(event)), "workers install"


def _said(state: NodeState, event: Said, now: float) -> Result:
    if event.rank >= len(state.workers):
        return state, (), "no such worker"
    worker = replace(state.workers[event.rank], seen=now)
    message = event.message
    match message:
        case m.Attach():
            worker = replace(worker, attach=message, moved=now)
            state = replace(_put(state, event.rank, worker), elastic=True)
            if not state.able or state.phase is not Phase.STARTING:
                return state, (), "waiting for the other workers"
            phase = Phase.HALTED if state.waiting else Phase.IDLE
            return replace(state, phase=phase), (Report(),), "all workers attached"
        case m.Progress():
            before = worker.progress
            if before is None or message.counter != before.counter:
                worker = replace(worker, moved=now)
            state = _timed(state, message)
            return _put(state, event.rank, replace(worker, progress=message)), (), "progress"
        case m.Halted():
            return _halted(_put(state, event.rank, replace(worker, halted=message)))
        case m.Ready():
            if message.epoch != state.epoch:
                return _put(state, event.rank, worker), (), "ready for an older epoch"
            state = _put(state, event.rank, replace(worker, ready=message))
            if state.phase is not Phase.INSTALLING or not all(w.ready for w in state.workers):
                return state, (), "waiting for the other workers"
            return replace(state, phase=Phase.RUNNING, crashes=0), (Report(),), "installed"
        case m.Resumed():
            state = _put(state, event.rank, worker)
            if message.epoch != state.epoch or state.resumed_at:
                return state, (), "resumed before"
            return replace(state, resumed_at=message.at), (Report(),), "first micro-batch of the epoch"
        case m.Protected():
            state = _put(state, event.rank, replace(worker, protected=message.epoch))
            return state, (Report(),), "copies are whole at the peer"
        case m.CommFailed():
            state = _put(state, event.rank, worker)
            if message.epoch != state.epoch:
                return state, (), "contact lost in an older epoch"
            suspects = tuple(dict.fromkeys((*state.suspects, *(message.nodes or ("?",)))))
            return replace(state, suspects=suspects), (Report(),), f"contact lost: {message.detail}"
        case m.Finished():
            phase = Phase.FINISHED if state.phase is Phase.RUNNING else state.phase
            state = replace(_put(state, event.rank, worker), phase=phase)
            if state.finished is None or message.params_sha256:
                state = replace(state, finished=message)
            return state, (Report(),), "all steps done"
        case m.Crashed():
            return _put(state, event.rank, replace(worker, error=message.message)), (), message.message
        case m.Failed():
            state = replace(_put(state, event.rank, worker), failed=message)
            return state, (Report(),), message.message
        case _:
            return _put(state, event.rank, worker), (), "not for the node"


def _timed(state: NodeState, message: m.Progress) -> NodeState:
    """Limits follow the longest micro-batch that was measured here."""
    if message.measured is None:
        return state
    seen = state.seen.grown(microbatch_s=message.measured.forward_s + message.measured.backward_s)
    if seen is state.seen:
        return state
    old = state.limits
    return replace(state, seen=seen, limits=budget(old.silence_s, heartbeat_s=old.heartbeat_s, seen=seen))


def _halted(state: NodeState) -> Result:
    if state.phase is not Phase.HALTING:
        return state, (), "not halting"
    if not all(w.halted is not None for w in state.workers):
        return state, (), "waiting for the other workers"
    # After a planned halt others may still publish their update; the installation fences.
    fence = () if state.boundary else (Fence(state.epoch),)
    return replace(state, phase=Phase.HALTED, suspects=()), (*fence, Report()), "all workers halted"


def _exited(state: NodeState, event: Exited) -> Result:
    if event.rank >= len(state.workers) or not state.workers[event.rank].alive:
        return state, (), "already known"
    worker = replace(state.workers[event.rank], alive=False)
    state = _put(state, event.rank, worker)
    if not state.elastic:
        return _script_exited(state, event)
    if state.failed is not None or (state.finished is not None and event.code == 0):
        return state, (Report(),), "worker ended"
    cause = worker.error or state.cause or f"worker {event.rank} ended with {_name(event.code)}"
    others = (KillWorkers(cause),) if any(w.alive for w in state.workers) else ()
    state = replace(
        state,
        cause=cause,
        hung=state.hung and not worker.error,
        crashes=state.crashes + 1,
        crash_count=state.crash_count + 1,
    )
    if state.crashes > MAX_CRASHES:
        text = f"{cause}; {state.crashes} crashes without a finished installation between them"
        dead = tuple(replace(w, alive=False) for w in state.workers)
        return replace(state, phase=Phase.FAILED, workers=dead), (*others, Report()), text
    assert state.launch is not None
    fresh = replace(_fresh(state), cause=cause)
    return fresh, (*others, Spawn(state.launch), Report()), cause


def _script_exited(state: NodeState, event: Exited) -> Result:
    """A script that does not use elastic: torchrun's rules; the coordinator decides on restarts."""
    if event.code != 0:
        dead = tuple(replace(w, alive=False) for w in state.workers)
        state = replace(
            state, phase=Phase.FAILED, workers=dead, cause=f"worker {event.rank}: {_name(event.code)}"
        )
        return state, (KillWorkers("a worker failed"), Report()), f"worker ended with {_name(event.code)}"
    if any(w.alive for w in state.workers):
        return state, (), "waiting for the other workers"
    return replace(state, phase=Phase.FINISHED), (Report(),), "all workers ended"


def _looked(state: NodeState, event: Looked, now: float) -> Result:
    state = _held_up(state, now)
    for evidence in event.evidence:
        if evidence.rank >= len(state.workers):
            continue
        worker = state.workers[evidence.rank]
        if not worker.alive or worker.attach is None:
            continue
        worker = moved(worker, evidence, now)
        if worker is not state.workers[evidence.rank]:
            state = _put(state, evidence.rank, worker)
        halting = state.phase is Phase.HALTING and not state.boundary and worker.halted is None
        reason = hung(worker, evidence.stopped, now, state.limits, halting=halting)
        if reason:
            state = replace(state, cause=f"hang: {reason}", hung=True, detect_s=now - worker.seen)
            return state, (KillWorkers(state.cause),), reason
    return state, (), "healthy"


def _held_up(state: NodeState, now: float) -> NodeState:
    """An agent that was itself held up does not count that time against its workers."""
    late = now - state.looked - BLIND_S if state.looked else 0.0
    if late > 0:
        workers = tuple(replace(w, seen=w.seen + late, moved=w.moved + late) for w in state.workers)
        state = replace(state, workers=workers)
    return replace(state, looked=now)


def _put(state: NodeState, rank: int, worker: Worker) -> NodeState:
    return replace(state, workers=(*state.workers[:rank], worker, *state.workers[rank + 1 :]))


def _name(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
