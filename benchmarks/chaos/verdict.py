"""Judges a finished run: right result, right refusal, or failure.

Whether copies were lost is decided from the plans and from the faults that were carried out, not
by the solver of the product: all holders of a layer, and the nodes that keep their copies, were
destroyed before the copies of a newer plan were whole.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.chaos.case import Case
from benchmarks.chaos.injector import Injection
from elastic.core.protocol.fault_spec import FaultKind, FaultSpec
from elastic.domain.errors import (
    EXIT_DRAINED,
    EXIT_OK,
    EXIT_TERMINATED,
    EXIT_UNRECOVERABLE,
    ElasticError,
)
from elastic.domain.types import Plan
from elastic.planning.plan.plan import parse_plan
from tests.scenarios.checkpoints import verified_sha256

RIGHT, REFUSED, FAILED, IDLE = "right", "refused", "failed", "idle"
"""Idle: the job ended before any fault was due, so the run shows nothing."""
RETURN_S = 10.0
"""Time that a node needs to return after a partition."""
HEARTBEAT_S = 0.5
"""Interval between two messages of a node."""
DELAYS = ("pause-coordinator", "kill-coordinator", "partition")
"""Faults after which the coordinator hears late of a finished step."""
REPORT_S, HELD_S = 2.0, 15.0
"""Longest time from the end of a step to its event: usually, and after one of these faults."""
WRITING_S = 15.0
"""A node that dies, or a disk that is full, this long after the end of a step may prevent its
checkpoint."""


@dataclass(frozen=True, order=True)
class Partition:
    """A time in which a node and the coordinator could not reach each other."""

    at: float
    until: float
    node: str
    dropped: bool
    """Whether packets were dropped; else the agent was mute."""

    @property
    def heard_at(self) -> float:
        """Latest time of the node's next message. TCP sends lost packets again after pauses that
        double, so the first pause after the partition is at most as long as the partition."""
        lost_s = self.until - self.at if self.dropped else 0.0
        return self.until + lost_s + HEARTBEAT_S


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a run left."""

    case: Case
    code: int | None
    """Exit code of the job; None: it did not end in time."""
    summary: dict[str, Any]
    """{}: there is none."""
    events: list[dict[str, Any]]
    destroyed: list[tuple[float, str]]
    """Time and name of each node whose memory was lost, by a fault that was carried out."""
    partitions: list[Partition] = field(default_factory=list)
    """Partitions of nodes that were carried out."""
    corrupted: list[float] = field(default_factory=list)
    """Times at which all copies in a vault got a wrong byte."""
    injections: list[Injection] = field(default_factory=list)
    checkpoints: dict[int, str] = field(default_factory=dict)
    """Hash of the parameters by step, of each checkpoint on disk that is whole."""
    damaged: tuple[str, ...] = ()
    """Checkpoints on disk that are not whole, with the reason."""
    processes: tuple[str, ...] = ()
    """Processes that did not end."""
    files: tuple[str, ...] = ()
    """Files that were left in shared memory or the temporary directory."""
    agent_codes: dict[str, int | None] = field(default_factory=dict)
    fired: tuple[str, ...] = ()
    """Faults that were carried out."""


@dataclass(frozen=True)
class Verdict:
    outcome: str
    why: str = ""


def judge(run: Finished, reference_sha256: str) -> Verdict:
    """Return the outcome of a run."""
    reason = str(run.summary.get("reason", ""))
    if run.code is None:
        return Verdict(FAILED, "the run did not end in time")
    if run.processes:
        return Verdict(FAILED, f"processes are left: {', '.join(run.processes)}")
    if run.damaged:
        return Verdict(FAILED, f"checkpoints are damaged: {'; '.join(run.damaged)}")
    lost = layers_lost(run)
    if run.code == EXIT_UNRECOVERABLE:
        if not lost:
            return Verdict(FAILED, f"exit code 3, but copies of every layer were left: {reason}")
        if run.checkpoints:
            return Verdict(FAILED, f"exit code 3, but there is a checkpoint: {reason}")
        return Verdict(REFUSED, f"{reason} (by the faults: {lost})")
    if run.code != EXIT_OK:
        return Verdict(FAILED, f"exit code {run.code}: {reason}")
    wrong = _wrong(run, reference_sha256, lost)
    if wrong:
        return Verdict(FAILED, wrong)
    return Verdict(RIGHT, _returned(run)) if run.fired else Verdict(IDLE, "no fault was due")


