"""Hugging Face models, cut into layers, compute what the whole model computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate
from elastic.worker.contrib.folders import INDEX
from elastic.worker.contrib.huggingface.stack import HuggingFaceStack, from_huggingface
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.replica.replica import LayerReplica
from tests.worker.contrib.cut_models import excess, replicas, run
from tests.worker.model.toy_model import ALONE, CPU

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma": {},
    "gemma2": {"sliding_window": 6},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "phi3": {},
    "gpt_neox": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
}
TIED = ("gemma", "gemma2", "gemma3_text", "gpt2")
ROWS, LENGTH = 2, 12
BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}


def config(family: str, **changes: Any) -> Any:
    return transformers.AutoConfig.for_model(family, **{**SIZES, **CONFIGS[family], **changes})


def masked(index: int) -> Microbatch:
    """Sequences of different lengths, padded."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(3, 96, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return Microbatch(0, index, {"input_ids": ids, "attention_mask": mask, "labels": labels})


def packed(index: int) -> Microbatch:
    """Two documents in each sequence."""
    ids = masked(index).fields["input_ids"]
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(ROWS, LENGTH)
    return Microbatch(0, index, {"input_ids": ids, "position_ids": positions, "labels": ids})


DATA: Mapping[str, Callable[[int], Microbatch]] = {"masked": masked, "packed": packed}


def parameters(stack: HuggingFaceStack, layers: list[LayerReplica]) -> dict[str, Tensor]:
    """Parameters by their names in the model."""
    return {
        stack.name_of(layer.index, name): parameter.detach()
        for layer in layers
        for name, parameter in layer.module.named_parameters()
    }


@cache
def whole(family: str) -> tuple[HuggingFaceStack, Any, dict[str, Tensor]]:
    """The stack, the plain model with its parameters, and these."""
    stack = from_huggingface(config(family), seed=3)
    found = parameters(stack, replicas(stack))
    plain = transformers.AutoModelForCausalLM.from_config(config(family)).train()
    missing, unexpected = plain.load_state_dict(found, strict=False)
    assert not unexpected and not missing
    return stack, plain, found


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("family", CONFIGS)
def test_losses_and_gradients_are_those_of_the_whole_model(family: str, data: str) -> None:
    """Also on two, three and four stages, where the gradients have the same bits."""
    stack, plain, _ = whole(family)
    microbatch = DATA[data](0)
    plain.zero_grad()
    expected = plain(**microbatch.fields, use_cache=False).loss
    torch.autograd.backward(expected)
    sums: list[list[Tensor]] = []
    for cuts in ([], [2], [1, 3], [1, 2, 4]):
        layers = replicas(stack)
        loss = run(layers, cuts, microbatch)
        assert loss == pytest.approx(expected.item(), abs=1e-5)
        sums.append([layer.gradient.clone() for layer in layers])
    assert all(torch.equal(a, b) for other in sums[1:] for a, b in zip(sums[0], other, strict=True))
    compare(stack, replicas(stack), microbatch, plain)


ROUTED: Mapping[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "minimax": {"num_local_experts": 4, "layer_types": ["full_attention"] * 3},
    "gpt_oss": {"num_local_experts": 4},
}
"""Mixtures of experts. One block of qwen2_moe is none; it has shared experts beside the others."""


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("data", DATA)
def test_attention_costs_the_square_of_the_length(data: str, family: str) -> None:
    """Masks take nothing off, because attention computes all pairs and then leaves some out."""

    def part(index: int, rows: int, length: int) -> Microbatch:
        fields = DATA[data](index).fields
        return Microbatch(0, index, {n: field[:rows, :length] for n, field in fields.items()})

    parts = (part(0, 2, 4), part(1, 1, 8), part(2, 2, 12))
    stack = from_huggingface(config(family), varying=True)
    found = excess(replicas(stack), [1, 2, 4], parts)
    of_token = {  # weights of a block that a token is multiplied with
        "llama": 2 * 32 * (32 + 16) + 3 * 32 * 48,
        "gpt_neox": 4 * 32 * 32 + 2 * 32 * 48,
        "mixtral": 2 * 32 * (32 + 16) + 32 * 4 + 2 * 3 * 32 * 48,
    }
    square = 4 * 32 * 12 / (2 * of_token[family])
    assert found == pytest.approx([0, square, square, 0], abs=1e-9)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("family", ROUTED)
