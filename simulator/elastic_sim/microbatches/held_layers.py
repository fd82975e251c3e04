"""Layers that a simulated worker holds: their version, and the micro-batches in their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Ledger = frozenset[int]
NOTHING: Ledger = frozenset()


class HeldLayers:
    """The state of one worker's layers, all at the same version."""

    def __init__(self) -> None:
        self.version = -1
        self.parts: dict[int, tuple[Ledger, Ledger]] = {}
        """Layer: micro-batches in its own gradient, and in the sum that all holders have."""
        self._recovered: dict[int, Ledger] = {}
        """Layer: micro-batches that the recovery gave to this holder alone."""

    def install(self, version: int, recovered: Mapping[int, Ledger]) -> None:
        """Hold these layers at `version`, with the gradients that the recovery brought."""
        self.version, self._recovered = version, dict(recovered)
        self.parts = {layer: (ledger, NOTHING) for layer, ledger in recovered.items()}

    def own(self, layer: int) -> Ledger:
        """Micro-batches in the worker's own gradient."""
        return self.parts[layer][0]

    def shared(self, layer: int) -> Ledger:
        """Micro-batches in the sum that all holders have."""
        return self.parts[layer][1]

    def ledger(self, layer: int) -> Ledger:
        """All micro-batches in the layer's gradients."""
        own, common = self.parts[layer]
        return own | common

    def unshared(self) -> bool:
        """Whether a gradient that the recovery brought is in no common sum yet."""
        return any(self._recovered.get(la, NOTHING) & self.own(la) for la in self.parts)

    def add(self, microbatch: int, layers: Iterable[int], covered: Mapping[int, Ledger]) -> None:
        """Add a micro-batch to the layers in whose `covered` ledger it is not."""
        for layer in layers:
            own, common = self.parts[layer]
            if microbatch not in covered.get(layer, NOTHING):
                twice = f"micro-batch {microbatch} twice in layer {layer}"
                assert microbatch not in own | common, twice
                self.parts[layer] = own | {microbatch}, common

    def share(self, layer: int, union: Ledger) -> None:
        """All holders now have the sum over `union`."""
        own, common = self.parts[layer]
        self.parts[layer] = own - union, common | union

    def update(self) -> None:
        """The optimizer step: a new version, with empty gradients."""
        self.version += 1
        self.parts = dict.fromkeys(self.parts, (NOTHING, NOTHING))
        self._recovered = {}
