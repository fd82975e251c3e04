"""Simulated `threading`, `queue`, `time` and futures, for the modules of the shells.

Each class has the interface of its original, as far as the shells use it. `Threading`, `Queues` and
`Time` stand in for the modules.
"""

from __future__ import annotations

import queue as real_queue
import threading as real_threading
import time as real_time
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation.scheduler import Killed, Process, Scheduler, Task

WALL_S = 1_800_000_000.0
"""Wall time at which a run begins."""


class Lock:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.owner: Task | None = None
        self.waiters: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self.scheduler
        if scheduler.ending:
            return True
        scheduler.may_yield()
        me = scheduler.current
        if self.owner is None:
            self.owner = me
            return True
        if not blocking:
            return False
        assert me is not None, "a callback may not wait for a lock"
        end = scheduler.now + timeout if timeout >= 0 else None
        while self.owner is not None:
            self.waiters.append(me)
            scheduler.pause(None if end is None else end - scheduler.now)
            if me in self.waiters:
                self.waiters.remove(me)
            if end is not None and scheduler.now >= end and self.owner is not None:
                return False
        self.owner = me
        return True

    def release(self) -> None:
        self.owner = None
        if self.waiters:
            self.scheduler.wake(self.waiters.popleft())

    def locked(self) -> bool:
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.owner is not None and self.owner is self.scheduler.current:
            self.depth += 1
            return True
        taken = super().acquire(blocking, timeout)
        self.depth = 1 if taken else self.depth
        return taken

    def release(self) -> None:
        self.depth -= 1
        if self.depth <= 0:
            super().release()


class Condition:
    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self.scheduler, self.lock = scheduler, lock or RLock(scheduler)
        self.waiters: deque[Task] = deque()
        self.acquire, self.release = self.lock.acquire, self.lock.release

    def __enter__(self) -> bool:
        return self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me = self.scheduler.current
        assert me is not None
        self.waiters.append(me)
        depth, owner = getattr(self.lock, "depth", 0), self.lock.owner
        assert owner is me or self.scheduler.ending
        if depth:
            self.lock.depth = 1  # type: ignore[attr-defined]
        self.lock.release()
        woken = self.scheduler.pause(timeout)
        if me in self.waiters:
            self.waiters.remove(me)
        self.lock.acquire()
        if depth:
            self.lock.depth = depth  # type: ignore[attr-defined]
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self.scheduler.now + timeout
        result = predicate()
        while not result:
            left = None if end is None else end - self.scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self.waiters))):
            self.scheduler.wake(self.waiters.popleft())

    def notify_all(self) -> None:
        self.notify(len(self.waiters))


class Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.flag = scheduler, False
        self.waiters: list[Task] = []

    def is_set(self) -> bool:
        return self.flag

    def set(self) -> None:
        self.flag = True
        waiters, self.waiters = self.waiters, []
        for task in waiters:
            self.scheduler.wake(task)

    def clear(self) -> None:
        self.flag = False

    def wait(self, timeout: float | None = None) -> bool:
        self.scheduler.may_yield()
        if not self.flag:
            me = self.scheduler.current
            if me is not None:
                self.waiters.append(me)
            self.scheduler.pause(timeout)
            if me in self.waiters:
                self.waiters.remove(me)
        return self.flag