def _wrong(run: Finished, reference_sha256: str, lost: str) -> str:
    """Return what is wrong with a run of exit code 0; "": nothing."""
    summary, case = run.summary, run.case
    if summary.get("params_sha256") != reference_sha256:
        return f"other parameters: {summary.get('params_sha256')}"
    ledger = {"double": 0, "missing": 0, "proved": case.steps}
    if summary.get("steps") != case.steps or summary.get("ledger") != ledger:
        return f"{summary.get('steps')} steps, ledger {summary.get('ledger')}"
    if problem := _wrong_checkpoint(run, reference_sha256):
        return problem
    for event in _of(run.events, "lost-steps"):
        if not (lost or _copies_away(run)):
            return f"a return to a checkpoint without need: {event.get('why')}"
    if unhurt := healthy_lost(run):
        return f"lost, and no fault explains it: {' '.join(unhurt)}"
    if run.files:
        return f"files are left: {', '.join(run.files[:5])}"
    return _wrong_agent(run)


def _wrong_checkpoint(run: Finished, reference_sha256: str) -> str:
    missing = [step for step in run.case.due if step not in run.checkpoints]
    named = {event["step"]: event for event in _of(run.events, "checkpoint-lost")}
    for step in missing:
        if step == run.case.due[-1] and step == run.case.steps:
            why = named.get(step, {}).get("why")
            return f"the checkpoint of the last step is missing: {why}"
        if step not in named:
            return f"the checkpoint of step {step} is missing, and no event names it"
        if not _excused(run, named[step]):
            return f"the checkpoint of step {step} was given up: {named[step]['why']}"
    last = run.checkpoints.get(run.case.steps, reference_sha256)
    if last != reference_sha256:
        return f"the checkpoint of the last step has other parameters: {last}"
    return ""


def _wrong_agent(run: Finished) -> str:
    for name, code in run.agent_codes.items():
        if code is None and not _cut_off_at_the_end(run):
            return f"the agent of {name} did not end"
        if code is not None and code not in _right_codes(run, name):
            return f"the agent of {name} ended with exit code {code}"
    return ""


def _right_codes(run: Finished, node: str) -> set[int]:
    """Return the exit codes that the agent of a node may have after a job that succeeded."""
    codes = {EXIT_OK}
    if any(event["node"] == node for event in _of(run.events, "drained")):
        codes.add(EXIT_DRAINED)
    if not any(event["node"] == node for event in _of(run.events, "joined")):
        codes.add(EXIT_TERMINATED)  # it began too late to join, and was told to end
    if any(name == node for _, name in run.destroyed):
        codes |= {-signal.SIGKILL, 128 + signal.SIGKILL}
    return codes


def _cut_off_at_the_end(run: Finished) -> bool:
    """Whether a partition lasted until the job ended, or nearly. An agent that cannot hear of the
    end ends some minutes later (`orphan_s`)."""
    ended = max((float(event["at"]) for event in _of(run.events, "end")), default=0.0)
    return any(
        one.fault.kind == "partition" and one.at + one.fault.duration_s + RETURN_S > ended
        for one in run.injections
    )


def _returned(run: Finished) -> str:
    count = len(_of(run.events, "lost-steps"))
    return f"{count} returns to a checkpoint" if count else ""


def _excused(run: Finished, given_up: dict[str, Any]) -> bool:
    """Whether the checkpoint of this event may be given up. While it was due, its disk was full, or
    a node died under `replay`, so that its peer has no state of exactly that step (decision 041).
    """
    begin, end = _due_time(run, int(given_up["step"]))
    end = min(end, float(given_up["at"]))
    full = any(
        one.fault.disk in ("run", "checkpoints")
        and not one.note
        and one.at <= end
        and one.at + one.fault.duration_s >= begin
        for one in run.injections
    )
    replay = any("replay" in str(event["text"]) for event in _of(run.events, "plan"))
    return full or (replay and any(begin <= at <= end for at, _ in run.destroyed))


