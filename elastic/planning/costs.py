"""What layers cost, as integers, so that plans are exact and the same everywhere.

Time is counted in ticks: the forward and backward time of all layers together is `TOTAL_TICKS` (each layer
rounded). That holds for true seconds and for figures that are merely proportional to them.

A stage's bottleneck is the larger of its compute time for one micro-batch and the time to stream its
gradient to the peer (the stream runs under the compute; only what is beyond it costs). With T that
bottleneck over a pipeline of depth D, m micro-batches take (m + D - 1) * T, plus D - 1 hops between stages
while the pipeline fills and drains.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from elastic.core.types import LayerSpec

TOTAL_TICKS = 1 << 30
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Prefix sums over layers (entry i: layers before i) and the limits that apply to a stage."""

    time: tuple[int, ...]
    """Ticks of forward and backward for one micro-batch."""
    stream: tuple[int, ...]
    """Ticks to send the gradients to a peer; zeros if they are not sent or the bandwidth is unknown."""
    fixed: tuple[int, ...]
    """Bytes of parameters, state and gradients on one worker."""
    activation: tuple[int, ...]
    """Bytes kept per micro-batch in flight on one worker."""
    gradient: tuple[int, ...]
    """Bytes of gradients, whole."""
    memory: int = UNLIMITED
    """Bytes that one worker may use."""
    hop: int = 0
    """Ticks for an activation to the next stage and its gradient back."""
    ticks_per_s: float = 1.0
    loads: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def n_layers(self) -> int:
        return len(self.time) - 1

    def ticks(self, first: int, last: int) -> int:
        """Bottleneck ticks of a stage holding layers [first, last)."""
        return max(self.time[last] - self.time[first], self.stream[last] - self.stream[first])

    def needs(self, first: int, last: int, in_flight: int) -> int:
        """Bytes that one worker needs for layers [first, last) with `in_flight` micro-batches'
        activations."""
        activation = self.activation[last] - self.activation[first]
        return self.fixed[last] - self.fixed[first] + in_flight * activation

    def reach(self, first: int, limit: int, in_flight: int) -> int:
        """Return the largest `last` such that a stage [first, last) takes at most `limit` ticks and fits;
        >= first."""
        last = bisect_right(self.time, self.time[first] + limit) - 1
        if self.stream[-1]:
            last = min(last, bisect_right(self.stream, self.stream[first] + limit) - 1)
        if self.memory < UNLIMITED:
            loads = self._loads(in_flight)
            last = min(last, bisect_right(loads, loads[first] + self.memory) - 1)
        return max(last, first)

    def _loads(self, in_flight: int) -> tuple[int, ...]:
        """Prefix sums of the bytes needed with `in_flight` micro-batches, remembered."""
        if in_flight not in self.loads:
            pairs = zip(self.fixed, self.activation, strict=True)
            self.loads[in_flight] = tuple(fixed + in_flight * activation for fixed, activation in pairs)
        return self.loads[in_flight]


def measure(
    layers: tuple[LayerSpec, ...],
    *,
    tp: int,
    memory_bytes: int = 0,
    link_bytes_per_s: float = 0.0,
    latency_s: float = 0.0,
    stream: bool = False,
) -> Costs:
    """Build `Costs` for workers with `memory_bytes` each (0: unlimited) and links of the given bandwidth
    (0: unknown,
    taken as infinitely fast). `stream`: gradients are sent to a peer after each micro-batch."""
    times = [layer.forward_s + layer.backward_s for layer in layers]
    total_s = sum(times)
    ticks_per_s = TOTAL_TICKS / total_s if total_s > 0 else 1.0
    per_byte = ticks_per_s / link_bytes_per_s if link_bytes_per_s > 0 else 0.0
    widest = max((layer.output_bytes for layer in layers), default=0)
    return Costs(
        time=_sums(max(1, round(t * ticks_per_s)) for t in times),
        stream=_sums(round(layer.gradient_bytes * per_byte) if stream else 0 for layer in layers),
        fixed=_sums(-(-(la.param_bytes + la.state_bytes + la.gradient_bytes) // tp) for la in layers),
        activation=_sums(layer.activation_bytes for layer in layers),
        gradient=_sums(layer.gradient_bytes for layer in layers),
        memory=memory_bytes or UNLIMITED,
        hop=round(2 * (latency_s * ticks_per_s + widest * per_byte)),
        ticks_per_s=ticks_per_s,
    )


def reduction_ticks(costs: Costs, gradient_bytes: int, pipelines: int, link_bytes_per_s: float) -> int:
    """Ticks to reduce `gradient_bytes` in a ring over `pipelines`."""
    if pipelines < 2 or link_bytes_per_s <= 0:
        return 0
    sent = 2 * (pipelines - 1) / pipelines * gradient_bytes
    return round(sent / link_bytes_per_s * costs.ticks_per_s)


def _sums(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(values, initial=0))
