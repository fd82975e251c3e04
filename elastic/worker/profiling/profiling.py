"""Measures a script's layers, one after the other, on this device: what `elastic profile` runs in place of training.

Each layer is built as for training, fed with what the layer before it gave, and timed after a warm-up: forward
pass; whole backward pass; its input part and its weight part apart, as zero-bubble schedules run them; the
optimizer's update. A time is the median over the repetitions; on CUDA it is taken by events. Adding the gradients
to the layer's sums belongs to the backward pass (to its weight part). Layers of equal make are measured once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from elastic.domain import codec
from elastic.domain.errors import FieldError
from elastic.domain.types import JobSpec, LayerSpec
from elastic.planning.cost.profile import Measurement, MeasurementRequest
from elastic.planning.cost.profile import Device, LayerTimes
from elastic.worker.context import TrainingJob
from elastic.worker.control.agent_client import WorkerSettings
from elastic.worker.model.device import choose_device
from elastic.worker.model.layers import Microbatch, TensorParallel
from elastic.worker.model.memory import activation_bytes
from elastic.worker.model.split_backward import WeightPart, backward_input
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica


def measure_job(settings: WorkerSettings, job: TrainingJob) -> None:
    """Measure all layers; TP rank 0 writes the result to the file that `settings.measure` names.

    Raises SystemExit with code 2 if the number of workers per node is not `tp`.
    """
    order = codec.loads(MeasurementRequest, Path(settings.measure).read_bytes())
    if settings.local_world_size != job.spec.tp:
        error = FieldError(
            "--nproc-per-node",
            settings.local_world_size,
            f"the script's layers run on tp {job.spec.tp}",
        )
        print(f"elastic profile: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code)
    device = choose_device(settings.local_rank)
    tp = job.stack.tensor_parallel(settings.local_rank, job.spec.tp, settings.tp_store, device)
    microbatch = job.data(0, 0)
    fields = {name: tensor.to(device) for name, tensor in microbatch.fields.items()}
    found = _Layers(job, device, tp, order).run(Microbatch(0, 0, fields))
    if tp.rank == 0:
        _answer(order, job.spec, device, found)
    job.stack.release()


def _answer(order: MeasurementRequest, spec: JobSpec, device: torch.device, found: list[tuple[LayerSpec, int]]) -> None:
    times = tuple(
        LayerTimes(la.forward_s, la.backward_s, la.backward_input_s, la.backward_weight_s, la.update_s)
        for la, _ in found
    )
    measurement = Measurement(
        layers=tuple(layer for layer, _ in found),
        device=Device(order.device or _name(device), times, _memory(device)),
        like=tuple(index for _, index in found),
        stated=spec.layers,
        tp=spec.tp,
        tokens_per_microbatch=spec.tokens_per_microbatch,
    )
    draft = Path(f"{order.out}.tmp")
    draft.write_text(codec.dumps(measurement))
    os.replace(draft, order.out)


class _Layers:
    """One job's layers on one device."""

    def __init__(
        self,
        job: TrainingJob,
        device: torch.device,
        tp: TensorParallel,
        order: MeasurementRequest,
    ) -> None:
        self._job, self._spec, self._device, self._tp = job, job.spec, device, tp
        self._clock = _Clock(device, order.warmup, order.repeat)

    def run(self, microbatch: Microbatch) -> list[tuple[LayerSpec, int]]:
        """For each layer what was measured, and on which layer."""
        hidden: Tensor | None = None
        known: dict[object, tuple[LayerSpec, int, Tensor]] = {}
        found = []
        for index in range(self._spec.n_layers):
            replica = self._build(index)
            key = _make(replica, hidden, index in (0, self._spec.n_layers - 1), index)
            if key not in known:
                known[key] = self._measure(replica, hidden, microbatch)
            layer, at, hidden = known[key]
            found.append((layer, at))
        return found

    def _build(self, index: int) -> LayerReplica:
        job = self._job
        return build_replica(
            job.stack, index, self._tp, job.optimizer, job.accumulate, job.spec.seed, self._device
        )

    def _measure(
        self, replica: LayerReplica, hidden: Tensor | None, microbatch: Microbatch
    ) -> tuple[LayerSpec, int, Tensor]:
        """Return (the layer, its index, its output)."""
        last = replica.index == self._spec.n_layers - 1
        clock, given = self._clock, _Pass(replica, hidden, microbatch)
        kept = activation_bytes(given.forward, replica.module, self._device)
        output = given.forward().detach()
        reduced = torch.zeros_like(replica.gradient)
        layer = LayerSpec(
            **_bytes(replica, self._tp.size, lambda: replica.update(reduced, 1.0, 0.0)),
            activation_bytes=kept,
            output_bytes=0 if last else output.nbytes,
            forward_s=clock.seconds(given.forward, given.drop),
            backward_s=clock.seconds(given.backward, given.drop, before=given.forward),
            backward_input_s=clock.seconds(given.input_part, given.drop, before=given.forward),
            backward_weight_s=clock.seconds(given.weight_part, given.drop, before=given.until_weight_part),
            update_s=clock.seconds(lambda: replica.update(reduced, 1.0, 0.0), given.drop),
        )
        return layer, replica.index, output


