"""Messages between workers, agents and the coordinator.

Messages are frozen dataclasses, which `elastic.domain.codec` encodes. Kinds of connections:

- worker <-> agent: one Unix socket per worker (`elastic.rpc.frames`);
- agent <-> coordinator: one gRPC stream per node (`elastic.rpc`); every envelope carries the term
  and the epoch;
- vault <-> vault and worker -> vault: bulk transfers over TCP (`elastic.agent.vault.vault`).

An agent sends its node's whole condition (`NodeReport`) whenever it changes and after every
reconnect, so the coordinator never depends on an earlier message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from elastic.core.protocol.health_report import Notice as Notice
from elastic.core.protocol.health_report import NoticeKind as NoticeKind
from elastic.core.protocol.health_report import Preflight
from elastic.core.protocol.version import ProtocolVersion
from elastic.domain.types import (
    Assignment,
    Copy,
    Divergence,
    EvaluationResult,
    JobSpec,
    NodeInfo,
    Slot,
    StepRecord,
)


class NodePhase(StrEnum):
    """Phase of a node's workers, as its agent sees them."""

    EMPTY = "empty"
    """No workers were launched yet."""
    STARTING = "starting"
    """Workers were launched, or restarted after a crash, and not all of them are attached."""
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
class Hello:
    """First message of a worker: who it is and which version it has. Its fields never change."""

    local_rank: int
    pid: int
    version: ProtocolVersion = field(default_factory=ProtocolVersion)


@dataclass(frozen=True, slots=True)
class Attach:
    """Registration of a worker whose script uses elastic."""

    local_rank: int
    pid: int
    spec: JobSpec
    store: str
    """host:port at which this worker can host the rendezvous store."""
    accelerated: bool = False
    """Whether the worker computes on a device other than the CPU."""


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """A copy in the node's shared memory."""

    copy: Copy
    path: str
    offset: int
    """Bytes from the start of the file `path`."""


@dataclass(frozen=True, slots=True)
class Published:
    """A bundle of whole copies in shared memory, which is reused once they are acknowledged."""

    bundle: int
    copies: tuple[LocalCopy, ...]
    peer: str = ""
    """Node whose vault must hold the copies before the acknowledgement; "": only the own vault."""


@dataclass(frozen=True, slots=True)
class BackupTraffic:
    """Backup work of one worker in one step."""

    copied_bytes: int = 0
    copied_s: float = 0.0
    """Time to write copies to shared memory, with checksums."""
    waited_s: float = 0.0
    """Time for which the main thread waited for acknowledgements."""
    sent_bytes: int = 0
    """Bytes of the bundles that a peer keeps."""
    sent_s: float = 0.0
    """Time of these bundles from announcement to acknowledgement."""


@dataclass(frozen=True, slots=True)
class MicrobatchTiming:
    """One worker's compute times in a step: medians over micro-batches, summed over its stages."""

    epoch: int
    step: int
    local_rank: int
    forward_s: float
    backward_s: float
    """Time of the whole backward pass, also if the schedule splits it."""
    slowed: float = 0.0
    """Compute time during a transfer of copies / compute time without a transfer; 0: unknown."""
    traffic: BackupTraffic = BackupTraffic()


@dataclass(frozen=True, slots=True)
class Progress:
    """Sign of life of a worker, sent by its helper thread."""

    counter: int
    """Number that grows with every action of the main thread."""
    activity: str
    """Activity of the main thread: compute | evaluate | wait | install | idle."""
    step: int
    microbatch: int
    measured: MicrobatchTiming | None = None
    """Timing of the newest finished step."""


@dataclass(frozen=True, slots=True)
class CommFailed:
    """The worker lost contact with other nodes, abandoned the epoch and waits for orders."""

    epoch: int
    nodes: tuple[str, ...]
    """Suspected nodes; (): unknown."""
    detail: str
    """Type and message of the error (`elastic.domain.errors.describe`), with the peer's name."""


@dataclass(frozen=True, slots=True)
class Diverged:
    """Holders of layers disagree before an update of `epoch`. No worker has updated."""

    epoch: int
    step: int
    """Step whose update was not made; version of all states."""
    found: tuple[Divergence, ...]
    """Values of all holders; equal on all workers."""
    sound: tuple[tuple[str, int, int, bool], ...] = ()
    """(name of the worker's unit, layer, TP rank, whether its state equals its newest copy)."""
    portions: tuple[tuple[str, int, int, int, int], ...] = ()
    """(name of the worker's unit, layer, TP rank, index, number) of each portion of a shared state
    of version `step` of which this worker has a right copy, even if its live state is wrong. The
    copy was made in the last update, before the holders exchanged the parameters, or it differs
    from the live state, which has changed since."""


