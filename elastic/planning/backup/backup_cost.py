"""What each pair of backup schemes costs a plan, failure-free and at a loss, and which pair is best. Pure.

Symbols: of a worker, P bytes of parameters and optimizer state, G bytes of accumulated gradient (with tensor
parallelism its part of the node's), B bytes/s of its link, r bytes/s at which it copies to shared memory, x the
contention (seconds that a second of transfer adds to computing), m micro-batches of its pipeline a step, tau their pace
in seconds. A copy of n bytes takes a worker n / r, and its transfer slows computing by x n / B.

    exposed   what the step takes longer: copies and contention of gradients by `predict`, after every K micro-batches;
              after the last one the commit waits for G / B; the state's copy and contention; and whatever the link
              cannot carry while the step computes
    lost      what a loss costs beyond the schemes' common part: bytes to fetch over B, micro-batches to run again
    expected  step (1 + losses a second * (pause + lost))

Formulas and what was measured: docs/design/backup.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from elastic.domain.types import NodeInfo, Plan
from elastic.planning.backup.amortization import DEFAULT_PAUSE_S, hazard_per_s
from elastic.planning.backup.peer_assignment import domain_of
from elastic.planning.cost.predict import Prediction, Predictor
from elastic.planning.cost.profile import Profile
from elastic.planning.plan.schemes import (
    LOG,
    NONE,
    RECOMPUTE,
    REDUCE,
    REPLAY,
    REPLICA,
    SNAPSHOT,
    STREAM,
    Gradients,
    State,
    gradients_of,
    state_of,
)

CLOSE = 0.01
"""Of pairs whose expected time is within this share of the best, the one that loses least is taken."""
UNACKED = 2
"""Copies of a gradient that may be under way (`elastic.worker.backup.publisher`)."""
EVERY, SELDOM = (1, 2, 4, 8), (16, 32, 64)
"""Micro-batches between copies that are tried; the seldom ones where a step has so many that there still are `LEAST`
copies: 512 micro-batches of a 70B model, copied after every 8, take a twentieth of the step."""
LEAST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """What the choice goes by besides the plan."""

    profile: Profile
    """Times in seconds, the link between nodes, copying, contention: measured where that was possible."""
    slow: tuple[tuple[str, float], ...] = ()
    """(node, factor) of slow nodes."""
    hazard_per_s: float = 0.0
    """Losses per node and second; 0: as `weigh` begins with."""
    pause_s: float = DEFAULT_PAUSE_S
    """What a loss costs whatever the schemes: finding out, deciding, building groups."""
    room_bytes: int = 0
    """Memory of a node for copies of others; 0: unlimited."""

    @property
    def figures(self) -> tuple[float, ...]:
        """What may change while training, as figures whose ratios tell how much."""
        p = self.profile
        return (
            p.link.bytes_per_s,
            p.copy_bytes_per_s,
            1 / max(1 - p.contention, 0.01),
            self.hazard_per_s,
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """One pair of schemes under one plan."""

    gradients: str
    state: str
    exposed_s: float
    """Seconds by which it lengthens a step."""
    sent_bytes: float
    """Of the node that sends most, a step."""
    memory_bytes: float
    """At the node that keeps most for others."""
    lost_s: float
    """Of a loss, beyond the pause."""
    expected_s: float
    """Of a step, losses included."""

    @property
    def pair(self) -> str:
        return f"{self.gradients}+{self.state}"

    def __str__(self) -> str:
        return f"{self.pair}: {self.exposed_s * 1e3:.4g} ms a step, {self.lost_s:.3g} s a loss"


@dataclass(frozen=True, slots=True)
class _Load:
    """What each worker of a node carries: bytes, and the micro-batches of its pipeline."""

    state: float
    gradient: float
    microbatches: int
    pace_s: float
    """Of its pipeline: seconds a micro-batch."""
    compute_s: float
    """Of its own stages: seconds a micro-batch."""
    messages: float
    """Bytes that it sends to other stages for a micro-batch, both ways."""


def estimate(plan: Plan, pair: str, by: Weighing, nodes: Sequence[NodeInfo]) -> Estimate:
    """The figures of `pair` under `plan`, whose peers count and whose own schemes do not."""
    return _Scales(plan, by, nodes).estimate(pair)


def estimates(
    plan: Plan, by: Weighing, nodes: Sequence[NodeInfo], *, replicated: bool | None = None
) -> list[Estimate]:
    """All pairs that `auto` may take. `replicated`: what `is_replicated` says, if that is known."""
    scales = _Scales(plan, by, nodes)
    if replicated is None:
        replicated, _ = is_replicated(plan, nodes)
    return [scales.estimate(pair) for pair in options(plan, replicated=replicated)]


class _Scales:
    """Weighs pairs for one plan. What pairs have in common is worked out once: the plan without backups, its step with
    a share of the gradients sent, and what nodes carry, alike ones once."""

    def __init__(self, plan: Plan, by: Weighing, nodes: Sequence[NodeInfo]) -> None:
        self.plan, self.by = plan, by
        self._predictor = Predictor(plan, by.profile, nodes, by.slow)
        self.bare = self._predictor.prediction(NONE)
        self._steps = {0.0: self.bare.step_s}
        loads = _loads(plan, by.profile, self.bare)
        self._n = len(loads)
        self._loads = Counter(loads)

    def step_s(self, gradients: str) -> float:
        share = gradients_of(gradients).share
        if share not in self._steps:
            self._steps[share] = self._predictor.prediction(gradients).step_s
        return self._steps[share]

    def estimate(self, pair: str) -> Estimate:
        gradients, _, state = pair.partition("+")
        scheme, kept, profile = gradients_of(gradients), state_of(state), self.by.profile
        bare_s, copied_s, loads = self.bare.step_s, self.step_s(gradients), self._loads
        tail_s = max(_tail_s(load, scheme, kept, profile, copied_s) for load in loads)
        exposed = copied_s - bare_s + tail_s
        pipelines, tp = len(self.plan.pipelines), self.plan.tp
        losses = [
            n * _lost_s(load, scheme, kept, profile, bare_s, pipelines) for load, n in loads.items()
        ]
        lost = sum(losses) / self._n
        hazard = self.by.hazard_per_s or hazard_per_s(0, 0.0)
        return Estimate(
            gradients=gradients,
            state=state,
            exposed_s=exposed,
            sent_bytes=tp
            * max(_state_bytes(load, kept) + load.gradient * _sent(load, scheme) for load in loads),
            memory_bytes=tp * max(_memory(load, scheme, kept) for load in loads),
            lost_s=lost,
            expected_s=(bare_s + exposed) * (1 + hazard * self._n * (self.by.pause_s + lost)),
        )


def is_replicated(plan: Plan, nodes: Sequence[NodeInfo]) -> tuple[bool, str]:
    """Return (whether several nodes hold every layer, in several failure domains where there are such; in words)."""
    domains = {info.node: domain_of(info) for info in nodes}
    apart = len({domain for domain in domains.values() if not domain.startswith("\0")}) > 1
    holders: list[set[str]] = [set() for _ in range(plan.n_layers)]
    for _, _, stage in plan.stages():
        for layer in stage.layers:
            holders[layer].add(stage.unit.node)
    for layer, found in enumerate(holders):
        if len(found) < 2:
            return False, f"layer {layer} is held by one node only"
        if apart and len({domains[node] for node in found}) < 2:
            return False, f"layer {layer} is held in one failure domain only"
    return True, "every layer is held by several nodes"


def options(plan: Plan, *, replicated: bool) -> list[str]:
    """The pairs to choose among. `replicated`: another pipeline holds every layer, in another failure domain."""
    most = max(len(pipeline.microbatches) for pipeline in plan.pipelines)
    seldom = [k for k in SELDOM if k * LEAST <= most]
    often = [f":{k}" if k > 1 else "" for k in (*EVERY, *seldom) if k == 1 or k < most]
    gradients = [f"{STREAM}{k}" for k in often]
    if replicated:
        gradients += [f"{REDUCE}{k}" for k in often]
    if any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
        gradients.append(LOG)
    states = (REPLICA,) if replicated else (SNAPSHOT, REPLAY)
    return [f"{g}+{s}" for s in states for g in (*gradients, RECOMPUTE)]


def choose(estimates: Sequence[Estimate], room_bytes: int = 0) -> tuple[Estimate, str]:
    """Return (the best, why): the least expected time; where several are within `CLOSE` of it, the least lost."""
    fitting = [e for e in estimates if not 0 < room_bytes < e.memory_bytes] or [
        min(estimates, key=lambda e: e.memory_bytes)
    ]
    least = min(e.expected_s for e in fitting)
    close = [e for e in fitting if e.expected_s <= least * (1 + CLOSE)]
    best = min(close, key=lambda e: (e.lost_s, e.expected_s))
    rest = sorted((e for e in estimates if e is not best), key=lambda e: e.expected_s)
    other = f"; next {rest[0]}" if rest else ""
    return best, f"{best}{other}"


def _loads(plan: Plan, profile: Profile, bare: Prediction) -> list[_Load]:
    """Of every node. Stages and pipelines that are alike are worked out once."""

    @cache
    def sizes(first: int, last: int) -> tuple[float, float, float]:
        """(state, gradient, messages) of a stage."""
        layers = profile.layers[first:last]
        ends = [boundary - 1 for boundary in (first, last) if 0 < boundary < plan.n_layers]
        return (
            sum(la.param_bytes + la.state_bytes for la in layers) / plan.tp,
            sum(la.gradient_bytes for la in layers) / plan.tp,
            sum(profile.layers[layer].output_bytes for layer in ends),
        )

    found: dict[str, _Load] = {}
    paces: dict[int, float] = {}
    alone: dict[tuple[int, int, int, int], _Load] = {}
    for p, pipeline in enumerate(plan.pipelines):
        times, m = bare.stages[p], len(pipeline.microbatches)
        if id(times) not in paces:
            paces[id(times)] = max(t.forward_s + t.backward_s + 2 * t.hop_s for t in times)
        for s, stage in enumerate(pipeline.stages):
            key = (id(times), m, stage.first, stage.last)
            if key not in alone:
                compute = times[s].forward_s + times[s].backward_s
                state, gradient, messages = sizes(stage.first, stage.last)
                alone[key] = _Load(state, gradient, m, paces[id(times)], compute, messages)
            old = found.get(stage.unit.node)
            found[stage.unit.node] = alone[key] if old is None else _both(old, alone[key])
    return list(found.values())


def _both(a: _Load, b: _Load) -> _Load:
    """A node that holds both stages; in several pipelines, the last one's pace counts."""
    return replace(
        b,
        state=a.state + b.state,
        gradient=a.gradient + b.gradient,
        compute_s=a.compute_s + b.compute_s,
        messages=a.messages + b.messages,
    )


