"""A coordinator store on a simulated machine: slow, sometimes away, and able to lose writes."""

from __future__ import annotations

from collections.abc import Callable

from elastic.store.interface import Entry, Lease, StoreUnavailable
from tests.simulation.network import Trouble
from tests.simulation.scheduler import Scheduler
from tests.store.memory import MemoryStore

STATE = "job/state"
"""Key of the state of the job."""


class StoreMachine:
    """The content of the store, and its faults."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.content = scheduler, MemoryStore()
        self.away: Trouble | None = None
        """Set while nobody reaches the store."""
        self.after_write: list[Callable[[], object]] = []
        """What is called once after the next write of the state."""
        self.latency_s = scheduler.uniform(0.0005, 0.01)
        self.history: list[tuple[float, str, Entry | None]] = []
        """(time, key, entry before) of each write."""

    def wrote(self, key: str, before: Entry | None) -> None:
        self.history.append((self.scheduler.now, key, before))
        if key == STATE and before is not None:
            actions, self.after_write = self.after_write, []
            for action in actions:
                action()

    def forget(self, seconds: float) -> int:
        """Lose the writes of the state in the last `seconds`; return how many."""
        lost = 0
        while self.history and self.history[-1][0] >= self.scheduler.now - seconds:
            _, key, before = self.history[-1]
            if before is None or key != STATE:
                break
            self.history.pop()
            self.content._entries[key] = before
            lost += 1
        return lost


class SimStore:
    """One process's client of the store."""

    def __init__(self, machine: StoreMachine) -> None:
        self._machine = machine

    def get(self, key: str) -> Entry | None:
        self._trip()
        return self._machine.content.get(key)

    def put_if(self, key: str, value: bytes, expected: int | None, token: int) -> Entry:
        self._trip()
        machine = self._machine
        before = machine.content.get(key)
        entry = machine.content.put_if(key, value, expected, token)
        machine.wrote(key, before)
        self._trip(answer=True)
        return entry

    def acquire(self, holder: str, ttl_s: float, now: float) -> Lease:
        self._trip()
        return self._machine.content.acquire(holder, ttl_s, now)

    def renew(self, lease: Lease, now: float) -> None:
        self._trip()
        self._machine.content.renew(lease, now)

    def release(self, lease: Lease) -> None:
        self._trip()
        self._machine.content.release(lease)

    def close(self) -> None:
        pass

    def _trip(self, answer: bool = False) -> None:
        """Wait for one way to or from the store. Raises StoreUnavailable, after a while."""
        machine = self._machine
        scheduler = machine.scheduler
        scheduler.sleep(machine.latency_s * scheduler.uniform(0.5, 2.0))
        if machine.away is not None:
            machine.away.hit()
            scheduler.sleep(1.0)
            raise StoreUnavailable("the store does not answer")
