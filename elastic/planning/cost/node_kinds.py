"""Sorts nodes into kinds that the planner does not distinguish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from elastic.domain.types import NodeInfo
from elastic.planning.cost.cost_model import NodeKind
from elastic.planning.cost.profile import Profile


@dataclass(frozen=True, slots=True)
class NodeKinds:
    """The node kinds of a cluster, and the kind of each node."""

    kinds: tuple[NodeKind, ...]
    index_of: dict[str, int]
    """Per node, the index of its kind in `kinds`."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of nodes of each kind."""
        found = Counter(self.index_of.values())
        return tuple(found[i] for i in range(len(self.kinds)))

    def merged(self, limit: int, profile: Profile) -> NodeKinds:
        """Return kinds, merged in pairs nearest in compute time until at most `limit` are left.

        A merged kind is as slow as the slower, and has the memory and units of the smaller.
        """
        kinds, index_of = list(self.kinds), {}
        while len(kinds) > limit:
            kinds.sort(key=lambda kind: _seconds(kind, profile))
            times = [_seconds(kind, profile) for kind in kinds]
            ratios = [b / a if a > 0 else 1.0 for a, b in pairwise(times)]
            at = ratios.index(min(ratios))
            kinds[at : at + 2] = [_worse(kinds[at], kinds[at + 1])]
            kinds = list(dict.fromkeys(kinds))
        final = tuple(sorted(kinds))
        for node, index in self.index_of.items():
            index_of[node] = _nearest(self.kinds[index], final, profile)
        used = sorted(set(index_of.values()))
        return NodeKinds(
            tuple(final[i] for i in used), {node: used.index(i) for node, i in index_of.items()}
        )


def classify_nodes(
    nodes: Sequence[NodeInfo], profile: Profile, tp: int, slow: dict[str, float], *, typed: bool
) -> NodeKinds:
    """Return the kinds of `nodes`. `slow`: factor by node; `typed`: the profile knows device types.

    Raises FieldError for a device type that the profile lacks.
    """
    found = {}
    for info in nodes:
        device = profile.device(info.device).name if typed else ""
        memory = info.memory_bytes or profile.device(device).memory_bytes
        found[info.node] = NodeKind(device, slow.get(info.node, 1.0), memory, info.workers // tp)
    kinds = sorted(set(found.values()))
    index = {kind: i for i, kind in enumerate(kinds)}
    return NodeKinds(tuple(kinds), {node: index[kind] for node, kind in found.items()})


def _seconds(kind: NodeKind, profile: Profile) -> float:
    times = profile.device(kind.device).layers
    return kind.slow * sum(t.forward_s + t.backward_s for t in times)


def _worse(fast: NodeKind, slow: NodeKind) -> NodeKind:
    limits = [memory for memory in (fast.memory_bytes, slow.memory_bytes) if memory]
    return replace(slow, memory_bytes=min(limits, default=0), units=min(fast.units, slow.units))


def _nearest(kind: NodeKind, kinds: Sequence[NodeKind], profile: Profile) -> int:
    """Return the index of the fastest of `kinds` with at most the speed and resources of `kind`."""
    seconds = _seconds(kind, profile)
    able = [
        i
        for i, other in enumerate(kinds)
        if _seconds(other, profile) >= seconds * (1 - 1e-12)
        and other.units <= kind.units
        and (not kind.memory_bytes or 0 < other.memory_bytes <= kind.memory_bytes)
    ]
    return min(able, key=lambda i: (_seconds(kinds[i], profile), -kinds[i].memory_bytes, i))
