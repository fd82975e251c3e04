"""The agent's decisions as one pure transition: (state, event, now) -> (state, actions, reason).

    EMPTY --Launch--> STARTING --all attached--> IDLE
    IDLE | RUNNING | INSTALLING --Halt--> HALTING --all halted--> HALTED
    HALTED --Install--> INSTALLING (or IDLE, as a spare) --all ready--> RUNNING
    any --a worker died--> STARTING

An order to halt may leave this node **outside** (docs/design/local-recovery.md). Its workers then
promise to halt before the next commit, and go on with their micro-batches. The phase is HALTING
until they have halted, but they are judged as in training.

If a worker dies, only the workers of its node are restarted, and the node's vault stays. Events are
the messages of the coordinator and the event classes below. The agent reports its node's whole
condition after every change (`SendReport`), so messages may be lost or repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase as Phase
from elastic.core.protocol.timeouts import (
    DEFAULT_TIMEOUTS,
    NO_DURATIONS,
    LongestDurations,
    Timeouts,
    budget,
)
from elastic.core.protocol.version import incompatibility, this_version
from elastic.domain.errors import EXIT_FAILURE, service_exit
from elastic.domain.types import NodeInfo

STOPPED_S = 0.4
"""A stopped process (SIGSTOP) is a hung worker after this silence."""
FAMILY_CPU_S = 0.2
"""A worker is active if its child processes (compilers) used this much CPU time since it was last
active."""
MAX_POLL_GAP_S = 1.0
"""If two polls are further apart, the agent itself did not run (stopped, starved, suspended), and
messages of its workers wait unread. The time beyond this does not count as their silence."""
MAX_CRASHES = 3
"""The node gives up after more crashes without a finished installation between them."""
MAX_FAILURES = 4
"""Number of errors of an epoch that a report has."""
FIRST_STEP_S = 600.0
"""Time for which CPU time counts as progress of a worker that starts, or computes the first step
of its epoch, where kernels may be compiled. For an attached worker it is `FIRST_STEP_FACTOR` times
the longest measured first step, once one is measured."""
FIRST_STEP_FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The agent's knowledge of one worker process."""

    alive: bool = False
    attach: m.Attach | None = None
    halted: m.Halted | None = None
    promise: m.Promise | None = None
    """Its promise for the present epoch; None: it halts at once."""
    ready: m.Ready | None = None
    protected: int = -1
    progress: m.Progress | None = None
    seen: float = 0.0
    """Time of the worker's newest message."""
    active_at: float = 0.0
    """Time at which `Progress.counter` last changed, or the worker last used CPU time or waited for
    storage."""
    cpu_s: float = 0.0
    family_cpu_s: float = 0.0
    """CPU time of the worker's child processes when they last counted as active; 0: unknown."""
    error: str = ""
    """The worker's report of a broken device; "": none."""
    signs: int = 0
    """Number of signs of progress: changes of `Progress.counter`; before the end of the first step
    of a process or epoch, and in an evaluation, also CPU time: kernels may be compiled then."""
    moved_at: float = 0.0
    """Time of the newest sign of progress."""
    counted_at: float = 0.0
    """Time at which `Progress.counter` last changed."""
    runnable_s: float = 0.0
    """Time for which the main thread ran, or waited for a processor."""
    moved_runnable_s: float = 0.0
    """`runnable_s` at the newest sign of progress."""
    first_since: float = 0.0
    """Time since which this worker starts or computes its first step; 0: not polled yet."""
    first_step: int | None = None
    """First step of the epoch; None: the worker has no stage."""

    @property
    def in_first_step(self) -> bool:
        """Whether the worker starts, installs or computes the first step of its epoch."""
        if self.attach is None or self.progress is None:
            return True
        return self.first_step is not None and self.progress.step <= self.first_step

    @property
    def activity(self) -> str:
        """The worker's activity as it last reported it; "start" until it is attached."""
        return self.progress.activity if self.attach and self.progress else "start"


