"""Decides when a worker's gradients and states are copied, and which must be safe before an update.

The plan names the scheme. For gradients, `stream:k` sends copies to the peer's vault after every k
micro-batches and after the last one. `recompute` copies nothing. `log` keeps the messages between
stages on this node. Under `reduce` other holders of the layer have the sums
(`elastic.worker.engine.incremental_allreduce`).

For states, `snapshot` sends copies to the peer after every update. `replica` keeps them in the
local vault, because another pipeline holds the layer. `replay` sends the input of every update, and
whole states from time to time (`snapshot_schedule`). All that was not copied goes to the local
vault when the epoch ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from elastic.core.protocol import messages as m
from elastic.domain.errors import VaultFull
from elastic.domain.types import Plan
from elastic.planning.plan.schemes import LOG, NONE, gradients_of, state_of
from elastic.worker.backup import items
from elastic.worker.backup.activation_log import ActivationLog
from elastic.worker.backup.publisher import Publisher
from elastic.worker.backup.snapshot_schedule import SnapshotSchedule
from elastic.worker.model.layers import Tied
from elastic.worker.replica.gradient_sum import GradientSum
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import AbandonSignal

log = logging.getLogger(__name__)

USELESS_AFTER = 2
"""Updates after which copies of an older epoch are useless, as workers keep only two versions."""


class Protection:
    """Backup of one worker's layers during one epoch."""

    def __init__(
        self,
        publisher: Publisher,
        plan: Plan,
        node: str,
        replicas: Sequence[LayerReplica],
        abandon: AbandonSignal,
        send: Callable[[object], None],
        tied: Tied,
        stages: int = 1,
    ) -> None:
        """`stages`: number of this worker's stages. Every micro-batch passes each of them once."""
        self._publisher, self._replicas = publisher, replicas
        self._abandon, self._send, self._epoch = abandon, send, plan.epoch
        self._tied = {layer for group in tied for layer, _ in group}
        peer = plan.peer_of(node) or ""
        gradients, state = gradients_of(plan.gradients), state_of(plan.state)
        self._every = gradients.every * stages
        """Backward passes between two copies of gradients; 0: no copies."""
        self._uncopied = 0
        """Backward passes since the last copy of gradients."""
        self._copy_tied = bool(self._every or gradients.rounds)
        """Whether to copy the reduced gradients of layers with tied tensors."""
        self._shared = not gradients.rounds
        """Whether all holders have the micro-batches that the recovery restored at one holder.
        Under `reduce` they have them after the first round."""
        self._states = state.name != NONE
        publisher.keep_final_gradients = self._sharded = state.sharded
        self._gradient_peer = peer if self._every else ""
        self._state_peer = peer if state.away else ""
        self._replays = bool(self._state_peer) and state.updates
        self._snapshots = SnapshotSchedule(max(state.every, 1))
        self._gradient_bundle = self._state_bundle = 0
        in_memory = all(replica.device.type == "cpu" for replica in replicas)
        self.log = None
        """Log of the messages that are sent to other stages."""
        if plan.gradients == LOG:
            self.log = ActivationLog(publisher, plan.epoch, in_memory=in_memory)
        logged = self.log is not None and bool(self._state_peer)
        keep_final = not self._every and (self._sharded or logged)
        self._hold_final = keep_final and in_memory and not gradients.rounds
        self._copy_final = keep_final and not self._hold_final
        """Whether to copy the last gradients of a step to the local vault; `_hold_final`: to hold
        them in this process instead. They must outlive the update, because the loss of a node
        leads back to the old state until each peer has the new state."""
        self._finals: dict[int, tuple[int, GradientSum]] = {}
        """Layer -> (step, its last gradients)."""
        self._recovery = plan.epoch
        """Newest epoch that changes the layers: this one, or a later one that recovers them."""
        self._in_vault: set[tuple[int, int, frozenset[int]]] = set()
        """(layer, version, ledger) of states (without ledger) and sums before that recovery."""
        self._entered = False
        self._lock = threading.Lock()
        self._acked, self._install_bundle, self._reported = 0, -1, False
        self._refused, self._updates = False, 0
        """`_refused`: whether the peer had no room for the first copies of this epoch.
        `_updates`: number of updates in this epoch."""

    def enter(self) -> None:
        """Publish the first copies of the epoch; later calls do nothing.

        The copies of older epochs stay until the first copies are whole (`Protected`).
        """
        if self._entered:
            return
        self._entered = True
        if self._states:
            self._publish_states()
        if self._every and any(r.ledger for r in self._replicas):
            self._publish_gradients()
        with self._lock:
            self._install_bundle = max(self._gradient_bundle, self._state_bundle)
        self.on_acked(0)

    def on_acked(self, bundle: int, kept: bool = True) -> None:
        """Record that `bundle` is acknowledged; `kept` is false if the peer had no room for it.

        Reports `Protected` once the epoch's first copies are whole, so that the older copies may be
        dropped. If the first copies were refused, the report waits for two updates, which make the
        older copies useless. Called from another thread.
        """
        if not kept:
            self._snapshots.refused(bundle)
        with self._lock:
            self._acked = max(self._acked, bundle)
            first = self._install_bundle < 0 or bundle <= self._install_bundle
            self._refused = self._refused or (first and not kept)
            missing = not self._shared or (self._refused and self._updates < USELESS_AFTER)
            whole = 0 <= self._install_bundle <= self._acked
            report = not self._reported and whole and not missing
            self._reported = self._reported or report
        if report:
            if self._refused:
                self._snapshots.retry()
            self._send(m.Protected(self._epoch))

    def settle(self) -> None:
        """Record that all holders have the micro-batches that the recovery restored at one."""
        if not self._shared:
            self._shared = True
            self.on_acked(0)

    def after_microbatch(self, step: int) -> None:
        """Called when a stage has collected a micro-batch: publish the copies that are due."""
        self._uncopied += 1
        if self._every and self._uncopied >= self._every:
            self._publish_gradients()
        if self.log is not None:
            self.log.flush(self._abandon)
        self.enter()

    def after_microbatches(self) -> None:
        """Called after the step's last micro-batch: publish the gradients not copied yet."""
        if self._every and self._uncopied:
            self._publish_gradients()

    def before_commit(self, step: int, reduced: Mapping[int, Tensor]) -> None:
        """Wait until the final gradients and the current states are safe.

        `reduced`: layer -> gradient for its update. Those of layers with tied tensors are copied,
        because such an update cannot be repeated from the layer's own gradients alone.
        """
        self.enter()
        tied = [r for r in self._replicas if r.index in self._tied]
        if self._copy_tied and tied:
            copies = items.reduced_gradients(tied, reduced, step)
            bundle = self._publisher.publish(
                copies, self._epoch, self._gradient_peer, self._abandon
            )
            self._gradient_bundle = max(self._gradient_bundle, bundle)
        if self._copy_final:
            sums = [part for replica in self._replicas for part in replica.parts]
            with contextlib.suppress(VaultFull):
                self._publisher.publish_gradients(sums, step, self._epoch, "", self._abandon)
        self._publisher.wait_acked(self._gradient_bundle, self._abandon)
        self._publisher.wait_acked(self._state_bundle, self._abandon)

    def before_update(
        self, reduced: Mapping[int, Tensor], clip: float, *, skipped: bool = False
    ) -> None:
        """Called after the commit: send the input of the update to the peer, under `replay`.

        The input is `clip` times `reduced`, which may change after this call. `skipped`: the update
        is left out. A slot is free, because `before_commit` has waited.
        """
        if self._replays:
            copies = (
                items.skipped_updates(self._replicas)
                if skipped
                else items.updates(self._replicas, reduced, clip)
            )
            bundle = self._publisher.publish(copies, self._epoch, self._state_peer, self._abandon)
            self._state_bundle = self._snapshots.sent(bundle, whole=False)

    def retire(self, replica: LayerReplica) -> None:
        """Called after the update of `replica`: clear its gradients, or hold its last ones."""
        if not self._hold_final:
            replica.clear()
            return
        _, before = self._finals.pop(replica.index, (0, None))
        self._finals[replica.index] = replica.version - 1, replica.set_aside(before)

    def after_update(self) -> None:
        """Called after the update of all layers: publish the states."""
        if self._states:
            self._publish_states(self._snapshots.due(self._replicas))
        self._updates += 1
        self.on_acked(0)

    def release(self, kept: Collection[int], epoch: int) -> None:
        """Let the recovery of `epoch` change the layers in `kept`; forget the others. Call after
        `flush`.

        If the recovery fails, `flush` publishes the changed layers as copies of `epoch`. So they
        replace no copies of this epoch, which the next recovery may need.
        """
        self._replicas = [replica for replica in self._replicas if replica.index in kept]
        self._finals.clear()
        self._recovery = epoch
        parts = [(r.index, r.version, part) for r in self._replicas for part in r.parts]
        self._in_vault = {(r.index, r.version, frozenset()) for r in self._replicas}
        self._in_vault |= {(layer, v, frozenset(part.ledger)) for layer, v, part in parts}

    def flush(self) -> None:
        """Called when the epoch ends: put the states and gradients not copied yet into the vault.

        If they do not fit, the recovery goes back to an older state or repeats micro-batches.
        """
        if self.log is not None:
            self.log.flush(None)
        try:
            self._flush()
        except VaultFull as error:
            log.warning("the layers of this worker do not fit into its vault: %s", error)
        self._publisher.settle()

    def _flush(self) -> None:
        publish, epoch, old = self._publisher.publish_gradients, self._recovery, self._in_vault
        states = [r for r in self._replicas if (r.index, r.version, frozenset()) not in old]
        self._publisher.publish_states(states, epoch, "")
        for replica in self._replicas:
            replica.cancel_rounds()
            step, final = self._finals.get(replica.index, (-1, None))
            if final is not None and step == replica.version - 1:
                publish([final], step, epoch, "")
        for version in sorted({r.version for r in self._replicas}):
            layers = [r for r in self._replicas if r.version == version]
            # Common sums go first: they may be overwritten first, since other holders have them.
            for sums in ([r.common for r in layers if r.common], layers):
                new = [s for s in sums if (s.index, version, frozenset(s.ledger)) not in old]
                publish(new, version, epoch, "")

    def is_sound(self, replica: LayerReplica) -> bool | None:
        """Return whether the replica is as after its last update; None: no copy of this version."""
        return self._publisher.is_sound(replica)

    @property
    def copied_in_update(self) -> bool:
        """Whether the newest copies were made in an update, before it ended."""
        return self._updates > 0 and self._publisher.copies_at_once

    @property
    def sending(self) -> bool:
        """Whether copies are on their way to the peer."""
        return self._publisher.traffic.busy

    def finish(self) -> None:
        """Called after the last step: wait until the last states are whole in their vaults."""
        self.settle()
        self.enter()
        if not self._states:
            self._state_peer = ""
            self._publish_states()
        self._publisher.wait_acked(self._state_bundle, self._abandon)

    def _publish_states(self, peer_layers: Collection[int] | None = None) -> None:
        """Publish all states; those of `peer_layers` (None: all) go to the peer."""
        bundle = self._publisher.publish_states(
            self._replicas, self._epoch, self._state_peer, peer_layers, self._abandon
        )
        self._state_bundle = self._snapshots.sent(max(self._state_bundle, bundle), whole=True)

    def _publish_gradients(self) -> None:
        step, peer = self._replicas[0].version, self._gradient_peer
        self._gradient_bundle = self._publisher.publish_gradients(
            self._replicas, step, self._epoch, peer, self._abandon
        )
        self._uncopied = 0
