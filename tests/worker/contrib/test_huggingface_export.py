"""A checkpoint becomes a folder that transformers loads with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate, JobSpec
from elastic.launcher.cli import main
from elastic.store import checkpoint_directory
from elastic.worker.contrib.folders import INDEX
from elastic.worker.contrib.huggingface.export import to_huggingface
from elastic.worker.contrib.huggingface.stack import HuggingFaceStack, from_huggingface
from elastic.worker.replica.export import params_sha256
from elastic.worker.replica.replica import LayerReplica
from tests.worker.contrib.cut_models import replicas, run
from tests.worker.contrib.test_huggingface import config, masked
from tests.worker.model.toy_model import sgd

transformers = pytest.importorskip("transformers")


def trained(given: Any) -> list[LayerReplica]:
    """Layers of a model after one step. (Gradients of tied parameters are not summed here.)"""
    stack = from_huggingface(given, seed=3)
    layers = replicas(stack)
    run(layers, [1, 3], masked(0))
    for layer in layers:
        layer.update(layer.gradient, 1.0, 0.1)
    for (first, name), *others in stack.tied:
        for other, again in others:
            with torch.no_grad():
                value = layers[first].module.get_parameter(name)
                layers[other].module.get_parameter(again).copy_(value)
    return layers


def save(layers: list[LayerReplica], folder: Path, stack: HuggingFaceStack | None = None) -> Path:
    """Write the layers as a checkpoint. `stack`: describe them in it."""
    for layer in layers:
        view = memoryview(layer.state_run().numpy().data)
        checkpoint_directory.write_part(folder, 1, layer.index, 0, len(layers), 1, view)
    if stack is None:
        return checkpoint_directory.commit(folder, 1)
    optimizer = sgd()
    spec = JobSpec(
        stack.specs(Accumulate.EXACT, optimizer), n_microbatches=1, n_steps=1,
        contents=stack.contents(), optimizer=optimizer.describe(),
    )  # fmt: skip
    return checkpoint_directory.commit(folder, 1, spec)


def folder_of(given: Any, path: Path) -> Path:
    """A folder with the config and the files of a tokeniser."""
    given.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    (path / ".env").write_text("PASSWORD=1")
    (path / "model.safetensors").write_text("old weights")
    return path


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_transformers_loads_the_same_bits(family: str, shard_bytes: int, tmp_path: Path) -> None:
    given = config(family)
    layers = trained(given)
    out = tmp_path / "out"
    source = folder_of(given, tmp_path / "model")
    found = to_huggingface(save(layers, tmp_path / "c"), source, out, shard_bytes=shard_bytes)
    runs = [[memoryview(layer.state_run().numpy().data)] for layer in layers]
    assert found["params_sha256"] == params_sha256(runs)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    stack = from_huggingface(given)
    values = dict(model.named_parameters(remove_duplicate=False))
    for layer in layers:
        for name, parameter in layer.module.named_parameters():
            assert torch.equal(values[stack.name_of(layer.index, name)], parameter), name
    assert (out / INDEX).exists() == (shard_bytes < 1 << 30)
    assert (out / "tokenizer.json").read_text() == "{}" and found["step"] == 1
    assert not (out / ".env").exists()
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, out))
    changed = {name for name in before.keys() | after if before.get(name) != after.get(name)}
    assert changed <= {"architectures", "dtype"}
    again = replicas(from_huggingface(out))
    assert run(again, [2], masked(1)) == run(trained(given), [], masked(1))
    with torch.no_grad():
        loss = model.train()(**masked(2).fields).loss.item()
    assert run(again, [1], masked(2)) == pytest.approx(loss, abs=1e-5)


def partly_frozen(path: Path, family: str, frozen: str) -> Any:
    """A model in a folder. Its parameters with `frozen` in their names are frozen."""
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(config(family))
    model.save_pretrained(path)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    return model


@pytest.mark.parametrize(("family", "frozen"), [("llama", "layers"), ("gpt2", "wte")])
def test_frozen_parameters_are_read_from_the_folder(
    family: str, frozen: str, tmp_path: Path
) -> None:
    """The head of gpt2 is tied to its embedding, and has no values of its own in the files."""
    model = partly_frozen(tmp_path / "model", family, frozen)
    layers, stack = trained(model), from_huggingface(model)
    checkpoint = save(layers, tmp_path / "c", stack)
    written, whole = (
        sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for folder in (checkpoint, tmp_path / "model")
    )
    assert family != "llama" or written < whole
    found = to_huggingface(checkpoint, tmp_path / "model", tmp_path / "out")
    runs = [[memoryview(layer.state_run().numpy().data)] for layer in layers]
    assert found["params_sha256"] == params_sha256(runs)
    values = dict(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters(
            remove_duplicate=False
        )
    )
    for layer in layers:
        for name, parameter in layer.module.named_parameters():
            assert torch.equal(values[stack.name_of(layer.index, name)], parameter), name
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(FieldError, match=r"--model: .*the checkpoint has no frozen parameters"):
        to_huggingface(checkpoint, tmp_path / "model", tmp_path / "again")


def test_buffers_are_read_from_the_folder(tmp_path: Path) -> None:
    """They are constant, so a checkpoint has none; transformers would set them to 0."""
    routed = transformers.DeepseekV3Config(
        vocab_size=128, hidden_size=32, intermediate_size=48, moe_intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=8,
        q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(routed)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    wanted = model.get_buffer(bias).copy_(torch.tensor([3.0, 1.0, 2.0, 4.0])).clone()
    model.save_pretrained(tmp_path / "model")
    checkpoint = save(trained(model), tmp_path / "c")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    to_huggingface(checkpoint, tmp_path / "model", tmp_path / "out")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(found.get_buffer(bias), wanted)
    assert found.dtype == torch.float32, "that of the parameters in the checkpoint"


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = config("llama")
    checkpoint = save(trained(given), tmp_path / "c")
    source, out = folder_of(given, tmp_path / "model"), tmp_path / "new" / "out"
    words = ["convert", str(checkpoint.parent), str(out), "--model", str(source), "--json"]
    assert main(words) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["step"] == 1 and printed["tensors"] == len(list(json_names(out)))
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]
    assert main(words) == 2
    assert "OUT" in capfd.readouterr().err


def json_names(folder: Path) -> list[str]:
    """The names of the tensors in a folder with one file."""
    data = (folder / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]


def test_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint, out = save(trained(config("llama")), tmp_path / "c"), tmp_path / "out"
    wider = folder_of(config("llama", intermediate_size=64), tmp_path / "wider")
    deeper = folder_of(config("llama", num_hidden_layers=4), tmp_path / "deeper")
    tied = folder_of(config("llama", tie_word_embeddings=True), tmp_path / "tied")
    several = folder_of(transformers.T5Config(), tmp_path / "several")
    damaged = folder_of(config("llama"), tmp_path / "damaged")
    (damaged / "config.json").write_text('{"model_type": "llama", "hidden_size": "x"}')
    for source, text in (
        (wider, "down_proj"),
        (deeper, "6 layers"),
        (tmp_path, "config.json"),
        (tied, "are tied in config.json, and differ"),
        (several, "its config.json does not fit"),
        (damaged, "its config.json is not that of a model"),
    ):
        with pytest.raises(FieldError, match=text) as caught:
            to_huggingface(checkpoint, source, out)
        assert caught.value.field == "--model"
    assert not out.exists() and not list(tmp_path.glob(".*"))
    inside, unwritable = checkpoint / "out", Path("/proc/x/out")
    model = folder_of(config("llama"), tmp_path / "model")
    for target, text in ((inside, "in the checkpoint"), (unwritable, "cannot be written")):
        with pytest.raises(FieldError, match=text) as caught:
            to_huggingface(checkpoint, model, target)
        assert caught.value.field == "OUT"
