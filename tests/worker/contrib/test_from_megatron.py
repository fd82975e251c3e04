"""Current architectures of megatron-core's layers compute what transformers computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate
from elastic.worker.contrib.megatron.layers import may_look
from elastic.worker.contrib.megatron.stack import from_megatron
from elastic.worker.model.layers import TensorParallel
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import adamw
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica
from tests.worker.contrib.cut_models import excess, run
from tests.worker.contrib.gpt_models import backward_in_two_parts, build_stack, gradients_of
from tests.worker.contrib.llama_models import (
    LENGTH,
    TRANSFORMERS_SIZES,
    VOCABULARY,
    config,
    experts,
    needs_gate,
    packed,
    shared_experts,
    stack,
)
from tests.worker.model.toy_model import CPU

transformers = pytest.importorskip("transformers")
FAMILIES = {"llama": {}, "qwen3": {"qk_layernorm": True}, "qwen2": {"add_qkv_bias": True}}
KINDS = ("llama", "experts", "shared-experts")


def microbatch(index: int, **others: Tensor) -> Microbatch:
    generator = torch.Generator().manual_seed(index)
    rows = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
    fields = {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
    return Microbatch(0, index, {**fields, **others})


def transformers_model(family: str) -> Any:
    sizes = {**TRANSFORMERS_SIZES, "intermediate_size": 48}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(family, **sizes)
        )
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model


def by_group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows of queries, keys and values, as megatron orders them: group after group."""
    parts = zip(q.chunk(2), k.chunk(2), v.chunk(2), strict=True)
    return torch.cat([torch.cat(part) for part in parts])


