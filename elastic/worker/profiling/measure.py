"""Measures the layers of a script on this device; `elastic profile` runs it instead of training.

Each layer is built as for training, gets the previous layer's output, and is timed after a
warm-up: the forward pass; the whole backward pass; its input part and its weight part, as
zero-bubble schedules run them; the optimizer's update. A time is the median of the repetitions; on
CUDA, events measure it. Adding gradients to the layer's sums counts as part of the backward pass
and of its weight part. Equal layers are measured once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from elastic.domain import codec
from elastic.domain.errors import FieldError
from elastic.domain.types import JobSpec, LayerSpec
from elastic.planning.cost.profile import Device, Measurement, MeasurementRequest, profile_of
from elastic.worker.context import TrainingJob
from elastic.worker.control.agent_client import WorkerSettings
from elastic.worker.control.step_timing import mark, seconds_between, synchronize
from elastic.worker.model.device import activation_bytes, choose_device
from elastic.worker.model.layers import TensorParallel, is_frozen, trained
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.split_backward import WeightBackward, backward_input
from elastic.worker.model.values import Message, Value, ValueSpec, parts_of
from elastic.worker.replica.replica import LayerReplica, shard_dim


def measure_job(settings: WorkerSettings, job: TrainingJob) -> None:
    """Measure all layers. TP rank 0 writes the result to the file that the request names.

    The file `settings.measure` holds the request. Raises FieldError if the number of workers per
    node is not `tp`.
    """
    order = _request(settings)
    if settings.local_world_size != job.spec.tp:
        raise FieldError(
            "--nproc-per-node",
            settings.local_world_size,
            f"the script's layers run on tp {job.spec.tp}",
        )
    device = choose_device(settings.local_rank)
    tp = job.stack.tensor_parallel(settings.local_rank, job.spec.tp, settings.tp_store, device)
    microbatch = job.data(0, 0)
    fields = {name: tensor.to(device) for name, tensor in microbatch.fields.items()}
    note = partial(note_progress, settings)
    measured = _LayerMeasurement(job, device, tp, order, note).run(Microbatch(0, 0, fields))
    if tp.rank == 0:
        _write_result(order, job.spec, device, measured)
    job.stack.release()


def note_progress(settings: WorkerSettings, text: str) -> None:
    """Let `elastic profile` print what this process does. Called first when a Trainer is made."""
    if settings.local_rank == 0:
        progress = Path(_request(settings).progress)
        draft = progress.with_suffix(".tmp")
        draft.write_text(text)
        os.replace(draft, progress)


def _request(settings: WorkerSettings) -> MeasurementRequest:
    return codec.loads(MeasurementRequest, Path(settings.measure).read_bytes())


def _write_result(
    order: MeasurementRequest,
    spec: JobSpec,
    device: torch.device,
    measured: list[tuple[LayerSpec, int]],
) -> None:
    """Write the measurement to `order.out`. `measured`: (layer, index of the measured layer)."""
    layers = tuple(layer for layer, _ in measured)
    times = profile_of(layers).devices[0].layers
    measurement = Measurement(
        layers=layers,
        device=Device(order.device or _device_name(device), times, _device_memory(device)),
        like=tuple(index for _, index in measured),
        stated=spec.layers,
        tp=spec.tp,
        tokens_per_microbatch=spec.tokens_per_microbatch,
    )
    draft = Path(f"{order.out}.tmp")
    draft.write_text(codec.dumps(measurement))
    os.replace(draft, order.out)


class _LayerMeasurement:
    """Measures one job's layers on one device."""

    def __init__(
        self,
        job: TrainingJob,
        device: torch.device,
        tp: TensorParallel,
        order: MeasurementRequest,
        note: Callable[[str], None],
    ) -> None:
        """`note(text)` is called before each layer."""
        self._job, self._device, self._tp, self._order = job, device, tp, order
        self._note = note

    def run(self, microbatch: Microbatch) -> list[tuple[LayerSpec, int]]:
        """Return per layer (measured values, index of the equal layer that was measured)."""
        job, last = self._job, self._job.spec.n_layers - 1
        hidden: Value | None = None
        known: dict[object, tuple[LayerSpec, int, Value]] = {}
        results = []
        for index in range(last + 1):
            replica = job.replica(index, self._tp, self._device)
            key = index if index in (0, last) else _signature(replica, hidden)
            if key not in known:
                self._note(f"measuring layer {index + 1} of {last + 1}")
                known[key] = self._measure(replica, hidden, microbatch)
            layer, measured_index, hidden = known[key]
            results.append((layer, measured_index))
        return results

    def _measure(
        self, replica: LayerReplica, hidden: Value | None, microbatch: Microbatch
    ) -> tuple[LayerSpec, int, Value]:
        """Return (measured values, layer index, output)."""
        last = replica.index == self._job.spec.n_layers - 1
        run = _MeasuredPass(replica, hidden, microbatch)
        activations = activation_bytes(run.forward, replica.module, self._device)
        sent = Message.of(run.forward())
        reduced = torch.zeros_like(replica.gradient)

        def update() -> None:
            replica.update(reduced, 1.0, 0.0)

        def until_weight_part() -> None:
            run.forward()
            run.input_part()

        def seconds(
            call: Callable[[], object], before: Callable[[], object] = lambda: None
        ) -> float:
            """Return the median seconds of `call`, without `before` and the clearing after it."""
            times = []
            for _ in range(self._order.warmup + self._order.repeat):
                before()
                times.append(self._seconds(call))
                run.clear()
            return median(times[self._order.warmup :])

        layer = LayerSpec(
            **_layer_bytes(replica, self._tp.size, update),
            activation_bytes=activations,
            output_bytes=0 if last else sent.tensor.nbytes,
            forward_s=seconds(run.forward),
            backward_s=seconds(run.backward, before=run.forward),
            backward_input_s=seconds(run.input_part, before=run.forward),
            backward_weight_s=seconds(run.weight_part, before=until_weight_part),
            update_s=seconds(update),
        )
        return layer, replica.index, sent.leaves()

    def _seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call, until the device has done the call's work."""
        synchronize(self._device)
        began = mark(self._device)
        call()
        ended = mark(self._device)
        synchronize(self._device)
        seconds = seconds_between(began, ended)
        assert seconds is not None
        return seconds


