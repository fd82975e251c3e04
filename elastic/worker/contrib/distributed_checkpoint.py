"""Checkpoints of torch.distributed.checkpoint (DCP), read tensor by tensor and written in parts.

A folder has data files and `.metadata`, a pickle with the name, the shape and the place of each
tensor. A pickle can call any function, so `.metadata` is read by an unpickler that makes only the
types which DCP and Megatron write there. torch.load(weights_only=True) reads the data.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Iterable, Sequence
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
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from elastic.domain.errors import FieldError, describe

METADATA = ".metadata"
METADATA_TYPES = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size"},
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
    "torch.distributed.checkpoint.planner": {  # Megatron stores its plans, too
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.serialization": {"_get_layout"},
}
"""What the unpickler may make, by module; types of numbers (torch.float32) are allowed, too."""
SOURCE = "a folder that torch.distributed.checkpoint.save has written is needed"


class DistributedCheckpoint:
    """The tensors of a folder. Raises FieldError for what cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = _metadata(folder / METADATA)
        self._places: dict[MetadataIndex, Any] = found.storage_data
        self.tensors = {
            name: stored
            for name, stored in found.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        """Type, size and parts of each tensor, by name."""

    def read(self, name: str, at: Sequence[int] = ()) -> Tensor:
        """Return a tensor, or the part of it at the indices `at` of its first dimensions."""
        stored = self.tensors[name]
        whole = torch.empty(stored.size[len(at) :], dtype=stored.properties.dtype)
        absent = whole.numel()
        for chunk in stored.chunks:
            begins, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if any(not b <= i < b + n for i, b, n in zip(at, begins, sizes, strict=False)):
                continue
            part = self._chunk(name, chunk)
            for index, begin in zip(at, begins, strict=False):
                part = part[index - begin]
            rest = zip(begins[len(at) :], sizes[len(at) :], strict=True)
            whole[tuple(slice(begin, begin + size) for begin, size in rest)] = part
            absent -= part.numel()
        if absent:
            raise self._error(f"{absent} of {whole.numel()} numbers of {name} are absent")
        return whole

    def values_of(self, names: Collection[str]) -> Callable[[str], Tensor]:
        """Return a function that reads the parameters of a model by name.

        Stored names may have a common beginning, as `model.` in the checkpoint of a dict of models.
        Raises FieldError unless there is one beginning with which all `names` are stored.
        """
        first = min(names)
        stored = (name.removesuffix(first) for name in self.tensors if name.endswith(first))
        starts = sorted({start for start in stored if not start or start.endswith(".")})
        whole = [s for s in starts if all(f"{s}{name}" in self.tensors for name in names)]
        if len(whole) == 1:
            return lambda name: self.read(whole[0] + name)
        if whole:
            several = " and ".join(f"{start}{first}" for start in whole)
            raise self._error(f"it has {several}: leave one model in the checkpoint")
        start = min(starts, key=lambda s: sum(s + n not in self.tensors for n in names), default="")
        absent = next(start + name for name in sorted(names) if start + name not in self.tensors)
        raise self._error(f"it has no tensor {absent}: a checkpoint of this model is needed")

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        place = self._places.get(MetadataIndex(name, chunk.offsets))
        if place is None:
            raise self._error(f"a part of {name} is absent: {SOURCE}")
        if getattr(place, "transform_descriptors", None):
            what = f"{name} is stored with {' '.join(place.transform_descriptors)}"
            raise self._error(f"{what}: save it without extensions of the writer")
        path = (self.folder / place.relative_path).resolve()
        if not path.is_relative_to(self.folder.resolve()):
            raise self._error(f"{name} is stored outside, at {place.relative_path}: {SOURCE}")
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                data = io.BytesIO(file.read(place.length))
            value = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load fails in many ways
            raise self._error(f"{path.name} cannot be read: {describe(error)}") from error
        if not isinstance(value, Tensor) or value.shape != chunk.sizes:
            raise self._error(f"{path.name} is damaged: {name} has another shape there")
        return value

    def _error(self, remedy: str) -> FieldError:
        return FieldError("weights", str(self.folder), remedy)


class Part(NamedTuple):
    """A tensor, or a rectangular part of one, to be written."""

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
    writer = FileSystemWriter(folder, overwrite=False)
    writer.set_up_storage_writer(True)
    folder.mkdir(parents=True, exist_ok=True)
    plans: list[SavePlan] = []
    results = []
    for parts in files:
        planner = _Values(parts)
        # The writer names files after the number of the plan.
        numbered = writer.prepare_global_plan([*plans, SavePlan(planner.items)])[len(plans)]
        plans.append(numbered)
        results.append(writer.write_data(numbered, planner).wait())
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


def _metadata(path: Path) -> Metadata:
    """Read a `.metadata` file. Raises FieldError if it is absent or holds anything else."""
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise pickle.UnpicklingError("it describes no checkpoint")
    except Exception as error:  # damaged pickles fail in many ways
        remedy = f"{METADATA} cannot be read ({describe(error)}): {SOURCE}"
        raise FieldError("weights", str(path.parent), remedy) from error
    return found


class _Unpickler(pickle.Unpickler):
    """Makes the types of METADATA_TYPES, and refuses anything else."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if name in METADATA_TYPES.get(module, ()) or isinstance(dtype, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def as_tensor(dtype: str, data: Any, shape: Sequence[int]) -> Tensor:
    """Return a copy of raw little-endian numbers as a tensor. `dtype`: as "bfloat16"."""
    flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    return flat.reshape(tuple(shape))
