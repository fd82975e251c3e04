"""Real runs read from RUN_DIR: the job, the trace of its nodes, and its history.

`history_of` reads the history from events, of events.jsonl or of a simulated run. `read` rebuilds
the trace from events.jsonl: nodes that joined, were killed by an injected fault, were lost or had a
notice. A joining node counts from the time at which it could pull state; its start-up time is
compared separately. Each event is anchored to the beginning of its step, an injected kill to its
micro-batch. Thus an inaccurate prediction of time does not move a fault to another part of a step.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic.core.job.state import Policy
from elastic.core.protocol.fault_spec import FaultKind, FaultSpec, Phase
from elastic.domain.codec import decode, json_fault
from elastic.domain.errors import FieldError
from elastic.domain.types import JobSpec
from elastic.planning.cost.profile import LinkProfile, Profile, check_profile
from elastic_sim.microbatches.physics import MicrobatchPhysics
from elastic_sim.microbatches.world import AnchoredEvent
from elastic_sim.traces.trace import ADD, REMOVE, Event, Trace, build_trace, read_text

LogEvent = dict[str, Any]
"""An event of events.jsonl."""
PHASES = ("detect_s", "decide_s", "transfer_s", "rebuild_s", "total_s")
WARM_UP = 2
"""First steps of an epoch that do not count as undisturbed."""
SIMULATED_FAULTS = (FaultKind.KILL, FaultKind.DRAIN, FaultKind.JOIN)
MICROBATCH_PHASES = (Phase.START, Phase.FORWARD, Phase.BACKWARD)
NEEDED_FIELDS = {
    "step": ("step", "seconds"),
    "halt": ("epoch", "cause_kind", "cause_nodes"),
    "plan": ("epoch",),
    "joined": ("node",),
    "lost": ("node",),
    "drain": ("node", "deadline_s"),
    "prefetch": ("nodes",),
    "fault": ("number",),
    "recovery": ("planned", "nodes_before", "nodes_after", "epoch", "cause_kinds", "detect_s",
                 "decide_s", "halt_s", "transfer_s", "rebuild_s", "total_s", "pause_s",
                 "microbatches_lost"),
    "lost-steps": ("from_step",),
    "job": ("steps", "microbatches", "tokens_per_microbatch", "tied", "checkpoint_every"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunHistory:
    """Steps, recoveries and delays of a run."""

    steps: tuple[tuple[int, float, float, int], ...]
    """(step, time of its end, its seconds, epoch) of the completed steps, in order."""
    recoveries: tuple[LogEvent, ...]
    plannings: tuple[tuple[str, float], ...]
    """(kind of cause, seconds from the last halt until the plan was sent) of each recovery with
    one cause."""
    startups: tuple[float, ...]
    """Seconds from the join of each later node until it was ordered to pull state."""
    prefetches: tuple[float, ...]
    """Seconds from the order to pull state until the decision to include the node, of each later
    node."""

    @property
    def seconds(self) -> float:
        """Seconds from the end of the first step to the end of the last one."""
        return self.steps[-1][1] - self.steps[0][1] if self.steps else 0.0

    def planning_s(self, joins: bool) -> list[float]:
        """Return the planning times for joined nodes, or for all other causes."""
        return [seconds for kind, seconds in self.plannings if (kind == "join") is joins]

    def undisturbed(self) -> Iterator[tuple[int, float]]:
        """Yield (step, its seconds) of steps after the warm-up and before the last of an epoch."""
        epochs = [epoch for _, _, _, epoch in self.steps]
        for at, (step, _, seconds, epoch) in enumerate(self.steps[:-1]):
            if at >= WARM_UP and epochs[at - WARM_UP] == epoch == epochs[at + 1]:
                yield step, seconds


def history_of(events: Sequence[LogEvent]) -> RunHistory:
    """Return the history of a run from its events in order."""
    steps: dict[int, tuple[int, float, float, int]] = {}
    recoveries, halts, plans = list[LogEvent](), dict[int, float](), dict[int, float]()
    pulled = _prefetch_times(events)
    startups, prefetches, epoch = list[float](), list[float](), 0
    for event in events:
        at = float(event["at"])
        match event["kind"]:
            case "step":
                steps[event["step"]] = event["step"], at, float(event["seconds"]), epoch
            case "lost-steps":
                steps = {step: kept for step, kept in steps.items() if step < event["from_step"]}
            case "halt":
                halts[event["epoch"]] = at
                for node in event["cause_nodes"] if event["cause_kind"] == "join" else ():
                    if node in pulled:
                        prefetches.append(at - pulled.pop(node))
            case "plan":
                epoch = event["epoch"]
                plans[epoch] = at
            case "recovery":
                recoveries.append(event)
            case "joined" if plans and event["node"] in pulled:
                startups.append(pulled[event["node"]] - at)
    plannings = [
        (str(r["cause_kinds"][0]), plans[r["epoch"]] - halts[r["epoch"]] - r["decide_s"])
        for r in recoveries
        if r["epoch"] in plans and len(r["cause_kinds"]) == 1
    ]
    completed = tuple(steps[step] for step in sorted(steps))
    return RunHistory(
        completed, tuple(recoveries), tuple(plannings), tuple(startups), tuple(prefetches)
    )


def _prefetch_times(events: Iterable[LogEvent]) -> dict[str, float]:
    """Return when each later node was first ordered to pull state, by node."""
    found: dict[str, float] = {}
    for event in events:
        if event["kind"] == "prefetch":
            for node in event["nodes"]:
                found.setdefault(node, float(event["at"]))
    return found


def matched_recoveries(
    measured: RunHistory, predicted: RunHistory
) -> list[tuple[LogEvent, LogEvent]]:
    """Pair recoveries of the same kind between the same numbers of nodes, in order."""
    found, at = list[tuple[LogEvent, LogEvent]](), 0
    for one in measured.recoveries:
        for other in range(at, len(predicted.recoveries)):
            if _kind(predicted.recoveries[other]) == _kind(one):
                found.append((one, predicted.recoveries[other]))
                at = other + 1
                break
    return found


def _kind(recovery: LogEvent) -> tuple[Any, ...]:
    return recovery["planned"], recovery["nodes_before"], recovery["nodes_after"]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A real run, ready for simulation."""

    spec: JobSpec
    policy: Policy
    bytes_per_s: float
    """Emulated speed of slow links; 0: they are not slowed down."""
    trace: Trace
    """Nodes at the start; later ones are in `anchored`."""
    anchored: tuple[AnchoredEvent, ...]
    history: RunHistory

    def physics(self, given: MicrobatchPhysics) -> MicrobatchPhysics:
        """Return `given` for this run, whose first workers are ready when the trace begins."""
        return replace(given, start_s=0.0, bytes_per_s=self.bytes_per_s or given.bytes_per_s)


