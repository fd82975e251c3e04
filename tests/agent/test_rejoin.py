"""A node that joins again: with the copies in its vault after a fence, without after a release."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from elastic.agent.service import NodeAgent
from elastic.config import JobConfig
from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import NodeInfo, StepRecord
from elastic.rpc.bulk.transfer import VaultClient
from tests.agent.vault.copies import content, make
from tests.patience import LONG_S

DATA = content(1, 4096)
COPY = make(DATA)


@pytest.fixture
def agent(make_config: Callable[..., JobConfig]) -> Iterator[NodeAgent]:
    """An agent that trained, holds a copy, and has no coordinator."""
    config = make_config(preflight="off")
    found = NodeAgent(config, "127.0.0.1:1", NodeInfo("a", "", ""))
    incoming = found._vault.store(COPY)
    incoming.buffer[:] = DATA
    incoming.commit()
    found._state = replace(found._state, phase=NodePhase.RUNNING, epoch=4)
    yield found
    found._close()


def held(agent: NodeAgent) -> list[str]:
    """Keys of the copies that the vault serves to a peer."""
    client = VaultClient(agent._state.info.vault, node="b", timeout_s=LONG_S)
    try:
        return [copy.key for copy in client.inventory()]
    finally:
        client.close()


def test_a_fenced_node_offers_its_copies(agent: NodeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[m.NodeReport] = []
    monkeypatch.setattr(agent, "_send", reports.append)
    before = agent._state.info
    agent._apply(m.Fenced("silent for 3.1 s"))
    after = agent._state.info
    assert agent._state.phase is NodePhase.EMPTY and agent._state.epoch == 0
    assert after.incarnation != before.incarnation and after.vault == before.vault
    assert held(agent) == [COPY.key]
    (report,) = [one for one in reports if isinstance(one, m.NodeReport)]
    assert [copy.key for copy in report.inventory] == [COPY.key]
    assert report.inventory[0].checksum == COPY.checksum and report.inventory[0].node == "a"


def test_a_fenced_node_reports_its_checkpoint_files_again(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it was no member, the coordinator refused them. They follow the report by which the
    node becomes a member."""
    sent: list[object] = []
    monkeypatch.setattr(agent, "_send", sent.append)
    part = m.CheckpointPart(2, ((0, 0),), epoch=4, node="a")
    agent._send_reliably(part)
    agent._apply(m.Fenced("silent for 3.1 s"))
    kinds = [type(message) for message in sent]
    assert kinds == [m.CheckpointPart, m.NodeReport, m.CheckpointPart] and sent[-1] == part


def test_heartbeats_come_between_thousands_of_old_steps(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy coordinator reads them for longer than a node may be silent."""
    for number in range(4096):
        agent._send_reliably(m.StepDone(4, StepRecord(number, 1.0, 1.0, 1.0), 0.1, 0.01))
    sent: list[object] = []
    monkeypatch.setattr(agent, "_send", sent.append)
    agent._state = replace(agent._state, epoch=4)
    agent._handle_connected()
    kinds = [type(message) for message in sent]
    assert kinds.count(m.StepDone) == 4096 and kinds[-2:] == [m.Heartbeat, m.NodeReport]
    beats = [at for at, kind in enumerate(kinds) if kind is m.Heartbeat]
    assert beats[0] == 0 and all(after - at <= 65 for at, after in pairwise(beats))


def test_a_step_that_others_report_is_sent_when_the_workers_no_longer_run(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes that report it at once may be lost before they finish it."""
    sent: list[object] = []
    monkeypatch.setattr(agent, "_send", sent.append)
    for step in (6, 7):
        done = m.StepDone(4, StepRecord(step, 1.0, 1.0, 1.0), 0.1, 0.01, spare=True)
        agent._handle_worker(agent._generation, 0, done)
    agent._report()
    assert [type(message) for message in sent] == [m.NodeReport]
    agent._state = replace(agent._state, phase=NodePhase.HALTED)
    for _ in range(2):
        agent._report()
    kinds = [type(message) for message in sent[1:]]
    assert kinds == [m.StepDone, m.NodeReport, m.NodeReport], "first, because it may end the job"
    assert sent[1] == replace(done, spare=False) and list(agent._outbox) == [sent[1]]


def test_a_released_node_is_empty(agent: NodeAgent) -> None:
    before = agent._state.info.incarnation
    agent._act(core.Rejoin(keep_vault=False))
    assert agent._state.info.incarnation != before and held(agent) == []
