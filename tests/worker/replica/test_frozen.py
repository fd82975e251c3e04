"""Frozen parameters: built by every holder, and in no copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elastic.domain.errors import FieldError, OtherModel, VaultError
from elastic.domain.types import WHOLE, Accumulate, Portion
from elastic.worker.model.layers import LayerStack, ListStack, describe_parameters
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import adamw
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.device_fault import is_node_fault
from tests.worker.model.toy_model import ALONE, CPU

SIZE, RANK = 64, 2
OPTIMIZER = adamw(0.1, weight_decay=0.5)


class Adapted(nn.Module):
    """A frozen matrix with a trained one of low rank beside it, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.down = nn.Linear(SIZE, RANK, bias=False)
        self.up = nn.Linear(RANK, SIZE, bias=False)

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        x = torch.ones(3, SIZE) * (1 + microbatch.index) if hidden is None else hidden
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Frozen(nn.Module):
    """A layer of which nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(SIZE, SIZE).requires_grad_(False)

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        return torch.tanh(self.base(hidden))


class Last(Adapted):
    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        return super().forward(hidden, microbatch).square().mean()


def stack() -> ListStack:
    return ListStack([Adapted, Frozen, Last], seed=3)


def replica(
    index: int, *, empty: bool = False, portion: Portion = WHOLE, model: LayerStack | None = None
) -> LayerReplica:
    return build_replica(
        model or stack(),
        index,
        ALONE,
        OPTIMIZER,
        Accumulate.EXACT,
        7,
        CPU,
        empty=empty,
        portion=portion,
    )


def train(layers: list[LayerReplica], steps: int = 2) -> None:
    for step in range(steps):
        hidden: Tensor | None = None
        for layer in layers:
            out = layer.forward(hidden, Microbatch(step, 0, {}))
            assert isinstance(out, Tensor)
            hidden = out
        assert hidden is not None
        torch.autograd.backward(hidden)
        for layer in layers:
            layer.collect(0, skip=False)
            layer.update(layer.gradient.clone(), 1.0, 0.1)
            layer.clear()


def trained_layers() -> list[LayerReplica]:
    layers = [replica(index) for index in range(3)]
    train(layers)
    return layers


def test_copies_have_the_trained_parameters_only() -> None:
    layers = trained_layers()
    elements = SIZE * RANK * 2
    for layer in layers:
        count = 0 if layer.index == 1 else elements
        assert layer.layout.numel == count
        assert layer.gradient_nbytes == 8 * (count + 16)
        assert 12 * count <= layer.state_nbytes() < 12 * count + 8192
        assert layer.update_nbytes == 4 * max(count, 1)


def test_the_update_leaves_frozen_parameters_as_they_are() -> None:
    """Weight decay would change them although they have no gradient."""
    before = [dict(replica(index).module.named_parameters()) for index in range(3)]
    for layer, old in zip(trained_layers(), before, strict=True):
        for name, parameter in layer.module.named_parameters():
            assert torch.equal(parameter, old[name]) == ("base" in name), name


def test_a_newcomer_builds_them_and_reads_the_rest() -> None:
    layers = trained_layers()
    fresh = [replica(index, empty=True) for index in range(3)]
    for one, other in zip(layers, fresh, strict=True):
        other.read_state(one.state_run())
        other.fill_frozen()
        assert one.digest() == other.digest() and other.version == 2
    train(layers, 1)
    train(fresh, 1)
    for one, other in zip(layers, fresh, strict=True):
        assert torch.equal(one.state_run(), other.state_run())
        assert one.digest() == other.digest()


@pytest.mark.parametrize("index", [0, 1])
def test_portions_are_of_the_trained_parameters(index: int) -> None:
    whole = trained_layers()[index]
    for portion in ((0, 2), (1, 2)):
        part = replica(index, empty=True, portion=portion)
        part.read_state(whole.state_run())
        part.fill_frozen()
        assert part.complete and part.digest() == whole.digest()
        again = replica(index, empty=True, portion=portion)
        again.read_state(part.state_run())
        assert not again.complete


def test_other_files_of_the_base_model_are_found() -> None:
    """The hash that the holders of a layer compare covers frozen parameters too."""
    one, other = replica(1), replica(1, model=ListStack([Adapted, Frozen, Last], seed=4))
    assert one.digest() != other.digest()


def test_a_flipped_bit_of_a_frozen_parameter_is_found() -> None:
    layer, other = replica(1), replica(1)
    assert layer.frozen_intact()
    layer.module.get_parameter("base.weight").view(torch.int32)[3, 5] ^= 1 << 20
    assert layer.digest() != other.digest()
    assert (layer.frozen_intact(), other.frozen_intact()) == (False, True)


def test_a_newcomer_with_other_files_of_the_base_model_is_found() -> None:
    """Also before anybody compares, and also if there is one holder of each layer."""
    run, other = trained_layers()[0].state_run(), ListStack([Adapted, Frozen, Last], seed=4)
    fresh = replica(0, empty=True, model=other)
    fresh.read_state(run)
    with pytest.raises(OtherModel, match=r"layer 0 \(Adapted\): its frozen parameters are not"):
        fresh.fill_frozen()
    with pytest.raises(OtherModel):
        replica(0, model=other).read_state(run)
    assert is_node_fault(OtherModel("x"))


def test_an_update_of_a_layer_without_trained_parameters_is_repeated() -> None:
    """Copies have at least one byte, and one byte of 0 means that an update was left out."""
    layer, other = replica(1), replica(1)
    taken = layer.update_input(layer.gradient, 1.0).view(torch.uint8)
    assert taken.numel() == layer.update_nbytes == 4
    layer.update(layer.gradient.clone(), 1.0, 0.1)
    other.apply_update(taken, 0.1)
    assert torch.equal(layer.state_run(), other.state_run()) and other.version == 1


def test_a_frozen_parameter_that_training_changes_is_refused() -> None:
    class Teacher(Adapted):
        def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
            with torch.no_grad():
                self.base.weight.lerp_(torch.ones(SIZE, SIZE), 0.1)
            return super().forward(hidden, microbatch)

    layer = replica(0, model=ListStack([Teacher, Frozen, Last], seed=3))
    text = r"parameter base.weight: a value that training changes .*it is frozen"
    with pytest.raises(FieldError, match=text):
        layer.forward(None, Microbatch(0, 0, {}))


def test_a_state_of_other_frozen_parameters_does_not_fit() -> None:
    class Free(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(True)

    free = ListStack([Free, Frozen, Last], seed=3)
    with pytest.raises(VaultError, match="state of param/base"):
        replica(0, model=free).read_state(replica(0).state_run())
    assert free.contents()[0] != stack().contents()[0]


def test_specs_and_descriptions_tell_them_apart() -> None:
    adapted, frozen, _ = stack().specs(Accumulate.EXACT, OPTIMIZER)
    assert adapted.param_bytes == 4 * 2 * SIZE * RANK
    assert adapted.frozen_bytes == frozen.frozen_bytes == 4 * (SIZE * SIZE + SIZE)
    assert adapted.state_bytes == 8 * 2 * SIZE * RANK
    assert (frozen.param_bytes, frozen.state_bytes, frozen.gradient_bytes) == (0, 0, 8 * 16)
    assert frozen.held_bytes == frozen.frozen_bytes + 8 * 16
    assert frozen.backward_s == frozen.forward_s < adapted.backward_s < 2 * adapted.forward_s
    text = describe_parameters(Adapted().named_parameters())
    assert text.startswith("2 parameters of 256 float32 elements (")
    assert "; frozen: 2 parameters of 4,160 float32 elements (" in text
