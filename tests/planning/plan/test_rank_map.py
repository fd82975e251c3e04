"""Ranks of a plan: order, neighbours, holders."""

from __future__ import annotations

import pytest

from elastic.domain.errors import FieldError
from elastic.domain.types import Unit
from elastic.planning.plan.plan import parse_plan
from elastic.planning.plan.rank_map import Roster, roster
from tests.worker.engine.plans import roster_of

UNEVEN = roster_of([[0, 2], [0, 1, 3]], 4, [(0, 1), (2, 3)])


def test_ranks_follow_the_plan() -> None:
    assert [(m.unit.node, m.pipeline, m.stage, tuple(m.layers)) for m in UNEVEN.members] == [
        ("node0", 0, 0, (0, 1)),
        ("node1", 0, 1, (2, 3)),
        ("node2", 1, 0, (0,)),
        ("node3", 1, 1, (1, 2)),
        ("node4", 1, 2, (3,)),
    ]
    assert UNEVEN.rank(Unit("node3")) == 3
    with pytest.raises(FieldError, match="no stage"):
        UNEVEN.rank(Unit("spare"))


def neighbours(ranks: Roster, rank: int) -> list[tuple[int | None, int | None]]:
    return [(place.previous, place.following) for place in ranks.places(rank)]


def test_neighbours_stay_in_their_pipeline() -> None:
    found = [(None, 1), (0, None), (None, 3), (2, 4), (3, None)]
    assert [neighbours(UNEVEN, r) for r in range(5)] == [[pair] for pair in found]
    assert UNEVEN.pairs() == ((0, 1), (1, 0), (2, 3), (3, 2), (3, 4), (4, 3))


def test_holders_one_a_pipeline() -> None:
    assert [UNEVEN.holders(layer, 0) for layer in range(4)] == [(0, 2), (0, 3), (1, 3), (1, 4)]
    assert UNEVEN.holder_sets() == ((0, 2), (0, 3), (1, 3), (1, 4))


def test_tensor_parallel_ranks_are_apart() -> None:
    both = roster_of([[0, 1], [0]], 2, [(0,), (1,)], tp=2)
    assert both.size == 6
    assert neighbours(both, 1) == [(None, 3)]
    assert (both.holders(1, 0), both.holders(1, 1)) == ((2, 4), (3, 5))
    assert both.rank(Unit("node1"), 1) == 3


def test_one_pipeline_reduces_with_nobody() -> None:
    assert roster_of([[0, 1]], 2, [(0,)]).holder_sets() == ()


def test_a_unit_with_several_stages_is_one_worker() -> None:
    ranks = roster(
        parse_plan(
            "plan epoch=1 layers=6 microbatches=2 tp=1 backup=none+none\n"
            "pipeline 0 microbatches=0-1 schedule=interleaved: a[0:1] b[1:3] c[3:4] a[4:5]+recompute b[5:6] c[6:7]\n"  # noqa: E501
            "pipeline 1 microbatches=1: d[0:7]"
        )
    )
    assert [(m.unit.node, m.stage, m.layers) for m in ranks.members[:3]] == [
        ("a", 0, (0, 4)),
        ("b", 1, (1, 2, 5)),
        ("c", 2, (3, 6)),
    ]
    assert [neighbours(ranks, r) for r in range(3)] == [
        [(None, 1), (2, 1)],
        [(0, 2), (0, 2)],
        [(1, 0), (1, None)],
    ]
    assert [(place.number, place.stage.recompute) for place in ranks.places(0)] == [
        (0, False),
        (3, True),
    ]
    assert ranks.pairs() == ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))
    assert [ranks.holders(layer, 0) for layer in (0, 4, 6)] == [(0, 3), (0, 3), (2, 3)]
