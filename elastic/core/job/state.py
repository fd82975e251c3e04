"""State, events and actions of the coordinator.

`elastic.core.coordinator.transitions` computes the next state and the actions from a state and an
event. The whole `JobState` is saved with every decision, so a new coordinator continues from it.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from elastic.core.health.backup_metrics import BackupMetrics
from elastic.core.health.compute_speed import ComputeSpeed
from elastic.core.health.diagnosis import HealthLimits, NodeHealth
from elastic.core.health.path_fault import PathFault
from elastic.core.protocol.health_report import CertificateEnd
from elastic.core.protocol.messages import (
    Failed,
    Finished,
    Launch,
    NodePhase,
    NodeReport,
    Notice,
)
from elastic.core.protocol.messages import Heartbeat as Heartbeat
from elastic.core.protocol.timeouts import LongestDurations, Timeouts, budget
from elastic.core.protocol.version import FIRST
from elastic.core.recovery.divergence import Distrust
from elastic.domain.types import (
    Assignment,
    EvaluationResult,
    JobSpec,
    NodeInfo,
    Plan,
    SavedModel,
    Slot,
    StepRecord,
)
from elastic.planning.backup.loss_history import LossHistory
from elastic.planning.cost.profile import Profile


class JobPhase(StrEnum):
    """Phase of the job. `elastic.core.coordinator.transitions.RULES` is the table of changes."""

    WAITING = "waiting"
    """Fewer nodes than the minimum have joined."""
    LAUNCHED = "launched"
    """Workers are starting. A script that never uses elastic stays in this phase until it ends."""
    HALTING = "halting"
    """A new epoch has begun. All members must halt and report their inventory."""
    INSTALLING = "installing"
    """The new plan was sent. All nodes of the plan must become ready."""
    RUNNING = "running"
    PAUSED = "paused"
    """No plan fits the available nodes. The job continues by itself when nodes join."""
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings of the user for the whole job."""

    min_nodes: int = 1
    max_nodes: int = 1
    workers_per_node: int = 1
    max_restarts: int = 0
    shape: str = "auto"
    schedule: str = "auto"
    backup: str = "auto"
    heartbeat_s: float = 0.5
    lease_s: float = 3.0
    """A member that is silent for this time is lost."""
    last_call_s: float = 1.0
    """Wait for nodes beyond the minimum, up to the maximum, before the launch."""
    master_addr: str = ""
    """MASTER_ADDR of the workers; "": the host of the first node."""
    master_port: int = 29500
    room_bytes: int = 0
    """Memory of a node for copies of other nodes; 0: unlimited."""
    profile: Profile | None = None
    """Costs of the layers per device type; None: the script's own figures."""
    health: HealthLimits = field(default_factory=HealthLimits)
    standbys: bool = False
    """Whether other coordinators may take over."""


@dataclass(frozen=True, slots=True)
class Member:
    """The coordinator's knowledge of a node."""

    report: NodeReport
    seen: float
    """Time of the node's newest message, or of a failover. Time for which the coordinator itself
    did not run is added."""
    excused_s: float = 0.0
    """Time since `seen` that does not count as the node's silence (`elastic.core.job.liveness`)."""
    rank: int = -1
    """torchrun's group rank; -1: not launched."""
    launch: Launch | None = None
    connected: bool = True
    closed_at: float = 0.0
    """Time at which the connection closed; after a failover, the time until which the node may
    reconnect."""
    draining: bool = False
    """Whether plans leave the node out, because it is to leave."""
    drain_deadline: float = 0.0
    """Time at which the node is to have left; 0: it is not to leave. If it is not `draining`, its
    drain waits, because no plan fits without the node (`elastic.core.policy.drain`)."""
    expected_end: float = 0.0
    """Time at which the node is expected to leave; 0: unknown."""
    notice: Notice | None = None
    """Newest notice of the node's agent, unless the agent withdrew it."""
    hint_used: bool = False
    """Whether an epoch change was begun because of the hint in `notice`."""
    refused: bool = False
    """Whether the port of its vault refused a connection after the stream closed: its agent has
    ended."""
    agent_error: str = ""
    """Error because of which the node's agent ends; "": none was reported."""

    @property
    def node(self) -> str:
        return self.report.info.node

    def silence_s(self, now: float) -> float:
        """Return the time for which the node is silent; negative if it has more time."""
        return now - self.seen - self.excused_s

    @property
    def workers_gone(self) -> bool:
        """Whether the node has no ready workers: not started, starting again, or failed."""
        return self.report.phase in (NodePhase.EMPTY, NodePhase.STARTING, NodePhase.FAILED)

    @property
    def halted(self) -> bool:
        """Whether no worker of the node computes, so that its reported inventory is final."""
        if self.report.phase is NodePhase.FINISHED:
            return not self.report.able  # its script ended without taking part
        return self.workers_gone or self.report.phase in (NodePhase.HALTED, NodePhase.IDLE)


