"""The sums of a layer under `reduce`: its own, those of open rounds, and the common sum."""

from __future__ import annotations

import math

import pytest
import torch

from elastic.domain.errors import LedgerError
from elastic.worker.model.gradients import SCALE
from elastic.worker.replica.replica import LayerReplica
from tests.worker.model.toy_model import replicas, run


def held(replica: LayerReplica) -> list[set[int]]:
    return [part.ledger for part in replica.parts]


def test_a_finished_round_has_the_sum_of_all_holders() -> None:
    mine, theirs, whole = replicas(), replicas(), replicas()
    for index in (0, 1, 2, 3):
        run(mine if index < 2 else theirs, 0, index)
        run(whole, 0, index)
        if index == 0:
            first = [replica.start_round() for replica in mine]
            assert held(mine[0]) == [] and first[0].ledger == {0}
    for a, b, all_of_it in zip(mine, theirs, whole, strict=True):
        a.start_round()
        a.finish_round(
            first[a.index].gradient.clone() + b.gradient,
            {0, 2, 3},
            b.losses | first[a.index].losses,
        )
        assert held(a) == [{0, 2, 3}] and a.ledger == set()
        a.cancel_rounds()
        assert held(a) == [{0, 2, 3}, {1}]
        assert a.common is not None and torch.equal(
            a.common.gradient + a.gradient, all_of_it.gradient
        )
        a.keep([frozenset((1,)), frozenset((0, 2, 3))])
        assert held(a) == [{0, 1, 2, 3}] and torch.equal(a.gradient, all_of_it.gradient)
        assert a.losses == all_of_it.losses


def test_only_the_named_sums_are_kept() -> None:
    for kept, left in (((0,), {0}), ((1,), {1}), ((2,), set())):
        layer = replicas()[0]
        for index in (0, 1):
            layer.ledger.add(index)
            layer.gradient.fill_(index + 1)
            if index == 0:
                layer.finish_round(layer.start_round().gradient.clone(), {0}, {})
        layer.keep([frozenset(kept)])
        assert layer.ledger == left and layer.common is None
        assert bool((layer.gradient == (kept[0] + 1 if left else 0)).all())


def test_clear_empties_all_sums() -> None:
    layer = replicas()[0]
    layer.ledger.add(0)
    layer.finish_round(layer.start_round().gradient, {0, 1}, {})
    layer.ledger.add(2)
    layer.start_round()
    layer.clear()
    layer.cancel_rounds()
    assert held(layer) == []


def test_lost_or_doubled_microbatches_are_refused() -> None:
    layer = replicas()[0]
    layer.ledger |= {0, 1}
    zeros = torch.zeros_like(layer.start_round().gradient)
    with pytest.raises(LedgerError, match=r"lacks \[1\] and doubles \[\]"):
        layer.finish_round(zeros, {0, 2}, {})
    layer.finish_round(zeros, {0, 1}, {})
    layer.start_round()
    with pytest.raises(LedgerError, match=r"lacks \[\] and doubles \[1\]"):
        layer.finish_round(zeros, {1, 2}, {})


def test_sums_of_gradients_in_range_have_a_norm_in_every_plan() -> None:
    """Two micro-batches of 5000 per element: in rounds, in one own sum, or read from a copy."""
    large = torch.full_like(replicas()[0].gradient, int(5000 * SCALE))
    large[-1] = 0
    layer = replicas()[0]
    for index in (0, 1):
        layer.start_round()
        layer.finish_round(large, {index}, {})
    assert layer.common is not None
    norm = layer.norm_sq(layer.common.gradient)
    layer, reader = replicas()[0], replicas()[0]
    for index in (0, 1):
        layer.add_gradient(large.view(torch.uint8), {index}, {})
        layer.start_round()
    layer.cancel_rounds()
    copy = torch.empty(layer.gradient_nbytes, dtype=torch.uint8)
    layer.write_gradient(copy)
    reader.add_gradient(copy, {0, 1}, {})
    assert math.isfinite(norm)
    assert norm == layer.norm_sq(layer.gradient) == reader.norm_sq(reader.gradient)
