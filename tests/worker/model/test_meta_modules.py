"""Modules without memory keep their structure, and get memory when they need it."""

from __future__ import annotations

import torch
from torch import nn

from elastic.worker.model.meta_modules import parameters_on_meta, with_memory, without_memory

CPU = torch.device("cpu")


class Twice(nn.Module):
    """Two modules with one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.other.weight = self.one.weight
        self.other.bias.requires_grad_(False)
        self.register_buffer("table", torch.arange(3))


def test_parameters_have_no_memory_and_buffers_have_values() -> None:
    with parameters_on_meta():
        module = Twice()
    assert all(parameter.is_meta for parameter in module.parameters())
    assert module.get_buffer("table").tolist() == [0, 1, 2]
    assert not nn.Linear(2, 2).weight.is_meta


def test_one_parameter_in_two_places_stays_one() -> None:
    given = Twice()
    empty = without_memory(given)
    assert not given.one.weight.is_meta and empty.one.weight.is_meta
    full = with_memory(empty, CPU)
    for module in (empty, full):
        assert module.one.weight is module.other.weight
        assert len(list(module.parameters())) == 3
        assert [p.requires_grad for p in module.parameters()] == [True, True, False]
    assert not full.one.weight.is_meta and full.one.weight.shape == (3, 3)
