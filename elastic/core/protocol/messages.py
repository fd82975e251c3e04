"""Messages between workers, agents and the coordinator.

They are plain frozen dataclasses; `elastic.domain.codec` encodes them. There are three connections:

- worker <-> agent: one Unix socket per worker, in order (`elastic.rpc.frames`);
- agent <-> coordinator: one gRPC stream per node (`elastic.rpc`); every envelope carries the term
  and the epoch;
- vault <-> vault and worker -> vault: bulk transfers over TCP (`elastic.agent.vault.vault`).

An agent sends its node's whole condition (`NodeReport`) whenever it changes and after every
reconnect, so the coordinator never depends on an earlier message.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic.core.protocol.health_report import Notice as Notice
from elastic.core.protocol.health_report import NoticeKind as NoticeKind
from elastic.core.protocol.health_report import Preflight
from elastic.domain.types import Assignment, Copy, JobSpec, NodeInfo, Slot, StepRecord


class NodePhase(StrEnum):
    """Phase of a node's workers, as its agent sees them."""

    EMPTY = "empty"
    """No workers were launched yet."""
    STARTING = "starting"
    """Workers were launched, but not all are attached; also while they restart after a crash."""
    IDLE = "idle"
    """All workers are attached and hold no stage."""
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
    """A copy in local shared memory."""

    copy: Copy
    path: str
    offset: int
    """Bytes from the start of the file `path`."""


@dataclass(frozen=True, slots=True)
class Published:
    """Whole copies lie in shared memory; their memory is reused once the bundle is acknowledged."""

    bundle: int
    copies: tuple[LocalCopy, ...]
    peer: str = ""
    """Node whose vault must hold them before the acknowledgement; "": the local vault is enough."""


@dataclass(frozen=True, slots=True)
class BackupTraffic:
    """Backup work of one worker in one step."""

    copied_bytes: int = 0
    copied_s: float = 0.0
    """Time to write copies to shared memory, with checksums."""
    waited_s: float = 0.0
    """Time that the main thread waited for an acknowledgement."""
    sent_bytes: int = 0
    """Bytes that went to a peer and arrived."""
    sent_s: float = 0.0
    """Their time from announcement to acknowledgement."""


@dataclass(frozen=True, slots=True)
class MicrobatchTiming:
    """One worker's compute time per micro-batch in a step: medians, over all its stages."""

    epoch: int
    step: int
    local_rank: int
    forward_s: float
    backward_s: float
    """The whole backward pass, or the sum of its two parts."""
    slowed: float = 0.0
    """Compute time beside a transfer of copies, divided by that without one; 0: unknown."""
    traffic: BackupTraffic = BackupTraffic()


@dataclass(frozen=True, slots=True)
class Progress:
    """Heartbeat from a worker's helper thread."""

    counter: int
    """Grows with every action of the main thread."""
    activity: str
    """compute | wait | install | idle"""
    step: int
    microbatch: int
    measured: MicrobatchTiming | None = None
    """Timing of the newest finished step."""


@dataclass(frozen=True, slots=True)
class CommFailed:
    """Communication with other nodes broke; the worker abandoned the epoch and waits."""

    epoch: int
    nodes: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class Halted:
    """The worker published everything it had and waits for the next assignment."""

    epoch: int
    step: int
    """Version of the state that it holds; -1: none."""
    started: frozenset[int] = frozenset()
    """Micro-batches of the current step whose forward pass began here."""
    sent: frozenset[int] = frozenset()
    """Micro-batches of the current step whose activations went to the next stage."""
    record: StepRecord | None = None
    """Record of the last step whose update this worker began."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The assignment of `epoch` is installed; the training loop continues."""

    epoch: int
    transfer_s: float
    rebuild_s: float
    sources: tuple[str, ...] = ()
    """Sources of the state: memory | shared-memory | peer:NODE | checkpoint | initial."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The first micro-batch of the epoch is computed and its gradient added."""

    epoch: int
    at: float
    """time.time() of that moment."""


@dataclass(frozen=True, slots=True)
class Protected:
    """All copies published at the installation of `epoch` are whole at their peers."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step is done. One worker sends it: first stage of the first pipeline, TP rank 0."""

    epoch: int
    record: StepRecord
    seconds: float
    lr: float
    tokens: int = 0
    doubled: int = 0
    missing: int = 0


@dataclass(frozen=True, slots=True)
class FaultReached:
    """An injected fault is due that the agent carries out (partition) or only records."""

    fault: str
    at: float


