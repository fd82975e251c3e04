"""Loss scaling for gradients in float16: a factor on the loss, which falls if a gradient overflows.

float16 holds no number below 6e-8, and gradients are often smaller. So the loss is multiplied by a
large factor before the backward pass, and each layer's gradients are divided by it when they enter
the sum, in float32 or fixed point. If a sum is not finite, the update is left out, and the factor
is halved. After `growth_interval` updates in a row it is doubled. This is the rule of
torch.amp.GradScaler, with powers of two, so that scaling rounds nothing.

Every holder of every layer keeps the factor, and changes it in each update in the same way. It is
part of the layer's state, so copies, checkpoints and repeated updates have it. Decision 053 says
why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from elastic.domain.errors import FieldError
from elastic.worker.model.checks import description, whole_number

LEAST, LARGEST = 1.0, 2.0**24
KEY = "loss_scale/"
"""Prefix of the loss scale's entries among the texts of a state."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Loss scaling of a job. Raises FieldError for values that are not usable."""

    initial: float = 2.0**16
    """The first factor, a power of two."""
    growth_interval: int = 2000
    """Updates in a row after which the factor is doubled."""

    def __post_init__(self) -> None:
        value = self.initial
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not (number and LEAST <= value <= LARGEST and math.frexp(value)[0] == 0.5):
            remedy = f"a power of two from {LEAST:g} to {LARGEST:,.0f}"
            raise FieldError("LossScale.initial", description(value), remedy)
        whole_number("LossScale.growth_interval", self.growth_interval, 1)


class RunningScale:
    """The factor of one layer's state."""

    def __init__(self, rule: LossScale | None) -> None:
        """`rule`: None: the factor is always 1."""
        self._rule = rule
        self.value = 1.0 if rule is None else float(rule.initial)
        self._since = 0
        """Version of the state from which the updates in a row count."""

    @property
    def can_fall(self) -> bool:
        """Whether the factor is above its minimum, so that a smaller one may avoid the overflow."""
        return self.value > LEAST

    def updated(self, version: int) -> None:
        """Called after the update that made `version`."""
        if self._rule is not None and version - self._since >= self._rule.growth_interval:
            self.value, self._since = min(2.0 * self.value, LARGEST), version

    def skipped(self, version: int) -> None:
        """Called when the update that would have made `version` was left out."""
        if self._rule is not None:
            self.value, self._since = max(0.5 * self.value, LEAST), version

    def texts(self) -> dict[str, str]:
        """Return the factor as texts of the layer's state, which change when the factor does."""
        if self._rule is None:
            return {}
        return {f"{KEY}value": str(self.value), f"{KEY}since": str(self._since)}

    def read(self, texts: Mapping[str, str], version: int) -> None:
        """Take the factor from the texts of a state. A state without them starts anew."""
        if self._rule is None:
            return
        self.value = float(texts.get(f"{KEY}value", self._rule.initial))
        self._since = int(texts.get(f"{KEY}since", version))
