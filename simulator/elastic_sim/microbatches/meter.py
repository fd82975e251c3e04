"""What comes out of a simulated run: steps, samples over time, recoveries, and where the nodes' time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic.core.job.figures import recovery_entry
from elastic.core.job.state import JobPhase, JobState, Recovered
from elastic.planning.plan.plan import format_plan
from elastic_sim.microbatches.clock import BEGIN_S
from elastic_sim.microbatches.environment import Environment
from elastic_sim.microbatches.worker import Run
from elastic_sim.steps.time_accounting import Account, Use

IDLE = (JobPhase.WAITING, JobPhase.PAUSED, JobPhase.FINISHED, JobPhase.FAILED)


@dataclass(frozen=True, slots=True)
class Step:
    """A step that counts."""

    step: int
    ended_s: float
    """Since the beginning of the trace."""
    seconds: float
    """As summary.json has it: the part before a recovery is not in it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    ended_s: float
    phase: str
    """Of the job, at the end: finished, failed, running, paused, ..."""
    reason: str
    """How the job ended; "" if it did not."""
    steps: tuple[Step, ...]
    samples: int
    """Micro-batches of all steps that count."""
    tokens: int
    progress: tuple[tuple[int, int], ...]
    """(milliseconds, micro-batches until then) at every step; going back shows."""
    recoveries: tuple[dict[str, Any], ...]
    """As `recoveries` in summary.json."""
    events: tuple[dict[str, Any], ...]
    """As events.jsonl has them; `at` is seconds since the beginning of the trace."""
    account: Account

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.ended_s if self.ended_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.ended_s if self.ended_s else 0.0


class Meter:
    """Keeps the account. The coordinator tells it each new state, decision and recovery."""

    def __init__(self, world: Environment, runs: Mapping[int, Run], state: JobState) -> None:
        """`runs`: those of the cluster, by epoch. `state`: the job's first."""
        self._world, self._runs, self.account = world, runs, Account()
        self.state = state
        """Newest state of the job."""
        self.sent_at = 0.0
        """When the newest plan goes out, or went out."""
        self._now = 0, 0, Use.IDLE
        """(nodes there, nodes used, use) since the account's last span."""
        self.steps: list[Step] = []
        self.progress: list[tuple[int, int]] = []
        self.recoveries: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._faults: list[float] = []
        self._last_recovery_s = 0.0
        self._useful, self._marks = 0, [0]
        """Useful milliseconds so far, and at the beginning of every step."""

    # ---- what happens ---------------------------------------------------------------------------

    def fault(self) -> None:
        self._faults.append(self._world.clock.now)

    def stepped(self, step: int, seconds: float) -> None:
        self.look()
        self.steps.append(Step(step, self._world.clock.now - BEGIN_S, seconds))
        self._marks.append(self._useful)
        self._log("step", {"step": step, "seconds": round(seconds, 5)})
        self._note()

    def recovered(self, event: Recovered) -> None:
        recent = [at for at in self._faults if self._last_recovery_s < at <= event.change.began]
        self.recoveries.append(recovery_entry(event, min(recent, default=None)))
        self._last_recovery_s = event.resumed_at
        self._log("recovery", self.recoveries[-1])

    def noted(self, kind: str, data: dict[str, Any]) -> None:
        if kind != "step":  # steps are counted where they are made, told or not
            plan = self.state.plan
            text = {"text": format_plan(plan)} if kind == "plan" and plan is not None else {}
            self._log(kind, {**data, **text})
        if kind == "plan":
            self._go_back(data["step"])
            self._lose_microbatches()

    def decided(self, reason: str) -> None:
        self._log("decision", {"reason": reason})

    def _log(self, kind: str, data: dict[str, Any]) -> None:
        self.events.append({"at": round(self._world.clock.now - BEGIN_S, 6), "kind": kind, **data})

    def _lose_microbatches(self) -> None:
        """Of the useful time of the running step, the share of micro-batches that are run again."""
        self.look()
        state, started = self.state, set[int]()
        assert state.change is not None
        for member in state.members.values():
            for halted in member.report.halted:
                started |= halted.started if halted.step == state.change.step else frozenset()
        again = max(state.change.rerun, len(state.change.replayed))
        if again and started:
            self._lose(round((self._useful - self._marks[-1]) * min(1.0, again / len(started))))

    def _go_back(self, step: int) -> None:
        self.look()
        kept = [one for one in self.steps if one.step < step]
        if len(kept) < len(self.steps):
            self._lose(self._useful - self._marks[len(kept)])
            self.steps, self._marks = kept, self._marks[: len(kept) + 1]
            self._note()

    def _lose(self, useful_ms: int) -> None:
        self.account.lose(useful_ms)
        self._useful -= useful_ms

    def _note(self) -> None:
        spec = self._world.spec
        self.progress.append((self._world.clock.ms, len(self.steps) * spec.n_microbatches))

    # ---- where time goes ------------------------------------------------------------------------

    def look(self) -> None:
        """Something may have changed: close the span up to now."""
        alive, used, use = self._now
        until = self._world.clock.ms
        if use is Use.USEFUL:
            self._useful += until - self.account.ended
        self.account.add(until, alive, used, use)
        self._now = self._use()

    def _use(self) -> tuple[int, int, Use]:
        world, state, runs = self._world, self.state, self._runs
        there = len(world.present)
        if state.phase in IDLE:
            return there, 0, Use.IDLE
        nodes = state.plan.nodes() if state.plan is not None else tuple(state.members)
        living = {node for node in nodes if (known := world.node(node)) and known.alive}
        used = sum(node in world.present for node in living)
        change, run = state.change, runs.get(state.epoch)
        if state.phase is JobPhase.RUNNING:
            return there, used, Use.USEFUL if living.issuperset(nodes) else Use.DETECT
        if state.phase is JobPhase.HALTING and change is not None and change.boundary:
            old = runs.get(state.plan.epoch) if state.plan is not None else None
            going = old is not None and any(
                w.here and w.training is not None for w in old.present.values()
            )
            return there, used, Use.USEFUL if going else Use.PLAN
        if state.phase is JobPhase.INSTALLING and world.clock.now >= self.sent_at:
            met = run is not None and set(run.present) >= set(nodes)
            return there, used, Use.PLAN if met else Use.TRANSFER
        return there, used, Use.PLAN
