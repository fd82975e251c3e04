"""Cost model: seconds and bytes of stages, pipelines and steps. Sources: docs/design/planner.md.

Layers are numbered 0..L-1. A stage holds layers [i, j). Figures per layer are NumPy prefix sums of
length L + 1, so a stage's figure is a difference and all stages at once are a broadcast. Nodes with
equal device type, slow factor, memory and units are one kind; kinds are numbered 0..Q-1.

    compute      = slow * (forward + backward)           recompute adds one forward pass
    exposed      = max(compute + y + contention * x, x)  x: seconds per micro-batch to stream the
                                                         stage's gradient to the peer; y: to copy it
    tau          = exposed + hop                         hop: activation to the next stage and its
                                                         gradient back
    1F1B         T = sum(tau) + (m - 1) * max(tau)
    zero-bubble  T = m * max(tau) + sum over stages but the last of max(0, tau - 2 * weight part)
    step         = max over pipelines of T + tail        tail: slowest stage's reduction and update
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
    """Nodes that the planner does not distinguish."""

    device: str
    slow: float
    """Factor on the device type's times; above 1: slower."""
    memory_bytes: int
    """Per worker; 0: unlimited."""
    units: int
    """Tensor-parallel groups per node."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of all stages [i, j) on one kind, for a given number of micro-batches in flight.

    Matrices are [L + 1, L + 1]; inf where i >= j or memory forbids the stage.
    """

    tau: Floats
    """Seconds per micro-batch, including communication."""
    fill: Floats
    """Seconds that the stage adds to filling and draining the pipeline."""
    recompute: NDArray[np.bool_]
    """Whether the stage fits in memory only with activation recomputation."""


class _KindPrefixSums:
    """Prefix sums over the layers of one kind, each [L + 1]; seconds per micro-batch."""

    def __init__(self, kind: NodeKind, device: Device, stream_s: Floats, exposed_s: Floats) -> None:
        times = device.layers
        self.forward = _prefix_sums(t.forward_s * kind.slow for t in times)
        self.backward = _prefix_sums(t.backward_s * kind.slow for t in times)
        known = all(t.backward_input_s > 0 or t.backward_weight_s > 0 for t in times)
        weight = [t.backward_weight_s * kind.slow for t in times]
        both = [(t.backward_input_s + t.backward_weight_s) * kind.slow for t in times]
        self.weight = _prefix_sums(weight) if known else None
        self.split = _prefix_sums(both) if known else None
        """Both parts of the backward pass; None: the profile does not know them."""
        self.update = _prefix_sums(t.update_s * kind.slow for t in times)
        self.stream = stream_s
        self.exposed = exposed_s
        self.memory = float(kind.memory_bytes or device.memory_bytes) or UNLIMITED_BYTES


