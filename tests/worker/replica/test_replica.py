from __future__ import annotations

import itertools
import math

import pytest
import torch

from elastic.domain.errors import FieldError, LedgerError, VaultError
from elastic.domain.types import Accumulate
from elastic.worker.model.gradients import to_flat
from elastic.worker.model.layers import ListStack
from elastic.worker.model.learning_rate import constant
from elastic.worker.model.optimizer import OptimizerSpec, adamw
from elastic.worker.replica.build import warm_up
from elastic.worker.replica.replica import LayerReplica
from tests.worker.model.toy_model import (
    ALONE,
    CPU,
    First,
    Last,
    Middle,
    microbatch,
    replicas,
    run,
    same,
    sgd,
    state_of,
    toy_stack,
    train,
    values,
)
from tests.worker.passes import forward

OPTIMIZERS = {
    "sgd": sgd(),
    "adamw": adamw(0.01),
    "adagrad": OptimizerSpec(factory=lambda groups: torch.optim.Adagrad(groups), lr=constant(0.1)),
}


def gradient_of(replica: LayerReplica) -> torch.Tensor:
    out = torch.empty(replica.gradient_nbytes, dtype=torch.uint8)
    replica.write_gradient(out)
    return out


# ---- building ----


def test_a_layer_is_equal_in_each_build_and_order() -> None:
    torch.manual_seed(5)
    one = values(replicas())
    torch.rand(100)
    stack = toy_stack()
    back = [stack.build(i, CPU, ALONE) for i in (2, 1, 0)]
    assert same(one, [p for module in reversed(back) for p in module.parameters()])
    assert not same(one, values(replicas(toy_stack(seed=2))))


def test_building_keeps_the_random_state() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    replicas()
    assert torch.equal(torch.get_rng_state(), state)


def test_empty_build_is_filled_by_reading() -> None:
    full, empty = replicas(), replicas(empty=True)
    for one, other in zip(full, empty, strict=True):
        other.read_state(state_of(one))
    assert same(values(full), values(empty))
    assert run(full, 0, 1) == run(empty, 0, 1)


def test_empty_build_keeps_buffers() -> None:
    last = toy_stack().build_empty(2, CPU, ALONE)
    assert torch.equal(last.get_buffer("scale"), torch.tensor([2.0]))


def test_tied_layers_start_equal_and_unknown_ones_are_refused() -> None:
    layers = replicas(toy_stack(tied=True))
    first, last = (layers[i].module.get_parameter("inner.weight") for i in (0, 2))
    assert torch.equal(first, last) and first is not last
    with pytest.raises(FieldError, match="tied"):
        ListStack([First, Last], 0, (((0, "inner.weight"), (5, "inner.weight")),))
    with pytest.raises(FieldError, match="tied"):
        ListStack([First, Last], 0, (((0, "nothing"), (1, "inner.weight")),))


def test_list_stack_refuses_no_layers_and_tensor_parallelism() -> None:
    with pytest.raises(FieldError, match="builders"):
        ListStack([], 0)
    with pytest.raises(FieldError, match="tp"):
        toy_stack().tensor_parallel(0, 2, "", CPU)


@pytest.mark.parametrize("accumulate", list(Accumulate))
def test_specs_have_the_real_sizes(accumulate: Accumulate) -> None:
    layers = replicas(optimizer=adamw(0.1), accumulate=accumulate)
    train(layers, 1)
    for replica, spec in zip(layers, toy_stack().specs(accumulate, adamw(0.1)), strict=True):
        elements = sum(p.numel() for p in replica.module.parameters())
        assert (spec.param_bytes, spec.state_bytes) == (4 * elements, 8 * elements)
        assert spec.gradient_bytes == replica.gradient_nbytes
        assert spec.forward_s > 0 and spec.backward_s == 2 * spec.forward_s


def test_warm_up_keeps_the_random_state() -> None:
    state = torch.get_rng_state()
    warm_up(toy_stack(), ALONE, adamw(0.1), Accumulate.EXACT, CPU)
    assert torch.equal(torch.get_rng_state(), state)


# ---- micro-batches and ledger ----


