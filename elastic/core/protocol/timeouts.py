"""The tolerated silence of a process, and all limits on waiting that follow from it.

`budget` computes the limits; docs/operate/timeouts.md shows their values. Other constants in
seconds (polling intervals, start-up times) stand where they are used;
tests/house/time_constants.py lists them.

Limits on waiting for a sign of life are proportional to the tolerated silence. They have an upper
bound where longer waiting would show nothing more (a closed connection is not silence), and a lower
bound where a shorter limit would count normal work as a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SILENCE_S = 3.0
"""Default of the tolerated silence."""
MAX_HEARTBEATS_PER_S = 2000
"""Limit on the heartbeats that a coordinator receives per second, unless the silence is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestDurations:
    """Longest measured durations in seconds, rounded up (`round_up`); 0: nothing measured yet."""

    step_s: float = 0.0
    """Time of a step."""
    microbatch_s: float = 0.0
    """Compute time of one micro-batch in one worker."""
    pause_s: float = 0.0
    """Pause of training for a change of plan."""

    def grown(self, **seconds: float) -> LongestDurations:
        """Include measurements, given by field; return the same object if none is longer."""
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
    """Time from lost contact between workers to the end of the epoch, if no node is lost."""
    starved_s: float
    """A coordinator that was idle longer was delayed itself, and extends the nodes' limits."""
    adopt_s: float
    """Nodes have this long to report to a new coordinator."""
    keepalive_s: float
    """A connection to the coordinator closes if pings get no answer for twice this time."""
    silent_s: float
    """A worker without messages and CPU use for this long is hung."""
    stuck_s: float
    """A worker is hung if it computes or should halt, but uses no CPU time for this long."""
    sibling_s: float
    """A worker with a failed TP collective waits this long for an order, then raises the error."""
    bulk_s: float
    """A transfer between vaults without progress for this long has failed."""
    serve_s: float
    """A vault disconnects a client whose request makes no progress for this long."""
    prefetch_s: float
    """After this time a joining node gets a stage even if it has not fetched all state."""
    link_s: float
    """Limit of the transport between workers; other limits detect a hang long before."""
    leave_s: float
    """A node whose deadline is nearer than this leaves at once, not at the end of the step."""
    overdue_s: float
    """A notice is false if the node is still alive this long after the deadline."""
    alone_s: float
    """Time that the launcher gives the coordinator to end a job without nodes."""
    path_s: float = 4.0
    """Two nodes cannot reach each other if one has had no answer from the other for this long."""
    open_s: float = 10.0
    """Workers that have all loaded their layers must connect to each other within this time."""


def budget(
    silence_s: float,
    *,
    nodes: int = 0,
    heartbeat_s: float = 0.0,
    seen: LongestDurations = NO_DURATIONS,
) -> Timeouts:
    """Compute all limits from the tolerated silence and the measured durations `seen`.

    `heartbeat_s`: the user's value; 0: computed from the silence and the number of `nodes`.
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
        path_s=max(2.0, silence * 4 / 3),
        open_s=max(10.0, silence * 10 / 3),
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