class CostModel:
    """Costs of all stages on the node kinds of a cluster.

    Args:
        profile: times, bytes, links.
        kinds: node kinds. Raises FieldError for a device type that the profile lacks.
        tp: workers per unit; a layer's bytes are spread over them.
        stream_share: fraction of gradient bytes sent to a peer per micro-batch.
    """

    def __init__(
        self, profile: Profile, kinds: Sequence[NodeKind], *, tp: int = 1, stream_share: float = 1.0
    ) -> None:
        self.kinds = tuple(kinds)
        layers = profile.layers
        self.n_layers = len(layers)
        self.fixed = _prefix_sums(-(-la.held_bytes // tp) for la in layers)
        self.activation = _prefix_sums(la.activation_bytes for la in layers)
        self.gradient = _prefix_sums(la.gradient_bytes / tp for la in layers)
        outputs = [la.output_bytes for la in layers]
        self.widest = float(max(outputs[:-1], default=0))
        """Bytes of the widest boundary: the most that a recomputing stage keeps per micro-batch."""
        ends = [0, *outputs]
        self._hop = np.array([2 * profile.link.seconds(n) for n in ends])
        self._hop_inside = np.array([2 * profile.inside.seconds(n) for n in ends])
        self._reduce_per_byte = profile.link.s_per_byte
        stream_s = self.gradient * profile.link.s_per_byte * stream_share
        copy_s = self.gradient * profile.copy_s_per_byte * stream_share
        exposed_s = stream_s * profile.contention + copy_s
        self.prefix = [
            _KindPrefixSums(kind, profile.device(kind.device), stream_s, exposed_s)
            for kind in kinds
        ]
        self.limited = any(p.memory < UNLIMITED_BYTES for p in self.prefix)
        """Whether the memory of some kind is limited."""
        self.has_split_times = all(p.split is not None for p in self.prefix)
        """Whether the parts of the backward pass are known, so that zero-bubble can be priced."""
        self._cached_stages = cache(self._stages)
        self._cached_times = cache(self._times)

    def reduction(self, pipelines: int) -> float:
        """Return seconds per byte in a ring over k pipelines: a rank sends 2 (k - 1) / k bytes."""
        return 2 * (pipelines - 1) / pipelines * self._reduce_per_byte

    def tail_sums(self, kind: int, pipelines: int) -> Floats:
        """Return prefix sums of the layers' reduction and update, in seconds."""
        return np.asarray(self.gradient * self.reduction(pipelines) + self.prefix[kind].update)

    def tails(self, kind: int, pipelines: int) -> Floats:
        """Return the seconds of reduction and update of every stage, [L + 1, L + 1]."""
        sums = self.tail_sums(kind, pipelines)
        return np.asarray(sums[None, :] - sums[:, None])

    @property
    def has_no_tail(self) -> bool:
        """Whether reduction and update take no time."""
        return self._reduce_per_byte == 0 and not any(p.update[-1] > 0 for p in self.prefix)

    def compute(self, kind: int, schedule: str) -> Floats:
        """Return prefix sums of compute seconds per micro-batch, without recomputation."""
        p = self.prefix[kind]
        backward = p.split if schedule == ZERO_BUBBLE else p.backward
        assert backward is not None, "zero-bubble needs the parts of the backward pass"
        return np.asarray(p.forward + backward)

    def hops(self, *, inside: bool, last: bool) -> Floats:
        """Return, [L + 1], the seconds of both messages over the boundary at each end j of a stage.

        `inside`: the next stage is on the same node.
        """
        if last:
            return np.zeros(self.n_layers + 1)
        return self._hop_inside if inside else self._hop

    def memory(self, in_flight: int, recompute: bool) -> Floats:
        """Return the bytes per worker of every stage [i, j), [L + 1, L + 1]."""
        if recompute:
            sums = self.fixed + self.activation
            return np.asarray(sums[None, :] - sums[:, None] + in_flight * self.widest)
        sums = self.fixed + in_flight * self.activation
        return np.asarray(sums[None, :] - sums[:, None])

    def stages(
        self, kind: int, in_flight: int, schedule: str, *, inside: bool, last: bool
    ) -> StageCosts:
        """Return costs of all stages of `kind`. `inside`: the next stage is on the same node."""
        if not self.limited:
            in_flight = 1
        return self._cached_stages(kind, in_flight, schedule, inside, last)

    def _stages(
        self, kind: int, in_flight: int, schedule: str, inside: bool, last: bool
    ) -> StageCosts:
        p = self.prefix[kind]
        plain, again = self._cached_times(kind, schedule, inside, last)
        fits = self.memory(in_flight, False) <= p.memory
        fits_again = self.memory(in_flight, True) <= p.memory
        tau = np.where(fits, plain, np.where(fits_again, again, np.inf))
        fill = tau
        if schedule == ZERO_BUBBLE:
            assert p.weight is not None
            hidden = 2 * (p.weight[None, :] - p.weight[:, None])
            exposed = 0.0 if last else np.maximum(tau - hidden, 0.0)
            fill = np.where(np.isfinite(tau), exposed, np.inf)
        return StageCosts(tau, fill, ~fits & fits_again)

    def _times(self, kind: int, schedule: str, inside: bool, last: bool) -> tuple[Floats, Floats]:
        """Return seconds of every stage without and with recomputation; inf where i >= j."""
        p = self.prefix[kind]
        stream = p.stream[None, :] - p.stream[:, None]
        exposed = p.exposed[None, :] - p.exposed[:, None]
        hop = self.hops(inside=inside, last=last)[None, :]
        plain = self.compute(kind, schedule)
        found = []
        for sums in (plain, plain + p.forward):
            times = np.maximum(sums[None, :] - sums[:, None] + exposed, stream) + hop
            times[np.tri(self.n_layers + 1, dtype=bool)] = np.inf
            found.append(times)
        return found[0], found[1]


@lru_cache(maxsize=16)
def cost_model(
    profile: Profile, kinds: tuple[NodeKind, ...], tp: int, stream_share: float
) -> CostModel:
    """Return a cached `CostModel`, because a re-plan needs the same tables again."""
    return CostModel(profile, kinds, tp=tp, stream_share=stream_share)


def pipeline_seconds(schedule: str, fill: Any, slowest: Any, microbatches: Any) -> Any:
    """Return a pipeline's seconds from the sum of fills and the slowest tau; numbers or arrays."""
    return fill + (microbatches if schedule == ZERO_BUBBLE else microbatches - 1) * slowest


def in_flight(schedule: str, behind: int, depth: int, microbatches: int) -> int:
    """Return the maximum micro-batches in flight on a stage with `behind` stages after it."""
    return min(depth if schedule == ZERO_BUBBLE else behind + 1, microbatches)


def _prefix_sums(values: Iterable[float]) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.fromiter(values, dtype=np.float64))))
