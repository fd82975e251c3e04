"""Emulated layers: they wait the time that a profile tells instead of computing, and hand on real tensors.

Everything around the layers is real: activations of the true size travel over the links, gradients of the true
size are accumulated, copied, backed up and reduced, the optimizer updates the parameters. So many nodes of any
device type run on few cores, and what the cost model predicts can be compared with what happens.

The contents are a small model of their own, a function of (seed, step, micro-batch, layer) and the parameters
alone: layer i gives out = mean(in) + noise_i * w_i, and the last one's loss is out squared. Every element of
every message counts, so a lost or doubled one shows in the parameters.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate, LayerSpec
from elastic.planning.cost.profile import LayerTimes, Profile
from elastic.worker.model import rng as randomness
from elastic.worker.model.layers import LayerStack, Microbatch, TensorParallel
from elastic.worker.model.optimizer import OptimizerSpec

WIDTH = 4
"""Bytes of an element: parameters and messages are float32."""
MOST_OWED_S = 0.02
"""Lateness that later waits make up for; a longer one is a real delay."""


class Waiter:
    """Sleeps to deadlines. What one wait is late the next one is shorter by, so that errors do not add up.

    Waits of one action (a pass of one micro-batch through the layers of a stage) follow each other without a gap,
    whatever happens between the layers: that is part of what a layer takes. CPU time that the engine uses between
    two actions of a step is taken off the second one, as a device computes on while its host does such work.
    """

    def __init__(self) -> None:
        self._action: tuple[object, ...] = (-1,)
        self._deadline, self._owed, self._cpu = 0.0, 0.0, 0.0

    def until(self, action: tuple[object, ...], began: float, seconds: float) -> None:
        """Return `seconds` after the former wait of `action`, or, in a new action, after `began`.

        `action` begins with the step. Times are those of time.perf_counter. A deadline that has passed already is
        not waited for.
        """
        if action != self._action or began - self._deadline > MOST_OWED_S:
            used = time.thread_time() - self._cpu if action[0] == self._action[0] else 0.0
            self._action, self._deadline = action, began - min(self._owed + used, MOST_OWED_S)
        self._deadline += seconds
        while (left := self._deadline - time.perf_counter()) > 0:
            time.sleep(left)
        self._owed = min(time.perf_counter() - self._deadline, MOST_OWED_S)
        self._cpu = time.thread_time()


class _Visit:
    """One micro-batch's passage through one layer: which backward pass waits for what.

    Autograd runs a backward pass in one go, and then the parameters' side first, which was built last. Or it runs
    the part that leads to the input, and later the part that leads to the parameters. So whichever side comes
    first tells which of these it is; the number of the running pass tells that a whole one goes on.
    """

    def __init__(self, waiter: Waiter, times: LayerTimes, microbatch: Microbatch, has_input: bool) -> None:
        self._waiter, self._times, self._has_input = waiter, times, has_input
        self._microbatch = (microbatch.step, microbatch.index)
        self._input = times.backward_input_s or times.backward_s / 2
        self._weight = times.backward_weight_s or times.backward_s - min(self._input, times.backward_s)
        self._whole = -1
        """Number of the backward pass that runs in one go."""
        self._apart = False

    def forward(self, began: float, seconds: float) -> None:
        self._wait("F", began, seconds)

    def input_part(self, began: float) -> None:
        self._apart = self._whole != torch._C._current_graph_task_id()
        self._wait("B", began, self._input if self._apart else self._times.backward_s)

    def weight_part(self, began: float) -> None:
        if self._apart:
            self._wait("W", began, self._weight)
        elif self._has_input:
            self._whole = torch._C._current_graph_task_id()
        else:
            self._wait("B", began, self._times.backward_s)

    def _wait(self, part: str, began: float, seconds: float) -> None:
        self._waiter.until((*self._microbatch, part), began, seconds)


class _InputPath(torch.autograd.Function):
    """mean(hidden) in every element of the output; backward it waits the input part's time, or the whole pass's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, numel: int, visit: _Visit) -> Tensor:
        ctx.visit, ctx.shape = visit, hidden.shape
        return hidden.new_empty(numel).fill_(hidden.mean())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        began = time.perf_counter()
        gradient = gradients[0].new_empty(ctx.shape)
        gradient.fill_(gradients[0].sum() / gradient.numel())
        ctx.visit.input_part(began)
        return gradient, None, None


class _WeightPath(torch.autograd.Function):
    """noise * mean(weight), of which all elements are equal; backward it waits the weight part's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, noise: Tensor, visit: _Visit) -> Tensor:
        ctx.visit, ctx.noise, ctx.numel = visit, noise, weight.numel()
        return weight[:1] * noise

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        began = time.perf_counter()
        gradient = gradients[0].new_empty(ctx.numel)
        gradient.fill_((gradients[0] * ctx.noise).sum() / ctx.numel)
        ctx.visit.weight_part(began)
        return gradient, None, None


class EmulatedLayer(nn.Module):
    """One layer of `param_bytes` that takes the times of one device type."""

    def __init__(self, spec: LayerSpec, times: LayerTimes, value: float, last: bool, waiter: Waiter) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((_elements(spec.param_bytes),), value))
        self._numel, self._last = 1 if last else _elements(spec.output_bytes), last
        self._times, self._waiter = times, waiter

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        """[any shape] or None -> [output elements], or the scalar loss."""
        began = time.perf_counter()
        visit = _Visit(self._waiter, self._times, microbatch, hidden is not None)
        noise = torch.rand(()) + 0.5
        mean = None if hidden is None else _InputPath.apply(hidden, self._numel, visit)  # type: ignore[no-untyped-call]
        bias: Tensor = _WeightPath.apply(self.weight, noise, visit)  # type: ignore[no-untyped-call]
        out = bias.expand(self._numel).contiguous() if mean is None else mean + bias
        visit.forward(began, self._times.forward_s)
        return out.square().sum() if self._last else out


class EmulatedStack(LayerStack):
    """A profile's layers on one of its device types, in the place of a script's own."""

    def __init__(self, profile: Profile, device: str, seed: int) -> None:
        """Raises FieldError when the profile does not know `device`."""
        self._profile, self.seed = profile, seed
        self._times = profile.device(device).layers
        self._waiter = Waiter()

    @property
    def n_layers(self) -> int:
        return len(self._profile.layers)

    def build(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        if tp.size != 1:
            raise FieldError("tp", tp.size, "emulated layers run without tensor parallelism; use 1")
        value = randomness.derive_parameter_seed(self.seed, index, "weight") / 2**63
        last = index == self.n_layers - 1
        return EmulatedLayer(self._profile.layers[index], self._times[index], value, last, self._waiter)

    def specs(self, accumulate: Accumulate, optimizer: OptimizerSpec | None = None) -> tuple[LayerSpec, ...]:
        return self._profile.layers


def _elements(nbytes: int) -> int:
    return max(1, -(-nbytes // WIDTH))
