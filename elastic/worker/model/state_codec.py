"""Encodes a layer's state as one run of bytes, and converts runs between TP sizes.

A run is a uint8 tensor [n] in host memory in the format of `elastic.domain.state_layout`. Values
are never converted: reading gives the written bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from elastic.domain.errors import FieldError, VaultError
from elastic.domain.state_layout import (
    ITEM_BYTES,
    StateHeader,
    TensorEntry,
    join,
    plan_layout,
    read_header,
    span,
)
from elastic.domain.types import WHOLE, Portion


class NamedTensor(NamedTuple):
    """A tensor of a layer's state."""

    name: str
    tensor: Tensor
    shard_dim: int = -1
    """Dimension along which TP ranks split the whole tensor; -1: every rank has all of it."""
    shape: tuple[int, ...] | None = None
    """Shape of the whole tensor, if `tensor` is a flat portion of it."""


@dataclass(frozen=True)
class StatePlan:
    """Places of the tensors in a run of `nbytes`."""

    text: bytes
    """First bytes of the run: the length of the header, and the header as padded JSON."""
    header: StateHeader
    nbytes: int

    def at(self, version: int) -> StatePlan | None:
        """Return the same plan for `version`, or None if the header has no room for the number."""
        old, new = (f'{{"version":{v},'.encode() for v in (self.header.version, version))
        room = len(self.text) - 8
        body = (new + self.text[8:].rstrip().removeprefix(old)).ljust(room)
        if len(body) > room:
            return None
        return StatePlan(self.text[:8] + body, replace(self.header, version=version), self.nbytes)

    def fits(self, tensors: Sequence[NamedTensor], extra: dict[str, str]) -> bool:
        """Return whether the plan is for exactly these tensors (by name and size) and texts."""
        wanted = [(named.name, named.tensor.nbytes) for named in tensors]
        planned = [(entry.name, entry.nbytes) for entry in self.header.tensors]
        return extra == self.header.extra and wanted == planned

    def write(self, out: Tensor, tensors: Sequence[NamedTensor]) -> None:
        """Write the run to the first `nbytes` of `out`, with zeros in the gaps."""
        header = torch.frombuffer(bytearray(self.text), dtype=torch.uint8)
        out[: len(self.text)].copy_(header)
        end = len(self.text)
        for entry, (_, tensor, *_) in zip(self.header.tensors, tensors, strict=True):
            stop = entry.offset + entry.nbytes
            out[end : entry.offset].zero_()
            out[entry.offset : stop].copy_(as_bytes(tensor))
            end = stop
        out[end : self.nbytes].zero_()


def plan_state(
    version: int, tensors: Sequence[NamedTensor], extra: dict[str, str], portion: Portion = WHOLE
) -> StatePlan:
    """Return the plan of a run with `portion` of a state. Raises FieldError for a bad dtype."""
    rows = [
        (
            named.name,
            str(named.tensor.dtype).removeprefix("torch."),
            tuple(named.tensor.shape) if named.shape is None else named.shape,
            named.shard_dim,
        )
        for named in tensors
    ]
    for name, dtype, _, _ in rows:
        if dtype not in ITEM_BYTES:
            raise FieldError(name, dtype, f"state may be of {', '.join(ITEM_BYTES)}")
    return StatePlan(*plan_layout(version, rows, extra, portion))


def read_state(run: Tensor) -> tuple[StateHeader, list[NamedTensor]]:
    """Return the header of a run and views of its tensors, which are flat if it is a portion.

    Raises VaultError if the run is malformed or cut short.
    """
    header = read_header(as_memory(run))
    return header, [_named(run, entry, header.portion) for entry in header.tensors]


def join_portions(runs: Sequence[Tensor]) -> Tensor:
    """Return the run of the whole state, joined from the runs of all portions in any order."""
    if len(runs) == 1:
        return runs[0]
    found: list[Tensor] = []

    def allocate(nbytes: int) -> memoryview:
        found.append(torch.empty(nbytes, dtype=torch.uint8))
        return as_memory(found[0])

    join([as_memory(run) for run in runs], allocate)
    return found[0]


def as_memory(run: Tensor) -> memoryview:
    """Return a memoryview of `run`, a uint8 tensor in host memory, without copying."""
    return memoryview(cast(Any, run.numpy()))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor` as uint8 [nbytes]; a view if `tensor` is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def reshard(runs: Sequence[Tensor], rank: int, size: int) -> Tensor:
    """Return the run of TP rank `rank` of `size` from the runs of all ranks of any TP size.

    Raises VaultError if the runs do not fit together, and FieldError if a split tensor cannot
    be cut for `size` ranks.
    """
    if len(runs) == size:
        return runs[rank]
    shards = [read_state(run) for run in runs]
    header, first = shards[0]
    for other, (theirs, tensors) in enumerate(shards):
        names = [(t.name, t.shard_dim) for t in tensors]
        if theirs.version != header.version or names != [(t.name, t.shard_dim) for t in first]:
            versions = f"version {theirs.version} and {header.version}"
            raise VaultError(f"TP rank {other} does not match rank 0: {versions}")
    mine = []
    for place, (name, tensor, dim, _) in enumerate(first):
        parts = [tensors[place].tensor for _, tensors in shards]
        if dim >= 0:
            whole = torch.cat(parts, dim)
            if whole.shape[dim] % size:
                remedy = f"must divide dimension {dim} of {name}, which is {whole.shape[dim]}"
                raise FieldError("tp", size, remedy)
            tensor = whole.chunk(size, dim)[rank]
        elif not all(torch.equal(tensor, part) for part in parts[1:]):
            remedy = "is not split along a dimension: TP size must stay"
            raise VaultError(f"{name} differs between TP ranks and {remedy}")
        mine.append(NamedTensor(name, tensor, dim))
    plan = plan_state(header.version, mine, header.extra)
    out = torch.empty(plan.nbytes, dtype=torch.uint8)
    plan.write(out, mine)
    return out


def _named(run: Tensor, entry: TensorEntry, portion: Portion) -> NamedTensor:
    if portion == WHOLE or not entry.shape:
        return NamedTensor(entry.name, _view(run, entry, entry.shape), entry.shard_dim)
    first, last = span(entry.shape, portion)
    return NamedTensor(entry.name, _view(run, entry, (last - first,)), entry.shard_dim, entry.shape)


def _view(run: Tensor, entry: TensorEntry, shape: tuple[int, ...]) -> Tensor:
    stop = entry.offset + entry.nbytes
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype) or entry.offset < 0 or stop > run.numel():
        place = f"{entry.dtype} at {entry.offset} to {stop}"
        raise VaultError(f"{entry.name}: {place} in a run of {run.numel()} bytes")
    data = run[entry.offset : stop]
    if data.storage_offset() % 8:
        data = data.clone()
    try:
        return data.view(dtype).view(shape)
    except RuntimeError as error:
        text = f"{entry.name}: {entry.nbytes} bytes are no {entry.dtype} of {shape}"
        raise VaultError(text) from error
