"""The coordinator: the real transition, and its streams. While it plans it hears nothing."""

from __future__ import annotations

from typing import Any, Protocol

from elastic.core.coordinator.transitions import transition
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState
from elastic.core.protocol import messages as m
from elastic_sim.microbatches.environment import Environment
from elastic_sim.microbatches.meter import Meter

TICK_S = 0.05
OVER = (JobPhase.FINISHED, JobPhase.FAILED)


class Stream(Protocol):
    """The coordinator's end of its stream to an agent."""

    def down(self, message: Any) -> None:
        """Send a message to the agent."""


class CoordinatorModel:
    """Applies the real transition to what it hears, and tells `meter` about every decision."""

    def __init__(self, world: Environment, state: JobState, meter: Meter) -> None:
        self._world, self._meter, self.state = world, meter, state
        self.finish: job.JobFinished | None = None
        self._sessions: dict[str, Stream] = {}
        self._backlog: list[tuple[Stream | None, Any]] = []
        self._busy_until = 0.0
        world.clock.after(TICK_S, self._tick)

    def hear(self, link: Stream | None, message: Any) -> None:
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

    def _take(self, link: Stream | None, message: Any) -> None:
        """As `elastic.coordinator.service` does; but what came while a plan was made is learned as of its end."""
        match message:
            case m.NodeReport():
                assert link is not None
                node = message.info.node
                connected = self._sessions.get(node) is not link
                self._sessions[node] = link
                self._apply(job.NodeReported(message, connected))
            case m.Heartbeat():
                assert link is not None
                self._sessions.setdefault(message.node, link)
                self._apply(
                    job.Heartbeat(
                        message.node, message.incarnation, message.step, message.microbatch, message.measured
                    )
                )
            case m.StepDone():
                self._apply(job.StepFinished(message.record))
            case "closed":
                for node in [n for n, s in self._sessions.items() if s is link]:
                    del self._sessions[node]
                    if node in self.state.members:
                        self._apply(
                            job.ConnectionClosed(node, self.state.members[node].report.info.incarnation)
                        )
            case _:
                self._apply(message)

    def _apply(self, event: Any) -> None:
        clock = self._world.clock
        before = self.state
        self.state, actions, reason = transition(before, event, clock.now)
        self._meter.state = self.state
        if reason and (actions or self.state.phase is not before.phase):
            self._meter.decided(reason)
        if any(isinstance(a, job.Send) and isinstance(a.message, m.Install) for a in actions):
            planning_s = clock.vary(self._planning_s())
            self._busy_until = self._meter.sent_at = clock.now + planning_s
            clock.after(planning_s, lambda: self._act(actions))
            clock.after(planning_s, self._wake)
        else:
            self._act(actions)

    def _planning_s(self) -> float:
        change, physics = self.state.change, self._world.physics
        joining = change is not None and change.causes[0].kind is job.CauseKind.JOIN
        return physics.replan_s if joining else physics.plan_s

    def _act(self, actions: tuple[job.JobAction, ...]) -> None:
        for action in actions:
            match action:
                case job.Send(node, message):
                    link = self._sessions.get(node)
                    if link is not None:
                        link.down(message)
                    if isinstance(message, m.Fenced) and link is not None:
                        del self._sessions[node]
                case job.JobFinished():
                    self.finish = action
                case job.ChangeCompleted() if not action.change.starts_job:
                    self._meter.recovered(action)
                case job.LogEntry(kind, data):
                    self._meter.noted(kind, data)
        if actions:
            self._meter.look()

    @property
    def over(self) -> bool:
        return self.state.phase in OVER
