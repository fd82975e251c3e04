"""What an agent does: the node's side of every epoch change, as a pure transition.

    EMPTY --Launch--> STARTING --all attached--> IDLE --Install--> INSTALLING --all ready--> RUNNING
    RUNNING | INSTALLING --Halt--> HALTING --all halted--> HALTED --Install--> INSTALLING (or IDLE, as a spare)
    any --worker died--> STARTING (workers of this node alone are started again; its vault stays)

The agent reports its whole condition after every change (`SendReport`), so messages may be lost and repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase as Phase
from elastic.core.protocol.timeouts import DEFAULT, NOTHING, Seen, Timeouts, budget
from elastic.domain.errors import service_exit
from elastic.domain.types import NodeInfo

STOPPED_S = 0.4
"""A worker that the kernel shows as stopped, and that has been silent this long, is hung."""
FAMILY_CPU_S = 0.2
"""A worker whose descendants used so much more CPU time waits for them (compilers). Idle ones use a trickle."""
MAX_POLL_GAP_S = 1.0
"""An agent that looks at its workers later than this was held up itself (stopped, starved, its machine suspended): what
they said meanwhile lies unread, so that time tells nothing of them."""
MAX_CRASHES = 3
"""Crashes of a node's workers without a finished installation between them, before the node gives up."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker process as its agent sees it."""

    alive: bool = False
    attach: m.Attach | None = None
    halted: m.Halted | None = None
    ready: m.Ready | None = None
    protected: int = -1
    progress: m.Progress | None = None
    seen: float = 0.0
    """Time of its last message."""
    with_activity: float = 0.0
    """Time at which its counter last grew or it last used CPU."""
    cpu_s: float = 0.0
    family_cpu_s: float = 0.0
    """CPU time of its descendants when it last counted; 0: it was not looked at."""
    error: str = ""
    """Its last words: a device broke."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """An agent's knowledge of its node."""

    info: NodeInfo
    phase: Phase = Phase.EMPTY
    epoch: int = 0
    elastic: bool = False
    launch: m.Launch | None = None
    workers: tuple[WorkerState, ...] = ()
    resumed_at: float = 0.0
    prefetched: int = -1
    boundary: bool = False
    """The halt under way is a planned one."""
    suspects: tuple[str, ...] = ()
    cause: str = ""
    hang_reason: bool = False
    """`cause` is a hang."""
    detect_s: float = 0.0
    crashes: int = 0
    fallen: int = 0
    """Times that workers went down in this incarnation."""
    looked: float = 0.0
    """Time of the last look at the processes."""
    finished: m.Finished | None = None
    failed: m.Failed | None = None
    waiting: bool = False
    """Told to halt for `epoch`, and not yet part of it: workers that attach now may still enter."""
    seen: Seen = NOTHING
    """The longest times that this node's workers measured."""
    limits: Timeouts = DEFAULT
    """What follows from them, and from the silence that is tolerated."""

    @property
    def able(self) -> bool:
        return bool(self.workers) and all(w.alive and w.attach is not None for w in self.workers)


# ---- events (coordinator and worker messages are events too) -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """A worker said something."""

    rank: int
    message: Any


@dataclass(frozen=True, slots=True)
class WorkerExited:
    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """What the kernel says of a worker process."""

    rank: int
    stopped: bool
    cpu_s: float
    """CPU time of its main thread."""
    on_disk: bool = False
    """It waits for storage and cannot be woken (disk sleep)."""
    family_cpu_s: float = 0.0
    """CPU time of its descendants, those that ended included; 0: it was not looked at."""


@dataclass(frozen=True, slots=True)
class WorkersPolled:
    """Periodic look at the worker processes."""

    evidence: tuple[ProcessSample, ...]


@dataclass(frozen=True, slots=True)
class PrefetchDone:
    epoch: int


# ---- actions ----


@dataclass(frozen=True, slots=True)
class SendToWorkers:
    """Send `message` to every attached worker (rank None) or one of them."""

    message: Any
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class SpawnWorkers:
    launch: m.Launch


@dataclass(frozen=True, slots=True)
class KillWorkers:
    reason: str


@dataclass(frozen=True, slots=True)
class FenceVault:
    """Refuse copies of epochs below `epoch` from now on; what the vault holds now is the inventory."""

    epoch: int


