"""One stage on this worker: the forward and backward passes of micro-batches through its layers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic.planning.plan.rank_map import Roster
from elastic.worker.engine.microbatch_cost import OperationCount, Sizes, StageCost
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.split_backward import WeightBackward, backward_input
from elastic.worker.model.values import Message, Value, parts_of, sizes_of
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.device_fault import is_local_fault

log = logging.getLogger(__name__)


class _Loss:
    """A loss whose copy to the host starts at once, so that reading it does not stop the device."""

    def __init__(self, loss: Tensor, weight: float) -> None:
        self.weight = weight
        """Weight of the micro-batch."""
        self._host = loss.detach().to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if loss.is_cuda:
            self._copied = torch.cuda.current_stream(loss.device).record_event()

    def read(self) -> float:
        """Return the loss times the weight. Without weight it is 0: the mean over no tokens is not
        a number."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._host) * self.weight if self.weight else 0.0


@dataclass(slots=True)
class _MicrobatchPass:
    """A micro-batch between its forward pass and the end of its backward pass."""

    microbatch: Microbatch
    hidden: Value | None
    """Input of the stage; None if the stage holds the first layer."""
    output: Value | None = None
    """Output with its graph; None if it will be recomputed."""
    rest: WeightBackward | None = None
    """Weight part of the backward pass, once the input part is done."""


class LocalStage:
    """The layers of one stage, and the micro-batches that are in progress there.

    Args:
        layers: replicas, in layer order.
        previous: rank of the preceding stage; None if there is none.
        following: rank of the next stage; None if there is none.
        number: number of the stage in its pipeline, as actions name it; -1 if this worker has only
            this stage.
        recompute: keep only the stage's input, and repeat the forward pass before the backward
            pass.
        begins: whether it holds the model's first layer; None: yes without a preceding stage.
        ends: whether it holds the model's last layer; None: yes without a next stage.
    """

    def __init__(
        self,
        layers: Sequence[LayerReplica],
        *,
        previous: int | None = None,
        following: int | None = None,
        number: int = -1,
        recompute: bool = False,
        begins: bool | None = None,
        ends: bool | None = None,
    ) -> None:
        self.layers, self.number = layers, number
        self.previous, self.following = previous, following
        self.begins = previous is None if begins is None else begins
        self.ends = following is None if ends is None else ends
        self._recompute = recompute
        self.cost = StageCost()
        self.sizes: dict[int, Sizes] = {}
        """Sizes of the newest pass of each micro-batch (`elastic.worker.model.values.sizes_of`)."""
        self._passes: dict[int, _MicrobatchPass] = {}
        self._losses: dict[int, _Loss] = {}

    def clear(self) -> None:
        """Drop all micro-batches in progress."""
        self._passes.clear()
        self._losses.clear()

    def forward(
        self, microbatch: Microbatch, received: Message | None, weight: float = 1.0
    ) -> Message:
        """Run the layers. Returns the next stage's input or, on the last stage, the loss.

        A stage that recomputes also builds the graph here and drops it, because kernels without a
        graph may give different last bits.

        Args:
            received: output of the preceding stage; None on the first stage.
            weight: weight of the micro-batch; only the last stage needs it.
        """
        hidden = None if received is None else received.leaves()
        output = self._run(microbatch, hidden)
        if self._recompute:
            microbatch.forget_shared()
        kept = None if self._recompute else output
        self._passes[microbatch.index] = _MicrobatchPass(microbatch, hidden, kept)
        if self.ends:
            assert isinstance(output, Tensor), "the last layer returns the loss"
            self._losses[microbatch.index] = _Loss(output, weight)
        return Message.of(output)

    def evaluate(self, microbatch: Microbatch, received: Message | None) -> Value:
        """Run the layers without a graph. Returns the next stage's input or, on the last stage,
        the loss. Nothing is kept.

        Args:
            received: output of the preceding stage; None on the first stage.
        """
        with torch.no_grad():
            return self._run(microbatch, None if received is None else received.value())

    def count(self, index: int) -> None:
        """Add micro-batch `index`, which is between its passes, to `cost`: run its forward pass
        once more, without a graph. If that fails, as without memory, `cost` counts no more."""
        current = self._passes[index]
        try:
            with torch.no_grad(), OperationCount() as counted:
                self._run(current.microbatch, current.hidden)
        except RuntimeError as error:
            if is_local_fault(error):
                raise
            log.warning("the operations of a micro-batch cannot be counted: %s", error)
            self.cost.give_up()
        else:
            self.cost.add(self.sizes[index], counted.with_weights, counted.between_tokens)
        if self._recompute:
            current.microbatch.forget_shared()

    def backward(self, index: int, gradient: Message | float) -> Message | None:
        """Run the whole backward pass of micro-batch `index`. It is empty if the stage holds only
        frozen layers, the first one among them, or if the gradient is 0.0.

        Args:
            gradient: gradients of the output's parts that need one, or one number for all elements.

        Returns:
            The gradients of the input's parts that need one; None on the first stage.
        """
        current = self._passes.pop(index)
        outputs, gradients = _with_gradients(self._output(current), gradient)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        return self._input_gradient(current)

    def backward_input(self, index: int, gradient: Message | float) -> Message | None:
        """Run the input part of a backward pass, and return the gradients of the stage's input.

        `backward_weight` runs the other part.
        """
        current = self._passes[index]
        assert current.hidden is not None, "the first stage has no input"
        outputs, gradients = _with_gradients(self._output(current), gradient)
        current.output = None
        sources = [part for part in parts_of(current.hidden) if part.requires_grad]
        parameters = [p for layer in self.layers for p in layer.module.parameters()]
        current.rest = backward_input(outputs, gradients, sources, parameters)
        return self._input_gradient(current)

    def backward_weight(self, index: int) -> None:
        """Run the weight part of a backward pass, which computes the parameters' gradients."""
        current = self._passes.pop(index)
        assert current.rest is not None, "the input part comes first"
        current.rest.run()

    def collect(self, index: int, skip: Mapping[int, frozenset[int]]) -> None:
        """Add the finished backward pass of micro-batch `index` to the layers' gradient sums.

        A layer is left out if `skip[layer]` contains the micro-batch.
        """
        loss, last = self._losses.pop(index, None), self.layers[-1]
        if loss is not None and index not in skip.get(last.index, frozenset()):
            last.losses[index] = loss.read()
        for layer in self.layers:
            weight = loss.weight if loss is not None and layer is last else 0.0
            skipped = index in skip.get(layer.index, frozenset())
            layer.collect(index, skip=skipped, weight=weight)

    def _run(self, microbatch: Microbatch, hidden: Value | None) -> Value:
        if hidden is not None:
            self.sizes[microbatch.index] = sizes_of(hidden)
        for layer in self.layers:
            begins = hidden is None
            hidden = layer.forward(hidden, microbatch)
            if begins:
                self.sizes[microbatch.index] = sizes_of(hidden)
        assert hidden is not None
        return hidden

    def _output(self, current: _MicrobatchPass) -> Value:
        """Return the stage's output with its graph, recomputed if necessary."""
        if current.output is None:
            return self._run(current.microbatch, current.hidden)
        return current.output

    @staticmethod
    def _input_gradient(current: _MicrobatchPass) -> Message | None:
        hidden, current.hidden = current.hidden, None
        if hidden is None:
            return None
        parts = parts_of(hidden)
        # A part that no layer of this stage has used has no gradient.
        found = tuple(
            torch.zeros_like(part) if part.grad is None else part.grad
            for part in parts
            if part.requires_grad
        )
        single = isinstance(hidden, Tensor) and bool(found)
        return Message.of(found[0] if single else found, parts[0].device)


