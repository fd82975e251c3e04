"""Checkpoints of torch.distributed.checkpoint (DCP), read tensor by tensor and written in parts.

A folder has data files and `.metadata`, a pickle with the name, the shape and the place of each
tensor. A pickle can call any function, and change any class that it gets. So `.metadata` is read by
an unpickler that makes objects without behaviour, of the types which DCP and megatron write there.
torch.load(weights_only=True) reads the data.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from elastic.domain.errors import FieldError, describe
from elastic.worker.contrib.folders import METADATA

METADATA_TYPES = {
    "builtins": {"getattr"},  # Python 3.11.0 to 3.11.3 write a member of an Enum as a call of it
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {  # megatron stores its plans, too
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.serialization": {"_get_layout"},
}
"""What `.metadata` may name, by module, beside torch.Size, OrderedDict and types of numbers."""
SOURCE = "a folder that torch.distributed.checkpoint.save has written is needed"
OPTIMIZERS = ("optim", "exp_avg")
"""Words in the beginnings of names that are no parameters."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangular part of a tensor, and where its numbers are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: str
    """Name of its file, relative to the folder."""
    begin: int
    length: int
    """Place in the file, in bytes."""
    extensions: tuple[str, ...]

    def holds(self, at: Sequence[int]) -> bool:
        """Return whether it has numbers at these indices of the first dimensions."""
        places = zip(at, self.offsets, self.sizes, strict=False)
        return all(begin <= index < begin + n for index, begin, n in places)

    def overlaps(self, other: Chunk) -> bool:
        places = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in places)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Type, size and parts of a tensor."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class DistributedCheckpoint:
    """The tensors of a folder. Raises FieldError for what cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with (folder / METADATA).open("rb") as file:
                self.tensors = dict(_stored(_Unpickler(file).load()))
        except Exception as error:  # damaged pickles fail in many ways
            raise self._error(f"{METADATA} cannot be read ({describe(error)}): {SOURCE}") from error

    def read(self, name: str, at: Sequence[int] = ()) -> Tensor:
        """Return a tensor, or the part of it at the indices `at` of its first dimensions."""
        stored = self.tensors[name]
        chunks = [chunk for chunk in stored.chunks if chunk.holds(at)]
        if any(one.overlaps(other) for one, other in combinations(chunks, 2)):
            raise self._error(f"two parts of {name} overlap: {SOURCE}")
        shape, first = stored.size[len(at) :], len(at)
        absent = math.prod(shape) - sum(math.prod(chunk.sizes[first:]) for chunk in chunks)
        if absent:
            raise self._error(f"{absent} of {math.prod(shape)} numbers of {name} are absent")
        if len(chunks) == 1:
            return self._part(name, stored, chunks[0], at)
        whole = torch.empty(shape, dtype=stored.dtype)
        for chunk in chunks:
            rest = zip(chunk.offsets[first:], chunk.sizes[first:], strict=True)
            place = tuple(slice(begin, begin + n) for begin, n in rest)
            whole[place].copy_(self._part(name, stored, chunk, at))
        return whole

    def values_of(self, names: Collection[str], others: Collection[str] = ()) -> ModelValues:
        """Return the tensors of a model by its names for them.

        Stored names may have a common beginning, as `model.` in the checkpoint of a dict. Raises
        FieldError unless there is one beginning with which all `names` are stored, and the model
        has all that is stored.

        Args:
            names: of the parameters.
            others: further names that the model has, and that may be stored.
        """
        start, known = self._start(names), {*names, *others}
        modules = {name.partition(".")[0] for name in known}
        mine = [n.removeprefix(start) for n in self.tensors if n.startswith(start)]
        more = [
            name
            for name in sorted(mine)
            if name not in known and (name.partition(".")[0] in modules or name[0].isdigit())
        ]
        if more:
            text = f"the model lacks {len(more)} of its tensors, as {start}{more[0]}"
            raise self._error(f"{text}: a checkpoint of this model is needed")
        wanted = {f"{start}{name}" for name in mine if name in known}
        self.tensors = {name: self.tensors[name] for name in wanted}
        return ModelValues(self, start)

    def _start(self, names: Collection[str]) -> str:
        """Return the beginning of the stored names of a model."""
        first = min(names)
        stored = (name.removesuffix(first) for name in self.tensors if name.endswith(first))
        starts = sorted(
            start
            for start in set(stored)
            if start == "" or (start.endswith(".") and not any(w in start for w in OPTIMIZERS))
        )
        whole = [s for s in starts if all(f"{s}{name}" in self.tensors for name in names)]
        if len(whole) == 1 and ("model." not in starts or whole == ["model."]):
            return whole[0]
        if len(whole) > 1:
            several = " and ".join(f"{start}{first}" for start in whole)
            raise self._error(f"it has {several}: leave one model in the checkpoint")
        found = {s: sum(f"{s}{name}" in self.tensors for name in names) for s in starts}
        start = "model." if "model." in starts else max(starts, key=found.__getitem__, default="")
        absent = next((n for n in sorted(names) if f"{start}{n}" not in self.tensors), first)
        remedy = f"it has no tensor {start}{absent}: a checkpoint of this model is needed"
        raise self._error(remedy)

    def _part(self, name: str, stored: StoredTensor, chunk: Chunk, at: Sequence[int]) -> Tensor:
        """Return the numbers of a chunk, at the indices `at` of the tensor's first dimensions."""
        if chunk.extensions:
            what = f"{name} is stored with {' '.join(chunk.extensions)}"
            raise self._error(f"{what}: save it without extensions of the writer")
        try:
            path = (self.folder / chunk.path).resolve()
            if not path.is_relative_to(self.folder.resolve()) or not path.is_file():
                raise self._error(f"{name} is in no file of this folder, at {chunk.path}: {SOURCE}")
            with path.open("rb") as file:
                file.seek(chunk.begin)
                data = io.BytesIO(file.read(chunk.length))
            value = torch.load(data, map_location="cpu", weights_only=True)
        except FieldError:
            raise
        except Exception as error:  # torch.load fails in many ways
            raise self._error(f"{chunk.path} cannot be read: {describe(error)}") from error
        right = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
        if not right or (tuple(value.shape), value.dtype) != (chunk.sizes, stored.dtype):
            raise self._error(f"{chunk.path} is damaged: it has another tensor than {name}")
        for index, begin in zip(at, chunk.offsets, strict=False):
            value = value[index - begin]
        found: Tensor = value
        return found

    def _error(self, remedy: str) -> FieldError:
        return FieldError("weights", str(self.folder), remedy)


