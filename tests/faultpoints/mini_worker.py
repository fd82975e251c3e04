"""A worker without links and layers' mathematics: publisher, protection, state loader, gradient
sums, rounds and replicas are the product's. The gradient of a micro-batch is a function of layer,
step and number. Sums over holders and commits go through the test's driver, which checks that each
micro-batch is contained exactly once."""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from elastic.core.protocol import messages as m
from elastic.domain.errors import ChannelClosed, VaultError
from elastic.domain.types import (
    ACTIVATION,
    COTANGENT,
    Accumulate,
    Assignment,
    Copy,
    JobSpec,
    Portion,
    StepRecord,
)
from elastic.planning.plan.rank_map import roster
from elastic.planning.plan.schemes import gradients_of
from elastic.planning.schedule.schedule import Action, Kind
from elastic.rpc.frames import Channel, connect_unix
from elastic.worker.backup.activation_log import LoggedMessage, read_message
from elastic.worker.backup.protection import Protection
from elastic.worker.backup.publisher import Publisher
from elastic.worker.engine.incremental_allreduce import IncrementalAllReduce
from elastic.worker.engine.sharded_update import ParameterGather
from elastic.worker.engine.stage_runner import GroupAgreement
from elastic.worker.model.values import Message
from elastic.worker.recovery.fetch import Fetcher
from elastic.worker.recovery.final_hash import job_sha256
from elastic.worker.recovery.state_loader import StateLoader
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned
from elastic.worker.transport.links import Links
from tests.faultpoints.mini_agent import SLOTS, SOCKET
from tests.worker.model.toy_model import ALONE, CPU, sgd, toy_stack
from tests.worker.model.toy_model import replicas as toy_replicas

STACK, OPTIMIZER = toy_stack(), replace(sgd(), elementwise=True)


def gradient(layer: int, step: int, microbatch: int, like: Tensor) -> Tensor:
    """The gradient of one parameter: exact in fixed point, and different for each micro-batch."""
    base = torch.arange(like.numel(), dtype=torch.float32).remainder(7).view(like.shape)
    return (base + layer + 1) * (microbatch + 1 + 4 * step) / 1024


def message(kind: str, layer: int, step: int, microbatch: int) -> Tensor:
    """A message between stages."""
    number = 64 * layer + 8 * step + microbatch + (0.5 if kind == COTANGENT else 0.0)
    return torch.full((2, 3), number)


class Wait:
    """Answer of the driver to one exchange. `done` is false, so that all workers wait at the same
    points in every run."""

    def __init__(self, exchange: Exchange, name: str, targets: Sequence[Tensor], how: str) -> None:
        self._exchange, self._name, self._targets, self._how = exchange, name, targets, how

    def done(self) -> bool:
        return False

    def __call__(self) -> None:
        answers = self._exchange.answer(self._name)
        found = [torch.from_numpy(answer) for answer in answers]
        if self._how == "sum":
            self._targets[0].copy_(torch.stack(found).sum(0))
            return
        for target, answer in zip(self._targets, found, strict=True):
            target.copy_(answer)


class Exchange:
    """Takes the place of `Links`: collectives through the driver's pipe."""

    device = CPU

    def __init__(self, pipe: Connection, rank: int, epoch: int, abandon: AbandonSignal) -> None:
        self._pipe, self.rank, self._epoch, self._abandon = pipe, rank, epoch, abandon
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._came: dict[str, list[Any]] = {}
        self._numbers: dict[str, int] = {}
        abandon.subscribe(lambda: self._answers.put(None))

    def put(self, name: str, answers: list[Any]) -> None:
        """Called by the thread that reads the pipe."""
        self._answers.put((name, answers))

    def ask(self, name: str, ranks: Sequence[int], value: Any) -> str:
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        full = f"{self._epoch}/{name}/{number}"
        self._pipe.send(("exchange", full, self.rank, tuple(ranks), value))
        return full

    def answer(self, full: str) -> list[Any]:
        while full not in self._came:
            found = self._answers.get()
            self._abandon.check()
            self._came[found[0]] = found[1]
        return self._came.pop(full)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Wait:
        name = self.ask(f"sum {ranks}", ranks, tensor.numpy())
        return Wait(self, name, [tensor], "sum")

    def all_gather(self, rows: list[Tensor], sent: Tensor, ranks: tuple[int, ...]) -> Wait:
        name = self.ask(f"gather {ranks}", ranks, sent.numpy())
        return Wait(self, name, rows, "gather")


