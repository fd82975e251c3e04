"""Members of a job: who has a name, put one in, give nodes their ranks."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.job.state import JobAction, JobState, Member, Send
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import Refused

FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 5.0
"""After which who waits for a name asks again: soon, for the end of a killed agent's connection is on its way."""


def name_conflict(state: JobState, report: m.NodeReport, now: float, asked: int = 0) -> Refused | None:
    """What a new incarnation is told whose name a connected member has, or one that was connected to a former
    coordinator and still has time to come back; None: the name is free. `asked`: how often it was told so before.

    A member that is silent for the lease is lost, and its name free.
    """
    info, member = report.info, state.members.get(report.info.node)
    if member is None or member.report.info.incarnation == info.incarnation or state.ending is not None:
        return None
    if not member.connected and now >= member.closed_at:
        return None
    retry_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(asked, 8))
    return Refused(f"a node named {info.node} is connected, and stays until it ends or is silent", retry_s)


def with_member(state: JobState, member: Member) -> JobState:
    return state.of(members={**state.members, member.node: member})


def launch_nodes(state: JobState, nodes: tuple[str, ...]) -> tuple[JobState, tuple[JobAction, ...]]:
    """Give each node its ranks and start its workers."""
    policy, sends = state.policy, []
    size = max(state.next_rank + len(nodes), 1)
    first = next((mb for mb in state.members.values() if mb.rank == 0), state.members[nodes[0]])
    for node in nodes:
        rank = state.next_rank
        host, port = policy.master_addr or first.report.info.host, policy.master_port
        per = policy.workers_per_node
        launch_nodes = m.Launch(rank, size, rank * per, size * per, host, port, state.restart)
        member = replace(state.members[node], rank=rank, launch_nodes=launch_nodes)
        state = with_member(state.of(next_rank=rank + 1), member)
        sends.append(Send(node, launch_nodes))
    return state, tuple(sends)
