"""What processes say to each other. Plain frozen dataclasses; `elastic.domain.codec` puts them on the wire.

Three conversations:

- worker <-> agent over a Unix socket (`elastic.rpc.frames`), one connection a worker, in order;
- agent <-> coordinator over one gRPC stream a node (`elastic.rpc`), every envelope carrying term and epoch;
- vault <-> vault and worker -> vault, bulk, over TCP (`elastic.agent.vault.vault`).

An agent reports its node's whole condition (`NodeReport`) whenever it changes and again after every reconnection:
the coordinator never depends on having seen an earlier message.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic.core.protocol.health_report import Notice as Notice
from elastic.core.protocol.health_report import NoticeKind as NoticeKind
from elastic.core.protocol.health_report import Preflight
from elastic.domain.types import Assignment, Copy, JobSpec, NodeInfo, Slot, StepRecord


class NodePhase(StrEnum):
    """What a node's workers are doing, as its agent sees them."""

    EMPTY = "empty"
    """No workers launched yet."""
    STARTING = "starting"
    """Workers launched, not all attached (or restarting after a crash)."""
    IDLE = "idle"
    """All workers attached; no stage."""
    INSTALLING = "installing"
    RUNNING = "running"
    HALTING = "halting"
    HALTED = "halted"
    FINISHED = "finished"
    FAILED = "failed"


# ---- worker -> agent ----


@dataclass(frozen=True, slots=True)
class Attach:
    """First message of a worker whose script uses elastic."""

    local_rank: int
    pid: int
    spec: JobSpec
    store: str
    """host:port of the rendezvous store that this worker can host."""


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """A copy that a worker wrote to local shared memory."""

    copy: Copy
    path: str
    offset: int


@dataclass(frozen=True, slots=True)
class Published:
    """Whole copies lie in shared memory; the slots may be reused once the bundle is acknowledged."""

    bundle: int
    copies: tuple[LocalCopy, ...]
    peer: str = ""
    """Node whose vault must hold these before the acknowledgement; "": local only."""


@dataclass(frozen=True, slots=True)
class BackupTraffic:
    """What backups took of one worker in a step."""

    copied_bytes: int = 0
    copied_s: float = 0.0
    """Copies written to shared memory, checksums included."""
    waited_s: float = 0.0
    """Its main thread stood still for an acknowledgement."""
    sent_bytes: int = 0
    sent_s: float = 0.0
    """From announcement to acknowledgement, of what went to a peer and arrived."""


@dataclass(frozen=True, slots=True)
class MicrobatchTiming:
    """Seconds that one worker computed for one micro-batch of a step, all of its stages together: medians."""

    epoch: int
    step: int
    local_rank: int
    forward_s: float
    backward_s: float
    """The whole backward pass, or both of its parts."""
    slowed: float = 0.0
    """Computing beside a transfer of copies, over computing without one; 0: one of the two was not seen."""
    traffic: BackupTraffic = BackupTraffic()


@dataclass(frozen=True, slots=True)
class Progress:
    """Heartbeat of a worker's helper thread; `counter` grows with every action of the main thread."""

    counter: int
    activity: str
    """compute | wait | install | idle"""
    step: int
    microbatch: int
    measured: MicrobatchTiming | None = None
    """Of the newest finished step."""


@dataclass(frozen=True, slots=True)
class CommFailed:
    """Communication with other nodes broke; the worker has abandoned the epoch and waits for orders."""

    epoch: int
    nodes: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class Halted:
    """Everything this worker had is published; it waits for the next assignment."""

    epoch: int
    step: int
    """Version of the state it holds, or -1 if none."""
    started: frozenset[int] = frozenset()
    """Micro-batches whose forward pass was begun here in the current step."""
    sent: frozenset[int] = frozenset()
    """Micro-batches whose activations were handed to the next stage in the current step."""
    record: StepRecord | None = None
    """Record of the last step whose update this worker has begun."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The assignment of `epoch` is installed; the training loop goes on."""

    epoch: int
    transfer_s: float
    rebuild_s: float
    sources: tuple[str, ...] = ()
    """Where state came from: memory | shared-memory | peer:NODE | checkpoint | initial."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """First micro-batch of the epoch computed (its gradient added)."""

    epoch: int
    at: float
    """time.time() of that moment."""


@dataclass(frozen=True, slots=True)
class Protected:
    """All copies published at the installation of `epoch` are whole at their peers."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """Sent by one worker a step (first stage of the first pipeline, TP rank 0)."""

    epoch: int
    record: StepRecord
    seconds: float
    lr: float
    tokens: int = 0
    doubled: int = 0
    missing: int = 0


@dataclass(frozen=True, slots=True)
class FaultReached:
    """An injected fault that the agent carries out (partition) or merely records came due."""

    fault: str
    at: float


@dataclass(frozen=True, slots=True)
class Finished:
    """All steps are done. `params_sha256` is given by the worker that computed it."""

    step: int
    params_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The script cannot go on (bad configuration, error in user code). May come instead of Attach."""

    message: str
    exit_code: int = 1
    local_rank: int = 0


