"""One rank of a tensor-parallel GPT, a process of test_tensor_parallel; writes a results file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from elastic.worker.contrib.megatron.stack import GPTStack, MegatronStack, init_tensor_parallel
from tests.worker.contrib import llama_models
from tests.worker.contrib.gpt_models import (
    backward_in_two_parts,
    build,
    build_stack,
    config,
    gradients_of,
    parts_and_whole,
    run,
    state_of,
    train,
)


def current(size: int, **changes: float) -> dict[str, MegatronStack]:
    """Models of current architectures for `size` ranks. `changes`: more fields of their configs."""
    dense = {"tensor_model_parallel_size": size, **changes}
    routed = {"expert_model_parallel_size": size, **dense}
    return {
        "llama": llama_models.stack(llama_models.config(**dense)),
        "experts": llama_models.stack(llama_models.experts(**routed)),
        "shared experts": llama_models.stack(llama_models.shared_experts(**routed)),
    }


def split_sequences(rank: int, size: int, folder: Path) -> None:
    """Train models whose ranks split sequences."""
    tp = init_tensor_parallel(rank, size, str(folder / "store"), split_sequences=True)
    results: dict[str, object] = {}
    for name, stack in split_models(size).items():
        layers = build_stack(stack, tp)
        results[f"{name} losses"] = train(layers, 2, data=llama_models.packed_microbatch)
        results[f"{name} states"] = [state_of(replica) for replica in layers]
    data = llama_models.packed_microbatch(0, 1)
    stack = split_models(size)["masked"]
    parts = backward_in_two_parts(lambda: build_stack(stack, tp), data)
    results["whole"], results["parts"] = parts
    torch.save(results, folder / f"rank{rank}.pt")


def split_models(size: int) -> dict[str, MegatronStack]:
    """Models for `size` ranks that split sequences, or for one."""
    config = llama_models.config(context_parallel_size=size)
    learned = llama_models.stack(config, position_embedding_type="learned_absolute")
    return {
        "plain": llama_models.stack(config),
        "learned": learned,
        "masked": llama_models.stack(config, attention_mask=True),
    }


def main(rank: int, size: int, folder: Path) -> None:
    tp = init_tensor_parallel(rank, size, str(folder / "store"))
    gpt = config(tp=size)
    results: dict[str, object] = {}
    layers = build(gpt, tp)
    results["initial"] = [state_of(replica) for replica in layers]
    results["losses"] = [run(layers, 0, index) for index in range(3)]
    results["gradients"] = [replica.gradient.clone() for replica in layers]
    results["norms"] = [replica.norm_sq(replica.gradient) for replica in layers]
    for replica in layers:
        replica.update(replica.gradient, 1.0, 0.01)
    results["updated"] = [state_of(replica) for replica in layers]
    dropped = build(config(tp=size, dropout=0.3), tp)
    results["dropout losses"] = train(dropped, 2)
    results["dropout states"] = [state_of(replica) for replica in dropped]
    results["whole"], results["parts"] = parts_and_whole(dropped, (1, 2, 3))
    tied = config(tp=size, tie_embeddings=True)
    tied_layers = build(tied, tp)
    results["tied losses"] = train(tied_layers, 2, GPTStack(tied).tied)
    for name, stack in current(size).items():
        layers = build_stack(stack, tp)
        results[f"{name} initial"] = [state_of(replica) for replica in layers]
        results[f"{name} losses"] = train(layers, 2)
        results[f"{name} states"] = [state_of(replica) for replica in layers]
    for name, stack in current(size, init_method_std=0.2).items():
        layers = build_stack(stack, tp)
        run(layers, 0, 0)
        results[f"{name} gradients"] = [gradients_of(replica) for replica in layers]
    torch.save(results, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    work = split_sequences if sys.argv[4:] == ["sequences"] else main
    work(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
