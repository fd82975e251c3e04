"""Ranks of an epoch: who each worker of a plan is, and with whom it communicates. Pure.

Ranks follow the plan: pipelines in order, their units in order, TP ranks in order. Spares have no rank. A unit has one
stage, or several under the interleaved schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.domain.errors import FieldError
from elastic.domain.types import Pipeline, Plan, Stage, Unit
from elastic.planning.schedule.schedule import units_of


@dataclass(frozen=True, slots=True)
class Place:
    """One stage of a worker, and where its neighbours are."""

    stage: Stage
    number: int
    """Of the stage in its pipeline."""
    previous: int | None
    """Rank that has the stage before; None: this is the first."""
    following: int | None


@dataclass(frozen=True, slots=True)
class Member:
    """One worker in an epoch."""

    unit: Unit
    shard: int
    """TP rank."""
    pipeline: int
    stage: int
    """Number of its first stage, which is also its place among the pipeline's units."""
    layers: tuple[int, ...]
    """All that it holds, of all of its stages, in ascending order."""


@dataclass(frozen=True, slots=True)
class Roster:
    """All workers of an epoch; index in `members` is the rank."""

    members: tuple[Member, ...]
    pipelines: tuple[Pipeline, ...]
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
        return tuple(
            r for r, m in enumerate(self.members) if m.shard == shard and layer in m.layers
        )

    def places(self, rank: int) -> tuple[Place, ...]:
        """The stages of `rank`, in model order, with the ranks of their neighbours (of the same TP rank)."""
        me = self.members[rank]
        stages = self.pipelines[me.pipeline].stages
        ranks = {
            m.unit: r
            for r, m in enumerate(self.members)
            if (m.pipeline, m.shard) == (me.pipeline, me.shard)
        }

        def at(number: int) -> int | None:
            return ranks[stages[number].unit] if 0 <= number < len(stages) else None

        return tuple(
            Place(stage, s, at(s - 1), at(s + 1))
            for s, stage in enumerate(stages)
            if stage.unit == me.unit
        )

    def holder_sets(self) -> tuple[tuple[int, ...], ...]:
        """Distinct sets of ranks that share a (layer, TP rank), those with more than one rank, sorted."""
        sets = {
            self.holders(layer, shard) for layer in range(self.n_layers) for shard in range(self.tp)
        }
        return tuple(sorted(ranks for ranks in sets if len(ranks) > 1))

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Every (sender, receiver) between neighbouring stages, both directions, sorted."""
        places = ((rank, place) for rank in range(self.size) for place in self.places(rank))
        down = {(rank, place.following) for rank, place in places if place.following is not None}
        return tuple(sorted(down | {(following, rank) for rank, following in down}))


def roster(plan: Plan) -> Roster:
    """The ranks of `plan`."""
    members = tuple(
        Member(
            unit,
            shard,
            p,
            s,
            tuple(layer for st in pipeline.stages if st.unit == unit for layer in st.layers),
        )
        for p, pipeline in enumerate(plan.pipelines)
        for s, unit in enumerate(units_of(pipeline))
        for shard in range(plan.tp)
    )
    return Roster(members, plan.pipelines, plan.n_layers, plan.n_microbatches, plan.tp)
