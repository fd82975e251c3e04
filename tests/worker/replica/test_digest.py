"""The hash by which holders compare their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from elastic.worker.replica.digest import device_digest, device_kind, parameter_digest
from tests.worker.model.toy_model import CPU, replicas

DIGESTS = pytest.mark.parametrize("digest", [parameter_digest, device_digest])
Digest = Callable[[Iterable[Tensor]], int]


def tensors() -> list[Tensor]:
    seeded = torch.Generator().manual_seed(3)
    shapes = ((3, 5), (1,), (0, 4), (), (64,))
    found = [torch.randn(shape, generator=seeded) for shape in shapes]
    return [*found, torch.randn(7, generator=seeded).bfloat16()]


@DIGESTS
def test_every_flipped_bit_changes_the_hash(digest: Digest) -> None:
    expected = digest(tensors())
    assert 0 <= expected < 2**64 and digest(tensors()) == expected
    for at, tensor in enumerate(tensors()):
        for bit in range(0, 8 * tensor.nbytes, 3):
            changed = tensors()
            changed[at].view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
            assert digest(changed) != expected, (at, bit)


@DIGESTS
def test_the_order_counts(digest: Digest) -> None:
    first, *rest = tensors()
    assert digest([*rest, first]) != digest([first, *rest])
    assert digest([first.flip(0)]) != digest([first])


@DIGESTS
def test_no_parameters_at_all(digest: Digest) -> None:
    assert digest([]) == digest([])


def test_equal_replicas_have_equal_hashes() -> None:
    one, other = replicas(), replicas()
    assert [layer.digest() for layer in one] == [layer.digest() for layer in other]
    weight = next(iter(other[1].parameters)).detach()
    weight.view(-1).view(torch.int32)[0] ^= 1
    differ = [a.digest() != b.digest() for a, b in zip(one, other, strict=True)]
    assert differ == [False, True, False]


def test_the_kind_of_a_device_is_stable() -> None:
    assert device_kind(CPU) == device_kind(CPU) < 2**32
