"""What the store tests run in other processes: `python -m tests.store.stores ROLE PATH ...`."""

from __future__ import annotations

import sys
import time

from elastic.domain.errors import StaleError
from elastic.store.interface import Conflict
from elastic.store.sqlite import SqliteStore


def count(path: str, times: int) -> None:
    """Add one to `counter` `times` times by compare-and-set; prints how often it lost a race."""
    store, lost, done = SqliteStore(path), 0, 0
    token = int(sys.argv[4])
    print("ready", flush=True)
    sys.stdin.readline()
    while done < times:
        entry = store.get("counter")
        try:
            value = int(entry.value) + 1 if entry else 1
            store.put_if("counter", str(value).encode(), entry.revision if entry else None, token)
        except Conflict:
            lost += 1
        else:
            done += 1
    print(lost, flush=True)


def lead(path: str, rounds: int) -> None:
    """Acquire the lease repeatedly and write under it; print the tokens of accepted writes."""
    store, name = SqliteStore(path), sys.argv[4]
    tokens = []
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(rounds):
        try:
            lease = store.acquire(name, 1e-4, time.time())
            entry = store.get("leader")
            store.put_if("leader", name.encode(), entry.revision if entry else None, lease.token)
            tokens.append(lease.token)
        except (Conflict, StaleError):
            continue
    print(*tokens, flush=True)


def open_new(path: str, times: int) -> None:
    """Open one store after the other, each of them new, as early as everybody else."""
    print("ready", flush=True)
    for number in range(times):
        sys.stdin.readline()
        SqliteStore(f"{path}.{number}").close()
        print("opened", flush=True)


def write_forever(path: str, _: int) -> None:
    """Write 64 KiB values without end; reports each committed number."""
    store = SqliteStore(path)
    lease = store.acquire("writer", 60.0, time.time())
    entry, number = store.get("big"), 0
    while True:
        number += 1
        value = str(number).encode().rjust(1 << 16, b".")
        entry = store.put_if("big", value, entry.revision if entry else None, lease.token)
        print(number, flush=True)


if __name__ == "__main__":
    {"count": count, "lead": lead, "open": open_new, "write": write_forever}[sys.argv[1]](
        sys.argv[2], int(sys.argv[3])
    )
