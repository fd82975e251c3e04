"""Cost of each pair of backup schemes under a plan, without and with losses; choice of the best.

Symbols, per worker: P bytes of parameters and optimizer state; G bytes of accumulated gradient (its
TP part); B bytes/s of its link; r bytes/s of copies to shared memory; x contention (seconds of
compute delay per second of transfer); m micro-batches of its pipeline per step; tau seconds per
micro-batch. A copy of n bytes takes n / r, and its transfer delays computing by x n / B.

    exposed   additional seconds per step: copies and contention of gradients every K micro-batches,
              as `predict` finds them; G / B after the last micro-batch; copy and contention of the
              state; and the transfers that the link cannot finish during the step
    lost      seconds per loss, beyond the pause: bytes to fetch over B, micro-batches to repeat
    expected  step (1 + losses per second * (pause + lost))

docs/design/backup.md has the formulas and measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
"""Tolerance on the expected time; within it the pair with the smallest loss is chosen."""
UNACKED = 2
"""Maximum unacknowledged copies of a gradient (`elastic.worker.backup.publisher`)."""
EVERY, SELDOM = (1, 2, 4, 8), (16, 32, 64)
"""Candidates for the number of micro-batches between copies.

`SELDOM` values are candidates only if a step still has `LEAST` copies: in a step of 512
micro-batches of a 70B model, copies after every 8 take a twentieth of the step.
"""
LEAST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """Inputs of the cost estimate, except the plan."""

    profile: Profile
    """Layer times, links, copy rate and contention, measured if possible."""
    slow: tuple[tuple[str, float], ...] = ()
    """(node, factor) of slow nodes."""
    hazard_per_s: float = 0.0
    """Losses per node and second; 0: the prior of `amortization`."""
    pause_s: float = DEFAULT_PAUSE_S
    """Pause per loss under any scheme: detection, decision, new process groups."""
    room_bytes: int = 0
    """Memory of a node for copies of other nodes; 0: unlimited."""

    @property
    def figures(self) -> tuple[float, ...]:
        """Inputs that may change during training; new / old values measure the change."""
        p = self.profile
        return (
            p.link.bytes_per_s,
            p.copy_bytes_per_s,
            1 / max(1 - p.contention, 0.01),
            self.hazard_per_s,
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated costs of one pair of schemes under one plan."""

    gradients: str
    state: str
    exposed_s: float
    """Seconds that the pair adds to a step."""
    sent_bytes: float
    """Maximum over nodes of the bytes that a node sends per step."""
    memory_bytes: float
    """Maximum over nodes of the bytes that a node keeps for others."""
    lost_s: float
    """Seconds per loss, beyond the pause."""
    expected_s: float
    """Seconds per step, including expected losses."""

    @property
    def pair(self) -> str:
        return f"{self.gradients}+{self.state}"

    def __str__(self) -> str:
        return f"{self.pair}: {self.exposed_s * 1e3:.4g} ms a step, {self.lost_s:.3g} s a loss"


@dataclass(frozen=True, slots=True)
class _Load:
    """Bytes and micro-batches of each worker of a node."""

    state: float
    gradient: float
    microbatches: int
    pace_s: float
    """Seconds per micro-batch of the pipeline's slowest stage, messages included."""
    compute_s: float
    """Compute seconds per micro-batch of the node's own stages."""
    messages: float
    """Bytes per micro-batch sent to neighbouring stages, both directions."""


def estimate(plan: Plan, pair: str, by: Weighing, nodes: Sequence[NodeInfo]) -> Estimate:
    """Return the estimate of `pair` under `plan`; the schemes of `plan` are ignored."""
    return _Estimator(plan, by, nodes).estimate(pair)


def estimates(plan: Plan, by: Weighing, nodes: Sequence[NodeInfo]) -> list[Estimate]:
    """Return estimates of all pairs that `auto` may choose."""
    estimator = _Estimator(plan, by, nodes)
    replicated, _ = is_replicated(plan, nodes)
    return [estimator.estimate(pair) for pair in options(plan, replicated=replicated)]