def read(run_dir: Path) -> RecordedRun:
    """Read a run directory. Raises FieldError that names the missing or damaged part."""
    if not (run_dir / "config.json").is_file():
        remedy = "name a directory that `elastic run --run-dir` wrote, with its config.json"
        raise FieldError("RUN_DIR", str(run_dir), remedy)
    config = _object(run_dir / "config.json")
    if not config.get("emulate") or config.get("profile") is None:
        remedy = "a run of `elastic run --emulate PROFILE`: others' computing times are not known"
        raise FieldError(f"{run_dir / 'config.json'}: emulate", config.get("emulate"), remedy)
    profile = decode(Profile, config["profile"], "Profile")
    check_profile(profile)
    if not _object(run_dir / "summary.json").get("step_s"):
        where = f"{run_dir / 'summary.json'}: step_s"
        raise FieldError(where, None, "a run that finished some steps")
    events = _events(run_dir / "events.jsonl")
    faults = decode(tuple[FaultSpec, ...], config.get("faults", []), "config.json: faults")
    trace, anchored = _trace(events, faults, config, run_dir / "events.jsonl")
    link = decode(LinkProfile, config.get("link", {}), "config.json: link")
    spec, policy = _job(config, events, profile, run_dir)
    return RecordedRun(spec, policy, link.bytes_per_s, trace, anchored, history_of(events))


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(path, "RUN_DIR"))
    except (ValueError, RecursionError) as error:
        raise FieldError(str(path), "", f"it is damaged, not JSON: {json_fault(error)}") from error
    if not isinstance(found, dict):
        raise FieldError(str(path), type(found).__name__, "it is damaged: an object is needed")
    return found


