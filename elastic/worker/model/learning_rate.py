"""Learning rates as functions of the step.

An update may run on another node, in another process, or a second time. So the rate depends on the
step alone, and nothing has to be kept or backed up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch.nn import Parameter

from elastic.domain.errors import FieldError, describe
from elastic.worker.model.checks import check_callable, description

LearningRate = Callable[[int], float]
"""Learning rate as a function of the step, which begins at 0."""
RATE = "a function of the step, as lambda step: 0.003"
SCHEDULER = (
    "a function of an optimizer that returns a learning-rate scheduler of it, as lambda optimizer: "
    "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)"
)


def constant(lr: float) -> LearningRate:
    return lambda step: lr


def cosine(peak: float, *, warmup: int, steps: int, floor: float = 0.1) -> LearningRate:
    """Return a schedule: linear warm-up for `warmup` steps, then half a cosine to `floor` * `peak`.

    The learning rate reaches the floor at step `steps`.
    """

    def schedule(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))

    return schedule


def from_scheduler(scheduler: Callable[[torch.optim.Optimizer], Any], lr: float) -> LearningRate:
    """Return the learning rates of one of torch's schedulers.

    `scheduler(optimizer)` returns it, for an optimizer with the rate `lr`. It is stepped once per
    step of the training, from the beginning, on an optimizer of its own. Raises FieldError, here or
    at the step in question, if it is no scheduler, needs more than the step (as ReduceLROnPlateau
    needs a loss), or changes more than the rate (as OneCycleLR changes the momentum).
    """
    check_callable("from_scheduler.scheduler", scheduler, 1, SCHEDULER)
    return _SchedulerRates(scheduler, lr)


class _SchedulerRates:
    """The learning rates of a scheduler, by step. They are computed once and kept."""

    def __init__(self, scheduler: Callable[[torch.optim.Optimizer], Any], lr: float) -> None:
        self._optimizer = _Still([Parameter(torch.zeros(1))], lr)
        self._others = self._options()
        try:
            self._scheduler = scheduler(self._optimizer)
        except Exception as error:
            raise FieldError("from_scheduler.scheduler", describe(error), SCHEDULER) from error
        if not callable(getattr(self._scheduler, "step", None)):
            raise FieldError("from_scheduler.scheduler", description(self._scheduler), SCHEDULER)
        self._rates = [self._rate()]

    def __call__(self, step: int) -> float:
        while len(self._rates) <= step:
            try:
                self._optimizer.step()
                self._scheduler.step()
            except Exception as error:
                name = type(self._scheduler).__name__
                remedy = f"it must not need more than the step ({describe(error)}): take another"
                raise FieldError("from_scheduler.scheduler", name, remedy) from error
            self._rates.append(self._rate())
        return self._rates[step]

    def _rate(self) -> float:
        changed = [name for name, value in self._options().items() if self._others[name] != value]
        if changed:
            name = type(self._scheduler).__name__
            remedy = (
                f"it changes {', '.join(changed)}, and only the learning rate may depend on the "
                "step: leave that out, as OneCycleLR(..., cycle_momentum=False) does"
            )
            raise FieldError("from_scheduler.scheduler", name, remedy)
        return float(self._optimizer.param_groups[0]["lr"])

    def _options(self) -> dict[str, Any]:
        """Return the options of the optimizer that a scheduler might change, besides the rate."""
        group = self._optimizer.param_groups[0]
        return {name: group[name] for name in _Still.OPTIONS}


class _Still(torch.optim.Optimizer):
    """An optimizer with the usual options that changes nothing."""

    OPTIONS = ("momentum", "betas", "weight_decay")

    def __init__(self, parameters: list[Parameter], lr: float) -> None:
        defaults = {"lr": lr, "momentum": 0.9, "betas": (0.9, 0.999), "weight_decay": 0.0}
        super().__init__(parameters, defaults)

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


def checked_rate(lr: LearningRate) -> LearningRate:
    """Return `lr` with a check of its results."""

    @functools.wraps(lr, updated=())
    def rate(step: int) -> float:
        found: object = lr(step)
        number = isinstance(found, Real) and not isinstance(found, bool)
        if not number or not 0 <= float(found) < math.inf:  # type: ignore[arg-type]
            remedy = "return a finite number from 0 up, as lambda step: 0.003 does"
            raise FieldError(f"OptimizerSpec.lr({step})", description(found), remedy)
        return float(found)  # type: ignore[arg-type]

    return rate