class _Estimator:
    """Estimates pairs of schemes for one plan.

    All pairs share the step without backups, steps by fraction of gradients sent, and loads.
    """

    def __init__(self, plan: Plan, by: Weighing, nodes: Sequence[NodeInfo]) -> None:
        self.plan, self.by = plan, by
        predictor = Predictor(plan, by.profile, nodes, by.slow)
        bare = predictor.prediction(0.0)
        self.bare_s = bare.step_s
        self.step_s = cache(lambda share: predictor.prediction(share).step_s)
        self.loads = Counter(_loads(plan, by.profile, bare))

    def estimate(self, pair: str) -> Estimate:
        gradients, _, state = pair.partition("+")
        scheme, kept, loads = gradients_of(gradients), state_of(state), self.loads
        step_s, tp = self.step_s(scheme.share), self.plan.tp
        tail_s = max(self._tail_s(load, scheme, kept, step_s) for load in loads)
        exposed_s = step_s - self.bare_s + tail_s
        lost_s = sum(n * self._lost_s(load, scheme, kept) for load, n in loads.items())
        lost_s /= loads.total()
        hazard = (self.by.hazard_per_s or hazard_per_s(0, 0.0)) * loads.total()
        sent = [
            _state_bytes(load, kept) + load.gradient * _times_sent(load, scheme) for load in loads
        ]
        return Estimate(
            gradients=gradients,
            state=state,
            exposed_s=exposed_s,
            sent_bytes=tp * max(sent),
            memory_bytes=tp * max(_memory(load, scheme, kept) for load in loads),
            lost_s=lost_s,
            expected_s=(self.bare_s + exposed_s) * (1 + hazard * (self.by.pause_s + lost_s)),
        )

    def _tail_s(self, load: _Load, scheme: Gradients, kept: State, step_s: float) -> float:
        """Return the seconds that a node adds to a step, except by gradient copies during it."""
        profile = self.by.profile
        state_s = _state_bytes(load, kept) * profile.link.s_per_byte
        gradient_s = load.gradient * profile.link.s_per_byte
        n = _copies(load, scheme)
        copied = load.state + _update_bytes(load, kept) if kept.name != NONE else 0.0
        if scheme.name == LOG:
            copied += load.microbatches * load.messages + (load.gradient if kept.away else 0.0)
        ends = [state_s + n * gradient_s]
        if n > UNACKED:
            left = max(0, load.microbatches - (UNACKED + 1) * scheme.every)
            ends += [state_s + gradient_s + left * load.pace_s]
        late_s = max(0.0, max(ends) - step_s) if profile.link.s_per_byte else 0.0
        last_s = gradient_s + profile.link.latency_s if n else 0.0
        copying_s = copied * profile.copy_s_per_byte
        return copying_s + profile.contention * state_s + max(last_s, late_s)

    def _lost_s(self, load: _Load, scheme: Gradients, kept: State) -> float:
        """Return the seconds per loss of this node: bytes to fetch and work to repeat."""
        per_byte, m = self.by.profile.link.s_per_byte, load.microbatches
        gradient_s = load.gradient * per_byte
        fetch_s = (load.state + kept.every / 2 * _update_bytes(load, kept)) * per_byte
        if scheme.every:
            unsent = gradient_s / (scheme.every * load.pace_s) if load.pace_s > 0 else 0.0
            again = min(m / 2, scheme.every * (0.5 + min(UNACKED, unsent)))
            return fetch_s + gradient_s + again * load.pace_s
        if scheme.rounds:  # on average, half a round and the unfinished round are lost
            return fetch_s + min(m / 2, 1.5 * scheme.rounds) * load.pace_s
        again_s = load.pace_s
        if scheme.name == LOG:  # only the lost layers run, divided among all pipelines
            alone_s = load.compute_s + 2 * load.messages * per_byte
            again_s = min(alone_s / len(self.plan.pipelines), again_s)
        # If the new state is incomplete at the peer, all nodes roll back and repeat the step.
        late_s = min(self.bare_s, _state_bytes(load, kept) * per_byte)
        return fetch_s + m / 2 * again_s + late_s


