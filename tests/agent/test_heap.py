"""The memory of an agent does not grow with the threads that it starts."""

from __future__ import annotations

import subprocess
import sys

THREADS = """
import sys, threading
from elastic.agent.heap import limit_heaps

if sys.argv[1] == "limited":
    limit_heaps()


def work(number):
    held = [bytes(60_000) for _ in range(40)]  # below the size that malloc maps by itself
    barrier.wait()
    return len(held)


barrier = threading.Barrier(12)
threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
lines = [line.split() for line in open("/proc/self/maps")]
starts = [int(line[0].split("-")[0], 16) for line in lines if len(line) == 5 and line[1] == "rw-p"]
print(sum(start % (64 << 20) == 0 for start in starts))
"""


def heaps(how: str) -> int:
    """Number of heaps that glibc makes for twelve threads. They are aligned at 64 MiB."""
    words = [sys.executable, "-c", THREADS, how]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def test_threads_share_two_heaps() -> None:
    assert heaps("limited") <= 1 < heaps("free")
