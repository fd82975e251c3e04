"""Decides which copies a node sends compressed, from the link's speed and samples of the copies.

Each node has one policy, for copies that it sends and for copies that others read from its vault.
The rule is `elastic.core.protocol.compression`. Each change of the decision is logged with its
reason.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from elastic.core.protocol.compression import SMALL_BYTES, CompressionSample, should_compress
from elastic.domain.types import Copy
from elastic.rpc.bulk.blocks import BLOCK_BYTES, BLOSC, pack

SAMPLE_EVERY = 64
"""Number of copies of a kind between two samples."""
SAMPLE_BLOCKS = 4
SENDS, LEAST_SENDS = 8, 4
"""The link's speed is that of the fastest of the last SENDS sends, because this machine may slow
down a single one. It is unknown before LEAST_SENDS sends."""
OVERHEAD_S = 2e-3
"""Time of a send that the link does not take: waking two processes, checks, allocation."""
MIN_BYTES = 1 << 20
"""Least bytes of a send that measures the link. Smaller ones measure latency."""

log = logging.getLogger(__name__)


class CompressionPolicy:
    """Chooses the codec of each copy. Thread-safe."""

    def __init__(self, mode: str = "auto", clock: Callable[[], float] = time.perf_counter) -> None:
        """`mode`: auto | off | on."""
        self._mode, self._clock = mode, clock
        self._rates: deque[float] = deque(maxlen=SENDS)
        self._samples: dict[str, CompressionSample] = {}
        self._asked: dict[str, int] = {}
        self._logged: dict[str, bool] = {}
        self._lock = threading.Lock()

    def codec(self, copy: Copy, data: memoryview) -> str:
        """Return the codec for `copy`, whose bytes are `data`: BLOSC, or "" for none."""
        kind, rate = copy.kind, self.link_bytes_per_s
        if self._mode == "auto" and rate and copy.nbytes >= SMALL_BYTES:
            self._sample(kind, data)
        pays, reason = should_compress(self._mode, copy.nbytes, rate, self._samples.get(kind))
        if copy.nbytes >= SMALL_BYTES:
            self._log(kind, pays, reason)
        return BLOSC if pays else ""

    def sent(self, nbytes: int, seconds: float) -> None:
        """Record that the link carried `nbytes` in `seconds`."""
        if nbytes >= MIN_BYTES and seconds > 0:
            with self._lock:
                self._rates.append(nbytes / max(seconds - OVERHEAD_S, seconds / 10))

    @property
    def link_bytes_per_s(self) -> float:
        """Measured speed of the link; 0: unknown."""
        with self._lock:
            return max(self._rates) if len(self._rates) >= LEAST_SENDS else 0.0

    def _sample(self, kind: str, data: memoryview) -> None:
        """Compress a few blocks, spread over the copy, if a sample is due."""
        with self._lock:
            count = self._asked.get(kind, 0)
            self._asked[kind] = count + 1
        if count % SAMPLE_EVERY:
            return
        stride = max(BLOCK_BYTES, len(data) // SAMPLE_BLOCKS // 8 * 8)
        starts = range(0, len(data), stride)[:SAMPLE_BLOCKS]
        blocks = [data[start : start + BLOCK_BYTES] for start in starts]
        began = self._clock()
        packed = sum(len(pack(block)) for block in blocks)
        seconds, taken = self._clock() - began, sum(map(len, blocks))
        with self._lock:
            self._samples[kind] = CompressionSample(
                taken / seconds if seconds > 0 else 0.0, packed / taken
            )

    def _log(self, kind: str, pays: bool, reason: str) -> None:
        with self._lock:
            if self._logged.get(kind, False) is pays:
                return
            self._logged[kind] = pays
        how = "compressed" if pays else "uncompressed"
        log.info("copies of kind %s are sent %s from now on: %s", kind, how, reason)
