"""TP size 2 in two gloo processes gives the results of TP size 1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.worker.contrib.megatron.stack import GPTStack
from elastic.worker.model.layers import TensorParallel
from elastic.worker.model.state_codec import read_state, reshard
from tests.worker.contrib.gpt_models import (
    build,
    build_stack,
    config,
    gradients_of,
    run,
    state_of,
    train,
)
from tests.worker.contrib.llama_models import packed_microbatch
from tests.worker.model.tp_worker import current, split_models

SIZE = 2
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both ranks."""
    return results_of(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def sequence_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both ranks, which split sequences."""
    return results_of(tmp_path_factory.mktemp("sequences"), "sequences")


def results_of(folder: Path, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.worker.model.tp_worker"]
    workers = [
        subprocess.Popen([*command, str(rank), str(SIZE), str(folder), *words], cwd=ROOT)
        for rank in range(SIZE)
    ]
    try:
        assert [worker.wait(120) for worker in workers] == [0] * SIZE
    finally:
        for worker in workers:
            worker.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(SIZE)]


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    left, right = read_state(one)[1], read_state(other)[1]
    for a, b in zip(left, right, strict=True):
        assert a.name == b.name
        torch.testing.assert_close(a.tensor, b.tensor, rtol=1e-3, atol=1e-4)


def test_initial_values_are_slices_of_the_same_model(
    ranks: list[dict[str, Any]], alone: TensorParallel
) -> None:
    for index, replica in enumerate(build(config(), alone)):
        parts = [rank["initial"][index] for rank in ranks]
        names = {n.name: n.shard_dim for n in read_state(parts[0])[1]}
        merged = read_state(reshard(parts, 0, 1))[1]
        for theirs, ours in zip(merged, read_state(state_of(replica))[1], strict=True):
            assert theirs.name == ours.name and torch.equal(theirs.tensor, ours.tensor)
        assert any(dim >= 0 for dim in names.values())
    block = {n.name: n.shard_dim for n in read_state(ranks[0]["initial"][1])[1]}
    assert {name.removeprefix("param/layer."): dim for name, dim in block.items() if dim >= 0} == {
        "self_attention.linear_qkv.weight": 0,
        "self_attention.linear_qkv.bias": 0,
        "self_attention.linear_proj.weight": 1,
        "mlp.linear_fc1.weight": 0,
        "mlp.linear_fc1.bias": 0,
        "mlp.linear_fc2.weight": 1,
    }


def test_loss_norm_and_update_equal_those_of_one_rank(
    ranks: list[dict[str, Any]], alone: TensorParallel
) -> None:
    layers = build(config(), alone)
    losses = [run(layers, 0, index) for index in range(3)]
    assert ranks[0]["losses"] == ranks[1]["losses"] == pytest.approx(losses, abs=1e-5)
    for index, replica in enumerate(layers):
        norm = sum(rank["norms"][index] for rank in ranks)
        assert norm == pytest.approx(replica.norm_sq(replica.gradient), rel=1e-4)
        replica.update(replica.gradient, 1.0, 0.01)
        close(reshard([rank["updated"][index] for rank in ranks], 0, 1), state_of(replica))


def test_replicated_parameters_stay_bit_equal_with_dropout(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["dropout losses"] == ranks[1]["dropout losses"]
    compared = 0
    for one, other in zip(*(rank["dropout states"] for rank in ranks), strict=True):
        for a, b in zip(read_state(one)[1], read_state(other)[1], strict=True):
            if a.shard_dim < 0:
                compared += 1
                assert torch.equal(a.tensor, b.tensor), a.name
    assert compared > 20


def test_tied_embeddings_learn_as_on_one_rank(
    ranks: list[dict[str, Any]], alone: TensorParallel
) -> None:
    gpt = config(tie_embeddings=True)
    losses = train(build(gpt, alone), 2, GPTStack(gpt).tied)
    assert ranks[0]["tied losses"] == ranks[1]["tied losses"] == pytest.approx(losses, abs=1e-4)


def test_checkpoint_of_two_ranks_loads_on_one_and_back(
    ranks: list[dict[str, Any]], alone: TensorParallel
) -> None:
    layers = build(config(), alone, empty=True)
    for index, replica in enumerate(layers):
        parts = [rank["updated"][index] for rank in ranks]
        replica.read_state(reshard(parts, 0, 1))
        assert replica.version == 1
        back = [reshard([state_of(replica)], rank, SIZE) for rank in range(SIZE)]
        assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))
    run(layers, 1, 0)


def test_a_backward_pass_in_two_parts_gives_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["whole"]) == len(rank["parts"]) > 12
        assert all(torch.equal(a, b) for a, b in zip(rank["whole"], rank["parts"], strict=True))


@pytest.mark.parametrize("name", ["llama", "experts", "shared experts"])
def test_current_architectures_learn_as_on_one_rank(
    ranks: list[dict[str, Any]], name: str, alone: TensorParallel
) -> None:
    layers = build_stack(current(1)[name], alone)
    for index, replica in enumerate(layers):
        parts = [rank[f"{name} initial"][index] for rank in ranks]
        merged = read_state(reshard(parts, 0, 1))[1]
        for theirs, ours in zip(merged, read_state(state_of(replica))[1], strict=True):
            assert theirs.name == ours.name and torch.equal(theirs.tensor, ours.tensor)
    losses = train(layers, 2)
    assert ranks[0][f"{name} losses"] == ranks[1][f"{name} losses"]
    assert ranks[0][f"{name} losses"] == pytest.approx(losses, abs=1e-4)
    for index, replica in enumerate(layers):
        one, other = (rank[f"{name} states"][index] for rank in ranks)
        for a, b in zip(read_state(one)[1], read_state(other)[1], strict=True):
            assert a.shard_dim >= 0 or torch.equal(a.tensor, b.tensor), a.name
        close(reshard([one, other], 0, 1), state_of(replica))


@pytest.mark.parametrize("name", ["llama", "experts", "shared experts"])
def test_current_architectures_have_the_gradients_of_one_rank(
    ranks: list[dict[str, Any]], name: str, alone: TensorParallel
) -> None:
    layers = build_stack(current(1, init_method_std=0.2)[name], alone)
    run(layers, 0, 0)
    for index, replica in enumerate(layers):
        one, other = (rank[f"{name} gradients"][index] for rank in ranks)
        for parameter, wanted in gradients_of(replica).items():
            dim = getattr(replica.module.get_parameter(parameter), "partition_dim", -1)
            found = one[parameter]
            if dim >= 0:
                found = torch.cat([found, other[parameter]], dim)
            assert wanted.abs().max() > 1e-3, parameter
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5, msg=parameter)


@pytest.mark.parametrize("name", ["plain", "learned", "masked"])
def test_ranks_that_split_sequences_learn_as_one(
    sequence_ranks: list[dict[str, Any]], name: str, alone: TensorParallel
) -> None:
    layers = build_stack(split_models(1)[name], alone)
    losses = train(layers, 2, data=packed_microbatch)
    one, other = (rank[f"{name} losses"] for rank in sequence_ranks)
    assert one == other == pytest.approx(losses, abs=1e-5)
    for index, replica in enumerate(layers):
        states = [rank[f"{name} states"][index] for rank in sequence_ranks]
        assert torch.equal(*states), "all ranks have the same gradients"
        close(reshard(states, 0, 1), state_of(replica))


def test_ranks_that_split_sequences_run_backward_passes_in_two_parts(
    sequence_ranks: list[dict[str, Any]],
) -> None:
    for rank in sequence_ranks:
        assert all(map(torch.equal, rank["whole"], rank["parts"]))
