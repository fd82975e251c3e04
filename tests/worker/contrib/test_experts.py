"""A mixture of experts computes what transformers computes. Its loss has those of its routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic.domain.types import Accumulate
from elastic.worker.contrib.megatron.experts import Experts
from elastic.worker.model.layers import TensorParallel
from elastic.worker.model.optimizer import adamw
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica
from tests.worker.contrib.cut_models import run
from tests.worker.contrib.gpt_models import build_stack
from tests.worker.contrib.llama_models import (
    HAS_GATE,
    LENGTH,
    SHARED,
    TRANSFORMERS_SIZES,
    VOCABULARY,
    experts,
    needs_gate,
    shared_experts,
    stack,
)
from tests.worker.contrib.test_from_megatron import by_group, compare, microbatch
from tests.worker.model.toy_model import CPU

transformers = pytest.importorskip("transformers")


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": ({"num_local_experts": 4, "intermediate_size": 24}, {}),
    "qwen2_moe": (
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
        {
            **SHARED,
            "add_qkv_bias": True,
            "moe_router_pre_softmax": True,
        },
    ),
}
"""By family: fields of its config, and of megatron's."""


def mixture(family: str) -> Any:
    """A model whose gates, norms and biases have values of their own, too."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(family, **{**TRANSFORMERS_SIZES, **MODELS[family][0]})
        )
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def of_mixture(values: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    layers = [{"embedding.word_embeddings.weight": values["model.embed_tokens.weight"]}]
    for index in range(2):
        block = f"model.layers.{index}"
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"
        gate, up = values[f"{mlp}.experts.gate_up_proj"].chunk(2, dim=1)
        layers.append(
            {
                "layer.input_layernorm.weight": values[f"{block}.input_layernorm.weight"],
                "layer.pre_mlp_layernorm.weight": values[
                    f"{block}.post_attention_layernorm.weight"
                ],
                "layer.self_attention.linear_proj.weight": values[f"{attention}.o_proj.weight"],
                "layer.mlp.router.weight": values[f"{mlp}.gate.weight"],
                "layer.mlp.gate": gate,
                "layer.mlp.up": up,
                "layer.mlp.down": values[f"{mlp}.experts.down_proj"],
            }
        )
        for kind in ("weight", "bias"):
            if f"{attention}.q_proj.{kind}" in values:
                layers[-1][f"layer.self_attention.linear_qkv.{kind}"] = by_group(
                    *(values[f"{attention}.{part}_proj.{kind}"] for part in "qkv")
                )
        if f"{mlp}.shared_expert_gate.weight" in values:
            gate_of_all = values[f"{mlp}.shared_expert_gate.weight"]
            layers[-1]["layer.mlp.shared_expert_gate"] = gate_of_all
            for part in ("gate", "up", "down"):
                shared = values[f"{mlp}.shared_expert.{part}_proj.weight"]
                layers[-1][f"layer.mlp.shared_experts.{part}.weight"] = shared
    last = {"norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
    return [*layers, {ours: values[theirs] for ours, theirs in last.items()}]


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen2_moe", marks=needs_gate)])
def test_losses_and_gradients_are_those_of_transformers(family: str, alone: TensorParallel) -> None:
    given = experts(qk_layernorm=False, moe_aux_loss_coeff=0.0, **MODELS[family][1])
    model = mixture(family)
    base = model.config.rope_parameters["rope_theta"]
    compare(build_stack(stack(given, rotary_base=base), alone), model, of_mixture)


def balance(logits: Tensor, topk: int) -> float:
    """The loss of the Switch transformer (arXiv 2101.03961, equation 4), for top-k: experts times
    the sum over experts of their share of the tokens and their mean probability."""
    probabilities = logits.flatten(0, -2).float().softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(topk).indices, 1.0)
    share, mean = chosen.mean(0) / topk, probabilities.mean(0)
    return float(probabilities.shape[1] * (share * mean).sum().detach())


def watch(layer: LayerReplica, logits: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the logits of each routing of `layer` to `logits`."""
    router = mlp_of(layer).router
    gating = router.gating

    def watched(hidden: Tensor) -> Tensor:
        logits.append(gating(hidden))
        return logits[-1]

    monkeypatch.setattr(router, "gating", watched)


def mlp_of(layer: LayerReplica) -> Experts:
    mlp = layer.module.get_submodule("layer.mlp")
    assert isinstance(mlp, Experts)
    return mlp


