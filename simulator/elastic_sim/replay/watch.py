"""Watches a policy from outside: the plan after each of its decisions, for reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.domain.types import NodeInfo, Plan
from elastic_sim.steps.engine import Change, Job, Policy
from elastic_sim.steps.policies.ours import Ours
from elastic_sim.traces.trace import Event


@dataclass(frozen=True, slots=True)
class Seen:
    """A plan and the nodes that it is for."""

    plan: Plan
    nodes: tuple[NodeInfo, ...]


class Watched:
    """A policy that notes its plans; rivals have none to show."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.seen: list[Seen | None] = []
        """One a decision, in the engine's order."""

    @property
    def name(self) -> str:
        return self._policy.name

    def begin(self, job: Job) -> Change:
        change = self._policy.begin(job)
        self._note(change)
        return change

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        return self._note(self._policy.changed(job, came, gone))

    def told(self, job: Job, going: Sequence[Event]) -> Change | None:
        return self._note(self._policy.told(job, going))

    def slowed(self, job: Job) -> Change | None:
        return self._note(self._policy.slowed(job))

    def stepped(self, job: Job) -> Change | None:
        return self._note(self._policy.stepped(job))

    def rang(self, job: Job, name: str) -> Change | None:
        return self._note(self._policy.rang(job, name))

    def timers(self) -> list[tuple[int, str]]:
        return self._policy.timers()

    def _note(self, change: Change | None) -> Change | None:
        if change is not None:
            self.seen.append(self._plan() if change.setup is not None else None)
        return change

    def _plan(self) -> Seen | None:
        if not isinstance(self._policy, Ours) or self._policy.state.plan is None:
            return None
        state = self._policy.state
        assert state.plan is not None
        return Seen(state.plan, tuple(member.report.info for member in state.members.values()))