@dataclass(frozen=True, slots=True)
class CheckpointUnreadable:
    """The checkpoint that the assignment of `epoch` names is incomplete or damaged. The worker has
    abandoned the epoch and waits for orders."""

    epoch: int
    path: str
    detail: str
    missing: bool = False
    """Whether files are not there, which another node may see."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The worker goes on with its micro-batches of `step` in the epoch `ran_in`, and halts before
    the commit. It takes part in no commit of an epoch below `epoch`."""

    epoch: int
    ran_in: int
    step: int


@dataclass(frozen=True, slots=True)
class Halted:
    """The worker has published all its copies and waits for the next assignment."""

    epoch: int
    step: int
    """Version of the state that the worker holds; -1: no state."""
    started: frozenset[int] = frozenset()
    """Micro-batches of the present step whose forward pass began in the worker's first stage."""
    sent: frozenset[int] = frozenset()
    """Micro-batches of the present step whose activations that stage has sent."""
    record: StepRecord | None = None
    """Record of the last step whose update this worker began; None: no update began."""
    complete: bool = False
    """Whether the worker kept its promise for `epoch`: its sums have all micro-batches that it was
    to run in the step."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has installed the assignment of `epoch`."""

    epoch: int
    transfer_s: float
    rebuild_s: float
    sources: tuple[str, ...] = ()
    """Sources of the state: memory | shared-memory | peer:NODE | checkpoint | initial."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The worker has computed its first micro-batch of the epoch and added the gradient."""

    epoch: int
    at: float
    """Time (time.time()) at which the micro-batch was computed."""


@dataclass(frozen=True, slots=True)
class Protected:
    """The peers hold all copies that the worker published at the installation of `epoch`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step is done. Each node tells its agent; the agents of two nodes tell the coordinator at
    once."""

    epoch: int
    record: StepRecord
    seconds: float
    lr: float
    tokens: int = 0
    spare: bool = False
    """Whether other nodes report the step. The agent keeps the newest such message, and sends it
    when its workers no longer run: perhaps the others were lost before they finished the step."""


@dataclass(frozen=True, slots=True)
class FaultReached:
    """An injected fault that the agent must carry out (partition, cut, corrupt) is due."""

    fault: str
    at: float


@dataclass(frozen=True, slots=True)
class Finished:
    """All steps are done."""

    step: int
    params_sha256: str = ""
    """Hash of all parameters. Rank 0 sets it; it is empty from other workers."""
    evaluation: EvaluationResult | None = None
    """Evaluation of the final parameters; None: none was due."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The script cannot continue (bad configuration, error in user code); may replace `Attach`."""

    message: str
    exit_code: int = 1
    local_rank: int = 0
    record: StepRecord | None = None
    """Record of the step whose gradient is not finite, if the job stops because of it."""
    doubled: int = 0
    missing: int = 0
    """`doubled`, `missing`: micro-batches that a wrong ledger has twice or lacks."""
    version: int = -1
    """Version of the worker's state; -1: it has none."""


@dataclass(frozen=True, slots=True)
class Crashed:
    """The worker ends because of an error of its device or of this process; may replace `Attach`.
    Its node restarts it."""

    message: str
    local_rank: int = 0


# ---- agent -> worker ----


@dataclass(frozen=True, slots=True)
class Halt:
    """Leave every epoch below `epoch`: now, or at a boundary halt."""

    epoch: int
    boundary: bool = False
    outside: tuple[str, ...] = ()
    """Nodes that promise, go on with their micro-batches of the running step, and halt at the
    meeting point (docs/design/local-recovery.md). All other nodes halt now."""
    lost: tuple[str, ...] = ()
    """Nodes that can keep no copies for the nodes in `outside`."""


