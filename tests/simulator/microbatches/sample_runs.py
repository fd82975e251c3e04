"""Small jobs, traces and run directories for tests of the micro-batch level."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_sim.microbatches.meter import MicrobatchResult
from elastic_sim.microbatches.physics import MicrobatchPhysics
from elastic_sim.microbatches.world import MicrobatchJob, simulate
from elastic_sim.steps.time_accounting import TimeAccount
from elastic_sim.traces.trace import ADD, REMOVE, Event, Trace, build_trace

from elastic.core.protocol.fault_spec import FaultSpec, parse_fault
from elastic.domain import codec
from elastic.domain.types import LayerSpec
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile

EPOCH_S = 1_700_000_000.0
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


def samples_once(outcome: MicrobatchResult) -> None:
    """Assert that the completed steps are 0, 1, 2, ..., each once and in order."""
    assert [one.step for one in outcome.steps] == list(range(len(outcome.steps)))
    ended = [one.ended_s for one in outcome.steps]
    assert ended == sorted(ended)


def dumped(outcome: MicrobatchResult) -> str:
    """Return all results as text."""
    return codec.dumps({"steps": outcome.steps, "recoveries": outcome.recoveries,
                        "events": outcome.events,
                        "progress": outcome.progress, "spans": outcome.account.spans})  # fmt: skip


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
    (folder / "summary.json").write_text(
        json.dumps({"step_s": [one.seconds for one in outcome.steps]})
    )
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
        "heartbeat_s": job.heartbeat_s,
        "lease_s": job.lease_s,
    }


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
