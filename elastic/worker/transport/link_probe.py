"""Program that measures a link between two processes, over the transport that training uses.

    python -m elastic.worker.transport.link_probe

It measures:
- one-way seconds of messages of several sizes, as half of a round trip, and from them bandwidth
  and latency;
- contention: how much longer a computation takes while messages are sent;
- the rate of backup copies into shared memory, checksum included.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from elastic.planning.cost.profile import LinkProfile
from elastic.store.shared_memory import SlotPool, checksum
from elastic.worker.transport.cancellation import AbandonSignal
from elastic.worker.transport.links import MAX_UNRECEIVED, Links
from elastic.worker.transport.rendezvous import host_store

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Message sizes, in bytes."""
TIMEOUT_S = 120.0
PAUSE_S = 0.005
"""Pause before each message, so that the receiver sleeps when the message arrives."""
MATRIX_ROWS = 256
"""Rows of the square matrices that are multiplied while messages are sent."""


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> LinkProfile:
    """Return the bandwidth and latency that fit the one-way times.

    Bandwidth is the median slope between the larger sizes. Latency is the time of the smallest
    message minus the time that its bytes take at this bandwidth.
    """
    points = pairwise(zip(sizes, seconds, strict=True))
    rates = [(b - a) / (t - s) for (a, s), (b, t) in points if t > s]
    rate = median(rates[-3:]) if rates else sizes[-1] / max(seconds[-1], 1e-9)
    return LinkProfile(bytes_per_s=rate, latency_s=max(0.0, seconds[0] - sizes[0] / rate))


def one_way(links: Links, nbytes: int, tag: int, repeat: int) -> float:
    """Return the median one-way seconds of a message of `nbytes`. Ranks 0 and 1 both call this."""
    tensor, times = torch.zeros(nbytes // 4), []
    for _ in range(repeat):
        expected = links.recv(1 - links.rank, tag)
        time.sleep(PAUSE_S if links.rank == 0 else 0.0)
        began = time.perf_counter()
        if links.rank == 0:
            links.send(tensor, 1, tag)
            expected.wait()
        else:
            expected.wait()
            links.send(tensor, 0, tag)
        times.append((time.perf_counter() - began) / 2)
    links.flush()
    return median(times[len(times) // 4 :])


def contention(links: Links, link: LinkProfile, tag: int, repeat: int) -> float:
    """Return the seconds by which one second of sending prolongs rank 0's concurrent compute.

    Both ranks call this; rank 1 returns 0.
    """
    loops, alone = _calibrate() if links.rank == 0 else (0, 0.0)
    size = torch.tensor([int(alone * link.bytes_per_s / MAX_UNRECEIVED) // 4 + 1])
    numel = int(links.gather(size)[0].item())
    results = []
    for _ in range(repeat):
        links.gather(size)
        if links.rank == 1:
            for _ in range(MAX_UNRECEIVED):
                links.recv(0, tag).wait()
            continue
        tensor = torch.zeros(numel)
        began = time.perf_counter()
        for _ in range(MAX_UNRECEIVED):
            links.send(tensor, 1, tag)
        _compute(loops)
        with_transfer = time.perf_counter() - began
        links.flush()
        transfer = min(with_transfer, time.perf_counter() - began)
        results.append(max(0.0, with_transfer - alone) / transfer)
    return median(results) if results else 0.0


def copy_rate(nbytes: int = SIZES[-1], repeat: int = 9) -> float:
    """Return the bytes per second at which this process writes backup copies of `nbytes`."""
    source, times = torch.ones(nbytes, dtype=torch.uint8), []
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        pool = SlotPool(Path(directory), "probe-")
        for _ in range(repeat):
            slot = pool.take(nbytes)
            began = time.perf_counter()
            torch.frombuffer(slot.view(nbytes), dtype=torch.uint8).copy_(source)
            checksum(slot.view(nbytes))
            times.append(time.perf_counter() - began)
            pool.give(slot)
        pool.close()
    return nbytes / median(times)


def _compute(loops: int) -> None:
    matrix = torch.ones(MATRIX_ROWS, MATRIX_ROWS)
    for _ in range(loops):
        matrix @ matrix


def _calibrate() -> tuple[int, float]:
    """Return (loops, seconds) of a computation of about 0.2 s."""
    _compute(20)
    began = time.perf_counter()
    _compute(50)
    loops = max(1, int(0.2 / ((time.perf_counter() - began) / 50)))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        _compute(loops)
        times.append(time.perf_counter() - began)
    return loops, median(times)


def probe(rank: int, store: str, repeat: int) -> dict[str, object]:
    """Measure the link. Both ranks call this; only the result of rank 0 is valid."""
    torch.set_num_threads(1)
    result = _measure(rank, store, repeat)
    gc.collect()  # links are in reference cycles; their threads must end before the interpreter
    return result


def _measure(rank: int, store: str, repeat: int) -> dict[str, object]:
    links = Links.open(
        epoch=1,
        rank=rank,
        world_size=2,
        store_address=store,
        device=torch.device("cpu"),
        timeout_s=TIMEOUT_S,
        abandon=AbandonSignal(),
    )
    seconds = [one_way(links, nbytes, tag, repeat) for tag, nbytes in enumerate(SIZES)]
    link = fit_link(SIZES, seconds)
    contention_factor = contention(links, link, len(SIZES), 3)
    links.gather(torch.zeros(1))
    return {
        "bytes_per_s": link.bytes_per_s,
        "latency_s": link.latency_s,
        "contention": contention_factor,
        "copy_bytes_per_s": copy_rate() if rank == 0 else 0.0,
        "sizes": list(SIZES),
        "seconds": seconds,
    }


def main() -> int:
    """Run one end of the link. Arguments: repetitions and, on the second end, the store."""
    repeat, *second = sys.argv[1:]
    if second:
        probe(1, second[0], int(repeat))
        return 0
    store, address = host_store()
    module = "elastic.worker.transport.link_probe"
    other = subprocess.Popen([sys.executable, "-m", module, repeat, address])
    try:
        print(json.dumps(probe(0, address, int(repeat))), flush=True)
        return other.wait(TIMEOUT_S)
    finally:
        other.kill()
        other.wait()
        del store


if __name__ == "__main__":
    sys.exit(main())
