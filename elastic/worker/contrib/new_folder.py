"""A new folder that appears whole or not at all."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.domain.errors import FieldError


@contextmanager
def new_folder(out: Path, checkpoint: Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes `out` when the block has ended.

    Raises FieldError if `out` exists, is in the checkpoint, or cannot be written.
    """
    if out.exists():
        raise FieldError("OUT", str(out), "it exists; give another")
    if out.absolute().is_relative_to(checkpoint.absolute()):
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