class SimThread:
    """A thread of the process that creates it."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self.scheduler, self.name, self.daemon = scheduler, name or "thread", bool(daemon)
        self._run = lambda: target(*args, **(kwargs or {})) if target is not None else None
        self.task: Task | None = None

    def start(self) -> None:
        scheduler = self.scheduler
        assert scheduler.current is not None, "threads belong to a process"
        self.task = scheduler.spawn(scheduler.current.process, self.name, self._run)
        self.task.local = self  # type: ignore[attr-defined]
        scheduler.may_yield()

    def join(self, timeout: float | None = None) -> None:
        end = None if timeout is None else self.scheduler.now + timeout
        while self.is_alive():
            assert self.task is not None
            left = None if end is None else end - self.scheduler.now
            if left is not None and left <= 0:
                return
            me, joiners = self.scheduler.current, self.task.joiners
            if me is not None:
                joiners.append(me)
            self.scheduler.pause(left)
            if me in joiners:  # the time was over: its next wait is another one
                joiners.remove(me)

    def is_alive(self) -> bool:
        return self.task is not None and not self.task.ended and not self.scheduler.ending


class Timer(SimThread):
    def __init__(self, scheduler: Scheduler, interval: float, function: Callable[[], Any]) -> None:
        self._cancelled = False

        def body() -> None:
            scheduler.sleep(interval)
            if not self._cancelled:
                function()

        super().__init__(scheduler, body, "timer")

    def cancel(self) -> None:
        self._cancelled = True


class SimpleQueue:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.items: deque[Any] = deque()
        self.waiters: deque[Task] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self.items.append(item)
        if self.waiters:
            self.scheduler.wake(self.waiters.popleft())
        self.scheduler.may_yield()

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        scheduler = self.scheduler
        if scheduler.ending:
            raise Killed
        end = None if timeout is None else scheduler.now + timeout
        scheduler.may_yield()
        while not self.items:
            left = None if end is None else end - scheduler.now
            if not block or (left is not None and left <= 0):
                raise real_queue.Empty
            me = scheduler.current
            assert me is not None
            self.waiters.append(me)
            scheduler.pause(left)
            if me in self.waiters:
                self.waiters.remove(me)
        return self.items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self.items

    def qsize(self) -> int:
        return len(self.items)


class Threading:
    """Stands in for the module `threading`."""

    def __init__(self, scheduler: Scheduler) -> None:
        def bound(kind: type) -> Callable[..., Any]:
            return lambda *args, **kwargs: kind(scheduler, *args, **kwargs)

        self.scheduler = scheduler
        self.Lock, self.RLock, self.Condition = bound(Lock), bound(RLock), bound(Condition)
        self.Event, self.Thread, self.Timer = bound(Event), bound(SimThread), bound(Timer)

    def current_thread(self) -> Any:
        task = self.scheduler.current
        return getattr(task, "local", task)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_threading, name)


class Queues:
    """Stands in for the module `queue`."""

    Empty, Full = real_queue.Empty, real_queue.Full

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def SimpleQueue(self) -> Any:
        return SimpleQueue(self._scheduler)

    def Queue(self, maxsize: int = 0) -> Any:
        return SimpleQueue(self._scheduler)


class Time:
    """Stands in for the module `time`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return 100.0 + self._scheduler.now

    perf_counter = monotonic

    def time(self) -> float:
        return WALL_S + self._scheduler.now

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_time, name)


class SimFuture:
    """Stands in for `concurrent.futures.Future`."""

    default: Scheduler
    """Scheduler of the present run."""

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        self._done = Event(scheduler or SimFuture.default)
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], object]] = []

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._done.wait(timeout)
        return self._error

    def set_result(self, result: Any) -> None:
        self._result = result
        self._finish()

    def set_exception(self, error: Any) -> None:
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._done.set()
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        if self._done.is_set():
            callback(self)
        else:
            self._callbacks.append(callback)

    def done(self) -> bool:
        return self._done.is_set()

    def __class_getitem__(cls, item: Any) -> type[SimFuture]:
        return cls


class Executor:
    """A pool of one or more threads."""

    def __init__(self, scheduler: Scheduler, workers: int = 1, name: str = "pool") -> None:
        self._scheduler, self._queue = scheduler, SimpleQueue(scheduler)
        self._size, self._name, self._started = workers, name, 0

    def submit(self, function: Callable[..., Any], *args: Any) -> SimFuture:
        future = SimFuture(self._scheduler)
        if self._started < self._size:
            self._started += 1
            SimThread(self._scheduler, self._work, self._name).start()
        self._queue.put((future, function, args))
        return future

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, function, args = item
            try:
                result = function(*args)
            except Exception as error:  # noqa: BLE001 - as concurrent.futures does
                future.set_exception(error)
            else:
                future.set_result(result)

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        for _ in range(self._started):
            self._queue.put(None)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def process_of(scheduler: Scheduler) -> Process:
    """Return the process whose thread runs."""
    assert scheduler.current is not None
    return scheduler.current.process
