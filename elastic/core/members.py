"""Members of a job: put one in, give nodes their ranks."""

from __future__ import annotations

from dataclasses import replace

from elastic.core import messages as m
from elastic.core.job import Action, JobState, Member, Send


def put(state: JobState, member: Member) -> JobState:
    return state.of(members={**state.members, member.node: member})


def launch(state: JobState, nodes: tuple[str, ...]) -> tuple[JobState, tuple[Action, ...]]:
    """Give each node its ranks and start its workers."""
    policy, sends = state.policy, []
    size = max(state.next_rank + len(nodes), 1)
    first = next((mb for mb in state.members.values() if mb.rank == 0), state.members[nodes[0]])
    for node in nodes:
        rank = state.next_rank
        host, port = policy.master_addr or first.report.info.host, policy.master_port
        per = policy.workers_per_node
        launch = m.Launch(rank, size, rank * per, size * per, host, port, state.restart)
        member = replace(state.members[node], rank=rank, launch=launch)
        state = put(state.of(next_rank=rank + 1), member)
        sends.append(Send(node, launch))
    return state, tuple(sends)
