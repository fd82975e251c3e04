"""How fit a node is, as its agent sees it: the pre-flight before it asks to join, and health reports from then on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic.agent.health.monitor import Monitor
from elastic.agent.health.preflight import Gate, local_checks, network_checks, standing_of
from elastic.config import JobConfig
from elastic.core.node.node import NodeState
from elastic.core.protocol.health_report import HealthReport, JoinRefused, Preflight, PreflightCheck
from elastic.core.protocol.messages import NodePhase, NodeReport
from elastic.domain.types import NodeInfo
from elastic.rpc.link_shaping import pace_of

log = logging.getLogger("elastic.agent")
News = HealthReport | Preflight | JoinRefused


class Fitness:
    """Used by the agent's own thread, but for `sent` and `unwritten`. `put` gets `News`, from other threads."""

    def __init__(
        self, config: JobConfig, coordinator: str, who: NodeInfo, put: Callable[[Any], object]
    ) -> None:
        self._config, self._coordinator, self._who = config, coordinator, who
        self._gate = Gate(config.preflight, self._look, put)
        self._monitor = Monitor(who.node, config.directories, put).start()
        self.sent = self._monitor.sent

    @property
    def known(self) -> bool:
        """The node may speak: its pre-flight is made."""
        return self._gate.open

    def begin(self, incarnation: str) -> None:
        """A new incarnation asks anew."""
        self._gate.shut()
        self.enter(incarnation, 0)

    def enter(self, incarnation: str, epoch: int) -> None:
        self._monitor.enter(incarnation, epoch)

    def unwritten(self, why: str) -> None:
        """A checkpoint could not be written."""
        self._monitor.failed("checkpoint", self._config.checkpoint_dir, why)

    def report(self, report: NodeReport) -> NodeReport | None:
        """The report with what the coordinator goes by when a node asks to join; None: not yet, it comes by itself."""
        if report.phase is not NodePhase.EMPTY:
            return report
        self._gate.ask()
        return replace(report, preflight=self._gate.flight) if self._gate.open else None

    def take(self, news: News, state: NodeState) -> tuple[NodeState, HealthReport | None, bool]:
        """(the node's state, what to say, whether to report)."""
        match news:
            case HealthReport():
                mine = news.incarnation == state.info.incarnation and self.known
                return state, news if mine else None, False
            case Preflight():
                self._gate.made(news)
                info = replace(state.info, standing=standing_of(news.score))
                return replace(state, info=info), None, True
            case JoinRefused():
                log.error("refused, looks again in %g s: %s", news.retry_s, news.reason)
                self._gate.refused(news.retry_s)
        return state, None, False

    def close(self) -> None:
        self._gate.close()
        self._monitor.close()

    def _look(self) -> tuple[list[PreflightCheck], float]:
        """Called from a thread of the gate."""
        trial = self._config.preflight == "strict"
        checks, score = local_checks(self._config.directories, self._who.memory_bytes, trial=trial)
        pace = pace_of(Path(self._config.memory_dir) / self._who.node, self._config.link)
        return [*checks, *network_checks(self._coordinator, self._who.node, pace)], score