class LossKind(StrEnum):
    """Evidence by which a member was declared lost."""

    CLOSED = "closed"
    """The member's connection closed."""
    SILENT = "silent"
    """The member's lease expired."""
    REPLACED = "replaced"
    """The member's agent joined again as another incarnation."""
    STALLED = "stalled"
    """The job waited for the member, and its agent did not restart its workers."""


class CauseKind(StrEnum):
    """Kinds of causes of an epoch change, for statistics."""

    START = "start"
    """The job starts."""
    LOST = "lost"
    """A node is lost."""
    WORKER = "worker"
    """Workers of a node crashed."""
    HANG = "hang"
    """Workers of a node hung."""
    CONTACT = "contact"
    """Workers lost contact with each other."""
    DRAIN = "drain"
    """A node leaves with notice."""
    NOTICE = "notice"
    """The deadline of a notice comes before the end of the step."""
    JOIN = "join"
    """Nodes joined."""
    SLOW = "slow"
    """Nodes became slow, or are at normal speed again."""
    BACKUP = "backup"
    """Another pair of backup schemes is better."""
    RESUME = "resume"
    """A plan fits the nodes of a paused job again."""
    DIVERGENCE = "divergence"
    """Holders of a layer disagree."""
    STALLED = "stalled"
    """The job made no progress."""
    STORE = "store"
    """The store lost its last writes: nodes are in an epoch that the saved state does not have."""
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> CauseKind:
        """Read a kind that only the next version knows as OTHER."""
        return cls.OTHER


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of an epoch change."""

    kind: CauseKind
    text: str
    """Description for people."""
    nodes: tuple[str, ...] = ()
    """Nodes that are lost, leave, join or changed their speed or health."""


@dataclass(frozen=True, slots=True)
class EpochChange:
    """An epoch change under way. Times are seconds on the coordinator's clock."""

    epoch: int
    causes: tuple[Cause, ...]
    """Causes, oldest first. Each further fault before the end of the recovery adds a cause."""
    boundary: bool
    """Whether the change is planned: all workers stop after the same update."""
    lost: tuple[str, ...]
    """Nodes whose workers are gone."""
    nodes_before: int
    began: float
    """Time of the decision to halt."""
    old_plan: Plan | None
    step: int
    """Newest step that a node had begun; once decided, the step that the new plan runs first."""
    microbatch: int
    """Highest micro-batch of `step` that a node had begun."""
    detect_s: float = 0.0
    """Time that an agent took to find a hang; 0: unknown."""
    paused: float = 0.0
    """Time at which the last step before the change ended."""
    halted: float = 0.0
    decided: float = 0.0
    """Time at which the new plan was sent."""
    replayed: frozenset[int] = frozenset()
    """Micro-batches that a lost stage had received and that must run again."""
    rerun: int = 0
    """Number of micro-batches of `step` that had begun and run again after the change."""
    partial: int = 0
    """Number of micro-batches that only some layers run again."""
    state_source: str = ""
    network_bytes: int = 0
    """Bytes that nodes send to each other for the change."""
    wait_until: float = 0.0
    """Time at which the wait for restarting workers ends; -1: no wait; 0: not decided yet."""
    outside: tuple[str, ...] = ()
    """Nodes that go on until the end of their micro-batches (`elastic.core.job.scope`); (): all
    nodes halt at once."""
    continued: bool = False
    """Whether it continues a change whose plan was not sent, because nodes could not stay outside.
    It is no second failure."""
    reason: str = ""

    @property
    def cause(self) -> str:
        """Text of all causes, for people."""
        return "; then ".join(cause.text for cause in self.causes)

    @property
    def starts_job(self) -> bool:
        """True if the start of the job is the only cause: no fault came before the epoch ran."""
        return [cause.kind for cause in self.causes] == [CauseKind.START]


