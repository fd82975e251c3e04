"""The coordinator's state, its events and its actions. Transitions: `elastic.core.coordinator.transitions`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from elastic.core.health.backup_metrics import Gauge
from elastic.core.health.compute_speed import Pace
from elastic.core.health.diagnosis import Limits, Record
from elastic.core.protocol.health_report import HealthReport
from elastic.core.protocol.messages import Heartbeat as Heartbeat
from elastic.core.protocol.messages import Launch, NodePhase, NodeReport, Notice
from elastic.core.protocol.timeouts import Seen, Timeouts, budget
from elastic.domain.types import Assignment, JobSpec, Plan, Slot, StepRecord
from elastic.planning.cost.profile import Profile


class JobPhase(StrEnum):
    """Where the job is. The table of transitions is in `elastic.core.coordinator.transitions`."""

    WAITING = "waiting"
    """Fewer nodes than the minimum have joined."""
    LAUNCHED = "launched"
    """Workers are starting; a script that never uses elastic stays here until it ends."""
    HALTING = "halting"
    """A new epoch: waiting until every member has halted and reported its inventory."""
    INSTALLING = "installing"
    """The new plan is out: waiting until every node of the plan is ready."""
    RUNNING = "running"
    PAUSED = "paused"
    """No plan fits the nodes at hand; goes on by itself when nodes come."""
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the user fixed for the whole job."""

    min_nodes: int = 1
    max_nodes: int = 1
    workers_per_node: int = 1
    max_restarts: int = 0
    shape: str = "auto"
    schedule: str = "auto"
    backup: str = "auto"
    heartbeat_s: float = 0.5
    lease_s: float = 3.0
    """A member that is silent this long is lost."""
    grace_s: float = 0.15
    """A member whose connection closed has this long to come back before it is taken for lost."""
    adopt_s: float = 2.0
    """After a restart of the coordinator, members have this long to report."""
    last_call_s: float = 1.0
    """With the minimum of nodes there, further ones up to the maximum are waited for this long."""
    master_addr: str = ""
    """MASTER_ADDR of the workers; "": the host of the first node."""
    master_port: int = 29500
    room_bytes: int = 0
    """Memory of a node for copies of others; 0: unlimited."""
    profile: Profile | None = None
    """What layers cost on which devices; None: the script's own figures."""
    health: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Member:
    """A node as the coordinator knows it."""

    report: NodeReport
    seen: float
    """Time of its last sign of life."""
    rank: int = -1
    """torchrun's group rank; -1: not launched."""
    launch: Launch | None = None
    """What it was told to start."""
    connected: bool = True
    closed_at: float = 0.0
    draining: bool = False
    drain_deadline: float = 0.0
    until: float = 0.0
    """When it is expected to go; 0: unknown."""
    notice: Notice | None = None
    """What its own agent was told, and has not been taken back."""
    weighed: bool = False
    """A hint was acted upon."""

    @property
    def node(self) -> str:
        return self.report.info.node

    @property
    def halted(self) -> bool:
        """Its vault's inventory is complete and nothing runs on it."""
        return self.report.phase in (
            NodePhase.HALTED,
            NodePhase.IDLE,
            NodePhase.EMPTY,
            NodePhase.STARTING,
            NodePhase.FAILED,
        )


class LossKind(StrEnum):
    """How a member was lost."""

    CLOSED = "closed"
    """Its connection ended."""
    SILENT = "silent"
    """Its lease ended."""
    REPLACED = "replaced"
    """Its agent came back as another incarnation."""


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
    """The notice runs out before the end of the step."""
    JOIN = "join"
    """Nodes joined."""
    SLOW = "slow"
    """Nodes became slow, or recovered their speed."""
    BACKUP = "backup"
    """Another pair of backup schemes is better."""
    RESUME = "resume"
    """Nodes came to a paused job."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an epoch change was begun."""

    kind: CauseKind
    text: str
    """For people."""
    nodes: tuple[str, ...] = ()
    """Nodes that are lost, leave, join or changed."""


@dataclass(frozen=True, slots=True)
class EpochChange:
    """An epoch change under way, and the times of its phases (seconds on the coordinator's clock)."""

    epoch: int
    causes: tuple[Cause, ...]
    """Oldest first; there are several if faults came while the change was under way."""
    boundary: bool
    """Planned: everybody stops after the same update."""
    lost: tuple[str, ...]
    """Nodes whose workers are gone."""
    nodes_before: int
    began: float
    """When it was decided to halt."""
    old_plan: Plan | None
    step: int
    microbatch: int
    detect_s: float = 0.0
    """As told by the agent that found a hang; 0: unknown."""
    paused: float = 0.0
    """When the last step before the change ended."""
    halted: float = 0.0
    decided: float = 0.0
    replayed: frozenset[int] = frozenset()
    """Micro-batches that had reached a lost stage and must run again."""
    rerun: int = 0
    """All micro-batches of the step that run again or for the first time after the change."""
    partial: int = 0
    """Micro-batches that only some layers run again."""
    state_source: str = ""
    network_bytes: int = 0
    """That go from node to node."""
    wait_until: float = 0.0
    """Until when nodes are waited for whose workers are starting again; -1: nobody is; 0: not considered."""
    reason: str = ""

    @property
    def cause(self) -> str:
        """All causes, for people."""
        return "; then ".join(cause.text for cause in self.causes)

    @property
    def starts_job(self) -> bool:
        """True for the first epoch, unless a fault came before it ran."""
        return [cause.kind for cause in self.causes] == [CauseKind.START]