@dataclass(frozen=True, slots=True)
class Install:
    """Enter `epoch` with this assignment."""

    epoch: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class BundleAcknowledged:
    """The bundle and all earlier ones of the worker are done."""

    bundle: int
    kept: bool = True
    """Whether the vaults hold the bundle; False: a vault had no room, and the bundle is dropped."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Fetch the newest state of these layers into the node's vault while training continues."""

    epoch: int
    sources: tuple[tuple[int, int, str], ...]
    """(layer, TP rank, node that holds it)."""
    vaults: tuple[tuple[str, str], ...]
    """(node, host:port of its vault)."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End all workers and the agent; `code` is the job's exit code."""

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
    """host:port at which the node can host the rendezvous store."""
    able: bool = False
    """Whether all workers are attached, so that the node can take a stage."""
    elastic: bool = False
    """Whether the script uses elastic: a worker of this node has attached."""
    halted: tuple[Halted, ...] = ()
    promises: tuple[Promise, ...] = ()
    """Promises of its workers for `epoch`."""
    ready: tuple[Ready, ...] = ()
    resumed_at: float = 0.0
    protected: int = -1
    """Highest protected epoch."""
    prefetched: int = -1
    """Highest epoch with a complete prefetch."""
    inventory: tuple[Copy, ...] = ()
    """Copies in the node's vault; empty unless the node is HALTED, has promised to halt, or has no
    living workers."""
    suspects: tuple[str, ...] = ()
    """Nodes with which its workers lost contact in the present epoch."""
    diverged: tuple[Diverged, ...] = ()
    """Reports of its workers that holders disagree, until the next installation."""
    failures: tuple[str, ...] = ()
    """Errors because of which this node cannot go on in the present epoch, oldest first."""
    cause: str = ""
    """Cause of the workers' last crash: exit code, signal or hang."""
    hung: bool = False
    """Whether `cause` is a hang."""
    detect_s: float = 0.0
    """Seconds from a hang until the agent detected it; 0: unknown."""
    unreadable: CheckpointUnreadable | None = None
    """Report that a checkpoint cannot be read in the present epoch."""
    finished: Finished | None = None
    writing: bool = False
    """Whether parts of checkpoints wait for the node's disk; False while it trains."""
    failed: Failed | None = None
    restart: int = -1
    """`Launch.restart` of the present workers; -1: not launched."""
    step: int = 0
    """Step that the workers compute."""
    microbatch: int = 0
    crash_count: int = 0
    """Number of crashes and hangs of this incarnation's workers."""
    preflight: Preflight | None = None
    """Result of the pre-flight; None once the node is a member."""
    accelerated: bool = False
    """Whether the workers compute on devices other than the CPU."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sign of life of a node, sent at intervals by its agent."""

    node: str
    incarnation: str
    step: int
    microbatch: int
    measured: tuple[MicrobatchTiming, ...] = ()
    """Newest compute times of each worker that has a stage."""
    rtt_s: float = 0.0
    """Least round-trip time to the coordinator in the last measurements; 0: unknown."""
    signs: int = 0
    """Number that changes with every sign of progress of the workers; 0: they are not counted."""
    activity: str = ""
    """Activity of the worker without a sign for the longest time: start | compute | evaluate | wait
    | install | idle; one that waits for others is named only if all do."""
    spun_s: float = 0.0
    """Time since its last sign of progress for which this worker's main thread ran, or waited for a
    processor."""


BACKUP_SHORT, COPY_CORRUPT, KEEPER_FAILED = "backup-short", "copy-corrupt", "keeper-failed"
BACKUP_NOTES = (BACKUP_SHORT, COPY_CORRUPT, KEEPER_FAILED)
"""Kinds of `BackupNote`: a vault has no room for copies; a copy had a wrong checksum; a vault can
store no copies for another reason than a lack of room."""


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
    vault: str = ""
    """Address of the vault, which a new incarnation of the keeper does not have; "": unknown."""


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One node's part of a durable checkpoint is on disk, or could not be written."""

    step: int
    layers: tuple[Slot, ...]
    """(layer, TP rank), or also a portion, of each file that was written, or that could not be."""
    epoch: int = -1
    """Epoch in which the states were published, or in which the write failed; -1: unknown."""
    node: str = ""
    error: str = ""
    """Reason why the files could not be written; "": they are on disk."""

    def undone_by(self, epoch: int, step: int) -> bool:
        """Return whether the states are of an abandoned attempt at their step: a later epoch,
        `epoch`, began at the earlier step `step`."""
        return 0 <= self.epoch < epoch and self.step > step


@dataclass(frozen=True, slots=True)
class AgentFailed:
    """Last message of an agent that ends because of an error of its own."""

    node: str
    incarnation: str
    error: str
    """Type and message of the error."""


@dataclass(frozen=True, slots=True)
class RefusalNote:
    """A port of this node refused a connection or message (`elastic.rpc.security.rejections`)."""

    node: str
    port: str
    reason: str
    peer: str
    detail: str
    count: int
    """Number of refusals since the previous note; notes are rate-limited."""
    total: int


# ---- coordinator -> agent ----


@dataclass(frozen=True, slots=True)
class Released:
    """The job released the node: end the workers, drop the vault, join anew if the node stays."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """The node is not a member: end the workers, and join as a new incarnation that offers the
    copies in its vault."""

    reason: str


@dataclass(frozen=True, slots=True)
class RestartWorkers:
    """Kill the workers, which the agent then restarts as after a hang."""

    reason: str
    crash_count: int
    """`NodeReport.crash_count` at the time of the order. With another count, the workers of that
    time are gone, and the order has no effect."""


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
    """Number of earlier restarts of all workers; only for scripts that do not use elastic."""


@dataclass(frozen=True, slots=True)
class Trim:
    """Drop copies of epochs below `epoch`, except logged messages of `step`, its first step."""

    epoch: int
    step: int = -1
