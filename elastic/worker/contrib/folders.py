"""Folders of checkpoints: those that are there, and new ones."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.config import is_url
from elastic.domain.errors import FieldError

METADATA = ".metadata"
"""Name of the index of a checkpoint of torch.distributed.checkpoint."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""Names of the index of a transformers model's weights, and of its only file."""


def is_file(path: Path) -> bool:
    """Return whether there is a file. Raises FieldError if that cannot be found out."""
    try:
        return path.is_file()
    except (OSError, ValueError) as error:
        raise FieldError("weights", str(path.parent), f"it cannot be read: {error}") from error


@contextmanager
def new_folder(out: Path, checkpoint: str) -> Iterator[Path]:
    """Give a folder to write to, which becomes `out` when the block has ended.

    Raises FieldError if `out` exists, is in the checkpoint, or cannot be written.
    """
    if out.exists():
        raise FieldError("OUT", str(out), "it exists; give another")
    if not is_url(checkpoint) and out.resolve().is_relative_to(Path(checkpoint).resolve()):
        raise FieldError("OUT", str(out), "it is in the checkpoint; give another")
    fresh = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        fresh.rename(out)
    except OSError as error:
        remedy = f"it cannot be written ({error.strerror or error}); give another"
        raise FieldError("OUT", str(out), remedy) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
