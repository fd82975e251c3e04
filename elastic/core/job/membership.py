"""Membership: conflicts over node names, changed members, the launch and the end of the job."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.job.state import JobAction, JobFinished, JobPhase, JobState, Member, Send
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import JoinRefused

FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 5.0
"""First and longest time until an agent asks again for a name in use; doubles per refusal."""


def is_for_former_member(node: str, decided: JobState, present: JobState) -> bool:
    """Return whether an order to `node` must not be sent any more: it was decided in the state
    `decided`, and since then another incarnation has joined."""
    there, here = decided.members.get(node), present.members.get(node)
    if here is None:
        return False
    return there is None or there.report.info.incarnation != here.report.info.incarnation


def name_conflict(
    state: JobState, report: m.NodeReport, now: float, refusals: int = 0
) -> JoinRefused | None:
    """Return a refusal for a new incarnation if another member uses its node name, or None.

    A name is in use while its member is connected and not silent, and after a failover of the
    coordinator while the member still has time to reconnect. `refusals`: earlier refusals of the
    same incarnation.
    """
    info, member = report.info, state.members.get(report.info.node)
    if member is None or state.ending is not None:
        return None
    same = member.report.info.incarnation == info.incarnation
    silent = member.silence_s(now) > state.limits.lease_s
    if same or silent or (not member.connected and now >= member.closed_at):
        return None
    retry_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(refusals, 8))
    text = f"a node named {info.node} is connected, and stays until it ends or is silent"
    return JoinRefused(text, retry_s)


def with_member(state: JobState, member: Member) -> JobState:
    """Add the member, or replace the member of the same node."""
    return state.of(members={**state.members, member.node: member})


def end_job(
    state: JobState, phase: JobPhase, code: int, reason: str, sha: str = ""
) -> tuple[JobState, tuple[JobAction, ...]]:
    """Stop all nodes, and keep the end in the state for nodes that report later."""
    stops = [Send(node, m.Stop(code, reason)) for node in state.members]
    finish = JobFinished(code, reason, sha)
    return state.of(phase=phase, ending=finish), (*stops, finish)


def launch_nodes(state: JobState, nodes: tuple[str, ...]) -> tuple[JobState, tuple[JobAction, ...]]:
    """Order each of `nodes` to start its workers, with the next free ranks."""
    policy, sends = state.policy, []
    size = max(state.next_rank + len(nodes), 1)
    first = state.members[nodes[0]]
    first = next((mb for mb in state.members.values() if mb.rank == 0), first)
    host, port = policy.master_addr or first.report.info.host, policy.master_port
    workers = policy.workers_per_node
    for rank, node in enumerate(nodes, state.next_rank):
        launch = m.Launch(rank, size, rank * workers, size * workers, host, port, state.restart)
        state = with_member(state, replace(state.members[node], rank=rank, launch=launch))
        sends.append(Send(node, launch))
    return state.of(next_rank=state.next_rank + len(nodes)), tuple(sends)
