"""When a worker's gradients and states are published, and what must be whole before a commit.

The scheme comes from the plan. Gradients: `stream:k` go to the peer's vault after every k micro-batches, and when the
last one is done; of `recompute` nothing goes anywhere, nor of `log`, which keeps the messages between stages on its own
node, nor of `reduce`: other holders of the layer have the sums (`elastic.worker.engine.incremental_allreduce`). State: `snapshot` goes to
the peer after every update, `replica` stays in the local vault (another pipeline holds the layer); with `replay` the
peer gets what every update takes, and whole states now and then (`rebase`). What was not published is when the epoch
ends, for those who will need it.
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
from elastic.worker.backup.activation_log import BoundaryLog
from elastic.worker.backup.publisher import Publisher
from elastic.worker.backup.snapshot_schedule import Rebase
from elastic.worker.model.layers import Tied
from elastic.worker.replica.gradient_sum import Part
from elastic.worker.replica.publishing import Summed
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import AbandonSignal

log = logging.getLogger(__name__)

USELESS_AFTER = 2
"""Updates after which an older epoch's copies lead nowhere: survivors keep two versions."""


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
        chunks: int = 1,
    ) -> None:
        """`chunks`: stages of this worker, which each pass every micro-batch on their own."""
        self._publisher, self._replicas, self._abandon, self._send = publisher, replicas, abandon, send
        self._epoch = plan.epoch
        self._tied = {layer for group in tied for layer, _ in group}
        peer = plan.peer_of(node) or ""
        gradients = gradients_of(plan.gradients)
        self._every = gradients.every * chunks
        """Backward passes between two copies of gradients; 0: no copies."""
        self._fresh = 0
        """Backward passes that are in the gradients and in no copy."""
        self._reduced = bool(self._every or gradients.rounds)
        """Whether shared tensors' reduced gradients are kept; under `reduce` each holder keeps its own."""
        self._settled = not gradients.rounds
        """Whether nothing of what the recovery brought is with one holder alone."""
        state = state_of(plan.state)
        self._states = state.name != NONE
        publisher.keeps_final = self._sharded = state.sharded
        self._gradient_peer = peer if self._every else ""
        self._state_peer = peer if state.away else ""
        self._replays = bool(self._state_peer) and state.updates
        self._rebase = Rebase(max(state.every, 1))
        self._published: dict[int, set[tuple[int, frozenset[int]]]] = {}
        """Layer -> (step, ledger) of its newest published gradients."""
        self._versions: dict[int, int] = {}
        self._gradient_bundle = self._state_bundle = 0
        held = all(replica.device.type == "cpu" for replica in replicas)
        """Host memory keeps what may be needed, rather than the vault, until the epoch ends."""
        self.log = BoundaryLog(publisher, plan.epoch, held=held) if plan.gradients == LOG else None
        """Keeps what is sent to other stages."""
        keeps = not self._every and (self._sharded or (self.log is not None and bool(self._state_peer)))
        self._holds = keeps and held and not gradients.rounds
        self._writes = keeps and not self._holds
        """The last gradients of a step outlive its update: until the new state is at every peer a loss leads back to
        the old one. They are held here, or written to the vault."""
        self._finals: dict[int, tuple[int, Part]] = {}
        """Layer: (step, its last gradients)."""
        self._entered = False
        self._lock = threading.Lock()
        self._acked, self._install_bundle, self._told = 0, -1, False
        self._refused, self._updates = False, 0
        """The peer had no room for what the epoch began with; updates made in this epoch."""

    def enter(self) -> None:
        """Publish what the epoch began with. Once; the old copies are kept until the agent has confirmed these."""
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
        """A bundle is whole, or (not `kept`) given up; called from the thread that reads orders.

        While this epoch's first copies are missing the older ones are not given away, until two updates have made them
        useless.
        """
        if not kept:
            self._rebase.given_up(bundle)
        with self._lock:
            self._acked = max(self._acked, bundle)
            first = self._install_bundle < 0 or bundle <= self._install_bundle
            self._refused = self._refused or (first and not kept)
            missing = not self._settled or (self._refused and self._updates < USELESS_AFTER)
            tell = not self._told and 0 <= self._install_bundle <= self._acked and not missing
            self._told = self._told or tell
        if tell:
            if self._refused:
                self._rebase.again()
            self._send(m.Protected(self._epoch))

    def settle(self) -> None:
        """Every holder has what the recovery gave to one of them."""
        if not self._settled:
            self._settled = True
            self.on_acked(0)

    def after_microbatch(self, step: int) -> None:
        """The layers of one stage have one more micro-batch in their gradients."""
        self._fresh += 1
        if self._every and self._fresh >= self._every:
            self._publish_gradients()
        if self.log is not None:
            self.log.flush(self._abandon)
        self.enter()

    def after_microbatches(self) -> None:
        """The last one of the step is done: what is in no copy goes beside the reduction."""
        if self._every and self._fresh:
            self._publish_gradients()

    def before_commit(self, step: int, reduced: Mapping[int, Tensor]) -> None:
        """Wait until the final gradients and the current state are where they must be.

        `reduced`: layer -> the gradient that its update will take; published for layers with shared tensors, whose
        update could not be repeated from their own gradients alone.
        """
        self.enter()
        tied = [r for r in self._replicas if r.index in self._tied]
        if self._reduced and tied:
            bundle = self._publisher.publish_reduced(
                tied, reduced, step, self._epoch, self._gradient_peer, self._abandon
            )
            self._gradient_bundle = max(self._gradient_bundle, bundle)
        if self._writes:
            mine = [part for replica in self._replicas for part in replica.parts]
            with contextlib.suppress(VaultFull):
                self._publisher.publish_gradients(mine, step, self._epoch, "", self._abandon)
        self._publisher.wait_acked(self._gradient_bundle, self._abandon)
        self._publisher.wait_acked(self._state_bundle, self._abandon)

    def before_update(self, reduced: Mapping[int, Tensor], clip: float) -> None:
        """The commit was made: what the update takes of `reduced` (layer -> gradient) and `clip` goes to the peer.

        Before the update, which may change what it takes; it has not to wait for a slot, as `before_commit` waited.
        """
        if self._replays:
            bundle = self._publisher.publish_updates(
                self._replicas, reduced, clip, self._epoch, self._state_peer, self._abandon
            )
            self._state_bundle = self._rebase.sent(bundle, whole=False)

    def retire(self, replica: LayerReplica) -> None:
        """The layer's update was made: its gradients are of no more use, or kept for as long as they may be."""
        if not self._holds:
            replica.clear()
            return
        _, before = self._finals.pop(replica.index, (0, None))
        self._finals[replica.index] = replica.version - 1, replica.set_aside(before)

    def after_update(self) -> None:
        if self._states:
            self._publish_states(self._rebase.due(self._replicas))
        self._updates += 1
        self.on_acked(0)

    def release(self, kept: Collection[int]) -> None:
        """After `flush`: only layers in `kept` are still held here."""
        self._replicas = [replica for replica in self._replicas if replica.index in kept]
        self._finals.clear()

    def flush(self) -> None:
        """Put everything into the local vault that is not there yet: the epoch is over. What finds no room there is not
        kept: training goes back, or runs micro-batches again."""
        if self.log is not None:
            self.log.flush(None)
        try:
            self._flush()
        except VaultFull as error:
            log.warning("what this worker holds does not fit into its vault: %s", error)
        self._publisher.settle()

    def _flush(self) -> None:
        states = [r for r in self._replicas if self._versions.get(r.index) != r.version]
        if states:
            self._publisher.publish_states(states, self._epoch, "")
        for replica in self._replicas:
            replica.recall()
            step, final = self._finals.get(replica.index, (-1, None))
            if final is not None and final.ledger and step == replica.version - 1:
                self._publisher.publish_gradients([final], step, self._epoch, "")
                del self._finals[replica.index]
        for version in sorted({r.version for r in self._replicas}):
            mine = [r for r in self._replicas if r.version == version]
            common = [part for r in mine for part in r.parts if part is not r]
            for parts in (common, mine):  # what others have too may be overwritten first, if ever
                new = [part for part in parts if part.ledger and not self._is_published(version, part)]
                if new:
                    self._publisher.publish_gradients(new, version, self._epoch, "")
                for part in new:
                    self._published.setdefault(part.index, set()).add((version, frozenset(part.ledger)))

    def _is_published(self, version: int, part: Summed) -> bool:
        return (version, frozenset(part.ledger)) in self._published.get(part.index, ())

    @property
    def sending(self) -> bool:
        """Copies are on their way to the peer."""
        return self._publisher.traffic.busy

    def finish(self) -> None:
        """All steps are done: the last state is in the local vault, and whole at the peer."""
        self.settle()
        self.enter()
        if not self._states:
            self._state_peer = ""
            self._publish_states()
        self._publisher.wait_acked(self._state_bundle, self._abandon)

    def _publish_states(self, peer_layers: Collection[int] | None = None) -> None:
        """Of `peer_layers` (None: all) to the peer."""
        bundle = self._publisher.publish_states(
            self._replicas, self._epoch, self._state_peer, peer_layers, self._abandon
        )
        self._state_bundle = self._rebase.sent(max(self._state_bundle, bundle), whole=True)
        self._versions = {r.index: r.version for r in self._replicas}

    def _publish_gradients(self) -> None:
        self._gradient_bundle = self._publisher.publish_gradients(
            self._replicas, self._replicas[0].version, self._epoch, self._gradient_peer, self._abandon
        )
        self._published = {r.index: {(r.version, frozenset(r.ledger))} for r in self._replicas}
        self._fresh = 0
