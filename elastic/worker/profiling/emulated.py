"""Emulated layers: they wait for the times of a profile instead of computing.

Everything else is real: activations of the true size travel over the links; gradients of the true
size are accumulated, copied, backed up and reduced; the optimizer updates the parameters. So a few
cores can run many nodes of any device type, and measured times can be compared with the cost
model's predictions.

The values come from a small model, which depends only on (seed, step, micro-batch, layer) and the
parameters: layer i outputs mean(input) + noise_i * w_i, and the loss is the sum of the last output
squared. Every element of every message contributes, so a lost or doubled element changes the
parameters.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from elastic.domain.types import Accumulate, LayerSpec
from elastic.planning.cost.profile import LayerTimes, Profile
from elastic.worker.model import rng as randomness
from elastic.worker.model.layers import LayerStack, TensorParallel
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import OptimizerSpec

WIDTH = 4
"""Bytes per element: parameters and messages are float32."""
MAX_CARRYOVER_S = 0.02
"""Maximum part of a delay that the next wait makes up for."""


class PassTimer:
    """Sleeps until deadlines, so that the delays of single waits do not add up.

    An action is a pass of one micro-batch through the layers of a stage. The waits of an action
    follow each other without a gap, so the time between two layers is part of the wait. A wait that
    ends late shortens the next wait. CPU time that the engine uses between two actions of a step
    shortens the second action, because a real device computes while its host does such work.
    """

    def __init__(self) -> None:
        self._action: tuple[object, ...] = (-1,)
        self._deadline, self._carryover_s, self._cpu = 0.0, 0.0, 0.0

    def wait(self, action: tuple[object, ...], began: float, seconds: float) -> None:
        """Return `seconds` after the previous wait of `action`, or after `began` in a new action.

        Returns at once if that time has passed.

        Args:
            action: any key; its first element is the step.
            began: value of time.perf_counter when the action began.
        """
        if action != self._action or began - self._deadline > MAX_CARRYOVER_S:
            used = time.thread_time() - self._cpu if action[0] == self._action[0] else 0.0
            carryover = min(self._carryover_s + used, MAX_CARRYOVER_S)
            self._action, self._deadline = action, began - carryover
        self._deadline += seconds
        while (left := self._deadline - time.perf_counter()) > 0:
            time.sleep(left)
        self._carryover_s = min(time.perf_counter() - self._deadline, MAX_CARRYOVER_S)
        self._cpu = time.thread_time()


class _LayerPass:
    """Decides how long each part of one micro-batch's pass through one layer waits.

    Autograd runs either the whole backward pass at once, beginning with the parameters' path,
    which was built last; or the input's path first and the parameters' path later. The path that
    runs first distinguishes the two cases. The identifier of autograd's current graph task tells
    whether the other path belongs to the same backward pass.
    """

    def __init__(
        self, timer: PassTimer, times: LayerTimes, microbatch: Microbatch, has_input: bool
    ) -> None:
        self._timer, self._times, self._has_input = timer, times, has_input
        self._microbatch = (microbatch.step, microbatch.index)
        self._input_s = times.backward_input_s or times.backward_s / 2
        rest_s = times.backward_s - min(self._input_s, times.backward_s)
        self._weight_s = times.backward_weight_s or rest_s
        self._whole_task = -1
        """Graph task of a backward pass that runs both paths."""
        self._split = False
        """Whether the input's path ran in a graph task of its own."""

    def forward(self, began: float, seconds: float) -> None:
        self._wait("F", began, seconds)

    def input_part(self, began: float) -> None:
        self._split = self._whole_task != torch._C._current_graph_task_id()
        self._wait("B", began, self._input_s if self._split else self._times.backward_s)

    def weight_part(self, began: float) -> None:
        if self._split:
            self._wait("W", began, self._weight_s)
        elif self._has_input:
            self._whole_task = torch._C._current_graph_task_id()
        else:
            self._wait("B", began, self._times.backward_s)

    def _wait(self, part: str, began: float, seconds: float) -> None:
        self._timer.wait((*self._microbatch, part), began, seconds)


class _InputPath(torch.autograd.Function):
    """Fills the output with mean(hidden). `backward` takes the time of input part or whole pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, numel: int, layer_pass: _LayerPass) -> Tensor:
        ctx.layer_pass, ctx.shape = layer_pass, hidden.shape
        return hidden.new_empty(numel).fill_(hidden.mean())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        began = time.perf_counter()
        gradient = gradients[0].new_empty(ctx.shape)
        gradient.fill_(gradients[0].sum() / gradient.numel())
        ctx.layer_pass.input_part(began)
        return gradient, None, None


class _WeightPath(torch.autograd.Function):
    """noise * mean(weight), whose elements are equal. `backward` takes the weight part's time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, noise: Tensor, layer_pass: _LayerPass) -> Tensor:
        ctx.layer_pass, ctx.noise, ctx.numel = layer_pass, noise, weight.numel()
        return weight[:1] * noise

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        began = time.perf_counter()
        gradient = gradients[0].new_empty(ctx.numel)
        gradient.fill_((gradients[0] * ctx.noise).sum() / ctx.numel)
        ctx.layer_pass.weight_part(began)
        return gradient, None, None


class EmulatedLayer(nn.Module):
    """A layer with parameters of `spec.param_bytes`, whose passes take `times`.

    Args:
        value: initial value of all parameters.
        last: whether the layer returns a scalar loss.
    """

    def __init__(
        self, spec: LayerSpec, times: LayerTimes, value: float, last: bool, timer: PassTimer
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((_elements(spec.param_bytes),), value))
        frozen = torch.zeros(spec.frozen_bytes, dtype=torch.uint8)
        self.frozen = nn.Parameter(frozen, requires_grad=False) if spec.frozen_bytes else None
        self._numel, self._last = 1 if last else _elements(spec.output_bytes), last
        self._times, self._timer = times, timer

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        """[any shape] or None -> [output elements], or the scalar loss."""
        began = time.perf_counter()
        layer_pass = _LayerPass(self._timer, self._times, microbatch, hidden is not None)
        noise = torch.rand(()) + 0.5
        bias: Tensor
        mean: Tensor | None = None
        if hidden is not None:
            mean = _InputPath.apply(hidden, self._numel, layer_pass)  # type: ignore[no-untyped-call]
        bias = _WeightPath.apply(self.weight, noise, layer_pass)  # type: ignore[no-untyped-call]
        out = bias.expand(self._numel).contiguous() if mean is None else mean + bias
        layer_pass.forward(began, self._times.forward_s)
        return out.square().sum() if self._last else out


class EmulatedStack(LayerStack):
    """The layers of a profile on one of its device types, in place of the script's layers."""

    def __init__(self, profile: Profile, device: str, seed: int) -> None:
        """Raises FieldError if the profile does not contain `device`."""
        self._profile, self.seed = profile, seed
        self._times = profile.device(device).layers
        self._timer = PassTimer()

    @property
    def n_layers(self) -> int:
        return len(self._profile.layers)

    def build(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        value = randomness.derive_parameter_seed(self.seed, index, "weight") / 2**63
        spec, times = self._profile.layers[index], self._times[index]
        return EmulatedLayer(spec, times, value, index == self.n_layers - 1, self._timer)

    def specs(
        self, accumulate: Accumulate, optimizer: OptimizerSpec | None = None
    ) -> tuple[LayerSpec, ...]:
        return self._profile.layers


def _elements(nbytes: int) -> int:
    return max(1, -(-nbytes // WIDTH))
