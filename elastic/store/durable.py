"""Durable checkpoints: directories that are whole or do not exist.

    DIR/step-00000012.tmp/          parts come in, from several nodes
        layer-0003-tp-0.safetensors     one (layer, TP rank); tensors and metadata as `elastic.domain.state_layout` names them
        layer-0003-tp-0.json            its size and checksum, written after it
        layer-0003-tp-0-part-1-of-2..   where holders share the state: a portion of it
    DIR/step-00000012/              the same, renamed once all parts are there, with
        manifest.json                   every file with its size and checksum

Everything is synced before the rename, so that a directory without .tmp is whole, whenever the machines
stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from elastic.domain import codec
from elastic.domain.errors import FieldError, VaultError
from elastic.domain.state_layout import StateHeader, TensorEntry, join, plan_layout, read_header, span
from elastic.domain.types import WHOLE, JobSpec, Portion, Slot, slot_of, whole_slots
from elastic.store import tensorfile

FORMAT, MANIFEST = "elastic-checkpoint-1", "manifest.json"
_FINAL = re.compile(r"step-(\d{8,})$")


@dataclass(frozen=True, slots=True)
class Part:
    """One file: one layer's state on one TP rank, or a portion of it."""

    name: str
    layer: int
    shard: int
    nbytes: int
    checksum: str
    n_layers: int
    tp: int
    portion: Portion = WHOLE

    @property
    def slot(self) -> Slot:
        return slot_of(self.layer, self.shard, self.portion)


@dataclass(frozen=True, slots=True)
class Manifest:
    format: str
    step: int
    """Version of all states in it: updates applied."""
    n_layers: int
    tp: int
    parts: tuple[Part, ...]

    def of(self, layer: int, shard: int) -> list[Part]:
        """The file of a (layer, TP rank), or those of its portions. Raises FieldError."""
        found = [part for part in self.parts if (part.layer, part.shard) == (layer, shard)]
        if not found:
            text = f"layers 0 to {self.n_layers - 1} of {self.tp} TP ranks are there"
            raise FieldError("layer", layer, text)
        return found


def final_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def staging_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}.tmp"


def write_part(
    directory: Path, step: int, layer: int, shard: int, n_layers: int, tp: int, run: memoryview
) -> Part:
    """Write one layer's state (`run`, of version `step`) into the staging directory of `step`, synced.

    Raises VaultError if `run` is no state, FieldError if it is of another version or the disk refuses.
    """
    header = read_header(run)
    if header.version != step:
        raise FieldError("step", step, f"layer {layer} has version {header.version}")
    staging = staging_path(directory, step)
    index, number = header.portion
    portion = f"-part-{index}-of-{number}" if number > 1 else ""
    name = f"layer-{layer:04d}-tp-{shard}{portion}.safetensors"
    fresh = staging / f"{name}.{uuid.uuid4().hex}"
    try:
        staging.mkdir(parents=True, exist_ok=True)
        nbytes, checksum = tensorfile.write(fresh, _tensors(header, run), _metadata(header))
        os.replace(fresh, staging / name)
        part = Part(name, layer, shard, nbytes, checksum, n_layers, tp, header.portion)
        _write_json(staging / f"{name.removesuffix('.safetensors')}.json", codec.dumps(part))
        _sync(staging)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise FieldError("checkpoint directory", str(directory), f"cannot be written: {error}") from error
    return part


