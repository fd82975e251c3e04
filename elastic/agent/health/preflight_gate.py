"""Holds a node back until its pre-flight is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elastic.core.protocol.health_report import MAX_TEXT_LENGTH, Preflight, PreflightCheck


class PreflightGate:
    """Holds back a node's first report until its pre-flight is done.

    The pre-flight is made once per membership, and again after the coordinator refuses the node.
    """

    def __init__(
        self,
        mode: str,
        check: Callable[[], tuple[list[PreflightCheck], float]],
        put: Callable[[Preflight], object],
    ) -> None:
        """`mode`: on, strict or off. `check()` returns (checks, score), and `put(result)` is called
        with the result; both run on a thread of the gate."""
        self._mode, self._check, self._put = mode, check, put
        self._running = False
        self.result: Preflight | None = None

    @property
    def open(self) -> bool:
        """Whether the node may ask to join."""
        return self._mode == "off" or self.result is not None

    @property
    def pending(self) -> bool:
        """Whether a pre-flight is in progress or scheduled."""
        return self._running

    def start(self) -> None:
        """Begin the pre-flight, unless it is done, in progress or scheduled."""
        if not self.open:
            self._schedule(0.0)

    def finished(self, result: Preflight) -> None:
        self.result, self._running = result, False

    def shut(self) -> None:
        """Begin a new membership, whose first report waits for a new pre-flight."""
        self.result = None

    def refused(self, retry_s: float) -> None:
        """Repeat the pre-flight after `retry_s`, in every mode, so that the node asks again."""
        self.result = None
        self._schedule(retry_s)

    def _schedule(self, pause_s: float) -> None:
        if not self._running:
            self._running = True
            timer = threading.Timer(pause_s, self._run)
            timer.daemon = True
            timer.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            checks, score = self._check()
        except Exception as error:  # noqa: BLE001 - a broken check means an unfit node
            text = f"the pre-flight failed: {error!r}"[:MAX_TEXT_LENGTH]
            checks, score = [PreflightCheck("preflight", 0.0, "", False, True, text)], 0.0
        self._put(Preflight(self._mode, time.perf_counter() - began, tuple(checks), score))
