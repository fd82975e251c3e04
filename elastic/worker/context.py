"""State of a worker process that outlives an epoch.

`TrainingJob` is the user's training description and never changes. `WorkerContext` owns the
objects that a worker process creates once: its device, its connection to the agent, its slots in
shared memory, and the layers that it holds. An epoch (`elastic.worker.epoch_session`) uses the
context and owns only its links and its step runner.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from elastic.core.protocol import messages as m
from elastic.domain.errors import FieldError
from elastic.domain.types import WHOLE, Accumulate, EvaluationResult, JobSpec, Portion, Unit
from elastic.worker.backup.protection import Protection
from elastic.worker.backup.publisher import Publisher
from elastic.worker.control.agent_client import AgentClient, WorkerSettings
from elastic.worker.datasets.data_source import digest_of
from elastic.worker.datasets.weighting import Fields, weight_of
from elastic.worker.engine.injector import FaultInjector, check_faults
from elastic.worker.evaluation import Evaluation
from elastic.worker.model.device import choose_device
from elastic.worker.model.layers import LayerStack, TensorParallel
from elastic.worker.model.microbatch import LazyFields, Microbatch
from elastic.worker.model.optimizer import OptimizerSpec
from elastic.worker.profiling.run_profile import EMULATE, check_profile
from elastic.worker.replica.build import build_replica, warm_up
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.links import Links
from elastic.worker.transport.rendezvous import host_store


class _WeighedFields(LazyFields):
    """Fields of a micro-batch of an evaluation, with its weight, which is known once they are
    read."""

    weight = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """The user's training description."""

    stack: LayerStack
    optimizer: OptimizerSpec
    data: Callable[[int, int], Microbatch]
    """data(step, index) -> micro-batch `index` of `step`, on any device."""
    accumulate: Accumulate
    spec: JobSpec
    evaluation: Evaluation | None = None
    """None: the model is not evaluated."""
    weigh: Callable[[Fields], object] | None = None
    """weigh(fields) -> weight of a micro-batch; None: all count equally."""
    tokens_per_sequence: int = 0
    """Usual tokens of one sequence, if their lengths differ; 0: unknown."""

    @property
    def typical_weight(self) -> float:
        """Expected weight of a micro-batch."""
        return float(self.spec.tokens_per_microbatch) if self.weigh is not None else 1.0

    def microbatch(
        self, step: int, index: int, device: torch.device, *, hashed: bool = True
    ) -> Microbatch:
        """Return micro-batch `index` of `step` on `device`, with its weight. `hashed`: also with a
        hash of both."""
        found = self.data(step, index).fields
        weight, digest = weight_of(self.weigh, found, f"data({step}, {index})"), 0
        if hashed:
            digest = digest_of(index, found, weight, exact=self.accumulate is Accumulate.EXACT)
        fields = {name: tensor.to(device) for name, tensor in found.items()}
        return Microbatch(step, index, fields, digest=digest, weight=weight)

    def evaluation_microbatch(
        self, version: int, index: int, device: torch.device, *, emulated: bool = False
    ) -> Microbatch:
        """Return micro-batch `index` of the evaluation after `version` steps, on `device`.

        It keeps the figures that layers report. Its data are read when a layer first uses them; if
        `emulated`, it has no data.
        """
        assert self.evaluation is not None
        source = self.evaluation.data

        def read() -> dict[str, torch.Tensor]:
            found = source(0, index).fields
            lazy.weight = weight_of(self.weigh, found, f"evaluation.data(0, {index})")
            return {name: tensor.to(device) for name, tensor in found.items()}

        lazy = _WeighedFields(read)
        return Microbatch(version, index, {} if emulated else lazy, figures={})

    def evaluation_weight(self, microbatch: Microbatch) -> float:
        """Return the weight of a micro-batch of an evaluation; 1 under --emulate."""
        fields = microbatch.fields
        if self.weigh is None or not isinstance(fields, _WeighedFields):
            return 1.0
        fields.read()
        return fields.weight

    def replica(
        self,
        layer: int,
        tp: TensorParallel,
        device: torch.device,
        *,
        empty: bool = False,
        portion: Portion = WHOLE,
    ) -> LayerReplica:
        """Return a replica of `layer` at version 0; `empty`: with arbitrary values to replace."""
        return build_replica(
            self.stack,
            layer,
            tp,
            self.optimizer,
            self.accumulate,
            self.spec.seed,
            device,
            n_microbatches=self.spec.n_microbatches,
            empty=empty,
            portion=portion,
        )


