"""Absent nodes that may live, and the wait for their copies or for a checkpoint.

A node that was lost without proof may only be cut off. It keeps its vault and offers it when it
joins again. The same holds for a node that the saved state does not know, because the store lost
its last writes. So a job that lacks copies waits before it gives up:

- as long as it takes, if absent nodes are the majority: a healthy majority never ends a job;
- otherwise for `Timeouts.return_s` after the newest return of such a node;
- for `Timeouts.save_s` if all files of a checkpoint are written and its commit is under way;
- after a failover until all nodes had time to report.

A job whose workers crash on all members waits for absent nodes in the same way.

The copies of absent nodes are of no use once those of a new plan are whole at their peers.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from elastic.core.job import checkpoints
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

MAX_SHOWN = 16
"""Number of absent nodes that the text of a pause names."""


def with_absent(state: JobState, node: str, now: float) -> JobState:
    """Record the loss of a node that may live."""
    return state.of(absent=(*with_returned(state, node).absent, (node, now)))


def with_unknown(state: JobState, node: str, now: float) -> JobState:
    """Record a node that is no member, but took part in an epoch. It is refused, and joins again
    with its copies."""
    if node in state.members or node in dict(state.absent):
        return state
    state, missing = with_absent(state, node, now), state.missing
    if missing is None:
        return state
    nodes, count = (*missing.nodes, node), missing.count + 1
    return state.of(missing=replace(missing, nodes=nodes, count=count))


def with_returned(state: JobState, node: str) -> JobState:
    """Record that the node has joined again."""
    if all(name != node for name, _ in state.absent):
        return state
    return state.of(absent=tuple(item for item in state.absent if item[0] != node))


def wait_or_fail(
    state: JobState, change: EpochChange, error: Unrecoverable, now: float
) -> JobTransition:
    """Pause the job until absent nodes return or a checkpoint is committed; end it if neither can
    be expected, or after the wait."""
    nodes, known = tuple(node for node, _ in state.absent), state.missing
    since, count = now, len(nodes) + len(state.members)
    if known is not None and not returned_nodes(state):
        since, count = known.since, known.count
    step = checkpoints.newest_step(state)
    missing = MissingCopies(str(error), error.exit_code, nodes, since, count, step)
    state = state.of(missing=missing)
    ended = end_if_hopeless(state, now)
    if ended is not None:
        return ended
    text = f"{error}; waiting for {_awaited(state)}"
    entry = LogEntry("paused", {"epoch": state.epoch, "why": text})
    return state.of(phase=JobPhase.PAUSED, change=change), (entry,), f"paused: {text}"


def are_majority(state: JobState) -> bool:
    """Return whether more nodes are absent than present. They may be well, so problems of the
    present ones do not end the job."""
    return len(state.absent) > len(state.members)


def are_awaited(state: JobState, now: float) -> bool:
    """Return whether absent nodes may still continue a job that no member can continue."""
    newest = max((at for _, at in state.absent), default=-inf)
    return are_majority(state) or now - newest < state.limits.return_s


def returned_nodes(state: JobState) -> tuple[str, ...]:
    """Return the nodes for which the job waits and which are members again."""
    wanted = state.missing.nodes if state.missing is not None else ()
    return tuple(node for node in wanted if node in state.members)


def is_worth_a_retry(state: JobState) -> bool:
    """Return whether an awaited node is back or a newer checkpoint is durable, if the job lacks
    copies; True if it lacks none."""
    missing = state.missing
    if missing is None or returned_nodes(state):
        return True
    return checkpoints.newest_step(state) > missing.checkpoint


def _awaited(state: JobState) -> str:
    """Return what the job waits for."""
    steps = [commit.step for commit in checkpoints.commits_to_repeat(state)]
    parts = [f"the checkpoint of step {steps[-1]}, which is being committed"] if steps else []
    nodes = [node for node, _ in state.absent]
    if nodes:
        more = f" and {len(nodes) - MAX_SHOWN} more" if len(nodes) > MAX_SHOWN else ""
        parts.append(f"{' '.join(nodes[:MAX_SHOWN])}{more}, which may have copies")
    return ", and for ".join(parts) or "nodes that may still report"


def end_if_hopeless(state: JobState, now: float) -> JobTransition | None:
    """End the job if it lacks copies, no absent node can be expected to bring them, and no
    checkpoint is being committed."""
    missing, absent = state.missing, len(state.absent)
    assert missing is not None
    majority = 2 * absent > (missing.count or absent + len(state.members))
    waited_s = now - missing.since
    commits = bool(checkpoints.commits_to_repeat(state)) and waited_s < state.limits.save_s
    if majority or commits or now < state.adopted_until:
        return None
    if absent and waited_s < state.limits.return_s:
        return None
    waited = f"; no node returned within {waited_s:.0f} s" if absent else ""
    reason = f"{missing.error}{waited}"
    state, actions = end_job(state, JobPhase.FAILED, missing.code, reason)
    return state, actions, f"the job cannot go on: {reason}"