def test_the_loss_of_routers_is_that_of_the_whole_model(family: str, data: str) -> None:
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5, **ROUTED[family]}
    wanted = transformers.AutoConfig.for_model(family, **{**SIZES, **changes})
    stack = from_huggingface(wanted, seed=3)
    plain = transformers.AutoModelForCausalLM.from_config(wanted).train()
    missing, unexpected = plain.load_state_dict(parameters(stack, replicas(stack)), strict=False)
    assert not unexpected and not missing
    microbatch = DATA[data](0)
    outputs = plain(**microbatch.fields, use_cache=False)
    torch.autograd.backward(outputs.loss)
    assert outputs.aux_loss.item() > 0.5  # half of it is a part of the loss
    sums: list[list[Tensor]] = []
    for cuts in ([], [2], [1, 3], [1, 2, 3, 4]):
        layers = replicas(stack)
        assert run(layers, cuts, microbatch) == pytest.approx(outputs.loss.item(), abs=1e-5)
        sums.append([layer.gradient.clone() for layer in layers])
    assert all(torch.equal(a, b) for other in sums[1:] for a, b in zip(sums[0], other, strict=True))
    compare(stack, replicas(stack), microbatch, plain)


@pytest.mark.parametrize(
    ("family", "changes", "share"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 0.5),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 4}, 1.0),
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [2, 2, 2]}, None),
        ("aria_text", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}, None),
    ],
)
def test_operations_of_the_chosen_experts_count(
    family: str, changes: dict[str, Any], share: float | None
) -> None:
    """0 if it is not known how many a token chooses."""
    given = transformers.AutoConfig.for_model(family, **{**SIZES, **changes})
    stack = from_huggingface(given)
    found = stack.training_flops(10)
    if share is None:
        assert found == 0
        return
    sizes = {name: p.numel() for name, p in stack._skeleton.model.named_parameters()}
    experts = sum(n for name, n in sizes.items() if ".experts." in name)
    others = sum(sizes.values()) - experts - sizes["model.embed_tokens.weight"]
    assert found == pytest.approx(60 * (others + share * experts))


def test_a_model_that_has_run_passes_its_routers_logits_on() -> None:
    """Its hooks are on the routers of its own blocks, which the last layer does not have."""
    wanted = config("mixtral", output_router_logits=True)
    plain = transformers.AutoModelForCausalLM.from_config(wanted).train()
    microbatch = masked(0)
    expected = plain(**microbatch.fields, use_cache=False).loss.item()
    stack = from_huggingface(plain)
    assert run(replicas(stack), [2], microbatch) == pytest.approx(expected, abs=1e-5)


def compare(
    stack: HuggingFaceStack, layers: list[LayerReplica], microbatch: Microbatch, plain: Any
) -> None:
    """Compare the gradients of a plain backward pass with those of the whole model."""
    hidden: Any = None
    for layer in layers:
        hidden = layer.forward(hidden, microbatch)
    torch.autograd.backward(hidden)
    found = {
        stack.name_of(layer.index, name): parameter.grad
        for layer in layers
        for name, parameter in layer.module.named_parameters()
    }
    for group in stack.tied:
        names = [stack.name_of(*owner) for owner in group]
        total = torch.stack([g for name in names if (g := found[name]) is not None]).sum(0)
        found.update(dict.fromkeys(names, total))
    for name, parameter in plain.named_parameters():
        given = found.pop(name)
        if parameter.grad is not None:
            assert given is not None
            torch.testing.assert_close(given, parameter.grad, rtol=0, atol=1e-6, msg=name)