@dataclass(frozen=True, slots=True)
class NodeState:
    """The agent's knowledge of its node."""

    info: NodeInfo
    phase: Phase = Phase.EMPTY
    epoch: int = 0
    elastic: bool = False
    launch: m.Launch | None = None
    workers: tuple[WorkerState, ...] = ()
    resumed_at: float = 0.0
    prefetched: int = -1
    boundary: bool = False
    """Whether the newest halt is a planned one."""
    outside: tuple[str, ...] = ()
    """Nodes that the newest halt leaves outside."""
    suspects: tuple[str, ...] = ()
    diverged: tuple[m.Diverged, ...] = ()
    """Reports of workers since the last installation that holders disagree."""
    failures: tuple[str, ...] = ()
    """Errors of the present epoch that its workers or its agent reported."""
    cause: str = ""
    hung: bool = False
    """Whether `cause` is a hang."""
    detect_s: float = 0.0
    crashes: int = 0
    """Number of crashes since the last finished installation."""
    crash_count: int = 0
    """Number of crashes and hangs of workers in this incarnation."""
    polled_at: float = 0.0
    """Time of the newest poll of the processes."""
    unreadable: m.CheckpointUnreadable | None = None
    """Report of a worker that it cannot read a checkpoint in this epoch."""
    finished: m.Finished | None = None
    failed: m.Failed | None = None
    installed: int = 0
    """Epoch whose assignment the workers have."""
    first_step_s: float = 0.0
    """Longest measured time from an installation to the end of the first step; 0: unknown."""
    waiting: bool = False
    """Whether `epoch` has no assignment yet, so that workers that attach now can take part."""
    seen: LongestDurations = NO_DURATIONS
    """Longest times that the workers of this node measured."""
    limits: Timeouts = DEFAULT_TIMEOUTS
    """Limits on waiting, computed from `seen` and the tolerated silence."""

    @property
    def able(self) -> bool:
        """Whether all workers live and are attached."""
        return bool(self.workers) and all(w.alive and w.attach is not None for w in self.workers)

    @property
    def is_outside(self) -> bool:
        """Whether the newest halt leaves this node outside."""
        return self.info.node in self.outside


# ---- events; messages of the coordinator are events as well ----


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """Message of a worker."""

    rank: int
    message: Any


@dataclass(frozen=True, slots=True)
class WorkerExited:
    rank: int
    code: int
    error: str = ""
    """Error that ended the worker, if the agent knows it."""


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """The kernel's view of a worker process."""

    rank: int
    stopped: bool
    cpu_s: float
    """CPU time of the main thread."""
    on_disk: bool = False
    """Whether the process waits for storage and cannot be interrupted (disk sleep)."""
    family_cpu_s: float = 0.0
    """CPU time of all its child processes, also those that have ended; 0: unknown."""
    queued_s: float = 0.0
    """Time for which the main thread waited for a processor; 0: unknown."""


@dataclass(frozen=True, slots=True)
class WorkersPolled:
    """Periodic poll of the worker processes."""

    samples: tuple[ProcessSample, ...]


@dataclass(frozen=True, slots=True)
class PrefetchDone:
    epoch: int


@dataclass(frozen=True, slots=True)
class CoordinatorAway:
    """No coordinator can be reached for `away_s` seconds."""

    away_s: float


# ---- actions ----


@dataclass(frozen=True, slots=True)
class SendToWorkers:
    """Send `message` to every attached worker."""

    message: Any


@dataclass(frozen=True, slots=True)
class SpawnWorkers:
    launch: m.Launch


@dataclass(frozen=True, slots=True)
class KillWorkers:
    reason: str


@dataclass(frozen=True, slots=True)
class FenceVault:
    """Let the vault refuse copies of epochs below `epoch`, and report its content as inventory."""

    epoch: int
    outside: tuple[str, ...] = ()
    """Owners whose copies of `publishing` and later epochs are accepted: they still train in it."""
    publishing: int = 0
    discard: bool = True
    """Whether to drop the bundles that this node has not sent yet."""


