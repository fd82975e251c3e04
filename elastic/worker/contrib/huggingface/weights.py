"""Weights in a folder of safetensors files, as Hugging Face writes them, read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from elastic.domain.errors import FieldError, needs_extra
from elastic.worker.contrib.folders import INDEX, SINGLE

with needs_extra("hf", "A Hugging Face model"):
    from safetensors import SafetensorError, safe_open

OTHER_NAMES = (
    "this family stores its tensors under other names: give from_huggingface the model that "
    "AutoModelForCausalLM.from_pretrained returns"
)


class Weights:
    """Returns tensors of a folder by name. Raises FieldError if one is absent or not readable."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        self.prefix = ""
        """Beginning of names that a file of the model without its head leaves out."""

    def names(self) -> Iterable[str]:
        """Return the names of all tensors, as they are stored."""
        return self._files.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._files or name.removeprefix(self.prefix) in self._files

    def __call__(self, name: str) -> Tensor:
        stored = name if name in self._files else name.removeprefix(self.prefix)
        if stored not in self._files:
            folder = next(iter(self._files.values())).parent
            raise FieldError("model", str(folder), f"it has no tensor {name}; {OTHER_NAMES}")
        path = self._files[stored]
        try:
            with safe_open(path, framework="pt") as file:
                found: Tensor = file.get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise FieldError("model", str(path), f"it cannot be read: {error}") from error
        return found


def weights_in(folder: Path) -> Weights | None:
    """Return the weights in `folder`; None if it has no safetensors files of a model.

    Raises FieldError if its index or its file is damaged, or a file that the index names is absent.
    """
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        return Weights(_indexed(index))
    return read_file(single) if single.is_file() else None


def read_file(path: Path) -> Weights:
    """Return the tensors of one safetensors file. Raises FieldError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return Weights(dict.fromkeys(file.keys(), path))
    except (OSError, SafetensorError) as error:
        raise FieldError("model", str(path), f"it cannot be read: {error}") from error


def _indexed(index: Path) -> dict[str, Path]:
    try:
        found = json.loads(index.read_text())["weight_map"]
        files = {str(name): index.parent / str(file) for name, file in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = f"an index with a weight_map is needed: {type(error).__name__}: {error}"
        raise FieldError("model", str(index), remedy) from error
    for path in sorted(set(files.values())):
        if not path.is_file():
            raise FieldError("model", str(path), f"{index.name} names it, and it is not there")
    return files
