"""Copies to be made: what of a worker's layers is published, and how its bytes are written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from elastic.domain.types import GRADIENT, LOGS, REDUCED, STATE, UPDATE, WHOLE, Portion
from elastic.worker.model.state_codec import as_bytes
from elastic.worker.replica.publishing import Message, Readable, Summed
from elastic.worker.replica.replica import LayerReplica

RingKey = tuple[str, int, frozenset[int]]


@dataclass(slots=True)
class Item:
    """One copy to be made."""

    kind: str
    layer: int
    step: int
    nbytes: int
    write: Callable[[Tensor], None]
    microbatches: frozenset[int] = frozenset()
    losses: tuple[tuple[int, float], ...] = ()
    portion: Portion = WHOLE
    source: Readable | None = None
    """What `write` reads; it must not change before that is done."""

    @property
    def ring(self) -> RingKey:
        """Which ring of slots it takes turns in."""
        return self.kind, self.layer, self.microbatches if self.kind in LOGS else frozenset()

    @property
    def content(self) -> tuple[int, frozenset[int]]:
        return self.step, self.microbatches


def gradients(sums: Iterable[Summed], step: int) -> list[Item]:
    """Those that are not empty."""
    return [
        Item(
            GRADIENT,
            part.index,
            step,
            part.gradient_nbytes,
            part.write_gradient,
            frozenset(part.ledger),
            tuple(sorted(part.losses.items())),
            source=part,
        )
        for part in sums
        if part.ledger
    ]


def reduced_gradients(
    replicas: Iterable[LayerReplica], reduced: Mapping[int, Tensor], step: int
) -> list[Item]:
    items = []
    for replica in replicas:
        source = reduced[replica.index]
        held = frozenset(index for part in replica.parts for index in part.ledger)
        items.append(Item(REDUCED, replica.index, step, source.nbytes, partial(_copy, source), held))
    return items


def updates(
    replicas: Iterable[LayerReplica], reduced: Mapping[int, Tensor], clip: float, *, at_once: bool
) -> list[Item]:
    """`at_once`: they are converted now, since `reduced` may change before they are written."""
    items = []
    for replica in replicas:
        source = reduced[replica.index]
        write = (
            partial(_copy, replica.update_taken(source, clip))
            if at_once
            else partial(replica.write_update, source, clip)
        )
        size, version = replica.update_nbytes, replica.version
        items.append(Item(UPDATE, replica.index, version, size, write, portion=replica.portion))
    return items


def messages(logged: Iterable[Message]) -> list[Item]:
    return [Item(m.kind, m.layer, m.step, m.nbytes, m.write, frozenset((m.microbatch,))) for m in logged]


def states(replicas: Iterable[LayerReplica]) -> list[Item]:
    return [
        Item(
            STATE,
            replica.index,
            replica.version,
            replica.state_nbytes(),
            replica.write_state,
            portion=replica.portion,
            source=replica,
        )
        for replica in replicas
    ]


def among(items: Collection[Item], layers: Collection[int] | None) -> tuple[list[Item], list[Item]]:
    """Items of these layers (None: of all), and the others."""
    inside = [item for item in items if layers is None or item.layer in layers]
    return inside, [item for item in items if item not in inside]


def _copy(source: Tensor, out: Tensor) -> None:
    """Copy `source` to `out`, uint8 [nbytes] in host memory."""
    out.copy_(as_bytes(source))
