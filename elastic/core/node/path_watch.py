"""Watch of the paths to other nodes: when a peer counts as unreachable, and which peers are asked.

The agent asks the vault of each peer for an answer at intervals, over a connection that stays open.
The first attempt of an epoch and each one after a failure use a new connection, because a path may
refuse new connections while open ones live. Connections need both directions of
a path, so a path that loses the packets of one direction fails for both nodes. A firewall may
refuse only the connections that one of the two nodes opens; then this node alone fails.

Only the network between the two nodes is judged here: a node that is dead or cut off from everybody
is lost before (`elastic.core.protocol.timeouts`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from elastic.core.protocol.timeouts import Timeouts
from elastic.domain.types import Plan

INTERVALS = 4
"""Number of intervals between attempts in `Timeouts.path_s`."""
ATTEMPT_SHARE = 0.4
"""Timeout of an attempt as a fraction of `Timeouts.path_s`: two attempts fit after an interval."""
MIN_FAILURES = 2
"""Minimum number of failed attempts in a row; the last ones use new connections."""
MAX_WATCHED = 32
"""Maximum number of peers that a node asks."""


@dataclass(frozen=True, slots=True)
class PathWatch:
    """Attempts to reach one peer. Times are in seconds on the agent's clock."""

    heard: float
    """Time of the last answer, or of the beginning of the watch."""
    ended: float
    """End of the last attempt."""
    failures: int = 0
    """Number of failed attempts since the last answer."""
    error: str = ""
    """Error of the last attempt."""

    def silent_s(self, now: float, limits: Timeouts) -> float:
        """Return the seconds since the last answer if the peer is unreachable, else 0."""
        silent_s = now - self.heard
        return silent_s if self.failures >= MIN_FAILURES and silent_s >= limits.path_s else 0.0


def interval_s(limits: Timeouts) -> float:
    """Return the time between the beginnings of two attempts, unless an attempt takes longer."""
    return limits.path_s / INTERVALS


def attempt_s(limits: Timeouts) -> float:
    """Return the timeout of an attempt."""
    return limits.path_s * ATTEMPT_SHARE


def attempted(
    watch: PathWatch, error: str, began: float, now: float, limits: Timeouts
) -> PathWatch:
    """Return the watch after an attempt that began at `began`; `error` is "" after an answer.

    If this node itself was delayed (stopped, starved, suspended), the failure proves nothing about
    the path, and the silence is counted anew.
    """
    late = began - watch.ended > interval_s(limits) + limits.starved_s
    slow = now - began > attempt_s(limits) + limits.starved_s
    if not error or late or slow:
        return PathWatch(now, now, error=error)
    return replace(watch, ended=now, failures=watch.failures + 1, error=error)


def peers_to_watch(
    node: str, plan: Plan | None, nodes: Collection[str], unreachable: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return the peers that `node` asks: all other `nodes`, or of many the `MAX_WATCHED` first.

    The order is: unreachable peers, whose recovery must be seen; the node's backup peer and the
    nodes that it keeps copies for; holders of the same layers; the nearest nodes in the order of
    the plan, which are the neighbours in the pipeline and in collectives.
    """
    others = [other for other in nodes if other != node]
    if len(others) <= MAX_WATCHED:
        return tuple(others)
    near = [peer for peer in unreachable if peer != node]
    order = sorted(nodes)
    if plan is not None:
        near += [peer for pair in plan.peers if node in pair for peer in pair]
        near += [
            unit.node
            for _, _, stage in plan.stages()
            if stage.unit.node == node
            for unit in plan.holders(stage.first)
        ]
        held = plan.nodes()
        order = [*held, *(other for other in order if other not in set(held))]
    at = order.index(node) if node in order else 0
    distances = range(1, len(order))
    near += [order[(at + way * d) % len(order)] for d in distances for way in (1, -1)]
    known = set(others)
    return tuple(peer for peer in dict.fromkeys(near) if peer in known)[:MAX_WATCHED]


def changed_vaults(
    before: Mapping[str, str], after: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return (peers whose watch ends, addresses of peers whose watch begins)."""
    gone = tuple(peer for peer, vault in before.items() if after.get(peer) != vault)
    return gone, {peer: vault for peer, vault in after.items() if before.get(peer) != vault}
