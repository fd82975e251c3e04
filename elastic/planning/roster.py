"""Ranks of an epoch: who each worker of a plan is, and with whom it communicates. Pure.

Ranks follow the plan: pipelines in order, their stages in order, TP ranks in order. Spares have no rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.types import Plan, Unit
from elastic.errors import FieldError


@dataclass(frozen=True, slots=True)
class Member:
    """One worker in an epoch."""

    unit: Unit
    shard: int
    """TP rank."""
    pipeline: int
    stage: int
    first: int
    last: int
    """It holds layers [first, last)."""

    @property
    def layers(self) -> range:
        return range(self.first, self.last)


@dataclass(frozen=True, slots=True)
class Roster:
    """All workers of an epoch; index in `members` is the rank."""

    members: tuple[Member, ...]
    n_layers: int
    n_microbatches: int
    tp: int

    @property
    def size(self) -> int:
        return len(self.members)

    def rank(self, unit: Unit, shard: int = 0) -> int:
        """Rank of a worker. Raises FieldError if it holds no stage."""
        for rank, member in enumerate(self.members):
            if member.unit == unit and member.shard == shard:
                return rank
        raise FieldError("unit", unit, "it holds no stage in this plan")

    def holders(self, layer: int, shard: int) -> tuple[int, ...]:
        """Ranks that hold one (layer, TP rank), one a pipeline, in pipeline order."""
        return tuple(r for r, m in enumerate(self.members) if m.shard == shard and layer in m.layers)

    def neighbours(self, rank: int) -> tuple[int | None, int | None]:
        """Ranks of the (previous, following) stage of the same pipeline and TP rank."""
        me = self.members[rank]
        found = {
            m.stage: r
            for r, m in enumerate(self.members)
            if (m.pipeline, m.shard) == (me.pipeline, me.shard) and abs(m.stage - me.stage) == 1
        }
        return found.get(me.stage - 1), found.get(me.stage + 1)

    def holder_sets(self) -> tuple[tuple[int, ...], ...]:
        """Distinct sets of ranks that share a (layer, TP rank), those with more than one rank, sorted."""
        sets = {self.holders(layer, shard) for layer in range(self.n_layers) for shard in range(self.tp)}
        return tuple(sorted(ranks for ranks in sets if len(ranks) > 1))

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Every (sender, receiver) between neighbouring stages, both directions, sorted."""
        down = [(r, f) for r in range(self.size) if (f := self.neighbours(r)[1]) is not None]
        return tuple(sorted(down + [(f, r) for r, f in down]))


def roster(plan: Plan) -> Roster:
    """The ranks of `plan`."""
    members = tuple(
        Member(stage.unit, shard, p, s, stage.first, stage.last)
        for p, s, stage in plan.stages()
        for shard in range(plan.tp)
    )
    return Roster(members, plan.n_layers, plan.n_microbatches, plan.tp)
