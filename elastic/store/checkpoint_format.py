"""What a durable checkpoint consists of, wherever it is stored.

A checkpoint of step 12 is named step-00000012, and has

    layer-0003-tp-0-HASH.safetensors    state of one (layer, TP rank): `domain.state_layout`
    layer-0003-tp-0-HASH.json           its size and checksum, written after it
    layer-0003-tp-0-part-1-of-2-..      one portion of a state that several holders share
    ...-epoch-4-HASH.safetensors        of the epoch in which the state was published, if known
    manifest.json                       size and checksum of every file, written last

HASH is of the content and of the run (one execution of a job). So a file never changes once it has
a record: nodes that write different states of a layer, or belong to different runs, write different
files. A run ignores the files of other runs, which may still be written after it has begun.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from elastic.domain import codec
from elastic.domain.errors import CorruptCheckpoint, FieldError, VaultError
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

FORMAT, MANIFEST = "elastic-checkpoint-1", "manifest.json"
STEP_NAME = re.compile(r"step-\d{8,}$")


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


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Return the step of a checkpoint's name."""
    return int(name.removeprefix("step-"))


def state_header(state: memoryview, step: int, layer: int) -> StateHeader:
    """Return the header of a state of version `step`. Raises VaultError if `state` is not a state,
    FieldError if its version is another one."""
    header = read_header(state)
    if header.version != step:
        raise FieldError("step", step, f"layer {layer} has version {header.version}")
    return header


def file_entry(
    header: StateHeader,
    layer: int,
    shard: int,
    n_layers: int,
    tp: int,
    nbytes: int,
    checksum: str,
    epoch: int = 0,
    run: str = "",
) -> CheckpointFile:
    """Return the entry, with the name, of a file of `nbytes` with the state of a layer."""
    index, number = header.portion
    portion = f"-part-{index}-of-{number}" if number > 1 else ""
    attempt = f"-epoch-{epoch}" if epoch else ""
    unique = xxhash.xxh3_64_hexdigest(f"{run} {checksum}".encode())
    name = f"layer-{layer:04d}-tp-{shard}{portion}{attempt}-{unique}.safetensors"
    return CheckpointFile(
        name, layer, shard, nbytes, checksum, n_layers, tp, header.portion, epoch, run
    )


def record_name(name: str) -> str:
    """Return the name of the file with the size and checksum of the file `name`."""
    return f"{name.removesuffix('.safetensors')}.json"


def parse_record(data: bytes) -> CheckpointFile:
    """Return the entry in a record, which an agent of another version may have written."""
    return codec.loads(CheckpointFile, data, newer=True)


def tensors_of(header: StateHeader, run: memoryview) -> list[RawTensor]:
    """Return the tensors of a state, as they are in a file."""
    return [
        RawTensor(e.name, e.dtype, _shape(e, header.portion), run[e.offset : e.offset + e.nbytes])
        for e in header.tensors
    ]


def _shape(entry: TensorEntry, portion: Portion) -> tuple[int, ...]:
    """Return the shape of a tensor in the file: flat for a portion."""
    first, last = span(entry.shape, portion)
    return entry.shape if portion == WHOLE or not entry.shape else (last - first,)


def metadata_of(header: StateHeader) -> dict[str, str]:
    """Return the metadata of a file with a state."""
    metadata = {
        "version": str(header.version),
        "shard_dims": json.dumps([[entry.name, entry.shard_dim] for entry in header.tensors]),
        "extra": json.dumps(header.extra),
    }
    if header.portion != WHOLE:
        metadata["shapes"] = json.dumps({entry.name: entry.shape for entry in header.tensors})
    return metadata


def choose(
    parts: Sequence[CheckpointFile],
    where: str,
    step: int,
    spec: JobSpec | None = None,
    counts: Callable[[int], bool] = lambda epoch: True,
    run: str = "",
) -> Manifest:
    """Return the manifest of those files that belong together; `parts` has an entry for each whole
    file at `where`. `spec`, `counts` and `run` are those of a commit. Raises FieldError if some
    are missing."""
    shape = (spec.n_layers, spec.tp) if spec is not None else None
    parts = [part for part in parts if shape in (None, (part.n_layers, part.tp))]
    parts = [part for part in parts if part.run in ("", run) and counts(part.epoch)]
    shapes = {(part.n_layers, part.tp) for part in parts}
    if len(shapes) != 1:
        text = f"files of one job are needed, not of {len(shapes)}"
        raise FieldError("checkpoint", where, text)
    n_layers, tp = shapes.pop()
    chosen = _one_division(parts)
    if problem := _incomplete(chosen, n_layers, tp):
        raise FieldError("checkpoint", where, problem)
    contents, optimizer = (spec.contents, spec.optimizer) if spec is not None else ((), "")
    return Manifest(FORMAT, step, n_layers, tp, chosen, contents, optimizer, run)


