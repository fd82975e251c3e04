"""A sequence of modules, cut into layers, computes what the whole sequence computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.domain.errors import FieldError
from elastic.worker.contrib.sequential import SequentialModel, from_sequential
from elastic.worker.model.microbatch import Microbatch
from tests.worker.contrib.cut_models import excess, replicas, run
from tests.worker.model.toy_model import ALONE, CPU

WIDTH, CLASSES = 8, 5


def parts() -> list[nn.Module]:
    return [
        nn.Flatten(),
        nn.Linear(12, WIDTH),
        nn.ReLU(inplace=True),
        nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()),
        nn.Dropout(0.0),
        nn.Linear(WIDTH, CLASSES),
    ]


def loss(output: Tensor, microbatch: Microbatch) -> Tensor:
    return nn.functional.cross_entropy(output, microbatch.fields["y"])


def microbatch(index: int = 0) -> Microbatch:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(4, 3, 4, generator=generator)
    return Microbatch(0, index, {"x": x, "y": torch.arange(4)})


@pytest.mark.parametrize("made", [nn.ModuleList, lambda found: nn.Sequential(*found), tuple])
def test_losses_and_gradients_are_those_of_the_whole_model(made: Callable[[Any], Any]) -> None:
    torch.manual_seed(1)
    modules = parts()
    stack = from_sequential(made(modules), loss=loss)
    assert stack.n_layers == 4 and not stack.tied
    whole = nn.Sequential(*modules)
    expected = loss(whole(microbatch().fields["x"]), microbatch())
    torch.autograd.backward(expected)
    sums = []
    for cuts in ([], [1], [1, 2, 3]):
        layers = replicas(stack)
        assert run(layers, cuts, microbatch()) == pytest.approx(expected.item(), abs=1e-6)
        sums.append([layer.gradient.clone() for layer in layers])
    assert all(torch.equal(a, b) for other in sums[1:] for a, b in zip(sums[0], other, strict=True))
    hidden: Any = None
    for layer in replicas(stack):
        hidden = layer.forward(hidden, microbatch())
        for name, parameter in layer.module.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(stack.name_of(layer.index, name)))
    assert hidden.item() == expected.item()


def test_layers_of_a_meta_model_draw_their_own_values() -> None:
    """They depend on seed and layer alone; torch's own distributions are kept."""

    def made(seed: int) -> SequentialModel:
        with torch.device("meta"):
            return from_sequential(parts(), loss=loss, seed=seed)

    one, again, other = made(1), made(1), made(2)
    for index in reversed(range(one.n_layers)):
        torch.manual_seed(index)
        first = dict(one.build(index, CPU, ALONE).named_parameters())
        second = dict(again.build(index, CPU, ALONE).named_parameters())
        third = dict(other.build(index, CPU, ALONE).named_parameters())
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert any(not torch.equal(first[name], third[name]) for name in first)
    weight = one.build(0, CPU, ALONE).get_parameter("parts.1.weight")
    assert 0.05 < weight.std().item() < 12**-0.5  # kaiming_uniform_: at most 1 / sqrt(12)
    assert one.contents() == from_sequential(parts(), loss=loss).contents()


def test_one_parameter_in_several_parts_stays_one() -> None:
    first, last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    last.weight = first.weight
    model = [nn.Flatten(), nn.Linear(12, WIDTH), first, nn.ReLU(), last]
    stack = from_sequential(model, loss=loss)
    assert stack.tied == (((1, "parts.0.weight"), (2, "parts.0.weight")),)
    built = [stack.build(index, CPU, ALONE).get_parameter("parts.0.weight") for index in (1, 2)]
    assert torch.equal(built[0], built[1]) and torch.equal(built[0], first.weight)


class Scale(nn.Module):
    """Has a parameter, and no method that draws its initial value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.scale


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (lambda: nn.Linear(2, 2), r"model: an object of type Linear .* an nn.Sequential"),
        (lambda: 3, r"model: 3 .* an nn.Sequential"),
        (lambda: [nn.ReLU()], r"a model without parameters"),
        (list, r"a model without parameters"),
        (
            lambda: [nn.Linear(2, 2), torch.relu],
            r"model\[1\]: the function relu is not usable",
        ),
        (lambda: [nn.Bilinear(2, 2, 2)], r"model\[0\]: forward\(.*each of which takes one"),
        (lambda: on_meta(lambda: [Scale()]), r"module 0: a Scale .* reset_parameters\(\)"),
        (
            lambda: [nn.Linear(2, 2), on_meta(lambda: nn.Linear(2, 2))],
            r"a parameter on the meta device, while",
        ),
    ],
)
def test_what_cannot_be_cut_is_named(model: Callable[[], Any], error: str) -> None:
    with pytest.raises(FieldError, match=error):
        from_sequential(model(), loss=loss)


def test_wrong_arguments_are_named() -> None:
    wrong: Any = nn.MSELoss()
    with pytest.raises(FieldError, match=r"inputs: 3 is not usable: the name of a field"):
        from_sequential(parts(), loss=loss, inputs=3)  # type: ignore[arg-type]
    with pytest.raises(FieldError, match=r"loss: .* a function loss\(output, microbatch\)"):
        from_sequential(parts(), loss=lambda output: output)  # type: ignore[arg-type, misc]
    stack = from_sequential(parts(), loss=wrong, inputs="image")
    with pytest.raises(FieldError, match=r"inputs: 'image' .* it gives x, y"):
        run(replicas(stack), [], microbatch())


def test_modules_draw_initial_values_after_their_children() -> None:
    """Attention sets the bias of its projection, which is a module of its own, to zero."""
    made = on_meta(lambda: [nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 1)])
    stack = from_sequential(made, loss=loss)
    values = dict(stack.build(0, CPU, ALONE).named_parameters())
    assert not values["parts.0.self_attn.out_proj.bias"].any()
    assert all(not value.isnan().any() for value in values.values())
    assert values["parts.0.linear1.bias"].any()


def test_attention_costs_the_square_of_the_length() -> None:
    def rows(index: int, length: int) -> Microbatch:
        x = torch.rand(1 + index, length, WIDTH)
        return Microbatch(0, index, {"x": x, "y": x})

    encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    modules = [nn.Linear(WIDTH, WIDTH), encoder, nn.Linear(WIDTH, WIDTH)]
    stack = from_sequential(
        modules,
        loss=lambda out, given: (out - given.fields["y"]).square().mean(),
        varying=True,
    )
    lengths = (16, 40, 24)
    found = excess(replicas(stack), [1, 2], (rows(*one) for one in enumerate(lengths)))
    per_token = 2 * (4 * WIDTH**2 + 2 * WIDTH * 16)
    assert found == pytest.approx([0, 4 * WIDTH * 24 / per_token, 0], abs=1e-9)
