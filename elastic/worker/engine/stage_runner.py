"""Runs one worker's list of schedule actions: compute, send, receive, and collect gradients.

Receives are posted ahead of their use, so that transfers overlap with compute. Sends do not wait
for the neighbour. Before each compute action the runner checks whether the epoch was abandoned.

Ledgers are consistent even if `StageRunner.run` raises: a gradient enters the ledgers only after
the whole backward pass of its micro-batch, for all layers of the stage at once. A worker has one
stage, or several stages under the interleaved schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from elastic.domain.errors import DivergenceError, VaultError
from elastic.domain.types import ACTIVATION, COTANGENT
from elastic.planning.schedule.schedule import Action, Kind
from elastic.worker.backup.activation_log import LoggedMessage
from elastic.worker.engine.expected_messages import ExpectedMessages, message_tag
from elastic.worker.engine.microbatch_cost import UNKNOWN_SIZE, TypicalSize
from elastic.worker.engine.stage import LocalStage
from elastic.worker.model.microbatch import LazyFields, Microbatch
from elastic.worker.model.values import Message
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned
from elastic.worker.transport.links import Links


class Hooks(Protocol):
    """Callbacks of `StageRunner.run`, called in the main thread. Their exceptions end the run."""

    def before(self, action: Action) -> None:
        """Called before each action."""

    def on_backward(self, index: int) -> None:
        """Called when all layers of a stage have collected micro-batch `index`.

        The gradient of the stage's input has been sent by then.
        """


class GroupAgreement:
    """Lets all ranks of a tensor-parallel group leave an epoch at the same point.

    The ranks run the same collectives inside every layer, so a rank that stopped alone would leave
    the others blocked. Therefore every rank calls `check` before each compute action. The ranks
    then exchange whether they must leave; if any rank must, all ranks raise.

    A rank may also have to leave between two checks: a wait was abandoned, a copy found no room.
    The others then wait for this rank in an exchange. As a context manager, the agreement takes
    part in that exchange, once even if nested. Wrap code that may raise DivergenceError,
    EpochAbandoned or VaultError while the others train.

    Every rank takes part in the same exchanges of an epoch, and the last one is the first in which
    a rank leaves. So a rank that has not taken part in it calls `leave` at the end: for example, it
    failed in its installation, and the others wait for it before their first action. Or a link of
    this rank failed: it reports that first, because its links may stay open, and then the others
    may wait for it in a collective, until a newer epoch is announced.

    Args:
        sync: sync(flag) -> maximum over the group; None without tensor parallelism.
    """

    def __init__(self, sync: Callable[[bool], bool] | None, abandon: AbandonSignal) -> None:
        self._sync, self._abandon = sync, abandon
        self._settled = sync is None

    def check(self) -> None:
        """Raise EpochAbandoned on all ranks of the group if any of them must leave."""
        if self._sync is None:
            self._abandon.check()
        elif self._sync(self._abandon.is_set()):
            self._settled = True
            text = "another rank of the tensor-parallel group leaves the epoch"
            raise EpochAbandoned(self._abandon.reason or text)

    def all_true(self, flag: bool) -> bool:
        """Return whether `flag` is true on all ranks of the group. Raises as `check` does."""
        self.check()
        return flag if self._sync is None else not self._sync(not flag)

    def leave(self) -> None:
        """Take part in the last exchange, unless this rank has.

        Every rank calls this at the end of an epoch, after it has reported its own error: another
        rank may be installing, and leave only when a newer epoch is announced.
        """
        if not self._settled:
            with contextlib.suppress(RuntimeError):  # a rank has died; the agent ends this one
                self._settle()

    def _settle(self) -> None:
        self._settled = True
        assert self._sync is not None
        self._sync(True)

    def __enter__(self) -> GroupAgreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        leaves = isinstance(error, (DivergenceError, EpochAbandoned, VaultError))
        if leaves and not self._settled:
            self._settle()


class StageRunner:
    """Runs a worker's stages for one epoch.

    Args:
        stages: the stages of this worker, in model order.
        links: the epoch's links.
        n_microbatches: micro-batches M of the whole step.
        typical_weight: expected weight W of a micro-batch. A micro-batch of weight w has the
            gradient of its loss times w / (M W).
        typical_size: size of the micro-batch to which `cost` compares the others.
        data: data(step, index) -> the micro-batch's fields. The first and the last stage call it
            before the forward pass, others when a layer reads a field.
        agreement: the agreement with the tensor-parallel group; None: this rank is alone.
        keep: called with every message that is sent; None: messages are not logged.
    """

    def __init__(
        self,
        stages: Sequence[LocalStage],
        links: Links,
        *,
        n_microbatches: int,
        typical_weight: float = 1.0,
        typical_size: TypicalSize = UNKNOWN_SIZE,
        data: Callable[[int, int], Microbatch],
        agreement: GroupAgreement | None = None,
        keep: Callable[[LoggedMessage], None] | None = None,
    ) -> None:
        self._keep_sent = keep
        self._all_stages, self._links = stages, links
        self._stages: dict[int, LocalStage] = {}
        """The stages of this run, by number."""
        self._scale, self._data = 1.0 / n_microbatches, data
        self._typical_weight, self._typical_size = typical_weight, typical_size
        self._weights: dict[int, float] = {}
        """Weights of the micro-batches that the model's last stage here has begun."""
        self.agreement = agreement or GroupAgreement(None, links.abandon)
        self.step = -1
        """The step that runs, or ran last."""
        self._counts = False
        """Whether `cost` may count: not in an epoch's first step, which a recovery waits for."""
        self.started: set[int] = set()
        """Micro-batches of this step whose forward pass has begun here."""
        self.sent: set[int] = set()
        """Micro-batches of this step whose activations the first stage here has sent."""
        self.read_first: dict[int, int] = {}
        self.read_last: dict[int, int] = {}
        """Micro-batch -> hash of its fields, of the newest run, as the model's first and its last
        stage have read it; empty without such a stage."""
        self._clear()

    def _clear(self) -> None:
        for stage in self._stages.values():
            stage.clear()
        self._weights.clear()
        self._received: dict[Action, Message] = {}
        self._outgoing: dict[Action, Message] = {}
        self._uncollected: tuple[LocalStage, int] | None = None
        """Stage and micro-batch whose gradients are in `.grad` but not in the layers' sums."""

    def run(
        self,
        step: int,
        actions: Sequence[Action],
        skip: Mapping[int, frozenset[int]],
        hooks: Hooks,
        given: Mapping[Action, Message] | None = None,
        stages: Sequence[LocalStage] | None = None,
    ) -> None:
        """Run `actions` of `step`. Returns when all gradients are collected and messages sent.

        Args:
            skip: layer -> micro-batches that a ledger has already; their gradients are dropped.
            given: messages that no neighbour sends, by the action that would receive them.
            stages: stages with some of the layers, for a partial replay; None: all stages.

        Raises:
            EpochAbandoned: the epoch was abandoned, here or on another rank of the
                tensor-parallel group.
            LinkFailed: a neighbour disconnected.
        """
        if step != self.step:
            self._counts = self.step >= 0
            self.step, self.started, self.sent = step, set(), set()
        stages = stages or self._all_stages
        self._first, self._stages = stages[0], {stage.number: stage for stage in stages}
        self._clear()
        self.read_first, self.read_last = {}, {}
        self._received.update(given or {})
        try:
            with self.agreement:
                self._expected = ExpectedMessages(actions, self._stages, self._links)
                for action in actions:
                    if action.kind.computes or action.kind.receives:
                        self._collect_and_notify(skip, hooks)
                    hooks.before(action)
                    self._act(step, action)
                self._collect_and_notify(skip, hooks)
                self._links.flush()
        finally:
            self._collect(skip)
            self._clear()

    def cost(self, action: Action) -> float:
        """Return the expected cost of the micro-batch of an action that has just computed, relative
        to one of typical size. After the first forward passes of different sizes, the stage counts
        operations. 0: the pass was empty, as the last stage's backward pass without weight. Raises
        EpochAbandoned."""
        stage = self._stages[action.stage]
        empty = stage.ends and self._weights.get(action.microbatch) == 0.0
        if empty and action.kind is not Kind.F:
            return 0.0
        sizes = stage.sizes.get(action.microbatch, ())
        counts = self._counts and action.kind is Kind.F and self._typical_size.tokens
        if counts and sizes and stage.cost.lacks(sizes):
            self.agreement.check()
            stage.count(action.microbatch)
        return stage.cost.relative(sizes, self._typical_size)

    def _collect_and_notify(self, skip: Mapping[int, frozenset[int]], hooks: Hooks) -> None:
        """Collect the last backward pass, if it is not collected yet, and call `on_backward`.

        Called after the sends that follow the pass, because the neighbour waits for them.
        """
        index = self._collect(skip)
        if index is not None:
            hooks.on_backward(index)

    def _collect(self, skip: Mapping[int, frozenset[int]]) -> int | None:
        """Add the last backward pass to the layers' sums; return its micro-batch.

        Returns None if no backward pass is left to collect.
        """
        uncollected, self._uncollected = self._uncollected, None
        if uncollected is None:
            return None
        stage, index = uncollected
        stage.collect(index, skip)
        return index

    def _act(self, step: int, action: Action) -> None:
        stage, m = self._stages[action.stage], action.microbatch
        if action.kind.computes:
            # First, so that all ranks of the tensor-parallel group leave at the same exchange.
            self._links.check()
            self.agreement.check()
        match action.kind:
            case Kind.F:
                self._forward(stage, step, action)
            case Kind.B:
                self._queue_gradient(stage, action, stage.backward(m, self._gradient(action)))
                self._uncollected = stage, m
            case Kind.INPUT:
                gradient = stage.backward_input(m, self._gradient(action))
                self._queue_gradient(stage, action, gradient)
            case Kind.WEIGHT:
                stage.backward_weight(m)
                self._uncollected = stage, m
            case Kind.RECV_F | Kind.RECV_B:
                self._received[action] = self._expected.take(action)
            case Kind.SEND_F:
                assert stage.following is not None
                boundary = stage.layers[-1].index + 1
                self._send(action, stage.following, ACTIVATION, boundary, step)
                if stage is self._first:
                    self.sent.add(m)
            case Kind.SEND_B:
                assert stage.previous is not None
                self._send(action, stage.previous, COTANGENT, stage.layers[0].index, step)

    def _send(self, action: Action, rank: int, kind: str, layer: int, step: int) -> None:
        message = self._outgoing.pop(action)
        if self._keep_sent is not None:  # before: a neighbour that is lost now will be replaced
            self._keep_sent(LoggedMessage(kind, layer, step, action.microbatch, message))
        self._links.send(message, rank, message_tag(action))

    def _forward(self, stage: LocalStage, step: int, action: Action) -> None:
        m = action.microbatch
        if stage is self._first:
            self.started.add(m)
        fields = LazyFields(lambda: self._read(stage, step, m))
        if stage.begins or stage.ends:
            fields.read()
        received = self._take_received(Kind.RECV_F, action)
        weight = self._weights.get(m, 1.0)
        output = stage.forward(Microbatch(step, m, fields), received, weight)
        if stage.following is not None:
            self._outgoing[Action(Kind.SEND_F, m, action.stage)] = output

    def _read(self, stage: LocalStage, step: int, index: int) -> Mapping[str, Tensor]:
        """Return the fields of a micro-batch; note their hash, and the micro-batch's weight."""
        found = self._data(step, index)
        if stage.begins:
            self.read_first[index] = found.digest
        if stage.ends:
            self.read_last[index], self._weights[index] = found.digest, found.weight
        return found.fields

    def _take_received(self, kind: Kind, action: Action) -> Message | None:
        """Return the received or given message that is the input of `action`; None: no message."""
        message = self._received.pop(Action(kind, action.microbatch, action.stage), None)
        return None if message is None else message.to(self._links.device)

    def _gradient(self, action: Action) -> Message | float:
        """Return the gradient of the stage's output: the next stage's, or w / (M W) times the loss
        scale."""
        received = self._take_received(Kind.RECV_B, action)
        if received is not None:
            return received
        scale = self._scale * self._stages[action.stage].layers[-1].loss_scale.value
        return scale * (self._weights[action.microbatch] / self._typical_weight)

    def _queue_gradient(self, stage: LocalStage, action: Action, gradient: Message | None) -> None:
        """Keep the gradient of the stage's input until the action that sends it."""
        if gradient is not None and stage.previous is not None:
            self._outgoing[Action(Kind.SEND_B, action.microbatch, action.stage)] = gradient
