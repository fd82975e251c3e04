"""Learning rates depend on the step alone, also those of torch's schedulers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import lr_scheduler as torch_rates

from elastic.domain.errors import FieldError
from elastic.worker.model.learning_rate import cosine, from_scheduler

PEAK = 0.5
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: torch_rates.CosineAnnealingLR(o, T_max=20),
    "restarts": lambda o: torch_rates.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=2),
    "steps": lambda o: torch_rates.MultiStepLR(o, [3, 9], gamma=0.1),
    "lambda": lambda o: torch_rates.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cyclic": lambda o: torch_rates.CyclicLR(o, 0.1, 0.4, step_size_up=4, cycle_momentum=False),
    "one cycle": lambda o: torch_rates.OneCycleLR(
        o, max_lr=1.0, total_steps=40, cycle_momentum=False
    ),
    "sequence": lambda o: torch_rates.SequentialLR(
        o,
        [torch_rates.LinearLR(o, 0.1, total_iters=5), torch_rates.ExponentialLR(o, 0.9)],
        milestones=[5],
    ),
}


def test_cosine_warms_up_and_then_decays() -> None:
    rate = cosine(1.0, warmup=4, steps=20, floor=0.1)
    assert [rate(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    falling = [rate(s) for s in range(4, 21)]
    assert falling == sorted(falling, reverse=True) and falling[0] == 1.0
    assert rate(20) == pytest.approx(0.1) and rate(999) == pytest.approx(0.1)
    assert cosine(1.0, warmup=0, steps=0)(0) == pytest.approx(1.0)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_are_those_of_a_plain_loop_in_any_order(name: str) -> None:
    optimizer = torch.optim.SGD([Parameter(torch.zeros(1))], lr=PEAK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's SequentialLR warns of itself
        scheduler, expected = SCHEDULERS[name](optimizer), []
        for _ in range(30):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        rates = from_scheduler(SCHEDULERS[name], PEAK)
        assert [rates(step) for step in (17, 3, 29, 0)] == [expected[s] for s in (17, 3, 29, 0)]
        assert [rates(step) for step in range(30)] == expected


@pytest.mark.parametrize(
    ("scheduler", "text"),
    [
        (0.1, "a function of an optimizer that returns"),
        (lambda: None, "a function of an optimizer that returns"),
        (lambda o: None, "None is not usable: a function of an optimizer"),
        (
            lambda o: torch_rates.StepLR(o),  # type: ignore[call-arg]
            "missing 1 required positional argument: 'step_size'",
        ),
        (torch_rates.ReduceLROnPlateau, "must not need more than the step"),
        (
            lambda o: torch_rates.OneCycleLR(o, 1.0, total_steps=40),
            "it changes betas, and only the learning rate may depend on the step",
        ),
        (
            lambda o: torch_rates.OneCycleLR(o, 1.0, total_steps=5, cycle_momentum=False),
            "Tried to step 6 times",
        ),
    ],
)
def test_schedulers_that_cannot_be_used(scheduler: Any, text: str) -> None:
    with pytest.raises(FieldError, match=text):
        rates = from_scheduler(scheduler, 0.1)
        for step in range(10):
            rates(step)
