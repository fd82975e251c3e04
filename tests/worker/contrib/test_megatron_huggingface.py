"""Models of transformers on megatron-core's layers: the same losses, and files there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.launcher.cli import main
from elastic.worker.contrib.huggingface.export import to_huggingface
from elastic.worker.contrib.huggingface.stack import from_huggingface
from elastic.worker.contrib.megatron.huggingface.config import megatron_config
from elastic.worker.contrib.megatron.stack import MegatronStack, from_megatron
from elastic.worker.model.layers import TensorParallel
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.replica.replica import LayerReplica
from tests.worker.contrib.cut_models import replicas, run
from tests.worker.contrib.gpt_models import build_stack
from tests.worker.contrib.llama_models import needs_gate
from tests.worker.contrib.test_huggingface import SIZES
from tests.worker.contrib.test_huggingface_export import save

transformers = pytest.importorskip("transformers")
LENGTH = 16
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN3_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN2_MOE = {**QWEN3_MOE, "shared_expert_intermediate_size": 40}
IGNORED = {"shared_expert_intermediate_size": 0, "qkv_bias": True}
"""Fields of Qwen2 MoE that configs of Qwen3 MoE have, too, without influence."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3}),
    "tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": LENGTH}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3-moe": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-some": ("qwen3_moe", {**QWEN3_MOE, "mlp_only_layers": [1], **IGNORED}),
    "qwen2-moe": ("qwen2_moe", {**QWEN2_MOE, "norm_topk_prob": True}),
    "qwen2-moe-some": ("qwen2_moe", {**QWEN2_MOE, "decoder_sparse_step": 2, "qkv_bias": False}),
}
"""Family and changes of the config. Two norms of the top probabilities are among them."""


def kinds(*names: str) -> list[Any]:
    """Names of MODELS, for a test that is skipped where megatron-core lacks a part of the model."""
    gated = [name for name in names if name.startswith("qwen2-moe")]
    return [pytest.param(n, marks=needs_gate) if n in gated else n for n in names]


def config_of(name: str, **changes: Any) -> Any:
    family, given = MODELS[name]
    return transformers.AutoConfig.for_model(family, **{**SIZES, **given, **changes})


