"""A layer's state as one run of bytes (`elastic.domain.state_layout`), and runs of one TP size as runs of another.

Runs are uint8 tensors [n] in host memory. Nothing is converted: what is read is bit for bit what was written.
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


class Named(NamedTuple):
    """A tensor of a layer's state."""

    name: str
    tensor: Tensor
    shard_dim: int = -1
    """Dimension along which TP ranks split the whole tensor; -1: every rank has all of it."""
    shape: tuple[int, ...] | None = None
    """Where `tensor` is a flat portion: that of all portions together."""


@dataclass(frozen=True)
class StatePlan:
    """Where everything goes in a run of `nbytes`."""

    text: bytes
    """Length and padded JSON, as it lies at the start of the run."""
    header: StateHeader
    nbytes: int

    def at(self, version: int) -> StatePlan | None:
        """The same plan for another version, at little cost; None if the header's room is too small."""
        old, new = (f'{{"version":{v},'.encode() for v in (self.header.version, version))
        room = len(self.text) - 8
        body = (new + self.text[8:].rstrip().removeprefix(old)).ljust(room)
        if len(body) > room:
            return None
        return StatePlan(self.text[:8] + body, replace(self.header, version=version), self.nbytes)

    def fits(self, tensors: Sequence[Named], extra: dict[str, str]) -> bool:
        """Whether the plan is for just these tensors (by name and size) and texts."""
        return extra == self.header.extra and [(named.name, named.tensor.nbytes) for named in tensors] == [
            (entry.name, entry.nbytes) for entry in self.header.tensors
        ]

    def write(self, out: Tensor, tensors: Sequence[Named]) -> None:
        """Write the run to the first `nbytes` of `out`, gaps zeroed."""
        out[: len(self.text)].copy_(torch.frombuffer(bytearray(self.text), dtype=torch.uint8))
        end = len(self.text)
        for entry, (_, tensor, *_) in zip(self.header.tensors, tensors, strict=True):
            stop = entry.offset + entry.nbytes
            out[end : entry.offset].zero_()
            out[entry.offset : stop].copy_(as_bytes(tensor))
            end = stop
        out[end : self.nbytes].zero_()


def plan_state(
    version: int, tensors: Sequence[Named], extra: dict[str, str], portion: Portion = WHOLE
) -> StatePlan:
    """Lay out these tensors, which are `portion` of a state."""
    rows = [
        (name, str(t.dtype).removeprefix("torch."), tuple(t.shape) if shape is None else shape, dim)
        for name, t, dim, shape in tensors
    ]
    for name, dtype, _, _ in rows:
        if dtype not in ITEM_BYTES:
            raise FieldError(name, dtype, f"state may be of {', '.join(ITEM_BYTES)}")
    return StatePlan(*plan_layout(version, rows, extra, portion))


def read_state(run: Tensor) -> tuple[StateHeader, list[Named]]:
    """Parse a run. The tensors are views of it, flat ones if it is a portion. Raises VaultError if it is malformed or
    cut short."""
    header = read_header(as_memory(run))
    return header, [_named(run, e, header.portion) for e in header.tensors]


def join_portions(runs: Sequence[Tensor]) -> Tensor:
    """The run of the whole state from those of its portions."""
    if len(runs) == 1:
        return runs[0]
    found: list[Tensor] = []

    def allocate(nbytes: int) -> memoryview:
        found.append(torch.empty(nbytes, dtype=torch.uint8))
        return as_memory(found[0])

    join([as_memory(run) for run in runs], allocate)
    return found[0]


def as_memory(run: Tensor) -> memoryview:
    """The bytes of a run in host memory, in place."""
    return memoryview(cast(Any, run.numpy()))


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of `tensor` as uint8 [nbytes]; a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def merge_shards(runs: Sequence[Tensor]) -> Tensor:
    """Join the runs of all TP ranks, in rank order, to the run of TP size 1."""
    shards = [read_state(run) for run in runs]
    header, first = shards[0]
    for rank, (other, tensors) in enumerate(shards):
        names = [(t.name, t.shard_dim) for t in tensors]
        if other.version != header.version or names != [(t.name, t.shard_dim) for t in first]:
            raise VaultError(
                f"TP rank {rank} does not match rank 0: version {other.version} and {header.version}"
            )
    whole = []
    for place, (name, tensor, dim, _) in enumerate(first):
        parts = [tensors[place].tensor for _, tensors in shards]
        _refuse_private(name, parts, dim)
        whole.append(Named(name, torch.cat(parts, dim) if dim >= 0 and len(parts) > 1 else tensor, dim))
    return _run(header, whole)


def slice_shard(run: Tensor, rank: int, size: int) -> Tensor:
    """Cut TP rank `rank`'s run of `size` out of the run of TP size 1."""
    header, tensors = read_state(run)
    part = []
    for name, tensor, dim, _ in tensors:
        if dim >= 0 and tensor.shape[dim] % size:
            raise FieldError(
                "tp", size, f"must divide dimension {dim} of {name}, which is {tensor.shape[dim]}"
            )
        part.append(Named(name, tensor.chunk(size, dim)[rank] if dim >= 0 else tensor, dim))
    return _run(header, part)


def reshard(runs: Sequence[Tensor], rank: int, size: int) -> Tensor:
    """Return TP rank `rank`'s run of `size` ranks from the runs of all ranks of any TP size."""
    if len(runs) == size:
        return runs[rank]
    whole = merge_shards(runs)
    return whole if size == 1 else slice_shard(whole, rank, size)


def _run(header: StateHeader, tensors: Sequence[Named]) -> Tensor:
    plan = plan_state(header.version, tensors, header.extra)
    out = torch.empty(plan.nbytes, dtype=torch.uint8)
    plan.write(out, tensors)
    return out


def _named(run: Tensor, entry: TensorEntry, portion: Portion) -> Named:
    if portion == WHOLE or not entry.shape:
        return Named(entry.name, _view(run, entry, entry.shape), entry.shard_dim)
    first, last = span(entry.shape, portion)
    return Named(entry.name, _view(run, entry, (last - first,)), entry.shard_dim, entry.shape)


def _view(run: Tensor, entry: TensorEntry, shape: tuple[int, ...]) -> Tensor:
    stop = entry.offset + entry.nbytes
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype) or entry.offset < 0 or stop > run.numel():
        raise VaultError(f"{entry.name}: {entry.dtype} at {entry.offset} to {stop} in a run of {run.numel()}")
    data = run[entry.offset : stop]
    if data.storage_offset() % 8:
        data = data.clone()
    try:
        return data.view(dtype).view(shape)
    except RuntimeError as error:
        raise VaultError(f"{entry.name}: {entry.nbytes} bytes are no {entry.dtype} of {shape}") from error


def _refuse_private(name: str, parts: Sequence[Tensor], dim: int) -> None:
    """State that differs between ranks and is not split along a known dimension has no other TP size."""
    if dim < 0 and not all(torch.equal(parts[0], part) for part in parts[1:]):
        raise VaultError(
            f"{name} differs between TP ranks and is not split along a dimension: TP size must stay"
        )
