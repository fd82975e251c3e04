"""Lost nodes that may live, and the wait for their copies.

A node that was lost without proof may only be cut off. It keeps its vault and offers it when it
joins again. So a job that lacks copies waits for such nodes before it gives up:

- as long as it takes, if they are the majority of the nodes: a healthy majority never ends a job;
- otherwise for `Timeouts.return_s` after the newest return of such a node.

The copies of absent nodes are of no use once those of a new plan are whole at their peers.
"""

from __future__ import annotations

from elastic.core.job.membership import end_job
from elastic.core.job.state import (
    EpochChange,
    JobPhase,
    JobState,
    JobTransition,
    LogEntry,
    MissingCopies,
)
from elastic.domain.errors import Unrecoverable

KEPT_ABSENT = 256
"""Number of absent nodes that are kept in the state."""


def with_absent(state: JobState, node: str, now: float) -> JobState:
    """Record the loss of a node that may live."""
    return state.of(absent=(*with_returned(state, node).absent, (node, now))[-KEPT_ABSENT:])


def with_returned(state: JobState, node: str) -> JobState:
    """Record that the node has joined again."""
    if all(name != node for name, _ in state.absent):
        return state
    return state.of(absent=tuple(item for item in state.absent if item[0] != node))


def wait_or_fail(
    state: JobState, change: EpochChange, error: Unrecoverable, now: float
) -> JobTransition:
    """Pause the job until absent nodes return; end it if there are none, or after the wait."""
    nodes, known = tuple(node for node, _ in state.absent), state.missing
    since, count = now, len(nodes) + len(state.members)
    if known is not None and not returned_nodes(state):
        since, count = known.since, known.count
    missing = MissingCopies(str(error), error.exit_code, nodes, since, count)
    state = state.of(missing=missing)
    ended = end_if_hopeless(state, now)
    if ended is not None:
        return ended
    text = f"{error}; waiting for {' '.join(nodes)}, which may have copies"
    entry = LogEntry("paused", {"epoch": state.epoch, "why": text})
    return state.of(phase=JobPhase.PAUSED, change=change), (entry,), f"paused: {text}"


def returned_nodes(state: JobState) -> tuple[str, ...]:
    """Return the nodes for which the job waits and which are members again."""
    wanted = state.missing.nodes if state.missing is not None else ()
    return tuple(node for node in wanted if node in state.members)


def end_if_hopeless(state: JobState, now: float) -> JobTransition | None:
    """End the job if it lacks copies and no absent node can be expected to bring them."""
    missing, absent = state.missing, len(state.absent)
    assert missing is not None
    majority = 2 * absent > (missing.count or absent + len(state.members))
    if majority or (absent and now - missing.since < state.limits.return_s):
        return None
    waited = f"; no node returned within {now - missing.since:.0f} s" if absent else ""
    reason = f"{missing.error}{waited}"
    state, actions = end_job(state, JobPhase.FAILED, missing.code, reason)
    return state, actions, f"the job cannot go on: {reason}"