@dataclass(frozen=True, slots=True)
class StopHolding:
    """Acknowledge bundles for these peers as not kept, until the next epoch, instead of holding
    them. None: each bundle that would be held."""

    peers: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class EnterEpoch:
    """Give the vault the peers and addresses of the epoch."""

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
    """Forget everything, and join again as a new incarnation."""

    keep_vault: bool
    """Whether the new incarnation offers the copies in the vault. Without, the vault is emptied."""


NodeAction = (
    SendToWorkers
    | SpawnWorkers
    | KillWorkers
    | FenceVault
    | StopHolding
    | EnterEpoch
    | SendReport
    | EndAgent
    | Rejoin
)
NodeTransition = tuple[NodeState, tuple[NodeAction, ...], str]
"""(state, actions, reason)"""


# ---- the node's messages to the coordinator ----

REPORTED = {field.name for field in fields(NodeState)} & {
    field.name for field in fields(m.NodeReport)
}
"""Fields that `NodeState` and `NodeReport` have in common."""


def report(state: NodeState) -> m.NodeReport:
    """Return the node's condition, without the inventory."""
    attached = [w.attach for w in state.workers if w.attach]
    progress = [w.progress for w in state.workers if w.progress]
    return m.NodeReport(
        **{name: getattr(state, name) for name in REPORTED},
        spec=attached[0].spec if attached else None,
        store=attached[0].store if attached else "",
        able=state.able,
        halted=tuple(w.halted for w in state.workers if w.halted),
        promises=tuple(w.promise for w in state.workers if w.promise),
        ready=tuple(w.ready for w in state.workers if w.ready),
        protected=min((w.protected for w in state.workers), default=-1),
        restart=state.launch.restart if state.launch else -1,
        step=progress[0].step if progress else 0,
        microbatch=progress[0].microbatch if progress else 0,
        accelerated=any(attach.accelerated for attach in attached),
    )


def heartbeat(state: NodeState) -> m.Heartbeat:
    """Return the node's heartbeat: its progress and the newest measurements of its workers."""
    progress = [w.progress for w in state.workers if w.progress is not None]
    measured = tuple(p.measured for p in progress if p.measured is not None)
    at = progress[0] if progress else m.Progress(0, "idle", 0, 0)
    beat = m.Heartbeat(state.info.node, state.info.incarnation, at.step, at.microbatch, measured)
    signs = 1 + sum(w.signs for w in state.workers)
    alive = [w for w in state.workers if w.alive]
    busy = [w for w in alive if w.activity not in ("wait", "idle")]
    last = min(busy or alive, key=lambda w: w.moved_at, default=None)
    if last is None:
        return replace(beat, signs=signs)
    spun_s = round(last.runnable_s - last.moved_runnable_s, 2)
    return replace(beat, signs=signs, activity=last.activity, spun_s=spun_s)


# ---- signs of progress, and hangs ----


def _moved(worker: WorkerState, now: float) -> WorkerState:
    """Record a sign of progress."""
    return replace(worker, signs=worker.signs + 1, moved_at=now, moved_runnable_s=worker.runnable_s)


def _with_cpu_signs(
    state: NodeState, known: WorkerState, worker: WorkerState, now: float
) -> WorkerState:
    """Count CPU time that `worker` used since `known` as progress for some time: in the first step,
    and in each forward pass of an evaluation.

    Disk sleep is no progress: the job must not wait for a disk that hangs.
    """
    if not worker.first_since:
        return replace(_moved(worker, now), first_since=now)
    known_s = state.first_step_s if worker.attach is not None else 0.0
    limit_s = max(state.limits.stuck_s, known_s * FIRST_STEP_FACTOR) if known_s else FIRST_STEP_S
    counts = worker.in_first_step and now - worker.first_since < limit_s
    if worker.activity == "evaluate":
        counts = now - worker.counted_at < FIRST_STEP_S
    used = worker.cpu_s > known.cpu_s or worker.family_cpu_s > known.family_cpu_s > 0
    return _moved(worker, now) if counts and used else worker


