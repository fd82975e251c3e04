"""Leader election as pure functions: lease expiry, the accepted term, and pauses between retries.

A store that machines with different clocks share (etcd) cannot say that a lease has expired. A
candidate watches the holder's renewals on its own clock instead, and takes the lease when none came
for its whole duration. Only time in which the store answered counts, so that the holder can renew
first after an outage. A mistake changes the leader and does no other harm, because every write is
fenced by the lease's token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

RETRY_FIRST_S, RETRY_LAST_S = 0.1, 1.0
"""First and longest pause between two attempts to reach a store."""


@dataclass(frozen=True, slots=True)
class LeaseObservation:
    """A candidate's view of a lease, in seconds of its own clock."""

    mark: int
    """Changes with every renewal."""
    since: float
    """Time when this mark was first seen."""
    last: float
    """Time when it was last seen, without a gap since then."""


def observe_lease(
    before: LeaseObservation | None, mark: int, asked: float, answered: float, ttl_s: float
) -> LeaseObservation:
    """The store answered that the lease was last renewed with `mark`.

    A slow answer, or a long pause since the previous one, starts the observation again: the store
    or the candidate was delayed, and so perhaps was the holder's renewal.
    """
    gap = ttl_s / 2
    slow = answered - asked > gap
    if before is None or mark != before.mark or slow or answered - before.last > gap:
        return LeaseObservation(mark, answered, answered)
    return replace(before, last=answered)


def seconds_to_expiry(observation: LeaseObservation, ttl_s: float) -> float:
    """Seconds until the lease may be taken; 0 or less: now."""
    return ttl_s - (observation.last - observation.since)


def accepts_term(term: int, highest: int, active: int | None) -> bool:
    """Whether a node follows a coordinator of `term`.

    `highest` is the highest term seen, `active` the one that it follows now (None: none). An older
    term was replaced. The same term over a second address is refused: one stream is enough.
    """
    return term >= highest and (active is None or term > active)


def retry_s(failures: int) -> float:
    """Pause in seconds after this many consecutive failures (at least one)."""
    return float(min(RETRY_LAST_S, RETRY_FIRST_S * 2 ** min(max(failures, 1) - 1, 16)))


def owns_saved_state(mine: str, run: str, over: str) -> bool:
    """Whether this coordinator continues from the saved state; else an earlier run left it.

    `run` is the newest run in the store, `over` the last one that ended there, and `mine` the run
    that this coordinator belongs to; "": none.
    """
    return bool(run) and (run != over or run == mine)
