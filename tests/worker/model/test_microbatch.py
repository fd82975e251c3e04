"""Layers of a stage share what they derive from a micro-batch, and read its fields when needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from elastic.domain.errors import FieldError
from elastic.worker.model.microbatch import LazyFields, Microbatch


def test_a_shared_value_is_made_once_without_gradients() -> None:
    weight, made = torch.ones(2, requires_grad=True), list[str]()

    def make() -> torch.Tensor:
        made.append("mask")
        return weight * 2

    one, other = Microbatch(0, 0, {}), Microbatch(0, 0, {})
    assert one.once("mask", make) is one.once("mask", make)
    assert not one.once("mask", make).requires_grad and made == ["mask"]
    assert one.once("other", lambda: 7) == 7
    assert other.once("mask", make) is not one.once("mask", make) and len(made) == 2
    assert one == other and "mask" not in repr(one)


@pytest.mark.parametrize("draw", [lambda: torch.rand(2), lambda: torch.randperm(3)])
def test_a_shared_value_may_not_be_random(draw: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(FieldError, match=r"once\('noise'\): a function that draws .*on the plan"):
        Microbatch(0, 0, {}).once("noise", draw)


def test_reading_fields_leaves_the_random_numbers() -> None:
    """Which layer of a stage reads them first depends on the plan."""

    def draw() -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        return {"x": torch.rand(2)}

    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert LazyFields(draw)["x"].shape == (2,)
    assert torch.equal(torch.rand(4), expected)


def test_shared_values_that_are_forgotten_are_made_again() -> None:
    microbatch, made = Microbatch(0, 0, {}), list[int]()
    for count in (1, 1, 2):
        if count == 2:
            microbatch.forget_shared()
        microbatch.once("mask", lambda: made.append(1))
        assert len(made) == count
    kept = weakref.ref(microbatch.once("table", lambda: torch.zeros(2)))
    microbatch.forget_shared()
    assert kept() is None


def test_changes_of_shared_tensors_are_noticed() -> None:
    lazy = LazyFields(lambda: {"x": torch.zeros(2)})
    for microbatch in (Microbatch(0, 0, {"x": torch.zeros(2)}), Microbatch(0, 0, lazy)):
        microbatch.fields["x"].add_(1)
        assert microbatch.watched.changed() == "field 'x'"
        microbatch.watched.mark()
        mask = microbatch.once("mask", lambda: (torch.zeros(2), 5))[0]
        assert microbatch.watched.changed() is None
        mask.fill_(1)
        assert microbatch.watched.changed() == "once('mask')"


def test_fields_are_read_when_one_is_used() -> None:
    read: list[int] = []

    def once() -> dict[str, torch.Tensor]:
        read.append(1)
        return {"x": torch.ones(1)}

    fields = LazyFields(once)
    assert not read
    assert list(fields) == ["x"] and len(fields) == 1 and fields["x"].item() == 1.0
    assert "y" not in fields and fields.get("y") is None and len(read) == 1
    with pytest.raises(KeyError):
        fields["y"]
