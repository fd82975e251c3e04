"""Names of parameters beside adapters of the package peft.

peft puts each adapted layer into a wrapper: `q_proj.weight` becomes `q_proj.base_layer.weight`,
beside which there are `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`.
"""

from __future__ import annotations

from torch import Tensor

from elastic.worker.contrib.whole_model import Values

ADAPTER = "default"
"""peft's name of an adapter that got none."""


def is_adapter(name: str) -> bool:
    """Return whether `name` is that of a parameter of an adapter."""
    return not {"lora_A", "lora_B"}.isdisjoint(name.split("."))


def plain_name(name: str) -> str:
    """Return the name of a parameter in the model before adapters were added."""
    return name.replace(".base_layer.", ".")


def stored_name(name: str) -> str:
    """Return the name in files of peft of an adapter's parameter."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


class PlainValues:
    """Values of a model before adapters were added, by the names of afterwards."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def __call__(self, name: str) -> Tensor:
        return self._values(plain_name(name))

    def __contains__(self, name: str) -> bool:
        return plain_name(name) in self._values  # type: ignore[operator]
