"""States why the job does not train at the moment, for `elastic status` and for the console."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from elastic.core.coordinator.transitions import SCRIPT_S
from elastic.core.job import checkpoints, scope
from elastic.core.job.state import EpochChange, JobPhase, JobState, Member
from elastic.core.policy import progress_watchdog
from elastic.core.protocol.messages import NodePhase
from elastic.domain.errors import ElasticError
from elastic.store.interface import StoreUnavailable

LASTING_S = 120.0
"""A script that has not used elastic for this time probably never will."""
MAX_NAMES = 8
"""Number of nodes that a text names."""
MAX_REASON_CHARS = 200
"""Length of the reason of a stall, which is a label of a metric."""
SHORT_S = 10.0
"""A shorter wait is no stall: recoveries and starts of workers take so long."""
LATE_MICROBATCHES = 3
"""A job is stalled if no node finishes a micro-batch, or shows another sign of progress, in the
measured time of so many."""
STORE_FULL = "full (NOSPACE): decisions wait until somebody makes room and ends the alarm"
"""Text about the store in the answer to `status`."""
READY = (NodePhase.RUNNING, NodePhase.FINISHED)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wait of the whole job."""

    what: str
    """What is awaited. The text does not change while the same is awaited."""
    since: float
    """Time at which the wait began, on the coordinator's clock."""
    ends: str
    """What ends the wait."""
    lasting: bool = False
    """Whether this is probably the normal state until the end of the job: few lines suffice."""

    def answer(self, now: float) -> dict[str, Any]:
        """Return the fields for the answer to `status`."""
        return {
            "for": self.what,
            "seconds": round(max(0.0, now - self.since), 1),
            "ends": self.ends,
        }

    def entry(self) -> dict[str, Any]:
        """Return the fields for progress.jsonl."""
        return {
            "what": self.what,
            "since": round(self.since, 3),
            "ends": self.ends,
            "lasting": self.lasting,
        }


@dataclass(frozen=True, slots=True)
class Stall:
    """A time without progress of the whole job."""

    phase: str
    reason: str
    """What the job waits for, or what is known about the nodes that make no progress."""
    since: float
    """Time of the newest sign of progress, on the coordinator's clock."""


class StallWatch:
    """Finds stalls, for metrics and alerts. The remedies are the progress watchdog's.

    A stall goes on while the watchdog tries remedies, until a step is finished.
    """

    def __init__(self) -> None:
        self._since = 0.0

    def look(self, state: JobState, now: float, store: Waiting | None = None) -> Stall | None:
        """Return the present stall. None: the job makes progress, or it is over.

        `store`: the wait for the store, if it is away. Orders then wait for it; nodes train on.
        """
        found = _stall(state, now) if store is None else _stall_by_store(state, store)
        if found is None:
            self._since = 0.0
            return None
        since, reason = found
        if self._since and progress_watchdog.is_troubled(state):
            since = min(since, self._since)
        self._since = since
        if now - since < max(SHORT_S, LATE_MICROBATCHES * state.seen.microbatch_s):
            return None
        return Stall(state.phase.value, reason[:MAX_REASON_CHARS], since)


def waiting(state: JobState) -> Waiting | None:
    """Return what the job waits for; None: it trains, or it is over."""
    if state.ending is not None:
        return None
    if state.failure is not None:
        step, failure = checkpoints.due_at_failure(state), state.failure
        then = f"the job then ends: {failure.node}: {failure.failed.message}"
        return Waiting(f"the checkpoint of step {step}", failure.at, then)
    if state.doubt_reported:
        what = "the nodes: this coordinator hears too few of them, so it blames its own network"
        limit_s = state.limits.doubt_s
        then = f"it decides again when it hears most of them, or after up to {limit_s:g} s"
        return Waiting(what, state.doubt_since, f"{then}; nodes that train go on")
    match state.phase:
        case JobPhase.WAITING:
            return _for_nodes(state)
        case JobPhase.LAUNCHED if state.spec is None:
            return _for_script(state)
        case JobPhase.LAUNCHED:
            starting = names(mb.node for mb in state.members.values() if not mb.report.able)
            then = "training begins when all are ready, or without those that are late"
            return Waiting(f"the workers of {starting} to start", state.launched_at, then)
        case JobPhase.HALTING if state.change is not None:
            return _for_halt(state, state.change)
        case JobPhase.INSTALLING if state.change is not None:
            return _for_installation(state, state.change)
        case JobPhase.PAUSED:
            return _for_plan(state)
        case JobPhase.RUNNING:
            return _for_end(state)
    return None


