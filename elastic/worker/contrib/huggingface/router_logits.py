"""Logits of a mixture's routers: from the blocks that compute them to the loss in the last layer.

A transformers model records what its routers return, with hooks, and computes a loss from the
logits of all blocks together (`output_router_logits`). Cut into layers, its blocks are elsewhere
when it computes the loss. So each block adds its logits to the value that goes to the next layer.
In the last layer, modules of the routers' classes return these logits, and the model's own hooks
record them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from elastic.domain.errors import FieldError

FLAG, KEY = "output_router_logits", "router_logits"
HOOKED = "_output_capturing_hooks_installed"
"""Attribute by which a model remembers that its modules have their hooks."""
RouterOutputs = Mapping[str, int]
"""Routers of a block by name, with the place of the logits among the values that they return."""
HIDDEN = "hidden"
"""Key of the hidden states in the value between layers, beside those of the logits."""
Logits = Mapping[str, Tensor]
"""Logits by key: `router_logits.BLOCK.NAME`."""


def find_routers(model: PreTrainedModel, path: str) -> list[RouterOutputs] | None:
    """Return the routers of each block; None: the model's loss does not use their logits.

    Args:
        path: name of the list of blocks in the model, as model.layers.

    Raises FieldError if the model does not say which of its modules are routers.
    """
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    with_loss = [part.config for part in models if getattr(part.config, FLAG, False)]
    if not with_loss:
        return None
    patterns = _patterns_of(_owner(model, path))
    if not patterns:
        remedy = "set it to False: this model does not say which of its modules are routers"
        raise FieldError(f"{type(with_loss[0]).__name__}.{FLAG}", True, remedy)
    blocks = model.get_submodule(path)
    return [
        {
            name: pattern.place
            for name, part in block.named_modules()
            for pattern in patterns
            if pattern.fits(part, f"{path}.{index}.{name}")
        }
        for index, block in enumerate(blocks.children())
    ]


def _owner(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Return the innermost model around the list of blocks, whose hooks record what they return."""
    found, part = model, model
    for word in path.split("."):
        part = getattr(part, word)
        if isinstance(part, PreTrainedModel):
            found = part
    return found


@dataclass(frozen=True, slots=True)
class _RouterPattern:
    """Which modules the hooks of a model are on, and which of the returned values they record."""

    place: int
    kind: type[nn.Module] | None = None
    ending: str | None = None
    """End of the module's name, instead of its class."""
    inside: str | None = None
    """Words that the module's name must contain."""

    def fits(self, part: nn.Module, path: str) -> bool:
        kind = self.kind is not None and isinstance(part, self.kind)
        name = self.ending is not None and path.endswith(self.ending)
        inside = "" if self.inside is None else f".{self.inside.strip('.')}."
        return (kind or name) and inside in f"{path}."


def _patterns_of(model: PreTrainedModel) -> list[_RouterPattern]:
    """Return what the model records as the logits of its routers, as transformers reads it."""
    given = model.can_record_outputs.get(KEY) or []
    found = []
    for one in given if isinstance(given, list) else [given]:
        if isinstance(one, str):
            found.append(_RouterPattern(1, ending=one))
        elif isinstance(one, type):
            found.append(_RouterPattern(1, kind=one))
        else:
            found.append(
                _RouterPattern(one.index, one.target_class, one.class_name, one.layer_name)
            )
    return found


@contextmanager
def recorded(block: nn.Module, index: int, routers: RouterOutputs) -> Iterator[dict[str, Tensor]]:
    """Collect the logits that the routers of block `index` compute inside the `with` block."""
    found: dict[str, Tensor] = {}

    def record(name: str, place: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            logits = output[place] if isinstance(output, tuple) else output
            if logits is not None:
                found[f"{KEY}.{index}.{name}"] = logits

        return hook

    handles = [
        block.get_submodule(name).register_forward_hook(record(name, place))
        for name, place in routers.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class StandIn(nn.Module):
    """Returns the logits that it gets, where a router of its class returns its own."""

    def __init__(self, place: int) -> None:
        nn.Module.__init__(self)
        self.place = place

    def forward(self, logits: Tensor) -> tuple[Tensor | None, ...]:
        return (*[None] * self.place, logits)


def add_stand_ins(replacement: nn.Module, block: nn.Module, routers: RouterOutputs) -> None:
    """Give the module that replaces `block` stand-ins of its routers, under their names."""
    for name, place in routers.items():
        *outer, last = name.split(".")
        parent = replacement
        for word in outer:
            if word not in parent._modules:
                setattr(parent, word, nn.Module())  # add_module() refuses names of the block
            parent = parent.get_submodule(word)
        kind: Any = type("RouterStandIn", (StandIn, type(block.get_submodule(name))), {})
        setattr(parent, last, kind(place))


def emit_logits(replacement: nn.Module, index: int, logits: Logits) -> None:
    """Let the stand-ins of block `index` return its logits, so that the model records them."""
    prefix = f"{KEY}.{index}."
    for key, value in logits.items():
        if key.startswith(prefix):
            replacement.get_submodule(key.removeprefix(prefix))(value)


def forget_hooks(model: nn.Module) -> None:
    """Let a copy of a model install its hooks again, on the stand-ins, too."""
    for part in model.modules():
        part.__dict__.pop(HOOKED, None)
