"""Weights of micro-batches in the mean over a step.

Without weights, a step's loss is the mean of the losses of its micro-batches. If these are means
over different numbers of tokens, a token of a short micro-batch then counts more than one of a long
one. With the number of tokens as weight, the step's loss is the mean over all of its tokens, as if
the step were one batch.

The number of tokens in a step is known only when its last micro-batch was read. So each gradient is
scaled by the micro-batch's weight divided by the expected weight of a step, and the update corrects
the sum by the weight that the step really had (`elastic.worker.engine.step.judge`). The weights are
added up beside the gradients (`elastic.worker.model.gradients`). Decision 051 says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.worker.model.checks import description
from elastic.worker.model.gradients import WEIGHT_SCALE

IGNORED = -100
"""Label of a token that does not count; torch's and transformers' default."""
MOST_WEIGHT = 2.0**22
"""Largest weight of a micro-batch: exact sums have room for a million of them."""
WEIGHT = (
    "a function of a micro-batch's fields that returns its weight, as label_count() or "
    'lambda fields: fields["mask"].sum()'
)
Fields = Mapping[str, Tensor]


def label_count(
    field: str = "labels", *, shifted: bool = False, mask: str = ""
) -> Callable[[Fields], float]:
    """Return a weight for `Trainer`: the number of labels of a micro-batch that count.

    Args:
        field: name of the field with the labels, [rows, length]. A label of -100 does not count.
        shifted: the model shifts the labels by one, as models of transformers do. Then the first
            label of a row does not count either.
        mask: name of a field of the same shape by which each label counts; "": all count equally.

    The weight raises FieldError if the micro-batch has no such field.
    """

    def count(fields: Fields) -> float:
        labels = _field(fields, field)
        counts = labels != IGNORED
        if mask:
            counts = _field(fields, mask).masked_fill(~counts, 0).double()
        return float((counts[..., 1:] if shifted else counts).sum())

    return count


def _field(fields: Fields, name: str) -> Tensor:
    if name not in fields:
        known = ", ".join(sorted(fields)) or "none"
        raise FieldError("label_count", name, f"a field that data gives: it gives {known}")
    return fields[name]


def checked_weight(given: object, where: str) -> float:
    """Return `given`, the result of the script's weight function, as a multiple of 2**-20, which
    exact sums can hold.

    `where`: the micro-batch, for the error. Raises FieldError unless it is one number that can be a
    weight.
    """
    remedy = f"the weight must be one number from 0 to {MOST_WEIGHT:,.0f}"
    field = f"weight of {where}"
    truth = isinstance(given, bool | np.bool_)
    if isinstance(given, str) or truth or getattr(given, "dtype", None) == torch.bool:
        raise FieldError(field, description(given), remedy)
    try:
        value = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise FieldError(field, description(given), remedy) from None
    if not (math.isfinite(value) and 0 <= value <= MOST_WEIGHT):
        raise FieldError(field, description(value), remedy)
    return round(value * WEIGHT_SCALE) / WEIGHT_SCALE


def weight_of(weigh: Callable[[Fields], object] | None, fields: Fields, where: str) -> float:
    """Return the weight of the micro-batch named `where`, a multiple of 2**-20; 1 without a
    function. `fields` are in host memory."""
    if weigh is None:
        return 1.0
    with torch.no_grad():
        return checked_weight(weigh(fields), where)
