"""Runs cells on processes of this machine. If a process dies, all unfinished cells run again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as readable

from elastic_sim.sweep.cells import MAX_DEATHS, Result, SweepCell, attempt, died, result_or_raise


def run_locally(cells: Sequence[SweepCell], workers: int) -> Generator[tuple[SweepCell, Result]]:
    """Run cells on `workers` processes. Raises CellFailed.

    After a process died, the unfinished cells run one at a time, to find the cell that killed it.
    """
    waiting, deaths = deque(cells), Counter[SweepCell]()
    while waiting:
        before = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_follow_parent
        )
        running: dict[Future[Result | str], SweepCell] = {}
        try:
            yield from _run(pool, workers, waiting, running, deaths)
        except BrokenProcessPool:
            for cell in list(running.values()) or [waiting[0]]:
                deaths[cell] += 1
                if deaths[cell] >= MAX_DEATHS:
                    raise died(cell) from None
            waiting.extendleft(reversed(running.values()))
        finally:
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
            pool.shutdown(cancel_futures=True)  # end the pool's thread before exit


def _run(
    pool: ProcessPoolExecutor,
    workers: int,
    waiting: deque[SweepCell],
    running: dict[Future[Result | str], SweepCell],
    deaths: Counter[SweepCell],
) -> Iterator[tuple[SweepCell, Result]]:
    """Run cells, one per process. Raises BrokenProcessPool; `running` then has unfinished cells."""
    while waiting or running:
        while waiting and len(running) < workers:
            if running and (deaths[waiting[0]] or any(deaths[cell] for cell in running.values())):
                break
            cell = waiting[0]
            with _ignore_interrupts():
                running[pool.submit(attempt, cell)] = cell
            waiting.popleft()
        done = wait(running, return_when=FIRST_COMPLETED).done
        for future in sorted(done, key=lambda one: isinstance(one.exception(), BrokenProcessPool)):
            found = future.result()
            cell = running.pop(future)
            yield cell, result_or_raise(cell, found)


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Let only the main process handle Ctrl-C, not processes started in the meantime."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow_parent() -> None:
    """Let a new process end with the main one."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel

        def leave() -> None:
            readable([sentinel])
            os._exit(1)

        threading.Thread(target=leave, daemon=True).start()
