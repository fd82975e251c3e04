"""One budget for time: how long a silent peer is tolerated. Every other limit follows from it and from measured times.

`budget` is a pure function; docs/operate/timeouts.md shows its values. Every other constant in seconds (polling
intervals, start-up times of programs) stands where it is used, and tests/house/time_constants.py lists it.

Limits scale with the tolerated silence where they wait for a sign of life. They stop growing where waiting longer shows
nothing more (a closed connection is no silence), and stop shrinking where honest work would be taken for a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SILENCE_S = 3.0
"""Tolerated when the user says nothing."""
MAX_HEARTBEATS_PER_S = 2000
"""Signs of life a second that a coordinator is to take from a large job, unless the silence tolerated is too short."""
_STEPS = (1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestDurations:
    """The longest that was measured, in seconds, rounded up to 1, 2 or 5 times a power of ten; 0: nothing yet."""

    step_s: float = 0.0
    """A step."""
    microbatch_s: float = 0.0
    """One worker computing one micro-batch."""
    pause_s: float = 0.0
    """Training standing still for a change of plan."""

    def grown(self, *, step_s: float = 0.0, microbatch_s: float = 0.0, pause_s: float = 0.0) -> LongestDurations:
        """With these measurements too; the same object if they are no news."""
        if step_s <= self.step_s and microbatch_s <= self.microbatch_s and pause_s <= self.pause_s:
            return self
        return replace(
            self,
            step_s=max(self.step_s, round_up(step_s)),
            microbatch_s=max(self.microbatch_s, round_up(microbatch_s)),
            pause_s=max(self.pause_s, round_up(pause_s)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Every limit on waiting for somebody, in seconds."""

    silence_s: float
    """A silent peer is tolerated this long: what the user gives (`--silence`)."""
    heartbeat_s: float
    """Between a node's signs of life."""
    lease_s: float
    """A node that is silent this long is lost."""
    closed_s: float
    """A node whose connection closed has this long to come back before it is lost."""
    contact_s: float
    """Workers lost contact though every node looks alive: after this long the epoch is abandoned all the same."""
    starved_s: float
    """A coordinator that looks at the time later than this was held up itself, and blames nobody for it."""
    adopt_s: float
    """After a restart of the coordinator the nodes have this long to report."""
    keepalive_s: float
    """A connection between agent and coordinator whose pings are not answered for twice this long is closed."""
    silent_s: float
    """A worker that says nothing and uses no CPU this long is hung."""
    stuck_s: float
    """A worker that computes on one action, or is told to halt and does not, this long without using CPU is hung."""
    sibling_s: float
    """A worker whose TP collective failed waits this long to be ended or told before it takes the error for its own."""
    bulk_s: float
    """A transfer between vaults without progress for this long has failed."""
    serve_s: float
    """A vault drops a client that makes no progress in the middle of a request for this long."""
    prefetch_s: float
    """A joining node enters after this long even if it has not pulled all state."""
    link_s: float
    """Last resort of the transport between workers; hangs are found by progress, long before."""
    leave_s: float
    """With less of a notice left than this the node leaves at once, not at the end of the step."""
    overdue_s: float
    """A node that is still there this long after its notice's deadline stays: the notice was false."""
    alone_s: float
    """With no node left the launcher gives the coordinator this long to end the job itself."""


def budget(
    silence_s: float, *, nodes: int = 0, heartbeat_s: float = 0.0, seen: LongestDurations | None = None
) -> Timeouts:
    """Every limit for a tolerated silence (seconds) and what was measured. `heartbeat_s`: as given; 0: it follows, also
    from how many `nodes` there may be."""
    silence, seen = silence_s, seen or LongestDurations()
    return Timeouts(
        silence_s=silence,
        heartbeat_s=heartbeat_s or max(min(0.5, silence / 6), min(nodes / MAX_HEARTBEATS_PER_S, silence / 3)),
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
    """Round up to 1, 2 or 5 times a power of ten, so that limits change seldom; 0 for 0."""
    if not 0 < seconds < 1e12:
        return 0.0 if seconds <= 0 else 1e12
    power = 1e-6
    while power * 10 < seconds:
        power *= 10
    return next((s * power for s in _STEPS if seconds <= s * power), power * 10)


NO_DURATIONS = LongestDurations()
DEFAULT_TIMEOUTS = budget(SILENCE_S)