@dataclass(frozen=True, slots=True)
class MissingCopies:
    """Copies without which the job cannot continue, and which absent nodes may still have, or
    which a checkpoint replaces once it is committed."""

    error: str
    """Layers and the copies that they lack."""
    code: int
    """Exit code of the job if no node returns in time."""
    nodes: tuple[str, ...]
    """Absent nodes."""
    since: float
    """Beginning of the wait, or the newest return of one of `nodes`."""
    count: int = 0
    """Number of members and absent nodes at that time."""
    checkpoint: int = -1
    """Step of the newest durable checkpoint when the copies were last looked for; -1: none."""


@dataclass(frozen=True, slots=True)
class ProgressSign:
    """Newest sign of progress of a node, from its heartbeats and reports."""

    at: float
    """Time of the sign on the coordinator's clock."""
    count: int = 0
    """`Heartbeat.signs`; 0: the agent does not count them."""
    activity: str = ""
    spun_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RestartOrders:
    """Orders to restart workers that one incarnation of a node was sent since its workers were last
    attached."""

    incarnation: str
    crash_count: int
    """`NodeReport.crash_count` at the newest order. While it stays, the order is not obeyed."""
    at: float
    """Time of the newest order."""
    unanswered: int = 1
    """Number of orders with this crash count, with their repetitions."""
    sent: int = 1
    """Number of orders, without repetitions of orders that may be lost."""


@dataclass(frozen=True, slots=True)
class FinalWait:
    """Wait for the parts of the last checkpoint, or for its commit, after the last step
    (`elastic.core.policy.final_checkpoint`)."""

    mark: str = ""
    """Epoch and number of parts on disk."""
    since: float = 0.0
    """Time at which `mark` last changed."""
    parts: int = 0
    """Number of parts on disk."""
    reported: bool = False
    """Whether people were told of the wait."""
    attempts: int = 0
    """Number of epochs that were begun because parts did not come, since the newest part."""


@dataclass(frozen=True, slots=True)
class ProgressWatch:
    """Progress of the job, for `elastic.core.policy.progress_watchdog`. Times are in seconds."""

    mark: str = ""
    """Phase, epoch and newest finished step."""
    since: float = 0.0
    """Time at which `mark` last changed, or at which the watchdog last acted."""
    step: int = -1
    """Newest finished step when progress was last made."""
    signs: dict[str, ProgressSign] = field(default_factory=dict)
    """Newest sign of progress per node."""
    stalls: int = 0
    """Number of stalls since the last progress. Each one that is acted on doubles the bound."""
    only_reported: int = 0
    """Number of those that were reported, and not acted on."""
    reminded: bool = False
    """Whether missed orders were repeated in this stall."""
    orders: dict[str, RestartOrders] = field(default_factory=dict)
    """Orders to restart workers, per node."""
    attempts: int = 0
    """Number of epochs that failed since the last progress."""
    retry_at: float = 0.0
    """Time before which no plan is installed."""
    failed_times: tuple[float, ...] = ()
    """Times at which the newest failed epochs ended, oldest first."""
    cause: str = ""
    """Cause of the newest failed epoch."""
    blamed: dict[str, int] = field(default_factory=dict)
    """Number of epochs since the last progress for whose failure each node was blamed."""
    failures: dict[str, str] = field(default_factory=dict)
    """Error of each node in the newest failed epoch that it took part in, if it accused no other
    node."""
    final: FinalWait | None = None
    """Wait for the last checkpoint; None: a step is missing, or the checkpoint is durable."""


@dataclass(frozen=True, slots=True)
class JobFailure:
    """The first error that ends the job. Later ones may only follow from it."""

    node: str
    failed: Failed
    at: float
    """Time since which the job waits for the checkpoint that is due."""


@dataclass(frozen=True, slots=True)
class JobFinished:
    """End of the job; as an action, an order to write the summary."""

    code: int
    reason: str
    params_sha256: str = ""


