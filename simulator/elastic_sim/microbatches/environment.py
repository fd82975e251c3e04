"""Shared facts of a simulated cluster, and the interfaces through which its parts see each other.

Imports go one way, from the world down: world, agent, then worker beside coordinator and meter,
then training, copies, environment. A lower part sees a higher one only through an interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from elastic.core.protocol.fault_spec import Phase
from elastic.domain.types import Copy, JobSpec, NodeInfo
from elastic.planning.cost.profile import Profile
from elastic_sim.microbatches.clock import Clock, Wire
from elastic_sim.microbatches.physics import Physics
from elastic_sim.microbatches.vault import Vault
from elastic_sim.traces.trace import Event


class Node(Protocol):
    """A node as the workers of other nodes see it."""

    name: str
    info: NodeInfo
    vault: Vault
    wire: Wire
    alive: bool

    @property
    def reachable(self) -> bool: ...


class Host(Node, Protocol):
    """A node as its own worker sees it: its agent."""

    def hear_worker(self, generation: int, message: Any) -> None:
        """Take a message of the node's worker number `generation`."""

    def replicate(self, copies: list[Copy], peer: str, acked: Callable[[], None]) -> None:
        """Send copies to the peer's vault; call `acked` when they have arrived."""


class Environment(ABC):
    """Shared facts of a simulated cluster. `World` adds the parts that act."""

    def __init__(self, spec: JobSpec, profile: Profile, physics: Physics, seed: int) -> None:
        self.spec, self.profile, self.physics = spec, profile, physics
        self.clock = Clock(seed, physics.jitter)
        self.present: dict[str, Event] = {}
        """Nodes that exist according to the trace, whatever runs on them."""
        self._numbers = 0

    def number(self) -> int:
        """Return a new number at every call."""
        self._numbers += 1
        return self._numbers

    def state_bytes(self, layer: int) -> int:
        """Bytes of a layer's parameters and optimizer state."""
        return self.profile.layers[layer].param_bytes + self.profile.layers[layer].state_bytes

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.spec.n_microbatches * self.spec.tokens_per_microbatch

    @property
    def link_bytes_per_s(self) -> float:
        """Link speed of a node, all its workers together; 0: unknown."""
        return self.profile.link.bytes_per_s * self.profile.tp

    @property
    def copy_bytes_per_s(self) -> float:
        """Speed of copying to shared memory on a node, all its workers together; 0: unknown."""
        return self.profile.copy_bytes_per_s * self.profile.tp

    @abstractmethod
    def node(self, name: str) -> Node | None:
        """The node of this name, also if it is gone; None if there was none."""

    @abstractmethod
    def look(self) -> None:
        """Account for the time up to now: the use of the nodes may have changed."""

    @abstractmethod
    def stepped(self, step: int, seconds: float) -> None:
        """Record that `step` is done, and how long it took."""

    @abstractmethod
    def strikes(self, node: str, step: int, phase: Phase, microbatch: int | None = None) -> bool:
        """Remove `node` and return True if a fault is due at this point of its work."""