class _MeasuredPass:
    """Runs one micro-batch through one layer repeatedly, pass by pass."""

    def __init__(self, replica: LayerReplica, hidden: Value | None, microbatch: Microbatch) -> None:
        """`hidden`: its parts that need a gradient are leaves of this pass."""
        self._replica, self._microbatch, self._hidden = replica, microbatch, hidden
        self._weights = [p for p in replica.module.parameters() if p.requires_grad]
        self._out: list[Tensor] = []
        self._rest: WeightBackward | None = None

    def forward(self) -> Value:
        value = self._replica.forward(self._hidden, self._microbatch)
        self._out = [part for part in parts_of(value) if part.requires_grad]
        return value

    def backward(self) -> None:
        if self._out:  # not if the first layer is frozen
            torch.autograd.backward(self._out, self._gradients())
        self._replica.collect(0, skip=False)

    def input_part(self) -> None:
        """Run the input part; it is empty for a layer without an input."""
        if self._hidden is not None:
            sources = [part for part in parts_of(self._hidden) if part.requires_grad]
            self._rest = backward_input(self._out, self._gradients(), sources, self._weights)

    def weight_part(self) -> None:
        """Run the weight part; it is the whole backward pass for a layer without an input."""
        if self._rest is None:
            self.backward()
        else:
            self._rest.run()
            self._replica.collect(0, skip=False)

    def _gradients(self) -> list[Tensor]:
        """Return gradients of the output that are so small that no sum overflows."""
        return [torch.full_like(part, 1.0 / part.numel()) for part in self._out]

    def clear(self) -> None:
        """Restore the initial state for the next repetition."""
        self._out, self._rest = [], None
        self._replica.module.zero_grad()
        for part in parts_of(self._hidden) if self._hidden is not None else ():
            part.grad = None
        self._replica.clear()


def _signature(replica: LayerReplica, hidden: Value | None) -> object:
    """Return a key that is equal for layers with equal modules, parameters and inputs."""
    assert hidden is not None
    named = replica.module.named_parameters()
    parameters = tuple((name, tuple(p.shape), p.dtype, is_frozen(p)) for name, p in named)
    return repr(replica.module), parameters, ValueSpec.of(hidden)


def _layer_bytes(replica: LayerReplica, tp: int, update: Callable[[], None]) -> dict[str, int]:
    """Return the byte sizes of the whole layer, summed over all TP ranks.

    Calls `update` first, because most optimizers create their state at the first update.
    """
    update()
    everything = dict(replica.module.named_parameters())
    parameters = dict(trained(everything.items()))
    parts = {name: tp if shard_dim(p) >= 0 else 1 for name, p in everything.items()}
    element = replica.gradient.element_size()
    frozen = (p.nbytes * parts[n] for n, p in everything.items() if n not in parameters)
    return {
        "param_bytes": sum(p.nbytes * parts[n] for n, p in parameters.items()),
        "frozen_bytes": sum(frozen),
        "state_bytes": sum(nbytes * parts[n] for n, nbytes in replica.optimizer_bytes().items()),
        "gradient_bytes": sum(p.numel() * element * parts[n] for n, p in parameters.items()),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return "cpu"


def _device_memory(device: torch.device) -> int:
    """Return the bytes of the device's memory; 0 for the CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)
