"""Scope of an epoch change: which nodes halt at once, and which go on to the meeting point.

If a pipeline loses a node, the nodes of the other pipelines are **outside** the change. They
promise to halt before the next commit, compute their micro-batches of the running step, and enter
the new epoch when these are done. Meanwhile the nodes of the scope repair the damaged pipelines
(docs/design/local-recovery.md).

A scope helps with one fault. Any other fault before all nodes have entered the epoch begins the
next one, for which all nodes halt at once. So no promise is renewed, and at most two epochs run at
the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elastic.core.job.state import Cause, CauseKind, JobPhase, JobState, Member
from elastic.core.protocol.messages import Halt, NodePhase, NodeReport, Promise
from elastic.domain.types import Pipeline, Plan
from elastic.planning.plan.schemes import NONE, gradients_of, state_of

DAMAGE = (CauseKind.LOST, CauseKind.WORKER, CauseKind.HANG)
"""Causes that damage some pipelines only."""


def nodes_of(pipeline: Pipeline) -> frozenset[str]:
    """Return the nodes that hold stages of the pipeline."""
    return frozenset(stage.unit.node for stage in pipeline.stages)


def outside_nodes(state: JobState, cause: Cause, gone: Collection[str]) -> tuple[str, ...]:
    """Return the nodes of the running plan that may stay outside a change that begins now; (): all
    nodes must halt at once. `gone`: nodes of the plan whose workers are gone."""
    plan = state.plan
    if plan is None or state.phase is not JobPhase.RUNNING or state.change is not None:
        return ()
    if cause.kind not in DAMAGE or not gone or not _scheme_allows(plan):
        return ()
    # NCCL may hang if some communicators are aborted while others run.
    if any(member.report.accelerated for member in state.members.values()):
        return ()
    if not _step_began_whole(state):
        return ()
    left = _whole(plan, {*gone, *_partly_used(state, plan)})
    return tuple(dict.fromkeys(node for pipeline in left for node in sorted(nodes_of(pipeline))))


def _scheme_allows(plan: Plan) -> bool:
    """Return whether states have copies, and pipelines sum gradients only at the step's end."""
    return state_of(plan.state).name != NONE and not gradients_of(plan.gradients).rounds


def _partly_used(state: JobState, plan: Plan) -> list[str]:
    """Return the nodes with workers that hold no stage: these have nothing to promise."""
    units = plan.units()
    return [
        node
        for node in plan.nodes()
        if (member := state.members.get(node)) is not None
        and plan.tp * sum(unit.node == node for unit in units) < member.report.info.workers
    ]


def _whole(plan: Plan, gone: Collection[str]) -> list[Pipeline]:
    """Return the pipelines that have none of these nodes, and share no node with one that does."""
    halting, left = set(gone), list(plan.pipelines)
    while True:
        hit = [pipeline for pipeline in left if nodes_of(pipeline) & halting]
        if not hit:
            return left
        halting = halting.union(*map(nodes_of, hit))
        left = [pipeline for pipeline in left if pipeline not in hit]


def _step_began_whole(state: JobState) -> bool:
    """Return whether each pipeline runs all its micro-batches of the running step through all its
    layers: the step is not the one in which the epoch began, or it was not begun before."""
    assignment = state.assignment
    if assignment is None or assignment.plan.epoch != state.epoch:
        return False
    if state.newest_step >= assignment.step:
        return True
    shares = tuple(pipeline.microbatches for pipeline in assignment.plan.pipelines)
    return assignment.todo == shares and not assignment.partial and not assignment.promised


def halt_order(state: JobState) -> Halt:
    """Return the order to halt of the present change."""
    change = state.change
    assert change is not None
    # The vault of a node whose workers are gone still keeps copies.
    lost = tuple(node for node in change.lost if node not in state.members)
    return Halt(state.epoch, change.boundary, change.outside, lost if change.outside else ())


