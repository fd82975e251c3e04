"""The backup parts of an agent, in a process of their own: vault, server, replicator, checkpoint
writer and worker channel are the product's. Orders come from the test's driver through a pipe."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from elastic.agent.vault.checkpoints import CheckpointWriter
from elastic.agent.vault.replicator import Replicator
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.agent.workers.channels import WorkerChannels
from elastic.core.protocol import messages as m
from elastic.domain.errors import ElasticError, VaultError
from elastic.domain.types import Assignment

RANKS = 1 << 16
SOCKET, SLOTS, CHECKPOINTS = "agent.sock", "slots", "checkpoints"


class MiniAgent:
    """One node's agent. `tell` sends a tuple to the driver."""

    def __init__(self, node: str, root: Path, pipe: Connection, timeout_s: float, every: int):
        self._pipe, self._telling = pipe, threading.Lock()
        self._slots = root / node / SLOTS
        self._generation, self._pid = 0, 0
        self._ended = threading.Event()
        self._vault = Vault(node, root / node / "vault")
        self._server = VaultServer(self._vault, timeout_s=timeout_s).start()
        self._checkpoints = CheckpointWriter(
            root / CHECKPOINTS, self._vault, lambda part: self.tell("part", part)
        )
        self._checkpoints.every = every
        self._replicator = Replicator(
            self._vault,
            self._acked,
            self._held,
            timeout_s=timeout_s,
            prepare=self._checkpoints.offer,
            no_room=partial(self.tell, "refused"),
            broken=partial(self.tell, "refused"),
        )
        self._channels = WorkerChannels(
            root / node / SOCKET, self._heard, lambda: (self._generation, {0: self._pid})
        )
        self.tell("address", self._server.address)

    def tell(self, *words: Any) -> None:
        with self._telling:
            self._pipe.send(words)

    def serve(self) -> None:
        """Obey the driver until it says end, or is gone."""
        while True:
            name, *rest = self._pipe.recv()
            if name == "end":
                bad = self._vault.check_integrity()
                self._replicator.close()
                self._checkpoints.close()
                self._server.close()
                self._vault.close()
                self.tell("ended", [copy.key for copy in bad])
                return
            order: Callable[..., None] = getattr(self, f"_order_{name}")
            order(*rest)

    # ---- orders ----

    def _order_worker(self, pid: int, steps: int) -> None:
        """A worker with this process id will attach."""
        self._generation, self._pid = self._generation + 1, pid
        self._checkpoints.steps = steps
        self.tell("expects", pid)

    def _order_gone(self, pid: int) -> None:
        """The worker has ended. Its last messages are handled before the inventory is sent."""
        self._channels.drain(self._generation, 0)
        self._channels.remove(0)
        self._vault.worker_gone(pid, self._slots)
        self.tell("gone", pid)

    def _order_fence(self, epoch: int) -> None:
        self._replicator.reset(epoch)
        self._vault.fence(epoch)

    def _order_report(self, epoch: int) -> None:
        self.tell("report", epoch, self._vault.inventory(), None)

    def _order_enter(self, assignment: Assignment) -> None:
        epoch = assignment.plan.epoch
        self._vault.enter(epoch, assignment.step)
        self._replicator.enter(epoch, assignment)
        self._checkpoints.enter(assignment)
        self.tell("entered", epoch)

    def _order_trim(self, epoch: int, step: int) -> None:
        self._vault.trim(epoch, step)

    # ---- the worker ----

    def _heard(self, generation: int, rank: int, message: Any) -> None:
        if generation != self._generation:
            return
        match message:
            case m.Published():
                self._publish(message)
            case m.Halted():
                self.tell("report", message.epoch, self._vault.inventory(), message)
            case m.Crashed():
                self.tell("crashed", message.message)
            case m.Protected():
                self.tell("protected", message.epoch)

    def _publish(self, message: m.Published) -> None:
        try:
            for local in message.copies:
                self._vault.publish(local)
        except VaultError as error:
            self.tell("crashed", f"it announced a copy that does not exist: {error}")
            return
        self._replicator.submit(self._generation * RANKS, message)

    def _acked(self, worker: int, bundle: int, kept: bool) -> None:
        acknowledge = partial(self._acknowledge, worker, m.BundleAcknowledged(bundle, kept))
        if self._checkpoints.final:
            self._checkpoints.then(acknowledge)
        else:
            acknowledge()

    def _acknowledge(self, worker: int, acked: m.BundleAcknowledged) -> None:
        if worker // RANKS == self._generation:
            self._channels.send(acked, 0)

    def _held(self, epoch: int, bundle: int, peer: str, error: ElasticError) -> None:
        self.tell("held", epoch, peer, f"bundle {bundle} for {peer}: {error}")


def main(node: str, root: Path, pipe: Connection, timeout_s: float, every: int) -> None:
    """Entry of the process."""
    try:
        MiniAgent(node, root, pipe, timeout_s, every).serve()
    except EOFError:
        os._exit(0)
