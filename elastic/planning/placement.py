"""Which node takes which stages, so that as few bytes as possible move.

A pipeline's stages are dealt to its nodes in consecutive slots, one slot a node (a node with several units
takes several neighbouring stages). A slot that fits what a node already holds is worth those bytes, a
little less if the node only keeps them as a peer's backup; the worthiest pairs are joined first. Then each
pipeline is cut again, no slower than before, to suit its nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.core.types import LayerSpec, Plan, Stage, Unit
from elastic.planning.costs import Costs
from elastic.planning.partition import cut

HELD, KEPT = 10, 9
"""Worth of a byte that a worker of the node holds, and of one that its vault keeps for a peer."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One pipeline before nodes are known: its depth, its micro-batches and the ticks of its slowest
    stage."""

    depth: int
    microbatches: int
    bottleneck: int


@dataclass(frozen=True, slots=True)
class Holdings:
    """What each node has before the change, as worth per layer."""

    worth: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, current: Plan | None, layers: Sequence[LayerSpec]) -> Holdings:
        """Read them off the current plan; none if the number of layers differs."""
        if current is None or current.n_layers != len(layers):
            return cls({})
        worth: dict[str, list[int]] = {}
        state = current.state == "snapshot"
        for _, _, stage in current.stages():
            peer = current.peer_of(stage.unit.node)
            for layer in stage.layers:
                spec = layers[layer]
                full = spec.param_bytes + spec.state_bytes + spec.gradient_bytes
                kept = full if state else spec.gradient_bytes
                _raise(worth, stage.unit.node, layer, HELD * full, len(layers))
                if peer is not None:
                    _raise(worth, peer, layer, KEPT * kept, len(layers))
        return cls({node: tuple(values) for node, values in worth.items()})

    def missing(self, node: str, full: Sequence[int]) -> list[int]:
        """Prefix sums over layers of the worth that `node` would have to fetch."""
        has = self.worth.get(node)
        sums = [0]
        for layer, bytes_ in enumerate(full):
            sums.append(sums[-1] + HELD * bytes_ - (has[layer] if has else 0))
        return sums


def place(
    costs: Costs,
    shapes: Sequence[Shape],
    nodes: Sequence[str],
    per_node: int,
    holdings: Holdings,
    full: Sequence[int],
) -> list[tuple[Stage, ...]]:
    """Return the stages of each pipeline. `nodes` must suffice; `full` is the bytes of each layer."""
    even = {shape: cut(costs, shape.depth, shape.microbatches, shape.bottleneck) for shape in set(shapes)}
    slots = [(p, first) for p, shape in enumerate(shapes) for first in range(0, shape.depth, per_node)]
    spans = [
        range(even[shapes[p]][first], even[shapes[p]][min(first + per_node, shapes[p].depth)])
        for p, first in slots
    ]
    owner = dict(zip(slots, _match(spans, nodes, holdings), strict=True))
    placed = []
    for p, shape in enumerate(shapes):
        hosts = [owner[p, s - s % per_node] for s in range(shape.depth)]
        cuts = even[shape]
        if holdings.worth:
            moved = {node: holdings.missing(node, full) for node in set(hosts)}
            cuts = cut(
                costs, shape.depth, shape.microbatches, shape.bottleneck, [moved[node] for node in hosts]
            )
        units = [Unit(node, s % per_node) for s, node in enumerate(hosts)]
        placed.append(tuple(Stage(u, a, b) for u, a, b in zip(units, cuts, cuts[1:], strict=False)))
    return placed


def _match(spans: Sequence[range], nodes: Sequence[str], holdings: Holdings) -> list[str]:
    """Return a node for each slot: the worthiest pairs first, then whoever is left, in order."""
    pairs = []
    for i, node in enumerate(nodes):
        worth = holdings.worth.get(node)
        if worth:
            sums = _prefix(worth)
            values = ((sums[span.stop] - sums[span.start], s) for s, span in enumerate(spans))
            pairs += [(-value, s, i) for value, s in values if value]
    taken: dict[int, int] = {}
    busy: set[int] = set()
    for _, s, i in sorted(pairs):
        if s not in taken and i not in busy:
            taken[s] = i
            busy.add(i)
    free = (i for i in range(len(nodes)) if i not in busy)
    return [nodes[taken[s] if s in taken else next(free)] for s in range(len(spans))]


def _prefix(values: Iterable[int]) -> list[int]:
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _raise(worth: dict[str, list[int]], node: str, layer: int, value: int, n_layers: int) -> None:
    row = worth.setdefault(node, [0] * n_layers)
    row[layer] = max(row[layer], value)
