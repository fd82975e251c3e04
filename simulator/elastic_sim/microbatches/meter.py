"""Results of a simulated run: steps, samples over time, recoveries and the use of node time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic.core.job.goodput import recovery_entry
from elastic.core.job.state import ChangeCompleted, JobPhase, JobState
from elastic.planning.plan.plan import format_plan
from elastic_sim.microbatches.clock import BEGIN_S
from elastic_sim.microbatches.environment import Environment
from elastic_sim.microbatches.worker import EpochRun
from elastic_sim.steps.time_accounting import TimeAccount, Use

IDLE = (JobPhase.WAITING, JobPhase.PAUSED, JobPhase.FINISHED, JobPhase.FAILED)


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that no recovery undid."""

    step: int
    ended_s: float
    """Since the beginning of the trace."""
    seconds: float
    """As in summary.json: without the part before a recovery."""


@dataclass(frozen=True, slots=True)
class MicrobatchResult:
    """Results of one run."""

    ended_s: float
    phase: str
    """Final phase of the job: finished, failed, running, paused, ..."""
    reason: str
    """Reason for the end of the job; "" if it did not end."""
    steps: tuple[CompletedStep, ...]
    samples: int
    """Micro-batches of all completed steps."""
    tokens: int
    progress: tuple[tuple[int, int], ...]
    """(milliseconds, micro-batches completed by then) at every step and rollback."""
    recoveries: tuple[dict[str, Any], ...]
    """As in summary.json."""
    events: tuple[dict[str, Any], ...]
    """As in events.jsonl; `at` is in seconds since the beginning of the trace."""
    account: TimeAccount

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.ended_s if self.ended_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.ended_s if self.ended_s else 0.0


class RunMeter:
    """Accounts for node time. The coordinator reports each new state, decision and recovery."""

    def __init__(self, world: Environment, runs: Mapping[int, EpochRun], state: JobState) -> None:
        """`runs`: runs of the cluster, by epoch. `state`: initial state of the job."""
        self._world, self._runs, self.account = world, runs, TimeAccount()
        self.state = state
        """Newest state of the job."""
        self.sent_at = 0.0
        """Time at which the newest plan is sent."""
        self._current = 0, 0, Use.IDLE
        """(nodes present, nodes used, use) since the account's last span."""
        self.steps: list[CompletedStep] = []
        self.progress: list[tuple[int, int]] = []
        self.recoveries: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._faults: list[float] = []
        self._last_recovery_s = 0.0
        self._useful, self._marks = 0, [0]
        """Useful milliseconds so far, and at the beginning of each step."""

    def fault(self) -> None:
        """Record a node loss."""
        self._faults.append(self._world.clock.now)

    def step_done(self, step: int, seconds: float) -> None:
        """Record a step."""
        self.account_time()
        self.steps.append(CompletedStep(step, self._world.clock.now - BEGIN_S, seconds))
        self._marks.append(self._useful)
        self._log("step", {"step": step, "seconds": round(seconds, 5)})
        self._record_progress()

    def recovered(self, event: ChangeCompleted) -> None:
        """Record a recovery."""
        recent = [at for at in self._faults if self._last_recovery_s < at <= event.change.began]
        self.recoveries.append(recovery_entry(event, min(recent, default=None)))
        self._last_recovery_s = event.resumed_at
        self._log("recovery", self.recoveries[-1])

    def noted(self, kind: str, data: dict[str, Any]) -> None:
        """Record an event of the coordinator; a plan may undo steps."""
        if kind != "step":  # `step_done` records steps
            plan = self.state.plan
            text = {"text": format_plan(plan)} if kind == "plan" and plan is not None else {}
            self._log(kind, {**data, **text})
        if kind == "plan":
            self._roll_back(data["step"])
            self._lose_microbatches()

    def decided(self, reason: str) -> None:
        """Record the reason of a decision."""
        self._log("decision", {"reason": reason})

    def _log(self, kind: str, data: dict[str, Any]) -> None:
        self.events.append({"at": round(self._world.clock.now - BEGIN_S, 6), "kind": kind, **data})

    def _lose_microbatches(self) -> None:
        """Count the running step's time as lost, in proportion to its micro-batches to rerun."""
        self.account_time()
        state, started = self.state, set[int]()
        assert state.change is not None
        for member in state.members.values():
            for halted in member.report.halted:
                started |= halted.started if halted.step == state.change.step else frozenset()
        again = max(state.change.rerun, len(state.change.replayed))
        if again and started:
            self._lose(round((self._useful - self._marks[-1]) * min(1.0, again / len(started))))

    def _roll_back(self, step: int) -> None:
        self.account_time()
        kept = [one for one in self.steps if one.step < step]
        if len(kept) < len(self.steps):
            self._lose(self._useful - self._marks[len(kept)])
            self.steps, self._marks = kept, self._marks[: len(kept) + 1]
            self._record_progress()

    def _lose(self, useful_ms: int) -> None:
        self.account.lose(useful_ms)
        self._useful -= useful_ms

    def _record_progress(self) -> None:
        spec = self._world.spec
        self.progress.append((self._world.clock.ms, len(self.steps) * spec.n_microbatches))

    def account_time(self) -> None:
        """Close the account's span at the present time."""
        alive, used, use = self._current
        until = self._world.clock.ms
        if use is Use.USEFUL:
            self._useful += until - self.account.ended
        self.account.add(until, alive, used, use)
        self._current = self._current_use()

    def _current_use(self) -> tuple[int, int, Use]:
        world, state, runs = self._world, self.state, self._runs
        present = len(world.present)
        if state.phase in IDLE:
            return present, 0, Use.IDLE
        nodes = state.plan.nodes() if state.plan is not None else tuple(state.members)
        alive = {node for node in nodes if (known := world.node(node)) and known.alive}
        used = sum(node in world.present for node in alive)
        change, run = state.change, runs.get(state.epoch)
        if state.phase is JobPhase.RUNNING:
            return present, used, Use.USEFUL if alive.issuperset(nodes) else Use.DETECT
        if state.phase is JobPhase.HALTING and change is not None and change.boundary:
            old = runs.get(state.plan.epoch) if state.plan is not None else None
            training = old is not None and any(
                w.here and w.training is not None for w in old.present.values()
            )
            return present, used, Use.USEFUL if training else Use.PLAN
        if state.phase is JobPhase.INSTALLING and world.clock.now >= self.sent_at:
            met = run is not None and set(run.present) >= set(nodes)
            return present, used, Use.PLAN if met else Use.TRANSFER
        return present, used, Use.PLAN