def test_tied_matrices_are_found() -> None:
    for family in CONFIGS:
        stack, _, found = whole(family)
        assert bool(stack.tied) == (family in TIED)
        for group in stack.tied:
            one, other = (found[stack.name_of(*owner)] for owner in group)
            assert torch.equal(one, other)


def test_initial_values_depend_on_seed_and_layer_alone() -> None:
    stack, _, found = whole("llama")
    for index in reversed(range(stack.n_layers)):
        torch.manual_seed(index)
        again = stack.build(index, CPU, ALONE)
        for name, parameter in again.named_parameters():
            assert torch.equal(parameter, found[stack.name_of(index, name)])
    other = from_huggingface(config("llama"), seed=4).build(1, CPU, ALONE)
    weight = "block.self_attn.q_proj.weight"
    assert not torch.equal(other.get_parameter(weight), found[stack.name_of(1, weight)])
    first, second = (found[stack.name_of(index, weight)] for index in (1, 2))
    assert not torch.equal(first, second) and 0.015 < first.std().item() < 0.025


def test_a_model_keeps_its_values() -> None:
    model = transformers.AutoModelForCausalLM.from_config(config("gpt2"))
    stack = from_huggingface(model)
    found = parameters(stack, replicas(stack))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, found[name])
    assert stack.build_empty(1, CPU, ALONE).get_parameter("block.ln_1.weight").shape == (32,)


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    config("qwen3").save_pretrained(tmp_path)
    stack = from_huggingface(tmp_path)
    assert stack.n_layers == 5 and stack.config.model_type == "qwen3"
    assert stack.contents() == from_huggingface(str(tmp_path)).contents()