def _due_time(run: Finished, step: int) -> tuple[float, float]:
    """Return the earliest and the latest time at which the checkpoint of `step` may be written."""
    ends = [float(event["at"]) for event in _of(run.events, "step") if event["step"] == step - 1]
    if not ends:
        return -math.inf, math.inf
    late = any(text.split()[0] in DELAYS for text in run.fired)
    return min(ends) - (HELD_S if late else REPORT_S), max(ends) + WRITING_S


def healthy_lost(run: Finished) -> list[str]:
    """Return the nodes that were lost without a fault that explains it: the node was destroyed
    before, or was cut off from the coordinator for the time after which silence is a loss."""
    return sorted(
        {
            str(event["node"])
            for event in _of(run.events, "lost")
            if not _destroyed_before(run, event) and not _silenced(run, event)
        }
    )


def _destroyed_before(run: Finished, event: dict[str, Any]) -> bool:
    return any(node == event["node"] and at <= event["at"] for at, node in run.destroyed)


def _silenced(run: Finished, event: dict[str, Any]) -> bool:
    """Whether the node may have been silent for a lease when it was lost. Partitions that follow
    each other before its next message are one silence."""
    began = ended = -math.inf
    for cut in sorted(one for one in run.partitions if one.node == event["node"]):
        if cut.at > ended:
            began = cut.at
        ended = max(ended, cut.heard_at)
        if ended - began >= run.case.silence_s and began <= event["at"] <= ended + RETURN_S:
            return True
    return False


# ---- copies ----


def _copies_away(run: Finished) -> str:
    """Return which layers had copies only on nodes that were destroyed or cut off; "": none. A job
    with a checkpoint does not wait for a node that is cut off (docs/decisions/038)."""
    cut = [(e["at"], str(e["node"])) for e in _of(run.events, "lost") if _silenced(run, e)]
    return layers_lost(replace(run, destroyed=[*run.destroyed, *cut]))


class History(Protocol):
    """What happened to the copies of a job."""

    @property
    def events(self) -> list[dict[str, Any]]: ...

    @property
    def destroyed(self) -> list[tuple[float, str]]: ...

    @property
    def corrupted(self) -> list[float]: ...


@dataclass
class _Copies:
    """The copies of one plan. `gone`: nodes that lost their memory. `refused`: copies at peers were
    refused, or are wrong, and nobody tells whether the peers have all others. A newer plan begins
    with new copies, and agents report refusals again."""

    plan: Plan
    gone: set[str]
    refused: bool = False


def layers_lost(run: History) -> str:
    """Return which layers lost all their copies at some time, by the faults; "": none.

    A destroyed node that joins again has none of its former copies, but can have those of later
    plans.
    """
    plans: list[_Copies] = []
    gone: set[str] = set()
    for _, kind, value in sorted(_history(run), key=lambda item: item[0]):
        if kind == "plan":
            plans.append(_Copies(parse_plan(str(value["text"])), set(gone)))
        elif kind == "protected":
            plans = [one for one in plans if one.plan.epoch >= int(value["epoch"])]
        elif kind == "refused":
            for one in plans:
                one.refused = True
        elif kind == "joined":
            gone.discard(str(value["node"]))
        elif kind == "destroyed":
            gone.add(str(value["node"]))
            for number, one in enumerate(plans):
                one.gone.add(str(value["node"]))
                layers = _without_copies(one.plan, one.gone, not one.refused and not number)
                if layers:
                    where = f"{sorted(one.gone)} only"
                    return f"layers {layers} of epoch {one.plan.epoch} were on {where}"
    return ""


