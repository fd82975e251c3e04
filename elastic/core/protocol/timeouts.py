"""The time budget: how long a silent peer is tolerated, and every limit that follows from it.

`budget` is a pure function; docs/operate/timeouts.md shows its values. Other constants in seconds
(polling intervals, start-up times) stand where they are used; tests/house/time_constants.py lists
them.

Limits that wait for a sign of life scale with the tolerated silence. They have an upper bound where
longer waiting shows nothing more (a closed connection is not silent), and a lower bound where
honest work would count as a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SILENCE_S = 3.0
"""Default of the tolerated silence."""
MAX_HEARTBEATS_PER_S = 2000
"""Heartbeats per second that a coordinator receives, at most, unless the silence is too short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestDurations:
    """Longest measured durations in seconds, rounded up (`round_up`); 0: nothing measured yet."""

    step_s: float = 0.0
    """One step."""
    microbatch_s: float = 0.0
    """One worker's computation of one micro-batch."""
    pause_s: float = 0.0
    """Pause of training for a change of plan."""

    def grown(self, **seconds: float) -> LongestDurations:
        """Include these measurements, by field; the same object if none is longer."""
        longer = {name: round_up(s) for name, s in seconds.items() if s > getattr(self, name)}
        return replace(self, **longer) if longer else self


NO_DURATIONS = LongestDurations()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Every limit on waiting for another process, in seconds."""

    silence_s: float
    """Tolerated silence of a peer, as the user gives it (`--silence`)."""
    heartbeat_s: float
    """Interval between a node's heartbeats."""
    lease_s: float
    """A node that is silent this long is lost."""
    closed_s: float
    """A node whose connection closed is lost if it does not reconnect within this time."""
    contact_s: float
    """If workers lost contact while every node looks alive, the epoch is abandoned after this."""
    starved_s: float
    """A coordinator that wakes up later than this was delayed itself and declares nobody lost."""
    adopt_s: float
    """Nodes have this long to report after a restart of the coordinator."""
    keepalive_s: float
    """A connection to the coordinator closes if pings get no answer for twice this long."""
    silent_s: float
    """A worker without messages and CPU use for this long is hung."""
    stuck_s: float
    """A worker in one action, or ignoring a halt, without CPU use for this long is hung."""
    sibling_s: float
    """A worker with a failed TP collective waits this long for an order, then raises the error."""
    bulk_s: float
    """A transfer between vaults without progress for this long has failed."""
    serve_s: float
    """A vault drops a client without progress within a request for this long."""
    prefetch_s: float
    """A joining node enters after this long even without all state."""
    link_s: float
    """Last resort of the transport between workers; missing progress shows hangs long before."""
    leave_s: float
    """With less time than this until its deadline a node leaves now, not at the end of the step."""
    overdue_s: float
    """A node that is alive this long after its deadline stays: the notice was false."""
    alone_s: float
    """Without any node, the launcher gives the coordinator this long to end the job."""


def budget(
    silence_s: float,
    *,
    nodes: int = 0,
    heartbeat_s: float = 0.0,
    seen: LongestDurations = NO_DURATIONS,
) -> Timeouts:
    """Every limit for a tolerated silence in seconds and the measured durations `seen`.

    `heartbeat_s` is the user's value; 0: it follows from the silence and the number of `nodes`.
    """
    silence = silence_s
    return Timeouts(
        silence_s=silence,
        heartbeat_s=heartbeat_s
        or max(min(0.5, silence / 6), min(nodes / MAX_HEARTBEATS_PER_S, silence / 3)),
        lease_s=silence,
        closed_s=min(0.15, silence / 20),
        contact_s=min(0.5, silence / 6),
        starved_s=min(0.5, silence / 6),
        adopt_s=max(1.0, silence * 2 / 3),
        keepalive_s=max(1.0, silence * 5 / 3),
        silent_s=max(15.0, silence * 5),
        stuck_s=max(60.0, silence * 20, seen.microbatch_s * 20),
        sibling_s=max(5.0, silence * 5 / 3),
        bulk_s=max(10.0, silence * 10 / 3),
        serve_s=max(30.0, silence * 10),
        prefetch_s=max(20.0, seen.step_s * 5),
        link_s=max(1800.0, silence * 100),
        leave_s=min(20.0, max(2.0, seen.pause_s * 2)),
        overdue_s=max(30.0, silence * 10),
        alone_s=silence * 2,
    )


def round_up(seconds: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten, so that limits change seldom; 0 stays 0."""
    if not 0 < seconds < 1e12:
        return 0.0 if seconds <= 0 else 1e12
    power = 1e-6
    while power * 10 < seconds:
        power *= 10
    return next((s * power for s in (1.0, 2.0, 5.0) if seconds <= s * power), power * 10)


DEFAULT_TIMEOUTS = budget(SILENCE_S)
