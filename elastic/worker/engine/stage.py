"""One stage of a worker: takes micro-batches through its layers, forward and backward, whole or in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from elastic.worker.model.layers import Microbatch
from elastic.worker.model.split_backward import WeightBackward, backward_input


class Layer(Protocol):
    """What a stage needs of `elastic.worker.replica.replica.LayerReplica`."""

    index: int
    losses: dict[int, float]

    @property
    def module(self) -> torch.nn.Module: ...

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor: ...

    def collect(self, index: int, *, skip: bool) -> None: ...


class _Loss:
    """A loss that is read later without stopping the device: its copy to the host starts at once."""

    def __init__(self, loss: Tensor) -> None:
        self._host = loss.detach().to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(loss.device).record_event() if loss.is_cuda else None

    def read(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._host)


@dataclass(slots=True)
class _Pass:
    """A micro-batch between its forward pass and the end of its backward pass."""

    microbatch: Microbatch
    hidden: Tensor | None
    output: Tensor | None = None
    """With its graph; None: it will be computed again."""
    rest: WeightBackward | None = None
    """After the input part: what is left to do."""


class Chunk:
    """The layers of one stage, and the micro-batches on their way through it.

    Args:
        layers: replicas, in layer order.
        previous, following: ranks of the neighbouring stages; None: first, last stage.
        number: of the stage in its pipeline, as actions name it; -1: the worker's only one.
        recompute: keep only the stage's input, and run the forward pass again before the backward pass.
        begins, ends: it has the model's first, last layer; None: it does where it has no neighbour.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        previous: int | None = None,
        following: int | None = None,
        number: int = -1,
        recompute: bool = False,
        begins: bool | None = None,
        ends: bool | None = None,
    ) -> None:
        self.layers, self.previous, self.following, self.number = layers, previous, following, number
        self.begins = previous is None if begins is None else begins
        self.ends = following is None if ends is None else ends
        self._recompute = recompute
        self._passes: dict[int, _Pass] = {}
        self._losses: dict[int, _Loss] = {}

    @property
    def at_end(self) -> bool:
        """It is the first or the last stage, and needs the micro-batch's fields."""
        return self.begins or self.ends

    def forget(self) -> None:
        """Drop all micro-batches that are under way."""
        self._passes.clear()
        self._losses.clear()

    def forward(self, microbatch: Microbatch, hidden: Tensor | None) -> Tensor:
        """Run the layers; `hidden` is None if it begins. Returns what the next stage gets, or the loss.

        A stage that recomputes runs with a graph too, and drops it: without one, kernels may differ in the last bits.
        """
        if hidden is not None:
            hidden.requires_grad_()
        output = self._run(microbatch, hidden)
        kept = None if self._recompute else output
        self._passes[microbatch.index] = _Pass(microbatch, hidden, kept)
        if self.ends:
            self._losses[microbatch.index] = _Loss(output)
        return output.detach()

    def backward(self, index: int, gradient: Tensor | float) -> Tensor | None:
        """The whole backward pass, from the output's gradient. Returns the input's; None on the first stage."""
        run = self._passes.pop(index)
        output = self._output(run)
        torch.autograd.backward(output, _like(gradient, output))
        return self._input_gradient(run)

    def backward_input(self, index: int, gradient: Tensor | float) -> Tensor | None:
        """The part that finds the gradient of the input, which is returned; `backward_weight` does the rest."""
        run = self._passes[index]
        assert run.hidden is not None, "the first stage has no input"
        output, run.output = self._output(run), None
        parameters = [p for layer in self.layers for p in layer.module.parameters()]
        run.rest = backward_input(output, _like(gradient, output), run.hidden, parameters)
        return self._input_gradient(run)

    def backward_weight(self, index: int) -> None:
        """The part that finds the parameters' gradients."""
        run = self._passes.pop(index)
        assert run.rest is not None, "the input part comes first"
        run.rest.run()

    def collect(self, index: int, skip: Mapping[int, frozenset[int]]) -> None:
        """After the backward pass of micro-batch `index`: add it to all layers' sums, but for those that `skip` it."""
        loss, last = self._losses.pop(index, None), self.layers[-1]
        if loss is not None and index not in skip.get(last.index, frozenset()):
            last.losses[index] = loss.read()
        for layer in self.layers:
            layer.collect(index, skip=index in skip.get(layer.index, frozenset()))

    def _run(self, microbatch: Microbatch, hidden: Tensor | None) -> Tensor:
        for layer in self.layers:
            hidden = layer.forward(hidden, microbatch)
        assert hidden is not None
        return hidden

    def _output(self, run: _Pass) -> Tensor:
        return self._run(run.microbatch, run.hidden) if run.output is None else run.output

    @staticmethod
    def _input_gradient(run: _Pass) -> Tensor | None:
        if run.hidden is None:
            return None
        gradient, run.hidden = run.hidden.grad, None
        assert gradient is not None, "the stage's output does not depend on its input"
        return gradient


def _like(gradient: Tensor | float, output: Tensor) -> Tensor:
    return gradient if isinstance(gradient, Tensor) else torch.full_like(output, gradient)
