"""What happens in the simulated world, the same for every policy: how long things take, and what goes wrong.

Constants carry their source. The planner never sees them: it goes by its own estimates, as in a real run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import log2

import numpy as np

from elastic.domain.errors import FieldError
from elastic_sim.steps.engine import Noise, Slowdown
from elastic_sim.traces.trace import ADD, Event, Trace

NOISE_STEPS = 4096
"""Factors that are drawn; longer runs go round."""
MOST_NOISE = 3.0
"""One step in twenty then takes 360 times what it should, or a 360th of it: more than that is a slip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """How long things take. Seconds, bytes, fractions."""

    boot_s: float = 45.0
    """From a node's coming to its being of use: image, drivers, processes (Oobleck's artifact: node boot)."""
    storage_bytes_per_s: float = 0.78e9
    """Durable storage of up to 30 devices, more in proportion (Oobleck's artifact: 14 bytes of 6.7e9 parameters in
    120 s on 30 devices)."""
    groups_base_s: float = 0.035
    """Building the groups of an epoch (Parcae's measurements) ..."""
    group_s: float = 0.0393
    """... and for each group that a node is in (the same; groups of other nodes are built meanwhile: assumed)."""
    decide_s: float = 0.3
    """Gathering reports, planning, telling everybody (ours on 32 to 64 nodes: 0.02 to 0.6 s)."""
    contention: float = 0.3
    """Seconds that a second of transfer adds to computing (assumed; our CPU runs: 0.1 to 0.5)."""
    copy_bytes_per_s: float = 10e9
    """From a device to host memory (PCIe 3 x16, somewhat below its peak: assumed)."""
    copy_exposed: float = 0.1
    """Of the seconds of such copies, on streams of their own beside computing, what lengthens a step (assumed)."""
    noise: float = 0.02
    """Standard deviation of the logarithm of a step's length (assumed)."""
    spread_s: float = 0.0
    """Losses of one moment really happen within so many seconds before it: recorded traces know minutes only."""
    stragglers_per_node_h: float = 0.0
    """Nodes that turn slow."""
    straggler_factor: float = 1.5
    """How much slower."""
    straggler_s: float = 900.0
    """For how long, on average (exponential)."""

    def __post_init__(self) -> None:
        positive = ("storage_bytes_per_s", "copy_bytes_per_s", "straggler_s")
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1e-9 if field.name in positive else 1.0 if field.name == "straggler_factor" else 0.0
            most = MOST_NOISE if field.name == "noise" else 1e18
            if not isinstance(value, (int, float)) or not least <= value <= most:
                upto = "up" if most == 1e18 else f"to {most:g}"
                raise FieldError(f"physics.{field.name}", value, f"a number from {least:g} {upto}")

    def restart_s(self, devices: int) -> float:
        """All processes are started again: launch, imports, contexts, groups; state not counted. 50 s at 16 devices,
        58 s more for each doubling: through Varuna's 49 to 112 s at 15 to 30 (Oobleck's artifact) and ByteRobust's
        454 s at 2,048, 545 s at 4,096."""
        return 50.0 + 58.0 * max(0.0, log2(max(devices, 1) / 16))

    def storage_s(self, nbytes: float, devices: int) -> float:
        """Writing to durable storage, or reading from it, all devices together."""
        return nbytes / (self.storage_bytes_per_s * max(1.0, devices / 30))

    @property
    def copying_bytes_per_s(self) -> float:
        """As a step feels it; 0: not at all."""
        return self.copy_bytes_per_s / self.copy_exposed if self.copy_exposed else 0.0

    def groups_s(self, pipelines: int, depth: int) -> float:
        """Processes stay, groups are built anew: a node is in one over its pipeline's `depth` and up to `pipelines`."""
        return self.groups_base_s + self.group_s * (pipelines + depth + 1)


def of_settings(settings: Sequence[str], base: Physics | None = None) -> Physics:
    """Physics with NAME=NUMBER settings changed. Raises FieldError."""
    names = [field.name for field in fields(Physics)]
    changes = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            changes[name] = float(text)
        except ValueError:
            raise FieldError("--physics", setting, "write NAME=NUMBER, as boot_s=90") from None
        if name not in names:
            raise FieldError("--physics", setting, f"the names are {', '.join(names)}")
    return replace(base or Physics(), **changes)


def noise_of(physics: Physics, seed: int) -> Noise | None:
    """The same for every policy: how long the n-th step takes."""
    if not physics.noise:
        return None
    draw = np.random.default_rng((seed, 1))
    factors = np.exp(draw.normal(0.0, physics.noise, NOISE_STEPS)).tolist()
    return lambda step: factors[step % NOISE_STEPS]


def slowdowns_of(physics: Physics, trace: Trace, seed: int) -> list[Slowdown]:
    """When which node is slow."""
    if not physics.stragglers_per_node_h:
        return []
    draw = random.Random(f"{seed} stragglers")
    found = []
    for event, removal in stays(trace):
        at, until = event.seconds, removal.seconds if removal else trace.end_s
        while True:
            at += draw.expovariate(physics.stragglers_per_node_h / 3600)
            ends = at + draw.expovariate(1 / physics.straggler_s)
            if at >= until:
                break
            found.append(Slowdown(round(at * 1000), round(ends * 1000), event.node, physics.straggler_factor))
            at = ends
    return found


def stays(trace: Trace) -> list[tuple[Event, Event | None]]:
    """(coming, going or None) of every node, in the order of their coming."""
    found: dict[int, tuple[Event, Event | None]] = {}
    here: dict[str, int] = {}
    for number, event in enumerate(trace.events):
        if event.kind == ADD:
            here[event.node] = number
            found[number] = event, None
        else:
            first = here.pop(event.node)
            found[first] = found[first][0], event
    return list(found.values())


def spread(trace: Trace, physics: Physics, seed: int) -> Trace:
    """The trace with the losses of one moment spread over the time before it."""
    draw = random.Random(f"{seed} spread")
    there = []
    for event, removal in stays(trace):
        until = removal.seconds if removal else trace.end_s
        if removal and physics.spread_s:
            until = max(event.seconds, until - draw.uniform(0.0, physics.spread_s))
        there.append((event, removal, event.seconds, until))
    return _of_stays(trace, there)


def prepared(trace: Trace, physics: Physics, seed: int) -> Trace:
    """The trace as a job sees it: spread, and nodes that come are of use once booted."""
    there = []
    for event, removal in stays(spread(trace, physics, seed)):
        begin = event.seconds + (physics.boot_s if event.seconds > 0 else 0.0)
        there.append((event, removal, begin, removal.seconds if removal else trace.end_s))
    return _of_stays(trace, there)


def _of_stays(trace: Trace, there: Sequence[tuple[Event, Event | None, float, float]]) -> Trace:
    """A trace of (coming, going, from, until); who is there for no time is left out."""
    rows: list[tuple[float, Event]] = []
    for event, removal, begin, until in there:
        if begin >= until:
            continue
        rows.append((begin, replace(event, seconds=begin)))
        if removal:
            rows.append((until, replace(removal, seconds=until)))
    rows.sort(key=lambda row: (row[0], row[1].kind == ADD))
    return Trace(tuple(event for _, event in rows), trace.end_s, trace.origin)


def node_ms(trace: Trace) -> int:
    """Node-milliseconds of all nodes while they are there, moments rounded as the engine does."""
    return sum(
        round(1000 * (removal.seconds if removal else trace.end_s)) - round(1000 * event.seconds)
        for event, removal in stays(trace)
    )