@pytest.mark.parametrize("cuts", [[], [1, 2, 3]])
def test_the_routers_losses_are_added_once(
    cuts: list[int], alone: TensorParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build_stack(stack(experts(moe_aux_loss_coeff=0.0)), alone)
    balanced = build_stack(stack(experts(moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.25)), alone)
    logits: list[Tensor] = []
    for layer in balanced[1:3]:
        watch(layer, logits, monkeypatch)
    difference = run(balanced, cuts, microbatch(1)) - run(plain, cuts, microbatch(1))
    assert len(logits) == 2
    wanted = sum(
        0.5 * balance(one, 2) + 0.25 * one.flatten(0, 1).logsumexp(-1).square().mean().item()
        for one in logits
    )
    assert difference == pytest.approx(wanted, abs=1e-5) and wanted > 0.5
    router = "layer.mlp.router.weight"
    one, other = (
        layers[1].gradient[layers[1].gradient_slice(router)] for layers in (plain, balanced)
    )
    assert not torch.equal(one, other)


def test_an_expert_that_nobody_chooses_has_zero_gradients(
    alone: TensorParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = build_stack(stack(experts(moe_aux_loss_coeff=0.0)), alone)
    logits = torch.tensor([0.0, 2.0, -9.0, 1.0])
    router = mlp_of(layers[1]).router
    monkeypatch.setattr(router, "gating", lambda x: logits.expand(*x.shape[:2], 4))
    run(layers, [2], microbatch(2))
    found = layers[1].gradient[layers[1].gradient_slice("layer.mlp.down")].view(4, -1)
    assert [bool(one.any()) for one in found] == [False, True, False, True]


@pytest.mark.parametrize("gated", [True, False])
def test_dense_layers_between(gated: bool, alone: TensorParallel) -> None:
    model = stack(experts(moe_layer_freq=[0, 1], gated_linear_unit=gated))
    guessing = torch.tensor(float(VOCABULARY)).log().item()
    assert run(build_stack(model, alone), [2], microbatch(0)) == pytest.approx(guessing, abs=0.2)
    kinds = [
        isinstance(model.build(i, CPU, alone).get_submodule("layer.mlp"), Experts) for i in (1, 2)
    ]
    assert kinds == [False, True]
    described = model.specs(Accumulate.EXACT, adamw(0.01))
    assert len(described) == 4 and described[1].param_bytes < described[2].param_bytes
    for index, told in enumerate(described):
        replica = build_replica(model, index, alone, adamw(0.01), Accumulate.EXACT, 7, CPU)
        assert told.param_bytes == sum(p.nbytes for p in replica.module.parameters())
    assert len(set(model.contents())) == 4


def test_shared_experts_count_in_sizes_and_operations() -> None:
    """Three matrices of 40 columns in each block, and the gate's vector."""
    columns = 3 * 40 + HAS_GATE
    without, beside = stack(experts()), stack(shared_experts())
    for index in (1, 2):
        one, other = (model.specs(Accumulate.EXACT)[index] for model in (without, beside))
        assert other.param_bytes - one.param_bytes == 4 * 32 * columns
        assert other.activation_bytes - one.activation_bytes == 4 * LENGTH * 3 * 40
        assert other.forward_s > one.forward_s
    more = beside.training_flops(10) - without.training_flops(10)
    assert more == 3 * 10 * 2 * (2.0 * 32 * columns)


def test_the_overlap_of_shared_experts_changes_no_bit(alone: TensorParallel) -> None:
    overlap = {"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "alltoall"}
    losses = [
        run(build_stack(stack(shared_experts(**fields)), alone), [2], microbatch(1))
        for fields in ({}, overlap)
    ]
    assert losses[0] == losses[1]


def test_shared_experts_without_gates(alone: TensorParallel) -> None:
    """MLPs with two matrices, and an output without a weight: every token gets it whole."""
    given = experts(moe_shared_expert_intermediate_size=40, gated_linear_unit=False)
    layers = build_stack(stack(given), alone)
    mlp, hidden = mlp_of(layers[1]), torch.randn(5, 2, 32)
    together = mlp(hidden)[0]
    linears = [mlp.get_parameter(f"shared_experts.linear_fc{n}.weight") for n in (1, 2)]
    expected = torch.nn.functional.silu(hidden @ linears[0].T) @ linears[1].T
    mlp.shared_experts = None
    torch.testing.assert_close(together - mlp(hidden)[0], expected, rtol=1e-4, atol=1e-7)
    assert mlp.shared_expert_gate is None


def test_nothing_of_a_pass_is_kept_in_a_layer(alone: TensorParallel) -> None:
    layers = build_stack(stack(experts(moe_z_loss_coeff=0.1)), alone)
    run(layers, [1], microbatch(3))
    assert all(not mlp_of(layer).router.losses for layer in layers[1:3])