@dataclass(frozen=True)
class JobState:
    """All that a coordinator knows about the job, saved with every decision.

    A coordinator of the next or the former version can read it
    (`elastic.core.protocol.version`), so new fields have defaults. It has no slots, so that `of`
    copies its many fields at once.
    """

    policy: Policy
    phase: JobPhase = JobPhase.WAITING
    epoch: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    next_rank: int = 0
    restart: int = 0
    spec: JobSpec | None = None
    plan: Plan | None = None
    assignment: Assignment | None = None
    change: EpochChange | None = None
    record: StepRecord | None = None
    """Record of the newest finished step that is known; None: unknown. It is a step before the
    assignment's first one, or a step that was committed under this assignment."""
    evaluation: EvaluationResult | None = None
    """Newest evaluation that is known; None: none."""
    step_finished_at: float = 0.0
    finished: Finished | None = None
    """Report of rank 0, while the end of the job waits for older checkpoints."""
    finished_at: float = 0.0
    """Time since which it waits; 0: it does not."""
    logged_step: int = -1
    """Newest step in the event log."""
    recovered_at: float = 0.0
    """Time at which the newest completed change was complete; 0: no change was completed."""
    trained: bool = False
    """Whether an epoch has run."""
    trimmed: int = 0
    """Newest epoch for which the copies of older epochs were trimmed."""
    distrusted: tuple[Distrust, ...] = ()
    """Copies that recoveries must not use, after divergences."""
    checkpoint: tuple[str, int] | None = None
    """(directory, step) of the newest durable checkpoint."""
    checkpoint_blind: tuple[str, ...] = ()
    """Nodes that do not see the files of `checkpoint`."""
    older_checkpoints: tuple[tuple[str, int], ...] = ()
    """(directory, step) of earlier durable checkpoints, newest first."""
    checkpoint_parts: tuple[tuple[int, tuple[Slot, ...]], ...] = ()
    """(step, layers and portions on disk) of checkpoints that are being written, oldest first."""
    checkpoint_epochs: tuple[tuple[int, int], ...] = ()
    """(step, newest epoch of its parts, or in which it became complete) of checkpoints that are
    being written, committed, or durable. For a durable one it is the epoch to whose history it
    belongs."""
    checkpoint_writers: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """(step, nodes that wrote its parts) of the newest durable checkpoint and of later ones."""
    rewritten: tuple[tuple[int, int], ...] = ()
    """(epoch, step) after divergences: parts of checkpoints of later steps that earlier epochs
    wrote do not count, as if the epoch had begun at this step."""
    lost_checkpoints: tuple[int, ...] = ()
    """Newest steps whose checkpoints were given up."""
    checkpoint_errors: tuple[tuple[str, str], ...] = ()
    """(node, reason) of each failure to write the checkpoint of the last step in this epoch; the
    node is "" if the commit failed."""
    failed_writers: tuple[tuple[int, str], ...] = ()
    """(step, "NODE LAYER TP-RANK ...") of each part of a checkpoint that a node could not write in
    this epoch."""
    queued_writers: tuple[tuple[int, Slot, str], ...] = ()
    """(step, layer or portion, incarnation) of each state in `Assignment.rescued` that a member was
    to write before this epoch: it may have the state in its queue."""
    enough_since: float = 0.0
    """Time since which the minimum of nodes is there; 0: it is not. Before the launch connected
    nodes count, after it those whose workers are ready."""
    launched_at: float = 0.0
    start_s: float = 0.0
    """Seconds from the launch until all nodes were ready. Before that: until the first one was."""
    waited: tuple[tuple[str, int], ...] = ()
    """(node, step) of the last wait for restarting workers."""
    retired: tuple[tuple[str, str], ...] = ()
    """(node, incarnation) of the newest members that joined again as another incarnation."""
    released: tuple[tuple[str, str, bool], ...] = ()
    """(node, incarnation, whether it was ordered to end) of the newest drained members. The order
    may be lost."""
    considered: tuple[str, ...] = ()
    """Keys (`join_policy.member_key`) of members that the running plan uses or leaves aside."""
    drains_settled: tuple[str, ...] = ()
    """Members and drains for which it was decided which drains wait."""
    joining: tuple[str, ...] = ()
    """Nodes that fetch state in the background before a plan uses them."""
    joining_sources: tuple[tuple[str, tuple[tuple[int, int, str], ...]], ...] = ()
    """(node, `Prefetch.sources`) of these nodes, so that their orders can be repeated."""
    joining_since: float = 0.0
    updated_at: float = 0.0
    """Time of the newest transition."""
    late_s: float = 0.0
    """Delay of the newest tick of the coordinator's clock."""
    ending: JobFinished | None = None
    failure: JobFailure | None = None
    """Error because of which the job ends; None: none. No other rule applies after it."""
    suspected_since: float = 0.0
    """Time of the first report of lost contact in this epoch; 0: no report."""
    paces: dict[str, ComputeSpeed] = field(default_factory=dict)
    """Measured compute speed per incarnation."""
    profile_error: float = 0.0
    """Factor by which the fastest node was slower than the user's profile says when the profile was
    found to be wrong; 0: it was not. Nodes are then judged as without a profile."""
    gauges: dict[str, BackupMetrics] = field(default_factory=dict)
    """Measured effect of backups per incarnation."""
    backup_figures: tuple[float, ...] = ()
    """Figures of the newest choice of backup schemes; (): nothing was chosen yet."""
    backup_checked_at: float = 0.0
    requested_backup: str = ""
    """Pair of backup schemes for which the plan was changed last."""
    poor_keepers: tuple[str, ...] = ()
    """Incarnations of members whose vaults can store no copies of other nodes."""
    resumed: SavedModel | None = None
    """Model of the checkpoint that the job resumes, until it is compared with the script's."""
    losses: int = 0
    """Not used any more (`history` has it); it is removed with the next protocol version."""
    node_seconds: float = 0.0
    """Likewise."""
    counted_at: float = 0.0
    """Likewise."""
    history: LossHistory = field(default_factory=LossHistory)
    """Losses and seconds of membership, for the expected time to the next loss."""
    pauses: tuple[float, ...] = ()
    """Seconds for which training paused in each of the newest epoch changes."""
    reconsider_at: float = 0.0
    """Time at which rejected nodes are considered again; 0: never."""
    improve_at: float = 0.0
    """Time at which a plan that was only repaired is compared with the best one; 0: never."""
    health: dict[str, NodeHealth] = field(default_factory=dict)
    """Health record per node name."""
    durations: tuple[tuple[int, float], ...] = ()
    """(epoch, seconds) of the newest steps."""
    rebalance: str = ""
    """Reason to change the plan at the end of the step because of a node's health; "": none."""
    seen: LongestDurations = field(default_factory=LongestDurations)
    """Longest measured times, from which the limits on waiting are computed."""
    paths: tuple[PathFault, ...] = ()
    """Pairs of nodes that could not reach each other (`elastic.core.job.reachability`)."""
    left_out: tuple[str, ...] = ()
    """Nodes that the newest plan leaves out because of bad paths."""
    blocked: tuple[str, ...] = ()
    """Nodes and bad paths with which no plan can reach the state that is needed; (): none."""
    timeouts: Timeouts | None = None
    """Limits on waiting that were logged last; None: the defaults, not logged yet."""
    doubt_since: float = 0.0
    """Time since which the coordinator hears only a minority of the nodes and blames itself; 0: it
    blames the nodes."""
    minority_since: float = 0.0
    """Time since which a minority is heard during the doubt; 0: nobody is heard, or no doubt."""
    minority_s: float = 0.0
    """Seconds before `minority_since` for which a minority was heard during the doubt."""
    doubt_reported: bool = False
    """Whether the doubt lasts so long that it is reported."""
    crowd: int = 0
    """Largest number of disconnected members since all were connected."""
    adopted_until: float = 0.0
    """Time until which nodes report to a new coordinator, also those that joined before the store
    lost its last writes; 0: there was no failover."""
    yielded_at: float = 0.0
    """Time of the newest decision to give up the lead."""
    starts: tuple[tuple[int, int], ...] = ()
    """(epoch, first step) of the newest epochs, by which old copies are judged
    (`elastic.core.recovery.lineage`)."""
    absent: tuple[tuple[str, float], ...] = ()
    """(node, time of its loss) of lost or unknown nodes that may live and have copies of the
    present state."""
    missing: MissingCopies | None = None
    """Reason why a paused job waits for absent nodes; None: it does not."""
    watch: ProgressWatch = field(default_factory=ProgressWatch)
    run: str = ""
    """Name of the run, by which its checkpoint files are known; "": the former version began it."""
    protocol: int = FIRST
    """Protocol version of the coordinator that wrote this state."""
    log: tuple[str, ...] = ()
    """Lines of the event log that follow from the newest decision, in the saved state only. A
    successor writes those that the log lacks."""
    departures: tuple[tuple[str, str], ...] = ()
    """(node, reason) of the newest lost members."""
    certificates: tuple[CertificateEnd, ...] = ()
    """Certificates of the coordinator; `NodeHealth.report` has those of a node."""
    expiring: dict[str, int] = field(default_factory=dict)
    """Warning level per certificate that ends soon (`elastic.core.health.certificates`)."""

    @property
    def limits(self) -> Timeouts:
        return self.timeouts or budget(self.policy.lease_s, heartbeat_s=self.policy.heartbeat_s)

    @property
    def newest_step(self) -> int:
        """Newest step known to be finished: its record is known, or the assignment begins after it;
        -1: none."""
        recorded = self.record.step if self.record is not None else -1
        return recorded if self.assignment is None else max(recorded, self.assignment.step - 1)

    @property
    def stable(self) -> bool:
        """Whether no change is under way, all copies are protected, and no node is joining."""
        return self.change is None and self.trimmed >= self.epoch and not self.joining

    @property
    def infos(self) -> tuple[NodeInfo, ...]:
        """Descriptions of all members."""
        return tuple(member.report.info for member in self.members.values())

    def of(self, **changes: Any) -> JobState:
        """Return the state with these fields replaced. Raises TypeError for an unknown field."""
        if unknown := changes.keys() - _FIELDS:
            raise TypeError(f"JobState has no field {', '.join(sorted(unknown))}")
        state = copy(self)
        vars(state).update(changes)
        return state


