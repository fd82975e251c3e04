"""A scheduler that decides every interleaving of many processes, from one seed.

Each simulated thread is a real thread, but only the one that holds the *baton* runs. It keeps the
baton until it blocks in a primitive of `tests.simulation.primitives`; then the scheduler takes the
next event from one heap, ordered by simulated time. An event wakes a thread or is a short callback
(the arrival of a packet). A woken thread runs after a random delay, and a thread that uses a
primitive may have to wait for a moment, so the seed decides who runs first.

No real time passes in a run: the clock jumps from event to event.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import math
import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

END_S = 20.0
"""Longest real time for a thread to end after the run."""


class Killed(BaseException):
    """Ends a simulated thread after the run, or with its process."""


class Process:
    """A simulated process: threads that are killed or stopped together."""

    def __init__(self, scheduler: Scheduler, name: str, host: Any) -> None:
        self.scheduler, self.name, self.host = scheduler, name, host
        self.pid = scheduler.next_pid()
        self.alive, self.stopped = True, False
        self.stops: list[tuple[float, float]] = []
        """(begin, end) of the times in which no thread ran."""
        self.code: int | None = None
        self.local: dict[str, Any] = {}
        """Objects of which a real process has one, such as its event loop."""
        self.may_fail: tuple[type[BaseException], ...] = ()
        """Errors that may end it, because others then restart it."""
        self.at_exit: list[Callable[[], None]] = []
        self.watchers: list[Task] = []
        self.frozen: list[tuple[Task, bool]] = []

    def start(self, main: Callable[[], int | None]) -> Process:
        """Run `main` on the main thread. The process ends with it."""

        def body() -> None:
            try:
                code = main() or 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except Exception as error:  # noqa: BLE001 - it ends a real process as well
                self.scheduler.log(f"{self.name} ends: {error!r}")
                self.scheduler.crashed(self, error)
                code = 1
            self.end(code)

        self.scheduler.spawn(self, "main", body)
        return self

    def end(self, code: int) -> None:
        """End all threads; the operating system then closes what the process had open."""
        if not self.alive:
            return
        self.alive, self.code = False, code
        self.scheduler.log(f"{self.name} has ended with {code}")
        for action in self.at_exit:
            action()
        for task in self.watchers:
            self.scheduler.wake(task)

    def stop(self) -> None:
        """Run no thread until `resume`."""
        if not self.stopped:
            self.stopped = True
            self.stops.append((self.scheduler.now, math.inf))

    def resume(self) -> None:
        if self.stopped:
            self.stopped = False
            self.stops[-1] = self.stops[-1][0], self.scheduler.now
        frozen, self.frozen = self.frozen, []
        for task, woken in frozen:
            self.scheduler.push(self.scheduler.jitter(), task, task.token, woken)


class Task:
    """A simulated thread."""

    def __init__(self, process: Process, name: str, target: Callable[[], object]) -> None:
        self.process, self.name, self.target = process, name, target
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.token, self.waits, self.woken, self.ended = 0, False, False, False
        self.joiners: list[Task] = []
        self.held = 0
        self.thread: threading.Thread | None = None


class Scheduler:
    """The clock, the heap of events, and the baton. `run` is called once."""

    def __init__(self, seed: int, preemption: float = 0.02) -> None:
        """`preemption`: share of the calls of a primitive at which another thread may run first."""
        self.rng, self._preemption = random.Random(seed), preemption
        self.now = 0.0
        self.current: Task | None = None
        self.trail: list[str] = []
        """What happened, one line per event, in order."""
        self.crashes: list[str] = []
        """Threads that ended by an error."""
        self.ending = self.over = False
        self.switches = 0
        self.until = 0.0
        self._heap: list[tuple[float, int, Any, int, bool]] = []
        self._order, self._pids = itertools.count(), itertools.count(1000)
        self._tasks: list[Task] = []
        self._driver = _thread.allocate_lock()
        self._driver.acquire()
        self._idents = {_thread.get_ident()}
        """Identifiers of the real threads of this run."""

    def runs_here(self) -> bool:
        """Return whether the calling thread is of this run, and none that an earlier test left."""
        return _thread.get_ident() in self._idents

    # ---- events ----

    def next_pid(self) -> int:
        return next(self._pids)

    def log(self, text: str) -> None:
        self.trail.append(f"{self.now:9.4f} {text}")

    def crashed(self, process: Process, error: BaseException) -> None:
        if process.may_fail and isinstance(error, process.may_fail):
            return
        trace = "".join(traceback.format_exception(error))
        self.crashes.append(f"{process.name}: {trace}")

    def at(self, delay_s: float, action: Callable[[], object]) -> None:
        """Call `action`, which must not block, after `delay_s`."""
        self.push(delay_s, action)

    def push(self, delay_s: float, what: Any, token: int = 0, woken: bool = False) -> None:
        if not self.ending:
            entry = (self.now + max(delay_s, 0.0), next(self._order), what, token, woken)
            heapq.heappush(self._heap, entry)

    def jitter(self) -> float:
        """Time until a woken thread runs: mostly microseconds, sometimes milliseconds."""
        return 0.00002 + 0.004 * float(self.rng.random()) ** 6

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    # ---- threads ----

    def spawn(self, process: Process, name: str, target: Callable[[], object]) -> Task:
        task = Task(process, name, target)
        thread = threading.Thread(target=self._body, args=(task,), name=name, daemon=True)
        task.thread = thread
        self._tasks.append(task)
        thread.start()
        task.waits = True
        self.push(self.jitter(), task, task.token, True)
        return task

    def _body(self, task: Task) -> None:
        self._idents.add(_thread.get_ident())
        task.baton.acquire()
        try:
            if not self.ending:
                task.target()
        except Killed:
            pass
        except SystemExit:
            pass
        except BaseException as error:  # noqa: BLE001 - the oracle of the run judges it
            self.crashed(task.process, error)
        task.ended = True
        self._idents.discard(_thread.get_ident())  # another thread may get it
        if self.ending:
            return
        for joiner in task.joiners:
            self.wake(joiner)
        self._pass_on()

    def pause(self, timeout_s: float | None = None) -> bool:
        """Block the current thread until `wake` or for `timeout_s`; return whether it was woken."""
        me = self.current
        if self.ending or me is None:
            raise Killed
        me.token += 1
        me.waits = True
        if timeout_s is not None:
            self.push(max(timeout_s, 0.0), me, me.token, False)
        following = self._next()
        if following is not me:
            self._give(following)
            me.baton.acquire()
            if self.ending:
                raise Killed
        return me.woken

    def sleep(self, seconds: float) -> None:
        self.pause(max(seconds, 0.0) + 0.000001)

    def may_yield(self) -> None:
        """Let another thread run first, sometimes."""
        if self.current is not None and not self.ending and self.rng.random() < self._preemption:
            self.pause(self.jitter())

    def wake(self, task: Task) -> None:
        """Let a paused thread go on."""
        if task.waits:
            task.waits = False
            self.push(self.jitter(), task, task.token, True)

    def leave_for_good(self) -> None:
        """Never run the current thread again: its process has ended."""
        self.pause(None)
        raise Killed

    # ---- the baton ----

    def _next(self) -> Task | None:
        """Return the thread of the next event; None: the run is over."""
        while self._heap and not self.over:
            at, _, what, token, woken = heapq.heappop(self._heap)
            if at > self.until:
                return None
            if isinstance(what, Task):
                process = what.process
                if what.ended or token != what.token or not process.alive:
                    continue
                if not (what.waits or woken):
                    continue  # it was woken before its time was over
                if process.stopped:
                    process.frozen.append((what, woken))
                    continue
                self.now = at
                what.waits, what.woken = False, woken
                self.current = what
                self.switches += 1
                return what
            self.now, self.current = at, None
            try:
                what()
            except Exception as error:  # noqa: BLE001 - an error of the simulation ends the run
                self.crashes.append("".join(traceback.format_exception(error)))
                self.over = True
        return None

    def _give(self, task: Task | None) -> None:
        (task.baton if task is not None else self._driver).release()

    def _pass_on(self) -> None:
        self._give(self._next())

    def run(self, until_s: float) -> None:
        """Run until that time, until nothing can happen any more, or until `over` is set."""
        self.until = until_s
        following = self._next()
        if following is not None:
            self._give(following)
            self._driver.acquire()

    def close(self) -> None:
        """End all threads."""
        self.ending = True
        for task in self._tasks:
            if not task.ended and task.thread is not None:
                self.current = task
                task.baton.release()
                task.thread.join(END_S)
                if task.thread.is_alive():
                    frame = sys._current_frames().get(task.thread.ident or 0)
                    stack = "".join(traceback.format_stack(frame) if frame else ())
                    text = f"{task.process.name}: {task.name} has not ended after {END_S:g} s"
                    self.crashes.append(f"{text}:\n{stack}")
        self.current = None