def stages_of_rank(
    roster: Roster,
    rank: int,
    replicas: Iterable[LayerReplica],
    first: int = 0,
    last: int | None = None,
) -> list[LocalStage]:
    """Return the stages of `rank` in model order, restricted to the layers `first` to `last` - 1.

    Args:
        replicas: all layers of `rank`.
        last: None: up to the model's last layer.
    """
    last = roster.n_layers if last is None else last
    held, places = {replica.index: replica for replica in replicas}, roster.places(rank)
    stages = []
    for place in places:
        stage = place.stage
        layers = [held[index] for index in stage.layers if first <= index < last]
        if layers:
            local = LocalStage(
                layers,
                previous=place.previous if stage.first > first else None,
                following=place.following if stage.last < last else None,
                number=place.number if len(places) > 1 else -1,
                recompute=stage.recompute,
                begins=layers[0].index == 0,
                ends=layers[-1].index == roster.n_layers - 1,
            )
            stages.append(local)
    return stages


def _with_gradients(output: Value, gradient: Message | float) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parts of `output` that have a graph, and their gradients. `gradient` has one for
    each of them, or is one number for all.

    For 0.0 there are none. The loss of a micro-batch without weight may be NaN, as the mean over no
    tokens is, and so would be all gradients."""
    if gradient == 0.0:
        return [], []
    wanted = [part for part in parts_of(output) if part.requires_grad]
    if isinstance(gradient, Message):
        given = parts_of(gradient.value())
        assert len(given) == len(wanted), "the graph decides which parts have a gradient"
        return wanted, given
    return wanted, [_filled(part, gradient) for part in wanted]


def _filled(like: Tensor, value: float) -> Tensor:
    """Return a tensor of equal elements. A value that its type cannot hold is infinite."""
    fits = abs(value) <= torch.finfo(like.dtype).max
    return torch.full_like(like, value if fits else math.copysign(math.inf, value))