def commit(directory: Path | str, step: int, spec: JobSpec | None = None) -> Path:
    """Make the checkpoint of `step` out of its parts and return its path. Repeating it changes nothing.

    With `spec`, parts that an earlier job of another shape left behind are passed over. Raises FieldError,
    naming what is missing, if it is not complete.
    """
    directory = Path(directory)
    staging, final = staging_path(directory, step), final_path(directory, step)
    replaced = directory / f"{final.name}.replaced"
    with _locked(directory):
        if not staging.is_dir():
            if (final / MANIFEST).is_file():
                return final
            raise FieldError("checkpoint", str(staging), "parts must be written before the commit")
        manifest = _collect(staging, step, (spec.n_layers, spec.tp) if spec is not None else None)
        try:
            _write_json(staging / MANIFEST, codec.dumps(manifest))
            _sync(staging)
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                os.rename(final, replaced)
            os.rename(staging, final)
            _sync(directory)
        except OSError as error:
            raise FieldError("checkpoint", str(final), f"cannot be committed: {error}") from error
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def latest(directory: Path | str) -> Path | None:
    """The newest whole checkpoint in `directory`, by manifest and file sizes; None if there is none.

    A checkpoint itself is also taken, and must then be whole (FieldError).
    """
    directory = Path(directory)
    if not directory.is_dir():
        return None
    if (directory / MANIFEST).is_file():
        read_manifest(directory)
        return directory
    for path in sorted((p for p in directory.iterdir() if _FINAL.match(p.name)), key=_step, reverse=True):
        try:
            read_manifest(path)
        except FieldError:
            continue
        return path
    return None


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are there in full size, or FieldError."""
    remedy = "a whole checkpoint (a directory step-NNNNNNNN with manifest.json) is needed"
    try:
        manifest = codec.loads(Manifest, (path / MANIFEST).read_bytes())
    except (OSError, FieldError) as error:
        raise FieldError("checkpoint", str(path), f"{remedy}: {error}") from error
    if manifest.format != FORMAT:
        raise FieldError("checkpoint", str(path), f"its format is {manifest.format!r}, not {FORMAT!r}")
    problem = _incomplete(manifest.parts, manifest.n_layers, manifest.tp)
    if problem:
        raise FieldError("checkpoint", str(path), f"{remedy}: {problem}")
    for part in manifest.parts:
        file = path / part.name
        if Path(part.name).name != part.name or not file.is_file() or file.stat().st_size != part.nbytes:
            raise FieldError("checkpoint", str(file), f"{remedy}: {part.nbytes} bytes are expected here")
    return manifest


def validate(path: Path | str) -> Manifest:
    """Read the whole checkpoint and compare every checksum. Raises FieldError naming the first bad file."""
    path = Path(path)
    manifest = read_manifest(path)
    for part in manifest.parts:
        _verify(path, part)
    return manifest


def read_run(
    path: Path,
    manifest: Manifest,
    layer: int,
    shard: int,
    allocate: Callable[[int], memoryview] | None = None,
) -> memoryview:
    """One layer's state as the run of bytes that was saved (`elastic.domain.state_layout`), verified.

    `allocate` gives a writable buffer of the size that it is asked for. Raises FieldError if the file is
    corrupt.
    """
    parts = manifest.of(layer, shard)
    if len(parts) == 1:
        return _read_part(path, parts[0], allocate)
    try:
        return join([_read_part(path, part) for part in parts], allocate)
    except VaultError as error:
        raise FieldError("checkpoint", str(path), f"layer {layer}: {error}") from error


def _read_part(path: Path, part: Part, allocate: Callable[[int], memoryview] | None = None) -> memoryview:
    _verify(path, part)
    metadata, tensors = tensorfile.read(path / part.name)
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
        raise FieldError("checkpoint", str(path / part.name), f"metadata is unusable: {error}") from error
    run = allocate(nbytes) if allocate is not None else memoryview(bytearray(nbytes))
    run[: len(text)] = text
    end = len(text)
    for entry in header.tensors:
        run[end : entry.offset] = bytes(entry.offset - end)
        end = entry.offset + entry.nbytes
        run[entry.offset : end] = found[entry.name].data
    run[end:] = bytes(nbytes - end)
    return run


def discard_incomplete(directory: Path | str) -> None:
    """Remove what attempts that ended before their commit left; call before any node writes."""
    directory = Path(directory)
    if not directory.is_dir():
        return
    with _locked(directory):
        for replaced in directory.glob("step-*.replaced"):
            final = replaced.with_suffix("")
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:  # a commit ended between its two renames
                os.rename(replaced, final)
        for staging in directory.glob("step-*.tmp"):
            shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One commit at a time, over all processes."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise FieldError("checkpoint directory", str(directory), f"cannot be opened: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _tensors(header: StateHeader, run: memoryview) -> list[tensorfile.Tensor]:
    return [
        tensorfile.Tensor(e.name, e.dtype, _shape(e, header.portion), run[e.offset : e.offset + e.nbytes])
        for e in header.tensors
    ]


def _shape(entry: TensorEntry, portion: Portion) -> tuple[int, ...]:
    """Of what is in the file: a portion is flat."""
    first, last = span(entry.shape, portion)
    return entry.shape if portion == WHOLE or not entry.shape else (last - first,)


def _metadata(header: StateHeader) -> dict[str, str]:
    metadata = {
        "version": str(header.version),
        "shard_dims": json.dumps([[entry.name, entry.shard_dim] for entry in header.tensors]),
        "extra": json.dumps(header.extra),
    }
    if header.portion != WHOLE:
        metadata["shapes"] = json.dumps({entry.name: entry.shape for entry in header.tensors})
    return metadata


def _collect(staging: Path, step: int, shape: tuple[int, int] | None) -> Manifest:
    parts = [codec.loads(Part, file.read_bytes()) for file in sorted(staging.glob("layer-*.json"))]
    parts = [part for part in parts if shape in (None, (part.n_layers, part.tp))]
    shapes = {(part.n_layers, part.tp) for part in parts}
    if len(shapes) != 1:
        remedy = f"parts of one job are needed, not of {len(shapes)}"
        raise FieldError("checkpoint", str(staging), remedy)
    n_layers, tp = shapes.pop()
    chosen = _one_division(parts)
    problem = _incomplete(chosen, n_layers, tp)
    if problem:
        raise FieldError("checkpoint", str(staging), problem)
    return Manifest(FORMAT, step, n_layers, tp, chosen)


def _one_division(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Of each (layer, TP rank) the file, or those of all portions, where a change of plan left several divisions: of
    those that are whole the coarsest."""
    by: dict[tuple[int, int], dict[int, list[Part]]] = {}
    for part in sorted(parts, key=lambda p: (p.layer, p.shard, p.portion)):
        by.setdefault((part.layer, part.shard), {}).setdefault(part.portion[1], []).append(part)
    chosen: list[Part] = []
    for divisions in by.values():
        whole = [number for number, found in divisions.items() if len(found) == number]
        chosen += divisions[min(whole, default=min(divisions))]
    return tuple(chosen)


def _incomplete(parts: Sequence[Part], n_layers: int, tp: int) -> str:
    wanted = {(layer, shard) for layer in range(n_layers) for shard in range(tp)}
    slots = [part.slot for part in parts]
    missing = sorted(wanted ^ (whole_slots(slots) | {slot[:2] for slot in slots if slot[:2] not in wanted}))
    return f"(layer, TP rank) {missing[:4]} are missing or too many" if missing or not parts else ""


def _verify(path: Path, part: Part) -> None:
    found = xxhash.xxh3_64_hexdigest(tensorfile.open_map(path / part.name))
    if found != part.checksum:
        remedy = f"the file is corrupt (checksum {found}, not {part.checksum}); use another checkpoint"
        raise FieldError("checkpoint", str(path / part.name), remedy)


def _write_json(path: Path, text: str) -> None:
    """Replace `path` at once, synced."""
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


def _step(path: Path) -> int:
    match = _FINAL.match(path.name)
    return int(match[1]) if match else -1
