"""LoRA adapters: as in a plain loop of peft, alone in copies, and there and back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate
from elastic.launcher.cli import main
from elastic.worker.contrib.huggingface.stack import HuggingFaceStack, from_huggingface
from elastic.worker.model.optimizer import adamw
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.export import params_sha256
from elastic.worker.replica.replica import LayerReplica
from tests.worker.contrib.cut_models import replicas, run
from tests.worker.contrib.test_huggingface import config, masked
from tests.worker.contrib.test_huggingface_export import save
from tests.worker.model.toy_model import ALONE, CPU

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt2")


def lora(**fields: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", **fields})


def base(path: Path, family: str = "llama") -> Any:
    """A model whose weights are in a folder."""
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(config(family))
    model.save_pretrained(path)
    return model


def trained(stack: HuggingFaceStack, steps: int = 2) -> list[LayerReplica]:
    layers = replicas(stack)
    for step in range(steps):
        run(layers, [1, 3], masked(step))
        for layer in layers:
            layer.update(layer.gradient.clone(), 1.0, 0.1)
            layer.clear()
    return layers


def values(layers: list[LayerReplica], stack: HuggingFaceStack) -> dict[str, torch.Tensor]:
    return {
        stack.name_of(layer.index, name): parameter.detach()
        for layer in layers
        for name, parameter in layer.module.named_parameters()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_only_adapters_change_and_the_loss_is_that_of_peft(family: str, tmp_path: Path) -> None:
    model, given = base(tmp_path / "m", family), lora()
    stack = from_huggingface(tmp_path / "m", lora=given, seed=2)
    start = values(replicas(stack), stack)
    layers = trained(stack)
    for name, value in values(layers, stack).items():
        assert torch.equal(value, start[name]) == ("lora" not in name), name
    plain = dict(model.named_parameters(remove_duplicate=False))
    wrapped = peft.get_peft_model(model, given)
    with torch.no_grad():
        for name, parameter in wrapped.get_base_model().named_parameters():
            if "lora" in name:
                parameter.copy_(values(layers, stack)[name])
    for name, value in start.items():
        assert "lora" in name or torch.equal(plain[name.replace(".base_layer", "")], value), name
    batch = masked(5)
    loss = wrapped.train()(**batch.fields).loss.item()
    assert run(layers, [1, 3], batch) == pytest.approx(loss, abs=1e-5)


def test_copies_have_the_adapters_only(tmp_path: Path) -> None:
    base(tmp_path / "m")
    stack = from_huggingface(tmp_path / "m", lora=lora())
    for index, spec in enumerate(stack.specs(Accumulate.EXACT)):
        elements = sum(
            p.numel() for n, p in stack.empty_layer(index).named_parameters() if "lora" in n
        )
        assert (elements > 0) == (0 < index < stack.n_layers - 1)
        assert spec.gradient_bytes == 8 * (elements + 16)


def test_initial_values_depend_on_seed_and_layer_alone(tmp_path: Path) -> None:
    base(tmp_path / "m")
    one, same, other = (
        from_huggingface(tmp_path / "m", lora=lora(), seed=seed) for seed in (1, 1, 2)
    )
    torch.rand(3)
    found = [values(replicas(stack), stack) for stack in (one, same, other)]
    drawn = [name for name in found[0] if "lora_A" in name]
    for name in drawn:
        assert torch.equal(found[0][name], found[1][name])
        assert not torch.equal(found[0][name], found[2][name])
        assert not found[0][name.replace("lora_A", "lora_B")].any()
    assert len({float(found[0][name].view(-1)[0]) for name in drawn}) == len(drawn)


def test_a_config_without_weights_gets_adapters_too() -> None:
    stack = from_huggingface(config("llama"), lora=lora(init_lora_weights="gaussian"))
    for name, value in values(replicas(stack), stack).items():
        assert value.isfinite().all() and value.any() == ("lora_B" not in name), name


def test_a_model_of_peft_is_taken_as_it_is(tmp_path: Path) -> None:
    wrapped = peft.get_peft_model(base(tmp_path / "m"), lora())
    stack = from_huggingface(wrapped)
    known = dict(wrapped.get_base_model().named_parameters())
    for name, value in values(replicas(stack), stack).items():
        assert torch.equal(value, known[name]), name
    assert {n for n, p in known.items() if p.requires_grad} == {n for n in known if "lora" in n}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_loads_what_the_command_writes(family: str, tmp_path: Path) -> None:
    model, given = base(tmp_path / "m", family), lora()
    given.save_pretrained(str(tmp_path / "lora"))
    stack = from_huggingface(tmp_path / "m", lora=tmp_path / "lora")
    layers = trained(stack, 1)
    saved, out = save(layers, tmp_path / "c"), tmp_path / "out"
    words = ["convert", str(saved), str(out), "--to", "peft", "--model", str(tmp_path / "m")]
    assert main([*words, "--lora", str(tmp_path / "lora")]) == 0
    loaded = peft.PeftModel.from_pretrained(model, str(out))
    batch = masked(5)
    loss = loaded(**batch.fields).loss.item()
    assert run(layers, [1, 3], batch) == pytest.approx(loss, abs=1e-5)
    again = from_huggingface(tmp_path / "m", lora=out)
    expected = values(layers, stack)
    for name, value in values(replicas(again), again).items():
        assert torch.equal(value, expected[name]), name
    written = json.loads((out / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "m")


def test_the_command_prints_the_hash_of_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base(tmp_path / "m")
    lora().save_pretrained(str(tmp_path / "lora"))
    stack = from_huggingface(tmp_path / "m", lora=tmp_path / "lora")
    layers = trained(stack, 1)
    saved = save(layers, tmp_path / "c", stack)
    words = ["convert", str(saved), str(tmp_path / "out"), "--model", str(tmp_path / "m"), "--json"]
    assert main([*words, "--to", "peft", "--lora", str(tmp_path / "lora")]) == 0
    runs = [[memoryview(layer.state_run().numpy().data)] for layer in layers]
    assert json.loads(capfd.readouterr().out)["params_sha256"] == params_sha256(runs)
    words[2] = str(tmp_path / "again")
    assert main(words) == 2
    assert "the checkpoint has adapters: use --to peft" in capfd.readouterr().err
    lora(r=8).save_pretrained(str(tmp_path / "other"))
    assert main([*words, "--to", "peft", "--lora", str(tmp_path / "other")]) == 2
    assert "adapters that were trained is needed" in capfd.readouterr().err
    (tmp_path / "m" / "model.safetensors").unlink()
    assert main(words) == 2
    assert "the checkpoint has adapters: use --to peft" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: 8, "lora: 8 is not usable: .*a peft.LoraConfig"),
        (lambda: lora(use_dora=True), "LoraConfig.use_dora: True is not usable: leave it out"),
        (lambda: lora(bias="all"), "LoraConfig.bias: 'all' is not usable: leave it out"),
        (lambda: lora(modules_to_save=["lm_head"]), "LoraConfig.modules_to_save: "),
        (lambda: lora(init_lora_weights="pissa"), "LoraConfig.init_lora_weights: 'pissa' is"),
        (lambda: lora(init_lora_weights=1), "LoraConfig.init_lora_weights: 1 is not usable"),
        (
            lambda: lora(alora_invocation_tokens=[1]),
            "LoraConfig.alora_invocation_tokens: .*only plain LoRA",
        ),
        (lambda: lora(target_modules="*_proj"), "lora: .*nothing to repeat"),
        (lambda: lora(target_modules=["lm_head"]), "LoraConfig.target_modules: lm_head, which is"),
        (lambda: lora(target_modules=["nothing"]), "lora: .*nothing"),
        (lambda: "/nowhere", "lora: '/nowhere' is not usable: it has no adapter_config.json"),
    ],
)
def test_what_cannot_be_trained_is_refused(given: Any, message: str) -> None:
    with pytest.raises(FieldError) as raised:
        from_huggingface(config("llama"), lora=given())
    assert re.search(message, str(raised.value)), raised.value


def test_files_of_other_adapters_are_refused(tmp_path: Path) -> None:
    base(tmp_path / "m")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    few = lora(target_modules=["q_proj"])
    peft.get_peft_model(model, few).save_pretrained(str(tmp_path / "few"))
    lora().save_pretrained(str(tmp_path / "few"))
    stack = from_huggingface(tmp_path / "m", lora=tmp_path / "few")
    with pytest.raises(FieldError, match=r"lora: .*it has no .*k_proj.* of other adapters"):
        replicas(stack)
    (tmp_path / "few" / "adapter_model.safetensors").rename(tmp_path / "few" / "adapter_model.bin")
    with pytest.raises(FieldError, match=r"lora: .*adapter_model.bin: save the adapters as"):
        from_huggingface(tmp_path / "m", lora=tmp_path / "few")


def test_adapters_beside_adapters_are_refused(tmp_path: Path) -> None:
    wrapped = peft.get_peft_model(base(tmp_path / "m"), lora())
    with pytest.raises(FieldError, match="a model that has adapters already"):
        from_huggingface(wrapped, lora=lora())


def test_a_device_gets_frozen_parameters_too(tmp_path: Path) -> None:
    """`build_empty` has arbitrary values, but frozen parameters are those of the folder."""
    base(tmp_path / "m")
    stack = from_huggingface(tmp_path / "m", lora=lora())
    arguments = (ALONE, adamw(0.1), Accumulate.EXACT, 4, CPU)
    full, empty = (build_replica(stack, 1, *arguments, empty=empty) for empty in (False, True))
    empty.fill_frozen()
    known = dict(full.module.named_parameters())
    for name, parameter in empty.module.named_parameters():
        assert "lora" in name or torch.equal(parameter, known[name])
