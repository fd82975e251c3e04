"""Shared facts of a simulated cluster, and the interfaces between its parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Protocol

from elastic.core.protocol.fault_spec import Phase
from elastic.domain.types import Copy, JobSpec, NodeInfo
from elastic.planning.cost.profile import Profile
from elastic_sim.microbatches.clock import BEGIN_S, Uplink, VirtualClock
from elastic_sim.microbatches.physics import MicrobatchPhysics
from elastic_sim.microbatches.vault import SimulatedVault


class Node(Protocol):
    """A node as workers see it: its agent."""

    name: str
    info: NodeInfo
    vault: SimulatedVault
    uplink: Uplink
    alive: bool

    def receive_from_worker(self, generation: int, message: Any) -> None:
        """Take a message of the node's worker number `generation`."""

    def replicate(self, copies: list[Copy], peer: str, acked: Callable[[], None]) -> None:
        """Send copies to the peer's vault. `acked()` is called when they have arrived."""


class Environment(ABC):
    """Shared facts of a simulated cluster. `MicrobatchWorld` adds the parts that act."""

    agents: Mapping[str, Node]
    """Agents by node, lost ones included."""

    def __init__(
        self,
        spec: JobSpec,
        profile: Profile,
        physics: MicrobatchPhysics,
        seed: int,
        *,
        accelerated: bool = True,
    ) -> None:
        """`accelerated`: nodes report accelerators, so that each loss halts all nodes. Else a loss
        may leave pipelines outside (docs/design/local-recovery.md)."""
        self.spec, self.profile, self.physics = spec, profile, physics
        self.clock = VirtualClock(seed, physics.jitter)
        self.events: list[dict[str, Any]] = []
        """Events as in events.jsonl; `at` is in seconds since the beginning of the trace."""
        self.number = count(1).__next__
        """Return a new number at every call."""
        self.link_bytes_per_s = profile.link.bytes_per_s * profile.tp
        """Link speed of a node, all its workers together; 0: unknown."""
        self.copy_bytes_per_s = profile.copy_bytes_per_s * profile.tp
        """Speed of copying to shared memory, all workers of a node together; 0: unknown."""
        self.accelerated = accelerated

    def state_bytes(self, layer: int) -> int:
        """Return the bytes of a layer's parameters and optimizer state."""
        return self.profile.layers[layer].param_bytes + self.profile.layers[layer].state_bytes

    def log(self, kind: str, data: dict[str, Any]) -> None:
        """Append an event."""
        self.events.append({"at": round(self.clock.now - BEGIN_S, 6), "kind": kind, **data})

    @abstractmethod
    def step_done(self, step: int, seconds: float) -> None:
        """Record that `step` is done after `seconds`."""

    @abstractmethod
    def strike(self, node: str, step: int, phase: Phase, microbatch: int | None = None) -> bool:
        """Remove `node` and return True if a fault is due at this point of its work."""
