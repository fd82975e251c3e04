"""Measures the round-trip time of a session with pings."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

PING_S = 1.0
"""Pause between a pong and the next ping, once there are SAMPLES."""
SAMPLES = 3
"""Measurements that are made without a pause; fewer give no result."""
WINDOW = 3
"""Number of the newest measurements whose least one counts: a busy machine delays single pings. A
longer round trip is known after as many pings."""


class RoundTrips:
    """Round-trip times over all streams of a session. Used on the event loop; `least_s` may be read
    by any thread."""

    def __init__(self, ping_s: float = PING_S) -> None:
        """`ping_s`: pause between a pong and the next ping."""
        self._ping_s = ping_s
        self._newest: deque[float] = deque(maxlen=WINDOW)
        self._pong: asyncio.Event | None = None
        self.least_s = 0.0
        """Least of the newest measurements in seconds; 0: too few."""

    async def measure(self, send_ping: Callable[[], object]) -> None:
        """Send pings on one stream until cancelled."""
        self._pong = asyncio.Event()
        while True:
            self._pong.clear()
            began = time.monotonic()
            send_ping()
            await self._pong.wait()
            self.record(time.monotonic() - began)
            if self.least_s:
                await asyncio.sleep(self._ping_s)

    def record(self, seconds: float) -> None:
        """Add a measurement."""
        self._newest.append(seconds)
        if len(self._newest) >= SAMPLES:
            self.least_s = min(self._newest)

    def answered(self) -> None:
        """Record the pong of the newest ping."""
        if self._pong is not None:
            self._pong.set()