class _Pass:
    """One micro-batch through one layer, again and again."""

    def __init__(self, replica: LayerReplica, hidden: Tensor | None, microbatch: Microbatch) -> None:
        self._replica, self._microbatch = replica, microbatch
        self._hidden = None if hidden is None else hidden.detach().requires_grad_(hidden.is_floating_point())
        self._weights = [p for p in replica.module.parameters() if p.requires_grad]
        self._out: Tensor | None = None
        self._rest: WeightPart | None = None

    def forward(self) -> Tensor:
        self._out = self._replica.forward(self._hidden, self._microbatch)
        return self._out

    def backward(self) -> None:
        assert self._out is not None
        torch.autograd.backward(self._out, self._gradient())
        self._collect()

    def input_part(self) -> None:
        """Without an input there is nothing to do."""
        if self._hidden is not None:
            assert self._out is not None
            self._rest = backward_input(self._out, self._gradient(), self._hidden, self._weights)

    def until_weight_part(self) -> None:
        self.forward()
        self.input_part()

    def weight_part(self) -> None:
        """Without an input it is the whole pass."""
        if self._rest is None:
            self.backward()
        else:
            self._rest.run()
            self._collect()

    def _gradient(self) -> Tensor:
        """Of the output: small, so that no sum grows out of its range."""
        assert self._out is not None
        return torch.full_like(self._out, 1.0 / self._out.numel())

    def _collect(self) -> None:
        self._replica.collect(0, skip=False)

    def drop(self) -> None:
        """Forget everything, so that the next repetition finds what this one found."""
        self._out = self._rest = None
        for parameter in self._weights:
            parameter.grad = None
        if self._hidden is not None:
            self._hidden.grad = None
        self._replica.clear()


class _Clock:
    """Medians of repeated calls."""

    def __init__(self, device: torch.device, warmup: int, repeat: int) -> None:
        self._device, self._warmup, self._repeat = device, warmup, repeat

    def seconds(
        self,
        call: Callable[[], object],
        after: Callable[[], None],
        before: Callable[[], object] | None = None,
    ) -> float:
        """Median seconds of `call`; `before` and `after` run around each, unmeasured."""
        found = []
        for i in range(self._warmup + self._repeat):
            if before is not None:
                before()
            seconds = self._once(call)
            after()
            if i >= self._warmup:
                found.append(seconds)
        return median(found)

    def _once(self, call: Callable[[], object]) -> float:
        if self._device.type != "cuda":
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0


def _make(replica: LayerReplica, hidden: Tensor | None, end: bool, index: int) -> object:
    """What makes two layers alike: their modules and parameters in print, and what they are fed with."""
    if end:
        return index
    assert hidden is not None
    parameters = tuple((n, tuple(p.shape), p.dtype) for n, p in replica.module.named_parameters())
    return repr(replica.module), parameters, tuple(hidden.shape), hidden.dtype


def _bytes(replica: LayerReplica, tp: int, update: Callable[[], None]) -> dict[str, int]:
    """Bytes of the whole layer, of which this rank holds a part. Updates once: most optimizers make their state
    then."""
    update()
    state, whole = replica.optimizer_bytes(), {}
    for name, parameter in replica.module.named_parameters():
        whole[name] = tp if getattr(parameter, "partition_dim", -1) >= 0 else 1
    parameters = dict(replica.module.named_parameters())
    element = replica.gradient.element_size()
    return {
        "param_bytes": sum(p.nbytes * whole[n] for n, p in parameters.items()),
        "state_bytes": sum(nbytes * whole[n] for n, nbytes in state.items()),
        "gradient_bytes": sum(p.numel() * element * whole[n] for n, p in parameters.items()),
    }


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return "cpu"


def _memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0
