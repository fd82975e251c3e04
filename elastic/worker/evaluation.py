"""The user's description of evaluations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic.domain.errors import FieldError
from elastic.worker.datasets.data_source import DataSource
from elastic.worker.model.checks import whole_number
from elastic.worker.model.microbatch import Microbatch

MOST_MICROBATCHES = 1_000_000
"""Largest number of micro-batches; reports list each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Evaluates the model after every `every` steps, and after the last one.

    Its micro-batches run forward through the pipelines, without gradients and with all modules in
    evaluation mode. Each runs once, on the nodes that are there, and the result does not depend on
    the plan: the means of the losses that the last layer returns, and of the figures that layers
    report (`Microbatch.report`). Parameters and random numbers of the training stay as they are.

    Args:
        data: data(0, index) -> micro-batch `index` of the evaluation; a function of the index
            alone. The functions that make the data of a training make it, too.
        every: steps between two evaluations.
        microbatches: micro-batches of each evaluation.

    Raises FieldError for an argument that is not usable.
    """

    data: Callable[[int, int], Microbatch]
    every: int
    microbatches: int

    def __post_init__(self) -> None:
        made_for = getattr(self.data, "microbatches", None)
        if not isinstance(self.data, DataSource):
            object.__setattr__(self, "data", DataSource(self.data, "evaluation.data"))
        for name, most in (("every", None), ("microbatches", MOST_MICROBATCHES)):
            limits = (1,) if most is None else (1, most)
            number = whole_number(f"evaluation.{name}", getattr(self, name), *limits)
            object.__setattr__(self, name, number)
        if made_for not in (None, self.microbatches):
            remedy = f"{made_for}, as the data was made for"
            raise FieldError("evaluation.microbatches", self.microbatches, remedy)
