"""DOC"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic.core.protocol.fault_spec import FaultKind, FaultSpec, Phase
from elastic.domain.codec import decode
from elastic.domain.errors import FieldError
from elastic.planning.cost.profile import Link, Profile, check_profile
from elastic_sim.microbatches.physics import Physics
from elastic_sim.microbatches.world import Anchored, Job
from elastic_sim.traces.trace import ADD, REMOVE, Event, Trace, check

PHASES = ("detect_s", "decide_s", "transfer_s", "rebuild_s", "total_s")
WARM = 2
"""Steps of an epoch that are not counted as undisturbed."""


@dataclass(frozen=True, slots=True)
class Story:
    steps: tuple[tuple[int, float, float, int], ...]
    """(step, when it was done, its seconds, epoch), those that count, in order."""
    recoveries: tuple[dict[str, Any], ...]
    plannings: tuple[tuple[str, float], ...]
    """(kind of cause, seconds from when all had halted until the plan went out), for each recovery
    that has one cause."""
    starts: tuple[float, ...]
    """Seconds from a later node's joining until it pulled state."""
    prefetches: tuple[float, ...]
    """Seconds from there to the decision to let it in."""

    @property
    def seconds(self) -> float:
        """From the end of the first step to that of the last one."""
        return self.steps[-1][1] - self.steps[0][1] if self.steps else 0.0

    def planning_s(self, joins: bool) -> list[float]:
        """Of plans for nodes that joined, or of all others."""
        return [seconds for kind, seconds in self.plannings if (kind == "join") is joins]

    def undisturbed(self) -> Iterator[tuple[int, float]]:
        """(step, its seconds) of those in whose epoch `WARM` others came before, and after which it went on."""
        epochs = [epoch for _, _, _, epoch in self.steps]
        for at, (step, _, seconds, epoch) in enumerate(self.steps[:-1]):
            if at >= WARM and epochs[at - WARM] == epoch == epochs[at + 1]:
                yield step, seconds


def tell(events: Sequence[dict[str, Any]]) -> Story:
    """Read events in their order."""
    steps: dict[int, tuple[int, float, float, int]] = {}
    recoveries, halts, plans = list[dict[str, Any]](), dict[int, float](), dict[int, float]()
    pulled = readiness(events)
    starts, prefetches, epoch, trained = list[float](), list[float](), 0, False
    for event in events:
        at = float(event["at"])
        match event["kind"]:
            case "step":
                steps[event["step"]] = event["step"], at, float(event["seconds"]), epoch
            case "lost-steps":
                steps = {step: told for step, told in steps.items() if step < event["from_step"]}
            case "halt":
                halts[event["epoch"]] = at
                for node in event["cause_nodes"] if event["cause_kind"] == "join" else ():
                    if node in pulled:
                        prefetches.append(at - pulled.pop(node))
            case "plan":
                epoch = event["epoch"]
                plans[epoch], trained = at, True
            case "recovery":
                recoveries.append(event)
            case "joined" if trained:
                if event["node"] in pulled:
                    starts.append(pulled[event["node"]] - at)
    plannings = [
        (str(r["cause_kinds"][0]), plans[r["epoch"]] - halts[r["epoch"]] - r["decide_s"])
        for r in recoveries
        if r["epoch"] in plans and len(r["cause_kinds"]) == 1
    ]
    ordered = tuple(steps[step] for step in sorted(steps))
    return Story(ordered, tuple(recoveries), tuple(plannings), tuple(starts), tuple(prefetches))


