"""Durations and random disturbances of the simulated cluster, the same for every policy.

Each constant names its source. The planner does not see the constants; it uses its own estimates,
as in a real run. `usable_trace` turns a recorded trace into the trace that a job sees.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import log2

import numpy as np

from elastic.domain.errors import FieldError
from elastic_sim.steps.engine import Slowdown, StepNoise
from elastic_sim.traces.trace import ADD, MAX_EVENTS, Event, Trace

NOISE_STEPS = 4096
"""Number of noise factors that are drawn; longer runs repeat them."""
Lifetime = tuple[Event, Event | None, float]
"""(add event, remove event or None, time in seconds until which the node is present)."""
MAX_NOISE = 3.0
"""Largest `ClusterPhysics.noise`: one step in twenty is over 360 times longer or shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPhysics:
    """Constants of the simulated cluster: seconds, bytes per second, and fractions."""

    boot_s: float = 45.0
    """Time from a node's arrival until it is usable: image, drivers, processes (Oobleck's artifact:
    node boot)."""
    storage_bytes_per_s: float = 0.78e9
    """Rate of durable storage with up to 30 devices; with more devices it grows in proportion
    (Oobleck's artifact: 14 bytes of 6.7e9 parameters in 120 s on 30 devices)."""
    groups_base_s: float = 0.035
    """Constant part of the time to build an epoch's process groups (Parcae's measurements)."""
    group_s: float = 0.0393
    """Additional time for each group that a node is in (Parcae's measurements); groups of other
    nodes are built at the same time (assumed)."""
    decide_s: float = 0.3
    """Time to gather reports, plan and notify all nodes (32 to 64 of our nodes: 0.02 to 0.6 s)."""
    contention: float = 0.3
    """Seconds that one second of transfer adds to computing (assumed; our CPU runs: 0.1 to 0.5)."""
    copy_bytes_per_s: float = 10e9
    """Rate of copies from device to host memory (PCIe 3 x16, somewhat below its peak: assumed)."""
    copy_exposed: float = 0.1
    """Fraction of the time of device copies that lengthens a step. The rest overlaps with computing
    (assumed)."""
    noise: float = 0.02
    """Standard deviation of the logarithm of a step's duration (assumed)."""
    spread_s: float = 0.0
    """Losses recorded at one moment happen within this time before it; traces only have minutes."""
    stragglers_per_node_h: float = 0.0
    """Rate at which nodes become slow, per node-hour."""
    straggler_factor: float = 1.5
    """Factor on the compute time of a slow node."""
    straggler_s: float = 900.0
    """Mean duration of a slowdown (exponential)."""

    def __post_init__(self) -> None:
        positive = ("storage_bytes_per_s", "copy_bytes_per_s", "straggler_s")
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            least = 1e-9 if name in positive else 1.0 if name == "straggler_factor" else 0.0
            most = MAX_NOISE if name == "noise" else 1e18
            if not isinstance(value, (int, float)) or not least <= value <= most:
                upto = "up" if most == 1e18 else f"to {most:g}"
                raise FieldError(f"physics.{name}", value, f"a number from {least:g} {upto}")

    def restart_s(self, devices: int) -> float:
        """Return the seconds to restart all processes, which do not load the state.

        50 s at 16 devices and 58 s more for each doubling, fitted to Varuna's 49 to 112 s at 15 to
        30 devices (Oobleck's artifact) and ByteRobust's 454 s at 2,048 and 545 s at 4,096 devices.
        """
        return 50.0 + 58.0 * max(0.0, log2(max(devices, 1) / 16))

    def storage_s(self, nbytes: float, devices: int) -> float:
        """Return the seconds in which all devices together write or read durable storage."""
        return nbytes / (self.storage_bytes_per_s * max(1.0, devices / 30))

    def host_copy_s(self, nbytes: float, devices: int) -> float:
        """Return the seconds in which all devices together copy bytes to host memory."""
        return nbytes / (self.copy_bytes_per_s * max(1, devices))

    @property
    def exposed_copy_bytes_per_s(self) -> float:
        """Bytes copied from devices per second that the copies add to a step; 0: they add none."""
        return self.copy_bytes_per_s / self.copy_exposed if self.copy_exposed else 0.0

    def groups_s(self, pipelines: int, depth: int) -> float:
        """Return the seconds to build process groups while the processes stay.

        A node counts as a member of `pipelines` + `depth` + 1 groups.
        """
        return self.groups_base_s + self.group_s * (pipelines + depth + 1)


