"""Our engine against `Schedule1F1B` of torch.distributed.pipelining.

    python -m benchmarks.engine [--stages 2 4] [--pairs 12] [--hidden 256] [--tokens 512] ...

Both use the same processes, layer objects, stages and micro-batches, and gloo. They take turns step
by step, and the first of each pair alternates. The time of a step is that of its slowest rank. The
result is the median over pairs of torch's time over ours: above 1 we are faster. Both compute the
same gradients, which is checked once before the timing starts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.results import Row, save
from elastic.domain.types import Accumulate, Pipeline, Plan, Stage, Unit
from elastic.planning.plan.rank_map import roster
from elastic.planning.schedule.schedule import ONE_F_ONE_B, Action, lists
from elastic.worker.engine.stage import stages_of_rank
from elastic.worker.engine.stage_runner import StageRunner
from elastic.worker.model.layers import ListStack, TensorParallel
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import OptimizerSpec
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import AbandonSignal
from elastic.worker.transport.links import Links
from elastic.worker.transport.rendezvous import host_store

VOCAB, SEQ = 256, 128
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class EngineSetting:
    stages: int
    layers: int
    hidden: int
    tokens: int
    """Tokens per micro-batch."""
    microbatches: int
    pairs: int

    @property
    def sequences(self) -> int:
        return self.tokens // SEQ


class Embed(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, hidden)

    def compute(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.table(tokens)
        return found

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        return self.compute(microbatch.fields["tokens"])


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            hidden,
            hidden // 64,
            4 * hidden,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )

    def compute(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.layer(hidden)
        return found

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        return self.compute(hidden)


class Head(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.output = nn.Linear(hidden, VOCAB)

    def compute(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.output(hidden)
        return found

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        return loss_of(self.compute(hidden), microbatch.fields["labels"])


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Chain(nn.Module):
    """A stage for torch's engine, made of the modules of our replicas."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part.compute(x)  # type: ignore[operator]
        return x


class NoHooks:
    def before(self, action: Action) -> None:
        return None

    def on_backward(self, index: int) -> None:
        return None


def plan_of(setting: EngineSetting) -> Plan:
    """Return a plan of one pipeline with equal numbers of blocks per stage."""
    n, per = setting.layers + 2, setting.layers // setting.stages
    cuts = [0, *(1 + per * s for s in range(1, setting.stages)), n]
    stages = tuple(Stage(Unit(f"node{s}"), cuts[s], cuts[s + 1]) for s in range(setting.stages))
    microbatches = tuple(range(setting.microbatches))
    return Plan(1, n, setting.microbatches, 1, (Pipeline(stages, microbatches),))


def build(setting: EngineSetting, layers: Sequence[int]) -> list[LayerReplica]:
    blocks: list[Callable[[], nn.Module]] = [lambda: Block(setting.hidden)] * setting.layers
    stack = ListStack(
        [lambda: Embed(setting.hidden), *blocks, lambda: Head(setting.hidden)], seed=0
    )
    optimizer = OptimizerSpec(
        factory=lambda groups: torch.optim.SGD(groups, lr=0.1), lr=lambda step: 0.1
    )
    return [
        build_replica(stack, i, TensorParallel(), optimizer, Accumulate.FAST, 0, CPU)
        for i in layers
    ]


class Ours:
    def __init__(
        self,
        setting: EngineSetting,
        rank: int,
        store: str,
        replicas: list[LayerReplica],
        batch: Tensor,
    ) -> None:
        ranks = roster(plan_of(setting))
        links = Links.open(
            epoch=1,
            rank=rank,
            world_size=setting.stages,
            store_address=store,
            device=CPU,
            timeout_s=300.0,
            abandon=AbandonSignal(),
            pairs=ranks.pairs(),
        )
        self._replicas, self._batch, self._n = (
            replicas,
            batch.chunk(setting.microbatches),
            setting.microbatches,
        )
        self._runner = StageRunner(
            stages_of_rank(ranks, rank, replicas),
            links,
            n_microbatches=self._n,
            data=self._data,
        )
        self._actions = lists(ONE_F_ONE_B, setting.stages, setting.stages, tuple(range(self._n)))[
            rank
        ]

    def _data(self, step: int, index: int) -> Microbatch:
        part = self._batch[index]
        return Microbatch(step, index, {"tokens": part[:, :-1], "labels": part[:, 1:]})

    def step(self) -> None:
        for replica in self._replicas:
            replica.clear()
        self._runner.run(0, self._actions, {}, NoHooks())

    def gradients(self) -> list[Tensor]:
        return [
            r.gradient[r.gradient_slice(name)]
            for r in self._replicas
            for name, _ in r.module.named_parameters()
        ]


