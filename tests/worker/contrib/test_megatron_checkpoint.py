"""Weights come from megatron's distributed checkpoints, and go back there, bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.launcher.cli import main
from elastic.worker.contrib.megatron.checkpoint import to_megatron
from elastic.worker.contrib.megatron.stack import MegatronStack, from_megatron
from elastic.worker.model.layers import TensorParallel
from elastic.worker.model.microbatch import Microbatch
from tests.worker.contrib.cut_models import run
from tests.worker.contrib.gpt_models import build_stack
from tests.worker.contrib.llama_models import LENGTH, VOCABULARY, config, stack
from tests.worker.contrib.megatron_checkpoints import KINDS, config_of, tokens
from tests.worker.contrib.test_huggingface_export import save


def megatron(command: str, folder: Path) -> dict[str, float]:
    """Run megatron's own code in a process of its own; return its losses."""
    words = [
        sys.executable,
        "-m",
        "tests.worker.contrib.megatron_checkpoints",
        command,
        str(folder),
    ]
    done = subprocess.run(words, capture_output=True, text=True)  # the suite's limit holds
    assert done.returncode == 0, done.stderr[-3000:]
    losses: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return losses


def stack_of(kind: str, folder: Path) -> MegatronStack:
    return from_megatron(
        config_of(kind),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        weights=folder,
        **KINDS[kind][1],
    )


def fields_of(rows: Tensor) -> dict[str, Tensor]:
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def test_each_kind_there_and_back(tmp_path: Path, alone: TensorParallel) -> None:
    losses = megatron("save", tmp_path)
    for kind in KINDS:
        layers = build_stack(stack_of(kind, tmp_path / kind), alone)
        loss = run(list(layers), [1, 2], Microbatch(0, 0, fields_of(tokens())))
        assert loss == pytest.approx(losses[kind], abs=1e-5), kind
        for layer in layers:
            layer.update(layer.gradient, 1.0, 0.0)  # changes no value
        checkpoint = save(list(layers), tmp_path / f"{kind}-checkpoint")
        out = str(tmp_path / f"{kind}-out")
        assert main(["convert", str(checkpoint), out, "--to", "megatron"]) == 0
        again = build_stack(stack_of(kind, Path(out)), alone)
        for layer, other in zip(layers, again, strict=True):
            for name, value in layer.module.named_parameters():
                assert torch.equal(value, other.module.get_parameter(name)), (kind, name)
    megatron("load", tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda f: shutil.rmtree(f / "iter_0000001"), "names it, and it has no .metadata"),
        (lambda f: (f / "latest_checkpointed_iteration.txt").write_text("../x"), "names it"),
        (lambda f: shutil.rmtree(f), "it has no .metadata and no latest_checkpointed_iteration"),
    ],
)
def test_a_folder_without_a_checkpoint_is_named(
    change: Callable[[Path], object], text: str, tmp_path: Path, alone: TensorParallel
) -> None:
    folder = converted(tmp_path, alone)
    change(folder)
    with pytest.raises(FieldError, match=text):
        stack_of("llama", folder)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_layers": 3}, "the model has 3 blocks"),
        ({"num_layers": 1}, "the model has 1 blocks"),
        ({"ffn_hidden_size": 64}, "block 0 of the model has mlp.gate.weight of shape"),
        ({"add_qkv_bias": True}, "no tensor .*linear_qkv.bias"),
    ],
)
def test_a_checkpoint_of_another_model_is_named(
    changes: dict[str, Any], text: str, tmp_path: Path, alone: TensorParallel
) -> None:
    folder = converted(tmp_path, alone)
    with pytest.raises(FieldError, match=text):
        build_stack(stack(config(**changes), weights=folder), alone)


def test_a_parameter_that_the_model_lacks_is_named(tmp_path: Path, alone: TensorParallel) -> None:
    folder = converted(tmp_path, alone, add_qkv_bias=True)
    with pytest.raises(
        FieldError, match=r"it has decoder.layers.self_attention.linear_qkv.bias, wh"
    ):
        stack(weights=folder)


def test_rows_beyond_the_vocabulary_are_left_out(tmp_path: Path, alone: TensorParallel) -> None:
    """megatron rounds the number of rows up."""
    folder, wanted = converted(tmp_path, alone), build_stack(stack(), alone)
    layers = build_stack(stack(vocab_size=VOCABULARY - 8, weights=folder), alone)
    found = layers[0].module.get_parameter("embedding.word_embeddings.weight")
    whole = wanted[0].module.get_parameter("embedding.word_embeddings.weight")
    assert torch.equal(found, whole[: VOCABULARY - 8])


def converted(folder: Path, alone: TensorParallel, **changes: Any) -> Path:
    """A checkpoint of `stack()`, as megatron writes it. `changes`: of its config."""
    layers = build_stack(stack(config(**changes)), alone)
    run(list(layers), [1], Microbatch(0, 0, fields_of(tokens())))
    for layer in layers:
        layer.update(layer.gradient, 1.0, 0.0)  # changes no value
    to_megatron(save(list(layers), folder / "c"), folder / "out")
    return folder / "out"