@dataclass(frozen=True, slots=True)
class EnterEpoch:
    """The vault enters the epoch: new peers, new addresses."""

    install: m.Install


@dataclass(frozen=True, slots=True)
class SendReport:
    """Send the node's condition to the coordinator."""


@dataclass(frozen=True, slots=True)
class EndAgent:
    """Let the workers end, then end the agent with this exit code."""

    code: int


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Forget everything, vault included, and join again as a new incarnation."""


NodeAction = (
    SendToWorkers | SpawnWorkers | KillWorkers | FenceVault | EnterEpoch | SendReport | EndAgent | Rejoin
)
NodeTransition = tuple[NodeState, tuple[NodeAction, ...], str]


def report(state: NodeState) -> m.NodeReport:
    """The node's condition, without inventory."""
    attached = [w.attach for w in state.workers if w.attach]
    progress = [w.progress for w in state.workers if w.progress]
    return m.NodeReport(
        info=state.info,
        phase=state.phase,
        epoch=state.epoch,
        spec=attached[0].spec if attached else None,
        store=attached[0].store if attached else "",
        able=state.able,
        elastic=state.elastic,
        halted=tuple(w.halted for w in state.workers if w.halted),
        ready=tuple(w.ready for w in state.workers if w.ready),
        resumed_at=state.resumed_at,
        protected=min((w.protected for w in state.workers), default=-1),
        prefetched=state.prefetched,
        suspects=state.suspects,
        cause=state.cause,
        hang_reason=state.hung,
        detect_s=state.detect_s,
        finished=state.finished,
        failed=state.failed,
        restart=state.launch.restart if state.launch else -1,
        step=progress[0].step if progress else 0,
        microbatch=progress[0].microbatch if progress else 0,
        fallen=state.fallen,
    )


def heartbeat(state: NodeState) -> m.Heartbeat:
    """A sign of life: how far the node is, and what its workers last measured."""
    told = [w.progress for w in state.workers if w.progress is not None]
    measured = tuple(p.measured for p in told if p.measured is not None)
    at = told[0] if told else m.Progress(0, "idle", 0, 0)
    return m.Heartbeat(state.info.node, state.info.incarnation, at.step, at.microbatch, measured)


def with_activity(worker: WorkerState, evidence: ProcessSample, now: float) -> WorkerState:
    """What the kernel saw it do. One that waits for storage is not hung, however long: that is no fault of its own."""
    if evidence.cpu_s > worker.cpu_s:
        worker = replace(worker, cpu_s=evidence.cpu_s, moved=now)
    family_s, before_s = evidence.family_cpu_s, worker.family_cpu_s
    if before_s and family_s - before_s >= FAMILY_CPU_S:
        worker = replace(worker, family_cpu_s=family_s, moved=now)
    elif family_s and (not before_s or family_s < before_s):
        worker = replace(worker, family_cpu_s=family_s)
    return replace(worker, moved=now) if evidence.on_disk else worker


def hang_reason(
    worker: WorkerState, stopped: bool, now: float, limits: Timeouts = DEFAULT, *, halting: bool = False
) -> str:
    """Say why this worker is hung, or "". Being slow, or waiting for others or for storage, is never enough; but one
    that is `halting` in the middle of a step waits for nobody."""
    silent = now - worker.seen
    if stopped and silent > STOPPED_S:
        return f"the process is stopped and silent for {silent:.1f} s"
    idle = now - worker.moved
    if silent > limits.silent_s and idle > limits.silent_s:
        return f"silent and without CPU time for {min(silent, idle):.0f} s"
    computing = worker.progress is not None and worker.progress.activity == "compute"
    if (computing or halting) and idle > limits.stuck_s:
        since = "after it was told to halt" if halting else "while computing"
        return f"no progress and no CPU time for {idle:.0f} s {since}"
    return ""


