"""Node time of a trace and of a simulated run, computed without the simulator's own sums."""

from __future__ import annotations

from elastic_sim.steps.time_accounting import TimeAccount
from elastic_sim.traces.trace import ADD, Trace


def present_ms(account: TimeAccount) -> int:
    """Return the node-milliseconds of all nodes present."""
    return sum(span.alive * (span.ended - span.began) for span in account.spans)


def node_ms(of: Trace) -> int:
    """Return node-milliseconds, from the trace alone."""
    came: dict[str, int] = {}
    total = 0
    for event in of.events:
        at = round(event.seconds * 1000)
        if event.kind == ADD:
            came[event.node] = at
        else:
            total += at - came.pop(event.node)
    return total + sum(round(of.end_s * 1000) - at for at in came.values())
