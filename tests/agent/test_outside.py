"""A node outside an epoch change: its fence, its bundles, and the report of its promise."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic.agent.service import NodeAgent
from elastic.config import JobConfig
from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.errors import StaleError
from elastic.domain.types import JobSpec, NodeInfo
from tests.agent.vault.copies import LocalWriter, content, make, put
from tests.patience import LONG_S

WORKER = core.WorkerState(alive=True, attach=m.Attach(0, 1, JobSpec((), 4, 9), ""))


class Outside:
    """An agent with two workers that train in epoch 4, and its messages. It has no coordinator."""

    def __init__(self, agent: NodeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agent, self.sent = agent, list[Any]()
        self.acked: queue.Queue[m.BundleAcknowledged] = queue.Queue()
        self.ordered: queue.Queue[Any] = queue.Queue()
        monkeypatch.setattr(agent, "_send", self.sent.append)
        monkeypatch.setattr(agent, "_acknowledge", lambda worker, acked: self.acked.put(acked))
        monkeypatch.setattr(
            agent._workers, "send", lambda message, *rank: self.ordered.put(message)
        )
        workers = (WORKER, WORKER)
        agent._state = replace(
            agent._state, phase=NodePhase.RUNNING, epoch=4, installed=4, workers=workers
        )
        agent._replicator.reset(4)

    def promise(self, rank: int) -> None:
        self.agent._apply(core.WorkerMessage(rank, m.Promise(5, 4, 7)))

    def halt(self, rank: int) -> None:
        self.agent._apply(core.WorkerMessage(rank, m.Halted(5, 7, complete=True)))

    @property
    def reports(self) -> list[m.NodeReport]:
        return [one for one in self.sent if isinstance(one, m.NodeReport)]


@pytest.fixture
def outside(
    make_config: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Outside]:
    info = NodeInfo("a", "", "", workers=2)
    agent = NodeAgent(make_config(preflight="off"), "127.0.0.1:1", info)
    yield Outside(agent, monkeypatch)
    agent._close()


def test_the_report_of_a_promise_has_the_inventory(outside: Outside) -> None:
    """It comes when all workers have promised, and the phase is still HALTING."""
    vault = outside.agent._vault
    kept = put(vault, make(content(1), epoch=4, owner="b", step=7), content(1))
    outside.agent._apply(m.Halt(5, outside=("a", "b"), lost=("c",)))
    assert isinstance(outside.ordered.get(timeout=LONG_S), m.Halt)
    outside.promise(0)
    outside.agent._report()
    assert outside.reports[-1].phase is NodePhase.HALTING and outside.reports[-1].inventory == ()
    outside.promise(1)
    report = outside.reports[-1]
    assert report.phase is NodePhase.HALTING and len(report.promises) == 2
    assert report.inventory == (kept,)
    put(vault, make(content(2), epoch=4, owner="b", step=7, layer=1), content(2))
    with pytest.raises(StaleError):
        vault.store(make(content(2), epoch=4, owner="d"))


def test_bundles_are_discarded_only_after_the_own_workers_have_halted(outside: Outside) -> None:
    agent = outside.agent
    writer = LocalWriter(agent._directory / "worker")

    def publish(number: int, peer: str) -> None:
        data = content(number)
        copy = make(data, epoch=4, owner="a", step=7, layer=number)
        agent._publish(0, m.Published(number, (writer.write(number, copy, data),), peer))

    agent._apply(m.Halt(5, outside=("a",), lost=("c",)))
    publish(1, "c")
    assert outside.acked.get(timeout=LONG_S) == m.BundleAcknowledged(1, False)
    for rank in (0, 1):
        outside.promise(rank)
    publish(2, "unknown")
    assert outside.acked.get(timeout=LONG_S) == m.BundleAcknowledged(2, False)
    outside.halt(0)
    outside.halt(1)
    publish(3, "unknown")
    assert agent._replicator.pending == 0 and outside.acked.empty()
    assert outside.reports[-1].phase is NodePhase.HALTED
    assert [copy.layer for copy in outside.reports[-1].inventory] == [1, 2]