@dataclass(slots=True, kw_only=True)
class WorkerContext:
    """Objects that a worker process owns from `attach` to `release`.

    Only `replicas`, `evaluated`, `protection`, `left_links` and `step_began` change between epochs.
    They outlive the epoch that created them, because the next epoch starts from live layers,
    acknowledgements may arrive late, and other workers may still compute in that epoch.
    """

    settings: WorkerSettings
    job: TrainingJob
    unit: Unit
    """The group of tensor-parallel ranks that this worker belongs to."""
    device: torch.device
    tp: TensorParallel
    store: TCPStore
    """Rendezvous store that this worker hosts; the plan of any epoch may name it."""
    agent: AgentClient
    publisher: Publisher
    injector: FaultInjector
    replicas: dict[int, LayerReplica] = field(default_factory=dict)
    """Layers that this worker holds, by index. Each epoch keeps the usable layers."""
    evaluated: EvaluationResult | None = None
    """Newest evaluation, which the next epoch need not repeat; None: none is known."""
    protection: Protection | None = None
    """Backup of `replicas`. The next epoch replaces it once its own layers are installed."""
    left_links: Links | None = None
    """Links of a former epoch, which stay open for workers of the pipeline that still compute."""
    step_began: float = 0.0
    """Value of time.perf_counter when this worker began its newest step."""

    @classmethod
    def attach(cls, settings: WorkerSettings, job: TrainingJob) -> WorkerContext:
        """Prepare the device, connect to the agent, and register this worker there.

        Raises FieldError if the job does not fit the profile, the number of workers per node or the
        injected faults.
        """
        spec = job.spec
        check_profile(settings, spec)
        check_faults(settings.faults, spec)
        if settings.local_world_size % spec.tp:
            remedy = f"it must divide the {settings.local_world_size} workers of a node"
            raise FieldError("tp", spec.tp, remedy)
        device = choose_device(settings.local_rank, emulated=settings.profile == EMULATE)
        if job.accumulate is Accumulate.EXACT and "OMP_NUM_THREADS" not in os.environ:
            # A kernel's sums depend on its number of threads, so all nodes must use the same.
            torch.set_num_threads(1)
        # `shard` is the TP rank, everywhere in the code.
        group, shard = divmod(settings.local_rank, spec.tp)
        tp = job.stack.tensor_parallel(shard, spec.tp, f"{settings.tp_store}.{group}", device)
        warm_up(job.stack, tp, job.optimizer, job.accumulate, device)
        store, address = host_store(settings.host)
        agent = AgentClient(settings)
        memory = Path(settings.memory_dir) / settings.node
        context = cls(
            settings=settings,
            job=job,
            unit=Unit(settings.node, group),
            device=device,
            tp=tp,
            store=store,
            agent=agent,
            publisher=Publisher(
                agent.send,
                memory,
                settings.node,
                shard,
                copy_device=device if device.type == "cuda" else None,
                on_progress=agent.position.advance,
                silence_s=settings.timeouts.silence_s,
            ),
            injector=FaultInjector(settings, agent.send),
        )
        accelerated = device.type != "cpu"
        agent.send(m.Attach(settings.local_rank, os.getpid(), spec, address, accelerated))
        agent.start(context.on_acked)
        return context

    def release(self) -> None:
        """Release process groups and shared memory before the interpreter exits.

        Destructors that run during exit would join threads, which is not safe then.
        """
        self.agent.close()
        if self.left_links is not None:
            self.left_links.close()
            self.left_links = None
        self.publisher.close()
        self.replicas.clear()
        self.protection = None
        self.tp = TensorParallel(self.tp.rank, self.tp.size)
        self.job.stack.release()

    def on_acked(self, acked: m.BundleAcknowledged) -> None:
        """Pass an acknowledgement to publisher and protection. Called in the receiving thread."""
        counts = self.publisher.on_acked(acked.bundle, acked.kept)
        protection = self.protection
        if counts and protection is not None:
            protection.on_acked(acked.bundle, acked.kept)

    def build_replica(self, layer: int, empty: bool, portion: Portion = WHOLE) -> LayerReplica:
        """Return a replica of `layer` at version 0; `empty`: with arbitrary values to replace."""
        replica = self.job.replica(layer, self.tp, self.device, empty=empty, portion=portion)
        replica.owner = self.settings.node
        return replica