def is_replicated(plan: Plan, nodes: Sequence[NodeInfo]) -> tuple[bool, str]:
    """Return (whether several nodes hold every layer, reason).

    With several failure domains, every layer must be in at least two.
    """
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
    """Return the candidate pairs. `replicated`: see `is_replicated`."""
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


def choose_pair(estimates: Sequence[Estimate], room_bytes: int = 0) -> tuple[Estimate, str]:
    """Return (best, reason): the smallest loss among pairs within `CLOSE` of the least time."""
    fitting = [e for e in estimates if not 0 < room_bytes < e.memory_bytes] or [
        min(estimates, key=lambda e: e.memory_bytes)
    ]
    least = min(e.expected_s for e in fitting)
    close = [e for e in fitting if e.expected_s <= least * (1 + CLOSE)]
    best = min(close, key=lambda e: (e.lost_s, e.expected_s))
    other = min((e for e in estimates if e is not best), key=lambda e: e.expected_s, default=None)
    return best, f"{best}; next {other}" if other else f"{best}"


def _loads(plan: Plan, profile: Profile, bare: Prediction) -> list[_Load]:
    """Return the load of every node."""

    @cache
    def sizes(first: int, last: int) -> tuple[float, float, float]:
        """Return the bytes of (state, gradient, messages) of a stage."""
        layers = profile.layers[first:last]
        ends = [boundary - 1 for boundary in (first, last) if 0 < boundary < plan.n_layers]
        return (
            sum(la.param_bytes + la.state_bytes for la in layers) / plan.tp,
            sum(la.gradient_bytes for la in layers) / plan.tp,
            sum(profile.layers[layer].output_bytes for layer in ends),
        )

    found: dict[str, _Load] = {}
    for pipeline, times in zip(plan.pipelines, bare.stages, strict=True):
        pace_s = max(t.forward_s + t.backward_s + 2 * t.hop_s for t in times)
        for stage, t in zip(pipeline.stages, times, strict=True):
            state, gradient, messages = sizes(stage.first, stage.last)
            compute_s = t.forward_s + t.backward_s
            if other := found.get(stage.unit.node):
                state, gradient = state + other.state, gradient + other.gradient
                compute_s, messages = compute_s + other.compute_s, messages + other.messages
            found[stage.unit.node] = _Load(
                state, gradient, len(pipeline.microbatches), pace_s, compute_s, messages
            )
    return list(found.values())


def _copies(load: _Load, scheme: Gradients) -> int:
    """Return the copies of a gradient sent per step."""
    return -(-load.microbatches // scheme.every) if scheme.every else 0


def _times_sent(load: _Load, scheme: Gradients) -> float:
    """Return how often a gradient is sent per step, not counting the sum at the end."""
    return load.microbatches * scheme.share if scheme.rounds else _copies(load, scheme)


def _state_bytes(load: _Load, kept: State) -> float:
    """Return the bytes of state and update inputs sent per step."""
    return (load.state / kept.every if kept.every else 0.0) + _update_bytes(load, kept)


def _update_bytes(load: _Load, kept: State) -> float:
    """Return the bytes of update inputs per step; the gradient's bytes are an upper bound."""
    return load.gradient if kept.updates else 0.0


def _memory(load: _Load, scheme: Gradients, kept: State) -> float:
    """Return the bytes that others keep for this node: copies of states, gradients and updates."""
    updates = 2 * kept.every * _update_bytes(load, kept)
    state = 3 * load.state if kept.away else 0.0
    return state + updates + (5 * load.gradient if scheme.every else 0.0)
