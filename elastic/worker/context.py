"""State of a worker process that outlives an epoch.

`TrainingJob` is the user's training description and never changes. `WorkerContext` owns everything
that one worker process creates once: its device, its connection to the agent, its slots in shared
memory, and the layers that it holds. An epoch (`elastic.worker.epoch_session`) borrows the context
and owns only its links and its step runner.
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
from elastic.domain.types import WHOLE, Accumulate, JobSpec, Portion, Unit
from elastic.worker.backup.copier import beside
from elastic.worker.backup.policy import Protection
from elastic.worker.backup.publisher import Publisher
from elastic.worker.control.agent_client import Control, WorkerSettings
from elastic.worker.engine.injector import Injector
from elastic.worker.model.device import choose_device
from elastic.worker.model.layers import LayerStack, Microbatch, TensorParallel
from elastic.worker.model.optimizer import OptimizerSpec
from elastic.worker.profiling.profiled import EMULATE, check_fit
from elastic.worker.replica.build import build_replica, warm_up
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.rendezvous import host_store


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """The user's training description. Lives as long as the process."""

    stack: LayerStack
    optimizer: OptimizerSpec
    data: Callable[[int, int], Microbatch]
    """data(step, index) -> micro-batch `index` of `step`, on any device."""
    accumulate: Accumulate
    spec: JobSpec


@dataclass(slots=True, kw_only=True)
class WorkerContext:
    """Everything that a worker process owns from `attach` to `release`.

    Only `replicas` and `protection` change from epoch to epoch. They outlive the epoch that made
    them, because the next epoch starts from live layers and late acknowledgements still arrive.
    """

    settings: WorkerSettings
    job: TrainingJob
    unit: Unit
    """The group of tensor-parallel ranks that this worker belongs to."""
    device: torch.device
    tp: TensorParallel
    store: TCPStore
    """Rendezvous store that this worker hosts; the plan of any epoch may name it."""
    agent: Control
    publisher: Publisher
    injector: Injector
    replicas: dict[int, LayerReplica] = field(default_factory=dict)
    """Layers that this worker holds, by index; each epoch keeps the usable ones."""
    protection: Protection | None = None
    """Backup of `replicas`. The next epoch replaces it once its own layers are installed."""

    @classmethod
    def attach(cls, settings: WorkerSettings, job: TrainingJob) -> WorkerContext:
        """Prepare the device, connect to the agent, and announce this worker there.

        Raises FieldError if the job does not fit the profile or the number of workers per node.
        """
        spec = job.spec
        check_fit(settings, spec)
        if settings.local_world_size % spec.tp:
            remedy = f"it must divide the {settings.local_world_size} workers of a node"
            raise FieldError("tp", spec.tp, remedy)
        device = choose_device(settings.local_rank, emulated=settings.profile == EMULATE)
        if job.accumulate is Accumulate.EXACT and "OMP_NUM_THREADS" not in os.environ:
            # The sums of a kernel depend on its number of threads, which must not differ by node.
            torch.set_num_threads(1)
        group, shard = divmod(settings.local_rank, spec.tp)
        tp = job.stack.tensor_parallel(shard, spec.tp, f"{settings.tp_store}.{group}", device)
        warm_up(job.stack, tp, job.optimizer, job.accumulate, device)
        store, address = host_store(settings.host)
        agent = Control(settings.agent)
        memory = Path(settings.memory_dir) / settings.node
        context = cls(
            settings=settings,
            job=job,
            unit=Unit(settings.node, group),
            device=device,
            tp=tp,
            store=store,
            agent=agent,
            publisher=Publisher(agent, memory, settings.node, shard, beside=beside(device)),
            injector=Injector(settings, agent.send),
        )
        agent.send(m.Attach(settings.local_rank, os.getpid(), spec, address))
        agent.start(context.on_acked)
        return context

    def release(self) -> None:
        """Free process groups and slots before the interpreter exits: destructors join threads."""
        self.agent.close()
        self.publisher.close()
        self.replicas.clear()
        self.protection = None
        self.tp = TensorParallel(self.tp.rank, self.tp.size)
        self.job.stack.release()

    def on_acked(self, acked: m.BundleAcknowledged) -> None:
        """Pass an acknowledgement on to its owners. Called from the agent connection's thread."""
        self.publisher.on_acked(acked.bundle, acked.kept)
        protection = self.protection
        if protection is not None:
            protection.on_acked(acked.bundle, acked.kept)

    def build_replica(self, layer: int, empty: bool, portion: Portion = WHOLE) -> LayerReplica:
        """Build `layer` at version 0, or `empty`, to be filled from a copy."""
        job = self.job
        replica = build_replica(
            job.stack,
            layer,
            self.tp,
            job.optimizer,
            job.accumulate,
            job.spec.seed,
            self.device,
            empty=empty,
            portion=portion,
        )
        replica.owner = self.settings.node
        return replica