def with_activity(worker: WorkerState, sample: ProcessSample, now: float) -> WorkerState:
    """Update the worker's activity from the kernel's view of its process.

    A worker that waits for storage counts as active, because the storage is at fault. It is not
    hung, and yet it makes no progress.
    """
    if sample.cpu_s > worker.cpu_s:
        worker = replace(worker, cpu_s=sample.cpu_s, active_at=now)
    runnable_s = sample.cpu_s + sample.queued_s
    if runnable_s > worker.runnable_s:
        worker = replace(worker, runnable_s=runnable_s)
    family_s, before_s = sample.family_cpu_s, worker.family_cpu_s
    if before_s and family_s - before_s >= FAMILY_CPU_S:
        worker = replace(worker, family_cpu_s=family_s, active_at=now)
    elif family_s and (not before_s or family_s < before_s):
        worker = replace(worker, family_cpu_s=family_s)
    return replace(worker, active_at=now) if sample.on_disk else worker


def hang_reason(
    worker: WorkerState,
    stopped: bool,
    now: float,
    limits: Timeouts = DEFAULT_TIMEOUTS,
    *,
    halting: bool = False,
) -> str:
    """Return the evidence that the worker is hung; "": it is not hung.

    A worker that is slow, or waits for other workers or storage, is not hung. A worker that was
    ordered to halt in the middle of a step (`halting`) must not wait for other workers.
    """
    silent = now - worker.seen
    if stopped and silent > STOPPED_S:
        return f"the process is stopped and silent for {silent:.1f} s"
    idle = now - worker.active_at
    if silent > limits.silent_s and idle > limits.silent_s:
        return f"silent and without CPU time for {min(silent, idle):.0f} s"
    activity = worker.progress.activity if worker.progress else ""
    computing = activity in ("compute", "evaluate")
    if (computing or halting) and idle > limits.stuck_s:
        since = "after the order to halt" if halting else "while computing"
        return f"no progress and no CPU time for {idle:.0f} s {since}"
    return ""


# ---- the transition ----

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
    ((Phase.STARTING,), "workers of another version", Phase.FAILED),
    ((Phase.STARTING,), "script ended", Phase.FINISHED),
    ((Phase.STARTING,), "script failed", Phase.FAILED),
    ((Phase.STARTING, Phase.FINISHED, Phase.FAILED), "group restart", Phase.STARTING),
)
"""(from, reason, to): every change of phase by `transition`. docs/design/states.md is drawn from
this table."""


def transition(state: NodeState, event: Any, now: float) -> NodeTransition:
    """Return (state, actions, reason). Unknown or stale events change nothing."""
    match event:
        case m.Launch():
            return _launch(state, event)
        case m.Halt():
            return _halt(state, event, now)
        case m.Install():
            return _install(state, event, now)
        case m.Stop():
            actions = (SendToWorkers(event), EndAgent(service_exit(event.code)))
            return state, actions, "the job is over for this node"
        case m.Fenced() | m.Released():
            return _membership_ended(state, event)
        case WorkerMessage():
            return _worker_message(state, event, now)
        case WorkerExited():
            return _worker_exited(state, event)
        case WorkersPolled():
            return _workers_polled(state, event, now)
        case m.RestartWorkers():
            return _restart_workers(state, event)
        case CoordinatorAway():
            return _coordinator_away(state, event, now)
        case PrefetchDone():
            return replace(state, prefetched=event.epoch), (SendReport(),), "prefetch complete"
        case _:
            return state, (), "not for the node"


def _answer(known: bool) -> tuple[SendReport, ...]:
    """Return the answer to an order that changes nothing: a report, but none if the order is known.

    The coordinator repeats an order for each report that was on its way when it gave the order. If
    each repetition were answered, reports and orders would multiply. No report is missing: each
    connection begins with one, and each change of the node sends another one.
    """
    return () if known else (SendReport(),)


def _launch(state: NodeState, event: m.Launch) -> NodeTransition:
    if state.launch is not None and event.restart <= state.launch.restart:
        return state, _answer(event.restart == state.launch.restart), "already launched"
    kill = (KillWorkers("group restart"),) if any(w.alive for w in state.workers) else ()
    state = _with_new_workers(replace(state, launch=event, elastic=False, crashes=0))
    return state, (*kill, SpawnWorkers(event), SendReport()), "launch"