class Torchs:
    def __init__(
        self, setting: EngineSetting, rank: int, replicas: list[LayerReplica], batch: Tensor
    ) -> None:
        self._module = Chain([replica.module for replica in replicas])
        stage = PipelineStage(self._module, rank, setting.stages, CPU)
        self._schedule = Schedule1F1B(stage, setting.microbatches, loss_of)
        self._first, self._last = rank == 0, rank == setting.stages - 1
        self._tokens, self._labels = batch[:, :-1], batch[:, 1:]

    def step(self) -> None:
        self._module.zero_grad(set_to_none=True)
        inputs = (self._tokens,) if self._first else ()
        target = self._labels if self._last else None
        self._schedule.step(*inputs, target=target, losses=[] if self._last else None)

    def gradients(self) -> list[Tensor]:
        found = [p.grad.flatten() for p in self._module.parameters() if p.grad is not None]
        self._module.zero_grad(set_to_none=True)
        return found


class Timing(NamedTuple):
    wall_s: float
    """Time of the slowest rank, from a common start."""
    cpu_s: float
    """Processor time of all ranks together; steadier on a busy machine."""


def timed(step: Callable[[], None]) -> Timing:
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    step()
    wall, used = torch.tensor(time.perf_counter() - began), torch.tensor(time.process_time() - cpu)
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return Timing(float(wall), float(used))


def work(setting: EngineSetting, rank: int, store: str, pipe: Connection) -> None:
    """Run one rank: check that both engines give the same gradients, then time them in turns."""
    torch.set_num_threads(1)
    host, port = store.split(":")
    rendezvous = dist.TCPStore(host, int(port), is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("torch", rendezvous),  # type: ignore[attr-defined]
        rank=rank,
        world_size=setting.stages,
    )
    replicas = build(setting, roster(plan_of(setting)).members[rank].layers)
    shape = (setting.microbatches * setting.sequences, SEQ + 1)
    batch = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(0))
    theirs, ours = (
        Torchs(setting, rank, replicas, batch),
        Ours(setting, rank, store, replicas, batch),
    )
    theirs.step()
    expected = theirs.gradients()
    ours.step()
    for a, b in zip(ours.gradients(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
    found = []
    for i in range(setting.pairs):
        if i % 2:
            our_time = timed(ours.step)
            found.append((timed(theirs.step), our_time))
        else:
            found.append((timed(theirs.step), timed(ours.step)))
        theirs.gradients()
    pipe.send(found)
    pipe.recv()


def measure(setting: EngineSetting) -> list[Row]:
    store, address = host_store()
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    for rank in range(setting.stages):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(setting, rank, address, theirs)))
        pipes.append(mine)
        processes[-1].start()
        theirs.close()
    pairs, *_ = [pipe.recv() for pipe in pipes]
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("done")
        process.join()
    del store
    name = f"{setting.stages} stages"
    speed = statistics.median(t.wall_s / o.wall_s for t, o in pairs)
    thrift = statistics.median(t.cpu_s / o.cpu_s for t, o in pairs)
    return [
        Row(f"{name}: speed over Schedule1F1B", speed, "x", 1.0, "higher"),
        Row(f"{name}: Schedule1F1B's CPU time over ours", thrift, "x", 1.0, "higher"),
        Row(
            f"{name}: step, ours", statistics.median(o.wall_s for _, o in pairs), "s", None, "lower"
        ),
        Row(
            f"{name}: step, Schedule1F1B",
            statistics.median(t.wall_s for t, _ in pairs),
            "s",
            None,
            "lower",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="of one micro-batch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=12)
    args = vars(parser.parse_args())
    rows = []
    for stages in args.pop("stages"):
        rows += measure(EngineSetting(stages=stages, **args))
    print(f"written to {save('engine', rows)}")


if __name__ == "__main__":
    main()
