"""Who leads, as pure functions: when a lease has run out, whose stream counts, when a store is asked again.

A store without a clock of its own (etcd shared by machines whose clocks differ) cannot say that a lease has run out.
Whoever wants it watches the holder's renewals instead, on his own clock, and takes it when none came for the lease's
whole time. Only time counts in which the store answered: after an outage the holder first gets the chance to renew.
Mistakes cost a change of leader and nothing else, for every write is fenced by the lease's token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

RETRY_FIRST_S, RETRY_LAST_S = 0.1, 1.0
"""Waits between two attempts to reach a store that does not answer."""


@dataclass(frozen=True, slots=True)
class LeaseObservation:
    """What one onlooker saw of a lease, on his own clock (seconds)."""

    mark: int
    """Changes with every renewal."""
    since: float
    """When this mark was first seen ..."""
    last: float
    """... and last, without a gap in between."""


def observe_lease(before: LeaseObservation | None, mark: int, asked: float, answered: float, ttl_s: float) -> LeaseObservation:
    """The onlooker asked and was answered: the lease was last renewed with `mark`.

    An answer that was long in coming, or comes long after the one before, begins anew: the store or the onlooker
    was held up, and so perhaps was the holder's renewal.
    """
    gap = ttl_s / 2
    begun = before is None or mark != before.mark or answered - asked > gap or answered - before.last > gap
    if before is None or begun:
        return LeaseObservation(mark, answered, answered)
    return replace(before, last=answered)


def seconds_to_expiry(sighting: LeaseObservation, ttl_s: float) -> float:
    """Seconds until the lease may be taken; 0 or less: now."""
    return ttl_s - (sighting.last - sighting.since)


def accepts_term(term: int, highest: int, active: int | None) -> bool:
    """Whether a node follows a coordinator of `term`, having seen `highest` and following `active` (None: nobody).

    An older one was replaced; the same one may be reached by two addresses, and one stream is enough.
    """
    return term >= highest and (active is None or term > active)


def retry_delay_s(failures: int) -> float:
    """How long to wait after so many attempts in a row that failed (at least one)."""
    return float(min(RETRY_LAST_S, RETRY_FIRST_S * 2 ** min(max(failures, 1) - 1, 16)))


def owns_saved_state(mine: str, run: str, over: str) -> bool:
    """Whether the saved state is this coordinator's to go on with; else it is left over from an earlier run.

    `run` is the newest run in the store, `over` the last one that ended there, `mine` the one that this coordinator
    took part in; "": none.
    """
    return bool(run) and (run != over or run == mine)