def physics_from_settings(settings: Sequence[str]) -> ClusterPhysics:
    """Return the physics with NAME=NUMBER settings changed. Raises FieldError."""
    names = [field.name for field in fields(ClusterPhysics)]
    changes = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            changes[name] = float(text)
        except ValueError:
            raise FieldError("--physics", setting, "write NAME=NUMBER, as boot_s=90") from None
        if name not in names:
            raise FieldError("--physics", setting, f"the names are {', '.join(names)}")
    return ClusterPhysics(**changes)


def step_noise(physics: ClusterPhysics, seed: int) -> StepNoise | None:
    """Return the noise of step durations, the same for every policy; None: no noise."""
    if not physics.noise:
        return None
    draw = np.random.default_rng((seed, 1))
    factors = np.exp(draw.normal(0.0, physics.noise, NOISE_STEPS)).tolist()
    return lambda step: factors[step % NOISE_STEPS]


def draw_slowdowns(physics: ClusterPhysics, trace: Trace, seed: int) -> list[Slowdown]:
    """Return the intervals in which nodes are slow, the same for every policy."""
    if not physics.stragglers_per_node_h:
        return []
    rng = random.Random(f"{seed} stragglers")
    found, lifetimes = [], node_lifetimes(trace)
    node_s = sum(until - event.seconds for event, _, until in lifetimes)
    expected = node_s / (3600 / physics.stragglers_per_node_h + physics.straggler_s)
    if expected > MAX_EVENTS:
        remedy = f"{expected:.2g} slowdowns are expected, and at most {MAX_EVENTS:.2g} are possible"
        raise FieldError("physics.stragglers_per_node_h", physics.stragglers_per_node_h, remedy)
    for event, _, until in lifetimes:
        at = event.seconds
        while True:
            at += rng.expovariate(physics.stragglers_per_node_h / 3600)
            ends = at + rng.expovariate(1 / physics.straggler_s)
            if at >= until:
                break
            begin_ms, end_ms = round(at * 1000), round(ends * 1000)
            found.append(Slowdown(begin_ms, end_ms, event.node, physics.straggler_factor))
            at = ends
    return found


def node_lifetimes(trace: Trace) -> list[Lifetime]:
    """Return the lifetimes of all nodes, in the order in which they were added."""
    found: list[Lifetime] = []
    present: dict[str, int] = {}
    for event in trace.events:
        if event.kind == ADD:
            present[event.node] = len(found)
            found.append((event, None, trace.end_s))
        else:
            number = present.pop(event.node)
            found[number] = found[number][0], event, event.seconds
    return found


def usable_trace(trace: Trace, physics: ClusterPhysics, seed: int) -> Trace:
    """Return the trace that a job sees: new nodes appear once they have booted.

    The losses of one moment are spread over the time before it. A node that is lost before it has
    booted is left out.
    """
    rng = random.Random(f"{seed} spread")
    events: list[Event] = []
    for event, removal, until in node_lifetimes(trace):
        begin = event.seconds + (physics.boot_s if event.seconds > 0 else 0.0)
        if removal:
            until = max(event.seconds, until - rng.uniform(0.0, physics.spread_s))
        if begin < until:
            events.append(replace(event, seconds=begin))
            if removal:
                events.append(replace(removal, seconds=until))
    events.sort(key=lambda event: (event.seconds, event.kind == ADD))
    return replace(trace, events=tuple(events))


def node_ms(trace: Trace) -> int:
    """Return the node-milliseconds of all nodes while present, rounded as the engine rounds."""
    return sum(
        round(1000 * until) - round(1000 * event.seconds)
        for event, _, until in node_lifetimes(trace)
    )
