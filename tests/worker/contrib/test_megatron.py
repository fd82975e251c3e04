from __future__ import annotations

import itertools
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate
from elastic.worker.contrib.megatron.gpt import GPTConfig
from elastic.worker.contrib.megatron.stack import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    GPTStack,
    init_tensor_parallel,
)
from elastic.worker.model import rng as randomness
from elastic.worker.model.layers import TensorParallel
from elastic.worker.model.optimizer import adamw
from elastic.worker.model.state_codec import read_state
from elastic.worker.replica.build import build_replica, warm_up
from elastic.worker.replica.replica import LayerReplica
from tests.patience import LONG_S
from tests.worker.contrib.gpt_models import (
    MICROBATCHES,
    build,
    config,
    microbatch,
    run,
    state_of,
    train,
)
from tests.worker.model.toy_model import CPU, same, values
from tests.worker.passes import forward


def test_a_layer_is_equal_in_each_build(alone: TensorParallel) -> None:
    layers = build(config(), alone)
    torch.manual_seed(3)
    stack = GPTStack(config())
    back = [stack.build(i, CPU, alone) for i in (3, 2, 1, 0)]
    assert same(values(layers), [p for module in reversed(back) for p in module.parameters()])
    assert not torch.equal(values(layers[1:2])[0:1][0], values(layers[1:2])[2])
    other = build(config(seed=12), alone)
    assert not same(values(layers[:1]), values(other[:1]))


def test_layers_differ_and_start_small(alone: TensorParallel) -> None:
    one, two = (build(config(), alone)[i].module for i in (1, 2))
    for name, parameter in one.named_parameters():
        if parameter.ndim == 2:
            assert not torch.equal(parameter, two.get_parameter(name))
            wanted = 0.01 if "linear_proj" in name or "fc2" in name else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.1)
        else:
            assert parameter.eq(1.0 if name.endswith("norm.weight") else 0.0).all(), name


def test_the_first_loss_is_random_guessing_and_training_lowers_it(alone: TensorParallel) -> None:
    losses = train(build(config(), alone), 6)
    assert losses[0] == pytest.approx(torch.tensor(64.0).log().item(), abs=0.1)
    fixed = build(config(), alone)
    falling = []
    for _ in range(6):
        for replica in fixed:
            replica.clear()
        falling.append(run(fixed, 0, 0))
        for replica in fixed:
            replica.update(replica.gradient, 1.0, 0.01)
    assert falling == sorted(falling, reverse=True) and falling[-1] < falling[0] - 0.5


def test_attention_is_causal(alone: TensorParallel) -> None:
    layers = build(config(), alone)
    block = layers[1]
    hidden = torch.randn(16, 2, 32)
    changed = hidden.clone()
    changed[10:] += 1.0
    a, b = (forward(block, h, microbatch(0, 0)) for h in (hidden, changed))
    assert torch.equal(a[:10], b[:10]) and not torch.equal(a[10:], b[10:])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_runs_are_bit_identical_with_dropout(dtype: str, alone: TensorParallel) -> None:
    spec = adamw(0.01, master_weights=dtype == "bf16")
    gpt = config(dropout=0.1, dtype=dtype)
    one = build(gpt, alone, spec)
    losses = train(one, 2)
    torch.manual_seed(77)
    other = build(gpt, alone, spec)
    assert train(other, 2) == losses
    assert same(values(one), values(other))
    assert losses != train(build(config(dtype=dtype), alone, spec), 2)