def _history(run: History) -> Iterable[tuple[float, str, dict[str, Any]]]:
    for event in run.events:
        if event["kind"] in ("plan", "protected", "joined"):
            yield event["at"], event["kind"], event
        elif event["kind"] in ("backup-short", "copy-corrupt"):
            yield event["at"], "refused", event
        elif event["kind"] == "drained":
            yield event["at"], "destroyed", event
    for at in run.corrupted:
        yield at, "refused", {}
    for at, node in run.destroyed:
        yield at, "destroyed", {"node": node}


def _without_copies(plan: Plan, gone: set[str], peers_count: bool) -> list[int]:
    """Return the layers of a plan whose copies were all on these nodes. `peers_count`: the copies
    at the peers were whole."""
    peers = dict(plan.peers)
    held: dict[int, set[str]] = {}
    for _, _, stage in plan.stages():
        node = stage.unit.node
        places = {node}
        if peers_count and node in peers and not plan.state.startswith("replica"):
            places.add(peers[node])
        for layer in range(stage.first, stage.last):
            if "sharded" in plan.state and places <= gone:
                return [layer]  # each holder has a portion of its own
            held.setdefault(layer, set()).update(places)
    return sorted(layer for layer, nodes in held.items() if nodes <= gone)


def _of(events: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


# ---- the files of a run ----


def destroyed_nodes(
    case: Case, run_dirs: Sequence[Path], injections: Sequence[Injection]
) -> list[tuple[float, str]]:
    """Return when each node lost its memory, by the files of injected faults."""
    found = [
        (one.at, one.fault.node)
        for one in injections
        if one.fault.kind == "oom" and one.fault.target == "agent" and not one.note
    ]
    killed = ((at, spec.node) for at, spec in _marks(case, run_dirs) if spec.kind is FaultKind.KILL)
    return sorted([*found, *killed])


def partitions(
    case: Case, run_dirs: Sequence[Path], injections: Sequence[Injection]
) -> list[Partition]:
    """Return when each node was cut off from the coordinator."""
    found = [
        Partition(one.at, one.at + one.fault.duration_s, one.fault.node, dropped=True)
        for one in injections
        if one.fault.kind == FaultKind.PARTITION and not one.note
    ]
    muted = (
        Partition(at, at + spec.duration_s, spec.node, dropped=False)
        for at, spec in _marks(case, run_dirs)
        if spec.kind is FaultKind.PARTITION
    )
    return sorted([*found, *muted])


def corruptions(case: Case, run_dirs: Sequence[Path]) -> list[float]:
    """Return when all copies of a vault got a wrong byte."""
    return [at for at, spec in _marks(case, run_dirs) if spec.kind is FaultKind.CORRUPT]


def _marks(case: Case, run_dirs: Sequence[Path]) -> Iterable[tuple[float, FaultSpec]]:
    """Yield (time, fault) for each fault that the product has carried out."""
    for number, spec in enumerate(case.injected):
        for run_dir in run_dirs:
            mark = run_dir / "faults" / f"{number}.fired"
            if mark.exists():
                yield mark.stat().st_mtime, spec


def fired(case: Case, run_dirs: Sequence[Path], injections: Sequence[Injection]) -> list[str]:
    """Return the texts of the faults that were carried out."""
    found = [
        spec.text
        for number, spec in enumerate(case.injected)
        if any((run_dir / "faults" / f"{number}.fired").exists() for run_dir in run_dirs)
    ]
    done = [one.fault for one in injections if not one.note]
    texts = [text for text in case.faults if case.outer(text)]
    return found + [text for text, own in zip(texts, case.own, strict=True) if own in done]


def read_checkpoints(folder: Path) -> tuple[dict[int, str], tuple[str, ...]]:
    """Read all files of all checkpoints that have their final name. Return the hash of the
    parameters by step of those that are whole, and the problem of each other one."""
    whole: dict[int, str] = {}
    damaged = []
    for path in sorted(folder.glob("step-*")):
        number = path.name.removeprefix("step-")
        if number.isdigit():
            try:
                whole[int(number)] = verified_sha256(path, int(number))
            except (ElasticError, OSError, AssertionError) as error:
                damaged.append(f"{path.name}: {error}")
    return whole, tuple(damaged)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; {} if there is none."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}