@dataclass(frozen=True, slots=True)
class ModelValues:
    """The tensors of one model in a checkpoint."""

    checkpoint: DistributedCheckpoint
    start: str
    """Beginning of their names."""

    def __call__(self, name: str) -> Tensor:
        return self.checkpoint.read(self.start + name)

    def __contains__(self, name: str) -> bool:
        return self.start + name in self.checkpoint.tensors


class Part(NamedTuple):
    """A tensor to write, or a rectangular part of one."""

    name: str
    values: Tensor
    """Values, with as many dimensions as the whole tensor."""
    offsets: tuple[int, ...] = ()
    """Place of its first number in the whole tensor; (): it is the whole tensor."""
    size: tuple[int, ...] = ()
    """Size of the whole tensor; (): it is the whole tensor."""


def write(folder: Path, files: Iterable[Sequence[Part]]) -> None:
    """Write a checkpoint, one data file after the other, to the new folder `folder`.

    Only the parts of one file are in memory. Raises OSError if it cannot be written.
    """
    writer = FileSystemWriter(str(folder), per_thread_copy_ahead=0)  # 0: opens no CUDA stream
    writer.set_up_storage_writer(True)
    folder.mkdir(parents=True, exist_ok=True)
    plans: list[SavePlan] = []
    results = []
    for parts in files:
        planner = _Values(parts)
        # The writer names files after the number of the plan.
        numbered = writer.prepare_global_plan([*plans, SavePlan(planner.items)])[len(plans)]
        plans.append(numbered)
        try:
            results.append(writer.write_data(numbered, planner).wait())
        except RuntimeError as error:  # how torch.save reports a full disk
            raise OSError(describe(error)) from error
        del parts, planner
    _, metadata = create_default_global_save_plan(plans)
    writer.finish(metadata, results)


class _Values(DefaultSavePlanner):
    """Gives the writer the values of some parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self._values = {_index(part): part.values.contiguous() for part in parts}
        self.items = [_item(part) for part in parts]

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._values[write_item.index]


def _index(part: Part) -> MetadataIndex:
    return MetadataIndex(part.name, part.offsets or (0,) * part.values.dim())


def _item(part: Part) -> WriteItem:
    index = _index(part)
    assert index.offset is not None
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=index.offset, sizes=part.values.shape),
        properties=TensorProperties.create_from_tensor(part.values),
        size=torch.Size(part.size) if part.size else part.values.shape,
    )
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


class _Made:
    """An object of the pickle, without behaviour."""

    kind = ""
    state: Any = None

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Makes objects of the types in METADATA_TYPES, of classes of its own; refuses the rest."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._types: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        base: type = _Made
        if (module, name) == ("torch", "Size"):
            base = tuple
        elif (module, name) == ("collections", "OrderedDict"):
            base = dict
        elif name not in METADATA_TYPES.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return self._types.setdefault(name, type(name, (base,), {"kind": name}))


def _stored(found: Any) -> Iterator[tuple[str, StoredTensor]]:
    """Yield names and tensors of a checkpoint. Raises an Exception for anything else."""
    if getattr(found, "kind", "") != "Metadata":
        raise pickle.UnpicklingError("it describes no checkpoint")
    places = {
        (index.state["fqn"], tuple(index.state.get("offset") or ())): place.state
        for index, place in found.state["storage_data"].items()
    }
    for name, tensor in found.state["state_dict_metadata"].items():
        if tensor.kind == "TensorStorageMetadata":
            size = _numbers(tensor.state["size"])
            chunks = [_chunk(name, chunk.state, size, places) for chunk in tensor.state["chunks"]]
            dtype = getattr(torch, tensor.state["properties"].state[0])
            yield str(name), StoredTensor(dtype, size, tuple(chunks))


def _chunk(
    name: str, chunk: dict[str, Any], size: tuple[int, ...], places: dict[Any, Any]
) -> Chunk:
    offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
    if any(begin + n > most for begin, n, most in zip(offsets, sizes, size, strict=True)):
        raise ValueError(f"a part of {name} is outside of it")
    place = places[name, offsets]
    begin, length = _numbers((place["offset"], place["length"]))
    extensions = tuple(map(str, place.get("transform_descriptors") or ()))
    return Chunk(offsets, sizes, str(place["relative_path"]), begin, length, extensions)


def _numbers(found: Iterable[Any]) -> tuple[int, ...]:
    numbers = tuple(found)
    if not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise ValueError(f"{numbers} are no sizes")
    return numbers


def as_tensor(dtype: str, data: Any, shape: Sequence[int]) -> Tensor:
    """Return a copy of raw little-endian numbers as a tensor. `dtype`: as "bfloat16"."""
    raw, kind = bytearray(data), getattr(torch, dtype)
    flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
    return flat.reshape(tuple(shape))
