"""Small jobs, traces and run directories for tests of the micro-batch level."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_sim.microbatches import world
from elastic_sim.microbatches.physics import MicrobatchPhysics
from elastic_sim.microbatches.recorded_run import RunHistory, history_of
from elastic_sim.microbatches.world import AnchoredEvent
from elastic_sim.traces.trace import ADD, REMOVE, Event, Trace, build_trace

from elastic.core.job.state import Policy
from elastic.core.protocol.fault_spec import FaultSpec, parse_fault
from elastic.domain import codec
from elastic.domain.types import JobSpec, LayerSpec
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile

EPOCH_S = 1_700_000_000.0


@dataclass(frozen=True, kw_only=True)
class MicrobatchJob:
    """A training job and the user's settings for it."""

    microbatches: int
    steps: int
    min_nodes: int = 1
    max_nodes: int = 1
    tokens_per_microbatch: int = 0
    backup: str = "auto"
    pipelines: str = "auto"
    schedule: str = "auto"
    checkpoint_every: int = 0

    def spec(self, known: Profile) -> JobSpec:
        return JobSpec(
            known.layers,
            self.microbatches,
            self.steps,
            tokens_per_microbatch=self.tokens_per_microbatch,
            checkpoint_every=self.checkpoint_every,
        )

    def policy(self, known: Profile) -> Policy:
        return Policy(
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            backup=self.backup,
            shape=self.pipelines,
            schedule=self.schedule,
            profile=known,
        )


@dataclass(frozen=True)
class Outcome:
    """A simulated run with the history that its events describe."""

    phase: str
    reason: str
    events: Sequence[dict[str, Any]]
    history: RunHistory

    @property
    def recoveries(self) -> tuple[dict[str, Any], ...]:
        return self.history.recoveries

    @property
    def step_s(self) -> list[float]:
        """Seconds of each completed step."""
        return [seconds for _, _, seconds, _ in self.history.steps]


def simulate(
    trace: Trace,
    known: Profile,
    job: MicrobatchJob,
    physics: MicrobatchPhysics,
    seed: int = 0,
    anchored: Sequence[AnchoredEvent] = (),
    *,
    accelerated: bool = True,
) -> Outcome:
    found = world.simulate(
        trace,
        job.spec(known),
        job.policy(known),
        physics,
        seed,
        anchored,
        accelerated=accelerated,
    )
    return Outcome(found.phase.value, found.reason, found.events, history_of(found.events))


JOB = MicrobatchJob(
    microbatches=8,
    steps=20,
    min_nodes=3,
    max_nodes=8,
    backup="stream+snapshot",
    tokens_per_microbatch=4,
)
GRADIENTS = ("stream", "stream:4", "reduce", "reduce:2", "log", "recompute")
STATES = ("snapshot", "replica", "replay", "replay:3")
SHARDED = ("snapshot/sharded", "replay:2/sharded")
PAIRS = tuple(f"{g}+{s}" for g in GRADIENTS for s in (*STATES, *SHARDED))


def profile(layers: int = 8, seconds: float = 0.03, bytes_per_s: float = 50e6) -> Profile:
    times = LayerTimes(seconds / 3, 2 * seconds / 3, seconds / 3, seconds / 3)
    layer = LayerSpec(
        1 << 18, 1 << 19, 1 << 18, times.forward_s, times.backward_s, output_bytes=1 << 14
    )
    return Profile(
        model="equal",
        layers=(layer,) * layers,
        devices=(Device("a", (times,) * layers),),
        link=LinkProfile(bytes_per_s, 1e-4),
        copy_bytes_per_s=1e9,
    )


def steady(nodes: int, end_s: float = 120.0, *later: Event) -> Trace:
    """Return a trace of nodes present from the beginning, and later events."""
    start = tuple(Event(0.0, ADD, f"node{i}") for i in range(nodes))
    return build_trace((*start, *later), end_s, "made for a test")


def lost(seconds: float, node: int, notice_s: float = 0.0) -> Event:
    return Event(seconds, REMOVE, f"node{node}", notice_s=notice_s)


def came(seconds: float, node: int) -> Event:
    return Event(seconds, ADD, f"node{node}")


def random_trace(seed: int, events: int = 6) -> Trace:
    """Return a trace of nodes in two zones with random joins, losses and notices."""
    rng = random.Random(seed)
    n = rng.randint(4, 8)
    found = [Event(0.0, ADD, f"node{i}", rng.choice("ab")) for i in range(n)]
    there, now = [event.node for event in found], 7.0
    for number in range(events):
        now += rng.choice([0.0, rng.uniform(0.05, 6.0), 8.0])
        if rng.random() < 0.5 and len(there) > 2:
            node = there.pop(rng.randrange(len(there)))
            found.append(Event(now, REMOVE, node, notice_s=rng.choice([0.0, 0.0, 3.0])))
        else:
            found.append(Event(now, ADD, f"node{n + number}", rng.choice("ab")))
            there.append(found[-1].node)
    return build_trace(tuple(found), now + 90.0, "made for a test")


def samples_once(outcome: Outcome) -> None:
    """Assert that the completed steps are 0, 1, 2, ..., each once and in order."""
    steps = outcome.history.steps
    assert [step for step, *_ in steps] == list(range(len(steps)))
    ended = [at for _, at, *_ in steps]
    assert ended == sorted(ended)


def acted_run(
    folder: Path,
    job: MicrobatchJob,
    known: Profile,
    trace: Trace,
    physics: MicrobatchPhysics,
    seed: int = 0,
) -> Path:
    """Write the run directory that a real run like the simulated one would leave."""
    outcome = simulate(trace, known, job, physics, seed)
    assert outcome.phase == "finished", outcome.reason
    kills = [e for e in trace.events if e.kind == REMOVE and not e.notice_s]
    faults = tuple(
        replace(parse_fault("kill node=0 phase=optimizer"), node=event.node) for event in kills
    )
    events: list[dict[str, Any]] = [{"at": EPOCH_S, "kind": "job", "steps": job.steps,
        "microbatches": job.microbatches, "tokens_per_microbatch": job.tokens_per_microbatch,
        "tp": 1, "tied": [], "checkpoint_every": 0}]  # fmt: skip
    events += [{**event, "at": EPOCH_S + event["at"]} for event in outcome.events]
    events += [
        {"at": EPOCH_S + e.seconds, "kind": "fault", "number": i} for i, e in enumerate(kills)
    ]
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "config.json").write_text(json.dumps(config(job, known, faults)))
    (folder / "summary.json").write_text(json.dumps({"step_s": outcome.step_s}))
    return folder


def config(job: MicrobatchJob, known: Profile, faults: tuple[FaultSpec, ...]) -> dict[str, Any]:
    return {
        "emulate": True,
        "profile": codec.encode(known),
        "link": codec.encode(LinkProfile()),
        "faults": codec.encode(faults),
        "devices": [],
        "min_nodes": job.min_nodes,
        "max_nodes": job.max_nodes,
        "backup": job.backup,
        "pipelines": job.pipelines,
        "schedule": job.schedule,
        "heartbeat_s": 0.5,
        "lease_s": 3.0,
    }
