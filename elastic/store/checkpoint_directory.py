"""Durable checkpoints: directories that are either complete or absent.

    DIR/step-00000012.tmp/      several nodes write their files here (`checkpoint_format`)
    DIR/step-00000012/          the same directory, renamed after the last file, with a manifest

All files are synced before the rename. So a directory without .tmp is complete, even if a machine
stopped at any moment. `checkpoint_objects` does the same in an object store.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from elastic.domain import codec
from elastic.domain.errors import CorruptCheckpoint, ElasticError, FieldError, MissingCheckpoint
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

T = TypeVar("T")
RETRY_S = (0.1, 0.3, 0.9)
"""Pauses in seconds before a failed write of a checkpoint is tried again."""
PATIENT_RETRY_S = 1.0
"""Pause in seconds between later tries of a write that is worth a longer wait."""
LOCK_S = 1.0
"""Wait in seconds for a process that holds the lock of the directory; `retry` waits longer."""
LOCK_POLL_S = 0.02
"""Interval in seconds between two tries to take the lock."""


def retry(
    action: Callable[[], T],
    wait: Callable[[float], object],
    *,
    patience_s: float = 0.0,
    held: Callable[[Exception], object] = lambda error: None,
) -> T:
    """Return the result of `action`; try again after pauses if the disk failed.

    The pauses are RETRY_S, and then others until their sum is `patience_s`. `held(error)` is called
    once, before the others. `wait(seconds)` makes a pause; if it returns True, the next try is the
    last one. An error that no OSError caused is raised at once, any other after the last try.
    """
    later = max(0, math.ceil((patience_s - sum(RETRY_S)) / PATIENT_RETRY_S))
    for number, pause_s in enumerate([*RETRY_S, *[PATIENT_RETRY_S] * later]):
        try:
            return action()
        except (ElasticError, OSError) as error:
            if not isinstance(error, OSError) and not isinstance(error.__cause__, OSError):
                raise
            if number == len(RETRY_S):
                held(error)
        if wait(pause_s) is True:
            break
    return action()


def staging_path(directory: Path, step: int) -> Path:
    return directory / f"{step_name(step)}.tmp"


def write_part(
    directory: Path,
    step: int,
    layer: int,
    shard: int,
    n_layers: int,
    tp: int,
    state: memoryview,
    epoch: int = 0,
    run: str = "",
) -> CheckpointFile:
    """Write and sync the state of one layer, or a portion, into the staging directory of `step`.

    `state` has the bytes of the state (`elastic.domain.state_layout`), `epoch` is the epoch in
    which it was published, and `run` the name of the run. Raises VaultError if `state` is not a
    state, FieldError if its version is not `step` or the disk refuses.
    """
    header = state_header(state, step, layer)
    staging = staging_path(directory, step)
    fresh = staging / f"layer-{layer:04d}-tp-{shard}.{uuid.uuid4().hex}"
    try:
        staging.mkdir(parents=True, exist_ok=True)
        nbytes, checksum = safetensors_stream.write(
            fresh,
            checkpoint_format.tensors_of(header, state),
            checkpoint_format.metadata_of(header),
        )
        part = file_entry(header, layer, shard, n_layers, tp, nbytes, checksum, epoch, run)
        os.replace(fresh, staging / part.name)
        _write_json(staging / record_name(part.name), codec.dumps(part))
        _sync(staging)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        text = f"cannot be written: {error}"
        raise FieldError("checkpoint directory", str(directory), text) from error
    return part


def commit(
    directory: Path | str,
    step: int,
    spec: JobSpec | None = None,
    counts: Callable[[int], bool] = lambda epoch: True,
    run: str = "",
) -> Path:
    """Turn the files of `step` into a checkpoint and return its path. Idempotent, also if a node
    has written a file once more since the first commit.

    `run` is the name of the run: only its files count, and those of agents of the former version.
    With `spec`, the function ignores files of another shape; `counts(epoch)` tells whether files of
    that epoch belong to the history of training. Raises FieldError, which names the missing files,
    if the checkpoint is not complete. A checkpoint of another run does not change this.
    """
    directory = Path(directory)
    staging = staging_path(directory, step)
    final = staging.with_suffix("")
    try:
        with _locked(directory):
            try:
                manifest = _collect(staging, step, spec, counts, run)
            except FieldError:
                if not _is_checkpoint_of(final, spec, counts, run):
                    raise
                shutil.rmtree(staging, ignore_errors=True)
            else:
                _complete(staging, final, manifest)
            _sync(directory)  # also if the commit before failed to do so
            shutil.rmtree(_replaced(final), ignore_errors=True)
    except OSError as error:
        raise FieldError("checkpoint", str(final), f"cannot be committed: {error}") from error
    return final


def _complete(staging: Path, final: Path, manifest: Manifest) -> None:
    """Turn the staging directory into the checkpoint. The caller syncs the directory above.

    Other files are removed at the end, because an agent may still add the record of such a file
    before the rename: after a failure here, the next try might choose it.
    """
    _write_json(staging / MANIFEST, codec.dumps(manifest))
    _sync(staging)
    if final.exists():
        shutil.rmtree(_replaced(final), ignore_errors=True)
        os.rename(final, _replaced(final))
    os.rename(staging, final)
    _remove_others(final, manifest)


def _replaced(final: Path) -> Path:
    """Return the path of a checkpoint while another one takes its place."""
    return final.with_suffix(".replaced")


def _is_checkpoint_of(
    path: Path, spec: JobSpec | None, counts: Callable[[int], bool], run: str
) -> bool:
    """Return whether `path` is the complete checkpoint that a commit would make; see `commit`."""
    try:
        return checkpoint_format.would_commit(read_manifest(path), spec, counts, run)
    except (MissingCheckpoint, CorruptCheckpoint):
        return False


def latest(directory: Path | str) -> Path | None:
    """Return the newest complete checkpoint in `directory`. None: there is none.

    The manifest and the sizes of the files decide; checksums are not read. If `directory` itself
    is a checkpoint, return it, or raise CorruptCheckpoint if it is not complete.
    """
    found, _ = complete(directory)
    return found[0][0] if found else None


def complete(
    directory: Path | str,
) -> tuple[list[tuple[Path, Manifest]], list[FieldError]]:
    """Return the complete checkpoints in `directory`, newest first, and the reasons to pass over
    newer ones. See `latest`."""
    directory = Path(directory)
    if (directory / MANIFEST).is_file():
        return [(directory, read_manifest(directory))], []
    finals = [path for path in directory.glob("step-*") if STEP_NAME.match(path.name)]
    found: list[tuple[Path, Manifest]] = []
    problems: list[FieldError] = []
    for path in sorted(finals, key=lambda path: step_of(path.name), reverse=True):
        try:
            found.append((path, read_manifest(path)))
        except FieldError as error:
            problems += [] if found else [error]
    return found, problems


def read_manifest(path: Path) -> Manifest:
    """Return the manifest. Raises CorruptCheckpoint if the checkpoint is not complete: manifest
    unreadable or of another format, a layer missing, or a file absent or of another size than the
    manifest's. Raises FieldError if the disk fails.
    """
    remedy = "a complete checkpoint (a directory step-NNNNNNNN with manifest.json) is needed"
    try:
        manifest = codec.loads(Manifest, (path / MANIFEST).read_bytes(), newer=True)
        problem = checkpoint_format.damage(manifest, partial(_size, path), path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingCheckpoint("checkpoint", str(path), f"{remedy}: {error}") from error
    except (IsADirectoryError, FieldError) as error:
        raise CorruptCheckpoint("checkpoint", str(path), f"{remedy}: {error}") from error
    except OSError as error:
        raise FieldError("checkpoint", str(path), f"it cannot be read: {error}") from error
    if problem:
        raise CorruptCheckpoint("checkpoint", str(path), f"{remedy}: {problem}")
    return manifest


def _size(path: Path, name: str) -> int | None:
    file = path / name
    return file.stat().st_size if file.is_file() else None


def read_run(
    path: Path,
    manifest: Manifest,
    layer: int,
    shard: int,
    allocate: Callable[[int], memoryview] | None = None,
) -> memoryview:
    """Return the saved state of one layer as bytes (`elastic.domain.state_layout`), verified.

    `allocate` returns a writable buffer of the given size in bytes. Raises CorruptCheckpoint if a
    file is corrupt, and FieldError if it cannot be read now.
    """
    read = partial(_read_file, path)
    return checkpoint_format.read_state(path, manifest, layer, shard, read, allocate)


def _read_file(path: Path, part: CheckpointFile) -> memoryview:
    file = path / part.name
    if not file.exists():
        raise MissingCheckpoint("checkpoint", str(file), "the file is missing")
    return safetensors_stream.open_map(file)


def discard_step(
    directory: Path | str, step: int, before: int = 0, run: str = "", *, committed: bool = False
) -> None:
    """Remove the files of `step` that were not committed. `before`: only those of epochs below it,
    and not of other runs. `committed`: those of a checkpoint that `run` has committed, too; its
    other files must be committed again. Raises OSError or FieldError if the disk fails and `before`
    is given."""
    staging = staging_path(Path(directory), step)
    if not before:
        shutil.rmtree(staging, ignore_errors=True)
        return
    if not (Path(directory) if committed else staging).is_dir():
        return
    with _locked(Path(directory)):
        _remove_before(staging, before, run)
        if committed:
            _dismantle(staging, before, run)
        (staging / MANIFEST).unlink(missing_ok=True)  # a commit that failed may have written it
        with contextlib.suppress(OSError):
            staging.rmdir()  # unless it has other files


def _dismantle(staging: Path, before: int, run: str) -> None:
    """Move the files of a checkpoint of `run` back, if some are of epochs below `before`; remove
    those."""
    final = staging.with_suffix("")
    found = _index(final)
    if found and found.run == run and any(part.epoch < before for part in found.parts):
        staging.mkdir(exist_ok=True)
        _remove_before(final, before, run)
        for file in sorted(final.glob("layer-*")):
            os.replace(file, staging / file.name)
        shutil.rmtree(final, ignore_errors=True)


def _remove_before(path: Path, epoch: int, run: str) -> None:
    """Remove the files of epochs before `epoch`, except those of other runs."""
    for record in [_record_in(file) for file in sorted(path.glob("layer-*.json"))]:
        if record.epoch < epoch and record.run in ("", run):
            (path / record_name(record.name)).unlink(missing_ok=True)
            (path / record.name).unlink(missing_ok=True)


def _index(path: Path) -> Manifest | None:
    """Return the manifest of a checkpoint without a look at its files; None: it has none."""
    try:
        return codec.loads(Manifest, (path / MANIFEST).read_bytes(), newer=True)
    except (FileNotFoundError, NotADirectoryError, FieldError):
        return None


def staged_steps(directory: Path | str) -> tuple[int, ...]:
    """Return the steps with files that were not committed, in order."""
    names = (path.stem for path in Path(directory).glob("step-*.tmp"))
    return tuple(sorted(step_of(name) for name in names if STEP_NAME.match(name)))


def is_committed(directory: Path | str, step: int, run: str = "") -> bool:
    """Return whether `run` has committed the checkpoint of `step`, as far as its manifest can be
    read."""
    try:
        found = _index(staging_path(Path(directory), step).with_suffix(""))
    except OSError:
        return False
    return found is not None and found.run == run


def finish_commits(directory: Path | str) -> None:
    """Restore each checkpoint whose replacement was interrupted between the two renames of a
    commit. Raises OSError or FieldError if the disk fails."""
    directory = Path(directory)
    if not directory.is_dir():
        return
    with _locked(directory):
        for replaced in sorted(directory.glob("step-*.replaced")):
            final = replaced.with_suffix("")
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                os.rename(replaced, final)


def discard_incomplete(directory: Path | str, run: str = "") -> None:
    """Remove the files of checkpoints that were not committed, unless `run` has written some of
    them. Raises OSError or FieldError if the disk fails."""
    directory = Path(directory)
    if not directory.is_dir():
        return
    with _locked(directory):
        for staging in sorted(directory.glob("step-*.tmp")):
            if not (run and _has_files_of(staging, run)):
                shutil.rmtree(staging, ignore_errors=True)


def remove(path: Path, run: str) -> None:
    """Remove a checkpoint that `run` has committed. One that is removed in part is none any more.
    Raises OSError or FieldError if the disk fails."""
    with _locked(path.parent):
        found = _index(path)
        if found is not None and found.run == run:
            (path / MANIFEST).unlink()
            _sync(path)
            shutil.rmtree(path)


def _has_files_of(staging: Path, run: str) -> bool:
    for file in sorted(staging.glob("layer-*.json")):
        with contextlib.suppress(FieldError):  # a damaged entry tells nothing
            if _record_in(file).run == run:
                return True
    return False


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of the directory: one commit at a time over all processes.

    Raises FieldError, caused by an OSError, if another process holds the lock for longer than
    LOCK_S: a coordinator that was stopped inside a commit may hold it for ever.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as error:
        text = f"cannot be opened: {error}"
        raise FieldError("checkpoint directory", str(directory), text) from error
    try:
        try:
            _lock(descriptor, directory)
        except OSError as error:
            text = f"cannot be locked: {error}"
            raise FieldError("checkpoint directory", str(directory), text) from error
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path) -> None:
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= until:
                text = "another process holds the lock of this directory"
                raise OSError(error.errno, text, str(directory)) from error
        time.sleep(LOCK_POLL_S)


def _record_in(file: Path) -> CheckpointFile:
    return parse_record(file.read_bytes())


def _collect(
    staging: Path,
    step: int,
    spec: JobSpec | None,
    counts: Callable[[int], bool] = lambda epoch: True,
    run: str = "",
) -> Manifest:
    """Return the manifest of the files that belong together. Raises FieldError if some are
    missing."""
    if not staging.is_dir():
        text = "its files must be written before the commit"
        raise FieldError("checkpoint", str(staging), text)
    parts = [_record_in(file) for file in sorted(staging.glob("layer-*.json"))]
    parts = [part for part in parts if _size(staging, part.name) == part.nbytes]
    return checkpoint_format.choose(parts, str(staging), step, spec, counts, run)


def _remove_others(final: Path, manifest: Manifest) -> None:
    """Remove files that do not belong to the checkpoint: of undone epochs, or of other runs. They
    do no harm, so a disk that refuses is not tried again."""
    kept = {name for part in manifest.parts for name in (part.name, record_name(part.name))}
    with contextlib.suppress(OSError):
        for file in sorted(final.iterdir()):
            if file.name not in kept and file.name.startswith("layer-"):
                file.unlink(missing_ok=True)


def _write_json(path: Path, text: str) -> None:
    """Replace `path` atomically and sync it."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with open(fresh, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