class MiniWorker:
    """Trains as `elastic.worker.epoch_session` does, one epoch after the other."""

    def __init__(self, node: str, root: Path, pipe: Connection, spec: JobSpec, timeout_s: float):
        self._node, self._pipe, self._spec, self._timeout_s = node, pipe, spec, timeout_s
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._abandon = AbandonSignal()
        self._exchange: Exchange | None = None
        self._replicas: dict[int, LayerReplica] = {}
        self._protection: Protection | None = None
        self._record: StepRecord | None = None
        self._halting = 0
        self._channel: Channel = connect_unix(str(root / node / SOCKET))
        self._channel.send(m.Hello(0, os.getpid()))
        self._channel.send(m.Attach(0, os.getpid(), spec, ""))
        self._publisher = Publisher(self._channel.send, root / node / SLOTS, node)
        threading.Thread(target=self._hear_agent, daemon=True).start()
        threading.Thread(target=self._hear_driver, daemon=True).start()

    def _hear_agent(self) -> None:
        try:
            while True:
                found = self._channel.receive()
                if isinstance(found, m.BundleAcknowledged):
                    self._publisher.on_acked(found.bundle, found.kept)
                    if self._protection is not None:
                        self._protection.on_acked(found.bundle, found.kept)
        except (ChannelClosed, OSError):
            os._exit(3)  # the agent is gone, or cannot be reached; as in the product's worker

    def _hear_driver(self) -> None:
        while True:
            try:
                name, *rest = self._pipe.recv()
            except EOFError:
                os._exit(0)
            if name == "answer":
                if self._exchange is not None:
                    self._exchange.put(*rest)
            elif name == "halt":
                self._halting = max(self._halting, rest[0])
                self._abandon.set(f"epoch {rest[0]}")
                self._orders.put(None)
            else:
                self._abandon = AbandonSignal()
                self._orders.put(rest[0])

    def run(self) -> None:
        """Serve orders: an assignment begins an epoch, None ends the present one."""
        while True:
            order = self._orders.get()
            if order is None:
                self._halt()
                continue
            try:
                self._train(order)
            except EpochAbandoned:
                pass
            except VaultError as error:
                self._pipe.send(("held", order.plan.epoch, "", str(error)))

    def _halt(self) -> None:
        epoch = self._halting
        if self._protection is not None:
            self._protection.flush()
        versions = [replica.version for replica in self._replicas.values()]
        self._channel.send(m.Halted(epoch, min(versions, default=-1), record=self._record))

    def _build(self, layer: int, empty: bool, portion: Portion) -> LayerReplica:
        replica = build_replica(
            STACK, layer, ALONE, OPTIMIZER, Accumulate.EXACT, 7, CPU, empty=empty, portion=portion
        )
        replica.owner = self._node
        return replica

    # ---- one epoch ----

    def _train(self, assignment: Assignment) -> None:
        plan, abandon = assignment.plan, self._abandon
        workers = roster(plan)
        rank = next(r for r, member in enumerate(workers.members) if member.unit.node == self._node)
        member = workers.members[rank]
        self._install(assignment, rank)
        replicas = list(self._replicas.values())
        self._exchange = exchange = Exchange(self._pipe, rank, plan.epoch, abandon)
        self._protection = protection = Protection(
            self._publisher, plan, self._node, replicas, abandon, self._channel.send, ()
        )
        every, links = gradients_of(plan.gradients).rounds, cast(Links, exchange)
        rounds = None
        if every:
            rounds = IncrementalAllReduce(
                replicas, links, workers, every, GroupAgreement(None, abandon)
            )
        gather = ParameterGather(replicas, links, workers)
        everybody = range(workers.size)
        exchange.answer(exchange.ask("ready", everybody, None))
        todo, covered = assignment.todo, dict(assignment.covered)
        runs = assignment.partial
        for step in range(assignment.step, self._spec.n_steps):
            for run in (run for run in runs if run.pipeline == member.pipeline):
                mine = [r for r in replicas if run.first <= r.index < run.last]
                self._microbatch(mine, step, run.microbatch, covered)
            if rounds is not None:
                actions = [Action(Kind.B, index) for index in todo[member.pipeline]]
                rounds.begin(actions, [len(part) for part in todo])
            for index in todo[member.pipeline]:
                self._microbatch(replicas, step, index, covered)
                self._log(assignment, member.layers, step, index)
                if rounds is not None:
                    rounds.after_microbatch()
                    if rounds.shared:
                        protection.settle()
                protection.after_microbatch(step)
            protection.after_microbatches()
            reduced = self._reduce(replicas, rounds, workers)
            protection.before_commit(step, reduced)
            sums = {r.index: sorted(i for part in r.parts for i in part.ledger) for r in replicas}
            common = rounds is not None
            exchange.answer(exchange.ask(f"commit {step} {common}", everybody, sums))
            self._record = StepRecord(step, 1.0, 1.0, 0.0, plan.n_layers)
            protection.before_update(reduced, 1.0)
            for replica in replicas:
                replica.update(reduced[replica.index], 1.0, OPTIMIZER.lr(step))
                protection.retire(replica)
            protection.after_update()
            gather.gather()
            if rank == 0:
                self._pipe.send(("step", plan.epoch, self._record))
            todo, covered = tuple(p.microbatches for p in plan.pipelines), {}
            runs = ()
        protection.finish()
        exchange.answer(exchange.ask("finish", everybody, None))
        sha = ""
        if rank == 0:
            vaults = dict(assignment.vaults)
            sha = job_sha256(plan, self._spec, vaults, self._node, abandon, lambda: None)
        self._pipe.send(("finished", plan.epoch, sha))

    def _install(self, assignment: Assignment, rank: int) -> None:
        member = roster(assignment.plan).members[rank]
        vaults = dict(assignment.vaults)
        fetcher = Fetcher(self._node, vaults, self._abandon, timeout_s=self._timeout_s)
        loader = StateLoader(self._build, fetcher, OPTIMIZER.lr, self._abandon.check, STACK.tied)
        try:
            self._replicas = loader.usable(assignment, member, self._replicas)
            if self._protection is not None:
                self._protection.release(self._replicas, assignment.plan.epoch)
            loaded = loader.install(assignment, member, self._replicas)
        finally:
            fetcher.close()
        self._replicas = {replica.index: replica for replica in loaded.replicas}
        for run in assignment.partial:
            for copy in (*run.inputs, *run.gradients):
                if copy.key in loaded.messages:
                    self._compare(copy, loaded.messages[copy.key])

    def _compare(self, copy: Copy, data: Tensor) -> None:
        (index,) = copy.microbatches
        expected = message(copy.kind, copy.layer, copy.step, index)
        if not torch.equal(read_message(data).tensor, expected):
            raise AssertionError(f"logged message {copy.key} has other values")

    def _microbatch(
        self,
        replicas: Sequence[LayerReplica],
        step: int,
        index: int,
        covered: dict[int, frozenset[int]],
    ) -> None:
        for replica in replicas:
            for parameter in replica.parameters:
                parameter.grad = gradient(replica.index, step, index, parameter)
            skip = index in covered.get(replica.index, frozenset())
            replica.collect(index, skip=skip)
            if replica.index == STACK.n_layers - 1 and not skip:
                replica.losses[index] = 1.0 + index

    def _log(self, assignment: Assignment, layers: Sequence[int], step: int, index: int) -> None:
        assert self._protection is not None
        log = self._protection.log
        if log is None:
            return
        for kind, layer in ((ACTIVATION, layers[-1] + 1), (COTANGENT, layers[0])):
            if 0 < layer < assignment.plan.n_layers:
                sent = Message.of(message(kind, layer, step, index))
                log.keep(LoggedMessage(kind, layer, step, index, sent))

    def _reduce(
        self, replicas: Sequence[LayerReplica], rounds: IncrementalAllReduce | None, workers: Any
    ) -> dict[int, Tensor]:
        assert self._exchange is not None and self._protection is not None
        if rounds is not None:
            sums = rounds.finish(())
            self._protection.settle()
            return sums
        sums = {}
        for replica in replicas:
            total = replica.gradient.clone()
            ranks = workers.holders(replica.index, 0)
            if len(ranks) > 1:
                self._exchange.all_reduce(total, ranks)()
            sums[replica.index] = total
        return sums


def prepare() -> None:
    """Import and build all that workers need, so that forked workers start in milliseconds."""
    torch.set_num_threads(1)
    layers = toy_replicas()
    for replica in layers:
        for parameter in replica.parameters:
            parameter.grad = gradient(replica.index, 0, 0, parameter)
        replica.collect(0, skip=False)
        replica.update(replica.gradient.clone(), 1.0, OPTIMIZER.lr(0))
        replica.read_state(replica.state_run())
    gc.collect()
    gc.freeze()


def main(node: str, root: Path, pipe: Connection, spec: JobSpec, timeout_s: float) -> None:
    """Entry of the process. The agent must know the process before it attaches."""
    pipe.recv()
    MiniWorker(node, root, pipe, spec, timeout_s).run()
