from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from elastic.domain.errors import FieldError
from elastic.worker.model.learning_rate import constant
from elastic.worker.model.optimizer import (
    LayerOptimizer,
    OptimizerSpec,
    adamw,
    decay_matrices,
    without_compiler,
)

FACTORIES: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.0),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.0, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.0),
    "adamw-fused": lambda groups: torch.optim.AdamW(groups, lr=0.0, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.0),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.0),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.0, centered=True),
}
EACH = pytest.mark.parametrize("name", sorted(FACTORIES))


def parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, Parameter]]:
    seeded = torch.Generator().manual_seed(0)
    shapes = {"weight": (4, 3), "bias": (4,)}
    return [(n, Parameter(torch.randn(s, generator=seeded).to(dtype))) for n, s in shapes.items()]


def steps(optimizer: LayerOptimizer, first: int, last: int) -> None:
    for step in range(first, last):
        seeded = torch.Generator().manual_seed(step)
        optimizer.step(
            [torch.randn(4, 3, generator=seeded), torch.randn(4, generator=seeded)],
            0.01 * (step + 1),
        )


def spec(name: str, **options: object) -> OptimizerSpec:
    return OptimizerSpec(factory=FACTORIES[name], lr=constant(0.1), **options)  # type: ignore[arg-type]


@EACH
def test_same_as_torch_alone(name: str) -> None:
    ours, theirs = parameters(), parameters()
    steps(LayerOptimizer(ours, spec(name)), 0, 3)
    plain = FACTORIES[name]([{"params": [p for _, p in theirs]}])
    for step in range(3):
        seeded = torch.Generator().manual_seed(step)
        for _, parameter in theirs:
            parameter.grad = torch.randn(parameter.shape, generator=seeded)
        plain.param_groups[0]["lr"] = 0.01 * (step + 1)
        plain.step()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    assert all(parameter.grad is None for _, parameter in ours)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam])
def test_without_the_compiler_the_bits_are_the_same(kind: type[torch.optim.Optimizer]) -> None:
    ours, theirs = parameters(), parameters()
    makers: list[Callable[..., torch.optim.Optimizer]] = [without_compiler(kind), kind]
    for named, maker in zip((ours, theirs), makers, strict=True):
        factory = partial(maker, lr=0.0, weight_decay=0.1)
        steps(LayerOptimizer(named, OptimizerSpec(factory=factory, lr=constant(0.1))), 0, 3)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0][1], parameters()[0][1])


def test_adamw_does_not_load_torchs_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from elastic.worker.model.optimizer import LayerOptimizer, adamw\n"
        "weight = torch.nn.Parameter(torch.ones(2, 2))\n"
        "LayerOptimizer([('weight', weight)], adamw(0.1)).step([torch.ones(2, 2)], 0.1)\n"
        "sys.exit('torch._dynamo' in sys.modules or torch.equal(weight, torch.ones(2, 2)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@EACH
@pytest.mark.parametrize("at", [0, 1, 3])
def test_state_moves_to_another_instance_bit_for_bit(name: str, at: int) -> None:
    ours, theirs = parameters(), parameters()
    one, other = LayerOptimizer(ours, spec(name)), LayerOptimizer(theirs, spec(name))
    steps(one, 0, at)
    steps(other, 7, 9)
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        b.data.copy_(a)
    other.load({(n, k): t.clone() for n, k, t in one.tensors()}, one.extra())
    steps(one, at, at + 2)
    steps(other, at, at + 2)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))


