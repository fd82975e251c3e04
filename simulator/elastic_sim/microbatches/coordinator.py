"""The coordinator: the real transition, its streams, and its own time: while it plans it hears nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic.core.coordinator.transitions import transition
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState, Policy
from elastic.core.protocol import messages as m

if TYPE_CHECKING:
    from elastic_sim.microbatches.agent import Link
    from elastic_sim.microbatches.world import World

TICK_S = 0.05
OVER = (JobPhase.FINISHED, JobPhase.FAILED)


class Boss:
    def __init__(self, world: World, policy: Policy) -> None:
        self._world = world
        self.state = JobState(policy=policy)
        self.finish: job.Finish | None = None
        self._sessions: dict[str, Link] = {}
        self._backlog: list[tuple[Link | None, Any]] = []
        self._busy_until = 0.0
        self.sent_at = 0.0
        """When the last plan went out, or will."""
        world.clock.after(TICK_S, self._tick)

    def hear(self, link: Link | None, message: Any) -> None:
        """A message arrived; while a plan is made it waits in the queue."""
        if self._world.clock.now < self._busy_until or self._backlog:
            self._backlog.append((link, message))
        else:
            self._take(link, message)

    def _tick(self) -> None:
        self._world.clock.after(TICK_S, self._tick)
        if self._world.clock.now >= self._busy_until:
            self._apply(job.Tick())

    def _wake(self) -> None:
        while self._backlog and self._world.clock.now >= self._busy_until:
            self._take(*self._backlog.pop(0))

    def _take(self, link: Link | None, message: Any) -> None:
        """As `elastic.coordinator.service` does; but what came while a plan was made is learned as of its end."""
        match message:
            case m.NodeReport():
                assert link is not None
                node = message.info.node
                connected = self._sessions.get(node) is not link
                self._sessions[node] = link
                self._apply(job.Reported(message, connected))
            case m.Heartbeat():
                assert link is not None
                self._sessions.setdefault(message.node, link)
                self._apply(
                    job.Beat(
                        message.node, message.incarnation, message.step, message.microbatch, message.measured
                    )
                )
            case m.StepDone():
                self._apply(job.Stepped(message.record))
            case "closed":
                for node in [n for n, s in self._sessions.items() if s is link]:
                    del self._sessions[node]
                    if node in self.state.members:
                        self._apply(job.Closed(node, self.state.members[node].report.info.incarnation))
            case _:
                self._apply(message)

    def _apply(self, event: Any) -> None:
        clock = self._world.clock
        before = self.state
        self.state, actions, reason = transition(before, event, clock.now)
        if reason and (actions or self.state.phase is not before.phase):
            self._world.meter.decided(reason)
        if any(isinstance(a, job.Send) and isinstance(a.message, m.Install) for a in actions):
            planning_s = clock.vary(self._planning_s())
            self._busy_until = self.sent_at = clock.now + planning_s
            clock.after(planning_s, lambda: self._act(actions))
            clock.after(planning_s, self._wake)
        else:
            self._act(actions)

    def _planning_s(self) -> float:
        change, physics = self.state.change, self._world.physics
        joining = change is not None and change.boundary and change.cause.startswith("join ")
        return physics.replan_s if joining else physics.plan_s

    def _act(self, actions: tuple[job.Action, ...]) -> None:
        for action in actions:
            match action:
                case job.Send(node, message):
                    link = self._sessions.get(node)
                    if link is not None:
                        link.down(message)
                    if isinstance(message, m.Fenced) and link is not None:
                        del self._sessions[node]
                case job.Finish():
                    self.finish = action
                case job.Recovered() if action.change.cause != "start":
                    self._world.meter.recovered(action)
                case job.Note(kind, data):
                    self._world.meter.noted(kind, data)
        if actions:
            self._world.meter.look()

    @property
    def over(self) -> bool:
        return self.state.phase in OVER