def test_dropout_depends_on_step_and_microbatch_alone() -> None:
    layers = replicas()
    losses = {
        (s, m): run(layers, s, m, skip=True) for s, m in itertools.product(range(2), range(3))
    }
    torch.manual_seed(123)
    other = replicas()
    for (step, index), loss in reversed(losses.items()):
        assert run(other, step, index, skip=True) == loss
    first = layers[0]
    zeros = [(forward(first, None, microbatch(0, m)) == 0).tolist() for m in (0, 1, 0)]
    assert zeros[0] == zeros[2] != zeros[1]


def test_ledger_takes_each_microbatch_once() -> None:
    layers = replicas()
    run(layers, 0, 2)
    assert all(replica.ledger == {2} for replica in layers)
    with pytest.raises(LedgerError, match=r"layer 0 .*\[2\]"):
        run(layers, 0, 2)
    for replica in layers:
        replica.clear()
        assert not replica.ledger and not replica.losses and not replica.gradient.any()


def test_a_skipped_microbatch_changes_neither_gradient_nor_ledger() -> None:
    layers = replicas()
    run(layers, 0, 1)
    before = [replica.gradient.clone() for replica in layers]
    run(layers, 0, 1, skip=True)
    run(layers, 0, 3, skip=True)
    assert same(before, [replica.gradient for replica in layers])
    assert all(replica.ledger == {1} for replica in layers)
    assert all(p.grad is None for replica in layers for p in replica.module.parameters())


def test_gradient_matches_plain_autograd() -> None:
    layers = replicas()
    for index in range(4):
        run(layers, 0, index)
    plain = replicas()
    for index in range(4):
        hidden: torch.Tensor | None = None
        for replica in plain:
            hidden = forward(replica, hidden, microbatch(0, index))
        assert hidden is not None
        torch.autograd.backward(hidden / 4)
    for one, other in zip(layers, plain, strict=True):
        for parameter, found in zip(
            other.module.parameters(), one.layout.views(to_flat(one.gradient)), strict=True
        ):
            wanted = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("cut", [(0, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)])
def test_stage_boundaries_do_not_change_the_gradients(cut: tuple[int, ...]) -> None:
    whole = replicas()
    run(whole, 0, 0)
    layers = replicas()
    hidden: torch.Tensor | None = None
    ends: list[tuple[torch.Tensor | None, torch.Tensor]] = []
    for first, last in itertools.pairwise(cut):
        hidden = hidden.detach().requires_grad_() if hidden is not None else None
        start = hidden
        for replica in layers[first:last]:
            hidden = forward(replica, hidden, microbatch(0, 0))
        assert hidden is not None
        ends.append((start, hidden))
    gradient = None
    for start, end in reversed(ends):
        torch.autograd.backward(end / 4 if gradient is None else end, gradient)
        gradient = start.grad if start is not None else None
    for replica in layers:
        replica.collect(0, skip=False)
    assert same([r.gradient for r in whole], [r.gradient for r in layers])


# ---- gradients as bytes ----


@pytest.mark.parametrize("accumulate", list(Accumulate))
def test_gradient_copies_add_up(accumulate: Accumulate) -> None:
    whole, one, other = (replicas(accumulate=accumulate) for _ in range(3))
    for index in range(4):
        run(whole, 0, index)
        run(one if index % 2 else other, 0, index)
    for a, b, c in zip(one, other, whole, strict=True):
        a.add_gradient(gradient_of(b), b.ledger, b.losses.items())
        assert a.ledger == {0, 1, 2, 3} and a.losses == c.losses
        torch.testing.assert_close(a.gradient, c.gradient)
        if accumulate is Accumulate.EXACT:
            assert torch.equal(a.gradient, c.gradient)


def test_overlapping_or_foreign_gradients_are_refused() -> None:
    one, other = replicas(), replicas()
    run(one, 0, 1)
    run(other, 0, 1)
    before = one[0].gradient.clone()
    with pytest.raises(LedgerError):
        one[0].add_gradient(gradient_of(other[0]), {1}, {})
    with pytest.raises(VaultError):
        one[0].add_gradient(gradient_of(other[0])[:-8], {2}, {})
    assert torch.equal(one[0].gradient, before) and one[0].ledger == {1}


# ---- update ----


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("tied", [False, True])
def test_exact_training_does_not_depend_on_the_order_of_microbatches(name: str, tied: bool) -> None:
    one = replicas(toy_stack(tied=tied), OPTIMIZERS[name])
    other = replicas(toy_stack(tied=tied), OPTIMIZERS[name])
    train(one, 3, (0, 1, 2, 3))
    train(other, 3, (2, 0, 3, 1))
    assert same(values(one), values(other)) and one[0].version == 3


