"""Which machines of a cluster hold an agent: decided here, carried out by a launcher that talks to the cluster.

    a machine appears           it gets an agent, under a name that nobody had: a machine that is back is a new node
    it disappears               its agent is forgotten; the coordinator has noticed by itself
    an agent ends, code 0 or 4  the job is over, or the node was drained: its machine is left alone
    an agent ends otherwise     after a while its machine gets another one, after a longer while each time
    machines are missing        the cluster is asked for them, and the request withdrawn once they are there

The least number of nodes is a gang: their places are reserved together, before the first agent starts, so that two jobs
never wait for each other's halves. While such a place is lost the cluster itself looks for another machine for it, and
a machine that appears is left to it. Beyond the gang agents go wherever there is room.

Pure: (fleet, event, now) -> (fleet, actions, reason).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from elastic.domain.errors import EXIT_DRAINED, EXIT_JOB_FAILED, EXIT_OK

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 60.0
"""From the end of an agent to the next one on its machine; doubled every time."""
LOST_BACKOFF_S = 5.0
"""The same at least where nothing is known of the end: the machine may be lost, and the cluster about to say so."""
STEADY_S = 60.0
"""An agent that stayed so long is no failed attempt."""
MOST_FAILURES = 3
"""Ends in a row, on every machine at hand, after which the job cannot run."""


class AgentStatus(StrEnum):
    RUNNING = "running"
    FAILED = "failed"
    RELEASED = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine that the cluster says is alive."""

    id: str
    host: str = "127.0.0.1"
    """Address under which others reach it."""
    domain: str = ""
    """Failure domain; "": unknown."""
    reserved: int | None = None
    """Number of the reserved place on it."""
    room: bool = True
    """Whether what an agent takes is free there, besides a reserved place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """The newest agent of a machine."""

    node: str
    machine: str
    standing: AgentStatus = AgentStatus.RUNNING
    since: float
    """When it started."""
    again: float = 0.0
    """From when on another one may be tried."""
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What the launcher knows of its agents."""

    wanted: int
    """Nodes that the job uses at most."""
    spares: int = 0
    """Nodes beyond them that are kept ready if they are there."""
    seats: tuple[AgentRecord, ...] = ()
    named: int = 0
    """Names given so far."""
    asked: int = 0
    """How large the cluster was asked to be; 0: it was not."""

    @property
    def running(self) -> int:
        return sum(seat.standing is AgentStatus.RUNNING for seat in self.seats)


# ---- events ----


@dataclass(frozen=True, slots=True)
class ClusterObserved:
    """The cluster at this moment."""

    machines: tuple[Machine, ...]
    unplaced: int = 0
    """Reserved places that are on no machine."""


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """An agent ended."""

    node: str
    code: int | None
    """Exit code, minus the number of a signal; None: nothing more was heard of it."""


# ---- actions ----


@dataclass(frozen=True, slots=True)
class StartAgent:
    """Start an agent of this name, in the reserved place if there is one."""

    node: str
    machine: Machine


@dataclass(frozen=True, slots=True)
class ForgetAgent:
    """Its machine is gone."""

    node: str


@dataclass(frozen=True, slots=True)
class RequestNodes:
    """Ask that the cluster have room for so many agents in all; 0 withdraws the request."""

    nodes: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No machine can hold an agent."""

    reason: str


FleetEvent = ClusterObserved | AgentEnded
FleetAction = StartAgent | ForgetAgent | RequestNodes | GiveUp


def transition(fleet: Fleet, event: FleetEvent, now: float) -> tuple[Fleet, tuple[FleetAction, ...], str]:
    """What to do about an event; the reason is "" where nothing is done."""
    match event:
        case ClusterObserved():
            return _looked(fleet, event, now)
        case AgentEnded():
            return _ended(fleet, event, now)


def _looked(fleet: Fleet, event: ClusterObserved, now: float) -> tuple[Fleet, tuple[FleetAction, ...], str]:
    alive = {machine.id for machine in event.machines}
    gone = tuple(seat for seat in fleet.seats if seat.machine not in alive)
    fleet = replace(fleet, seats=tuple(seat for seat in fleet.seats if seat.machine in alive))
    actions: list[FleetAction] = [ForgetAgent(seat.node) for seat in gone]
    reasons = [f"the machine of {seat.node} is gone" for seat in gone]
    for machine in sorted(event.machines, key=lambda machine: machine.reserved is None):
        if fleet.running >= fleet.wanted + fleet.spares or not _free(fleet, machine, event.unplaced, now):
            continue
        fleet, start = _start(fleet, machine, now)
        actions.append(start)
        spare = " as a spare" if fleet.running > fleet.wanted else ""
        reasons.append(f"{start.node} starts on {machine.host}{spare}")
    here = sum(seat.standing is not AgentStatus.RELEASED for seat in fleet.seats)
    ask = fleet.wanted if here < fleet.wanted else 0
    if ask != fleet.asked:
        actions.append(RequestNodes(ask))
        missing = f"{fleet.wanted - here} of {fleet.wanted} nodes are missing"
        reasons.append(missing if ask else "no node is missing any more")
        fleet = replace(fleet, asked=ask)
    return fleet, tuple(actions), "; ".join(reasons)


def _free(fleet: Fleet, machine: Machine, unplaced: int, now: float) -> bool:
    """Whether the machine may get an agent now."""
    seat = next((seat for seat in fleet.seats if seat.machine == machine.id), None)
    if seat is not None and (seat.standing is not AgentStatus.FAILED or now < seat.again):
        return False
    return machine.reserved is not None or (machine.room and unplaced == 0)


def _start(fleet: Fleet, machine: Machine, now: float) -> tuple[Fleet, StartAgent]:
    former = next((seat for seat in fleet.seats if seat.machine == machine.id), None)
    seat = AgentRecord(
        node=f"node{fleet.named}",
        machine=machine.id,
        since=now,
        failures=former.failures if former is not None else 0,
    )
    seats = (*(other for other in fleet.seats if other.machine != machine.id), seat)
    return replace(fleet, seats=seats, named=fleet.named + 1), StartAgent(seat.node, machine)


def _ended(fleet: Fleet, event: AgentEnded, now: float) -> tuple[Fleet, tuple[FleetAction, ...], str]:
    seat = next((seat for seat in fleet.seats if seat.node == event.node), None)
    if seat is None or seat.standing is not AgentStatus.RUNNING:
        return fleet, (), ""
    if event.code in (EXIT_OK, EXIT_DRAINED, EXIT_JOB_FAILED):
        return (
            _with(fleet, replace(seat, standing=AgentStatus.RELEASED)),
            (),
            f"{seat.node} has left in order",
        )
    failures = 1 if now - seat.since >= STEADY_S else seat.failures + 1
    wait_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (failures - 1))
    wait_s = max(wait_s, LOST_BACKOFF_S) if event.code is None else wait_s
    fleet = _with(fleet, replace(seat, standing=AgentStatus.FAILED, again=now + wait_s, failures=failures))
    if all(seat.standing is AgentStatus.FAILED and seat.failures >= MOST_FAILURES for seat in fleet.seats):
        reason = f"on every machine at hand {MOST_FAILURES} agents in a row have ended"
        return fleet, (GiveUp(reason),), reason
    return fleet, (), f"{seat.node} has ended; its machine may get another agent in {wait_s:g} s"


def _with(fleet: Fleet, seat: AgentRecord) -> Fleet:
    return replace(
        fleet, seats=tuple(seat if other.machine == seat.machine else other for other in fleet.seats)
    )
