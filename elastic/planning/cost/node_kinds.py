"""Which nodes are alike to the planner, and how many there are of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic.domain.types import NodeInfo
from elastic.planning.cost.cost_model import NodeKind
from elastic.planning.cost.profile import Profile


@dataclass(frozen=True, slots=True)
class NodeKinds:
    """Kinds of nodes, and the kind of each node."""

    kinds: tuple[NodeKind, ...]
    of: dict[str, int]
    """Index into `kinds`, by node."""

    @property
    def counts(self) -> tuple[int, ...]:
        found = Counter(self.of.values())
        return tuple(found[i] for i in range(len(self.kinds)))

    def merged(self, most: int, profile: Profile) -> NodeKinds:
        """At most so many kinds: the two nearest become one, which is as slow and small as the worse of both."""
        kinds, of = list(self.kinds), dict(self.of)
        while len(kinds) > most:
            kinds.sort(key=lambda kind: _seconds(kind, profile))
            times = [_seconds(kind, profile) for kind in kinds]
            at = min(range(len(kinds) - 1), key=lambda i: times[i + 1] / times[i] if times[i] > 0 else 1.0)
            kinds[at : at + 2] = [_worse(kinds[at], kinds[at + 1])]
            kinds = list(dict.fromkeys(kinds))
        final = tuple(sorted(kinds))
        for node, index in self.of.items():
            of[node] = _nearest(self.kinds[index], final, profile)
        used = sorted(set(of.values()))
        return NodeKinds(tuple(final[i] for i in used), {node: used.index(i) for node, i in of.items()})


def classify_nodes(
    nodes: Sequence[NodeInfo], profile: Profile, tp: int, slow: dict[str, float], *, typed: bool
) -> NodeKinds:
    """Sort nodes into kinds. `typed`: the profile tells device types apart. Raises FieldError for unknown types."""
    found = {}
    for info in nodes:
        device = profile.device(info.device).name if typed else ""
        memory = info.memory_bytes or profile.device(device).memory_bytes
        found[info.node] = NodeKind(device, slow.get(info.node, 1.0), memory, info.workers // tp)
    kinds = sorted(set(found.values()))
    index = {kind: i for i, kind in enumerate(kinds)}
    return NodeKinds(tuple(kinds), {node: index[kind] for node, kind in found.items()})


def alike(kinds: NodeKinds, profile: Profile) -> NodeKinds:
    """All nodes as the worst of them: for shapes that are fixed by hand on large clusters."""
    return kinds.merged(1, profile)


def _seconds(kind: NodeKind, profile: Profile) -> float:
    times = profile.device(kind.device).layers
    return kind.slow * sum(t.forward_s + t.backward_s for t in times)


def _worse(fast: NodeKind, slow: NodeKind) -> NodeKind:
    limits = [memory for memory in (fast.memory_bytes, slow.memory_bytes) if memory]
    return replace(slow, memory_bytes=min(limits, default=0), units=min(fast.units, slow.units))


def _nearest(kind: NodeKind, kinds: Sequence[NodeKind], profile: Profile) -> int:
    """The fastest of `kinds` that promises no more than `kind` has."""
    seconds = _seconds(kind, profile)
    able = [
        i
        for i, other in enumerate(kinds)
        if _seconds(other, profile) >= seconds * (1 - 1e-12)
        and other.units <= kind.units
        and (not kind.memory_bytes or 0 < other.memory_bytes <= kind.memory_bytes)
    ]
    return min(able, key=lambda i: (_seconds(kinds[i], profile), -kinds[i].memory_bytes, i))