@dataclass(frozen=True, slots=True)
class Finished:
    """All steps are done. `params_sha256` comes from the worker that computed it."""

    step: int
    params_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The script cannot go on (bad configuration, error in user code). May replace Attach."""

    message: str
    exit_code: int = 1
    local_rank: int = 0


@dataclass(frozen=True, slots=True)
class Crashed:
    """The worker's device broke. The worker exits at once, and its node restarts it."""

    message: str
    local_rank: int = 0


# ---- agent -> worker ----


@dataclass(frozen=True, slots=True)
class Halt:
    """Leave every epoch below `epoch`: now, or (boundary) all together when the step ends."""

    epoch: int
    boundary: bool = False


@dataclass(frozen=True, slots=True)
class Install:
    """Enter `epoch` as `assignment` says."""

    epoch: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class BundleAcknowledged:
    """The bundle and all before it are whole in their vaults.

    Without `kept` the bundle was given up because a vault had no room.
    """

    bundle: int
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Pull the newest state of these layers into the local vault while training goes on."""

    epoch: int
    sources: tuple[tuple[int, int, str], ...]
    """(layer, TP rank, node that holds it)."""
    vaults: tuple[tuple[str, str], ...]
    """(node, host:port of its vault)."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process group; `code` is the job's exit code."""

    code: int
    reason: str = ""


# ---- agent -> coordinator ----


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node's whole condition."""

    info: NodeInfo
    phase: NodePhase
    epoch: int
    """Highest epoch that the node knows."""
    spec: JobSpec | None = None
    store: str = ""
    """host:port of a rendezvous store that the node can host."""
    able: bool = False
    """Whether all workers are attached, so that the node can take a stage."""
    elastic: bool = False
    """Whether a worker of this node ever attached: the script uses elastic."""
    halted: tuple[Halted, ...] = ()
    ready: tuple[Ready, ...] = ()
    resumed_at: float = 0.0
    protected: int = -1
    """Highest protected epoch."""
    prefetched: int = -1
    """Highest epoch with a complete prefetch."""
    inventory: tuple[Copy, ...] = ()
    """Copies in its vault; filled while HALTED, and on a node without living workers."""
    suspects: tuple[str, ...] = ()
    """Nodes that its workers lost contact with in the current epoch."""
    cause: str = ""
    """Cause of its workers' last crash: exit code, signal or hang."""
    hung: bool = False
    """Whether that crash was a hang."""
    detect_s: float = 0.0
    """Seconds from the fault until the agent knew it; 0: unknown."""
    finished: Finished | None = None
    failed: Failed | None = None
    restart: int = -1
    """Restart count that these workers were launched with; -1: not launched."""
    step: int = 0
    """Step that the workers are in."""
    microbatch: int = 0
    crash_count: int = 0
    """Crashes and hangs of this incarnation's workers."""
    preflight: Preflight | None = None
    """Result of the pre-flight; only while the node asks to join."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sign of life of a node."""

    node: str
    incarnation: str
    step: int
    microbatch: int
    measured: tuple[MicrobatchTiming, ...] = ()
    """Newest timing of each worker that computes."""


BACKUP_SHORT, COPY_CORRUPT = "backup-short", "copy-corrupt"
BACKUP_NOTES = (BACKUP_SHORT, COPY_CORRUPT)
"""A vault has no room for copies; a copy did not match its checksum and was dropped."""


@dataclass(frozen=True, slots=True)
class BackupNote:
    """A warning about backups for the user; training goes on."""

    kind: str
    """One of BACKUP_NOTES."""
    owner: str
    """Node that made the copies."""
    keeper: str
    """Node of the vault."""
    detail: str


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One node's part of a durable checkpoint is on disk."""

    step: int
    layers: tuple[Slot, ...]
    """Layers in the files written."""


@dataclass(frozen=True, slots=True)
class RefusalNote:
    """A port of this node refused a connection or message (`elastic.rpc.security.rejections`)."""

    node: str
    port: str
    reason: str
    peer: str
    detail: str
    count: int
    """Refusals since the previous note; notes are rate-limited."""
    total: int


# ---- coordinator -> agent ----


@dataclass(frozen=True, slots=True)
class Released:
    """The job no longer needs the node: end the workers, drop the vault, join anew if it stays."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """The node is no member any more: end the workers, drop the vault, join as new incarnation."""

    reason: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the workers with torchrun's environment."""

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
    """Drop copies of epochs below `epoch`, except logged messages of `step`, in which it began."""

    epoch: int
    step: int = -1