class Counting(torch.optim.Optimizer):
    """An optimizer with plain numbers in its state and its group, as some published ones have."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0, "k": 0})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["n"] = state.get("n", 0) + 1
                parameter.data -= group["lr"] * parameter.grad * state["n"] / group["k"]


def test_state_without_tensors_is_saved_as_text() -> None:
    counting = OptimizerSpec(factory=Counting, lr=constant(0.1))
    one, other = LayerOptimizer(parameters(), counting), LayerOptimizer(parameters(), counting)
    assert one.extra() == {}
    steps(one, 0, 3)
    assert one.extra() == {"optim/weight/n": "3", "optim/bias/n": "3", "group/0/k": "3"}
    other.load({}, one.extra())
    assert other.extra() == one.extra() and other.optimizer.param_groups[0]["k"] == 3


def test_float32_masters_keep_updates_that_bf16_rounds_away() -> None:
    masters, bare = parameters(torch.bfloat16), parameters(torch.bfloat16)
    one = LayerOptimizer(masters, spec("sgd", master_weights=True))
    other = LayerOptimizer(bare, spec("sgd"))
    start = masters[0][1].detach().clone()
    for _ in range(64):
        for optimizer in (one, other):
            optimizer.step([torch.full((4, 3), 1e-4), torch.zeros(4)], 1.0)
    assert not torch.equal(masters[0][1], start)
    wanted = (start.float() - 64e-4).to(torch.bfloat16)
    torch.testing.assert_close(masters[0][1].detach(), wanted)
    big = start.abs() > 0.5
    assert torch.equal(bare[0][1][big], start[big])
    assert masters[0][1].dtype == torch.bfloat16 and one.masters["weight"].dtype == torch.float32


def test_groups_decay_matrices_and_scale_rates() -> None:
    def groups(named: list[tuple[str, Parameter]]) -> list[dict[str, Any]]:
        split = decay_matrices(0.5)(named)
        split[1]["lr_scale"] = 0.0
        return split

    named = parameters()
    before = [p.detach().clone() for _, p in named]
    optimizer = LayerOptimizer(
        named,
        OptimizerSpec(
            factory=lambda g: torch.optim.SGD(g, lr=0.0), groups=groups, lr=constant(0.1)
        ),
    )
    optimizer.step([torch.zeros(4, 3), torch.ones(4)], 0.1)
    torch.testing.assert_close(named[0][1].detach(), before[0] * 0.95)
    assert torch.equal(named[1][1], before[1])


def _first_parameters(count: int, named: list[tuple[str, Parameter]]) -> list[dict[str, Any]]:
    return [{"params": [parameter for _, parameter in named[:count]]}]


def test_missing_parameters_are_refused() -> None:
    for count in (1, 0):
        with pytest.raises(FieldError, match="bias"):
            groups = partial(_first_parameters, count)
            LayerOptimizer(parameters(), spec("sgd", groups=groups))


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), float("inf")])
def test_clip_norm_must_be_positive(clip: float) -> None:
    with pytest.raises(FieldError, match="clip_norm"):
        adamw(1e-3, clip_norm=clip)


def test_bytes_of_the_state() -> None:
    low = torch.bfloat16
    assert spec("sgd").state_bytes_per_element(torch.float32) == 0
    assert spec("momentum").state_bytes_per_element(torch.float32) == 4
    assert adamw(1e-3).state_bytes_per_element(torch.float32) == 8
    assert adamw(1e-3).state_bytes_per_element(low) == 4
    assert adamw(1e-3, master_weights=True).state_bytes_per_element(low) == 12


def test_an_optimizer_is_described_by_its_class_and_state() -> None:
    assert adamw(1e-3).describe() == "AdamW (exp_avg, exp_avg_sq, step)"
    assert adamw(1e-3, master_weights=True).describe().endswith("step, float32 masters)")
    assert spec("sgd").describe() == "SGD (no state)"
    assert spec("momentum").describe() == "SGD (momentum_buffer)"


def test_groups_may_be_iterators() -> None:
    named = parameters()
    before = [p.detach().clone() for _, p in named]
    one_group = spec("sgd", groups=lambda named: [{"params": (p for _, p in named)}])
    LayerOptimizer(named, one_group).step([torch.ones(4, 3), torch.ones(4)], 0.1)
    for (_, parameter), old in zip(named, before, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.1)


def other_parameters(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Adam([Parameter(torch.ones(2))])


def broken(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    raise KeyError("an error of the script")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("factory", torch.optim.Adam([Parameter(torch.ones(2))]), "an object of type Adam"),
        ("factory", "adam", "'adam'"),
        ("factory", lambda: None, r"<lambda>\(\)"),
        ("factory", lambda groups, lr: None, r"<lambda>\(groups, lr\)"),
        ("factory", lambda groups: None, "a function that returns None"),
        ("factory", other_parameters, "Adam of other parameters"),
        ("factory", torch.optim.LBFGS, "LBFGS, whose step fails with TypeError: .*closure"),
        ("factory", torch.optim.SparseAdam, "SparseAdam, whose step fails with RuntimeError"),
        (
            "factory",
            lambda groups: torch.optim.Adam(groups, betas=(2.0, 3.0)),
            "a function that fails with ValueError: Invalid beta parameter",
        ),
        ("groups", [{"weight_decay": 0.1}], "an object of type list"),
        ("groups", lambda named: None, "a function that returns None"),
        ("groups", lambda named: [p for _, p in named], "a function that returns an object of"),
        ("groups", lambda named: {"params": []}, "a function that returns an object of type dict"),
        ("lr", 3e-3, r"0.003 is not usable: a function of the step, as lambda step: 0.003"),
        ("lr", None, "None"),
        ("lr", lambda: 0.1, r"<lambda>\(\)"),
        ("lr(0)", lambda step: None, "None .*a finite number from 0 up"),
        ("lr(0)", lambda step: torch.tensor(0.1), r"a tensor of shape \(\)"),
        ("lr(0)", lambda step: "0.1", "'0.1'"),
        ("lr(0)", lambda step: float("nan"), "nan"),
        ("lr(0)", lambda step: -0.1, "-0.1"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any, text: str) -> None:
    fields: dict[str, Any] = {"factory": FACTORIES["sgd"], "lr": constant(0.1)}
    fields[field.partition("(")[0]] = value
    with pytest.raises(FieldError, match=rf"^OptimizerSpec.{re.escape(field)}: {text}"):
        wrong = OptimizerSpec(**fields)
        wrong.describe()
        wrong.lr(0)


@pytest.mark.parametrize("clip", ["1", -1.0, 0, True, float("inf"), float("nan")])
def test_the_clip_norm_is_a_positive_number(clip: Any) -> None:
    with pytest.raises(FieldError, match=r"clip_norm: .* a positive number, or None"):
        spec("sgd", clip_norm=clip)


def test_an_optimizer_that_cannot_update_every_layer_is_refused() -> None:
    muon = OptimizerSpec(factory=torch.optim.Muon, lr=constant(0.1))
    assert muon.describe().startswith("Muon")
    with pytest.raises(
        FieldError, match=r"fails with ValueError: Muon only supports 2D parameters"
    ):
        LayerOptimizer(parameters(), muon)


def test_an_error_of_the_script_stays_as_it_is() -> None:
    with pytest.raises(KeyError, match="an error of the script"):
        OptimizerSpec(factory=broken, lr=constant(0.1)).describe()


def test_a_schedule_returns_floats() -> None:
    assert OptimizerSpec(factory=FACTORIES["sgd"], lr=lambda step: 1 + step).lr(1) == 2.0


def test_an_optimizer_that_is_not_elementwise_is_found() -> None:
    made = OptimizerSpec(factory=torch.optim.Adafactor, lr=constant(0.1), elementwise=True)
    with pytest.raises(FieldError, match=r"OptimizerSpec.elementwise: True .*Adafactor updates"):
        made.describe()
    assert adamw(0.1).describe().startswith("AdamW")


def test_a_layer_without_parameters_is_updated() -> None:
    for made in (adamw(0.1), spec("sgd")):
        LayerOptimizer([], made).step([], 0.1)


def test_a_factory_that_flattens_groups_need_not_expect_empty_layers() -> None:
    def flat(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for group in groups for p in group["params"]])

    LayerOptimizer([], OptimizerSpec(factory=flat, lr=constant(0.1))).step([], 0.1)


def test_an_error_of_torch_on_the_device_is_not_an_error_of_the_factory() -> None:
    """Adagrad makes its state at once. A broken device raises RuntimeError too."""

    def factory(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(groups, initial_accumulator_value=1e30)

    made = OptimizerSpec(factory=factory, lr=constant(0.1))
    with pytest.raises(RuntimeError, match="overflow"):
        LayerOptimizer(parameters(torch.float16), made)


def test_a_number_is_a_constant_rate() -> None:
    assert adamw(0.5).lr(3) == 0.5
