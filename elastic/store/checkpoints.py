"""Durable checkpoints at a location: a directory, or the URL of an object store."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from elastic.config import is_url
from elastic.domain.errors import FieldError
from elastic.domain.types import JobSpec
from elastic.store import checkpoint_directory
from elastic.store.checkpoint_format import CheckpointFile, Manifest, step_name
from elastic.store.checkpoint_objects import ObjectCheckpoints


class Checkpoints(Protocol):
    """All checkpoints at a location. `checkpoint_directory` describes the operations; `path` is
    that of one checkpoint."""

    def write_part(
        self,
        step: int,
        layer: int,
        shard: int,
        n_layers: int,
        tp: int,
        state: memoryview,
        epoch: int = 0,
        run: str = "",
    ) -> CheckpointFile: ...

    def commit(
        self,
        step: int,
        spec: JobSpec | None = None,
        counts: Callable[[int], bool] = lambda epoch: True,
        run: str = "",
    ) -> str: ...

    def complete(
        self, newest: bool = False
    ) -> tuple[list[tuple[str, Manifest]], list[FieldError]]: ...

    def discard_step(
        self, step: int, before: int = 0, run: str = "", *, committed: bool = False
    ) -> None: ...

    def staged_steps(self) -> tuple[int, ...]: ...

    def is_committed(self, step: int, run: str = "") -> bool: ...

    def finish_commits(self) -> None: ...

    def discard_incomplete(self, run: str = "") -> None: ...

    def remove(self, step: int, run: str) -> None: ...


def open_checkpoints(location: str | Path, flag: str = "checkpoint directory") -> Checkpoints:
    """Return the checkpoints at a location. Raises FieldError, which names `flag`, if it is a URL
    that cannot be used, MissingExtra if a package for it is missing."""
    if is_url(str(location)):
        return ObjectCheckpoints(str(location), flag)
    return _Directory(Path(location))


def probe(url: str) -> None:
    """Write and remove a small object in an object store. Raises FieldError if the URL cannot be
    used, OSError if the store refuses."""
    ObjectCheckpoints(url).probe()


def latest(location: str | Path) -> str | None:
    """Return the path of the newest complete checkpoint at a location, or of the one that it is;
    None: there is none."""
    found, _ = open_checkpoints(location).complete(newest=True)
    return found[0][0] if found else None


class SavedCheckpoint:
    """One complete checkpoint, for reading."""

    def __init__(self, path: str | Path) -> None:
        """Raises CorruptCheckpoint if it is not complete, FieldError if it cannot be read now."""
        self.path = str(path).rstrip("/")
        self._objects = ObjectCheckpoints(self.path) if is_url(self.path) else None
        if self._objects is not None:
            read = partial(self._objects.read_manifest, "")
            self.manifest = checkpoint_directory.retry(read, time.sleep)
        else:
            self.manifest = checkpoint_directory.read_manifest(Path(self.path))

    def state(
        self, layer: int, shard: int, allocate: Callable[[int], memoryview] | None = None
    ) -> memoryview:
        """Return the state of one layer on one TP rank; see `checkpoint_format.read_state`."""
        if self._objects is not None:
            read = partial(self._objects.read_state, "", self.manifest, layer, shard, allocate)
            return checkpoint_directory.retry(read, time.sleep)
        return checkpoint_directory.read_run(Path(self.path), self.manifest, layer, shard, allocate)


class _Directory:
    """The checkpoints in a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write_part(
        self,
        step: int,
        layer: int,
        shard: int,
        n_layers: int,
        tp: int,
        state: memoryview,
        epoch: int = 0,
        run: str = "",
    ) -> CheckpointFile:
        return checkpoint_directory.write_part(
            self._path, step, layer, shard, n_layers, tp, state, epoch, run
        )

    def commit(
        self,
        step: int,
        spec: JobSpec | None = None,
        counts: Callable[[int], bool] = lambda epoch: True,
        run: str = "",
    ) -> str:
        return str(checkpoint_directory.commit(self._path, step, spec, counts, run))

    def complete(self, newest: bool = False) -> tuple[list[tuple[str, Manifest]], list[FieldError]]:
        found, problems = checkpoint_directory.complete(self._path)
        found = found[:1] if newest else found
        return [(str(path), manifest) for path, manifest in found], problems

    def discard_step(
        self, step: int, before: int = 0, run: str = "", *, committed: bool = False
    ) -> None:
        checkpoint_directory.discard_step(self._path, step, before, run, committed=committed)

    def staged_steps(self) -> tuple[int, ...]:
        return checkpoint_directory.staged_steps(self._path)

    def is_committed(self, step: int, run: str = "") -> bool:
        return checkpoint_directory.is_committed(self._path, step, run)

    def finish_commits(self) -> None:
        checkpoint_directory.finish_commits(self._path)

    def discard_incomplete(self, run: str = "") -> None:
        checkpoint_directory.discard_incomplete(self._path, run)

    def remove(self, step: int, run: str) -> None:
        checkpoint_directory.remove(self._path / step_name(step), run)
