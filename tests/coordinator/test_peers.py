"""The request `peers`: a few peers of a node that is about to join."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from elastic.coordinator.queries import MAX_PEERS, reply
from elastic.core.job.state import JobState, Member, Policy
from elastic.core.protocol.messages import NodePhase, NodeReport
from elastic.domain import codec
from elastic.domain.types import NodeInfo


def state(n: int) -> JobState:
    members = {}
    for i in range(n):
        info = NodeInfo(f"node{i}", f"i{i}", f"10.0.0.1:{i + 1}")
        report = NodeReport(info=info, phase=NodePhase.EMPTY, epoch=0)
        members[f"node{i}"] = Member(report=report, seen=0.0, connected=True)
    return JobState(policy=Policy(), members=members)


def peer_names(of: JobState, node: str) -> list[str]:
    answer, event = reply(of, "peers", {"node": node})
    assert event is None
    return [row["node"] for row in answer["peers"]]


def test_the_answer_is_short_and_differs_per_node() -> None:
    there = state(2000)
    counts = Counter(node for i in range(2000) for node in peer_names(there, f"new{i}"))
    assert sum(counts.values()) == 2000 * MAX_PEERS
    assert max(counts.values()) < 100
    answer, _ = reply(there, "peers", {"node": "new"})
    assert len(codec.dumps(answer)) < 1000


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_the_node_itself_and_disconnected_nodes_are_left_out(n: int) -> None:
    there = state(n)
    if n > 2:
        there = there.of(
            members={**there.members, "node1": replace(there.members["node1"], connected=False)}
        )
    wanted = {f"node{i}" for i in range(n)} - {"node0"} - ({"node1"} if n > 2 else set())
    found = peer_names(there, "node0")
    assert set(found) <= wanted and len(found) == min(MAX_PEERS, len(wanted))


def test_nodes_that_leave_are_left_out() -> None:
    there = state(3)
    leaving = replace(there.members["node1"], draining=True)
    there = there.of(members={**there.members, "node1": leaving})
    assert peer_names(there, "node0") == ["node2"]
