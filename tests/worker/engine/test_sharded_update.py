"""After a sharded update, all holders of a layer get its parameters, for any cuts."""

from __future__ import annotations

import signal

import pytest
import torch

from elastic.domain.types import Accumulate, Pipeline, Plan, Stage, Unit
from elastic.planning.plan.rank_map import Roster, roster
from elastic.worker.engine import allreduce
from elastic.worker.engine.sharded_update import ParameterGather
from elastic.worker.model.optimizer import adamw
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import LinkFailed
from tests.worker.engine.models import stack
from tests.worker.engine.plans import roster_of
from tests.worker.engine.rank_processes import Rank, Ranks, run_ranks
from tests.worker.model.toy_model import ALONE, CPU

N_LAYERS = 4
CUTS = [
    [[0], [0]],
    [[0, 2], [0, 1]],
    [[0, 3], [0], [0, 1, 2]],
    [[0, 2]],
]


def build_layer(index: int, portion: tuple[int, int]) -> LayerReplica:
    return build_replica(
        stack(N_LAYERS), index, ALONE, adamw(0.01), Accumulate.EXACT, 7, CPU, portion=portion
    )


def reduced(replica: LayerReplica, step: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(100 * step + replica.index)
    return torch.randint(-(2**40), 2**40, (replica.gradient.numel(),), generator=seeded)


def update_and_gather(rank: Rank, cuts: list[list[int]]) -> dict[int, list[torch.Tensor]]:
    made = roster_of(cuts, N_LAYERS, [(p,) for p in range(len(cuts))])
    me = made.members[rank.rank]
    links = rank.open(holder_sets=made.holder_sets(), pairs=made.pairs())
    layers = [build_layer(index, (me.pipeline, len(cuts))) for index in me.layers]
    parameters = ParameterGather(layers, links, made)
    for step in range(2):
        for replica in layers:
            replica.update(reduced(replica, step), 0.5, 0.01)
            assert replica.complete == (len(cuts) == 1)
        parameters.gather()
        assert all(replica.complete for replica in layers)
    return {r.index: [p.detach().clone() for p in r.parameters] for r in layers}


def interleaved() -> Roster:
    """Three pipelines: interleaved with two stages per unit, a single unit, and other cuts."""
    stages = [Stage(Unit("ab"[s % 2]), s, s + 1) for s in range(4)]
    pipelines = (
        Pipeline(tuple(stages), (0, 1), "interleaved"),
        Pipeline((Stage(Unit("c"), 0, 4),), (2,)),
        Pipeline((Stage(Unit("d"), 0, 3), Stage(Unit("e"), 3, 4)), (3,)),
    )
    return roster(Plan(1, N_LAYERS, 4, 1, pipelines))


def gather_interleaved(rank: Rank, bucket_bytes: int) -> dict[int, list[torch.Tensor]]:
    allreduce.BUCKET_BYTES = bucket_bytes
    made = interleaved()
    me = made.members[rank.rank]
    links = rank.open(holder_sets=made.holder_sets(), pairs=made.pairs())
    layers = [build_layer(index, (me.pipeline, 3)) for index in me.layers]
    parameters = ParameterGather(layers, links, made)
    for step in range(2):
        for replica in layers:
            replica.update(reduced(replica, step), 0.5, 0.01)
        parameters.gather()
    return {r.index: [p.detach().clone() for p in r.parameters] for r in layers}


@pytest.mark.parametrize("bucket_bytes", [allreduce.BUCKET_BYTES, 1])
def test_units_with_several_stages_gather_with_the_other_pipelines(bucket_bytes: int) -> None:
    expected = [build_layer(index, (0, 1)) for index in range(N_LAYERS)]
    for step in range(2):
        for replica in expected:
            replica.update(reduced(replica, step), 0.5, 0.01)
    for found in run_ranks(gather_interleaved, 5, bucket_bytes):
        for index, values in found.items():
            assert all(
                torch.equal(a, b) for a, b in zip(values, expected[index].parameters, strict=True)
            )


@pytest.mark.parametrize("cuts", CUTS)
def test_all_holders_get_the_parameters_of_one_worker(cuts: list[list[int]]) -> None:
    expected = [build_layer(index, (0, 1)) for index in range(N_LAYERS)]
    for step in range(2):
        for replica in expected:
            replica.update(reduced(replica, step), 0.5, 0.01)
    for found in run_ranks(update_and_gather, sum(map(len, cuts)), cuts):
        for index, values in found.items():
            assert all(
                torch.equal(a, b) for a, b in zip(values, expected[index].parameters, strict=True)
            )


def gather_and_lose(rank: Rank) -> tuple[bool, int]:
    made = roster_of([[0], [0]], N_LAYERS, [(0,), (1,)])
    links = rank.open(holder_sets=made.holder_sets(), pairs=made.pairs())
    layers = [build_layer(index, (rank.rank, 2)) for index in range(N_LAYERS)]
    parameters = ParameterGather(layers, links, made)
    parameters.gather()
    for replica in layers:
        replica.update(reduced(replica, 0), 0.5, 0.01)
    rank.report("updated")
    rank.wait_for_parent()
    with pytest.raises(LinkFailed):
        parameters.gather()
    return any(replica.complete for replica in layers), layers[0].version


def test_layers_of_a_lost_holder_stay_incomplete() -> None:
    with Ranks(gather_and_lose, 2) as ranks:
        assert ranks.reports() == ["updated", "updated"]
        ranks.signal(1, signal.SIGKILL)
        ranks.send("go", 0)
        assert ranks.reports(0) == [(False, 1)]
