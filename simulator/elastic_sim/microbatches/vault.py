"""A node's copies as the vault keeps them: of each kind, layer, owner and epoch the two newest steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from elastic.domain.types import GRADIENT, LOGS, STATE, UPDATE, Copy

KEPT_STEPS, KEPT_GRADIENTS = 2, 2
Group = tuple[str, int, str, int, frozenset[int]]


class Vault:
    def __init__(self, node: str) -> None:
        self.node = node
        self._groups: dict[Group, list[Copy]] = {}

    def add(self, copy: Copy) -> None:
        """Keep a copy, and give up what it makes useless."""
        copy = replace(copy, node=self.node)
        group = self._groups.setdefault(_group(copy), [])
        if any(held.key == copy.key for held in group):
            return
        group.append(copy)
        group[:] = self._kept(group)
        if copy.kind == STATE:
            line = (UPDATE, copy.layer, copy.owner, copy.epoch, frozenset[int]())
            if line in self._groups:
                self._groups[line][:] = self._kept(self._groups[line])

    def _kept(self, group: list[Copy]) -> list[Copy]:
        first = group[0]
        steps = sorted({copy.step for copy in group})
        if first.kind == UPDATE:
            line = (STATE, first.layer, first.owner, first.epoch, frozenset[int]())
            oldest = min((c.step for c in self._groups.get(line, ())), default=0)
            return [copy for copy in group if copy.step >= oldest]
        most = KEPT_GRADIENTS if first.kind == GRADIENT else 1
        kept = list[Copy]()
        for step in steps[-KEPT_STEPS:]:
            mine = sorted(
                (c for c in group if c.step == step),
                key=lambda c: (len(c.microbatches), c.sequence),
            )
            kept += mine[-most:]
        return kept

    def trim(self, epoch: int, step: int) -> None:
        """Copies of epochs below `epoch` are not needed any more, but for logged messages of `step`."""
        self._drop(lambda c: c.epoch < epoch and not (c.kind in LOGS and c.step == step))

    def enter(self, epoch: int, step: int) -> None:
        """Copies beyond the version in which an epoch begins are of a history that was given up."""
        self._drop(lambda c: c.epoch < epoch and c.step > (step - 1 if c.kind == UPDATE else step))

    def _drop(self, gone: Callable[[Copy], bool]) -> None:
        for key in list(self._groups):
            left = [copy for copy in self._groups[key] if not gone(copy)]
            if left:
                self._groups[key] = left
            else:
                del self._groups[key]

    def __iter__(self) -> Iterator[Copy]:
        return (copy for group in self._groups.values() for copy in group)

    def __contains__(self, copy: Copy) -> bool:
        return any(held.key == copy.key for held in self._groups.get(_group(copy), ()))

    def inventory(self) -> tuple[Copy, ...]:
        return tuple(sorted(self, key=lambda copy: copy.key))

    def newest_state(self, layer: int) -> tuple[Copy, ...]:
        """Its copies of the newest version of a layer's state: one, or one of each portion."""
        found = [copy for copy in self if (copy.kind, copy.layer) == (STATE, layer)]
        newest = max(((c.step, c.epoch) for c in found), default=None)
        return tuple(c for c in found if (c.step, c.epoch) == newest)


def _group(copy: Copy) -> Group:
    return (
        copy.kind,
        copy.layer,
        copy.owner,
        copy.epoch,
        copy.microbatches if copy.kind in LOGS else frozenset(),
    )
