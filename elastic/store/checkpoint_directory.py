"""Durable checkpoints: directories that are either complete or absent.

    DIR/step-00000012.tmp/          several nodes write their files here
        layer-0003-tp-0-HASH.safetensors    state of one (layer, TP rank): `domain.state_layout`
        layer-0003-tp-0-HASH.json           its size and checksum, written after it
        layer-0003-tp-0-part-1-of-2-..      one portion of a state that several holders share
        ...-epoch-4-HASH.safetensors        of the epoch in which the state was published, if known
    DIR/step-00000012/              the same directory, renamed after the last file, with
        manifest.json                   size and checksum of every file

HASH is of the content and of the run (one execution of a job). So a file never changes once it has
a record: nodes that write different states of a layer, or belong to different runs, write different
files. A run ignores the files of other runs, which may still be written after it has begun.

All files are synced before the rename. So a directory without .tmp is complete, even if a machine
stopped at any moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from elastic.domain import codec
from elastic.domain.errors import (
    CorruptCheckpoint,
    ElasticError,
    FieldError,
    MissingCheckpoint,
    VaultError,
)
from elastic.domain.state_layout import (
    StateHeader,
    TensorEntry,
    copy_bytes,
    join,
    plan_layout,
    read_header,
    span,
)
from elastic.domain.types import (
    WHOLE,
    JobSpec,
    Portion,
    SavedModel,
    Slot,
    slot_of,
    whole_slots,
)
from elastic.store import safetensors_stream
from elastic.store.safetensors_stream import RawTensor

T = TypeVar("T")
FORMAT, MANIFEST = "elastic-checkpoint-1", "manifest.json"
_FINAL = re.compile(r"step-\d{8,}$")


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """Entry of one file: the state of one layer on one TP rank, or a portion of the state."""

    name: str
    layer: int
    shard: int
    nbytes: int
    checksum: str
    n_layers: int
    tp: int
    portion: Portion = WHOLE
    epoch: int = 0
    """Epoch in which the state was published."""
    run: str = ""
    """Name of the run that wrote the file; "": unknown, as the former version wrote it."""

    @property
    def slot(self) -> Slot:
        """(layer, TP rank) of the state, followed by the portion if the file has only a portion."""
        return slot_of(self.layer, self.shard, self.portion)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Index of a checkpoint."""

    format: str
    step: int
    """Version of all states: the number of optimizer updates."""
    n_layers: int
    tp: int
    parts: tuple[CheckpointFile, ...]
    contents: tuple[str, ...] = ()
    """As `JobSpec.contents`; (): unknown."""
    optimizer: str = ""
    """As `JobSpec.optimizer`; "": unknown."""
    run: str = ""
    """Name of the run that committed the checkpoint; "": unknown, as in `CheckpointFile`."""

    def of(self, layer: int, shard: int) -> list[CheckpointFile]:
        """Return the file of a (layer, TP rank), or the files of its portions.

        Raises FieldError if the checkpoint does not have this layer and rank.
        """
        found = [part for part in self.parts if (part.layer, part.shard) == (layer, shard)]
        if not found:
            text = f"the checkpoint has layers 0 to {self.n_layers - 1} of {self.tp} TP ranks"
            raise FieldError("layer", layer, text)
        return found


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
    return directory / f"step-{step:08d}.tmp"


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
    header = read_header(state)
    if header.version != step:
        raise FieldError("step", step, f"layer {layer} has version {header.version}")
    staging = staging_path(directory, step)
    index, number = header.portion
    portion = f"-part-{index}-of-{number}" if number > 1 else ""
    attempt = f"-epoch-{epoch}" if epoch else ""
    fresh = staging / f"layer-{layer:04d}-tp-{shard}.{uuid.uuid4().hex}"
    try:
        staging.mkdir(parents=True, exist_ok=True)
        nbytes, checksum = safetensors_stream.write(
            fresh, _tensors(header, state), _metadata(header)
        )
        unique = xxhash.xxh3_64_hexdigest(f"{run} {checksum}".encode())
        name = f"layer-{layer:04d}-tp-{shard}{portion}{attempt}-{unique}.safetensors"
        os.replace(fresh, staging / name)
        part = CheckpointFile(
            name, layer, shard, nbytes, checksum, n_layers, tp, header.portion, epoch, run
        )
        _write_json(staging / _record_name(name), codec.dumps(part))
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
        found = read_manifest(path)
    except (MissingCheckpoint, CorruptCheckpoint):
        return False
    if found.run != run or not all(counts(part.epoch) for part in found.parts):
        return False
    return spec is None or (found.n_layers, found.tp, found.contents, found.optimizer) == (
        spec.n_layers,
        spec.tp,
        spec.contents,
        spec.optimizer,
    )


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
    finals = [path for path in directory.glob("step-*") if _FINAL.match(path.name)]
    found: list[tuple[Path, Manifest]] = []
    problems: list[FieldError] = []
    for path in sorted(finals, key=lambda path: int(path.name[len("step-") :]), reverse=True):
        try:
            found.append((path, read_manifest(path)))
        except FieldError as error:
            problems += [] if found else [error]
    return found, problems


