"""DOC"""

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
from elastic_sim.microbatches.environment import Environment, Host

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


MOST_UNACKED = 2


class Copies:
    def __init__(
        self,
        world: Environment,
        host: Host,
        held: HeldLayers,
        say: Callable[[Any], None],
        assignment: Assignment,
        chunks: int,
    ) -> None:
        """`say` sends a message to the agent. `chunks`: stages of this worker."""
        plan, node = assignment.plan, host.name
        self._world, self._host, self._held, self._say = world, host, held, say
        self._plan, self._node = plan, node
        self._layers = world.profile.layers
        gradients, self._state = gradients_of(plan.gradients), state_of(plan.state)
        self._every, self._rounds = gradients.every * chunks, gradients.rounds
        self._logs = gradients.name == LOG
        self._peer = plan.peer_of(node) or ""
        self._keeps_finals = not self._every and (self._state.sharded or self._logs)
        self._fresh, self._entered, self._told, self.settled = 0, False, False, not self._rounds
        self._unacked = {GRADIENT: 0, STATE: 0}
        self._install = 0
        """Bundles up to those of what the epoch began with that have not arrived."""
        self._published: dict[int, set[tuple[int, Ledger]]] = {}
        self._versions: dict[int, int] = {}
        self._finals: dict[int, tuple[int, Ledger]] = {}
        self._waiting: Callable[[], None] | None = None
        self.over = False

    # ---- occasions ----

    def enter(self) -> None:
        """What the epoch began with."""
        if self._entered:
            return
        self._entered = True
        if self._state.name != NONE:
            self._publish_states()
        if self._every and any(self._held.parts.values()):
            self._publish_gradients()
        self._install = sum(self._unacked.values())
        self.tell()

    def tell(self) -> None:
        if (
            self._entered
            and not self._told
            and self._install <= 0
            and self.settled
            and not self.over
        ):
            self._told = True
            self._say(m.Protected(self._plan.epoch))

    def after_microbatch(self) -> float:
        """Return the seconds that the worker copies."""
        self._fresh += 1
        due = bool(self._every) and self._fresh >= self._every
        seconds = self._publish_gradients() if due else 0.0
        self.enter()
        return seconds

    def after_microbatches(self) -> None:
        if self._every and self._fresh:
            self._publish_gradients()
        self.enter()

    def before_update(self, updated: Collection[int]) -> None:
        """The commit of the step was made; its gradients are not needed any more, or kept."""
        held = self._held
        if self._keeps_finals:
            self._finals = {la: (held.version, held.ledger(la)) for la in updated}
        if self._state.updates:
            copies = [self._copy(UPDATE, layer, held.version) for layer in updated]
            self._publish(copies, STATE)

    def after_update(self) -> float:
        """States of the new version; return the seconds that the worker copies."""
        if self._state.name == NONE:
            return 0.0
        every = max(self._state.every, 1)
        version = self._held.version
        return self._publish_states([la for la in self._held.parts if (version + la) % every == 0])

    def sent(self, action: Action, first: int, last: int) -> None:
        """A message to another stage was handed on."""
        if self._logs:
            forward = action.kind is Kind.SEND_F
            kind, layer = (ACTIVATION, last) if forward else (COTANGENT, first)
            nbytes = self._layers[layer - 1].output_bytes
            copy = self._copy(kind, layer, self._held.version, frozenset({action.microbatch}))
            self._host.vault.add(replace(copy, nbytes=nbytes))

    def flush(self) -> None:
        """Everything that is in no vault yet goes into the own one: the epoch is over."""
        held = self._held
        for layer in held.parts:
            if self._versions.get(layer) != held.version:
                self._keep(self._copy(STATE, layer, held.version))
            step, final = self._finals.get(layer, (-1, frozenset[int]()))
            if final and step == held.version - 1:
                self._keep(self._copy(GRADIENT, layer, step, final))
            for part in held.parts[layer]:
                if part and (held.version, part) not in self._published.get(layer, ()):
                    self._keep(self._copy(GRADIENT, layer, held.version, part))

    # ---- waiting ----

    @property
    def full(self) -> bool:
        """The next copy of gradients would have to wait."""
        return (
            self._unacked[GRADIENT] >= MOST_UNACKED
            and bool(self._every)
            and self._fresh + 1 >= self._every
        )

    @property
    def clear(self) -> bool:
        """Everything is where it must be."""
        return not any(self._unacked.values())

    def wait(self, action: Callable[[], None]) -> None:
        """Do it when the next bundle has arrived."""
        self._waiting = action

    def _arrived(self, kind: str) -> None:
        self._unacked[kind] -= 1
        self._install -= 1
        if self.over:
            return
        self.tell()
        if self._waiting is not None:
            action, self._waiting = self._waiting, None
            action()

    # ---- copies ----

    def _publish_gradients(self) -> float:
        held = self._held
        copies = [
            self._copy(GRADIENT, layer, held.version, part)
            for layer, parts in held.parts.items()
            for part in parts
            if part and (held.version, part) not in self._published.get(layer, ())
        ]
        for layer, parts in held.parts.items():
            self._published[layer] = {(held.version, part) for part in parts}
        self._fresh = 0
        return self._publish(copies, GRADIENT)

    def _publish_states(self, away: Collection[int] | None = None) -> float:
        held = self._held
        copies = [self._copy(STATE, layer, held.version) for layer in held.parts]
        self._versions = dict.fromkeys(held.parts, held.version)
        sent = [c for c in copies if self._state.away and (away is None or c.layer in away)]
        for copy in copies:
            if copy not in sent:
                self._keep(copy)
        return self._publish(sent, STATE) + self._seconds([c for c in copies if c not in sent])

    def _publish(self, copies: list[Copy], kind: str) -> float:
        """Into the own vault, and on to the peer's. Return the seconds that the worker copies."""
        for copy in copies:
            self._keep(copy)
        if copies and self._peer:
            self._unacked[kind] += 1
            self._host.replicate(copies, self._peer, lambda: self._arrived(kind))
        return self._seconds(copies)

    def _seconds(self, copies: list[Copy]) -> float:
        rate = self._world.copy_bytes_per_s
        return sum(copy.nbytes for copy in copies) / rate if rate > 0 else 0.0

    def _keep(self, copy: Copy) -> None:
        self._host.vault.add(copy)

    def _copy(self, kind: str, layer: int, step: int, indices: Ledger = frozenset()) -> Copy:
        spec, last = (
            self._layers[layer] if layer < len(self._layers) else None,
            len(self._layers) - 1,
        )
        portion: Portion = (0, 1)
        if kind in (STATE, UPDATE):
            portion = portion_of(self._plan, self._node, layer)
        nbytes = 0
        if spec is not None:
            nbytes = spec.gradient_bytes if kind != STATE else spec.param_bytes + spec.state_bytes
        if kind == GRADIENT and layer == last:
            losses = tuple((i, float(i)) for i in sorted(indices))
        else:
            losses = ()
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
            losses=losses,
            node=self._node,
            portion=portion,
        )
