"""Ranks of an epoch: the rank, stages and communication partners of each worker of a plan.

Ranks follow the plan: pipelines in order, their units in order, TP ranks in order. Spares have no
rank. A unit has one stage, or several under the interleaved schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.domain.errors import FieldError
from elastic.domain.types import Pipeline, Plan, Stage, Unit
from elastic.planning.schedule.schedule import units_of


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One stage of a worker, and the ranks that hold the neighbouring stages."""

    stage: Stage
    number: int
    """Index of the stage in its pipeline."""
    previous: int | None
    """Rank of the previous stage; None for the first stage."""
    following: int | None
    """Rank of the next stage; None for the last stage."""


@dataclass(frozen=True, slots=True)
class RankMember:
    """One worker in an epoch."""

    unit: Unit
    shard: int
    """TP rank."""
    pipeline: int
    stage: int
    """Index of the worker's first stage, equal to the index of its unit in the pipeline."""
    layers: tuple[int, ...]
    """Layers of all stages of the worker, ascending."""


@dataclass(frozen=True, slots=True)
class Roster:
    """All workers of an epoch; the rank of a worker is its index in `members`."""

    members: tuple[RankMember, ...]
    pipelines: tuple[Pipeline, ...]
    n_layers: int
    n_microbatches: int
    tp: int

    @property
    def size(self) -> int:
        return len(self.members)

    def rank(self, unit: Unit, shard: int = 0) -> int:
        """Return the rank of a worker. Raises FieldError if the worker holds no stage."""
        for rank, member in enumerate(self.members):
            if member.unit == unit and member.shard == shard:
                return rank
        raise FieldError("unit", unit, "it holds no stage in this plan")

    def holders(self, layer: int, shard: int) -> tuple[int, ...]:
        """Return the ranks that hold (layer, TP rank): one per pipeline, in pipeline order."""
        return tuple(
            r for r, m in enumerate(self.members) if m.shard == shard and layer in m.layers
        )

    def places(self, rank: int) -> tuple[RankPlace, ...]:
        """Return the stages of `rank` in model order, with the ranks of their neighbours.

        Neighbours have the same TP rank.
        """
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
            RankPlace(stage, s, at(s - 1), at(s + 1))
            for s, stage in enumerate(stages)
            if stage.unit == me.unit
        )

    def holder_sets(self) -> tuple[tuple[int, ...], ...]:
        """Return the holders of each (layer, TP rank) with several, sorted and without repeats."""
        sets = {
            self.holders(layer, shard) for layer in range(self.n_layers) for shard in range(self.tp)
        }
        return tuple(sorted(ranks for ranks in sets if len(ranks) > 1))

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Return the (sender, receiver) ranks of neighbouring stages, both directions, sorted."""
        places = ((rank, place) for rank in range(self.size) for place in self.places(rank))
        down = {(rank, place.following) for rank, place in places if place.following is not None}
        return tuple(sorted(down | {(following, rank) for rank, following in down}))


def roster(plan: Plan) -> Roster:
    """Return the roster of `plan`."""
    members = tuple(
        RankMember(
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