def test_dropout_depends_on_the_micro_batch_alone() -> None:
    dropped = config("gpt2", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    stack = from_huggingface(dropped)
    losses = [run(replicas(stack), cuts, masked(1)) for cuts in ([], [1, 3])]
    assert losses[0] == losses[1]
    plain = from_huggingface(config("gpt2"))
    assert run(replicas(plain), [], masked(1)) != losses[0]


def test_another_loss() -> None:
    def loss(outputs: Any, microbatch: Microbatch) -> Tensor:
        total: Tensor = outputs.logits.square().mean()
        return total

    stack = from_huggingface(config("llama"), loss=loss)
    fields = {"input_ids": masked(0).fields["input_ids"]}
    assert 0 < run(replicas(stack), [2], Microbatch(0, 0, fields)) < 1
    with pytest.raises(FieldError, match=r"fields without a loss \(input_ids\).* called labels"):
        run(replicas(from_huggingface(config("llama"))), [], Microbatch(0, 0, fields))


def test_a_vision_model() -> None:
    sizes = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    vit = transformers.ViTConfig(
        **sizes,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        num_labels=5,
        architectures=["ViTForImageClassification"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    stack = from_huggingface(vit)
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    fields = {"pixel_values": images, "labels": torch.tensor([0, 4, 2])}
    layers = replicas(stack)
    plain = transformers.ViTForImageClassification(vit).train()
    plain.load_state_dict(parameters(stack, layers))
    expected = plain(**fields).loss.item()
    for cuts in ([], [2], [1, 3]):
        found = run(replicas(stack), cuts, Microbatch(0, 0, fields))
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (lambda: torch.nn.Linear(2, 2), r"an object of type Linear .* a transformers model, its"),
        (lambda: "nowhere", r"'nowhere' is not usable: it has no config.json"),
        (
            lambda: transformers.T5Config(num_layers=2, d_model=16, d_ff=16, num_heads=2, d_kv=8,
                                          architectures=["T5ForConditionalGeneration"]),
            r"T5ForConditionalGeneration: a model with several lists of blocks, encoder.block and "
            r"decoder.block",
        ),
        (
            lambda: transformers.ResNetConfig(architectures=["ResNetForImageClassification"]),
            r"ResNetForImageClassification: .* is not usable: build its layers by hand",
        ),
        (
            lambda: config("llama", output_router_logits=True),
            r"LlamaConfig.output_router_logits: True .* does not say which of its modules",
        ),
        (lambda: transformers.ViTConfig(), r"type ViTConfig .* config.architectures"),
        (
            lambda: config("llama", architectures=["OurOwnModel"]),
            r"config.architectures: 'OurOwnModel' .* make a model of other code yourself",
        ),
        (
            lambda: config("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0,
                                                     "rope_theta": 1e4}),
            r"rotary_emb.rope_type: 'dynamic' .* depend on earlier micro-batches",
        ),
        (
            lambda: transformers.AutoConfig.for_model("opt", layerdrop=0.1),
            r"OPTConfig.layerdrop: 0.1 .* every block runs in every micro-batch",
        ),
        (lambda: partly_on_meta(), r"model, lm_head.weight: a parameter on the meta device"),
        (lambda: checkpointed(reentrant=True), r"use_reentrant=True.*'use_reentrant': False"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_named(given: Callable[[], Any], error: str) -> None:
    with pytest.raises(FieldError, match=error):
        from_huggingface(given())


def partly_on_meta() -> Any:
    model = transformers.LlamaForCausalLM(config("llama"))
    model.lm_head.to("meta")
    return model


def checkpointed(*, reentrant: bool) -> Any:
    model = transformers.LlamaForCausalLM(config("llama"))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def test_a_model_with_checkpointing_computes_the_same() -> None:
    model = checkpointed(reentrant=False)
    losses = [run(replicas(from_huggingface(model)), [2], masked(0))]
    model.gradient_checkpointing_disable()
    losses += [run(replicas(from_huggingface(model)), [2], masked(0))]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "unheard-of"}', '{"a": 1}'])
def test_a_config_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FieldError, match=r"model: .* its config.json is not that of a model"):
        from_huggingface(tmp_path)


def test_values_that_the_initialisation_leaves_out_are_kept() -> None:
    """Apertus gives the parameters of its activation their values as it makes them."""
    apertus = transformers.AutoConfig.for_model("apertus", **SIZES)
    stack = from_huggingface(apertus)
    plain = dict(transformers.ApertusForCausalLM(apertus).named_parameters())
    found = parameters(stack, replicas(stack))
    names = [name for name in found if "alpha" in name]
    assert len(names) == 6
    assert all(torch.equal(found[name], plain[name]) for name in names)


def test_arbitrary_values_are_no_initial_values() -> None:
    """OpenAI GPT initialises some parameters after it has registered them, where it is lost."""
    made = transformers.AutoConfig.for_model("openai-gpt", n_embd=32, n_layer=2, n_head=4)
    for seed in range(3):
        with pytest.raises(FieldError, match=r"attn.c_attn.weight: .* give the model with its val"):
            replicas(from_huggingface(made, seed=seed))
    stack = from_huggingface(transformers.AutoModelForCausalLM.from_config(made))
    assert not any(p.isnan().any() for p in parameters(stack, replicas(stack)).values())


class Small(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
    """A model of embeddings, blocks and a head."""

    config_class = transformers.PreTrainedConfig
    _no_split_modules = None

    def __init__(self, config: Any, blocks: list[torch.nn.Module]) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(96, 8)
        self.blocks = torch.nn.ModuleList(blocks)
        self.head = torch.nn.Linear(8, 96)
        self.post_init()


class Scaled(Small):
    """A model that draws a parameter as it is made, and initialises half a module later."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, [_Scale() for _ in range(2)])

    def _init_weights(self, module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            torch.nn.init.constant_(module.weight, 0.25)


class _Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(8))


def test_what_modules_draw_depends_on_the_seed_alone() -> None:
    transformers.AutoModelForCausalLM.register(_ScaledConfig, Scaled, exist_ok=True)
    found = []
    for seed in (1, 1, 2):
        torch.rand(3)
        stack = from_huggingface(_ScaledConfig(), seed=seed)
        found.append(parameters(stack, replicas(stack)))
    for name in ("blocks.0.scale", "head.bias"):
        assert torch.equal(found[0][name], found[1][name])
        assert not torch.equal(found[0][name], found[2][name])
    assert bool((found[0]["head.weight"] == 0.25).all()), "and not what the module draws"


class _ScaledConfig(transformers.PreTrainedConfig):  # type: ignore[misc, name-defined]
    model_type = "scaled"


Scaled.config_class = _ScaledConfig


class Calls(Small):
    """A model that calls its blocks as its config says."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, [_Linear(config.form) for _ in range(3)])

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        hidden, how = self.embed(input_ids), self.config.how
        results = [hidden]
        for index, block in enumerate(self.blocks):
            if how == "skips" and index == 2:
                break
            out = block(results[0] if how == "branches" and index == 2 else hidden)
            if how == "twice" and index == 1:
                out = block(out if self.config.form == 0 else out[0])
            hidden = out if self.config.form == 0 else out[0]
            if how == "between":
                hidden = hidden * 2
            elif how == "in place":
                hidden += 1
            results.append(hidden)
            if how == "methods":
                cast(Any, block).change()
        if self.config.form > 1:
            hidden, *_rest = out
        logits = self.head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class _Linear(torch.nn.Linear):
    def __init__(self, form: int) -> None:
        super().__init__(8, 8)
        self.form = form

    def change(self) -> None:
        self.form = 0

    def forward(self, hidden: Tensor) -> Any:
        out = super().forward(hidden)
        return (out, *[out.mean()] * (self.form - 1)) if self.form else out


def calls(how: str, form: int = 0) -> Any:
    made = transformers.PreTrainedConfig()
    made.how, made.form = how, form
    return Calls(made)


@pytest.mark.parametrize("form", [0, 1, 2, 3])
def test_blocks_return_hidden_states_alone_or_in_a_tuple(form: int) -> None:
    model = calls("one after the other", form).train()
    fields = {name: masked(0).fields["input_ids"] for name in ("input_ids", "labels")}
    expected = model(**fields).loss.item()
    for cuts in ([], [1, 3], [2]):
        found = run(replicas(from_huggingface(model)), cuts, Microbatch(0, 0, fields))
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("between", r"block 1: hidden states other than the result of block 0"),
        ("in place", r"block 1: hidden states other|a model that fails when it is cut"),
        ("twice", r"block 1: a block that is called when block 2 should be"),
        ("skips", r"a model that calls 2 of its 3 blocks"),
        ("methods", r"blocks.0: a module whose change\(\) the model calls"),
        ("branches", r"block 2: hidden states other than the result of block 1"),
    ],
)
def test_another_way_to_call_the_blocks_is_refused(how: str, error: str, form: int) -> None:
    """Otherwise a layer would leave out what happens between the blocks."""
    for cuts in ([], [1, 3]):
        layers = replicas(from_huggingface(calls(how, form)))
        fields = {name: masked(0).fields["input_ids"] for name in ("input_ids", "labels")}
        with pytest.raises(FieldError, match=error):
            run(layers, cuts, Microbatch(0, 0, fields))


