"""An agent in the test's process with a coordinator that records its messages, and operations that
wait until the test lets them go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from elastic.agent.service import NodeAgent
from elastic.config import JobConfig
from elastic.core.protocol import messages as m
from elastic.domain.types import NodeInfo
from elastic.rpc.control.server import ClientSession, Server
from tests.patience import LONG_S


class Slow:
    """Makes a function wait until `go`. `begun` is set when it waits."""

    def __init__(self, function: Callable[..., Any], where: str = "") -> None:
        """`where`: only calls whose first argument has this text wait."""
        self._function, self._where = function, where
        self.begun, self._go = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._where in str(args[0] if args else ""):
            self.begun.set()
            assert self._go.wait(LONG_S)
        return self._function(*args, **options)

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Any]:
        """Take the place of a method, too."""
        return lambda *args, **options: self(owner, *args, **options)

    def go(self) -> None:
        self._go.set()


class RecordingCoordinator:
    """Records the messages of one agent, and sends it orders."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self._changed = threading.Condition()
        self._session: ClientSession | None = None
        self._heartbeats, self.reports = list[m.Heartbeat](), list[m.NodeReport]()
        self.arrivals: list[float] = []
        """Times of the heartbeats (time.monotonic)."""
        self.server = Server(
            address,
            on_open=self._open,
            on_message=self._take,
            on_close=lambda session: None,
            on_call=lambda kind, body: {},
            term=lambda: 1,
        )

    def _open(self, session: ClientSession) -> None:
        self._session = session

    def _take(self, session: ClientSession, message: Any, envelope: object) -> None:
        with self._changed:
            if isinstance(message, m.Heartbeat):
                self._heartbeats.append(message)
                self.arrivals.append(time.monotonic())
            elif isinstance(message, m.NodeReport):
                self.reports.append(message)
            self._changed.notify_all()

    def order(self, message: Any) -> None:
        assert self._session is not None
        self._session.send(message, 0)

    def report(self, wanted: Callable[[m.NodeReport], object]) -> m.NodeReport:
        """Wait for a report that is `wanted`, and return it."""

        def find() -> m.NodeReport | None:
            return next((report for report in reversed(self.reports) if wanted(report)), None)

        with self._changed:
            found = self._changed.wait_for(find, LONG_S)
        assert found is not None, "no such report has come"
        return found

    def heartbeats(self, number: int = 5) -> m.Heartbeat:
        """Wait for `number` heartbeats from now on; return the last one."""
        with self._changed:
            wanted = len(self._heartbeats) + number
            assert self._changed.wait_for(lambda: len(self._heartbeats) >= wanted, LONG_S), (
                "the heartbeats have stopped"
            )
            return self._heartbeats[-1]


class RunningAgent:
    """A node's agent with one worker, and its coordinator."""

    def __init__(self, config: JobConfig) -> None:
        self.coordinator = RecordingCoordinator()
        info = NodeInfo("node0", "", "", workers=1, host="127.0.0.1")
        self.agent = NodeAgent(config, self.coordinator.server.address, info)
        self._thread = threading.Thread(target=self.agent.run, name="agent")
        self._thread.start()
        self.first = self.coordinator.report(lambda report: True)

    def launch(self, restart: int = 0) -> None:
        self.coordinator.order(m.Launch(0, 1, 0, 1, "127.0.0.1", 0, restart))

    def obeys(self, epoch: int) -> m.NodeReport:
        """Order a halt, which fences the vault; return the report, with the inventory."""
        self.coordinator.order(m.Halt(epoch))
        return self.coordinator.report(lambda report: report.epoch == epoch)

    def close(self) -> None:
        self.agent.stop()
        self._thread.join(LONG_S)
        self.coordinator.server.close()
        assert not self._thread.is_alive()


@contextmanager
def running_agent(config: JobConfig) -> Iterator[RunningAgent]:
    agent = RunningAgent(config.of(preflight="off", heartbeat_s=0.05))
    try:
        yield agent
    finally:
        agent.close()