def _with_new_workers(state: NodeState) -> NodeState:
    """Return the node's state with all workers newly started."""
    workers = tuple(WorkerState(alive=True) for _ in range(state.info.workers))
    return replace(
        state,
        phase=Phase.STARTING,
        workers=workers,
        suspects=(),
        failures=(),
        finished=None,
        failed=None,
    )


def _membership_ended(state: NodeState, event: m.Fenced | m.Released) -> NodeTransition:
    """Join as a new member; copies in the vault of a fenced node may still be needed."""
    if isinstance(event, m.Released):
        kill, rejoin = KillWorkers(event.reason), Rejoin(keep_vault=False)
        return state, (kill, rejoin), f"released: {event.reason}"
    if state.phase is Phase.EMPTY and not state.epoch:
        return state, (SendReport(),), f"nothing to give up: {event.reason}"
    kill, rejoin = KillWorkers(event.reason), Rejoin(keep_vault=True)
    return state, (kill, rejoin), f"no longer a member: {event.reason}"


def _halt(state: NodeState, event: m.Halt, now: float) -> NodeTransition:
    if event.epoch <= state.epoch:
        reason = f"halt of epoch {event.epoch} is not newer than {state.epoch}"
        return state, _answer(event.epoch == state.epoch), reason
    state = replace(
        state,
        epoch=event.epoch,
        workers=tuple(replace(w, promise=None, ready=None, active_at=now) for w in state.workers),
        resumed_at=0.0,
        prefetched=-1,
        finished=None,
        suspects=(),
        failures=(),
        unreadable=None,
        waiting=True,
        boundary=event.boundary,
        outside=event.outside,
    )
    halting = (Phase.INSTALLING, Phase.RUNNING, Phase.HALTING, Phase.FINISHED)
    if state.able and state.phase in halting:
        holds = (StopHolding(event.lost),) if state.is_outside else ()
        state = replace(state, phase=Phase.HALTING)
        return state, (*holds, SendToWorkers(event)), "the workers must halt"
    # Before a planned change the other nodes finish their step and may still use this vault.
    fence = () if event.boundary else (_fence(state),)
    if state.phase in (Phase.IDLE, Phase.HALTED):
        return replace(state, phase=Phase.HALTED), (*fence, SendReport()), "nothing ran here"
    return state, (*fence, SendReport()), "no worker to halt; the vault answers"


def _install(state: NodeState, event: m.Install, now: float) -> NodeTransition:
    if event.epoch != state.epoch or state.phase is not Phase.HALTED:
        reason = f"install of epoch {event.epoch} does not fit epoch {state.epoch}"
        known = event.epoch == state.epoch == state.installed
        return state, _answer(known), f"{reason} ({state.phase})"
    state = replace(
        state,
        workers=tuple(
            replace(w, halted=None, first_since=now, first_step=event.assignment.step)
            for w in state.workers
        ),
        installed=event.epoch,
        suspects=(),
        diverged=(),
        failures=(),
        cause="",
        hung=False,
        detect_s=0.0,
        waiting=False,
        finished=None,
    )
    if state.info.node not in event.assignment.plan.nodes():
        actions = (EnterEpoch(event), SendReport())
        return replace(state, phase=Phase.IDLE), actions, "spare in this epoch"
    state = replace(state, phase=Phase.INSTALLING)
    return state, (EnterEpoch(event), SendToWorkers(event)), "workers install"


def _worker_message(state: NodeState, event: WorkerMessage, now: float) -> NodeTransition:
    if event.rank >= len(state.workers):
        return state, (), "no such worker"
    worker, message = replace(state.workers[event.rank], seen=now), event.message
    state = _with_worker(state, event.rank, worker)
    match message:
        case m.Hello():
            return _greeted(state, message)
        case m.Attach():
            return _attached(state, event.rank, replace(worker, attach=message, active_at=now))
        case m.Progress():
            return _progress(state, event.rank, message, now)
        case m.Promise() | m.Halted():
            return _answered_halt(state, event.rank, message)
        case m.Ready() | m.Resumed() | m.CommFailed() | m.CheckpointUnreadable():
            return _epoch_message(state, event.rank, message)
        case m.Diverged():
            return _diverged(state, message)
        case m.Protected():
            state = _with_worker(state, event.rank, replace(worker, protected=message.epoch))
            return state, (SendReport(),), "copies are whole at the peer"
        case m.Finished():
            return _finished(state, message)
        case m.Crashed():
            worker = replace(worker, error=message.message)
            return _with_worker(state, event.rank, worker), (), message.message
        case m.Failed():
            return replace(state, failed=message), (SendReport(),), message.message
        case _:
            return state, (), "not for the node"


