"""Worker processes for engine tests, forked from a server that has loaded torch."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch

from elastic.worker.transport.cancellation import AbandonSignal
from elastic.worker.transport.links import Links
from elastic.worker.transport.rendezvous import host_store
from tests.launcher.helpers import send as send_signal
from tests.patience import LONG_S

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "pytest", "hypothesis", "tests.worker.engine.models"]
)
DEADLINE_S = LONG_S
"""Limit for each report."""


@dataclass
class Rank:
    """A worker process's view of itself and of the test."""

    rank: int
    size: int
    store: str
    pipe: Connection

    def report(self, value: Any) -> None:
        """Send `value` to the test."""
        self.pipe.send(value)

    def wait_for_parent(self) -> Any:
        """Wait for the next message of the test and return it."""
        return self.pipe.recv()

    def open(
        self, abandon: AbandonSignal | None = None, *, epoch: int = 1, **options: Any
    ) -> Links:
        return Links.open(
            epoch=epoch,
            rank=options.pop("rank", self.rank),
            world_size=options.pop("world_size", self.size),
            store_address=self.store,
            device=torch.device("cpu"),
            timeout_s=10 * DEADLINE_S,
            abandon=abandon or AbandonSignal(),
            **options,
        )


def _body(target: Callable[..., Any], rank: Rank, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    rank.report(target(rank, *args))
    rank.wait_for_parent()


class Ranks:
    """`size` processes that run `target(rank, *args)`; its result is its last report."""

    def __init__(self, target: Callable[..., Any], size: int, *args: Any) -> None:
        self._store, address = host_store()
        self._pipes, self.processes = [], []
        for r in range(size):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_body, args=(target, Rank(r, size, address, theirs), args)
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def reports(self, *ranks: int) -> list[Any]:
        """The next report of each of `ranks` (default: all ranks), in that order."""
        return [self._report(r) for r in ranks or range(len(self._pipes))]

    def _report(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        if pipe not in wait([pipe, self.processes[rank].sentinel], DEADLINE_S):
            raise TimeoutError(f"rank {rank} sent no report within {DEADLINE_S} s")
        return pipe.recv()

    def send(self, message: Any, *ranks: int) -> None:
        """Send `message` to `ranks` (default: all ranks)."""
        for r in ranks or range(len(self._pipes)):
            self._pipes[r].send(message)

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        send_signal(pid, number)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def run_ranks(target: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Results of `target(rank, *args)` on `size` ranks."""
    with Ranks(target, size, *args) as ranks:
        return ranks.reports()
