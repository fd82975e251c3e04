"""Durable checkpoints in an object store (S3, GCS, Azure and others), through fsspec.

    URL/step-00000012/layer-...         files of `checkpoint_format`; several nodes write them
    URL/step-00000012/manifest.json     the commit: without it, the files are no checkpoint

An object store has no rename and no lock, but it writes an object whole or not at all. So the
manifest, which names the files that count, commits a checkpoint. Other files may stay beside it:
a coordinator that was paused would else remove files that the next one has just committed. They
are removed with the checkpoint, or when a run discards what was not committed.
"""

from __future__ import annotations

import contextlib
import errno
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import xxhash

from elastic.domain import codec
from elastic.domain.errors import CorruptCheckpoint, FieldError, MissingCheckpoint, needs_extra
from elastic.domain.types import JobSpec
from elastic.store import checkpoint_format, safetensors_stream
from elastic.store.checkpoint_format import (
    MANIFEST,
    STEP_NAME,
    CheckpointFile,
    Manifest,
    file_entry,
    parse_record,
    record_name,
    state_header,
    step_name,
    step_of,
)

_REMEDY = "a complete checkpoint (a folder step-NNNNNNNN with manifest.json) is needed"


class ObjectCheckpoints:
    """The checkpoints below a URL such as s3://bucket/folder.

    Methods raise OSError, or FieldError that an OSError caused, if the store does not answer.
    """

    def __init__(self, url: str, flag: str = "checkpoint directory") -> None:
        """`flag`: what gave the URL, for errors. Raises FieldError if the URL cannot be used,
        MissingExtra if a package is missing."""
        self._files, self._root = _open(url, flag)
        self.url = url.rstrip("/")
        self._unremoved: dict[str, set[str]] = {}
        """Files of removed checkpoints that could not be removed yet, by folder."""

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
        """Write the state of one layer, or a portion; see `checkpoint_directory.write_part`."""
        header = state_header(state, step, layer)
        pieces = safetensors_stream.encode(
            checkpoint_format.tensors_of(header, state), checkpoint_format.metadata_of(header)
        )
        hasher, nbytes = xxhash.xxh3_64(), sum(piece.nbytes for piece in pieces)
        for piece in pieces:
            hasher.update(piece)
        part = file_entry(
            header, layer, shard, n_layers, tp, nbytes, hasher.hexdigest(), epoch, run
        )
        try:
            self._write(f"{step_name(step)}/{part.name}", pieces)
            self._write(f"{step_name(step)}/{record_name(part.name)}", [codec.dumps(part).encode()])
        except OSError as error:
            text = f"cannot be written: {error}"
            raise FieldError("checkpoint directory", self.url, text) from error
        return part

    def commit(
        self,
        step: int,
        spec: JobSpec | None = None,
        counts: Callable[[int], bool] = lambda epoch: True,
        run: str = "",
    ) -> str:
        """Turn the files of `step` into a checkpoint; return its URL. Idempotent. See
        `checkpoint_directory.commit`."""
        name = step_name(step)
        path = f"{self.url}/{name}"
        try:
            sizes = self._sizes(name)
            if not sizes:
                raise FieldError("checkpoint", path, "its files must be written before the commit")
            parts = [part for part in self._records(name, sizes) if _is_whole(part, sizes)]
            try:
                manifest = checkpoint_format.choose(parts, path, step, spec, counts, run)
            except FieldError:
                found = self._manifest(name, sizes)
                if found is None or not checkpoint_format.would_commit(found, spec, counts, run):
                    raise
                if checkpoint_format.damage(found, sizes.get, path):
                    raise
            else:
                self._write(f"{name}/{MANIFEST}", [codec.dumps(manifest).encode()])
                # Another coordinator may have removed files since they were listed.
                if problem := checkpoint_format.damage(manifest, self._sizes(name).get, path):
                    raise FieldError("checkpoint", path, problem)
        except OSError as error:
            raise FieldError("checkpoint", path, f"cannot be committed: {error}") from error
        return path

    def complete(self, newest: bool = False) -> tuple[list[tuple[str, Manifest]], list[FieldError]]:
        """Return the complete checkpoints, newest first, and the reasons to pass over newer ones.
        `newest`: only the newest one.
        If the URL itself is that of a checkpoint, return it alone, or raise CorruptCheckpoint."""
        if MANIFEST in self._sizes(""):
            return [(self.url, self.read_manifest(""))], []
        found: list[tuple[str, Manifest]] = []
        problems: list[FieldError] = []
        for name in self._steps()[::-1]:
            try:
                found.append((f"{self.url}/{name}", self.read_manifest(name)))
            except MissingCheckpoint:
                continue  # it was not committed
            except CorruptCheckpoint as error:
                problems += [] if found else [error]
            if newest and found:
                break
        return found, problems

    def read_manifest(self, name: str) -> Manifest:
        """Return the manifest of a checkpoint; "": of the URL itself. See
        `checkpoint_directory.read_manifest`."""
        path = f"{self.url}/{name}".rstrip("/")
        try:
            sizes = self._sizes(name)
            manifest = self._manifest(name, sizes)
        except OSError as error:
            raise FieldError("checkpoint", path, f"it cannot be read: {error}") from error
        except FieldError as error:
            raise CorruptCheckpoint("checkpoint", path, f"{_REMEDY}: {error}") from error
        if manifest is None:
            raise MissingCheckpoint("checkpoint", path, f"{_REMEDY}: it has no {MANIFEST}")
        if problem := checkpoint_format.damage(manifest, sizes.get, path):
            raise CorruptCheckpoint("checkpoint", path, f"{_REMEDY}: {problem}")
        return manifest

    def read_state(
        self,
        name: str,
        manifest: Manifest,
        layer: int,
        shard: int,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> memoryview:
        """Return the saved state of one layer; see `checkpoint_format.read_state`. Raises
        FieldError if the store does not answer."""
        path = f"{self.url}/{name}".rstrip("/")
        read = partial(self._read_file, path, name)
        return checkpoint_format.read_state(path, manifest, layer, shard, read, allocate)

    def _read_file(self, path: str, name: str, part: CheckpointFile) -> memoryview:
        file = f"{path}/{part.name}"
        try:
            return memoryview(self._read(f"{name}/{part.name}"))
        except FileNotFoundError as error:
            raise MissingCheckpoint("checkpoint", file, "the file is missing") from error
        except OSError as error:
            raise FieldError("checkpoint", file, f"it cannot be read: {error}") from error

    def discard_step(
        self, step: int, before: int = 0, run: str = "", *, committed: bool = False
    ) -> None:
        """Remove files of `step`; see `checkpoint_directory.discard_step`."""
        name = step_name(step)
        sizes = self._sizes(name)
        manifest = self._index(name, sizes)
        kept = _names(manifest)
        if not before:
            self._remove(name, sizes.keys() - kept)
            return
        parts = manifest.parts if committed and manifest and manifest.run == run else ()
        if any(part.epoch < before for part in parts):
            self._remove(name, {MANIFEST})
            kept = set()
        undone = [
            part
            for part in self._records(name, sizes)
            if part.epoch < before and part.run in ("", run)
        ]
        names = {file for part in undone for file in (part.name, record_name(part.name))}
        self._remove(name, names - kept)

    def staged_steps(self) -> tuple[int, ...]:
        """Return the steps with files that were not committed, in order."""
        return tuple(step_of(name) for name in self._steps() if self._is_staged(name))

    def _is_staged(self, name: str) -> bool:
        sizes = self._sizes(name)
        return bool(sizes) and self._whole(name, sizes) is None

    def _whole(self, name: str, sizes: dict[str, int]) -> Manifest | None:
        """Return the manifest of a checkpoint if all files that it names are there."""
        manifest = self._index(name, sizes)
        damaged = manifest is None or checkpoint_format.damage(manifest, sizes.get, name)
        return None if damaged else manifest

    def is_committed(self, step: int, run: str = "") -> bool:
        """Return whether `run` has committed the checkpoint of `step`."""
        name = step_name(step)
        try:
            manifest = self._whole(name, self._sizes(name))
        except OSError:
            return False
        return manifest is not None and manifest.run == run

    def finish_commits(self) -> None:
        """Ask the store for its files, so that one that is away is noticed before the run begins.
        Nothing can be half done: a commit is one write."""
        self._sizes("")

    def discard_incomplete(self, run: str = "") -> None:
        """Remove the files that were not committed, unless `run` has written some of their
        step."""
        for name in self._steps():
            sizes = self._sizes(name)
            kept = _names(self._index(name, sizes))
            others = sizes.keys() - kept
            if others and not (run and self._has_files_of(name, others, run)):
                self._remove(name, others)

    def _has_files_of(self, name: str, files: set[str], run: str) -> bool:
        records = {file: 0 for file in files if file.endswith(".json")}
        return any(part.run == run for part in self._records(name, records))

    def remove(self, step: int, run: str) -> None:
        """Remove a checkpoint that `run` has committed, its manifest first. Files that it does not
        name stay: another run may be writing them. Files that could not be removed
        are removed by a later call.
        """
        name = step_name(step)
        manifest = self._index(name, self._sizes(name))
        if manifest is not None and manifest.run == run:
            self._remove(name, {MANIFEST})
            self._unremoved[name] = _names(manifest) - {MANIFEST}
        errors: list[OSError] = []
        for folder in list(self._unremoved):
            try:
                self._remove(folder, self._unremoved[folder])
            except OSError as error:
                errors.append(error)
            else:
                del self._unremoved[folder]
        if errors:
            raise errors[0]

    def probe(self) -> None:
        """Write, list and remove a small object. Raises OSError if the store refuses."""
        name = f".probe-{uuid.uuid4().hex[:12]}"
        self._write(name, [b"elastic"])
        found = self._sizes("")
        self._remove("", {name})
        if name not in found:
            raise OSError(errno.EIO, "an object that was written is not listed")

    # ---- objects ----

    def _steps(self) -> list[str]:
        """Return the names of all steps with files, in order."""
        with _storage():
            try:
                found = self._files.ls(self._root, detail=False, refresh=True)
            except FileNotFoundError:
                return []
        names = {str(path).rstrip("/").rpartition("/")[2] for path in found}
        return sorted(filter(STEP_NAME.match, names), key=step_of)

    def _sizes(self, name: str) -> dict[str, int]:
        """Return the bytes of each file directly below a folder; {}: there is none."""
        with _storage():
            try:
                found = self._files.ls(self._path(name), detail=True, refresh=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        return {
            str(entry["name"]).rpartition("/")[2]: int(entry["size"] or 0)
            for entry in found
            if entry["type"] == "file"
        }

    def _records(self, name: str, sizes: dict[str, int]) -> list[CheckpointFile]:
        """Return the entries in the records of a step. One that is damaged tells nothing."""
        found = []
        for file in sorted(sizes):
            if file.startswith("layer-") and file.endswith(".json"):
                with contextlib.suppress(FileNotFoundError, FieldError):
                    found.append(parse_record(self._read(f"{name}/{file}")))
        return found

    def _manifest(self, name: str, sizes: dict[str, int]) -> Manifest | None:
        """Return the manifest without a look at the files that it names; None: there is none.
        Raises FieldError if it cannot be understood."""
        if MANIFEST not in sizes:
            return None
        try:
            return codec.loads(Manifest, self._read(f"{name}/{MANIFEST}"), newer=True)
        except FileNotFoundError:  # it was removed meanwhile
            return None

    def _index(self, name: str, sizes: dict[str, int]) -> Manifest | None:
        try:
            return self._manifest(name, sizes)
        except FieldError:
            return None

    def _path(self, name: str) -> str:
        """Return the path of a file or folder; "": of the URL itself."""
        return "/".join(filter(None, (self._root, name.strip("/"))))

    def _read(self, name: str) -> bytes:
        with _storage():
            return bytes(self._files.cat_file(self._path(name)))

    def _write(self, name: str, pieces: Sequence[memoryview | bytes]) -> None:
        """Write an object. It appears when all of it is there."""
        with _storage():
            file = self._files.open(self._path(name), "wb")
            try:
                for piece in pieces:
                    file.write(piece)
            except BaseException:
                with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
                    file.discard()
                with contextlib.suppress(AttributeError):
                    file.closed = True  # closing it, also by its destructor, would publish a part
                raise
            file.close()

    def _remove(self, name: str, files: set[str]) -> None:
        for file in sorted(files):
            with _storage(), contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(f"{name}/{file}"))


def _is_whole(part: CheckpointFile, sizes: dict[str, int]) -> bool:
    return sizes.get(part.name) == part.nbytes


def _names(manifest: Manifest | None) -> set[str]:
    """Return the names of the files of a checkpoint."""
    if manifest is None:
        return set()
    parts = {name for part in manifest.parts for name in (part.name, record_name(part.name))}
    return {MANIFEST, *parts}


def _open(url: str, flag: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it."""
    if not re.match(r"[^:]+://+[^/]", url):
        raise FieldError(flag, url, "give a bucket or container after ://")
    if url.startswith("memory:"):
        raise FieldError(flag, url, "each process has a memory of its own: give another store")
    with needs_extra("objects", f"A checkpoint directory such as {url}"):
        import fsspec
    try:
        local = {"auto_mkdir": True} if url.startswith("file:") else {}
        return fsspec.core.url_to_fs(url, use_listings_cache=False, **local)  # type: ignore[no-any-return]
    except ImportError as error:  # fsspec names the package of the scheme
        more = " (pip install 'elastic-runtime[objects]')" if url.startswith("s3:") else ""
        raise FieldError(flag, url, f"{error}{more}") from error
    except ValueError as error:
        schemes = ", ".join(f"{name}://" for name in ("s3", "gs", "abfs"))
        text = f"{error}; give a path, or the URL of an object store ({schemes})"
        raise FieldError(flag, url, text) from error


@contextlib.contextmanager
def _storage() -> Iterator[None]:
    """Turn errors of a store's own kinds into OSError: they may pass, as those of a disk."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, FieldError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