def of_transformers(values: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Values by the names of a transformers model, as values of our layers."""
    layers = [{"embedding.word_embeddings.weight": values["model.embed_tokens.weight"]}]
    for index in range(2):
        block = f"model.layers.{index}"
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"
        found = {
            "layer.input_layernorm.weight": values[f"{block}.input_layernorm.weight"],
            "layer.pre_mlp_layernorm.weight": values[f"{block}.post_attention_layernorm.weight"],
            "layer.self_attention.linear_proj.weight": values[f"{attention}.o_proj.weight"],
            "layer.mlp.gate.weight": values[f"{mlp}.gate_proj.weight"],
            "layer.mlp.up.weight": values[f"{mlp}.up_proj.weight"],
            "layer.mlp.down.weight": values[f"{mlp}.down_proj.weight"],
        }
        for kind in ("weight", "bias"):
            if f"{attention}.q_proj.{kind}" in values:
                found[f"layer.self_attention.linear_qkv.{kind}"] = by_group(
                    *(values[f"{attention}.{part}_proj.{kind}"] for part in "qkv")
                )
        for part in "qk":
            if f"{attention}.{part}_norm.weight" in values:
                name = f"layer.self_attention.{part}_layernorm.norm.weight"
                found[name] = values[f"{attention}.{part}_norm.weight"]
        layers.append(found)
    last = {"norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
    return [*layers, {ours: values[theirs] for ours, theirs in last.items()}]


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_transformers(family: str, alone: TensorParallel) -> None:
    given = config(**{"qk_layernorm": False, **FAMILIES[family]})
    layers = build_stack(stack(given), alone)
    compare(layers, transformers_model(family), of_transformers)


def compare(
    layers: Sequence[LayerReplica],
    model: Any,
    ours: Callable[[Mapping[str, Tensor]], list[dict[str, Tensor]]],
) -> None:
    """Give `layers` the values of a transformers model; compare loss and gradients with it.

    Args:
        ours: converts the model's values by name to values of the layers.
    """
    for layer, values in zip(layers, ours(dict(model.named_parameters())), strict=True):
        parameters = dict(layer.module.named_parameters())
        assert parameters.keys() == values.keys()
        with torch.no_grad():
            for name, value in values.items():
                parameters[name].copy_(value)
    fields = microbatch(0).fields
    logits = model(input_ids=fields["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), fields["labels"].flatten())
    assert run(list(layers), [1, 3], microbatch(0)) == pytest.approx(loss.item(), abs=1e-5)
    torch.autograd.backward(loss)
    wanted = ours({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for layer, gradients in zip(layers, wanted, strict=True):
        for name, value in gradients_of(layer).items():
            torch.testing.assert_close(
                value, gradients[name].double(), rtol=1e-3, atol=1e-5, msg=name
            )


@pytest.mark.parametrize("cuts", [[1], [2], [1, 2, 3]])
def test_cuts_change_no_bit(cuts: list[int], alone: TensorParallel) -> None:
    whole, cut = build_stack(stack(), alone), build_stack(stack(), alone)
    assert run(whole, [], microbatch(1)) == run(cut, cuts, microbatch(1))
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one.gradient, other.gradient)


@pytest.mark.parametrize("given", [config(), experts(), shared_experts()], ids=KINDS)
def test_a_backward_pass_in_two_parts_changes_no_bit(
    given: TransformerConfig, alone: TensorParallel
) -> None:
    whole, parts = backward_in_two_parts(lambda: build_stack(stack(given), alone), microbatch(5))
    assert all(map(torch.equal, whole, parts))


@pytest.mark.parametrize(
    "given", [config(), shared_experts(moe_aux_loss_coeff=0.0)], ids=KINDS[::2]
)
def test_first_loss_is_random_guessing_and_layers_differ(
    given: TransformerConfig, alone: TensorParallel
) -> None:
    layers = build_stack(stack(given), alone)
    guessing = torch.tensor(float(VOCABULARY)).log().item()
    assert run(layers, [], microbatch(2)) == pytest.approx(guessing, abs=0.1)
    one, two = (dict(layers[i].module.named_parameters()) for i in (1, 2))
    for name, parameter in one.items():
        ends = ("linear_proj.weight", "down.weight", "mlp.down")
        wanted = 0.01 if name.endswith(ends) else 0.02
        if parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(wanted, rel=0.15)
            assert not torch.equal(parameter, two[name])
        else:
            assert parameter.eq(1).all()


def test_initial_values_follow_the_config(alone: TensorParallel) -> None:
    given = config(init_method=torch.nn.init.ones_, embedding_init_method_std=3.0)
    layers = build_stack(stack(given, position_embedding_type="learned_absolute"), alone)
    for name, parameter in layers[0].module.named_parameters():
        assert parameter.std().item() == pytest.approx(3.0, rel=0.1), name
    assert layers[3].module.get_parameter("output.weight").eq(1).all()


def test_a_packed_document_sees_no_other(alone: TensorParallel) -> None:
    """A change in the first document changes no loss of the second one, and does without mask."""
    mask = packed((6, 10)).expand(2, 1, LENGTH, LENGTH)
    only_second = torch.zeros(2, LENGTH)
    only_second[:, 6:] = 1.0
    first, labels = microbatch(3).fields["tokens"], microbatch(3).fields["labels"]
    changed = first.clone()
    changed[:, :6] = (changed[:, :6] + 1) % VOCABULARY
    shared = {"attention_mask": mask, "loss_mask": only_second, "labels": labels}
    seen = {}
    for masked in (True, False):
        layers = build_stack(stack(attention_mask=masked), alone)
        seen[masked] = [
            run(layers, [2], microbatch(index, tokens=tokens, **shared))
            for index, tokens in enumerate((first, changed))
        ]
    assert seen[True][0] == seen[True][1]
    assert seen[False][0] != seen[False][1]


def test_no_mask_lets_a_token_look_ahead() -> None:
    nothing_hidden = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    found = may_look(nothing_hidden, CPU)
    assert found.shape == (2, 1, LENGTH, LENGTH)
    assert torch.equal(found[0, 0], torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())


def test_specs_have_the_real_sizes(alone: TensorParallel) -> None:
    model = stack(config(params_dtype=torch.bfloat16, bf16=True, add_qkv_bias=True))
    spec = adamw(0.01, master_weights=True)
    described = model.specs(Accumulate.EXACT, spec)
    assert len(described) == model.n_layers == 4 == len(model.contents())
    for index, told in enumerate(described):
        replica = build_replica(model, index, alone, spec, Accumulate.EXACT, 7, CPU)
        assert told.param_bytes == sum(p.nbytes for p in replica.module.parameters())
        assert told.gradient_bytes == replica.gradient_nbytes
    assert model.contents()[1] == model.contents()[2] != model.contents()[0]


def test_rotary_options_change_the_result(alone: TensorParallel) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"position_embedding_type": "none"},
        {"rotary_base": 500.0},
        {"rotary_percent": 0.5},
        {"given": config(rotary_interleaved=True)},
        {"given": config(no_rope_freq=[0, 1])},
    ]
    losses = [run(build_stack(stack(**option), alone), [], microbatch(4)) for option in options]
    assert len(set(losses)) == len(losses)


ROUTED = {"num_moe_experts": 4}
SHARED_SIZE, SHARED_GATE = "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"
CONTEXT2, TP2 = {"context_parallel_size": 2}, {"tensor_model_parallel_size": 2}
EXPERTS2 = {"expert_model_parallel_size": 2}
DROPOUTS = "hidden_dropout, config.attention_dropout"
FREQUENCY, TOPK = "moe_layer_freq", "moe_router_topk"
BALANCING = "moe_router_load_balancing_type"
SHARED = "share_embeddings_and_output_weights"
FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({**ROUTED, "moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor", "at None"),
    ({**ROUTED, "add_bias_linear": True}, "add_bias_linear", "no biases"),
    ({**ROUTED, **TP2}, "expert_model_parallel_size", "share both"),
    ({**ROUTED, "moe_router_load_balancing_type": "sinkhorn"}, BALANCING, "aux_loss"),
    ({**ROUTED, BALANCING: ["aux_loss"], "moe_aux_loss_coeff": [0.1]}, BALANCING, "no list"),
    ({**ROUTED, "moe_router_score_function": "tanh"}, "moe_router_score_function", "softmax"),
    ({**ROUTED, "moe_router_dtype": "bf16"}, "moe_router_dtype", "fp32"),
    ({**ROUTED, TOPK: 5}, TOPK, "1 to 4"),
    ({**ROUTED, FREQUENCY: [1]}, FREQUENCY, "a list of 2"),
    ({**ROUTED, FREQUENCY: 0}, FREQUENCY, "whole number"),
    ({**ROUTED, "moe_aux_loss_coeff": float("nan")}, "moe_aux_loss_coeff", "from 0 up"),
    ({**ROUTED, SHARED_SIZE: 1.5}, SHARED_SIZE, "whole number from 1 up"),
    ({SHARED_SIZE: 40}, SHARED_SIZE, "set num_moe_experts too"),
    ({**ROUTED, **TP2, **EXPERTS2, SHARED_SIZE: 41}, SHARED_SIZE, "multiple of .* .2."),
    ({"window_size": (4, 0)}, "window_size", "leave it at None"),
    ({**CONTEXT2, **TP2}, "context_parallel_size", "must be 1"),
    ({**CONTEXT2, **ROUTED}, "context_parallel_size", "expert parallelism"),
    ({**CONTEXT2, "hidden_dropout": 0.1}, DROPOUTS, "0.0"),
    ({"fp16": True}, "fp16", "bf16=True"),
    ({"bf16": True}, "bf16", "params_dtype=torch.bfloat16"),
    ({"params_dtype": torch.float16}, "params_dtype", "bfloat16"),
    ({"recompute_granularity": "selective"}, "recompute_granularity", "runtime plans"),
    ({**TP2, "ffn_hidden_size": 49}, "ffn_hidden_size", "multiple"),
    ({"num_query_groups": 3}, "num_query_groups", "divide"),
    ({"normalization": "rmsnorm"}, "normalization", "RMSNorm"),
    ({"activation_func": torch.nn.SiLU}, "activation_func", "silu"),
    ({"activation_func": "silu"}, "activation_func", "silu"),
    ({"init_method": "xavier"}, "init_method", "xavier_uniform_"),
    ({"init_method": torch.zeros_like}, "init_method", "fills its argument"),
    ({"kv_channels": 5}, "kv_channels", "even"),
    ({"ffn_hidden_size": 0}, "ffn_hidden_size", "from 1 up"),
    ({"hidden_dropout": 1.5}, "hidden_dropout", "at most 1"),
    ({"layernorm_epsilon": -1.0}, "layernorm_epsilon", "above 0"),
]


GATES = [
    ({**ROUTED, SHARED_GATE: True}, SHARED_GATE, "set moe_shared_expert_intermediate_size too"),
    ({**ROUTED, SHARED_SIZE: 40, SHARED_GATE: "no"}, SHARED_GATE, "True or False"),
]


@pytest.mark.parametrize(
    ("fields", "field", "remedy"),
    [*FIELDS, *(pytest.param(*one, marks=needs_gate) for one in GATES)],
)
def test_fields_that_the_layers_do_not_follow_are_refused(
    fields: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(FieldError, match=remedy) as caught:
        stack(config(**fields))
    assert caught.value.field == f"config.{field}"


ARGUMENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"vocab_size": 0}, "vocab_size", "from 1 up"),
    ({"max_sequence_length": 1.5}, "max_sequence_length", "whole number"),
    ({"position_embedding_type": "yarn"}, "position_embedding_type", "rope"),
    ({"rotary_percent": 0.0}, "rotary_percent", "above 0"),
    ({"rotary_percent": "1"}, "rotary_percent", "a number"),
    ({"rotary_base": float("nan")}, "rotary_base", "above 0"),
    ({"rotary_base": None}, "rotary_base", "a number"),
    ({"rope_scaling_factor": 0}, "rope_scaling_factor", "above 0"),
    ({"rope_scaling_factor": "8"}, "rope_scaling_factor", "a number"),
    ({"attention_mask": torch.ones(2)}, "attention_mask", "True or False"),
    ({"share_embeddings_and_output_weights": "false"}, SHARED, "True or False"),
    ({"micro_batch_size": 0}, "micro_batch_size", "from 1 up"),
    ({"rope_scaling_factor": 8, "position_embedding_type": "none"}, "rope_scaling_factor", "rope"),
]


@pytest.mark.parametrize(("arguments", "field", "remedy"), ARGUMENTS)
def test_wrong_arguments_are_named(arguments: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(FieldError, match=remedy) as caught:
        stack(**arguments)
    assert caught.value.field == field


def test_sizes_of_arguments_must_split() -> None:
    with pytest.raises(FieldError, match=r"vocab_size.*multiple"):
        stack(config(**TP2), vocab_size=63)
    with pytest.raises(FieldError, match=r"max_sequence_length.*multiple"):
        stack(config(**CONTEXT2), max_sequence_length=6)


def test_a_config_that_was_changed_later_is_refused() -> None:
    given = config()
    given.tensor_model_parallel_size = 3
    with pytest.raises(FieldError, match="changed after it was made"):
        stack(given)


def long(*shape: int, value: int = 1) -> Tensor:
    return torch.full(shape, value)


BATCHES: list[tuple[dict[str, Tensor], str, str]] = [
    ({"tokens": long(2, LENGTH, value=VOCABULARY)}, "tokens", "0 to 63 of the vocabulary"),
    ({"tokens": long(LENGTH)}, "tokens", "rows, length"),
    ({"tokens": torch.ones(2, LENGTH)}, "tokens", "int64"),
    ({"tokens": long(2, LENGTH + 2)}, "tokens", "at most max_sequence_length"),
    ({"labels": long(2, LENGTH, value=-1)}, "labels", "-100 for a position"),
    ({"loss_mask": torch.ones(2, 1)}, "loss_mask", "it needs the shape"),
    ({"attention_mask": torch.ones(2, LENGTH)}, "attention_mask", "bool"),
    ({"attention_mask": packed((16,))[:, :, :4, :4]}, "attention_mask", "tokens per row"),
    ({"attention_mask": ~packed((16,))}, "attention_mask", "invert it"),
    ({"position_ids": long(2, LENGTH, value=LENGTH)}, "position_ids", "0 to 15 of positions"),
]


@pytest.mark.parametrize(("fields", "field", "remedy"), BATCHES)
def test_wrong_fields_of_a_microbatch_are_named(
    fields: dict[str, Tensor], field: str, remedy: str, alone: TensorParallel
) -> None:
    kind = "learned_absolute" if field == "position_ids" else "rope"
    model = stack(attention_mask=field == "attention_mask", position_embedding_type=kind)
    with pytest.raises(FieldError, match=remedy) as caught:
        run(build_stack(model, alone), [2], microbatch(0, **fields))
    assert caught.value.field == f"microbatch.{field}"


def test_an_absent_field_is_named(alone: TensorParallel) -> None:
    fields = {"input_ids": long(2, LENGTH)}
    with pytest.raises(FieldError, match=r"microbatch.tokens.*it gives input_ids"):
        run(build_stack(stack(), alone), [2], Microbatch(0, 0, fields))


def test_a_label_of_minus_100_does_not_count(alone: TensorParallel) -> None:
    """It is the same as a weight of 0; the mean is that of the others."""
    labels = microbatch(6).fields["labels"].clone()
    mask = torch.ones(2, LENGTH)
    labels[0, 5:], mask[0, 5:] = -100, 0.0
    one, other = build_stack(stack(), alone), build_stack(stack(), alone)
    ignored = run(one, [2], microbatch(6, labels=labels))
    weighted = run(other, [2], microbatch(6, loss_mask=mask))
    assert ignored == weighted != run(other, [2], Microbatch(0, 7, microbatch(6).fields))
    small = run(other, [2], Microbatch(0, 8, {**microbatch(6).fields, "loss_mask": mask * 0.01}))
    assert small == pytest.approx(weighted, rel=1e-5)


def test_rows_of_different_lengths(alone: TensorParallel) -> None:
    model = stack(config(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall"))
    assert model.varying and not stack().varying
    layers = build_stack(model, alone)
    short = {name: field[:, :10] for name, field in microbatch(0).fields.items()}
    assert run(layers, [1, 2], microbatch(0)) != run(layers, [2], Microbatch(0, 1, short))


@pytest.mark.parametrize("make", [config, experts])
def test_attention_costs_the_square_of_the_length(
    make: Callable[..., TransformerConfig], alone: TensorParallel
) -> None:
    def part(index: int, rows: int, length: int) -> Microbatch:
        fields = microbatch(index).fields
        return Microbatch(0, index, {n: field[:rows, :length] for n, field in fields.items()})

    given = make(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    parts = (part(0, 2, 6), part(1, 1, 10), part(2, 2, LENGTH))
    found = excess(build_stack(stack(given), alone), [1, 2, 3], parts)
    inner = 4 + 2 * 3 * 24 if make is experts else 3 * 48
    square = 4 * 32 * LENGTH / (2 * (2 * 32 * (32 + 16) + 32 * inner))
    assert found == pytest.approx([0, square, square, 0], abs=1e-9)


def test_another_object_is_no_config() -> None:
    with pytest.raises(FieldError, match="TransformerConfig"):
        from_megatron({"num_layers": 2}, vocab_size=8, max_sequence_length=8)