def _finished(state: NodeState, message: m.Finished) -> NodeTransition:
    if state.finished is None or message.params_sha256:
        state = replace(state, finished=message)
    phase = Phase.FINISHED if state.phase is Phase.RUNNING else state.phase
    return replace(state, phase=phase), (SendReport(),), "all steps done"


def _diverged(state: NodeState, message: m.Diverged) -> NodeTransition:
    """Keep the evidence, of any epoch, until the next installation."""
    state = replace(state, diverged=(*state.diverged, message))
    return state, (SendReport(),), "holders of a layer disagree"


def _greeted(state: NodeState, hello: m.Hello) -> NodeTransition:
    """Give up if the workers have a version that this agent does not understand."""
    theirs = f"worker {hello.local_rank}"
    problem = incompatibility(this_version(), hello.version, "its agent", theirs)
    if not problem or state.phase is not Phase.STARTING:
        return state, (), "a worker greets"
    crash_count = state.crash_count + 1
    state = replace(state, elastic=True, cause=problem, crash_count=crash_count)
    return _with_dead_workers(state), (KillWorkers(problem), SendReport()), problem


def _attached(state: NodeState, rank: int, worker: WorkerState) -> NodeTransition:
    state = replace(_with_worker(state, rank, worker), elastic=True)
    if not state.able or state.phase is not Phase.STARTING:
        return state, (), "waiting for the other workers"
    phase = Phase.HALTED if state.waiting else Phase.IDLE
    return replace(state, phase=phase), (SendReport(),), "all workers attached"


def _progress(state: NodeState, rank: int, message: m.Progress, now: float) -> NodeTransition:
    worker = state.workers[rank]
    if worker.progress is None or message.counter != worker.progress.counter:
        worker = _moved(replace(worker, active_at=now, counted_at=now), now)
    first = worker.in_first_step
    worker = replace(worker, progress=message)
    state = _with_worker(state, rank, worker)
    if first and not worker.in_first_step and worker.first_step is not None:
        seconds = now - worker.first_since
        state = replace(state, first_step_s=max(state.first_step_s, seconds))
    if message.measured is None:
        return state, (), "progress"
    # The limits on waiting follow the longest measured micro-batch.
    microbatch_s = message.measured.forward_s + message.measured.backward_s
    seen = state.seen.grown(microbatch_s=microbatch_s)
    if seen is not state.seen:
        old = state.limits
        limits = budget(old.silence_s, heartbeat_s=old.heartbeat_s, seen=seen)
        state = replace(state, seen=seen, limits=limits)
    return state, (), "progress"


def _epoch_message(
    state: NodeState,
    rank: int,
    message: m.Ready | m.Resumed | m.CommFailed | m.CheckpointUnreadable,
) -> NodeTransition:
    # Before a planned change the workers still run the installed epoch, and may fail in it.
    runs = state.boundary and state.phase is Phase.HALTING and message.epoch == state.installed
    if message.epoch != state.epoch and not (runs and isinstance(message, m.CommFailed)):
        return state, (), f"{type(message).__name__} of an older epoch"
    match message:
        case m.Ready():
            worker = replace(state.workers[rank], ready=message)
            state = _with_worker(state, rank, worker)
            if state.phase is not Phase.INSTALLING or not all(w.ready for w in state.workers):
                return state, (), "waiting for the other workers"
            return replace(state, phase=Phase.RUNNING, crashes=0), (SendReport(),), "installed"
        case m.Resumed():
            if state.resumed_at:
                return state, (), "resumed before"
            state = replace(state, resumed_at=message.at)
            return state, (SendReport(),), "first micro-batch of the epoch"
        case m.CheckpointUnreadable():
            state = replace(state, unreadable=message)
            return state, (SendReport(),), f"a checkpoint cannot be read: {message.detail}"
        case m.CommFailed():
            suspects = tuple(dict.fromkeys((*state.suspects, *message.nodes)))
            failures = (*state.failures, message.detail or "a worker cannot go on")[:MAX_FAILURES]
            state = replace(state, suspects=suspects, failures=tuple(dict.fromkeys(failures)))
            return state, (SendReport(),), f"contact lost: {message.detail}"


