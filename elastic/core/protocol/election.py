"""Leader election as pure functions: lease expiry, the accepted term, and pauses between retries.

A store that machines with different clocks share (etcd) cannot tell when a lease expires. So a
candidate watches the holder's renewals on its own clock, and takes the lease if no renewal came for
the duration of the lease. Only time during which the store answered counts, so that after an outage
the holder can renew first. A mistake changes the leader and does no other harm, because every write
is fenced by the lease's token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

RETRY_FIRST_S, RETRY_LAST_S = 0.1, 1.0
"""First and longest pause between two attempts to reach a store."""


@dataclass(frozen=True, slots=True)
class LeaseObservation:
    """A candidate's view of a lease, in seconds of its own clock."""

    mark: int
    """Number of the newest renewal; every renewal changes it."""
    since: float
    """Time at which this mark was first seen."""
    last: float
    """Time at which this mark was last seen, without long gaps since `since`."""


def observe_lease(
    before: LeaseObservation | None, mark: int, asked: float, answered: float, ttl_s: float
) -> LeaseObservation:
    """Record the store's answer that the lease was last renewed with `mark`.

    A slow answer, or a long pause since the previous answer, starts the observation again, because
    the same outage may have delayed the holder's renewal.
    """
    gap = ttl_s / 2
    slow = answered - asked > gap
    if before is None or mark != before.mark or slow or answered - before.last > gap:
        return LeaseObservation(mark, answered, answered)
    return replace(before, last=answered)


def seconds_to_expiry(observation: LeaseObservation, ttl_s: float) -> float:
    """Return the seconds until the lease may be taken; 0 or less: now."""
    return ttl_s - (observation.last - observation.since)


def accepts_term(term: int, highest: int, active: int | None) -> bool:
    """Return whether a node must follow a coordinator of `term`.

    `highest`: highest term that the node has seen; `active`: term that it follows now, or None.
    A second connection to the coordinator of the present term is refused.
    """
    return term >= highest and (active is None or term > active)


def retry_s(failures: int) -> float:
    """Return the pause in seconds after this many consecutive failures (at least 1)."""
    return float(min(RETRY_LAST_S, RETRY_FIRST_S * 2 ** min(max(failures, 1) - 1, 16)))


def owns_saved_state(mine: str, run: str, over: str) -> bool:
    """Return whether the saved state belongs to the present run, not to an earlier one.

    `run`: newest run in the store; `over`: last run that ended in the store; `mine`: run of this
    coordinator. "": none.
    """
    return bool(run) and (run != over or run == mine)
