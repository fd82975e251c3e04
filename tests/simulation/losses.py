"""Judges each decision that a node is lost, by what the simulated world knows.

A coordinator may lose an incarnation of a node if its agent has ended, or if the node itself could
not be heard. The state of the coordinator, its network and its disk excuse nothing, nor does a bad
path between two nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.core.job.state import JobState, JobTransition, LogEntry, LossKind
from elastic.core.protocol import messages as m
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from tests.simulation.primitives import WALL_S

LONGEST_PAUSE_S = 2.0
"""Longest pause before the network sends a lost packet again."""
RETURN_S = 0.5
"""Longest time to the next heartbeat, or to the next attempt to connect."""
ROUNDING_S = 1e-5
"""Of the coordinator's clock, which has the wall time."""
OBEY_S = 30.0
"""Orders to restart workers are repeated for at most this long before a node is dropped."""


@dataclass
class Life:
    """An incarnation of a node, from the beginning to the end of its agent, or to the next
    incarnation of the same agent."""

    node: str
    stops: Sequence[tuple[float, float]] = ()
    """(begin, end) of the times in which its agent did not run."""
    cuts: Sequence[tuple[float, float]] = ()
    """(begin, end) of the times in which the cable of its node was out."""
    hangs: Sequence[float] = ()
    """Times at which faults let a worker of its node hang."""
    ended: float = math.inf
    """Time at which its agent, or its vault, ended."""
    by_fault: bool = False
    """Whether a fault, or an order, ended its agent."""
    heard: dict[int, list[float]] = field(default_factory=dict)
    """Arrival times of reports and heartbeats, per process of a coordinator."""


@dataclass(frozen=True)
class Loss:
    """A coordinator declared an incarnation lost at this time."""

    at: float
    coordinator: int
    """Its process."""
    incarnation: str
    kind: LossKind
    why: str


class LossWatch:
    """Notes the losses of a run, and what they are judged by."""

    def __init__(self) -> None:
        self.lives: dict[str, Life] = {}
        self.losses: list[Loss] = []
        self.job_ends = False
        """Whether a coordinator has decided the end of the job, so that it may stop agents."""
        self.last_members = frozenset[str]()
        """Nodes that were members then."""

    def watched(
        self, decide: Callable[..., JobTransition], coordinator: Callable[[], int]
    ) -> Callable[..., JobTransition]:
        """Return `decide`, a function of the rules, that notes losses of the `coordinator`."""

        def noted(state: JobState, *args: Any, now: float, **named: Any) -> JobTransition:
            result = decide(state, *args, now=now, **named)
            if result[0].ending is not None and state.ending is None:
                self.job_ends, self.last_members = True, frozenset(result[0].members)
            for entry in result[1]:
                if isinstance(entry, LogEntry) and entry.kind == "lost":
                    incarnation = state.members[entry.data["node"]].report.info.incarnation
                    kind, why = LossKind(entry.data["loss"]), entry.data["why"]
                    loss = Loss(now - WALL_S, coordinator(), incarnation, kind, why)
                    self.losses.append(loss)
            return result

        return noted

    def heard(self, coordinator: int, message: object, at: float) -> None:
        """A message reached a coordinator."""
        match message:
            case m.NodeReport():
                incarnation = message.info.incarnation
            case m.Heartbeat():
                incarnation = message.incarnation
            case _:
                return
        if incarnation in self.lives:
            self.lives[incarnation].heard.setdefault(coordinator, []).append(at)


def healthy_lost(losses: Sequence[Loss], lives: Mapping[str, Life]) -> list[str]:
    """No healthy node is lost. `losses`: in order."""
    wrong = []
    lost: set[str] = set()
    for loss in losses:
        life = lives[loss.incarnation]
        gone = life.ended <= loss.at + ROUNDING_S and (life.by_fault or loss.incarnation in lost)
        if not (gone or _was_unreachable(loss, life)):
            wrong.append(f"{life.node} was lost at {loss.at:.3f} although it was well: {loss.why}")
        lost.add(loss.incarnation)
    return wrong


def _was_unreachable(loss: Loss, life: Life) -> bool:
    """Return whether the coordinator heard nothing for the time that it needs for such a loss, and
    the cause was the node's own network or machine."""
    match loss.kind:
        case LossKind.REPLACED:
            return False
        case LossKind.STALLED:
            since = loss.at - OBEY_S
            return any(at <= loss.at for at in life.hangs) or _hit(life, since, loss.at)
        case LossKind.CLOSED if "port refuses" in loss.why:
            return False
        case LossKind.CLOSED:
            since = loss.at - DEFAULT_TIMEOUTS.closed_s
        case LossKind.SILENT:
            since = loss.at - DEFAULT_TIMEOUTS.lease_s
    heard = life.heard.get(loss.coordinator, ())
    return not any(since < at < loss.at - ROUNDING_S for at in heard) and _hit(life, since, loss.at)


def _hit(life: Life, since: float, until: float) -> bool:
    """Return whether the node was unreachable in this time, or its packets were late afterwards:
    the pauses before they are sent again double."""
    return any(
        began <= until and ended + min(ended - began, LONGEST_PAUSE_S) + RETURN_S >= since
        for began, ended in _intervals(life)
    )


def _intervals(life: Life) -> Iterator[tuple[float, float]]:
    yield from _joined([*life.stops, *life.cuts])
    if life.by_fault:
        yield life.ended, math.inf


def _joined(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the intervals, with those that overlap as one."""
    found: list[tuple[float, float]] = []
    for began, ended in sorted(intervals):
        if found and began <= found[-1][1]:
            began, ended = found[-1][0], max(found.pop()[1], ended)
        found.append((began, ended))
    return found