def _fence(state: NodeState, *, discard: bool = True) -> FenceVault:
    """Return the order to fence the vault. Nodes outside go on in the epoch that this node has
    installed, or in a later one, if it was away."""
    return FenceVault(state.epoch, state.outside, state.installed if state.outside else 0, discard)


def _answered_halt(state: NodeState, rank: int, message: m.Promise | m.Halted) -> NodeTransition:
    worker = state.workers[rank]
    if isinstance(message, m.Promise):
        return _promised(state, rank, replace(worker, promise=message), message)
    state = _with_worker(state, rank, replace(worker, halted=message))
    if state.is_outside and not message.complete and state.phase is Phase.HALTING:
        # The coordinator must know at once that the promise of this node will not come, or is gone.
        state, actions, reason = _halted(state)
        return state, tuple(dict.fromkeys((*actions, SendReport()))), reason
    return _halted(state)


def _promised(
    state: NodeState, rank: int, worker: WorkerState, promise: m.Promise
) -> NodeTransition:
    """Report the promises of all workers. The vault is fenced before, as in a node that halts."""
    if state.phase is not Phase.HALTING or promise.epoch != state.epoch:
        return state, (), "a promise for another epoch"
    state = _with_worker(state, rank, worker)
    if not all(w.promise is not None for w in state.workers):
        return state, (), "waiting for the promises of the other workers"
    actions = (StopHolding(None), _fence(state, discard=False), SendReport())
    return state, actions, "all workers promise to halt before the commit"


def _halted(state: NodeState) -> NodeTransition:
    if state.phase is not Phase.HALTING:
        return state, (), "not halting"
    if not all(w.halted is not None for w in state.workers):
        return state, (), "waiting for the other workers"
    # After a planned halt other nodes may still publish updates. The installation fences the vault.
    fence = () if state.boundary else (_fence(state),)
    state = replace(state, phase=Phase.HALTED, suspects=(), failures=())
    return state, (*fence, SendReport()), "all workers halted"


def _worker_exited(state: NodeState, event: WorkerExited) -> NodeTransition:
    """Restart all workers of the node after a crash; give up after too many crashes."""
    if event.rank >= len(state.workers) or not state.workers[event.rank].alive:
        return state, (), "already known"
    worker = replace(state.workers[event.rank], alive=False)
    state = _with_worker(state, event.rank, worker)
    if not state.elastic:
        return _script_exited(state, event)
    if state.failed is not None or (state.finished is not None and event.code == 0):
        return state, (SendReport(),), "worker ended"
    error = worker.error or next((w.error for w in state.workers if w.error), "")
    ended = f"worker {event.rank} ended with {_exit(event.code)}"
    cause = error or state.cause or (f"{ended}: {event.error}" if event.error else ended)
    others = (KillWorkers(cause),) if any(w.alive for w in state.workers) else ()
    state = replace(
        state,
        cause=cause,
        hung=state.hung and not error,
        crashes=state.crashes + 1,
        crash_count=state.crash_count + 1,
    )
    if state.crashes > MAX_CRASHES:
        reason = f"{cause}; {state.crashes} crashes without a finished installation between them"
        return _with_dead_workers(state), (*others, SendReport()), reason
    assert state.launch is not None
    spawn = SpawnWorkers(state.launch)
    return _with_new_workers(state), (*others, spawn, SendReport()), cause