def would_commit(
    manifest: Manifest, spec: JobSpec | None, counts: Callable[[int], bool], run: str
) -> bool:
    """Return whether a complete checkpoint is the one that a commit would make; see `choose`."""
    if manifest.run != run or not all(counts(part.epoch) for part in manifest.parts):
        return False
    return spec is None or ((manifest.tp == spec.tp) and is_of(manifest, spec))


def is_of(manifest: Manifest, spec: JobSpec) -> bool:
    """Return whether a checkpoint is of the model and optimizer of a job."""
    saved = manifest.n_layers, manifest.contents, manifest.optimizer
    return saved == (spec.n_layers, spec.contents, spec.optimizer)


def saved_model(path: object, manifest: Manifest) -> SavedModel:
    """Return the description of the model in a checkpoint."""
    return SavedModel(str(path), manifest.n_layers, manifest.contents, manifest.optimizer)


def damage(manifest: Manifest, size_of: Callable[[str], int | None], path: object) -> str:
    """Return the first problem of a checkpoint, without reading its files; "": none.
    `size_of(name)` returns the bytes of a file; None: there is none."""
    if manifest.format != FORMAT:
        return f"its format is {manifest.format!r}, not {FORMAT!r}"
    if problem := _incomplete(manifest.parts, manifest.n_layers, manifest.tp):
        return problem
    for part in manifest.parts:
        plain = "/" not in part.name
        if not plain or size_of(part.name) != part.nbytes:
            return f"{part.nbytes} bytes are expected in {path}/{part.name}"
    return ""


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


def _incomplete(parts: Sequence[CheckpointFile], n_layers: int, tp: int) -> str:
    wanted = {(layer, shard) for layer in range(n_layers) for shard in range(tp)}
    slots = [part.slot for part in parts]
    missing = sorted(
        wanted ^ (whole_slots(slots) | {slot[:2] for slot in slots if slot[:2] not in wanted})
    )
    return f"(layer, TP rank) {missing[:4]} are missing or too many" if missing or not parts else ""


def read_state(
    path: object,
    manifest: Manifest,
    layer: int,
    shard: int,
    read: Callable[[CheckpointFile], memoryview],
    allocate: Callable[[int], memoryview] | None = None,
) -> memoryview:
    """Return the saved state of one layer as bytes (`elastic.domain.state_layout`), verified.

    `read(part)` returns the content of a file. `allocate` returns a writable buffer of the given
    size in bytes. Raises CorruptCheckpoint if a file is corrupt.
    """
    parts = manifest.of(layer, shard)
    if len(parts) == 1:
        return _decode(path, parts[0], read(parts[0]), allocate)
    try:
        return join([_decode(path, part, read(part)) for part in parts], allocate)
    except VaultError as error:
        raise CorruptCheckpoint("checkpoint", str(path), f"layer {layer}: {error}") from error


def _decode(
    path: object,
    part: CheckpointFile,
    content: memoryview,
    allocate: Callable[[int], memoryview] | None = None,
) -> memoryview:
    """Return the state in the content of a file."""
    file = f"{path}/{part.name}"
    digest = xxhash.xxh3_64_hexdigest(content)
    if digest != part.checksum:
        remedy = f"it is corrupt (checksum {digest}, not {part.checksum}); use another checkpoint"
        raise CorruptCheckpoint("checkpoint", file, remedy)
    metadata, tensors = safetensors_stream.parse(content, file)
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
        raise CorruptCheckpoint("checkpoint", file, f"metadata is unusable: {error}") from error
    run = allocate(nbytes) if allocate is not None else memoryview(bytearray(nbytes))
    run[: len(text)] = text
    end = len(text)
    for entry in header.tensors:
        run[end : entry.offset] = bytes(entry.offset - end)
        end = entry.offset + entry.nbytes
        copy_bytes(run[entry.offset : end], found[entry.name].data)
    run[end:] = bytes(nbytes - end)
    return run