_FIELDS = frozenset(field.name for field in fields(JobState))


# ---- events; messages of agents are events as well ----


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """Heartbeats that arrived together. They are most of the traffic of a large job."""

    beats: tuple[Heartbeat, ...]


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class PortRefused:
    """The port of a disconnected node's vault refuses connections."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Tick of the coordinator's clock, so that rules can act on the time."""

    late_s: float = 0.0
    """Delay of this tick in seconds."""
    held: bool = False
    """Whether orders are held back because the store is away, so that no node can obey them."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    node: str
    deadline_s: float
    by: str = ""
    """Who asked for it."""


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    path: str
    step: int


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """The files of a checkpoint are written, but could not be committed."""

    step: int
    error: str


@dataclass(frozen=True, slots=True)
class CertificatesRead:
    """The coordinator read the ends of its own certificates."""

    certificates: tuple[CertificateEnd, ...]


@dataclass(frozen=True, slots=True)
class CoordinatorFailover:
    """A new coordinator has taken over the job, with the state from the store."""


# ---- actions ----


@dataclass(frozen=True, slots=True)
class Send:
    node: str
    message: Any


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Entry of the event log."""

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChangeCompleted:
    """Orders the coordinator to record the figures of a completed epoch change."""

    change: EpochChange
    nodes_after: int
    transfer_s: float
    rebuild_s: float
    resumed_at: float
    since: float = 0.0
    """Time at which the change before this one was complete; 0: this is the first."""


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """Order to complete the checkpoint of `step`, whose parts are all on disk."""

    step: int


@dataclass(frozen=True, slots=True)
class YieldLead:
    """Order to give up the lead, so that another coordinator can take over."""


@dataclass(frozen=True, slots=True)
class DropCheckpoint:
    """Order to remove the files of `step`, whose checkpoint cannot become whole or is wrong. A
    later epoch may write the step again, perhaps before the order is carried out."""

    step: int
    before: int = 0
    """Remove only the files of epochs before this one; 0: those of all epochs."""
    committed: bool = False
    """Remove files that are committed, too."""


JobAction = (
    Send | LogEntry | JobFinished | ChangeCompleted | CommitCheckpoint | DropCheckpoint | YieldLead
)
JobTransition = tuple[JobState, tuple[JobAction, ...], str]
"""(state, actions, reason)"""