def _script_exited(state: NodeState, event: WorkerExited) -> NodeTransition:
    """Record the exit of a script without elastic; the coordinator decides about restarts."""
    if event.code != 0:
        error = state.workers[event.rank].error or event.error
        ended = f"{_exit(event.code)}: {error}" if error else _exit(event.code)
        cause, crash_count = f"worker {event.rank}: {ended}", state.crash_count + 1
        state = replace(state, cause=cause, crash_count=crash_count)
        actions = (KillWorkers("a worker failed"), SendReport())
        return _with_dead_workers(state), actions, f"worker ended with {_exit(event.code)}"
    if any(w.alive for w in state.workers):
        return state, (), "waiting for the other workers"
    return replace(state, phase=Phase.FINISHED), (SendReport(),), "all workers ended"


def _with_dead_workers(state: NodeState) -> NodeState:
    dead = tuple(replace(w, alive=False) for w in state.workers)
    return replace(state, phase=Phase.FAILED, workers=dead)


def _workers_polled(state: NodeState, event: WorkersPolled, now: float) -> NodeTransition:
    """Kill all workers of the node if one of them is hung."""
    state = _excuse_gap(state, now)
    for sample in event.samples:
        if sample.rank >= len(state.workers):
            continue
        known = state.workers[sample.rank]
        if not known.alive:
            continue
        worker = _with_cpu_signs(state, known, with_activity(known, sample, now), now)
        if worker is not known:
            state = _with_worker(state, sample.rank, worker)
        if worker.attach is None:
            continue
        computes = state.boundary or worker.promise is not None
        halting = state.phase is Phase.HALTING and not computes and worker.halted is None
        reason = hang_reason(worker, sample.stopped, now, state.limits, halting=halting)
        if reason:
            detect_s, cause = now - worker.seen, f"hang: {reason}"
            state = replace(state, cause=cause, hung=True, detect_s=detect_s)
            return state, (KillWorkers(cause),), reason
    return state, (), "healthy"


def _excuse_gap(state: NodeState, now: float) -> NodeState:
    """Do not count time for which the agent itself did not run as silence of its workers."""
    gap = now - state.polled_at - MAX_POLL_GAP_S if state.polled_at else 0.0
    if gap > 0:
        workers = tuple(
            replace(w, seen=w.seen + gap, active_at=w.active_at + gap, moved_at=w.moved_at + gap)
            for w in state.workers
        )
        state = replace(state, workers=workers)
    return replace(state, polled_at=now)


def _restart_workers(state: NodeState, event: m.RestartWorkers) -> NodeTransition:
    """Kill the workers, for whose progress the job waits; their exits restart them."""
    if event.crash_count != state.crash_count or not any(w.alive for w in state.workers):
        return state, (SendReport(),), "these workers are gone already"
    # Only workers of a script that uses elastic are waited for.
    state = replace(state, cause=f"hang: {event.reason}", hung=True, elastic=True)
    return state, (KillWorkers(state.cause),), event.reason


def _coordinator_away(state: NodeState, event: CoordinatorAway, now: float) -> NodeTransition:
    """End the agent if no coordinator comes back while nothing runs here."""
    limit_s = state.limits.orphan_s
    alive = [worker for worker in state.workers if worker.alive]
    # A script that does not use elastic shows no progress; it runs as long as its processes live.
    working = any(not state.elastic or now - worker.moved_at < limit_s for worker in alive)
    if event.away_s < limit_s or working:
        return state, (), "the coordinator may come back"
    reason = f"no coordinator was reached for {event.away_s:.0f} s, and nothing runs here"
    return state, (SendToWorkers(m.Stop(EXIT_FAILURE, reason)), EndAgent(EXIT_FAILURE)), reason


def _with_worker(state: NodeState, rank: int, worker: WorkerState) -> NodeState:
    return replace(state, workers=(*state.workers[:rank], worker, *state.workers[rank + 1 :]))


SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV"}
"""Names of the signals that end workers, on Linux."""


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = SIGNALS.get(-code)
    return f"signal {-code} ({name})" if name else f"signal {-code}"