def _copies(load: _Load, scheme: Gradients) -> int:
    """Copies of a gradient that are sent in a step."""
    return -(-load.microbatches // scheme.every) if scheme.every else 0


def _sent(load: _Load, scheme: Gradients) -> float:
    """How often a gradient's bytes are sent in a step, beyond the sum at its end."""
    return load.microbatches * scheme.share if scheme.rounds else _copies(load, scheme)


def _state_bytes(load: _Load, kept: State) -> float:
    """Bytes of state sent in a step, and of what its updates take."""
    return (load.state / kept.every if kept.every else 0.0) + _update_bytes(load, kept)


def _update_bytes(load: _Load, kept: State) -> float:
    """Of one step: a gradient in float32, which is an accumulated one's bytes, or (exact) half of them."""
    return load.gradient if kept.updates else 0.0


def _tail_s(load: _Load, scheme: Gradients, kept: State, profile: Profile, step_s: float) -> float:
    """Seconds that one node adds to a step besides its copies of gradients after micro-batches."""
    per_byte = 1 / profile.link.bytes_per_s if profile.link.bytes_per_s > 0 else 0.0
    per_copy = 1 / profile.copy_bytes_per_s if profile.copy_bytes_per_s > 0 else 0.0
    state, gradient, n = (
        _state_bytes(load, kept) * per_byte,
        load.gradient * per_byte,
        _copies(load, scheme),
    )
    last = gradient + profile.link.latency_s if n else 0.0
    copied = load.state + _update_bytes(load, kept) if kept.name != NONE else 0.0
    if scheme.name == LOG:
        copied += load.microbatches * load.messages + (load.gradient if kept.away else 0.0)
    copying = copied * per_copy
    ends = [state + n * gradient]
    if n > UNACKED:
        left = load.microbatches - (UNACKED + 1) * scheme.every
        ends += [state + gradient + max(left, 0) * load.pace_s, state + (n - UNACKED) * gradient]
    held_up = max(0.0, max(ends) - step_s) if per_byte else 0.0
    return copying + profile.contention * state + max(last, held_up)


def _lost_s(
    load: _Load, scheme: Gradients, kept: State, profile: Profile, step_s: float, pipelines: int
) -> float:
    """Seconds that the loss of this node costs: bytes to fetch, and what is run again."""
    per_byte = 1 / profile.link.bytes_per_s if profile.link.bytes_per_s > 0 else 0.0
    state, gradient, m = (
        _state_bytes(load, kept) * per_byte,
        load.gradient * per_byte,
        load.microbatches,
    )
    fetched = (load.state + kept.every / 2 * _update_bytes(load, kept)) * per_byte
    if scheme.every:
        under_way = min(
            UNACKED, gradient / (scheme.every * load.pace_s) if load.pace_s > 0 else 0.0
        )
        again = min(m / 2, scheme.every * (0.5 + under_way))
        return fetched + gradient + again * load.pace_s
    if (
        scheme.rounds
    ):  # the sum is with the other holders; lost are half a round and the one under way
        return fetched + min(m / 2, 1.5 * scheme.rounds) * load.pace_s
    # The new state may not be whole at the peer yet: then everybody goes back, and runs the whole step again.
    late = min(1.0, state / step_s) if step_s > 0 else 0.0
    if scheme.name == LOG:  # the lost layers alone, in all pipelines
        again_s = (load.compute_s + 2 * load.messages * per_byte) / pipelines
        return fetched + m / 2 * min(again_s, load.pace_s) + late * step_s
    return fetched + m / 2 * load.pace_s + late * step_s


def _memory(load: _Load, scheme: Gradients, kept: State) -> float:
    """Bytes kept for this node elsewhere: two copies and the one that arrives, and updates since the older state."""
    updates = 2 * kept.every * _update_bytes(load, kept)
    state = 3 * load.state if kept.away else 0.0
    return state + updates + (5 * load.gradient if scheme.every else 0.0)
