"""The update of one layer by any torch optimizer that keeps its state per parameter.

Each layer has its own optimizer, so that it can move between workers together with its state. The
learning rate is a function of the step, and the clip coefficient belongs to the step's record, so
an update does not depend on earlier steps except through the state.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from elastic.domain.errors import ElasticError, FieldError, describe
from elastic.domain.state_layout import GRAIN, span
from elastic.domain.types import WHOLE, Portion
from elastic.planning.plan.schemes import SHARDED
from elastic.worker.model.checks import Described, check_callable, description
from elastic.worker.model.learning_rate import RATE, LearningRate, checked_rate, constant
from elastic.worker.model.loss_scale import LossScale

FACTORY = (
    "a function of the parameter groups that returns a torch optimizer of these parameters, as "
    "lambda groups: torch.optim.AdamW(groups)"
)
GROUPS = (
    "a function of [(name, parameter), ...] that returns groups, as "
    'lambda named: [{"params": [p for _, p in named], "weight_decay": 0.1}]'
)
ANY_OPTIMIZER = (
    "each layer has an optimizer of its own, which must accept parameters of any shape and a step "
    "without closure, as torch.optim.AdamW does"
)
ParameterGroups = list[dict[str, Any]]


def one_group(parameters: list[tuple[str, Parameter]]) -> ParameterGroups:
    """Return one group with all parameters."""
    return [{"params": [p for _, p in parameters]}]


def decay_matrices(weight_decay: float) -> Callable[[list[tuple[str, Parameter]]], ParameterGroups]:
    """Return a function that puts only tensors of two or more dimensions under weight decay."""

    def groups(parameters: list[tuple[str, Parameter]]) -> ParameterGroups:
        decayed = [p for _, p in parameters if p.ndim >= 2]
        rest = [p for _, p in parameters if p.ndim < 2]
        pairs = ((decayed, weight_decay), (rest, 0.0))
        return [{"params": params, "weight_decay": decay} for params, decay in pairs if params]

    return groups


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Optimizer, learning rate and clipping of a job."""

    factory: Callable[[ParameterGroups], torch.optim.Optimizer]
    """factory(groups) -> optimizer of one layer."""
    lr: LearningRate
    """Learning rate per step; the "lr_scale" of a group multiplies it."""
    groups: Callable[[list[tuple[str, Parameter]]], ParameterGroups] = one_group
    """groups([(name, parameter), ...]) -> groups of one layer, which has these trained parameters.
    Must treat tied parameters alike."""
    clip_norm: float | None = None
    """Global gradient norm above which gradients are scaled down; None: no clipping."""
    master_weights: bool = False
    """Whether to keep float32 copies of lower-precision parameters, and to update the copies."""
    elementwise: bool = False
    """Whether each element's update depends on its own gradient and state alone, as in AdamW. Only
    then can the holders of a layer share the optimizer's state."""
    loss_scale: LossScale | None = None
    """Loss scaling, which gradients in float16 need; None: none."""

    def __post_init__(self) -> None:
        check_callable("OptimizerSpec.factory", self.factory, 1, FACTORY)
        check_callable("OptimizerSpec.groups", self.groups, 1, GROUPS)
        check_callable("OptimizerSpec.lr", self.lr, 1, RATE)
        object.__setattr__(self, "lr", checked_rate(self.lr))
        clip = self.clip_norm
        number = isinstance(clip, Real) and not isinstance(clip, bool)
        if clip is not None and not (number and 0 < clip < math.inf):
            remedy = "a positive number, or None for no clipping"
            raise FieldError("clip_norm", description(clip), remedy)
        if not isinstance(self.loss_scale, LossScale | None):
            remedy = "a LossScale, as LossScale(initial=2**16)"
            raise FieldError("OptimizerSpec.loss_scale", description(self.loss_scale), remedy)

    def check(self, *, shared: bool) -> None:
        """Raise FieldError if holders are to share the optimizer's state (`shared`) and cannot."""
        if shared and not self.elementwise:
            remedy = (
                "pipelines can share the state of elementwise optimizers only: "
                f"leave {SHARDED} out of --backup"
            )
            raise FieldError("OptimizerSpec.elementwise", self.elementwise, remedy)

    def state_bytes_per_element(self, dtype: torch.dtype) -> int:
        """Return the state bytes per element of a `dtype` parameter, measured on a tiny layer."""
        tiny = self._tiny(dtype)
        parameter = tiny.parameters["tiny"]
        state = sum(t.nbytes for _, _, t in tiny.tensors() if t.shape == parameter.shape)
        return (state + sum(m.nbytes for m in tiny.masters.values())) // parameter.numel()

    def describe(self) -> str:
        """Return the optimizer's class and state in a short text, by which a checkpoint of another
        optimizer is recognized. Raises FieldError if the optimizer is not usable."""
        tiny = self._tiny(torch.bfloat16 if self.master_weights else torch.float32)
        if self.elementwise and not _is_elementwise(self):
            kind = type(tiny.optimizer).__name__
            remedy = f"{kind} updates an element by the gradients of others: leave it out"
            raise FieldError("OptimizerSpec.elementwise", True, remedy)
        keys = {key for _, key, _ in tiny.tensors()} | {p.rsplit("/", 1)[1] for p in tiny.extra()}
        masters = ["float32 masters"] if tiny.masters else []
        state = ", ".join([*sorted(keys), *masters]) or "no state"
        return f"{type(tiny.optimizer).__name__} ({state})"

    def _tiny(self, dtype: torch.dtype) -> LayerOptimizer:
        """Return the optimizer of a tiny layer after one step."""
        tiny = LayerOptimizer([("tiny", Parameter(torch.zeros(4, 4, dtype=dtype)))], self)
        with _own_errors_of(f"{type(tiny.optimizer).__name__}, whose step fails with", Exception):
            tiny.step([torch.zeros(4, 4)], 0.0)
        return tiny