def is_outside(state: JobState, node: str) -> bool:
    return state.change is not None and node in state.change.outside


def has_promised(report: NodeReport, epoch: int) -> bool:
    """Return whether all workers of the node have promised to halt for `epoch`."""
    promises = [one for one in report.promises if one.epoch == epoch]
    return report.epoch == epoch and len(promises) == report.info.workers


def has_answered(state: JobState, member: Member) -> bool:
    """Return whether the member has halted, or is outside and has promised to."""
    if member.report.epoch < state.epoch:
        return False
    promised = is_outside(state, member.node) and has_promised(member.report, state.epoch)
    return member.halted or promised


def is_awaited(state: JobState, node: str) -> bool:
    """Return whether the node is outside the present change and has not entered its epoch yet."""
    if not is_outside(state, node):
        return False
    member = state.members.get(node)
    entered = (NodePhase.RUNNING, NodePhase.FINISHED)
    return (
        member is None or member.report.epoch != state.epoch or member.report.phase not in entered
    )


def awaited(state: JobState) -> int:
    """Return the number of members outside the present change that have not entered its epoch."""
    outside = state.change.outside if state.change is not None else ()
    return sum(node in state.members and is_awaited(state, node) for node in outside)


def is_any_awaited(state: JobState) -> bool:
    """Return whether a node outside the present change has not entered its epoch yet."""
    change = state.change
    return change is not None and any(is_awaited(state, node) for node in change.outside)


def problem(state: JobState) -> str:
    """Return why the nodes outside cannot stay outside; "": they can."""
    change, plan = state.change, state.plan
    if change is None or not change.outside:
        return ""
    old = change.old_plan
    assert plan is not None and old is not None
    promises: list[tuple[str, Promise]] = []
    for node in change.outside:
        member = state.members.get(node)
        if member is None:
            return f"{node} is lost"
        report = member.report
        if member.workers_gone or report.phase is NodePhase.IDLE:
            return f"the workers of {node} are gone"
        if report.epoch != state.epoch or report.phase not in (NodePhase.HALTING, NodePhase.HALTED):
            continue
        halted = [one for one in report.halted if one.epoch == state.epoch]
        if not all(one.complete for one in halted):
            return f"{node} did not come to the end of its micro-batches"
        promises += [(node, one) for one in report.promises]
        if report.phase is NodePhase.HALTED and not has_promised(report, state.epoch):
            return f"{node} promised nothing"
    return _difference(promises, old.epoch)


def _difference(promises: Iterable[tuple[str, Promise]], ran_in: int) -> str:
    """Return how a promise differs from the others; "": all are for one step of the old plan."""
    first: tuple[str, Promise] | None = None
    for node, one in promises:
        if one.ran_in != ran_in:
            return f"{node} runs in epoch {one.ran_in}, not in {ran_in}"
        if first is not None and one.step != first[1].step:
            return f"{node} is in step {one.step}, and {first[0]} in step {first[1].step}"
        first = first or (node, one)
    return ""


def promised_step(state: JobState) -> int:
    """Return the step that all nodes outside have promised; -1: there are none."""
    change = state.change
    outside = change.outside if change is not None else ()
    reports = (state.members[node].report for node in outside)
    return next((one.step for report in reports for one in report.promises), -1)


def promised_work(state: JobState, plan: Plan) -> dict[int, tuple[int, ...]] | None:
    """Return pipeline of `plan` -> micro-batches that its nodes have promised, for the pipelines
    outside. None: `plan` changes one of them."""
    change = state.change
    assert change is not None and change.old_plan is not None
    found: dict[int, tuple[int, ...]] = {}
    for old in change.old_plan.pipelines:
        if not nodes_of(old) <= set(change.outside):
            continue
        same = [
            number
            for number, new in enumerate(plan.pipelines)
            if (new.stages, new.schedule) == (old.stages, old.schedule)
        ]
        if not same:
            return None
        found[same[0]] = old.microbatches
    return found