def test_a_value_that_passes_by_the_layers_is_refused() -> None:
    """Stages behind the first lack the embeddings that this model gives to each block."""
    model = transformers.LlamaForCausalLM(config("llama"))
    inner = type(model.model)

    class Passing(inner):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Tensor, **named: Any) -> Any:
            return super().forward(input_ids, extra=self.embed_tokens(input_ids), **named)

    model.model.__class__ = Passing
    with pytest.raises(FieldError, match=r"block 0, extra: a value that depends on other layers"):
        run(replicas(from_huggingface(model)), [], masked(0))


def test_modules_may_be_registered_in_another_order_than_they_run() -> None:
    """OPT registers its last norm before its blocks, and BART its first one behind them."""
    sizes = {**SIZES, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0}
    for family, parts in (("opt", {"ffn_dim": 48}), ("bart", BART)):
        made = transformers.AutoConfig.for_model(family, **sizes, **parts)
        stack = from_huggingface(made)
        layers = replicas(stack)
        plain = transformers.AutoModelForCausalLM.from_config(made).train()
        assert not plain.load_state_dict(parameters(stack, layers), strict=False).unexpected_keys
        expected = plain(**masked(0).fields, use_cache=False).loss.item()
        for cuts in ([], [1, 3]):
            assert run(replicas(stack), cuts, masked(0)) == pytest.approx(expected, abs=1e-5)


