"""Any torch optimizer whose state is per parameter, applied layer by layer.

Each layer has its own optimizer instance, so that a layer moves between workers with all it needs. The
learning rate is a function of the step and the clip coefficient comes with the step's record: nothing
depends on the past.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from elastic.domain.errors import FieldError
from elastic.domain.state_layout import span
from elastic.domain.types import WHOLE, Portion
from elastic.planning.plan.schemes import SHARDED

Groups = list[dict[str, Any]]
Schedule = Callable[[int], float]


def one_group(parameters: list[tuple[str, Parameter]]) -> Groups:
    """All parameters alike."""
    return [{"params": [p for _, p in parameters]}]


def decay_matrices(weight_decay: float) -> Callable[[list[tuple[str, Parameter]]], Groups]:
    """Weight decay for tensors of two or more dimensions; none for biases and norms."""

    def groups(parameters: list[tuple[str, Parameter]]) -> Groups:
        decayed = [p for _, p in parameters if p.ndim >= 2]
        rest = [p for _, p in parameters if p.ndim < 2]
        both: Groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        return [group for group in both if group["params"]]

    return groups


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """How the parameters are updated."""

    factory: Callable[[Groups], torch.optim.Optimizer]
    """Makes the optimizer of one layer from its parameter groups."""
    lr: Schedule
    """Learning rate of a step; a group's own "lr_scale" multiplies it."""
    groups: Callable[[list[tuple[str, Parameter]]], Groups] = one_group
    """Splits one layer's (name, parameter) pairs into groups. Must treat tied parameters alike."""
    clip_norm: float | None = None
    """Global gradient norm above which gradients are scaled down; None: never."""
    master_weights: bool = False
    """Keep float32 masters of lower-precision parameters and update those."""
    elementwise: bool = False
    """Each element of a parameter is updated by its own gradient and state alone, as in AdamW: only such an optimizer's
    state can be shared by the holders of a layer."""

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not (self.clip_norm > 0 and math.isfinite(self.clip_norm)):
            raise FieldError("clip_norm", self.clip_norm, "a positive number, or None for no clipping")

    def check(self, *, shared: bool) -> None:
        """Raise FieldError if holders are to share the state and cannot."""
        if shared and not self.elementwise:
            why = f"pipelines can share the state of elementwise optimizers only: leave {SHARDED} out of --backup"
            raise FieldError("OptimizerSpec.elementwise", self.elementwise, why)

    def state_bytes_per_element(self, dtype: torch.dtype) -> int:
        """Bytes kept per element of a parameter of `dtype` besides itself, found by updating a tiny layer."""
        parameter = Parameter(torch.zeros(4, 4, dtype=dtype))
        tiny = LayerOptimizer([("probe", parameter)], self)
        tiny.step([torch.zeros(4, 4)], 0.0)
        state = sum(t.nbytes for _, _, t in tiny.tensors() if t.shape == parameter.shape)
        return (state + sum(m.nbytes for m in tiny.masters.values())) // parameter.numel()


class LayerOptimizer:
    """The optimizer of one layer and its float32 masters, or a portion of these: it then updates that portion of the
    parameters. Tensors are those of `elastic.domain.state_layout`."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        spec: OptimizerSpec,
        *,
        empty: bool = False,
        portion: Portion = WHOLE,
    ) -> None:
        """Raises FieldError if a portion is asked for of an optimizer that is not elementwise."""
        spec.check(shared=portion != WHOLE)
        self.portion = portion
        self.parameters = {name: self.cut(p) for name, p in parameters}
        self.masters: dict[str, Parameter] = {}
        if spec.master_weights:
            low = {n: self.parameters[n] for n, p in parameters if p.dtype.itemsize < 4}
            with torch.no_grad():
                self.masters = {
                    n: Parameter(torch.empty_like(p, dtype=torch.float32)) for n, p in low.items()
                }
                for name, master in () if empty else self.masters.items():
                    master.copy_(low[name])
        self.targets: dict[str, Parameter] = {**self.parameters, **self.masters}
        self.optimizer = spec.factory(self._groups(spec, dict(parameters)))
        self._check_groups()
        self._initial = [self._scalars(group) for group in self.optimizer.param_groups]

    def cut(self, parameter: Parameter) -> Parameter:
        """This optimizer's portion of a parameter: a flat view, or itself."""
        return parameter if self.portion == WHOLE else Parameter(self.part(parameter.detach()))

    def part(self, tensor: Tensor) -> Tensor:
        """This optimizer's portion of a tensor of a parameter's shape: a flat view, or itself."""
        if self.portion == WHOLE or not tensor.ndim:
            return tensor
        first, last = span(tensor.shape, self.portion)
        return tensor.view(-1)[first:last]

    def _groups(self, spec: OptimizerSpec, whole: Mapping[str, Parameter]) -> Groups:
        """The spec's groups of whole parameters, with the targets in their places; without empty targets."""
        if self.portion == WHOLE:
            return spec.groups(list(self.targets.items()))
        of = {id(parameter): self.targets[name] for name, parameter in whole.items()}
        groups = spec.groups(list(whole.items()))
        unknown = [p for group in groups for p in group["params"] if id(p) not in of]
        if unknown:
            raise FieldError("groups", len(unknown), "it must return the parameters that it is given")
        return [{**group, "params": [of[id(p)] for p in group["params"]]} for group in groups]

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """Update the parameters in place from `gradients` (float32, in parameter order; portions of them)."""
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
        """(parameter name, key, tensor) of the optimizer's state, in parameter order."""
        for name, target in self.targets.items():
            for key, value in self._state(target).items():
                if isinstance(value, Tensor):
                    yield name, key, value

    def extra(self) -> dict[str, str]:
        """Whatever state is not a tensor, as JSON texts."""
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
        """Replace the optimizer's state. Tensors are copied to where the optimizer wants them."""
        self.optimizer.state.clear()
        for (name, key), tensor in tensors.items():
            target = self.targets[name]
            home = target.device if tensor.ndim or self._on_device(target) else torch.device("cpu")
            self.optimizer.state[target][key] = tensor.to(home, copy=True)
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

    def _on_device(self, target: Parameter) -> bool:
        group = next(g for g in self.optimizer.param_groups if any(p is target for p in g["params"]))
        return bool(group.get("fused") or group.get("capturable"))

    @staticmethod
    def _scalars(group: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in group.items() if k != "lr" and isinstance(v, (bool, int, float, str))}

    def _check_groups(self) -> None:
        held = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        missing = [n for n, p in self.targets.items() if id(p) not in held]
        if missing or len(held) != len(self.targets):
            raise FieldError(
                "groups", missing or held, "every parameter of the layer must be in exactly one group"
            )


def constant(lr: float) -> Schedule:
    return lambda step: lr


def cosine(peak: float, *, warmup: int, steps: int, floor: float = 0.1) -> Schedule:
    """Linear warm-up over `warmup` steps, then a half cosine down to `floor` * `peak` at `steps`."""

    def schedule(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))

    return schedule


def adamw(
    lr: float | Schedule,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    clip_norm: float | None = 1.0,
    master_weights: bool = False,
) -> OptimizerSpec:
    """AdamW with weight decay on matrices only."""

    def factory(groups: Groups) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)

    return OptimizerSpec(
        factory=factory,
        groups=decay_matrices(weight_decay),
        lr=lr if callable(lr) else constant(lr),
        clip_norm=clip_norm,
        master_weights=master_weights,
        elementwise=True,
    )