def model_of(given: Any) -> Any:
    """A model whose norms and biases have values of their own, too."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(given).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def stack_of(folder: Path, weights: Path | None = None, **fields: Any) -> MegatronStack:
    config, arguments = megatron_config(folder, max_sequence_length=LENGTH, **fields)
    return from_megatron(config, **arguments, weights=weights)


def layers_of(stack: MegatronStack, alone: TensorParallel) -> list[LayerReplica]:
    return list(build_stack(stack, alone))


def rows() -> Tensor:
    return torch.randint(3, 96, (2, LENGTH + 1), generator=torch.Generator().manual_seed(9))


def fields_of(tokens: Tensor) -> dict[str, Tensor]:
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


@pytest.mark.parametrize("name", kinds(*MODELS))
def test_weights_of_transformers_there_and_back(
    name: str, tmp_path: Path, alone: TensorParallel
) -> None:
    model, source = model_of(config_of(name)), tmp_path / "model"
    model.save_pretrained(source)
    labels = torch.cat([torch.full((2, 1), -100), rows()[:, 1:]], dim=1)  # they are shifted there
    expected = model(input_ids=rows(), labels=labels, use_cache=False).loss.item()
    layers = layers_of(stack_of(source, source), alone)
    assert run(layers, [1, 3], Microbatch(0, 0, fields_of(rows()))) == pytest.approx(
        expected, abs=1e-5
    )
    for layer in layers:
        layer.update(layer.gradient, 1.0, 0.0)  # changes no value
    checkpoint, out = str(save(layers, tmp_path / "c")), tmp_path / "out"
    assert main(["convert", checkpoint, str(out), "--model", str(source)]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(again) is type(model)
    for parameter, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[parameter], value), parameter
    dcp = tmp_path / "dcp"
    words = ["convert", checkpoint, str(dcp), "--to", "dcp", "--model", str(source)]
    assert main(words) == 0
    whole = from_huggingface(source, weights=dcp)
    for index, layer in enumerate(replicas(whole)):
        for parameter, value in layer.module.named_parameters():
            wanted = model.get_parameter(whole.name_of(index, parameter))
            assert torch.equal(value, wanted), parameter


def test_experts_of_one_tensor_are_read(tmp_path: Path, alone: TensorParallel) -> None:
    """As the conversion of a mixture that was trained with `from_huggingface` writes them."""
    source, given = tmp_path / "model", config_of("mixtral")
    given.save_pretrained(source)
    trained = replicas(from_huggingface(given, seed=3))
    run(trained, [1], Microbatch(0, 0, {"input_ids": rows(), "labels": rows()}))
    for layer in trained:
        layer.update(layer.gradient, 1.0, 0.0)
    out = tmp_path / "out"
    words = ["convert", str(save(trained, tmp_path / "c")), str(out), "--model", str(source)]
    assert main(words) == 0
    expert = layers_of(stack_of(source, out), alone)[1].module.get_parameter("layer.mlp.up")
    fused = trained[1].module.get_parameter("block.mlp.experts.gate_up_proj")
    assert torch.equal(expert, fused.chunk(2, dim=1)[1])


def test_fields_of_the_config_can_be_given(tmp_path: Path) -> None:
    """The ranks that share the layers share the experts, too."""
    config_of("qwen3-moe").save_pretrained(tmp_path)
    given, arguments = megatron_config(
        tmp_path,
        max_sequence_length=LENGTH,
        tensor_model_parallel_size=2,
        params_dtype=torch.bfloat16,
    )
    assert given.expert_model_parallel_size == 2 and given.params_dtype is torch.bfloat16
    assert from_megatron(given, **arguments).shapes(1)["layer.mlp.up"] == (4, 24, 32)


@pytest.mark.parametrize("name", kinds("llama", "qwen3-moe", "qwen2-moe"))
def test_both_kinds_of_layers_need_the_same_operations(name: str, tmp_path: Path) -> None:
    """But for the products of queries and keys, and norms, which a product with a vector has."""
    given = config_of(name)
    given.save_pretrained(tmp_path)
    pairs = 3 * (2.0 * LENGTH * 4 * 8) * 3  # of a token: in three blocks, forward and backward
    here = stack_of(tmp_path).training_flops(100) - 100 * pairs
    assert 0 <= from_huggingface(given).training_flops(100) - here < 0.02 * here


@pytest.mark.parametrize(
    "name", kinds("mixtral", "qwen3-moe", "qwen3-moe-some", "qwen2-moe", "qwen2-moe-some")
)
def test_the_loss_of_evenly_used_experts_is_that_of_transformers(
    name: str, tmp_path: Path, alone: TensorParallel
) -> None:
    """All logits of the routers are 0."""
    given = config_of(name, output_router_logits=True, router_aux_loss_coef=0.5)
    model, source = model_of(given), tmp_path / "model"
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            if parameter.endswith("mlp.gate.weight"):
                value.zero_()
    model.save_pretrained(source)
    labels = torch.cat([torch.full((2, 1), -100), rows()[:, 1:]], dim=1)
    outputs = model(input_ids=rows(), labels=labels, use_cache=False)
    assert outputs.aux_loss.item() == pytest.approx(2.0)
    loss = run(layers_of(stack_of(source, source), alone), [2], Microbatch(0, 0, fields_of(rows())))
    assert loss == pytest.approx(outputs.loss.item(), abs=0.02)  # a row more has logits there


def test_initial_values_are_as_large_as_those_of_transformers(
    tmp_path: Path, alone: TensorParallel
) -> None:
    config_of("llama", initializer_range=0.02).save_pretrained(tmp_path)
    block = layers_of(stack_of(tmp_path), alone)[1].module
    for name in ("self_attention.linear_proj", "mlp.down", "mlp.up", "self_attention.linear_qkv"):
        assert block.get_parameter(f"layer.{name}.weight").std().item() == pytest.approx(
            0.02, rel=0.15
        )


ROPE = "LlamaConfig.rope_parameters"


@pytest.mark.parametrize(
    ("name", "changes", "fields", "text"),
    [
        ("llama", {"attention_bias": True}, {}, "LlamaConfig.attention_bias: True"),
        ("llama", {"hidden_act": "gelu"}, {}, "LlamaConfig.hidden_act: 'gelu'"),
        ("llama", {"is_causal": False}, {}, "LlamaConfig.is_causal: False"),
        ("llama", {"dtype": "float64"}, {}, "LlamaConfig.dtype: torch.float64"),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8"}},
            {},
            "LlamaConfig.quantization_config: a quantization",
        ),
        ("mistral", {"sliding_window": 8}, {}, "MistralConfig.sliding_window: 8 .* at least max"),
        ("mixtral", {"router_jitter_noise": 0.1}, {}, "MixtralConfig.router_jitter_noise: 0.1"),
        ("mixtral", {"num_experts_per_tok": 1}, {}, "MixtralConfig.num_experts_per_tok: 1 .* 2"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, {}, "Qwen3MoeConfig.decoder_sparse_step: 0"),
        ("qwen2-moe", {"num_experts": 0}, {}, "Qwen2MoeConfig.num_experts: 0 .* from 1 up"),
        (
            "qwen2-moe",
            {"shared_expert_intermediate_size": 0},
            {},
            "Qwen2MoeConfig.shared_expert_intermediate_size: 0 .* from 1 up",
        ),
        (
            "qwen2-moe",
            {"use_sliding_window": True, "sliding_window": 8},
            {},
            "Qwen2MoeConfig.sliding_window: 8 .* at least max",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
            {},
            f"{ROPE}.rope_type: 'yarn' .* default or llama3",
        ),
        (
            "llama",
            {"rope_parameters": {**LLAMA3, "high_freq_factor": 2.0}},
            {},
            f"{ROPE}.high_freq_factor: 2.0 .* 4.0 is a constant",
        ),
        ("llama", {}, {"hidden_sizes": 3}, "fields: 'hidden_sizes' .* fields of megatron's Trans"),
    ],
)
def test_what_the_layers_do_not_compute_is_named(
    name: str, changes: dict[str, Any], fields: dict[str, Any], text: str, tmp_path: Path
) -> None:
    config_of(name, **changes).save_pretrained(tmp_path)
    with pytest.raises(FieldError, match=text):
        megatron_config(tmp_path, max_sequence_length=LENGTH, **fields)


def test_a_megatron_without_the_gate_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_of("qwen2-moe").save_pretrained(tmp_path)
    monkeypatch.delattr(TransformerConfig, "moe_shared_expert_gate", raising=False)
    with pytest.raises(FieldError, match=r"shared_expert_intermediate_size: 40 .* 0.16 or newer"):
        megatron_config(tmp_path, max_sequence_length=LENGTH)


def test_another_family_is_named(tmp_path: Path) -> None:
    transformers.GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(FieldError, match=r"model_type: 'gpt2' .* one of llama, mistral, qwen2"):
        megatron_config(tmp_path, max_sequence_length=LENGTH)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": 2}, "it has more than 2 blocks"),
        ({"num_hidden_layers": 4}, "it has no tensor model.layers.3"),
        ({"num_key_value_heads": 4}, r"k_proj.weight must have 32 rows"),
        ({"intermediate_size": 56}, "layer 1 of the model has layer.mlp.[a-z]*.weight of shape"),
    ],
)
def test_weights_of_another_model_are_named(
    changes: dict[str, int], text: str, tmp_path: Path, alone: TensorParallel
) -> None:
    model_of(config_of("llama")).save_pretrained(tmp_path / "weights")
    config_of("llama", **changes).save_pretrained(tmp_path / "model")
    with pytest.raises(FieldError, match=text):
        layers_of(stack_of(tmp_path / "model", tmp_path / "weights"), alone)


@pytest.mark.parametrize(
    ("given", "name", "fields", "text"),
    [
        ("qwen2", "llama", {}, "bias"),
        ("qwen3", "llama", {}, "norm.weight"),
        ("qwen2-moe-some", "qwen3-moe-some", {}, r"shared_expert\.\w+\.weight"),
        pytest.param(
            "qwen2-moe",
            "qwen2-moe",
            {"moe_shared_expert_gate": False},
            "shared_expert_gate.weight",
            marks=needs_gate,
        ),
    ],
)
def test_weights_that_would_be_left_out_are_named(
    given: str, name: str, fields: dict[str, Any], text: str, tmp_path: Path
) -> None:
    model_of(config_of(given, head_dim=8)).save_pretrained(tmp_path / "weights")
    config_of(name).save_pretrained(tmp_path / "model")
    with pytest.raises(FieldError, match=rf"it has .*{text}, which this model does not"):
        stack_of(tmp_path / "model", tmp_path / "weights", **fields)


def test_numbers_with_scales_are_named(tmp_path: Path, alone: TensorParallel) -> None:
    config_of("llama").save_pretrained(tmp_path)
    values = model_of(config_of("llama")).state_dict()
    values["model.layers.1.mlp.up_proj.weight"] = torch.ones(48, 32).to(torch.float8_e4m3fn)
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(FieldError, match=r"float8_e4m3fn.*up_proj.weight needs float32"):
        layers_of(stack_of(tmp_path, tmp_path), alone)
    with pytest.raises(FieldError, match=r"float8_e4m3fn.*up_proj.weight needs float32"):
        replicas(from_huggingface(tmp_path))


def test_a_head_that_is_not_tied_any_more_is_named(tmp_path: Path, alone: TensorParallel) -> None:
    """In files, and in a checkpoint. A tied matrix may have either name."""
    config_of("tied").save_pretrained(tmp_path)
    values = dict(model_of(config_of("tied")).state_dict())
    head = values.pop("lm_head.weight")
    table = values.pop("model.embed_tokens.weight")
    path = tmp_path / "model.safetensors"
    for given in ({"lm_head.weight": head}, {"model.embed_tokens.weight": table}):
        save_file({**values, **given}, path)
        layers = layers_of(stack_of(tmp_path, tmp_path), alone)
        assert torch.equal(layers[-1].module.get_parameter("output.weight"), table)
    save_file({**values, "lm_head.weight": head + 1, "model.embed_tokens.weight": table}, path)
    with pytest.raises(FieldError, match=r"are tied in the model, and differ there"):
        layers_of(stack_of(tmp_path, tmp_path), alone)
    config, arguments = megatron_config(tmp_path, max_sequence_length=LENGTH)
    arguments["share_embeddings_and_output_weights"] = False
    trained = layers_of(from_megatron(config, **arguments), alone)
    run(trained, [1], Microbatch(0, 0, fields_of(rows())))
    for layer in trained:
        layer.update(layer.gradient, 1.0, 0.0)
    with pytest.raises(FieldError, match=r"head and embedding are tied by its config.json"):
        to_huggingface(save(trained, tmp_path / "c"), tmp_path, tmp_path / "out")


def test_a_checkpoint_of_another_model_is_named(
    tmp_path: Path, alone: TensorParallel, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of("llama").save_pretrained(tmp_path / "model")
    config_of("qwen2").save_pretrained(tmp_path / "other")
    layers = layers_of(stack_of(tmp_path / "model"), alone)
    run(layers, [1], Microbatch(0, 0, fields_of(rows())))
    for layer in layers:
        layer.update(layer.gradient, 1.0, 0.0)
    words = ["convert", str(save(layers, tmp_path / "c")), str(tmp_path / "out")]
    assert main([*words, "--model", str(tmp_path / "other")]) == 2
    assert "layer 1 has layer.self_attention.linear_qkv.bias of no such" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