def standby_wait(error: ElasticError, now: float) -> Waiting:
    """Return what a coordinator that does not lead waits for. `error`: why it does not lead."""
    if isinstance(error, StoreUnavailable):
        return Waiting(f"the store: {error}", now, "a coordinator then leads")
    then = "it leads once that one ends; the coordinator that leads says what the job waits for"
    return Waiting("the lead, which another coordinator has", now, then, lasting=True)


def _stall(state: JobState, now: float) -> tuple[float, str] | None:
    """Return since when the job makes no progress, and why; None: it is over, or its script does
    not use elastic."""
    if state.ending is not None or state.failure is not None:
        return None
    if state.doubt_since:
        return state.doubt_since, "the coordinator hears too few nodes"
    found = waiting(state)
    if state.phase in (JobPhase.WAITING, JobPhase.PAUSED):
        return (found.since, found.what) if found is not None else None
    if state.spec is None:
        return None
    if state.phase is JobPhase.LAUNCHED and found is not None:
        late = [node for node, mb in state.members.items() if not mb.report.able]
        signs = (progress_watchdog.sign_at(state, node) for node in late)
        return max(found.since, state.watch.since, *signs), found.what
    quiet = progress_watchdog.quiet(state, now)
    if quiet is None:  # a pause before the next attempt, or the last checkpoint is awaited
        troubled = progress_watchdog.is_troubled(state)
        return (now, found.what) if troubled and found is not None else None
    return quiet[0], found.what if found is not None else quiet[1]


def _stall_by_store(state: JobState, store: Waiting) -> tuple[float, str] | None:
    idle = state.phase not in (JobPhase.RUNNING, JobPhase.FINISHED, JobPhase.FAILED)
    return (store.since, store.what) if idle else None


def store_wait(store: str, full: bool, since: float) -> Waiting:
    """Return the wait of decisions for a store that does not take the job's state. `full`: it has
    no room."""
    if full:
        what = f"room in the store {store}, which is full (NOSPACE)"
        then = "decisions wait until somebody makes room and ends the alarm; workers go on"
        return Waiting(what, since, then)
    what = f"the store {store}, which does not take the job's state"
    return Waiting(what, since, "decisions wait until it does; workers that train go on")


def cause_of(change: EpochChange) -> str:
    """Return the cause of an epoch change, for people."""
    return "the job starts" if change.starts_job else change.cause


