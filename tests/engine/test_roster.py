"""Ranks of a plan: order, neighbours, holders."""

from __future__ import annotations

import pytest

from elastic.core.types import Unit
from elastic.errors import FieldError
from tests.engine.plans import roster_of

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


def test_neighbours_stay_in_their_pipeline() -> None:
    assert [UNEVEN.neighbours(r) for r in range(5)] == [(None, 1), (0, None), (None, 3), (2, 4), (3, None)]
    assert UNEVEN.pairs() == ((0, 1), (1, 0), (2, 3), (3, 2), (3, 4), (4, 3))


def test_holders_one_a_pipeline() -> None:
    assert [UNEVEN.holders(layer, 0) for layer in range(4)] == [(0, 2), (0, 3), (1, 3), (1, 4)]
    assert UNEVEN.holder_sets() == ((0, 2), (0, 3), (1, 3), (1, 4))


def test_tensor_parallel_ranks_are_apart() -> None:
    both = roster_of([[0, 1], [0]], 2, [(0,), (1,)], tp=2)
    assert both.size == 6
    assert both.neighbours(1) == (None, 3)
    assert (both.holders(1, 0), both.holders(1, 1)) == ((2, 4), (3, 5))
    assert both.rank(Unit("node1"), 1) == 3


def test_one_pipeline_reduces_with_nobody() -> None:
    assert roster_of([[0, 1]], 2, [(0,)]).holder_sets() == ()