class TwoSides(Calls):
    """A model that uses a module before and behind its blocks."""

    def forward(self, input_ids: Tensor, labels: Tensor, **named: Any) -> Any:
        found = super().forward(input_ids, labels, **named)
        found.loss = found.loss + self.embed(input_ids).mean()
        return found


def test_a_module_on_both_sides_of_the_blocks_is_refused() -> None:
    made = transformers.PreTrainedConfig()
    made.how, made.form = "one after the other", 0
    fields = {name: masked(0).fields["input_ids"] for name in ("input_ids", "labels")}
    with pytest.raises(FieldError, match=r"embed: .* used behind them"):
        run(replicas(from_huggingface(TwoSides(made))), [], Microbatch(0, 0, fields))


def test_parameters_take_no_memory_before_they_are_needed() -> None:
    """A model of 8 billion parameters is described, and only its small layers are built."""
    large = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    stack = from_huggingface(large)
    specs = stack.specs(Accumulate.FAST)
    assert sum(spec.param_bytes for spec in specs) == 4 * 8_030_261_248
    assert json.dumps(stack.contents())


@pytest.mark.parametrize("size", ["100GB", "20KB"], ids=["one-file", "several-files"])
@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
def test_weights_of_a_folder_are_read(family: str, size: str, tmp_path: Path) -> None:
    """gemma and gpt2 have tied matrices, of which the files hold one."""
    model = transformers.AutoModelForCausalLM.from_config(config(family))
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / INDEX).is_file() == (size == "20KB")
    stack = from_huggingface(tmp_path)
    found = parameters(stack, replicas(stack))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(parameter, found[name])


def test_weights_of_a_model_without_its_head(tmp_path: Path) -> None:
    """They have shorter names. The head of a tied model is in them."""
    model = transformers.GPT2Model(config("gpt2"))
    model.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**described, "architectures": ["GPT2LMHeadModel"]})
    )
    stack = from_huggingface(tmp_path)
    found = parameters(stack, replicas(stack))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, found[f"transformer.{name}"])


def damaged(folder: Path, how: str) -> None:
    index = folder / INDEX
    names = json.loads(index.read_text())["weight_map"]
    first = folder / next(iter(names.values()))
    if how == "truncated":
        first.write_bytes(first.read_bytes()[:-100])
    elif how == "absent":
        first.unlink()
    elif how == "index":
        index.write_text("{}")
    elif how == "names":
        index.write_text(json.dumps({"weight_map": {f"x.{n}": f for n, f in names.items()}}))
    else:
        changed = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**changed, "intermediate_size": 40}))


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("truncated", r"model: '.*-0000\d-.*safetensors' is not usable: it cannot be read"),
        ("absent", r"0000\d-.*' is not usable: model.safetensors.index.json names it"),
        ("index", r"index.json' is not usable: an index with a weight_map is needed: KeyError"),
        ("names", r"it has no tensor model.embed_tokens.weight; this family stores"),
        ("shape", r"shape \(48, 32\) .* has model.layers.0.mlp.gate_proj.weight of shape \(40, 32"),
    ],
)
def test_weights_that_do_not_fit_are_named(how: str, error: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config("llama"))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    damaged(tmp_path, how)
    with pytest.raises(FieldError, match=error):
        replicas(from_huggingface(tmp_path))
