"""Gemini (Wang et al., SOSP 2023): checkpoints in the memory of a peer."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_sim.steps.engine import JobView, Reconfiguration
from elastic_sim.steps.policies.base import PolicyDescription
from elastic_sim.steps.policies.checkpoint_restart import CheckpointRestartPolicy
from elastic_sim.steps.world import SimulatedWorld
from elastic_sim.traces.trace import Event


class GeminiPolicy(CheckpointRestartPolicy):
    """Gemini: a checkpoint in a peer's memory after every step; a loss restarts from this copy."""

    about = PolicyDescription(
        name="gemini",
        what="checkpoint in a peer's memory at every step; restart from it",
        source="Wang et al., SOSP 2023: T_wasted = t_ckpt + 1/(2f) + t_retrieve, f once per step, "
        "t_ckpt hidden; nodes in pairs keep each other's state; if both of a pair are lost, all "
        "nodes read the durable checkpoint, written in the background as ours; restart as in the "
        "policy checkpoint",
    )

    def __init__(self, world: SimulatedWorld, seed: int = 0) -> None:
        super().__init__(world, seed)
        self._peers: dict[str, str] = {}
        """Peer that holds the state of each node, since the last step."""
        self._lost: set[str] = set()
        """Nodes of `_peers` that were lost since the last step."""
        self._copies_lost = False
        """Whether no memory holds the whole state, so that it must be read from storage."""

    def checkpoint_due(self, job: JobView) -> bool:
        return False

    def hits_used_nodes(self, job: JobView, lost: Sequence[Event]) -> bool:
        if not self._peers:
            return super().hits_used_nodes(job, lost)
        return any(event.node in self._peers for event in lost)

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration | None:
        self._lost |= {event.node for event in lost} & self._peers.keys()
        self._copies_lost |= any(self._peers[node] in self._lost for node in self._lost)
        if not self._copies_lost:
            return super().on_membership(job, joined, lost)
        if not lost and job.setup is not None:
            return None
        self._loss_events += bool(lost)
        change = self.restart_without_copies(job, lost)
        self.saved_step = change.back_to
        return change

    def on_step_end(self, job: JobView) -> Reconfiguration | None:
        self.write_checkpoint_in_background(job)
        self.saved_step, self._copies_lost, self._lost = job.steps, False, set()
        self._peers = _pair_up(list(job.alive)[: self._nominal.nodes if self._nominal else 0])
        return self.restart(job, "nodes joined", loss=False) if self.should_grow(job) else None

    def save_s(self, job: JobView) -> float:
        """Return 0: the state after a step is with the peers."""
        return 0.0

    def read_s(self, job: JobView) -> float:
        """Return the seconds in which each node reads its share from a peer's memory."""
        return self.transfer_s(self.world.state_bytes / max(1, len(job.alive)))


def _pair_up(nodes: Sequence[str]) -> dict[str, str]:
    """Return the peer of each node. An odd last node uses its predecessor, a single one itself."""
    last = len(nodes) - 1
    return {
        node: nodes[i ^ 1 if i ^ 1 <= last else max(0, last - 1)] for i, node in enumerate(nodes)
    }
