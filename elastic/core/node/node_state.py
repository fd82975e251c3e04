"""What an agent knows of its node, the events that it takes and the actions that it asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase as Phase
from elastic.core.protocol.timeouts import (
    DEFAULT_TIMEOUTS,
    NO_DURATIONS,
    LongestDurations,
    Timeouts,
)
from elastic.domain.types import NodeInfo

STOPPED_S = 0.4
"""A worker that the kernel shows as stopped, and that has been silent this long, is hung."""
FAMILY_CPU_S = 0.2
"""A worker whose descendants used so much more CPU time waits for them (compilers). Idle ones use a trickle."""
BLIND_S = 1.0
"""An agent that looks at its workers later than this was held up itself (stopped, starved, its machine suspended): what
they said meanwhile lies unread, so that time tells nothing of them."""
MAX_CRASHES = 3
"""Crashes of a node's workers without a finished installation between them, before the node gives up."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker process as its agent sees it."""

    alive: bool = False
    attach: m.Attach | None = None
    halted: m.Halted | None = None
    ready: m.Ready | None = None
    protected: int = -1
    progress: m.Progress | None = None
    seen: float = 0.0
    """Time of its last message."""
    moved: float = 0.0
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
    workers: tuple[Worker, ...] = ()
    resumed_at: float = 0.0
    prefetched: int = -1
    boundary: bool = False
    """The halt under way is a planned one."""
    suspects: tuple[str, ...] = ()
    cause: str = ""
    hung: bool = False
    """`cause` is a hang."""
    detect_s: float = 0.0
    crashes: int = 0
    crash_count: int = 0
    """Times that workers went down in this incarnation."""
    looked: float = 0.0
    """Time of the last look at the processes."""
    finished: m.Finished | None = None
    failed: m.Failed | None = None
    waiting: bool = False
    """Told to halt for `epoch`, and not yet part of it: workers that attach now may still enter."""
    seen: LongestDurations = NO_DURATIONS
    """The longest times that this node's workers measured."""
    limits: Timeouts = DEFAULT_TIMEOUTS
    """What follows from them, and from the silence that is tolerated."""

    @property
    def able(self) -> bool:
        return bool(self.workers) and all(w.alive and w.attach is not None for w in self.workers)


# ---- events (coordinator and worker messages are events too) -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Said:
    """A worker said something."""

    rank: int
    message: Any


@dataclass(frozen=True, slots=True)
class Exited:
    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class Evidence:
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
class Looked:
    """Periodic look at the worker processes."""

    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class PrefetchDone:
    epoch: int


# ---- actions ----


@dataclass(frozen=True, slots=True)
class Tell:
    """Send `message` to every attached worker (rank None) or one of them."""

    message: Any
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Spawn:
    launch: m.Launch


@dataclass(frozen=True, slots=True)
class KillWorkers:
    reason: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Refuse copies of epochs below `epoch` from now on; what the vault holds now is the inventory."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Enter:
    """The vault enters the epoch: new peers, new addresses."""

    install: m.Install


@dataclass(frozen=True, slots=True)
class Report:
    """Send the node's condition to the coordinator."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Let the workers end, then end the agent with this exit code."""

    code: int


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Forget everything, vault included, and join again as a new incarnation."""


Action = Tell | Spawn | KillWorkers | Fence | Enter | Report | Leave | Rejoin
Result = tuple[NodeState, tuple[Action, ...], str]


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
        hung=state.hung,
        detect_s=state.detect_s,
        finished=state.finished,
        failed=state.failed,
        restart=state.launch.restart if state.launch else -1,
        step=progress[0].step if progress else 0,
        microbatch=progress[0].microbatch if progress else 0,
        crash_count=state.crash_count,
    )


def heartbeat(state: NodeState) -> m.Heartbeat:
    """A sign of life: how far the node is, and what its workers last measured."""
    told = [w.progress for w in state.workers if w.progress is not None]
    measured = tuple(p.measured for p in told if p.measured is not None)
    at = told[0] if told else m.Progress(0, "idle", 0, 0)
    return m.Heartbeat(state.info.node, state.info.incarnation, at.step, at.microbatch, measured)


def moved(worker: Worker, evidence: Evidence, now: float) -> Worker:
    """What the kernel saw it do. One that waits for storage is not hung, however long: that is no fault of its own."""
    if evidence.cpu_s > worker.cpu_s:
        worker = replace(worker, cpu_s=evidence.cpu_s, moved=now)
    family_s, before_s = evidence.family_cpu_s, worker.family_cpu_s
    if before_s and family_s - before_s >= FAMILY_CPU_S:
        worker = replace(worker, family_cpu_s=family_s, moved=now)
    elif family_s and (not before_s or family_s < before_s):
        worker = replace(worker, family_cpu_s=family_s)
    return replace(worker, moved=now) if evidence.on_disk else worker


def hung(
    worker: Worker, stopped: bool, now: float, limits: Timeouts = DEFAULT_TIMEOUTS, *, halting: bool = False
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