def test_update_does_not_change_the_reduced_gradient() -> None:
    layers = replicas()
    run(layers, 0, 0)
    reduced = layers[1].gradient.clone()
    kept = reduced.clone()
    layers[1].update(reduced, 0.3, 0.1)
    assert torch.equal(reduced, kept) and torch.equal(layers[1].gradient, kept)


def test_clip_scales_the_gradient() -> None:
    plain = OptimizerSpec(factory=lambda groups: torch.optim.SGD(groups, lr=0.0), lr=constant(1.0))
    one, other = replicas(optimizer=plain), replicas(optimizer=plain)
    before = values(one[:1])
    for layers, clip in ((one, 1.0), (other, 0.25)):
        run(layers, 0, 0)
        layers[0].update(layers[0].gradient, clip, 1.0)
    for a, b, start in zip(values(one[:1]), values(other[:1]), before, strict=True):
        torch.testing.assert_close(start - b, (start - a) / 4)


def test_norm_counts_tied_parameters_once() -> None:
    apart, tied = replicas(), replicas(toy_stack(tied=True))
    gradients = []
    for layers in (apart, tied):
        for replica in layers:
            replica.gradient[: replica.layout.numel].fill_(1 << 44)
        gradients.append(sum(replica.norm_sq(replica.gradient) for replica in layers))
    assert gradients[0] - gradients[1] == 36
    assert tied[0].norm_sq(tied[0].gradient) == apart[0].norm_sq(apart[0].gradient) == 42


def test_norm_is_that_of_all_gradients() -> None:
    layers = replicas()
    run(layers, 0, 0)
    parts = [g.double() for r in layers for g in r.layout.views(to_flat(r.gradient))]
    wanted = math.sqrt(sum(float(g.square().sum()) for g in parts))
    assert math.sqrt(sum(r.norm_sq(r.gradient) for r in layers)) == pytest.approx(wanted, rel=1e-6)


# ---- state as bytes ----


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("at", [0, 1, 3])
def test_training_continues_bit_for_bit_from_a_copy(name: str, at: int) -> None:
    layers, others = (
        replicas(optimizer=OPTIMIZERS[name]),
        replicas(optimizer=OPTIMIZERS[name], empty=True),
    )
    train(layers, at)
    for one, other in zip(layers, others, strict=True):
        copied = state_of(one)
        other.read_state(copied)
        assert other.version == at and torch.equal(state_of(other), copied)
    train(layers, 2)
    train(others, 2)
    assert same(values(layers), values(others))
    assert all(torch.equal(state_of(a), state_of(b)) for a, b in zip(layers, others, strict=True))


def test_rolling_a_live_replica_back() -> None:
    layers = replicas(optimizer=adamw(0.01))
    train(layers, 1)
    kept = [state_of(replica) for replica in layers]
    train(layers, 2)
    ahead = values(layers)
    for replica, state in zip(layers, kept, strict=True):
        replica.read_state(state)
    assert [replica.version for replica in layers] == [1, 1, 1]
    train(layers, 2)
    assert same(values(layers), ahead)


def test_the_state_has_the_float32_masters() -> None:
    spec = adamw(0.01, master_weights=True)
    layers = replicas(toy_stack(dtype=torch.bfloat16), spec)
    others = replicas(toy_stack(dtype=torch.bfloat16), spec, empty=True)
    train(layers, 2)
    for one, other in zip(layers, others, strict=True):
        other.read_state(state_of(one))
    train(layers, 1)
    train(others, 1)
    assert same(values(layers), values(others))
    assert torch.equal(state_of(layers[1]), state_of(others[1]))


def test_state_of_another_layer_is_refused() -> None:
    layers = replicas()
    before = values(layers)
    with pytest.raises(VaultError, match=r"layer 0: state of param/unused"):
        layers[0].read_state(state_of(layers[1]))
    bf16 = replicas(toy_stack(dtype=torch.bfloat16))
    with pytest.raises(VaultError, match="bfloat16"):
        layers[1].read_state(state_of(bf16[1]))
    assert same(values(layers), before)


def test_middle_of_the_toy_has_an_unused_parameter() -> None:
    layers = replicas(optimizer=sgd(momentum=0.0))
    train(layers, 1)
    assert isinstance(layers[1].module, Middle)
    assert torch.equal(layers[1].module.unused, torch.ones(3))