def _events(path: Path) -> list[LogEvent]:
    found = list[LogEvent]()
    for number, line in enumerate(read_text(path, "RUN_DIR").splitlines(), 1):
        where = f"{path}:{number}"
        try:
            event = json.loads(line)
            at, kind = float(event["at"]), event["kind"]
            missing = [name for name in NEEDED_FIELDS.get(kind, ()) if name not in event]
        except (ValueError, KeyError, TypeError) as error:
            raise FieldError(where, line[:80], f"it is damaged: {error}") from error
        if missing or not at > 0:
            name = (missing or ["at"])[0]
            raise FieldError(f"{where}: {name}", None, "it is damaged: the field is needed")
        found.append(event)
    return found


def _job(
    config: dict[str, Any], events: list[LogEvent], profile: Profile, run_dir: Path
) -> tuple[JobSpec, Policy]:
    event = next((event for event in events if event["kind"] == "job"), None)
    if event is None:
        remedy = "a run of this version, which writes that event"
        raise FieldError(f"{run_dir / 'events.jsonl'}: job", None, remedy)
    try:
        spec = JobSpec(
            layers=profile.layers,
            n_microbatches=int(event["microbatches"]),
            n_steps=int(event["steps"]),
            tokens_per_microbatch=int(event["tokens_per_microbatch"]),
            checkpoint_every=int(event["checkpoint_every"]),
            tied=tuple((int(a), int(b)) for a, b in event["tied"]),
        )
        policy = Policy(
            min_nodes=int(config["min_nodes"]),
            max_nodes=int(config["max_nodes"]),
            backup=str(config["backup"]),
            shape=str(config["pipelines"]),
            schedule=str(config["schedule"]),
            heartbeat_s=float(config["heartbeat_s"]),
            lease_s=float(config["lease_s"]),
            profile=profile,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FieldError(f"{run_dir}: config.json, job", str(error), "it is damaged") from error
    return spec, policy


def _trace(
    events: list[LogEvent], faults: tuple[FaultSpec, ...], config: dict[str, Any], path: Path
) -> tuple[Trace, tuple[AnchoredEvent, ...]]:
    """Return the nodes at the start, and the later events."""
    starts = (e for e in events if e["kind"] == "halt" and e["cause_kind"] == "start")
    begin = next((float(event["at"]) for event in starts), None)
    ended = [(float(e["at"]), int(e["step"])) for e in events if e["kind"] == "step"]
    if begin is None or not ended:
        raise FieldError(f"{path}: halt, step", None, "a run that began to train")
    devices = config.get("devices") or [""]
    start, later = list[Event](), list[tuple[float, Event]]()
    killed, ready = _kills(events, faults), _prefetch_times(events)
    joined = 0
    for event in events:
        at, node = float(event["at"]), event.get("node", "")
        if event["kind"] == "joined":
            several = len(devices) > joined
            device = devices[joined] if several else devices[0] if len(devices) == 1 else ""
            joined += 1
            add = Event(0.0, ADD, node, str(event.get("domain", "")), device)
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
    trace = build_trace(tuple(start), 4 * last + 60.0, "from events.jsonl", str(path))
    # A kill inside a step strikes the same piece of work; other kills keep their time.
    inside = {n: s for n, (_, s) in killed.items() if s.phase in (None, *MICROBATCH_PHASES)}
    anchored = list[AnchoredEvent]()
    for at, change in sorted(later, key=lambda pair: pair[0]):
        before = bisect_right(ended, (at - change.notice_s, 1 << 60)) - 1
        since, step = ended[before] if before >= 0 else (begin, -1)
        fault = inside.get(change.node) if change.kind == REMOVE else None
        anchored.append(AnchoredEvent(change, step + 1, at - since, change.node in ready, fault))
    return trace, tuple(anchored)


def _kills(
    events: list[LogEvent], faults: tuple[FaultSpec, ...]
) -> dict[str, tuple[float, FaultSpec]]:
    """Return the time and the fault of each kill, by node. Raises FieldError for other faults."""
    killed = dict[str, tuple[float, FaultSpec]]()
    for event in events:
        if event["kind"] == "fault":
            number = int(event["number"])
            spec = faults[number] if number < len(faults) else None
            if spec is None or spec.kind not in SIMULATED_FAULTS:
                text = spec.text if spec is not None else str(number)
                remedy = f"only {', '.join(SIMULATED_FAULTS)} can be simulated"
                raise FieldError("--fault of the run", text, remedy)
            if spec.kind is FaultKind.KILL:
                killed[spec.node] = float(event["at"]), spec
    return killed
