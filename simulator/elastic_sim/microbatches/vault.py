"""A simulated vault: keeps the two newest steps per copy kind, layer, owner and epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from elastic.domain.types import GRADIENT, LOGS, STATE, UPDATE, Copy

KEPT_STEPS, KEPT_GRADIENTS = 2, 2
CopyGroup = tuple[str, int, str, int, frozenset[int]]


class SimulatedVault:
    """The copies that a node holds."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._groups: dict[CopyGroup, list[Copy]] = {}

    def add(self, copy: Copy) -> None:
        """Keep a copy and drop the copies that it supersedes."""
        copy = replace(copy, node=self.node)
        group = self._groups.setdefault(_group(copy), [])
        if any(held.key == copy.key for held in group):
            return
        group.append(copy)
        group[:] = self._kept(group)
        if copy.kind == STATE:
            updates = (UPDATE, copy.layer, copy.owner, copy.epoch, frozenset[int]())
            if updates in self._groups:
                self._groups[updates][:] = self._kept(self._groups[updates])

    def _kept(self, group: list[Copy]) -> list[Copy]:
        first = group[0]
        if first.kind == UPDATE:
            states = (STATE, first.layer, first.owner, first.epoch, frozenset[int]())
            oldest = min((c.step for c in self._groups.get(states, ())), default=0)
            return [copy for copy in group if copy.step >= oldest]
        most = KEPT_GRADIENTS if first.kind == GRADIENT else 1
        kept = list[Copy]()
        for step in sorted({copy.step for copy in group})[-KEPT_STEPS:]:
            of_step = (copy for copy in group if copy.step == step)
            kept += sorted(of_step, key=lambda c: (len(c.microbatches), c.sequence))[-most:]
        return kept

    def trim(self, epoch: int, step: int) -> None:
        """Drop copies of epochs below `epoch`, except logged messages of `step`."""
        self._drop(lambda c: c.epoch < epoch and not (c.kind in LOGS and c.step == step))

    def enter(self, epoch: int, step: int) -> None:
        """Drop copies of older epochs that are newer than the state with which `epoch` begins."""
        self._drop(lambda c: c.epoch < epoch and c.step > (step - 1 if c.kind == UPDATE else step))

    def _drop(self, obsolete: Callable[[Copy], bool]) -> None:
        for key in list(self._groups):
            left = [copy for copy in self._groups[key] if not obsolete(copy)]
            if left:
                self._groups[key] = left
            else:
                del self._groups[key]

    def __iter__(self) -> Iterator[Copy]:
        return (copy for group in self._groups.values() for copy in group)

    def __contains__(self, copy: Copy) -> bool:
        return any(held.key == copy.key for held in self._groups.get(_group(copy), ()))

    def inventory(self) -> tuple[Copy, ...]:
        """Return all copies in the order of their keys."""
        return tuple(sorted(self, key=lambda copy: copy.key))

    def newest_state(self, layer: int) -> tuple[Copy, ...]:
        """Return the copies of the newest state of a layer: one, or one per portion."""
        found = [copy for copy in self if (copy.kind, copy.layer) == (STATE, layer)]
        newest = max(((c.step, c.epoch) for c in found), default=None)
        return tuple(c for c in found if (c.step, c.epoch) == newest)


def _group(copy: Copy) -> CopyGroup:
    ledger = copy.microbatches if copy.kind in LOGS else frozenset[int]()
    return copy.kind, copy.layer, copy.owner, copy.epoch, ledger
