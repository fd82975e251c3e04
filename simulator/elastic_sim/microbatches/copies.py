"""Copies that a worker publishes during one epoch: the schemes of `elastic.planning.plan.schemes`.

A worker sends bundles of copies to its peer in order, over the node's uplink. At most two bundles
of gradients are in flight. All bundles must have arrived before a commit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from elastic.core.protocol import messages as m
from elastic.domain.types import (
    ACTIVATION,
    COTANGENT,
    GRADIENT,
    STATE,
    UPDATE,
    Assignment,
    Copy,
    Portion,
)
from elastic.planning.plan.schemes import LOG, NONE, gradients_of, portion_of, state_of
from elastic.planning.schedule.schedule import Action, Kind
from elastic_sim.microbatches.environment import Environment, Node

Ledger = frozenset[int]
EMPTY: Ledger = frozenset()
MAX_UNACKED = 2


class HeldLayers:
    """The layers of one worker, all at the same version, and the ledgers of their gradients."""

    def __init__(self) -> None:
        self.version = -1
        self.parts: dict[int, tuple[Ledger, Ledger]] = {}
        """By layer: ledger of the worker's own gradient, and of the sum that all holders share."""
        self._recovered: dict[int, Ledger] = {}
        """Micro-batches that the recovery gave to this holder alone, by layer."""

    def install(self, version: int, recovered: Mapping[int, Ledger]) -> None:
        """Hold layers at `version`, with the gradients that the recovery restored."""
        self.version, self._recovered = version, dict(recovered)
        self.parts = {layer: (ledger, EMPTY) for layer, ledger in recovered.items()}

    def ledger(self, layer: int) -> Ledger:
        """Return all micro-batches in the layer's gradients."""
        own, shared = self.parts[layer]
        return own | shared

    def unshared(self) -> bool:
        """Return whether a restored gradient is in no shared sum yet."""
        return any(self._recovered.get(la, EMPTY) & own for la, (own, _) in self.parts.items())

    def add(self, microbatch: int, layers: Iterable[int], covered: Mapping[int, Ledger]) -> None:
        """Add a micro-batch to the layers whose `covered` ledger lacks it."""
        for layer in layers:
            own, shared = self.parts[layer]
            if microbatch not in covered.get(layer, EMPTY):
                twice = f"micro-batch {microbatch} twice in layer {layer}"
                assert microbatch not in own | shared, twice
                self.parts[layer] = own | {microbatch}, shared

    def share(self, layer: int, union: Ledger) -> None:
        """Record that all holders have the sum over `union`."""
        own, shared = self.parts[layer]
        self.parts[layer] = own - union, shared | union

    def update(self) -> None:
        """Take the optimizer step: a new version with empty gradients."""
        self.version += 1
        self.parts = dict.fromkeys(self.parts, (EMPTY, EMPTY))
        self._recovered = {}


