from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic.domain.errors import FieldError, VaultError
from elastic.worker.model.state_codec import (
    NamedTensor,
    plan_state,
    read_state,
    reshard,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
shapes = st.lists(st.integers(0, 5), max_size=3)


def some(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    seeded = torch.Generator().manual_seed(seed)
    return (100 * torch.randn(shape, generator=seeded)).to(dtype)


def run_of(
    tensors: list[NamedTensor], version: int = 3, extra: dict[str, str] | None = None
) -> Tensor:
    plan = plan_state(version, tensors, extra or {})
    out = torch.full((plan.nbytes,), 255, dtype=torch.uint8)
    plan.write(out, tensors)
    return out


def whole(seed: int = 0) -> list[NamedTensor]:
    return [
        NamedTensor("param/w", some(torch.float32, [8, 3], seed), 0),
        NamedTensor("param/v", some(torch.bfloat16, [5, 4], seed + 1), 1),
        NamedTensor("param/b", some(torch.float32, [3], seed + 2)),
        NamedTensor("optim/w/step", torch.tensor(4.0)),
        NamedTensor("optim/w/m", some(torch.float32, [8, 3], seed + 3), 0),
    ]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=6), st.integers(0, 10**9))
def test_round_trip_is_bit_exact(kinds: list[tuple[torch.dtype, list[int]]], version: int) -> None:
    tensors = [
        NamedTensor(f"param/{i}", some(dtype, shape, i), i % 3 - 1)
        for i, (dtype, shape) in enumerate(kinds)
    ]
    run = run_of(tensors, version, {"optim/a/k": "[1]"})
    header, found = read_state(run)
    assert header.version == version and header.extra == {"optim/a/k": "[1]"}
    for one, other in zip(tensors, found, strict=True):
        assert one.name == other.name and one.shard_dim == other.shard_dim
        assert one.tensor.dtype == other.tensor.dtype and torch.equal(one.tensor, other.tensor)


def test_two_runs_of_the_same_state_are_the_same_bytes() -> None:
    assert torch.equal(run_of(whole()), run_of(whole()))


def test_a_run_may_be_an_unaligned_view() -> None:
    run = run_of(whole())
    for shift in (1, 8, 64):
        moved = torch.zeros(run.numel() + shift, dtype=torch.uint8)
        moved[shift:] = run
        _, found = read_state(moved[shift:])
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(whole(), found, strict=True))


def test_plan_for_another_version_equals_a_new_one() -> None:
    plan = plan_state(9, whole(), {"k": "1"})
    for version in (0, 10, 123456789):
        moved = plan.at(version)
        assert moved == plan_state(version, whole(), {"k": "1"})
        assert moved is not None and moved.fits(whole(), {"k": "1"})
    assert not plan.fits(whole(), {"k": "2"}) and not plan.fits(whole()[:-1], {"k": "1"})


@pytest.mark.parametrize("cut", [0, 4, 100, 4200, -33])
def test_cut_runs_are_refused(cut: int) -> None:
    with pytest.raises((VaultError, FieldError)):
        read_state(run_of(whole())[:cut])


def test_foreign_bytes_are_refused() -> None:
    with pytest.raises(VaultError):
        read_state(torch.full((9000,), 7, dtype=torch.uint8))


def test_unsupported_dtypes_are_named() -> None:
    with pytest.raises(FieldError, match="param/c"):
        plan_state(0, [NamedTensor("param/c", torch.zeros(2, dtype=torch.complex64))], {})


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_merge_to_the_whole(size: int) -> None:
    run = run_of(whole())
    parts = [reshard([run], rank, size) for rank in range(size)]
    _, first = read_state(parts[0])
    assert tuple(first[0].tensor.shape) == (8 // size, 3) and tuple(first[1].tensor.shape) == (
        5,
        4 // size,
    )
    assert torch.equal(reshard(parts, 0, 1), run)


def test_reshard_between_sizes() -> None:
    run = run_of(whole())
    by_two = [reshard([run], rank, 2) for rank in range(2)]
    by_four = [reshard(by_two, rank, 4) for rank in range(4)]
    assert torch.equal(reshard(by_four, 0, 1), run)
    assert reshard(by_two, 1, 2) is by_two[1]
    with pytest.raises(FieldError, match="tp"):
        reshard([run], 0, 3)


def test_shards_of_different_states_are_refused() -> None:
    run = run_of(whole())
    with pytest.raises(VaultError, match="version"):
        reshard([reshard([run], 0, 2), reshard([run_of(whole(), 4)], 1, 2)], 0, 1)
    other = [NamedTensor("optim/w/row", some(torch.float32, [3], rank)) for rank in range(2)]
    with pytest.raises(VaultError, match="optim/w/row"):
        reshard([run_of([tensor]) for tensor in other], 0, 1)
