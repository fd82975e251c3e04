"""Holds a node back until its pre-flight is done, and passes on its health reports."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic.agent.health.monitor import Monitor
from elastic.agent.health.preflight import local_checks, network_checks, score_class
from elastic.config import JobConfig
from elastic.core.node.node import NodeState
from elastic.core.protocol.health_report import (
    MAX_TEXT_LENGTH,
    HealthReport,
    JoinRefused,
    Preflight,
    PreflightCheck,
)
from elastic.core.protocol.messages import NodePhase, NodeReport
from elastic.domain.types import NodeInfo
from elastic.rpc.link_shaping import pace_of

log = logging.getLogger("elastic.agent")


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
        """`mode`: on, strict or off. `check` returns (checks, score); it and `put` are called from
        another thread."""
        self._mode, self._check, self._put = mode, check, put
        self._running = False
        self._timer: threading.Timer | None = None
        self.result: Preflight | None = None

    @property
    def open(self) -> bool:
        """The node may ask to join."""
        return self._mode == "off" or self.result is not None

    def start(self) -> None:
        """Begin the pre-flight, unless it is done, in progress or scheduled."""
        if not (self.open or self._running):
            self._running = True
            threading.Thread(target=self._run, name="preflight", daemon=True).start()

    def finished(self, result: Preflight) -> None:
        self.result, self._running = result, False

    def shut(self) -> None:
        """A new membership begins: its first report waits again."""
        self.result = None

    def refused(self, retry_s: float) -> None:
        """Repeat the pre-flight after a pause."""
        self.result = None
        if not self._running:
            self._running = True
            self._timer = threading.Timer(retry_s, self._run)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            checks, score = self._check()
        except Exception as error:  # noqa: BLE001 - a broken check means an unfit node
            text = f"the pre-flight failed: {error!r}"[:MAX_TEXT_LENGTH]
            checks, score = [PreflightCheck("preflight", 0.0, "", False, True, text)], 0.0
        self._put(Preflight(self._mode, time.perf_counter() - began, tuple(checks), score))


class Readiness:
    """Pre-flight and health reports of a node. Used by the agent's thread, except `sent` and
    `checkpoint_failed`. `put` gets events for `take`, from other threads."""

    def __init__(
        self, config: JobConfig, coordinator: str, info: NodeInfo, put: Callable[[Any], object]
    ) -> None:
        self._config, self._coordinator, self._info = config, coordinator, info
        self._gate = PreflightGate(config.preflight, self._check, put)
        self._monitor = Monitor(info.node, config.directories, put).start()
        self.sent = self._monitor.sent

    @property
    def known(self) -> bool:
        """The node may send messages: its pre-flight is done."""
        return self._gate.open

    def begin(self, incarnation: str) -> None:
        """A new incarnation begins, which needs a pre-flight of its own."""
        self._gate.shut()
        self.enter(incarnation, 0)

    def enter(self, incarnation: str, epoch: int) -> None:
        self._monitor.enter(incarnation, epoch)

    def checkpoint_failed(self, why: str) -> None:
        self._monitor.failed("checkpoint", self._config.checkpoint_dir, why)

    def complete(self, report: NodeReport) -> NodeReport | None:
        """Add the pre-flight to a report that asks to join. None if the pre-flight is not done:
        an event follows when it is."""
        if report.phase is not NodePhase.EMPTY:
            return report
        self._gate.start()
        return replace(report, preflight=self._gate.result) if self._gate.open else None

    def take(
        self, event: HealthReport | Preflight | JoinRefused, state: NodeState
    ) -> tuple[NodeState, HealthReport | None, bool]:
        """Return (the node's state, the health report to send, whether to send a node report)."""
        match event:
            case HealthReport():
                current = event.incarnation == state.info.incarnation and self.known
                return state, event if current else None, False
            case Preflight():
                self._gate.finished(event)
                info = replace(state.info, standing=score_class(event.score))
                return replace(state, info=info), None, True
            case JoinRefused():
                log.error("refused; next try in %g s: %s", event.retry_s, event.reason)
                self._gate.refused(event.retry_s)
        return state, None, False

    def close(self) -> None:
        self._gate.close()
        self._monitor.close()

    def _check(self) -> tuple[list[PreflightCheck], float]:
        """Called from a thread of the gate."""
        trial = self._config.preflight == "strict"
        checks, score = local_checks(self._config.directories, self._info.memory_bytes, trial=trial)
        pace = pace_of(Path(self._config.memory_dir) / self._info.node, self._config.link)
        return [*checks, *network_checks(self._coordinator, self._info.node, pace)], score
