"""Assignment of agents to the machines of a cluster; a launcher carries the actions out.

    a machine appears              start an agent on the machine, under a new node name
    a machine disappears           forget its agent; the coordinator detects the loss by itself
    an agent ends with 0, 4 or 5   start none there again: the job is over, or the node was drained
    an agent ends otherwise        start another agent there, after a pause that doubles each time
    machines are missing           request machines from the cluster until none is missing

Places for the minimum of nodes are reserved together before the first agent starts, so two jobs
never each hold half of the machines that they need. While a reserved place has no machine, only
machines with a reserved place get an agent, because the cluster may need the others for that place.
Then agents start on any machine with room.

`transition` is pure: (fleet, event, now) -> (fleet, actions, reason).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from elastic.domain.errors import EXIT_DRAINED, EXIT_JOB_FAILED, EXIT_OK

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 60.0
"""First and longest pause between two agents of a machine. The pause doubles with each failure."""
LOST_BACKOFF_S = 5.0
"""Least pause after an unknown exit: the cluster may soon report the machine lost."""
STEADY_S = 60.0
"""If an agent ran for this long, the earlier failures on its machine no longer count."""
MOST_FAILURES, PATIENT_FAILURES = 3, 10
"""If this many agents in a row have failed on every machine, the job cannot run. The second number,
which takes more than four minutes, holds while machines are missing: those that were requested may
be better."""


class AgentStatus(StrEnum):
    RUNNING = "running"
    FAILED = "failed"
    RELEASED = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A living machine of the cluster."""

    id: str
    host: str = "127.0.0.1"
    """Address under which other machines reach it."""
    domain: str = ""
    """Failure domain; "": unknown."""
    reserved: int | None = None
    """Number of the reserved place on this machine; None: no place is reserved here."""
    room: bool = True
    """Whether an agent may start beyond a reserved place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """The newest agent of a machine."""

    node: str
    status: AgentStatus = AgentStatus.RUNNING
    since: float
    """Start time."""
    retry_at: float = 0.0
    """Earliest start of the next agent."""
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """State of all agents of a job."""

    wanted: int
    """Largest number of nodes that the job uses."""
    spares: int = 0
    """Further nodes that are kept ready."""
    agents: dict[str, AgentRecord] = field(default_factory=dict)
    """Newest agent per machine id."""
    names_given: int = 0
    requested: int = 0
    """Number of nodes last requested from the cluster; 0: no open request."""

    @property
    def running(self) -> int:
        return sum(agent.status is AgentStatus.RUNNING for agent in self.agents.values())

    @property
    def missing(self) -> int:
        """Number of agents that may still be started."""
        return max(0, self.wanted + self.spares - self.running)


# ---- events ----


@dataclass(frozen=True, slots=True)
class ClusterObserved:
    """Present state of the cluster."""

    machines: tuple[Machine, ...]
    unplaced: int = 0
    """Reserved places without a machine."""


@dataclass(frozen=True, slots=True)
class AgentEnded:
    node: str
    code: int | None
    """Exit code, or minus the number of a signal; None: unknown."""


# ---- actions ----


@dataclass(frozen=True, slots=True)
class StartAgent:
    """Start an agent with this node name, in the machine's reserved place if it has one."""

    node: str
    machine: Machine


@dataclass(frozen=True, slots=True)
class ForgetAgent:
    """Forget the agent of this node, because its machine is gone."""

    node: str


