"""megatron's own models and checkpoints, in a process of their own.

python -m tests.worker.contrib.megatron_checkpoints save DIR    # makes a checkpoint of each kind
python -m tests.worker.contrib.megatron_checkpoints load DIR    # loads DIR/KIND-out, and compares
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.worker.contrib.llama_models import LENGTH, SHARED, VOCABULARY, config, experts

PLAIN: dict[str, Any] = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
    "add_bias_linear": True,
    "qk_layernorm": False,
    "num_query_groups": 4,
}
ROUTING = {"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none"}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "gated-with-biases": ({"add_bias_linear": True, "add_qkv_bias": True}, {}),
    "plain": (PLAIN, {"position_embedding_type": "learned_absolute"}),
    "tied": ({}, {"share_embeddings_and_output_weights": True}),
    "experts": ({"num_moe_experts": 4, "moe_ffn_hidden_size": 24, **ROUTING}, {}),
    "some-experts": (
        {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_layer_freq": [0, 1], **ROUTING},
        {},
    ),
    "shared-experts": (
        {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, **SHARED, **ROUTING},
        {},
    ),
    "shared-experts-without-gates": (
        {
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 24,
            "moe_layer_freq": [0, 1],
            "gated_linear_unit": False,
            "moe_shared_expert_intermediate_size": 40,
            **ROUTING,
        },
        {},
    ),
}
"""By name: changes of the config, and other arguments of from_megatron, which GPTModel has, too."""
MORE = ("output_layer.weight", "pre_mlp_layernorm.weight")
"""Ends of the names that our checkpoints have beside those that every model asks for."""


def config_of(kind: str) -> Any:
    changes, _ = KINDS[kind]
    return experts(**changes) if "num_moe_experts" in changes else config(**changes)


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(9))


def _model(kind: str, seed: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )

    given = copy.copy(config_of(kind))
    given.use_cpu_initialization, given.perform_initialization = True, True
    given.pipeline_dtype = torch.float32
    torch.manual_seed(seed)
    if isinstance(given.moe_layer_freq, list):
        spec = get_gpt_decoder_block_spec(given, use_transformer_engine=False)
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=given.num_moe_experts,
            moe_grouped_gemm=False,
            qk_layernorm=given.qk_layernorm,
            normalization=given.normalization,
        )
    others = {"position_embedding_type": "rope", **KINDS[kind][1]}
    others.setdefault("share_embeddings_and_output_weights", False)
    model = GPTModel(given, spec, VOCABULARY, LENGTH, **others).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if value is not None}


def _on_a_cpu() -> None:
    """Let megatron compute and write checkpoints without a GPU. Nothing is drawn at random."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]


def main(command: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, parallel_state

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    _on_a_cpu()
    losses = {}
    for kind in KINDS:
        original, written = folder / kind, folder / f"{kind}-out"
        model = _model(kind, 1 if command == "save" else 2)
        if command == "save":
            rows = tokens()
            positions = torch.arange(LENGTH).expand(2, LENGTH)
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
            with torch.no_grad():
                out = model(rows[:, :-1], positions, mask, labels=rows[:, 1:].contiguous())
            losses[kind] = out.float().mean().item()
            original.mkdir()
            dist_checkpointing.save(model.sharded_state_dict(), str(original))
            torch.save(_tensors(model), folder / f"{kind}.pt")
        else:
            (iteration,) = written.glob("iter_*")
            found, beside, lacking = dist_checkpointing.load(
                {"model": model.sharded_state_dict()}, str(iteration), strict="return_all"
            )
            assert all("._extra_state" in name for name in lacking), lacking
            assert all(name.endswith(MORE) for name in beside), beside
            absent, more = model.load_state_dict(found["model"], strict=False)
            assert not more and all("._extra_state" in name for name in absent), (absent, more)
            wanted = torch.load(folder / f"{kind}.pt", weights_only=True)
            now = _tensors(model)
            assert wanted.keys() == now.keys()
            unequal = [name for name in wanted if not torch.equal(wanted[name], now[name])]
            assert not unequal, (kind, unequal)
    print(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