@dataclass(frozen=True, slots=True)
class Crashed:
    """Last words of a worker whose device broke: it ends at once, and its node starts it again."""

    message: str
    local_rank: int = 0


# ---- agent -> worker ----


@dataclass(frozen=True, slots=True)
class Halt:
    """Leave every epoch below `epoch`: at once, or (boundary) at the end of the running step, all together."""

    epoch: int
    boundary: bool = False


@dataclass(frozen=True, slots=True)
class Install:
    epoch: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class BundleAcknowledged:
    """The bundle and all before it are whole where they should be, or (not `kept`) it was given up: no room there."""

    bundle: int
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Pull the newest state of these (layer, TP rank, node that holds it) into the local vault; training goes on."""

    epoch: int
    sources: tuple[tuple[int, int, str], ...]
    vaults: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process group; `code` is the job's exit code."""

    code: int
    reason: str = ""


# ---- agent -> coordinator ----


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node's whole condition. `inventory` is filled while HALTED, and on a node without live workers."""

    info: NodeInfo
    phase: NodePhase
    epoch: int
    """Highest epoch that this node has been told of."""
    spec: JobSpec | None = None
    store: str = ""
    able: bool = False
    """All workers are attached: the node can take a stage."""
    elastic: bool = False
    """A worker of this node has attached at least once: the script uses elastic."""
    halted: tuple[Halted, ...] = ()
    ready: tuple[Ready, ...] = ()
    resumed_at: float = 0.0
    protected: int = -1
    """Highest protected epoch."""
    prefetched: int = -1
    """Highest epoch whose prefetch is complete."""
    inventory: tuple[Copy, ...] = ()
    suspects: tuple[str, ...] = ()
    """Nodes that this node's workers lost contact with in the current epoch."""
    cause: str = ""
    """Why workers went down last (exit code, signal, hang)."""
    hung: bool = False
    """They hung."""
    detect_s: float = 0.0
    """From the fault to the agent's knowledge of it, when the agent can tell."""
    finished: Finished | None = None
    failed: Failed | None = None
    restart: int = -1
    """Restart count that these workers were launched with; -1: not launched."""
    step: int = 0
    """Step that the workers are in."""
    microbatch: int = 0
    crash_count: int = 0
    """Times that this incarnation's workers crashed, or were found hung."""
    preflight: Preflight | None = None
    """What the node found about itself; only while it asks to join."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    node: str
    incarnation: str
    step: int
    microbatch: int
    measured: tuple[MicrobatchTiming, ...] = ()
    """Newest of each worker that computes."""


BACKUP_SHORT, COPY_CORRUPT = "backup-short", "copy-corrupt"
BACKUP_NOTES = (BACKUP_SHORT, COPY_CORRUPT)
"""A vault has no room for copies | a copy did not match its checksum, and was dropped."""


@dataclass(frozen=True, slots=True)
class BackupNote:
    """Something about backups that the user should know; training goes on."""

    kind: str
    """One of BACKUP_NOTES."""
    owner: str
    """Whose copies."""
    keeper: str
    """Whose vault."""
    detail: str


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One node's part of a durable checkpoint is on disk."""

    step: int
    layers: tuple[Slot, ...]
    """Of the files written."""


@dataclass(frozen=True, slots=True)
class RefusalNote:
    """This node's port refused something (`elastic.rpc.refusals`); told at a bounded rate."""

    node: str
    port: str
    reason: str
    peer: str
    detail: str
    count: int
    """Since the one before."""
    total: int


# ---- coordinator -> agent ----


@dataclass(frozen=True, slots=True)
class Released:
    """The job needs nothing of the node any more: end the workers, drop the vault, and join anew only if it stays."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """The sender is no longer a member: end the workers, drop the vault and join again as a new incarnation."""

    reason: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the workers, with torchrun's environment."""

    group_rank: int
    group_world_size: int
    rank: int
    """Global rank of local rank 0."""
    world_size: int
    master_addr: str
    master_port: int
    restart: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Copies of epochs below `epoch` are no longer needed, but for logged messages of `step`, in which it began."""

    epoch: int
    step: int = -1
