"""Cells on processes of this machine. A process that dies is replaced and its cells are run again."""

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

from elastic_sim.sweep.cells import MOST_DEATHS, Cell, CellFailed, Result, attempt, result_or_raise


def local(cells: Sequence[Cell], workers: int) -> Generator[tuple[Cell, Result]]:
    """Run cells on so many processes. Cells that a process died under are run again one at a time, so that it is
    known which of them it is. Raises CellFailed."""
    waiting, deaths = deque(cells), Counter[Cell]()
    while waiting:
        before = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare
        )
        running: dict[Future[Result | str], Cell] = {}
        try:
            yield from _drained(pool, workers, waiting, running, deaths)
        except BrokenProcessPool:
            for cell in list(running.values()) or [waiting[0]]:
                deaths[cell] += 1
                if deaths[cell] >= MOST_DEATHS:
                    raise CellFailed(
                        f"{cell}: {MOST_DEATHS} processes died while they ran it"
                    ) from None
            waiting.extendleft(reversed(running.values()))
        finally:
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
            pool.shutdown(
                cancel_futures=True
            )  # its thread would be at work while the interpreter ends


def _drained(
    pool: ProcessPoolExecutor,
    workers: int,
    waiting: deque[Cell],
    running: dict[Future[Result | str], Cell],
    deaths: Counter[Cell],
) -> Iterator[tuple[Cell, Result]]:
    """No more cells are handed over than there are processes. Raises BrokenProcessPool, with all cells that may have
    been its cause in `running`."""
    while waiting or running:
        while waiting and len(running) < workers:
            if running and (deaths[waiting[0]] or any(deaths[cell] for cell in running.values())):
                break
            cell = waiting[0]
            with _unheard():
                running[pool.submit(attempt, cell)] = cell
            waiting.popleft()
        done = wait(running, return_when=FIRST_COMPLETED).done
        for future in sorted(done, key=lambda one: isinstance(one.exception(), BrokenProcessPool)):
            found = future.result()
            cell = running.pop(future)
            yield cell, result_or_raise(cell, found)


@contextmanager
def _unheard() -> Iterator[None]:
    """Processes that are started meanwhile do not hear Ctrl-C, which is for the main one to handle."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare() -> None:
    """In a new process: when the main one is gone, this one goes too."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel

        def leave() -> None:
            readable([sentinel])
            os._exit(1)

        threading.Thread(target=leave, daemon=True).start()