class CopyPublisher:
    """Puts a worker's copies into its own vault and its peer's, as the plan's schemes say."""

    def __init__(
        self,
        world: Environment,
        host: Node,
        held: HeldLayers,
        send: Callable[[Any], None],
        assignment: Assignment,
        stages: int,
    ) -> None:
        """`send` sends a message to the agent. `stages`: number of stages of this worker."""
        plan, node = assignment.plan, host.name
        self._world, self._host, self._held, self._send = world, host, held, send
        self._plan, self._node = plan, node
        self._layers = world.profile.layers
        gradients, self._state = gradients_of(plan.gradients), state_of(plan.state)
        self._every = gradients.every * stages
        self._logs = gradients.name == LOG
        self._peer = plan.peer_of(node) or ""
        self._keeps_finals = not self._every and (self._state.sharded or self._logs)
        self._unpublished, self._entered, self._protected = 0, False, False
        self.settled = not gradients.rounds
        """Whether all restored gradients are in shared sums."""
        self._unacked = {GRADIENT: 0, STATE: 0}
        self._initial_unacked = 0
        """Number of bundles in flight up to the last one of the epoch's initial copies."""
        self._published: dict[int, set[tuple[int, Ledger]]] = {}
        self._versions: dict[int, int] = {}
        self._finals: dict[int, tuple[int, Ledger]] = {}
        self._waiting: Callable[[], None] | None = None
        self.over = False

    def enter(self) -> None:
        """Publish the state and gradients with which the epoch began, once."""
        if self._entered:
            return
        self._entered = True
        if self._state.name != NONE:
            self._publish_states()
        if self._every and any(self._held.parts.values()):
            self._publish_gradients()
        self._initial_unacked = sum(self._unacked.values())
        self.report_protected()

    def report_protected(self) -> None:
        """Report once that the epoch's initial copies are in place."""
        arrived = self._entered and self._initial_unacked <= 0 and self.settled
        if arrived and not self._protected and not self.over:
            self._protected = True
            self._send(m.Protected(self._plan.epoch))

    def after_microbatch(self) -> float:
        """Publish gradients if they are due; return the worker's seconds of copying."""
        self._unpublished += 1
        due = bool(self._every) and self._unpublished >= self._every
        seconds = self._publish_gradients() if due else 0.0
        self.enter()
        return seconds

    def after_microbatches(self) -> None:
        """Publish the remaining gradients of a step."""
        if self._every and self._unpublished:
            self._publish_gradients()
        self.enter()

    def before_update(self, updated: Collection[int]) -> None:
        """Publish updates after the commit of a step."""
        held = self._held
        if self._keeps_finals:
            self._finals = {la: (held.version, held.ledger(la)) for la in updated}
        if self._state.updates:
            self._publish([self._copy(UPDATE, layer, held.version) for layer in updated], STATE)

    def after_update(self) -> float:
        """Publish states of the new version; return the worker's seconds of copying."""
        if self._state.name == NONE:
            return 0.0
        every, version = max(self._state.every, 1), self._held.version
        return self._publish_states([la for la in self._held.parts if (version + la) % every == 0])

    def log_message(self, action: Action, first: int, last: int) -> None:
        """Keep a message to another stage if messages are logged."""
        if self._logs:
            forward = action.kind is Kind.SEND_F
            kind, layer = (ACTIVATION, last) if forward else (COTANGENT, first)
            nbytes = self._layers[layer - 1].output_bytes
            copy = self._copy(kind, layer, self._held.version, frozenset({action.microbatch}))
            self._host.vault.add(replace(copy, nbytes=nbytes))

    def flush(self) -> None:
        """Put all that is in no vault yet into the node's own vault, at the end of the epoch."""
        held, keep = self._held, self._host.vault.add
        for layer in held.parts:
            if self._versions.get(layer) != held.version:
                keep(self._copy(STATE, layer, held.version))
            step, final = self._finals.get(layer, (-1, EMPTY))
            if final and step == held.version - 1:
                keep(self._copy(GRADIENT, layer, step, final))
            for copy in self._unpublished_gradients(layer):
                keep(copy)

    @property
    def full(self) -> bool:
        """Whether the next bundle of gradients would have to wait."""
        due = bool(self._every) and self._unpublished + 1 >= self._every
        return due and self._unacked[GRADIENT] >= MAX_UNACKED

    @property
    def clear(self) -> bool:
        """Whether all bundles have arrived."""
        return not any(self._unacked.values())

    def wait(self, action: Callable[[], None]) -> None:
        """Call `action` when the next bundle has arrived."""
        self._waiting = action

    def _arrived(self, kind: str) -> None:
        self._unacked[kind] -= 1
        self._initial_unacked -= 1
        if self.over:
            return
        self.report_protected()
        if self._waiting is not None:
            action, self._waiting = self._waiting, None
            action()

    def _publish_gradients(self) -> float:
        held = self._held
        copies = [copy for layer in held.parts for copy in self._unpublished_gradients(layer)]
        for layer, parts in held.parts.items():
            self._published[layer] = {(held.version, part) for part in parts}
        self._unpublished = 0
        return self._publish(copies, GRADIENT)

    def _unpublished_gradients(self, layer: int) -> list[Copy]:
        version, known = self._held.version, self._published.get(layer, ())
        parts = [p for p in self._held.parts[layer] if p and (version, p) not in known]
        return [self._copy(GRADIENT, layer, version, part) for part in parts]

    def _publish_states(self, away: Collection[int] | None = None) -> float:
        """Publish all states; `away`: layers that are also sent to the peer; None: all."""
        held = self._held
        copies = [self._copy(STATE, layer, held.version) for layer in held.parts]
        self._versions = dict.fromkeys(held.parts, held.version)
        sent = [c for c in copies if self._state.away and (away is None or c.layer in away)]
        local = [copy for copy in copies if copy not in sent]
        for copy in local:
            self._host.vault.add(copy)
        return self._publish(sent, STATE) + self._copying_s(local)

    def _publish(self, copies: list[Copy], kind: str) -> float:
        """Put copies into the own vault and send them to the peer; return seconds of copying."""
        for copy in copies:
            self._host.vault.add(copy)
        if copies and self._peer:
            self._unacked[kind] += 1
            self._host.replicate(copies, self._peer, lambda: self._arrived(kind))
        return self._copying_s(copies)

    def _copying_s(self, copies: list[Copy]) -> float:
        rate = self._world.copy_bytes_per_s
        return sum(copy.nbytes for copy in copies) / rate if rate > 0 else 0.0

    def _copy(self, kind: str, layer: int, step: int, indices: Ledger = EMPTY) -> Copy:
        portion: Portion = (0, 1)
        if kind in (STATE, UPDATE):
            portion = portion_of(self._plan, self._node, layer)
        nbytes = 0
        if layer < len(self._layers):
            spec = self._layers[layer]
            nbytes = self._world.state_bytes(layer) if kind == STATE else spec.gradient_bytes
        of_loss = kind == GRADIENT and layer == len(self._layers) - 1
        return Copy(
            kind=kind,
            layer=layer,
            shard=0,
            step=step,
            epoch=self._plan.epoch,
            owner=self._node,
            sequence=self._world.number(),
            nbytes=nbytes // portion[1],
            checksum="",
            microbatches=indices,
            losses=tuple((i, float(i)) for i in sorted(indices)) if of_loss else (),
            node=self._node,
            portion=portion,
        )
