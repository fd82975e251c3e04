"""Judges a finished run by its event log and by the faults that were carried out.

Each function returns what was wrong. An excuse needs a fault that explains it: the right kind, on
the right node, at the right time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.core.policy.progress_watchdog import NO_FAILURE
from elastic.domain.types import JobSpec
from tests.simulation.model import expected_figures, figure_of

FLIGHT_S = 1.0
"""The last messages of a node that was destroyed arrive at most this long afterwards."""
LATE_S = 6.0
"""A coordinator hears the nodes at most this long after a fault that kept it from that."""
NOTICED_S = 1.0
"""The end of a job is noticed at most this long afterwards."""
MEMORY = ("memory-full", "no-slots")
DISK = ("disk-full", "disk-error", "disk-slow", "disk-hang")
LEAD_DISK = ("lead-disk", "lead-hang")
WINDOW_S, EPOCHS = 60.0, 5
"""In each window of this length there are at most this many epochs without a finished step."""
HELD_S = 3.0
"""Events that were held back while the store was away are written at most this long afterwards."""
WRITING_S = 15.0
"""A node or a disk that fails this long after a checkpoint became due may prevent it."""
DESTROYS = ("power", "kill", "back", "left")
FOR_GOOD = ("power", "kill", "left", "unwritten")
"""Faults without an end."""
SILENCES = ("pause", "cut-out", "cut-in")
DELAYS = ("store-away", "lead-pause", "lead-cut", "lead-kill", "lead-amnesia")
"""Faults after which the coordinator hears late of a finished step."""


@dataclass(frozen=True)
class Injected:
    """A fault that was carried out; `until`: its end. Times are simulated.

    The kinds `left` and `unwritten`: an agent ended at once because it was told to, or had no time
    to write a checkpoint before it left. `unrecorded`: a coordinator ended while its disk was bad,
    so it could not write its last events.
    """

    kind: str
    at: float
    until: float
    node: str


@dataclass(frozen=True)
class Reported:
    """A worker told the agent of this node, at this time, that a step is finished."""

    at: float
    node: str


def of(events: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def _decided_from(faults: Sequence[Injected], at: float) -> float:
    """Return the earliest time of the cause of an event. Meanwhile no coordinator could hear it, or
    write to the store."""
    away = (fault for fault in faults if fault.kind in DELAYS)
    return min((f.at for f in away if f.at <= at <= f.until + HELD_S), default=at)


def too_many_epochs(events: Sequence[dict[str, Any]]) -> list[str]:
    """There are never more than `EPOCHS` per minute without a finished step. An epoch because of a
    lost or leaving node, or of one that joins, does not count."""
    causes = {event["epoch"]: event for event in of(events, "halt")}
    recent: list[dict[str, Any]] = []
    for event in events:
        if event["kind"] == "step":
            recent = []
        if event["kind"] != "plan":
            continue
        halt = causes.get(event["epoch"], {"cause_kind": "other", "cause": "unknown"})
        if halt["cause_kind"] in NO_FAILURE:
            continue
        recent = [one for one in recent if one["at"] > event["at"] - WINDOW_S]
        recent.append({"at": event["at"], "cause": halt["cause"]})
        if len(recent) > EPOCHS:
            text = "; ".join(f"{one['at']:.1f}: {one['cause']}" for one in recent)
            return [f"{len(recent)} epochs in {WINDOW_S:g} s without a step: {text}"]
    return []


def checkpoints_missing(
    events: Sequence[dict[str, Any]],
    faults: Sequence[Injected],
    due: Sequence[int],
    complete: frozenset[int],
    reports: Mapping[int, Sequence[Reported]],
    members: frozenset[str],
) -> list[str]:
    """Every due checkpoint is there. One that is not the last may be reported as lost, if a fault
    of a disk, or the loss of a node, hit the time in which it was written. So does a node that is
    well, but was cut off and was not one of the `members` at the end. The cause comes before the
    report."""
    last = {event["node"]: event["at"] for event in of(events, "lost")}
    absent = [at for node, at in last.items() if node not in members]
    lost = {event["step"]: event for event in of(events, "checkpoint-lost")}
    wrong = []
    for step in due:
        if step in complete:
            continue
        window = _finished(events, reports.get(step - 1, ()), step)
        why = lost[step]["why"] if step in lost else None
        if step == due[-1]:
            wrong.append(f"the checkpoint of the last step, {step}, is missing: {why}")
        elif step not in lost:
            if not _hit(faults, window, ("unrecorded",)):
                wrong.append(f"the checkpoint of step {step} is missing, and no event names it")
        elif not _may_be_given_up(faults, window, absent, lost[step]["at"]):
            wrong.append(f"the checkpoint of step {step} was given up: {why}")
    return wrong


def _may_be_given_up(
    faults: Sequence[Injected], window: tuple[float, float], absent: Sequence[float], at: float
) -> bool:
    """Return whether the checkpoint of a step that was finished in `window` could be given up at
    this time: before, a node was lost for good, or a fault hit the time in which it was written."""
    before = [fault for fault in faults if fault.at <= at]
    kinds = (*DESTROYS, "unwritten", *DISK, *LEAD_DISK)
    return any(window[0] <= gone <= at for gone in absent) or _hit(before, window, kinds)


def steps_unreported(
    events: Sequence[dict[str, Any]],
    faults: Sequence[Injected],
    steps: int,
    reports: Mapping[int, Sequence[Reported]],
) -> list[int]:
    """Return the steps that no event reports, although an agent with their report could do it.

    Two agents have the report of a step (`reports`). Both may be destroyed before a coordinator
    hears them, or the coordinator may not be able to write the event.
    """
    known = {event["step"] for event in of(events, "step")}
    return [
        step
        for step in range(steps)
        if step not in known
        and not (
            reports.get(step)
            and all(
                _lost_with_its_agent(faults, report) or _unrecorded(faults, report)
                for report in reports[step]
            )
        )
    ]


def evaluations_wrong(events: Sequence[dict[str, Any]], spec: JobSpec) -> list[str]:
    """Each evaluation that is due is reported with its step, and once, and has the values of a run
    without failures. The last one is reported with the end of the job.

    An epoch that begins at a step with the same parameters as before does the step again, but need
    not evaluate them again.
    """
    found = of(events, "evaluation")
    done = Counter(event["step"] for event in of(events, "step"))
    done[spec.n_steps] = len(of(events, "end"))
    reported = Counter(event["step"] for event in found)
    again = Counter(event["step"] for event in of(events, "plan"))
    wrong = []
    for version, count in sorted(done.items()):
        most = count if spec.evaluates(version) else 0
        least = min(most, max(1, count - again[version]))
        if not least <= reported[version] <= most:
            wrong.append(
                f"the evaluation after step {version} is reported {reported[version]} times, its "
                f"step {count} times"
            )
    for event in found:
        wanted = expected_figures(spec, event["step"])
        loss = wanted[figure_of(spec.n_layers - 1)]
        if event["figures"] != wanted or event["loss"] != loss:
            wrong.append(f"the evaluation after step {event['step']} has other values: {event}")
    return wrong


def scopes(events: Sequence[dict[str, Any]]) -> Counter[str]:
    """Count the epoch changes that left nodes outside: `begun`, and those that were `complete`
    before another epoch began."""
    outside = {event["epoch"] for event in of(events, "halt") if event.get("outside")}
    complete = {event["epoch"] for event in of(events, "recovery")}
    return Counter(begun=len(outside), complete=len(outside & complete))


def scopes_unfinished(
    events: Sequence[dict[str, Any]],
    entered: Mapping[int, Mapping[str, float]],
    faults: Sequence[Injected],
) -> list[str]:
    """Each node that a change left outside has entered its epoch before the change is complete, or
    another epoch follows, or all steps are done. `entered`: epoch -> node -> time."""
    halts, complete = of(events, "halt"), of(events, "recovery")
    newest = max((event["epoch"] for event in halts), default=0)
    done = any(event["code"] == 0 for event in of(events, "end"))
    ends = {event["epoch"]: event["at"] for event in complete}
    if any(fault.kind == "unrecorded" for fault in faults):
        newest += 1  # perhaps
    wrong = []
    for halt in halts:
        epoch = halt["epoch"]
        end = ends.get(epoch, math.inf if epoch == newest and not done else None)
        if end is None:
            continue
        times = entered.get(epoch, {})
        missing = [node for node in halt.get("outside", ()) if times.get(node, math.inf) >= end]
        if missing:
            wrong.append(f"{missing} stayed outside, and no epoch follows {epoch}")
    return wrong


def _unrecorded(faults: Sequence[Injected], report: Reported) -> bool:
    """Whether a coordinator may have heard of the step while it could not write the event."""
    until = _heard_until(faults, report)
    bad = (fault for fault in faults if fault.kind == "unrecorded")
    return any(report.at <= fault.until and fault.at <= until for fault in bad)


def _heard_until(faults: Sequence[Injected], report: Reported) -> float:
    """Return the latest time at which a coordinator hears the report. Faults may keep it from
    that."""
    heard_late = [
        fault.until + LATE_S
        for fault in faults
        if (fault.kind in DELAYS or (fault.kind in SILENCES and fault.node == report.node))
        and fault.at <= report.at + FLIGHT_S <= fault.until + LATE_S
    ]
    return max([report.at + FLIGHT_S, *heard_late])


def _lost_with_its_agent(faults: Sequence[Injected], report: Reported) -> bool:
    """Whether the agent was destroyed soon afterwards, or before a fault ended that kept
    coordinators from hearing it."""
    until = _heard_until(faults, report)
    return any(
        fault.kind in DESTROYS and fault.node == report.node and report.at <= fault.at <= until
        for fault in faults
    )


def out_of_memory(
    events: Sequence[dict[str, Any]], faults: Sequence[Injected], end: float, reason: str
) -> bool:
    """Whether the job ended at `end` because nodes had no memory for their own copies: half of
    them, or the one without which there is no plan."""
    # Nobody decides while no coordinator hears the nodes, which crashed before.
    crashed = _decided_from(faults, end)
    memory = (fault for fault in faults if fault.kind in MEMORY)
    full = {f.node for f in memory if f.at < end and crashed < f.until + NOTICED_S}
    if not full or not ("SlotError" in reason or "VaultFull" in reason):
        return False
    here = members_at_end(events)
    return 2 * len(here & full) >= len(here) > 0 or "no plan fits without it" in reason


def members_at_end(events: Sequence[dict[str, Any]]) -> frozenset[str]:
    """Return the nodes that had joined, and were neither lost nor drained."""
    here: set[str] = set()
    for event in events:
        if event["kind"] == "joined":
            here.add(event["node"])
        elif event["kind"] in ("lost", "drained"):
            here.discard(event["node"])
    return frozenset(here)


def _finished(
    events: Sequence[dict[str, Any]], reports: Sequence[Reported], step: int
) -> tuple[float, float]:
    """Return when the step before checkpoint `step` was first finished, by the reports to agents,
    and when a coordinator last heard it. Before, the checkpoint may wait in the queue of an
    agent."""
    heard = [event["at"] for event in of(events, "step") if event["step"] == step - 1]
    first = min((report.at for report in reports), default=0.0)
    return first, max(heard, default=float("inf"))


def _hit(faults: Sequence[Injected], window: tuple[float, float], kinds: Sequence[str]) -> bool:
    """Whether such a fault was there when the checkpoint was due, or soon afterwards. One for good
    came then, or shortly before."""
    first, last = window
    return any(
        fault.kind in kinds
        and fault.at <= last + WRITING_S
        and (fault.at + WRITING_S if fault.kind in FOR_GOOD else fault.until) >= first
        for fault in faults
    )
