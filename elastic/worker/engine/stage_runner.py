"""Runs one worker's action list: compute, hand on, take over, and add finished micro-batches to the ledgers.

Receives are posted ahead of need, so that a transfer runs beside compute; sends never wait for the neighbour.
Between two compute actions the runner looks whether the epoch was abandoned. What a layer has in its ledger
when `run` raises is whole: gradients enter it only after a micro-batch's backward pass (all of its parts), and all
layers of the stage take it in one go. A worker has one stage, or several under the interleaved schedule.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from elastic.domain.errors import FieldError, VaultError
from elastic.domain.types import ACTIVATION, COTANGENT
from elastic.planning.schedule.schedule import Action, Kind
from elastic.worker.backup.activation_log import LoggedMessage
from elastic.worker.engine.stage import Chunk
from elastic.worker.model.layers import Microbatch
from elastic.worker.transport.cancellation import Abandon, EpochAbandoned, LinkFailed
from elastic.worker.transport.links import Links, Receive

AHEAD = 2
"""Receives posted in advance, per neighbour."""


class Hooks(Protocol):
    """Called in the main thread; an exception from a hook ends the run."""

    def before(self, action: Action) -> None:
        """`action` comes next; `action.kind.receives` tells waiting from computing."""

    def on_backward(self, index: int) -> None:
        """All layers of one stage hold micro-batch `index`; the previous stage has been sent its gradient."""


class Agreement:
    """All ranks of a tensor-parallel group leave an epoch at the same point, or none does.

    The ranks run the same collectives inside every layer, so one that stopped alone would leave the others
    hanging. Therefore each calls `check` before every compute action: `sync` is a maximum over the group of
    "I must leave". A rank that has to leave for another reason (a failed link, an abandoned wait, no room for a
    copy) owes the others one such call. This context manager pays it, and is the only place that does: wrap whatever
    may raise EpochAbandoned, LinkFailed or VaultError. It may be nested; the debt is paid once.
    """

    def __init__(self, sync: Callable[[bool], bool] | None, abandon: Abandon) -> None:
        self._sync, self._abandon = sync, abandon
        self._settled = sync is None

    def check(self) -> None:
        """Raise EpochAbandoned on all ranks of the group if any of them must leave."""
        if self._sync is None:
            self._abandon.check()
        elif self._sync(self._abandon.is_set()):
            self._settled = True
            raise EpochAbandoned(
                self._abandon.reason or "another rank of the tensor-parallel group leaves the epoch"
            )

    def all_say(self, yes: bool) -> bool:
        """Whether all ranks of the group say yes. Raises as `check` does, on all of them."""
        self.check()
        return yes if self._sync is None else not self._sync(not yes)

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (EpochAbandoned, LinkFailed, VaultError)) and not self._settled:
            self._settled = True
            assert self._sync is not None
            self._sync(True)


class _Expected:
    """The messages of one neighbour, in order, the next `AHEAD` of them posted."""

    def __init__(self, actions: Iterable[Action], post: Callable[[Action], Receive]) -> None:
        self._left, self._post = deque(actions), post
        self._posted: deque[Receive] = deque()
        self._top_up()

    def _top_up(self) -> None:
        while self._left and len(self._posted) < AHEAD:
            self._posted.append(self._post(self._left.popleft()))

    def take(self) -> torch.Tensor:
        tensor = self._posted.popleft().wait()
        self._top_up()
        return tensor


class StageRunner:
    """Runs a worker's stages for one epoch.

    Args:
        chunks: the stages of this worker, in model order.
        links: the epoch's links.
        n_microbatches: M of the whole step; every loss counts 1/M.
        tp_sync: maximum over the tensor-parallel group of a flag; None without one.
        data: fields of micro-batch (step, index); asked for on the first and the last stage only.
        abandon: the epoch's flag.
        keep: hears of everything that is sent.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        links: Links,
        *,
        n_microbatches: int,
        data: Callable[[int, int], Microbatch],
        abandon: Abandon,
        tp_sync: Callable[[bool], bool] | None = None,
        keep: Callable[[LoggedMessage], None] | None = None,
    ) -> None:
        self._keep_sent = keep
        self._chunks = {chunk.number: chunk for chunk in chunks}
        self._first, self._links = chunks[0], links
        self._scale, self._data = 1.0 / n_microbatches, data
        self.agreement = Agreement(tp_sync, abandon)
        self.started: set[int] = set()
        """Micro-batches of the current step whose forward pass was begun here."""
        self.sent: set[int] = set()
        """Micro-batches of the current step whose activations this worker's first stage handed on."""
        self._forget()

    def _forget(self) -> None:
        for chunk in self._chunks.values():
            chunk.forget()
        self._received: dict[Action, torch.Tensor] = {}
        self._outgoing: dict[Action, torch.Tensor] = {}
        self._passed: tuple[Chunk, int] | None = None
        """Stage and micro-batch whose gradients lie in the parameters' `.grad`, not yet in the layers' sums."""

    def run(
        self,
        step: int,
        actions: Sequence[Action],
        skip: Mapping[int, frozenset[int]],
        hooks: Hooks,
        given: Mapping[Action, torch.Tensor] | None = None,
    ) -> None:
        """Run `actions` of `step`. `skip[layer]`: micro-batches that some ledger already has for that layer.
        `given`: messages that no neighbour sends, by the action that would receive them.

        Returns when every gradient is in the ledgers and every message is gone.

        Raises:
            EpochAbandoned: the epoch's flag was set, here or on another rank of the tensor-parallel group.
            LinkFailed: a neighbour went away.
        """
        self.started, self.sent = set(), set()
        self._forget()
        self._received.update(given or {})
        try:
            with self.agreement:
                self._expect(actions)
                for action in actions:
                    if action.kind.computes or action.kind.receives:
                        self._finish(skip, hooks)
                    hooks.before(action)
                    self._act(step, action)
                self._finish(skip, hooks)
                self._links.flush()
        finally:
            self._collect(skip)
            self._forget()

    def _finish(self, skip: Mapping[int, frozenset[int]], hooks: Hooks) -> None:
        """After the sends that follow a backward pass: the neighbour waits for those, nobody for this."""
        index = self._collect(skip)
        if index is not None:
            hooks.on_backward(index)

    def _collect(self, skip: Mapping[int, frozenset[int]]) -> int | None:
        """Add the last backward pass to the layers' sums, if that is not done yet. Return its micro-batch."""
        passed, self._passed = self._passed, None
        if passed is None:
            return None
        chunk, index = passed
        chunk.collect(index, skip)
        return index

    def _expect(self, actions: Sequence[Action]) -> None:
        incoming: dict[int, list[Action]] = defaultdict(list)
        for action in actions:
            chunk = self._chunk(action)
            if action.kind.receives:
                incoming[self._sender(chunk, action)].append(action)
        self._expected = {
            rank: _Expected(found, lambda action, rank=rank: self._links.recv(rank, _tag(action)))  # type: ignore[misc]
            for rank, found in incoming.items()
        }

    def _chunk(self, action: Action) -> Chunk:
        chunk = self._chunks.get(action.stage)
        if chunk is None:
            raise FieldError("actions", str(action), f"this worker has stages {sorted(self._chunks)}")
        return chunk

    @staticmethod
    def _sender(chunk: Chunk, action: Action) -> int:
        rank = chunk.previous if action.kind is Kind.RECV_F else chunk.following
        if rank is None:
            raise FieldError("actions", str(action), "this stage has no neighbour on that side")
        return rank

    def _act(self, step: int, action: Action) -> None:
        chunk, m = self._chunk(action), action.microbatch
        if action.kind.computes:
            self.agreement.check()
        match action.kind:
            case Kind.F:
                self._forward(chunk, step, action)
            case Kind.B:
                self._keep(chunk, action, chunk.backward(m, self._gradient(action)))
                self._passed = chunk, m
            case Kind.INPUT:
                self._keep(chunk, action, chunk.backward_input(m, self._gradient(action)))
            case Kind.WEIGHT:
                chunk.backward_weight(m)
                self._passed = chunk, m
            case Kind.RECV_F | Kind.RECV_B:
                self._received[action] = self._expected[self._sender(chunk, action)].take()
            case Kind.SEND_F:
                assert chunk.following is not None
                self._send(action, chunk.following, ACTIVATION, chunk.layers[-1].index + 1, step)
                if chunk is self._first:
                    self.sent.add(m)
            case Kind.SEND_B:
                assert chunk.previous is not None
                self._send(action, chunk.previous, COTANGENT, chunk.layers[0].index, step)

    def _send(self, action: Action, rank: int, kind: str, layer: int, step: int) -> None:
        tensor = self._outgoing.pop(action)
        self._links.send(tensor, rank, _tag(action))
        if self._keep_sent is not None:
            self._keep_sent(LoggedMessage(kind, layer, step, action.microbatch, tensor.detach()))

    def _forward(self, chunk: Chunk, step: int, action: Action) -> None:
        m = action.microbatch
        if chunk is self._first:
            self.started.add(m)
        microbatch = self._data(step, m) if chunk.at_end else Microbatch(step, m, {})
        output = chunk.forward(microbatch, self._taken(Kind.RECV_F, action))
        if chunk.following is not None:
            self._outgoing[Action(Kind.SEND_F, m, action.stage)] = output

    def _taken(self, kind: Kind, action: Action) -> torch.Tensor | None:
        """What was received, or given, for `action`."""
        tensor = self._received.pop(Action(kind, action.microbatch, action.stage), None)
        return None if tensor is None else tensor.to(self._links.device)

    def _gradient(self, action: Action) -> torch.Tensor | float:
        """That of the stage's output: the next stage's, or the loss's own."""
        received = self._taken(Kind.RECV_B, action)
        return self._scale if received is None else received

    def _keep(self, chunk: Chunk, action: Action, gradient: torch.Tensor | None) -> None:
        """Have the input's gradient ready for the previous stage."""
        if gradient is not None and chunk.previous is not None:
            self._outgoing[Action(Kind.SEND_B, action.microbatch, action.stage)] = gradient


def _tag(action: Action) -> int:
    """The flow of a message: its direction, and the boundary of stages that it crosses (0: there is only one)."""
    forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
    if action.stage < 0:
        return 0 if forward else 1
    upper = action.stage + (action.kind in (Kind.SEND_F, Kind.RECV_B))
    return 2 * upper + (0 if forward else 1)