class LayerOptimizer:
    """Updates one layer, or one portion of its parameters; holds optimizer state and masters.

    Masters are float32 copies of the parameters. `elastic.domain.state_layout` defines how tensors
    are named and cut. Raises FieldError for a portion if the optimizer is not elementwise.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        spec: OptimizerSpec,
        *,
        empty: bool = False,
        portion: Portion = WHOLE,
    ) -> None:
        spec.check(shared=portion != WHOLE)
        small = any(p.dtype == torch.float16 for _, p in parameters)
        if small and spec.loss_scale is not None and not spec.master_weights:
            remedy = "updates of float16 parameters round small gradients to 0: set it to True"
            raise FieldError("OptimizerSpec.master_weights", False, f"with loss_scale, {remedy}")
        self.portion = portion
        self.parameters = {
            name: p if portion == WHOLE else Parameter(self.portion_of(p.detach()))
            for name, p in parameters
        }
        self.masters: dict[str, Parameter] = {}
        for name, parameter in self.parameters.items() if spec.master_weights else ():
            if parameter.dtype.itemsize < 4:
                master = torch.empty_like(parameter, dtype=torch.float32)
                self.masters[name] = Parameter(
                    master if empty else master.copy_(parameter.detach())
                )
        self.targets: dict[str, Parameter] = {**self.parameters, **self.masters}
        groups = self._groups(spec, dict(parameters))
        # Other errors are faults of the device. A factory need not expect an empty layer.
        with _own_errors_of("a function that fails with", TypeError, ValueError):
            self.optimizer = (spec.factory if self.targets else _NOTHING_TO_UPDATE)(groups)
        self._check_optimizer()
        self._initial = [self._scalars(group) for group in self.optimizer.param_groups]

    def portion_of(self, tensor: Tensor) -> Tensor:
        """Return this portion of a parameter-shaped `tensor`: a flat view; scalars stay whole."""
        if self.portion == WHOLE or not tensor.ndim:
            return tensor
        first, last = span(tensor.shape, self.portion)
        return tensor.view(-1)[first:last]

    def _groups(self, spec: OptimizerSpec, whole: Mapping[str, Parameter]) -> ParameterGroups:
        """Return the spec's groups, with whole parameters replaced by the update targets.

        A layer without parameters has an empty group, because torch refuses an empty list.
        """
        if not whole:
            return one_group([])
        target_of = {id(parameter): self.targets[name] for name, parameter in whole.items()}
        groups = _read_groups(spec.groups(list(whole.items())))
        held = [id(p) for group in groups for p in group["params"]]
        if sorted(held) != sorted(target_of):
            remedy = "every parameter of the layer, and no other, must be in exactly one group"
            left_out = [name for name, p in whole.items() if id(p) not in held]
            found = f"without {', '.join(left_out)}" if left_out else f"{len(held)} parameters"
            raise FieldError("groups", found, remedy)
        return [
            {**group, "params": [target_of[id(p)] for p in group["params"]]} for group in groups
        ]

    def _check_optimizer(self) -> None:
        """Raise FieldError unless the factory returned an optimizer of the update targets."""
        made: object = self.optimizer
        if not isinstance(made, torch.optim.Optimizer):
            what = Described(f"a function that returns {description(made)}")
            raise FieldError("OptimizerSpec.factory", what, FACTORY)
        held = {id(parameter) for group in made.param_groups for parameter in group["params"]}
        if held != {id(target) for target in self.targets.values()}:
            what = Described(f"{type(made).__name__} of other parameters")
            raise FieldError("OptimizerSpec.factory", what, FACTORY)

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """Update in place from `gradients`: float32, in parameter order, this portion of each."""
        for target, gradient in zip(self.targets.values(), gradients, strict=True):
            target.grad = gradient.to(target.dtype) if target.numel() else None
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.optimizer.step()
        for target in self.targets.values():
            target.grad = None
        with torch.no_grad():
            for name, master in self.masters.items():
                self.parameters[name].copy_(master)

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (parameter name, key, tensor) of the state, in parameter order."""
        for name, target in self.targets.items():
            for key, value in self._state(target).items():
                if isinstance(value, Tensor):
                    yield name, key, value

    def extra(self) -> dict[str, str]:
        """Return the state that is not in tensors, as path -> JSON text."""
        texts = {
            f"optim/{name}/{key}": json.dumps(value)
            for name, target in self.targets.items()
            for key, value in self._state(target).items()
            if not isinstance(value, Tensor)
        }
        for i, group in enumerate(self.optimizer.param_groups):
            for key, value in self._scalars(group).items():
                if value != self._initial[i].get(key):
                    texts[f"group/{i}/{key}"] = json.dumps(value)
        return texts

    def load(self, tensors: Mapping[tuple[str, str], Tensor], extra: Mapping[str, str]) -> None:
        """Replace the state. Tensors are copied to the device where the optimizer expects them."""
        self.optimizer.state.clear()
        for (name, key), tensor in tensors.items():
            target = self.targets[name]
            on_device = tensor.ndim or self._scalars_on_device(target)
            device = target.device if on_device else torch.device("cpu")
            self.optimizer.state[target][key] = tensor.to(device, copy=True)
        for path, text in extra.items():
            kind, rest = path.split("/", 1)
            name, key = rest.rsplit("/", 1)
            if kind == "optim":
                self.optimizer.state[self.targets[name]][key] = json.loads(text)
            else:
                self.optimizer.param_groups[int(name)][key] = json.loads(text)

    def _state(self, target: Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state.get(target, {})
        return state

    def _scalars_on_device(self, target: Parameter) -> bool:
        groups = self.optimizer.param_groups
        group = next(g for g in groups if any(p is target for p in g["params"]))
        return bool(group.get("fused") or group.get("capturable"))

    @staticmethod
    def _scalars(group: dict[str, Any]) -> dict[str, Any]:
        simple = (bool, int, float, str)
        return {k: v for k, v in group.items() if k != "lr" and isinstance(v, simple)}


def _read_groups(given: object) -> ParameterGroups:
    """Return the result of `OptimizerSpec.groups` with lists of parameters. Raises FieldError."""
    groups: ParameterGroups = []
    for group in given if isinstance(given, Iterable) else [given]:
        known: dict[str, Any] = dict(group) if isinstance(group, Mapping) else {}
        params = known.get("params")
        if isinstance(params, Tensor) or not isinstance(params, Iterable):
            what = Described(f"a function that returns {description(given)}")
            raise FieldError("OptimizerSpec.groups", what, GROUPS)
        groups.append({**known, "params": list(params)})
    return groups


@contextmanager
def _own_errors_of(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise FieldError for an error of these kinds that torch raised, or that no line of the script
    raised: the script's optimizer needs something that it cannot have."""
    try:
        yield
    except ElasticError:
        raise
    except kinds as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
        if place.split(".")[0] not in ("torch", "elastic"):
            raise
        failed = Described(f"{what} {describe(error)}")
        raise FieldError("OptimizerSpec.factory", failed, ANY_OPTIMIZER) from error


def _is_elementwise(spec: OptimizerSpec) -> bool:
    """Return whether the two halves of a tensor are updated as the whole tensor is."""
    start = torch.linspace(-1.0, 1.0, 2 * GRAIN).view(2, GRAIN)
    results: list[Tensor] = []
    for portions in ((WHOLE,), ((0, 2), (1, 2))):
        parts = []
        for portion in portions:
            one = LayerOptimizer([("tiny", Parameter(start.clone()))], spec, portion=portion)
            for step in (1, 2):
                one.step([one.portion_of((start * step).cos())], 0.01)
            parts += [parameter.detach().reshape(-1) for parameter in one.parameters.values()]
        results.append(torch.cat(parts))
    whole, halves = results
    return torch.allclose(whole, halves)


def without_compiler(
    kind: type[torch.optim.Optimizer],
) -> Callable[..., torch.optim.Optimizer]:
    """Return `kind` without the wrappers that import torch's compiler when they are first called.

    The import takes as long as that of torch itself, in every worker. The wrappers keep the
    compiler out of an optimizer's step; nothing is compiled here.
    """
    methods = {
        "add_param_group": inspect.unwrap(kind.add_param_group),
        "step": torch.no_grad()(inspect.unwrap(kind.step)),
    }
    return type(kind.__name__, (kind,), methods)


def adamw(
    lr: float | LearningRate,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    clip_norm: float | None = 1.0,
    master_weights: bool = False,
    loss_scale: LossScale | None = None,
) -> OptimizerSpec:
    """Return the spec of torch's fused AdamW, with weight decay on matrices only."""
    kind = without_compiler(torch.optim.AdamW)

    def factory(groups: ParameterGroups) -> torch.optim.Optimizer:
        return kind(groups, lr=0.0, betas=betas, eps=eps, fused=True)

    return OptimizerSpec(
        factory=factory,
        groups=decay_matrices(weight_decay),
        lr=lr if callable(lr) else constant(lr),
        clip_norm=clip_norm,
        master_weights=master_weights,
        elementwise=True,
        loss_scale=loss_scale,
    )


_NOTHING_TO_UPDATE = without_compiler(torch.optim.SGD)