def saved_model(path: Path, manifest: Manifest) -> SavedModel:
    """Return the description of the model in a checkpoint."""
    return SavedModel(str(path), manifest.n_layers, manifest.contents, manifest.optimizer)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest. Raises CorruptCheckpoint if the checkpoint is not complete: manifest
    unreadable or of another format, a layer missing, or a file absent or of another size than the
    manifest's. Raises FieldError if the disk fails.
    """
    remedy = "a complete checkpoint (a directory step-NNNNNNNN with manifest.json) is needed"
    try:
        manifest = codec.loads(Manifest, (path / MANIFEST).read_bytes(), newer=True)
        problem = _damage(path, manifest)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingCheckpoint("checkpoint", str(path), f"{remedy}: {error}") from error
    except (IsADirectoryError, FieldError) as error:
        raise CorruptCheckpoint("checkpoint", str(path), f"{remedy}: {error}") from error
    except OSError as error:
        raise FieldError("checkpoint", str(path), f"it cannot be read: {error}") from error
    if problem:
        raise CorruptCheckpoint("checkpoint", str(path), f"{remedy}: {problem}")
    return manifest


def _damage(path: Path, manifest: Manifest) -> str:
    """Return the first problem of a checkpoint, without reading its files; "": none."""
    if manifest.format != FORMAT:
        return f"its format is {manifest.format!r}, not {FORMAT!r}"
    if problem := _incomplete(manifest.parts, manifest.n_layers, manifest.tp):
        return problem
    for part in manifest.parts:
        if not _is_whole(path, part):
            return f"{part.nbytes} bytes are expected in {path / part.name}"
    return ""


def _is_whole(path: Path, part: CheckpointFile) -> bool:
    """Return whether the file of a part is there, and has its size."""
    file, name = path / part.name, Path(part.name).name
    return name == part.name and file.is_file() and file.stat().st_size == part.nbytes


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
    parts = manifest.of(layer, shard)
    if len(parts) == 1:
        return _read_file(path, parts[0], allocate)
    try:
        return join([_read_file(path, part) for part in parts], allocate)
    except VaultError as error:
        raise CorruptCheckpoint("checkpoint", str(path), f"layer {layer}: {error}") from error


def _read_file(
    path: Path, part: CheckpointFile, allocate: Callable[[int], memoryview] | None = None
) -> memoryview:
    file = path / part.name
    if not file.exists():
        raise MissingCheckpoint("checkpoint", str(file), "the file is missing")
    digest = xxhash.xxh3_64_hexdigest(safetensors_stream.open_map(file))
    if digest != part.checksum:
        remedy = f"it is corrupt (checksum {digest}, not {part.checksum}); use another checkpoint"
        raise CorruptCheckpoint("checkpoint", str(file), remedy)
    metadata, tensors = safetensors_stream.read(file)
    found = {tensor.name: tensor for tensor in tensors}
    try:
        dims = json.loads(metadata["shard_dims"])
        shapes = json.loads(metadata.get("shapes", "{}"))
        rows = [
            (name, found[name].dtype, tuple(shapes.get(name, found[name].shape)), int(dim))
            for name, dim in dims
        ]
        text, header, nbytes = plan_layout(
            int(metadata["version"]), rows, json.loads(metadata["extra"]), part.portion
        )
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptCheckpoint(
            "checkpoint", str(file), f"metadata is unusable: {error}"
        ) from error
    run = allocate(nbytes) if allocate is not None else memoryview(bytearray(nbytes))
    run[: len(text)] = text
    end = len(text)
    for entry in header.tensors:
        run[end : entry.offset] = bytes(entry.offset - end)
        end = entry.offset + entry.nbytes
        copy_bytes(run[entry.offset : end], found[entry.name].data)
    run[end:] = bytes(nbytes - end)
    return run


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
            (path / _record_name(record.name)).unlink(missing_ok=True)
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
    return tuple(sorted(int(name[len("step-") :]) for name in names if _FINAL.match(name)))


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


def _tensors(header: StateHeader, run: memoryview) -> list[RawTensor]:
    return [
        RawTensor(e.name, e.dtype, _shape(e, header.portion), run[e.offset : e.offset + e.nbytes])
        for e in header.tensors
    ]


def _shape(entry: TensorEntry, portion: Portion) -> tuple[int, ...]:
    """Return the shape of a tensor in the file: flat for a portion."""
    first, last = span(entry.shape, portion)
    return entry.shape if portion == WHOLE or not entry.shape else (last - first,)


def _record_in(file: Path) -> CheckpointFile:
    """Return the entry in a file beside a state, which an agent of another version may have
    written."""
    return codec.loads(CheckpointFile, file.read_bytes(), newer=True)


def _metadata(header: StateHeader) -> dict[str, str]:
    metadata = {
        "version": str(header.version),
        "shard_dims": json.dumps([[entry.name, entry.shard_dim] for entry in header.tensors]),
        "extra": json.dumps(header.extra),
    }
    if header.portion != WHOLE:
        metadata["shapes"] = json.dumps({entry.name: entry.shape for entry in header.tensors})
    return metadata


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
    shape = (spec.n_layers, spec.tp) if spec is not None else None
    parts = [_record_in(file) for file in sorted(staging.glob("layer-*.json"))]
    parts = [part for part in parts if shape in (None, (part.n_layers, part.tp))]
    parts = [part for part in parts if part.run in ("", run) and counts(part.epoch)]
    parts = [part for part in parts if _is_whole(staging, part)]
    shapes = {(part.n_layers, part.tp) for part in parts}
    if len(shapes) != 1:
        text = f"files of one job are needed, not of {len(shapes)}"
        raise FieldError("checkpoint", str(staging), text)
    n_layers, tp = shapes.pop()
    chosen = _one_division(parts)
    if problem := _incomplete(chosen, n_layers, tp):
        raise FieldError("checkpoint", str(staging), problem)
    contents, optimizer = (spec.contents, spec.optimizer) if spec is not None else ((), "")
    return Manifest(FORMAT, step, n_layers, tp, chosen, contents, optimizer, run)


def _one_division(parts: Sequence[CheckpointFile]) -> tuple[CheckpointFile, ...]:
    """Return the files of one division into portions per (layer, TP rank).

    A change of plan can leave several files of a portion, and several divisions. The file of the
    newest epoch wins, and the complete division with the newest files, then with the fewest.
    """
    newest: dict[Slot, CheckpointFile] = {}
    for part in sorted(parts, key=lambda p: p.epoch):
        newest[part.slot] = part
    by: dict[tuple[int, int], dict[int, list[CheckpointFile]]] = {}
    for part in sorted(newest.values(), key=lambda p: (p.layer, p.shard, p.portion)):
        by.setdefault((part.layer, part.shard), {}).setdefault(part.portion[1], []).append(part)
    chosen: list[CheckpointFile] = []
    for divisions in by.values():
        whole = [found for number, found in divisions.items() if len(found) == number]
        best = max(whole, key=lambda found: (min(p.epoch for p in found), -len(found)), default=[])
        chosen += best or divisions[min(divisions)]
    return tuple(chosen)


def _remove_others(final: Path, manifest: Manifest) -> None:
    """Remove files that do not belong to the checkpoint: of undone epochs, or of other runs. They
    do no harm, so a disk that refuses is not tried again."""
    kept = {name for part in manifest.parts for name in (part.name, _record_name(part.name))}
    with contextlib.suppress(OSError):
        for file in sorted(final.iterdir()):
            if file.name not in kept and file.name.startswith("layer-"):
                file.unlink(missing_ok=True)


def _record_name(name: str) -> str:
    """Return the name of the file with the size and checksum of the file `name`."""
    return f"{name.removesuffix('.safetensors')}.json"


def _incomplete(parts: Sequence[CheckpointFile], n_layers: int, tp: int) -> str:
    wanted = {(layer, shard) for layer in range(n_layers) for shard in range(tp)}
    slots = [part.slot for part in parts]
    missing = sorted(
        wanted ^ (whole_slots(slots) | {slot[:2] for slot in slots if slot[:2] not in wanted})
    )
    return f"(layer, TP rank) {missing[:4]} are missing or too many" if missing or not parts else ""


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
