"""The cost model: seconds and bytes of stages, pipelines and steps. Formulas with sources: docs/design/planner.md.

Layers are numbered 0..L-1; a stage holds layers [i, j). Everything per layer is kept as NumPy prefix sums of
length L + 1, so that the figure of a stage is a difference, and all stages at once are a broadcast. Nodes that
cannot be told apart (device type, slow factor, memory, units) are one kind; kinds are numbered 0..Q-1.

    compute  = slow * (forward + backward)              recompute: forward once more
    exposed  = max(compute + y + contention * x, x)     x: seconds to stream the stage's gradient to the peer,
                                                        as much of it as goes there a micro-batch; y: to copy it
    tau      = exposed + hop                            hop: activation to the next stage, its gradient back
    1F1B         T = sum(tau) + (m - 1) * max(tau)
    zero-bubble  T = sum over stages but the last of max(0, tau - 2 * weight part) + m * max(tau)
    step     = max over pipelines of T + tail           tail: reduction and update of the slowest stage
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.planning.cost.profile import Device, Profile
from elastic.planning.schedule.schedule import ZERO_BUBBLE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
UNLIMITED_BYTES = float(1 << 62)


@dataclass(frozen=True, slots=True, order=True)
class NodeKind:
    """Nodes that are alike to the planner."""

    device: str
    slow: float
    memory_bytes: int
    """Of a worker; 0: unlimited."""
    units: int
    """TP groups of a node."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """All stages [i, j) of one kind at one place, as matrices [L + 1, L + 1]; inf where i >= j or memory forbids.

    `ahead` micro-batches are between forward and backward pass there.
    """

    tau: Floats
    """Seconds a micro-batch, communication included."""
    fill: Floats
    """What the stage adds to the filling and draining of the pipeline."""
    recompute: NDArray[np.bool_]
    """It fits only if activations are computed again."""


class _KindPrefixSums:
    """Prefix sums of one kind."""

    def __init__(self, kind: NodeKind, device: Device, gradient_s: Floats, exposed_s: Floats) -> None:
        times = device.layers
        self.forward = _prefix_sums(t.forward_s * kind.slow for t in times)
        self.backward = _prefix_sums(t.backward_s * kind.slow for t in times)
        known = all(t.backward_input_s > 0 or t.backward_weight_s > 0 for t in times)
        weight = [t.backward_weight_s * kind.slow for t in times]
        whole = [(t.backward_input_s + t.backward_weight_s) * kind.slow for t in times]
        self.weight = _prefix_sums(weight) if known else None
        self.split = _prefix_sums(whole) if known else None
        self.update = _prefix_sums(t.update_s * kind.slow for t in times)
        self.stream = gradient_s
        self.exposed = exposed_s
        self.memory = float(kind.memory_bytes or device.memory_bytes) or UNLIMITED_BYTES


class CostModel:
    """What stages cost on the kinds of a cluster.

    Args:
        profile: times, bytes, links.
        kinds: of nodes; every device type must be in the profile (FieldError).
        tp: workers of a unit; bytes of a layer are spread over them.
        stream: of a gradient's bytes, what goes to a peer a micro-batch (1: all, after each one).
    """

    def __init__(self, profile: Profile, kinds: Sequence[NodeKind], *, tp: int = 1, stream: float = 1.0) -> None:
        self.profile, self.kinds, self.tp = profile, tuple(kinds), tp
        layers = profile.layers
        self.n_layers = len(layers)
        self.fixed = _prefix_sums(-(-(la.param_bytes + la.state_bytes + la.gradient_bytes) // tp) for la in layers)
        self.activation = _prefix_sums(la.activation_bytes for la in layers)
        self.gradient = _prefix_sums(la.gradient_bytes / tp for la in layers)
        outputs = [la.output_bytes for la in layers]
        self.widest = float(max(outputs[:-1], default=0))
        """Bytes of the widest boundary: what a recomputing stage keeps of a micro-batch, at most."""
        ends = [0, *outputs]
        self.hop = np.array([2 * profile.link.seconds(n) for n in ends])
        """Seconds there and back over the boundary before layer j."""
        self.hop_inside = np.array([2 * profile.inside.seconds(n) for n in ends])
        per_byte = 1 / profile.link.bytes_per_s if profile.link.bytes_per_s > 0 else 0.0
        self._reduce_per_byte = per_byte
        gradient_s = self.gradient * per_byte * stream
        per_copy = 1 / profile.copy_bytes_per_s if profile.copy_bytes_per_s > 0 else 0.0
        exposed_s = gradient_s * profile.contention + self.gradient * per_copy * stream
        self._prefix = [_KindPrefixSums(k, profile.device(k.device), gradient_s, exposed_s) for k in kinds]
        self.limited = any(p.memory < UNLIMITED_BYTES for p in self._prefix)
        self.splits = all(p.split is not None for p in self._prefix)
        """The parts of the backward pass are known: zero-bubble can be priced."""
        self._remembered = cache(self._stages)
        self._times = cache(self._make_times)

    def prefix(self, kind: int) -> _KindPrefixSums:
        return self._prefix[kind]

    def reduction(self, pipelines: int) -> float:
        """Seconds a byte in a ring over `pipelines`: each rank sends 2 (k - 1) / k of the data."""
        return 2 * (pipelines - 1) / pipelines * self._reduce_per_byte

    def tail_sums(self, kind: int, pipelines: int) -> Floats:
        """Prefix sums of the layers' reduction and update, seconds."""
        return np.asarray(self.gradient * self.reduction(pipelines) + self._prefix[kind].update)

    def tails(self, kind: int, pipelines: int) -> Floats:
        """Seconds of reduction and update of every stage, [L + 1, L + 1]."""
        sums = self.tail_sums(kind, pipelines)
        return np.asarray(sums[None, :] - sums[:, None])

    @property
    def has_no_tail(self) -> bool:
        """Reduction and update take no time."""
        return self._reduce_per_byte == 0 and not any(p.update[-1] > 0 for p in self._prefix)

    def compute(self, kind: int, schedule: str) -> Floats:
        """Prefix sums of a micro-batch's seconds of compute, nothing computed again."""
        p = self._prefix[kind]
        backward = p.split if schedule == ZERO_BUBBLE else p.backward
        assert backward is not None, "zero-bubble needs the parts of the backward pass"
        return np.asarray(p.forward + backward)

    def hops(self, *, inside: bool, last: bool) -> Floats:
        """Seconds of the boundary at the end of a stage, by j."""
        if last:
            return np.zeros(self.n_layers + 1)
        return self.hop_inside if inside else self.hop

    def memory(self, ahead: int, recompute: bool) -> Floats:
        """Bytes a worker for every stage [i, j)."""
        if recompute:
            sums = self.fixed + self.activation
            return np.asarray(sums[None, :] - sums[:, None] + ahead * self.widest)
        sums = self.fixed + ahead * self.activation
        return np.asarray(sums[None, :] - sums[:, None])

    def stages(self, kind: int, ahead: int, schedule: str, *, inside: bool, last: bool) -> StageCosts:
        """Every stage of `kind` with `ahead` micro-batches in flight. `inside`: the next one is on the same node."""
        if not self.limited:
            ahead = 1
        return self._remembered(kind, ahead, schedule, inside, last)

    def _stages(self, kind: int, ahead: int, schedule: str, inside: bool, last: bool) -> StageCosts:
        p = self._prefix[kind]
        plain, again = self._times(kind, schedule, inside, last)
        fits = self.memory(ahead, False) <= p.memory
        fits_again = self.memory(ahead, True) <= p.memory
        tau = np.where(fits, plain, np.where(fits_again, again, np.inf))
        fill = tau
        if schedule == ZERO_BUBBLE:
            assert p.weight is not None
            hidden = 2 * (p.weight[None, :] - p.weight[:, None])
            fill = np.where(np.isfinite(tau), 0.0 if last else np.maximum(tau - hidden, 0.0), np.inf)
        return StageCosts(tau, fill, ~fits & fits_again)

    def _make_times(self, kind: int, schedule: str, inside: bool, last: bool) -> tuple[Floats, Floats]:
        """Seconds of every stage, without and with recomputation, memory aside; inf where i >= j."""
        p = self._prefix[kind]
        stream = p.stream[None, :] - p.stream[:, None]
        exposed = p.exposed[None, :] - p.exposed[:, None]
        hop = self.hops(inside=inside, last=last)[None, :]
        empty = np.tri(self.n_layers + 1, dtype=bool)
        found = []
        for again in (False, True):
            times = np.maximum(self._compute(kind, schedule, again) + exposed, stream) + hop
            times[empty] = np.inf
            found.append(times)
        return found[0], found[1]

    def _compute(self, kind: int, schedule: str, recompute: bool) -> Floats:
        sums = self.compute(kind, schedule)
        sums = sums + self._prefix[kind].forward if recompute else sums
        return np.asarray(sums[None, :] - sums[:, None])


@lru_cache(maxsize=16)
def cost_model(profile: Profile, kinds: tuple[NodeKind, ...], tp: int, stream: float) -> CostModel:
    """The model of these, remembered: a re-plan asks for the same tables again."""
    return CostModel(profile, kinds, tp=tp, stream=stream)


def pipeline_seconds(schedule: str, fill: Any, slowest: Any, microbatches: Any) -> Any:
    """Time of a pipeline, see above; `fill` and `slowest` as `StageCosts` sums and maxima; arrays are fine."""
    return fill + (microbatches if schedule == ZERO_BUBBLE else microbatches - 1) * slowest


def in_flight(schedule: str, behind: int, depth: int, microbatches: int) -> int:
    """Micro-batches between forward and backward pass on a stage with `behind` stages after it."""
    return min(depth if schedule == ZERO_BUBBLE else behind + 1, microbatches)


def _prefix_sums(values: Iterable[float]) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.fromiter(values, dtype=np.float64))))