def readiness(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """When each node that joined later was first told to pull state, by node."""
    found: dict[str, float] = {}
    for event in events:
        if event["kind"] == "prefetch":
            for node in event["nodes"]:
                found.setdefault(node, float(event["at"]))
    return found


def pairs(measured: Story, predicted: Story) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Recoveries of both that are the same one: of the same kind, for the same number of nodes, in order."""
    found, at = list[tuple[dict[str, Any], dict[str, Any]]](), 0
    for one in measured.recoveries:
        for other in range(at, len(predicted.recoveries)):
            if _kind(predicted.recoveries[other]) == _kind(one):
                found.append((one, predicted.recoveries[other]))
                at = other + 1
                break
    return found


def _kind(recovery: dict[str, Any]) -> tuple[Any, ...]:
    return recovery["planned"], recovery["nodes_before"], recovery["nodes_after"]


ACTED = (FaultKind.KILL, FaultKind.DRAIN, FaultKind.JOIN)
"""Injected faults that can be simulated."""
MICROBATCHES = (Phase.START, Phase.FORWARD, Phase.BACKWARD)
NEEDED = {
    "step": ("step", "seconds"),
    "halt": ("epoch", "cause_kind", "cause_nodes"),
    "plan": ("epoch", "text"),
    "joined": ("node",),
    "lost": ("node",),
    "drain": ("node", "deadline_s"),
    "prefetch": ("nodes",),
    "fault": ("number",),
    "recovery": ("planned", "nodes_before", "nodes_after", "epoch", "cause_kinds", "detect_s", "decide_s", "halt_s",
                 "transfer_s", "rebuild_s", "total_s", "pause_s", "microbatches_lost"),
    "lost-steps": ("from_step",),
    "job": ("steps", "microbatches", "tokens_per_microbatch", "tied", "checkpoint_every"),
}  # fmt: skip
"""Fields of events that are read."""


@dataclass(frozen=True, slots=True)
class Recorded:
    job: Job
    profile: Profile
    link: Link
    """How slow links were made."""
    trace: Trace
    """The nodes at the start; later ones are in `anchored`."""
    anchored: tuple[Anchored, ...]
    story: Story

    def physics(self, given: Physics) -> Physics:
        """`given` for this run: its first workers are there when the trace begins."""
        return replace(given, start_s=0.0, bytes_per_s=self.link.bytes_per_s or given.bytes_per_s)


def read(run_dir: Path) -> Recorded:
    """Read a run directory. Raises FieldError naming what is missing or damaged."""
    if not run_dir.is_dir():
        raise FieldError("RUN_DIR", str(run_dir), "a directory that `elastic run --run-dir` wrote")
    config = _object(run_dir / "config.json")
    profile = config.get("profile")
    if not config.get("emulate") or profile is None:
        remedy = "a run of `elastic run --emulate PROFILE`: others' computing times are not known"
        raise FieldError(f"{run_dir / 'config.json'}: emulate", config.get("emulate"), remedy)
    known = decode(Profile, profile, "Profile")
    check_profile(known)
    if not _object(run_dir / "summary.json").get("step_s"):
        raise FieldError(
            f"{run_dir / 'summary.json'}: step_s", None, "a run that finished some steps"
        )
    events = _events(run_dir / "events.jsonl")
    faults = decode(tuple[FaultSpec, ...], config.get("faults", []), "config.json: faults")
    trace, anchored = _trace(events, faults, config, run_dir / "events.jsonl")
    link = decode(
        Link, config.get("link", {"bytes_per_s": 0.0, "latency_s": 0.0}), "config.json: link"
    )
    return Recorded(_job(config, events, run_dir), known, link, trace, anchored, tell(events))


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise FieldError(
            "RUN_DIR", str(path), f"a readable file is needed: {error.strerror}"
        ) from error
    except ValueError as error:
        raise FieldError(str(path), "", f"it is damaged, not JSON: {error}") from error
    if not isinstance(found, dict):
        raise FieldError(str(path), type(found).__name__, "it is damaged: an object is needed")
    return found


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise FieldError(
            "RUN_DIR", str(path), f"a readable file is needed: {error.strerror}"
        ) from error
    found = list[dict[str, Any]]()
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        try:
            event = json.loads(line)
            at, kind = float(event["at"]), event["kind"]
            missing = [name for name in NEEDED.get(kind, ()) if name not in event]
        except (ValueError, KeyError, TypeError) as error:
            raise FieldError(
                where, line[:80].decode(errors="replace"), f"it is damaged: {error}"
            ) from error
        if missing or not at > 0:
            raise FieldError(
                f"{where}: {(missing or ['at'])[0]}", None, "it is damaged: the field is needed"
            )
        found.append(event)
    return found


def _job(config: dict[str, Any], events: list[dict[str, Any]], run_dir: Path) -> Job:
    told = next((event for event in events if event["kind"] == "job"), None)
    if told is None:
        raise FieldError(
            f"{run_dir / 'events.jsonl'}: job",
            None,
            "a run of this version, which writes that event",
        )
    try:
        return Job(
            microbatches=int(told["microbatches"]),
            steps=int(told["steps"]),
            tokens_per_microbatch=int(told["tokens_per_microbatch"]),
            checkpoint_every=int(told["checkpoint_every"]),
            tied=tuple((int(a), int(b)) for a, b in told["tied"]),
            min_nodes=int(config["min_nodes"]),
            max_nodes=int(config["max_nodes"]),
            backup=str(config["backup"]),
            pipelines=str(config["pipelines"]),
            schedule=str(config["schedule"]),
            heartbeat_s=float(config["heartbeat_s"]),
            lease_s=float(config["lease_s"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FieldError(f"{run_dir}: config.json, job", str(error), "it is damaged") from error


def _trace(
    events: list[dict[str, Any]], faults: tuple[FaultSpec, ...], config: dict[str, Any], path: Path
) -> tuple[Trace, tuple[Anchored, ...]]:
    begin = next(
        (float(e["at"]) for e in events if e["kind"] == "halt" and e["cause_kind"] == "start"), None
    )
    ended = [(float(e["at"]), int(e["step"])) for e in events if e["kind"] == "step"]
    if begin is None or not ended:
        raise FieldError(f"{path}: halt, step", None, "a run that began to train")
    zones = {e["node"]: str(e.get("domain", "")) for e in events if e["kind"] == "joined"}
    devices = config.get("devices") or [""]
    start, later = list[Event](), list[tuple[float, Event]]()
    killed, ready = _kills(events, faults), readiness(events)
    for event in events:
        at, node = float(event["at"]), event.get("node", "")
        if event["kind"] == "joined":
            number = len(start) + sum(e.kind == ADD for _, e in later)
            device = (
                devices[number]
                if len(devices) > number
                else devices[0]
                if len(devices) == 1
                else ""
            )
            add = Event(0.0, ADD, node, zones[node], device)
            if at <= begin:
                start.append(add)
            else:
                later.append((ready.get(node, at), add))
        elif event["kind"] == "lost" and node not in killed:
            later.append((at, Event(0.0, REMOVE, node)))
        elif event["kind"] == "drain":
            deadline = float(event["deadline_s"])
            later.append((at + deadline, Event(0.0, REMOVE, node, notice_s=deadline)))
    later += [(at, Event(0.0, REMOVE, node)) for node, (at, _) in killed.items()]
    last = max(at for at, _ in ended) - begin
    trace = check(tuple(start), 4 * last + 60.0, "from events.jsonl", str(path))
    later.sort(key=lambda pair: pair[0])
    told = [_anchored(at, event, begin, ended, event.node in ready) for at, event in later]
    return trace, tuple(_at_its_point(one, killed) for one in told)


def _kills(
    events: list[dict[str, Any]], faults: tuple[FaultSpec, ...]
) -> dict[str, tuple[float, FaultSpec]]:
    """Node: when it was killed, and by which fault."""
    killed = dict[str, tuple[float, FaultSpec]]()
    for event in events:
        if event["kind"] == "fault":
            number = int(event["number"])
            spec = faults[number] if number < len(faults) else None
            if spec is None or spec.kind not in ACTED:
                text = spec.text if spec is not None else str(number)
                raise FieldError(
                    "--fault of the run", text, f"only {', '.join(ACTED)} can be simulated"
                )
            if spec.kind is FaultKind.KILL:
                killed[spec.node] = float(event["at"]), spec
    return killed


def _at_its_point(one: Anchored, killed: dict[str, tuple[float, FaultSpec]]) -> Anchored:
    """A kill in the middle of a step strikes the same piece of work; elsewhere its time is what is known."""
    if one.event.kind != REMOVE or one.event.node not in killed:
        return one
    spec = killed[one.event.node][1]
    return replace(one, fault=spec) if spec.phase in (None, *MICROBATCHES) else one


def _anchored(
    at: float, event: Event, begin: float, ended: list[tuple[float, int]], ready: bool
) -> Anchored:
    told = at - event.notice_s
    before = bisect_right(ended, (told, 1 << 60)) - 1
    since, step = ended[before] if before >= 0 else (begin, -1)
    return Anchored(event, step + 1, at - since, ready)
