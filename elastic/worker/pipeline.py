"""Runs one stage's action list: compute, hand on, take over, and add finished micro-batches to the ledgers.

Receives are posted ahead of need, so that a transfer runs beside compute; sends never wait for the neighbour.
Between two compute actions the runner looks whether the epoch was abandoned. What a layer has in its ledger
when `run` raises is whole: gradients enter it only after a micro-batch's backward pass, and all layers of the
stage take it in one go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from elastic.errors import FieldError
from elastic.planning.schedule import Action, Kind
from elastic.worker.abandon import Abandon, EpochAbandoned
from elastic.worker.layers import Microbatch
from elastic.worker.links import LinkFailed, Links, Receive

TAG_FORWARD, TAG_BACKWARD = 0, 1
AHEAD = 2
"""Receives posted in advance, per direction."""


class Layer(Protocol):
    """What the runner needs of `elastic.worker.replica.LayerReplica`."""

    index: int
    losses: dict[int, float]

    def forward(self, hidden: torch.Tensor | None, microbatch: Microbatch) -> torch.Tensor: ...

    def collect(self, index: int, *, skip: bool) -> None: ...


class Hooks(Protocol):
    """Called in the main thread; an exception from a hook ends the run."""

    def before(self, action: Action) -> None:
        """`action` comes next; `action.kind.receives` tells waiting from computing."""

    def on_backward(self, index: int) -> None:
        """All layers of the stage hold micro-batch `index`; the previous stage has been sent its gradient."""


class Agreement:
    """All ranks of a tensor-parallel group leave an epoch at the same point, or none does.

    The ranks run the same collectives inside every layer, so one that stopped alone would leave the others
    hanging. Therefore each calls `check` before every compute action: `sync` is a maximum over the group of
    "I must leave". A rank that has to leave for another reason (a failed link, or an abandoned wait) owes the
    others one such call. This context manager pays it, and is the only place that does: wrap whatever may
    raise EpochAbandoned or LinkFailed. It may be nested; the debt is paid once.
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

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (EpochAbandoned, LinkFailed)) and not self._settled:
            self._settled = True
            assert self._sync is not None
            self._sync(True)


class _Loss:
    """A loss that is read later without stopping the device: its copy to the host starts at once."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._host = loss.detach().to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(loss.device).record_event() if loss.is_cuda else None

    def read(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._host)


class _Expected:
    """The receives of one direction, in order, the next `AHEAD` of them posted."""

    def __init__(self, microbatches: Iterable[int], post: Callable[[], Receive]) -> None:
        self._left, self._post = deque(microbatches), post
        self._posted: deque[Receive] = deque()
        self._top_up()

    def _top_up(self) -> None:
        while self._left and len(self._posted) < AHEAD:
            self._left.popleft()
            self._posted.append(self._post())

    def take(self) -> torch.Tensor:
        tensor = self._posted.popleft().wait()
        self._top_up()
        return tensor


class StageRunner:
    """Runs a stage for one epoch.

    Args:
        layers: replicas of the stage, in layer order.
        links: the epoch's links.
        previous, following: ranks of the neighbouring stages; None: first, last stage.
        n_microbatches: M of the whole step; every loss counts 1/M.
        tp_sync: maximum over the tensor-parallel group of a flag; None without one.
        data: fields of micro-batch (step, index); asked for on the first and the last stage only.
        abandon: the epoch's flag.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        links: Links,
        *,
        previous: int | None,
        following: int | None,
        n_microbatches: int,
        data: Callable[[int, int], Microbatch],
        abandon: Abandon,
        tp_sync: Callable[[bool], bool] | None = None,
    ) -> None:
        self._layers, self._links, self._previous, self._following = layers, links, previous, following
        self._scale, self._data = 1.0 / n_microbatches, data
        self.agreement = Agreement(tp_sync, abandon)
        self.started: set[int] = set()
        """Micro-batches of the current step whose forward pass was begun here."""
        self.sent: set[int] = set()
        """Micro-batches of the current step whose activations were handed on."""
        self._forget()

    def _forget(self) -> None:
        self._fields: dict[int, Microbatch] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._losses: dict[int, _Loss] = {}
        self._passed: int | None = None
        """Micro-batch whose gradients lie in the parameters' `.grad`, not yet in the layers' sums."""

    def run(
        self, step: int, actions: Sequence[Action], skip: Mapping[int, frozenset[int]], hooks: Hooks
    ) -> None:
        """Run `actions` of `step`. `skip[layer]`: micro-batches that some ledger already has for that layer.

        Returns when every gradient is in the ledgers and every message is gone.

        Raises:
            EpochAbandoned: the epoch's flag was set, here or on another rank of the tensor-parallel group.
            LinkFailed: a neighbour went away.
        """
        self.started, self.sent = set(), set()
        self._forget()
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
        m, self._passed = self._passed, None
        if m is None:
            return None
        last = self._layers[-1]
        if m in self._losses and m not in skip.get(last.index, frozenset()):
            last.losses[m] = self._losses.pop(m).read()
        for layer in self._layers:
            layer.collect(m, skip=m in skip.get(layer.index, frozenset()))
        return m

    def _expect(self, actions: Sequence[Action]) -> None:
        self._forwards = self._expected(actions, Kind.RECV_F, self._previous, TAG_FORWARD)
        self._backwards = self._expected(actions, Kind.RECV_B, self._following, TAG_BACKWARD)

    def _expected(self, actions: Sequence[Action], kind: Kind, rank: int | None, tag: int) -> _Expected:
        microbatches = [action.microbatch for action in actions if action.kind is kind]
        if rank is None:
            if microbatches:
                raise FieldError(
                    "actions", f"{kind.value}{microbatches[0]}", "this stage has no neighbour on that side"
                )
            return _Expected((), _nobody)
        return _Expected(microbatches, lambda: self._links.recv(rank, tag))

    def _act(self, step: int, action: Action) -> None:
        m = action.microbatch
        match action.kind:
            case Kind.F:
                self.agreement.check()
                self._forward(step, m)
            case Kind.B:
                self.agreement.check()
                self._backward(m)
            case Kind.RECV_F:
                self._inputs[m] = self._forwards.take().requires_grad_()
            case Kind.RECV_B:
                self._gradients[m] = self._backwards.take()
            case Kind.SEND_F:
                assert self._following is not None
                self._links.send(self._outputs[m], self._following, TAG_FORWARD)
                self.sent.add(m)
            case Kind.SEND_B:
                assert self._previous is not None
                gradient = self._inputs.pop(m).grad
                assert gradient is not None, "the stage's output does not depend on its input"
                self._links.send(gradient, self._previous, TAG_BACKWARD)

    def _forward(self, step: int, m: int) -> None:
        self.started.add(m)
        ends = self._previous is None or self._following is None
        microbatch = self._data(step, m) if ends else Microbatch(step, m, {})
        hidden = self._inputs.get(m)
        for layer in self._layers:
            hidden = layer.forward(hidden, microbatch)
        assert hidden is not None
        self._outputs[m] = hidden
        if self._following is None:
            self._losses[m] = _Loss(hidden)

    def _backward(self, m: int) -> None:
        output = self._outputs.pop(m)
        gradient = torch.full_like(output, self._scale) if self._following is None else self._gradients.pop(m)
        torch.autograd.backward(output, gradient)
        self._passed = m


def _nobody() -> Receive:
    raise AssertionError("nothing is expected on this side")