_ATTACHED = (Phase.IDLE, Phase.INSTALLING, Phase.HALTING, Phase.HALTED)
PHASE_CHANGES: tuple[tuple[tuple[Phase, ...], str, Phase], ...] = (
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


def transition(state: NodeState, event: Any, now: float) -> NodeTransition:
    """Return the node's next state, what to do, and why. Unknown or stale events change nothing."""
    match event:
        case m.Launch():
            return _launch(state, event)
        case m.Halt():
            return _halt(state, event, now)
        case m.Install():
            return _install(state, event)
        case m.Stop():
            return (
                state,
                (SendToWorkers(event), EndAgent(service_exit(event.code))),
                "the job is over for this node",
            )
        case m.Fenced() if state.phase is Phase.EMPTY:
            return state, (SendReport(),), f"nothing to give up: {event.reason}"
        case m.Fenced():
            return state, (KillWorkers(event.reason), Rejoin()), f"no longer a member: {event.reason}"
        case m.Released():
            return state, (KillWorkers(event.reason), Rejoin()), f"released: {event.reason}"
        case WorkerMessage():
            return _said(state, event, now)
        case WorkerExited():
            return _exited(state, event)
        case WorkersPolled():
            return _looked(state, event, now)
        case PrefetchDone():
            return replace(state, prefetched=event.epoch), (SendReport(),), "prefetch complete"
        case _:
            return state, (), "not for the node"


def _launch(state: NodeState, event: m.Launch) -> NodeTransition:
    if state.launch is not None and event.restart <= state.launch.restart:
        return state, (SendReport(),), "already launched"
    actions: tuple[NodeAction, ...] = (SpawnWorkers(event),)
    if any(w.alive for w in state.workers):
        actions = (KillWorkers("group restart"), SpawnWorkers(event))
    return _fresh(replace(state, launch=event, elastic=False, crashes=0)), (*actions, SendReport()), "launch"


def _fresh(state: NodeState) -> NodeState:
    """The node with all its workers just started."""
    workers = tuple(WorkerState(alive=True) for _ in range(state.info.workers))
    return replace(state, phase=Phase.STARTING, workers=workers, suspects=(), finished=None, failed=None)


def _halt(state: NodeState, event: m.Halt, now: float) -> NodeTransition:
    if event.epoch <= state.epoch:
        return state, (SendReport(),), f"halt of epoch {event.epoch} is not newer than {state.epoch}"
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
        return replace(state, phase=Phase.HALTING), (SendToWorkers(event),), "workers are told to halt"
    # Until a planned change others still finish their step, and may need this vault for it.
    fence = () if event.boundary else (FenceVault(event.epoch),)
    if state.phase in (Phase.IDLE, Phase.HALTED):
        return replace(state, phase=Phase.HALTED), (*fence, SendReport()), "nothing ran here"
    return state, (*fence, SendReport()), "no worker to halt; the vault answers"


def _install(state: NodeState, event: m.Install) -> NodeTransition:
    if event.epoch != state.epoch or state.phase is not Phase.HALTED:
        return (
            state,
            (SendReport(),),
            f"install of epoch {event.epoch} does not fit epoch {state.epoch} ({state.phase})",
        )
    workers = tuple(replace(w, halted=None) for w in state.workers)
    state = replace(state, workers=workers, suspects=(), cause="", hung=False, detect_s=0.0)
    state = replace(state, waiting=False, finished=None)
    if state.info.node not in event.assignment.plan.nodes():
        return replace(state, phase=Phase.IDLE), (EnterEpoch(event), SendReport()), "spare in this epoch"
    return (
        replace(state, phase=Phase.INSTALLING),
        (EnterEpoch(event), SendToWorkers(event)),
        "workers install",
    )


def _said(state: NodeState, event: WorkerMessage, now: float) -> NodeTransition:
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
            return replace(state, phase=phase), (SendReport(),), "all workers attached"
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
            return replace(state, phase=Phase.RUNNING, crashes=0), (SendReport(),), "installed"
        case m.Resumed():
            state = _put(state, event.rank, worker)
            if message.epoch != state.epoch or state.resumed_at:
                return state, (), "resumed before"
            return replace(state, resumed_at=message.at), (SendReport(),), "first micro-batch of the epoch"
        case m.Protected():
            state = _put(state, event.rank, replace(worker, protected=message.epoch))
            return state, (SendReport(),), "copies are whole at the peer"
        case m.CommFailed():
            state = _put(state, event.rank, worker)
            if message.epoch != state.epoch:
                return state, (), "contact lost in an older epoch"
            suspects = tuple(dict.fromkeys((*state.suspects, *(message.nodes or ("?",)))))
            return replace(state, suspects=suspects), (SendReport(),), f"contact lost: {message.detail}"
        case m.Finished():
            phase = Phase.FINISHED if state.phase is Phase.RUNNING else state.phase
            state = replace(_put(state, event.rank, worker), phase=phase)
            if state.finished is None or message.params_sha256:
                state = replace(state, finished=message)
            return state, (SendReport(),), "all steps done"
        case m.Crashed():
            return _put(state, event.rank, replace(worker, error=message.message)), (), message.message
        case m.Failed():
            state = replace(_put(state, event.rank, worker), failed=message)
            return state, (SendReport(),), message.message
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


def _halted(state: NodeState) -> NodeTransition:
    if state.phase is not Phase.HALTING:
        return state, (), "not halting"
    if not all(w.halted is not None for w in state.workers):
        return state, (), "waiting for the other workers"
    # After a planned halt others may still publish their update; the installation fences.
    fence = () if state.boundary else (FenceVault(state.epoch),)
    return replace(state, phase=Phase.HALTED, suspects=()), (*fence, SendReport()), "all workers halted"


def _exited(state: NodeState, event: WorkerExited) -> NodeTransition:
    if event.rank >= len(state.workers) or not state.workers[event.rank].alive:
        return state, (), "already known"
    worker = replace(state.workers[event.rank], alive=False)
    state = _put(state, event.rank, worker)
    if not state.elastic:
        return _script_exited(state, event)
    if state.failed is not None or (state.finished is not None and event.code == 0):
        return state, (SendReport(),), "worker ended"
    cause = worker.error or state.cause or f"worker {event.rank} ended with {_name(event.code)}"
    others = (KillWorkers(cause),) if any(w.alive for w in state.workers) else ()
    state = replace(
        state,
        cause=cause,
        hang_reason=state.hung and not worker.error,
        crashes=state.crashes + 1,
        fallen=state.fallen + 1,
    )
    if state.crashes > MAX_CRASHES:
        text = f"{cause}; {state.crashes} crashes without a finished installation between them"
        dead = tuple(replace(w, alive=False) for w in state.workers)
        return replace(state, phase=Phase.FAILED, workers=dead), (*others, SendReport()), text
    assert state.launch is not None
    fresh = replace(_fresh(state), cause=cause)
    return fresh, (*others, SpawnWorkers(state.launch), SendReport()), cause


def _script_exited(state: NodeState, event: WorkerExited) -> NodeTransition:
    """A script that does not use elastic: torchrun's rules; the coordinator decides on restarts."""
    if event.code != 0:
        dead = tuple(replace(w, alive=False) for w in state.workers)
        state = replace(
            state, phase=Phase.FAILED, workers=dead, cause=f"worker {event.rank}: {_name(event.code)}"
        )
        return state, (KillWorkers("a worker failed"), SendReport()), f"worker ended with {_name(event.code)}"
    if any(w.alive for w in state.workers):
        return state, (), "waiting for the other workers"
    return replace(state, phase=Phase.FINISHED), (SendReport(),), "all workers ended"


def _looked(state: NodeState, event: WorkersPolled, now: float) -> NodeTransition:
    state = _held_up(state, now)
    for evidence in event.evidence:
        if evidence.rank >= len(state.workers):
            continue
        worker = state.workers[evidence.rank]
        if not worker.alive or worker.attach is None:
            continue
        worker = with_activity(worker, evidence, now)
        if worker is not state.workers[evidence.rank]:
            state = _put(state, evidence.rank, worker)
        halting = state.phase is Phase.HALTING and not state.boundary and worker.halted is None
        reason = hang_reason(worker, evidence.stopped, now, state.limits, halting=halting)
        if reason:
            state = replace(state, cause=f"hang: {reason}", hung=True, detect_s=now - worker.seen)
            return state, (KillWorkers(state.cause),), reason
    return state, (), "healthy"


def _held_up(state: NodeState, now: float) -> NodeState:
    """An agent that was itself held up does not count that time against its workers."""
    late = now - state.looked - MAX_POLL_GAP_S if state.looked else 0.0
    if late > 0:
        workers = tuple(replace(w, seen=w.seen + late, moved=w.moved + late) for w in state.workers)
        state = replace(state, workers=workers)
    return replace(state, looked=now)


def _put(state: NodeState, rank: int, worker: WorkerState) -> NodeState:
    return replace(state, workers=(*state.workers[:rank], worker, *state.workers[rank + 1 :]))


def _name(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
