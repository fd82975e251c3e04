"""The tolerated silence of a process, and all limits on waiting that follow from it.

`budget` computes the limits; docs/operate/timeouts.md shows their values. Other constants in
seconds (polling intervals, start-up times) stand where they are used;
tests/house/time_constants.py lists them.

Limits on waiting for a sign of life are proportional to the tolerated silence, and grow with the
measured round-trip time. They have an upper bound where longer waiting would show nothing more, and
a lower bound where a shorter limit would count normal work as a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SILENCE_S = 3.0
"""Default of the tolerated silence."""
MAX_HEARTBEATS_PER_S = 2000
"""Limit on the heartbeats that a coordinator receives per second, unless the silence is short."""
LEAST_RTT_S, MOST_RTT_S = 0.01, 2.0
"""A measured round-trip time below the first limit has no effect; one above the second counts as
the second."""
RECONNECTS_PER_S = 20
"""Nodes that a busy coordinator admits per second at least: handshakes of TLS and the join token,
and the first report. Measured with 2,000 nodes: 25 (benchmarks/control_plane/coordinator.py)."""
RECONNECT_TRIPS = 10
"""Round trips that a reset connection may cost: the handshakes of TCP, TLS and the join token, the
stream, the report, and one retransmission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestDurations:
    """Longest measured durations in seconds, rounded up (`round_up`); 0: nothing measured yet."""

    step_s: float = 0.0
    """Time of a step."""
    microbatch_s: float = 0.0
    """Compute time of one micro-batch in one worker."""
    pause_s: float = 0.0
    """Pause of training for a change of plan."""
    rtt_s: float = 0.0
    """Round-trip time between a node and the coordinator."""

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
    """A node that is silent this long is lost, also if its connection closed."""
    closed_s: float
    """A node whose connection closed, and with which its neighbours lost contact, is lost if it
    does not reconnect within this time."""
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
    """A transfer between vaults has failed if it waits longer for its next 256 KiB, or its rest."""
    serve_s: float
    """A vault disconnects a client whose request waits longer for its next 256 KiB, or its rest."""
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
    doubt_s: float = 30.0
    """A coordinator that hears only a minority of the nodes blames itself for this long."""
    return_s: float = 600.0
    """A job waits this long for lost nodes that may have the only copies of its state, and for a
    disk that hangs during the commit of a checkpoint."""
    progress_s: float = 7.5
    """A job without any sign of progress for this long is stalled (the progress watchdog)."""
    orphan_s: float = 1200.0
    """An agent ends if it reaches no coordinator, and nothing runs there, for this long. Its vault
    ends with it, so this is twice as long as the job waits for copies."""
    path_s: float = 4.0
    """Two nodes cannot reach each other if one has had no answer from the other for this long."""
    open_s: float = 10.0
    """Workers that have all loaded their layers must connect to each other within this time."""
    save_s: float = 60.0
    """A job that failed waits this long for a checkpoint that is due."""
    disk_s: float = 30.0
    """A write without which a job lacks its last checkpoint is repeated for this long if the disk
    fails."""
    preflight_s: float = 10.0
    """The pre-flight waits this long for an answer of the coordinator, or of a peer's vault."""
    preflight_disk_s: float = 60.0
    """The pre-flight waits this long for all directories of the node together. A coordinator keeps
    the lease this long before it has read or made the state of the run."""
    trial_cpu_s: float = 300.0
    """CPU time after which the trial of the devices in the pre-flight counts as endless."""


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
    silence, reconnect_s = silence_s, RECONNECT_TRIPS * seen.rtt_s
    return_s = max(600.0, silence * 100)
    return Timeouts(
        silence_s=silence,
        heartbeat_s=heartbeat_s
        or max(min(0.5, silence / 6), min(nodes / MAX_HEARTBEATS_PER_S, silence / 3)),
        lease_s=silence + reconnect_s,
        closed_s=min(1.0, silence / 3) + reconnect_s,
        contact_s=min(0.5, silence / 6) + reconnect_s,
        starved_s=min(0.5, silence / 6),
        adopt_s=max(1.0, silence * 2 / 3) + reconnect_s,
        keepalive_s=max(1.0, silence * 5 / 3),
        silent_s=max(10.0, silence * 3),
        stuck_s=max(60.0, silence * 20, seen.microbatch_s * 20),
        sibling_s=max(5.0, silence * 5 / 3),
        bulk_s=max(10.0, silence * 10 / 3),
        serve_s=max(30.0, silence * 10),
        prefetch_s=max(20.0, seen.step_s * 5),
        path_s=max(2.0, silence * 4 / 3) + reconnect_s,
        open_s=max(10.0, silence * 10 / 3) + reconnect_s,
        preflight_s=max(10.0, silence * 10 / 3) + reconnect_s,
        preflight_disk_s=max(60.0, silence * 20),
        trial_cpu_s=max(300.0, silence * 100),
        link_s=max(1800.0, silence * 100),
        leave_s=min(20.0, max(2.0, seen.pause_s * 2)),
        overdue_s=max(30.0, silence * 10),
        alone_s=silence * 2,
        doubt_s=max(30.0, silence * 10) + reconnect_s,
        return_s=return_s,
        progress_s=max(silence * 2.5 + reconnect_s, seen.microbatch_s * 20, seen.step_s * 5),
        orphan_s=2 * return_s,
        save_s=max(60.0, silence * 20),
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