def names(nodes: Iterable[str]) -> str:
    """Return the sorted names as one text; at most `MAX_NAMES`, then the number of the others."""
    known = sorted(nodes)
    more = len(known) - MAX_NAMES
    return " ".join(known[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _for_nodes(state: JobState) -> Waiting:
    policy = state.policy
    here = [node for node, mb in state.members.items() if mb.connected]
    listed = f" ({names(here)})" if here else ""
    missing = policy.min_nodes - len(here)
    if missing > 0:
        what = f"nodes: {len(here)} of at least {policy.min_nodes} are here{listed}"
        then = f"the job starts when {missing} more {'joins' if missing == 1 else 'join'}"
        return Waiting(what, state.watch.since, then)
    what = f"more nodes: {len(here)} of at most {policy.max_nodes} are here{listed}"
    since = state.enough_since or state.watch.since
    return Waiting(what, since, f"the job starts after {policy.last_call_s:g} s without them")


def _for_script(state: JobState) -> Waiting | None:
    """Describe a job whose workers have not used elastic yet."""
    members = [mb for mb in state.members.values() if mb.rank >= 0]
    since = state.launched_at
    if any(mb.report.elastic for mb in members):
        starting = names(mb.node for mb in members if not mb.report.able)
        crashes = [mb for mb in members if mb.report.cause]
        why = f" ({crashes[0].node}: {crashes[0].report.cause})" if crashes else ""
        then = "they are started again; if they fail on every node, the job ends"
        return Waiting(f"the workers of {starting} to start{why}", since, then)
    failed = [mb for mb in members if _has_failed(state, mb)]
    others = names(mb.node for mb in members if mb.report.phase is NodePhase.STARTING)
    if failed and others:
        what = f"the scripts of {others}, because that of {failed[0].node} has failed"
        then = f"unless they use elastic within {SCRIPT_S:g} s, the job ends"
        return Waiting(f"{what}: {failed[0].report.cause}", since, then)
    if not others:
        return None
    ended = names(mb.node for mb in members if _has_ended(state, mb))
    if ended:
        what = f"the script on {others} to end, because that on {ended} has ended without training"
        return Waiting(what, since, "the job then ends, unless it calls Trainer.run() before")
    if state.updated_at - since < SCRIPT_S:
        what = f"the script on {others} to call Trainer.run()"
        return Waiting(what, since, "training then begins; other scripts run as under torchrun")
    what = f"the script on {others}, which has not called Trainer.run() within {SCRIPT_S:g} s"
    then = "it runs as under torchrun until it ends; Trainer.run() still begins training"
    return Waiting(what, since, then, lasting=state.updated_at - since >= LASTING_S)


def _has_ended(state: JobState, member: Member) -> bool:
    report = member.report
    return report.restart == state.restart and report.phase is NodePhase.FINISHED


def _has_failed(state: JobState, member: Member) -> bool:
    report = member.report
    return report.restart == state.restart and report.phase is NodePhase.FAILED


def _for_halt(state: JobState, change: EpochChange) -> Waiting:
    now, watch = state.updated_at, state.watch
    late = [mb for mb in state.members.values() if not scope.has_answered(state, mb)]
    if change.boundary:
        return Waiting(
            f"the end of the step, to change the plan ({cause_of(change)})",
            change.began,
            "training then continues with the new plan",
        )
    if late:
        what = (
            f"{names(mb.node for mb in late)} to halt for epoch {state.epoch} ({cause_of(change)})"
        )
        return Waiting(what, change.began, "a node that does not answer is left out")
    if now < change.wait_until:
        restarting = names(mb.node for mb in state.members.values() if mb.workers_gone)
        what = f"the workers of {restarting} to start again ({cause_of(change)})"
        limit = f"after {change.wait_until - change.began:.0f} s training continues without them"
        return Waiting(what, change.began, limit)
    if now < watch.retry_at:
        what = f"the next attempt, because {watch.attempts} failed ({watch.cause})"
        pause = f"it begins after a pause of {watch.retry_at - watch.since:.0f} s"
        return Waiting(what, watch.since, pause)
    return Waiting(f"the plan of epoch {state.epoch}", change.began, "training then continues")


def _for_installation(state: JobState, change: EpochChange) -> Waiting | None:
    plan = state.plan
    reports = [state.members[n].report for n in plan.nodes() if n in state.members] if plan else []
    late = [r.info.node for r in reports if r.epoch != state.epoch or r.phase not in READY]
    if not late:
        return None
    if all(scope.is_awaited(state, node) for node in late):
        what = f"{names(late)} to finish their micro-batches of step {change.step}"
        then = "the repaired pipelines meet them at the end of the step"
        return Waiting(what, change.decided or change.began, then)
    what = f"{names(late)} to load their layers for epoch {state.epoch} ({cause_of(change)})"
    return Waiting(what, change.decided or change.began, "training continues when all have")


def _for_plan(state: JobState) -> Waiting:
    if state.missing is not None:
        absent = names(state.missing.nodes) or "nodes that may still report"
        what = f"{absent}, because {state.missing.error}"
        then = "the job continues when they return with their copies"
        return Waiting(what, state.missing.since, then)
    if not state.members:
        then = "the job continues when enough for a plan have joined"
        return Waiting("nodes: none is here", state.watch.since, then)
    leaving = sorted(node for node, mb in state.members.items() if mb.draining)
    if len(leaving) == len(state.members):
        what = f"nodes that stay: all that are here are leaving ({names(leaving)})"
        then = "the job continues when others join; once the last has left, from a checkpoint"
        return Waiting(what, state.watch.since, then)
    why = state.change.reason if state.change is not None else ""
    what = f"a plan that fits{f': {why}' if why else ''}"
    return Waiting(what, state.watch.since, "the job continues when more nodes join")


def _for_end(state: JobState) -> Waiting | None:
    spec = state.spec
    if spec is None or state.newest_step + 1 < spec.n_steps:
        return None
    since = state.step_finished_at or state.watch.since
    if state.finished is not None:
        return Waiting("older checkpoints to be on disk", state.finished_at, "the job then ends")
    last = f"all {spec.n_steps} steps are done"
    return Waiting(f"the last checkpoint and the workers: {last}", since, "the job then ends")