@dataclass(frozen=True, slots=True)
class JobFinished:
    """The job is over (also an action: write the summary)."""

    code: int
    reason: str
    params_sha256: str = ""


@dataclass(frozen=True, slots=True)
class JobState:
    """Everything that a coordinator must not forget; saved with every decision."""

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
    """Record of the last finished step that is known here."""
    step_finished_at: float = 0.0
    """When that was."""
    told: int = -1
    """The last step that a worker told of, and so is in the event log."""
    recovered_at: float = 0.0
    """When the last change was complete; 0: none was."""
    trained: bool = False
    """Some epoch has run: fresh initialisation is no longer allowed."""
    trimmed: int = 0
    checkpoint: tuple[str, int] | None = None
    """(directory, step) of the newest durable checkpoint."""
    parts: tuple[tuple[int, tuple[Slot, ...]], ...] = ()
    """(step, slots written) of the checkpoint being written."""
    enough_since: float = 0.0
    """When the minimum of nodes was first there; 0: it is not."""
    launched_at: float = 0.0
    start_s: float = 0.0
    """Seconds that workers took to start, first to last."""
    waited: tuple[tuple[str, int], ...] = ()
    """(node, step) for which everybody waited last, while its workers started again."""
    retired: tuple[tuple[str, str], ...] = ()
    """(node, incarnation) of members that came back as another incarnation: the newest."""
    considered: tuple[str, ...] = ()
    """Incarnations of nodes for which it was decided that the running plan does not want them."""
    joining: tuple[str, ...] = ()
    """Nodes that pull state in the background before they enter."""
    joining_since: float = 0.0
    updated_at: float = 0.0
    """When time was last looked at."""
    late_s: float = 0.0
    """How late that was: what has come by now is heard so late."""
    ending: JobFinished | None = None
    """How the job ended."""
    suspected_since: float = 0.0
    """When workers first reported lost contact in this epoch; 0: none."""
    paces: dict[str, Pace] = field(default_factory=dict)
    """How fast nodes compute, by incarnation."""
    gauges: dict[str, Gauge] = field(default_factory=dict)
    """What backups were seen to do on nodes, by incarnation."""
    weighed: tuple[float, ...] = ()
    """Figures by which the backup schemes were chosen last; (): not yet."""
    weighed_at: float = 0.0
    wanted: str = ""
    """The pair for which the plan was changed last."""
    losses: int = 0
    """Members that went, in ..."""
    node_seconds: float = 0.0
    """... this time, all members together, up to `counted_at`."""
    counted_at: float = 0.0
    pauses: tuple[float, ...] = ()
    """Seconds without training of the last epoch changes."""
    reconsider_at: float = 0.0
    """When nodes that were left aside are to be considered again; 0: never."""
    health: dict[str, Record] = field(default_factory=dict)
    """What is known of nodes' health, by name."""
    durations: tuple[tuple[int, float], ...] = ()
    """(epoch, seconds) of the newest steps."""
    rebalance: str = ""
    """Why the plan is to be changed at the end of a step, for a node's health; "": it is not."""
    seen: Seen = field(default_factory=Seen)
    """The longest times measured, which limits on waiting follow from."""
    timeouts: Timeouts | None = None
    """Those limits, as they were last told."""

    @property
    def limits(self) -> Timeouts:
        return self.timeouts or budget(self.policy.lease_s, heartbeat_s=self.policy.heartbeat_s)

    def of(self, **changes: Any) -> JobState:
        return replace(self, **changes)


# ---- events ----


@dataclass(frozen=True, slots=True)
class NodeReported:
    """A node's condition, at joining, after every change of it, and after reconnecting."""

    report: NodeReport
    connected: bool = False
    """First report over a new connection."""


"""A node's sign of life is an event as it comes."""


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """Heartbeats that came together. In a job of thousands of nodes most of what comes is this."""

    beats: tuple[Heartbeat, ...]


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """A node's connection ended."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""

    late_s: float = 0.0
    """How long after it was due the coordinator came to it."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    node: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step was finished."""

    record: StepRecord
    seconds: float = 0.0
    """That it took; 0: unknown."""


@dataclass(frozen=True, slots=True)
class BackupReported:
    """See `elastic.core.protocol.messages.BackupNote`."""

    kind: str
    owner: str
    keeper: str
    detail: str


@dataclass(frozen=True, slots=True)
class HealthReported:
    """An agent told how its node is."""

    report: HealthReport


@dataclass(frozen=True, slots=True)
class CheckpointPartWritten:
    step: int
    layers: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    path: str
    step: int


@dataclass(frozen=True, slots=True)
class CoordinatorFailover:
    """A coordinator took the job over from the store."""


# ---- actions ----


@dataclass(frozen=True, slots=True)
class Send:
    node: str
    message: Any


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry for the event log."""

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChangeCompleted:
    """An epoch change is complete: its figures for the summary."""

    change: EpochChange
    nodes_after: int
    transfer_s: float
    rebuild_s: float
    resumed_at: float
    since: float = 0.0
    """When the change before it was complete; 0: there was none."""


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """All parts of the checkpoint of this step are on disk: make it the newest one."""

    step: int


JobAction = Send | LogEntry | JobFinished | ChangeCompleted | CommitCheckpoint
JobTransition = tuple[JobState, tuple[JobAction, ...], str]