def received(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the next stage receives it: equal values in other memory."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    return out.copy_(tensor.detach())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("cut", [(0, 1, 4), (0, 2, 4), (0, 3, 4), (0, 1, 2, 3, 4)])
def test_stage_boundaries_do_not_change_the_results(
    cut: tuple[int, ...], dtype: str, alone: TensorParallel
) -> None:
    gpt = config(dropout=0.1, dtype=dtype)
    whole, layers = build(gpt, alone), build(gpt, alone)
    loss = run(whole, 0, 0)
    ends: list[tuple[torch.Tensor | None, torch.Tensor]] = []
    for first, last in itertools.pairwise(cut):
        start = received(ends[-1][1]).requires_grad_() if ends else None
        hidden = start
        for replica in layers[first:last]:
            hidden = forward(replica, hidden, microbatch(0, 0))
        assert hidden is not None
        ends.append((start, hidden))
    assert ends[-1][1].item() == loss
    gradient = None
    for start, end in reversed(ends):
        torch.autograd.backward(end / MICROBATCHES if gradient is None else end, gradient)
        gradient = received(start.grad) if start is not None and start.grad is not None else None
    for one, other in zip(whole, layers, strict=True):
        other.collect(0, skip=False)
        assert torch.equal(one.gradient, other.gradient), one.index


def core_attention(replica: LayerReplica) -> torch.nn.Module:
    return replica.module.get_submodule("layer.self_attention.core_attention")


def test_dropout_applies_to_embeddings_attention_and_residuals(alone: TensorParallel) -> None:
    dropped, plain = build(config(dropout=0.5), alone), build(config(), alone)
    embedded = forward(dropped[0], None, microbatch(0, 0))
    assert 0.3 < (embedded == 0).float().mean().item() < 0.7
    attention = core_attention(dropped[1])
    q, k, v = (torch.randn(16, 2, 4, 8) for _ in range(3))
    randomness.seed_forward(1, 2, 3, 4, CPU)
    first = attention(q, k, v, None)
    after = torch.rand(3)
    randomness.seed_forward(1, 2, 3, 4, CPU)
    assert torch.equal(attention(q, k, v, None), first) and torch.equal(torch.rand(3), after)
    whole = core_attention(plain[1])(q, k, v, None)
    assert not torch.allclose(first, whole)


def test_tied_embeddings_stay_one_tensor(alone: TensorParallel) -> None:
    gpt = config(tie_embeddings=True)
    stack = GPTStack(gpt)
    assert stack.tied == (((0, EMBEDDING_WEIGHT), (3, HEAD_WEIGHT)),)
    layers = build(gpt, alone)
    first, last = (
        layers[0].module.get_parameter(EMBEDDING_WEIGHT),
        layers[3].module.get_parameter(HEAD_WEIGHT),
    )
    assert torch.equal(first, last)
    start = first.detach().clone()
    train(layers, 3, stack.tied)
    assert torch.equal(first, last) and not torch.equal(first, start)
    counted = build(config(), alone)
    for replica in (layers[3], counted[3]):
        replica.gradient[: replica.layout.numel].fill_(1 << 44)
    assert (
        counted[3].norm_sq(counted[3].gradient) - layers[3].norm_sq(layers[3].gradient) == 64 * 32
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("at", [0, 2])
def test_training_goes_on_from_a_copy(dtype: str, at: int, alone: TensorParallel) -> None:
    spec = adamw(0.01, master_weights=dtype == "bf16")
    layers = build(config(dtype=dtype), alone, spec)
    train(layers, at)
    others = build(config(dtype=dtype), alone, spec, empty=True)
    for one, other in zip(layers, others, strict=True):
        other.read_state(state_of(one))
        assert torch.equal(state_of(other), state_of(one)) and other.version == at
    assert train(layers, 1) == train(others, 1)
    assert same(values(layers), values(others))


@pytest.mark.parametrize("changes", [{}, {"dtype": "bf16", "hidden": 48, "seq_len": 20}])
def test_specs_have_the_real_sizes(changes: dict[str, object], alone: TensorParallel) -> None:
    gpt = config(**changes)
    spec = adamw(0.01, master_weights="dtype" in changes)
    layers = build(gpt, alone, spec)
    described = GPTStack(gpt).specs(Accumulate.EXACT, spec)
    assert len(described) == gpt.n_layers == 4
    for replica, told in zip(layers, described, strict=True):
        assert told.param_bytes == sum(p.nbytes for p in replica.module.parameters())
        assert told.gradient_bytes == replica.gradient_nbytes
        replica.update(replica.gradient, 1.0, 0.0)
        _, tensors = read_state(state_of(replica))
        kept = sum(
            t.tensor.nbytes for t in tensors if not t.name.startswith("param/") and t.tensor.ndim
        )
        assert told.state_bytes == kept
    hidden = forward(layers[0], None, microbatch(0, 0)) if not changes else None
    assert hidden is None or described[0].output_bytes * 2 == hidden.nbytes
    assert described[1].forward_s > described[0].forward_s


@pytest.mark.chaos
def test_building_empty_is_quick_enough_for_recovery(alone: TensorParallel) -> None:
    """Takes about 20 ms on an idle machine; a first import alone takes ten times as long."""
    gpt = config(hidden=256, seq_len=128, vocab=256)
    stack = GPTStack(gpt)
    warm_up(stack, alone, adamw(0.1), Accumulate.EXACT, CPU)
    times = []
    for index in (0, 1, 3) * 3:
        start = time.perf_counter()
        build_replica(stack, index, alone, adamw(0.1), Accumulate.EXACT, 0, CPU, empty=True)
        times.append(time.perf_counter() - start)
    assert min(times[1::3]) < 0.02


def test_same_group_again(alone: TensorParallel) -> None:
    assert init_tensor_parallel(0, 1, "/nowhere/store") == alone


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("hidden", 33),
        ("hidden", -4),
        ("heads", 0),
        ("seq_len", 0),
        ("vocab", 0),
        ("dropout", 1.0),
        ("dropout", float("nan")),
        ("dropout", -0.1),
        ("dtype", "fp64"),
        ("tp", 3),
        ("tp", 0),
        ("seed", 1 << 64),
        ("micro_batch_size", 0),
        ("layers", True),
    ],
)
def test_wrong_sizes_are_named(field: str, value: object) -> None:
    with pytest.raises(FieldError) as caught:
        config(**{field: value})
    assert caught.value.field == field


def test_vocabulary_must_split(alone: TensorParallel) -> None:
    with pytest.raises(FieldError, match="vocabulary"):
        config(tp=2, vocab=65)
    with pytest.raises(FieldError, match="tp"):
        GPTStack(replace(config(), tp=2)).build(0, CPU, alone)


def test_sizes_are_checked_without_torch() -> None:
    code = (
        "import sys, elastic.worker.contrib.corpus; "
        "from elastic.worker.contrib.megatron.gpt import GPTConfig; "
        "GPTConfig(layers=1, hidden=4, heads=1, seq_len=4); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=LONG_S).returncode == 0
    assert GPTConfig(layers=1, hidden=4, heads=1, seq_len=4).n_layers == 3


def test_the_layers_load_neither_torchs_compiler_nor_trackers() -> None:
    """They take 3 s of CPU time, at each start of a worker. Only a GPU gains from the compiler, and
    nobody from the trackers. A script can still import those."""
    code = (
        "import sys\n"
        "import torch\n"
        "torch.cuda.is_available = lambda: False\n"
        "import elastic.worker.contrib.megatron.stack\n"
        "assert not {'torch._dynamo', 'wandb', 'tensorboard'} & sys.modules.keys()\n"
        "import torch.utils.tensorboard, wandb\n"
        "assert wandb.init"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
