"""What a node has seen of its link and of how well copies compress, and so which copies it sends compressed.

One a node, for what it sends to other vaults and what others get from its own. The decision is
`elastic.core.protocol.compression`; each change of it is logged with its reason.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from elastic.core.protocol.compression import SMALL_BYTES, CompressionSample, should_compress
from elastic.domain.types import Copy
from elastic.rpc.blocks import BLOCK_BYTES, BLOSC, pack

SAMPLE_EVERY = 64
"""Copies of a kind between two samples."""
SAMPLE_BLOCKS = 4
SENDS, LEAST_SENDS = 8, 4
"""The link is as fast as in the best of so many sends: what slows a single one may be this machine."""
TURN_S = 2e-3
"""Of every send so much is no link's: two processes wake up, bytes are checked, room is made."""
TELLING_BYTES = 1 << 20
"""Sends below this tell of latency, not of the link."""

log = logging.getLogger(__name__)


class Compressing:
    """Thread-safe."""

    def __init__(self, mode: str = "auto", clock: Callable[[], float] = time.perf_counter) -> None:
        """`mode`: auto | off | on."""
        self._mode, self._clock = mode, clock
        self._rates: deque[float] = deque(maxlen=SENDS)
        self._samples: dict[str, CompressionSample] = {}
        self._asked: dict[str, int] = {}
        self._told: dict[str, bool] = {}
        self._lock = threading.Lock()

    def codec(self, copy: Copy, data: memoryview) -> str:
        """How to send `copy`, whose bytes are `data`: "" or a codec of `elastic.rpc.blocks`."""
        kind, rate = copy.kind, self.link_bytes_per_s
        if self._mode == "auto" and rate and copy.nbytes >= SMALL_BYTES:
            self._sample(kind, data)
        pays, reason = should_compress(self._mode, copy.nbytes, rate, self._samples.get(kind))
        if copy.nbytes >= SMALL_BYTES:
            self._tell(kind, pays, reason)
        return BLOSC if pays else ""

    def sent(self, nbytes: int, seconds: float) -> None:
        """So many bytes went over the link in so many seconds."""
        if nbytes >= TELLING_BYTES and seconds > 0:
            with self._lock:
                self._rates.append(nbytes / max(seconds - TURN_S, seconds / 10))

    @property
    def link_bytes_per_s(self) -> float:
        """What the link was last seen to carry; 0: it is not known yet."""
        with self._lock:
            return max(self._rates) if len(self._rates) >= LEAST_SENDS else 0.0

    def _sample(self, kind: str, data: memoryview) -> None:
        """Compress a few blocks, spread over the copy, when it is time again."""
        with self._lock:
            count = self._asked.get(kind, 0)
            self._asked[kind] = count + 1
        if count % SAMPLE_EVERY:
            return
        stride = max(BLOCK_BYTES, len(data) // SAMPLE_BLOCKS // 8 * 8)
        blocks = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), stride)][:SAMPLE_BLOCKS]
        began = self._clock()
        packed = sum(len(pack(block)) for block in blocks)
        seconds, taken = self._clock() - began, sum(map(len, blocks))
        with self._lock:
            self._samples[kind] = CompressionSample(taken / seconds if seconds > 0 else 0.0, packed / taken)

    def _tell(self, kind: str, pays: bool, reason: str) -> None:
        with self._lock:
            if self._told.get(kind, False) is pays:
                return
            self._told[kind] = pays
        log.info(
            "copies of a %s are sent %s from now on: %s",
            kind,
            "compressed" if pays else "as they are",
            reason,
        )