@dataclass(frozen=True, slots=True)
class RequestNodes:
    """Request room for this many agents in total; 0 withdraws the request."""

    nodes: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the job, because agents fail on every machine."""

    reason: str


FleetEvent = ClusterObserved | AgentEnded
FleetAction = StartAgent | ForgetAgent | RequestNodes | GiveUp
FleetTransition = tuple[Fleet, tuple[FleetAction, ...], str]


def transition(fleet: Fleet, event: FleetEvent, now: float) -> FleetTransition:
    """Return (fleet, actions, reason); the reason is "" if nothing was decided."""
    match event:
        case ClusterObserved():
            return _cluster_observed(fleet, event, now)
        case AgentEnded():
            return _agent_ended(fleet, event, now)


def _cluster_observed(fleet: Fleet, event: ClusterObserved, now: float) -> FleetTransition:
    alive = {machine.id for machine in event.machines}
    gone = [agent for machine, agent in fleet.agents.items() if machine not in alive]
    agents = {machine: agent for machine, agent in fleet.agents.items() if machine in alive}
    fleet = replace(fleet, agents=agents)
    actions: list[FleetAction] = [ForgetAgent(agent.node) for agent in gone]
    reasons = [f"the machine of {agent.node} is gone" for agent in gone]
    for machine in sorted(event.machines, key=lambda machine: machine.reserved is None):
        if not fleet.missing or not _usable(fleet, machine, event.unplaced, now):
            continue
        fleet, start = _start(fleet, machine, now)
        actions.append(start)
        spare = " as a spare" if fleet.running > fleet.wanted else ""
        reasons.append(f"{start.node} starts on {machine.host}{spare}")
    here = sum(agent.status is not AgentStatus.RELEASED for agent in fleet.agents.values())
    request = fleet.wanted if here < fleet.wanted else 0
    if request != fleet.requested:
        actions.append(RequestNodes(request))
        missing = f"{fleet.wanted - here} of {fleet.wanted} nodes are missing"
        reasons.append(missing if request else "no node is missing any more")
        fleet = replace(fleet, requested=request)
    return fleet, tuple(actions), "; ".join(reasons)


def _usable(fleet: Fleet, machine: Machine, unplaced: int, now: float) -> bool:
    """Return whether an agent may start on the machine now."""
    agent = fleet.agents.get(machine.id)
    if agent is not None and (agent.status is not AgentStatus.FAILED or now < agent.retry_at):
        return False
    return machine.reserved is not None or (machine.room and unplaced == 0)


def _start(fleet: Fleet, machine: Machine, now: float) -> tuple[Fleet, StartAgent]:
    former, node = fleet.agents.get(machine.id), f"node{fleet.names_given}"
    agent = AgentRecord(node=node, since=now, failures=former.failures if former else 0)
    agents = {**fleet.agents, machine.id: agent}
    fleet = replace(fleet, agents=agents, names_given=fleet.names_given + 1)
    return fleet, StartAgent(node, machine)


def _agent_ended(fleet: Fleet, event: AgentEnded, now: float) -> FleetTransition:
    of_node = (item for item in fleet.agents.items() if item[1].node == event.node)
    machine, agent = next(of_node, ("", None))
    if agent is None or agent.status is not AgentStatus.RUNNING:
        return fleet, (), ""
    if event.code in (EXIT_OK, EXIT_DRAINED, EXIT_JOB_FAILED):
        released = replace(agent, status=AgentStatus.RELEASED)
        fleet = replace(fleet, agents={**fleet.agents, machine: released})
        return fleet, (), f"{agent.node} has left in order"
    failures = 1 if now - agent.since >= STEADY_S else agent.failures + 1
    wait_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (failures - 1))
    wait_s = max(wait_s, LOST_BACKOFF_S) if event.code is None else wait_s
    failed = replace(agent, status=AgentStatus.FAILED, retry_at=now + wait_s, failures=failures)
    agents = {**fleet.agents, machine: failed}
    fleet = replace(fleet, agents=agents)
    in_a_row = (a.failures if a.status is AgentStatus.FAILED else 0 for a in agents.values())
    most = PATIENT_FAILURES if fleet.requested else MOST_FAILURES
    if min(in_a_row) >= most:
        reason = f"on every available machine {most} agents in a row have ended"
        return fleet, (GiveUp(reason),), reason
    text = f"{agent.node} has ended; its machine may get another agent in {wait_s:g} s"
    return fleet, (), text
