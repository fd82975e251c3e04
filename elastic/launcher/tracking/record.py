"""From the lines of a run's record to the calls of a callback. Nothing is read or written here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from elastic.config import JobConfig
from elastic.launcher.tracking.callback import (
    EvaluationMetrics,
    RunEvent,
    RunInfo,
    Setting,
    StepMetrics,
)
from elastic.planning.plan.plan import parse_plan

SETTINGS = (
    "min_nodes", "max_nodes", "nproc_per_node", "backup", "accumulate", "pipelines", "schedule",
    "verify_every", "on_nonfinite", "checkpoint_dir",
)  # fmt: skip
"""Fields of the configuration that trackers are told."""
JOB_SETTINGS = ("microbatches", "tokens_per_microbatch", "tp", "checkpoint_every")
"""Fields of the event `job` that they are told besides."""
EVENTS = {
    "recovery": "on_recovery",
    "plan": "on_plan",
    "checkpoint": "on_checkpoint",
    "end": "on_end",
}
"""Methods of a callback by kind of event."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a callback gets."""

    method: str
    argument: RunInfo | StepMetrics | EvaluationMetrics | RunEvent


class StepSet:
    """The steps that have finished: all below `below`, and those of `above`, because a new
    coordinator may learn of steps late."""

    def __init__(self) -> None:
        self.below = 0
        self._above: set[int] = set()

    def add(self, step: int) -> bool:
        """Add a step; return whether it is new."""
        if step < self.below or step in self._above:
            return False
        self._above.add(step)
        while self.below in self._above:
            self._above.remove(self.below)
            self.below += 1
        return True


class Record:
    """The state of a run as far as its record was read."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._done = StepSet()
        self._evaluated: set[int] = set()
        self._began = self._useful_s = 0.0
        self._nodes = self._next = 0
        self._step_flops = self._peak = 0.0
        """Operations of a step, and those that the plan's devices compute in a second at most."""

    @property
    def next_step(self) -> int:
        """Number of the step that comes next."""
        return self._next

    def observe(self, event: Mapping[str, Any]) -> list[Call]:
        """Return the calls for one line of the record. Raises KeyError, TypeError or
        ValueError if the line lacks a field of its kind, or has a wrong value."""
        kind, at = event["kind"], float(event["at"])
        if kind == "job":
            return self._start(event, at)
        if kind == "step":
            return [*self._start({}, at), *self._step(event, at)]
        if kind == "evaluation":
            return self._evaluation(event, at)
        if kind not in EVENTS:
            return []
        begins = self._start({}, at) if kind == "plan" else []
        if kind == "plan":
            self._plan(event)
        fields = {name: value for name, value in event.items() if name not in ("at", "kind")}
        return [*begins, Call(EVENTS[kind], RunEvent(at=at, step=self._next, fields=fields))]

    def _start(self, job: Mapping[str, Any], at: float) -> list[Call]:
        """Return the call of `on_start` if it was not made yet.

        `job`: the fields of the event `job`; {}: the record has none, because its coordinator took
        over on another machine."""
        if self._began:
            return []
        self._began = at
        flops, microbatches = job.get("flops_per_microbatch", 0.0), job.get("microbatches", 0)
        self._step_flops = float(flops) * int(microbatches)
        return [Call("on_start", self._info(job))]

    def _info(self, job: Mapping[str, Any]) -> RunInfo:
        config, command = self._config, self._config.command
        script = ("-m " if command.module else "") + command.script
        settings: dict[str, Setting] = {"script": " ".join((script, *command.args))}
        for name in SETTINGS:
            value = getattr(config, name)
            settings[name] = value.value if isinstance(value, Enum) else value
        settings |= {name: job[name] for name in JOB_SETTINGS if name in job}
        name = config.run_id if config.run_id != "none" else config.job_id
        return RunInfo(
            name=name, run_dir=config.run_dir, steps=int(job.get("steps", 0)), settings=settings
        )

    def _plan(self, plan: Mapping[str, Any]) -> None:
        self._nodes = len(parse_plan(str(plan["text"])).nodes())
        self._peak = 1e12 * float(plan.get("peak_tflops", 0.0))
        if not self._useful_s:  # nothing has finished: a resumed run begins here
            self._done.below = int(plan["step"])
        self._next = int(plan["step"])

    def _evaluation(self, event: Mapping[str, Any], at: float) -> list[Call]:
        step, seconds = int(event["step"]), float(event["seconds"])
        if step in self._evaluated:
            return []
        self._evaluated.add(step)
        self._useful_s += seconds
        metrics = EvaluationMetrics(
            step=step,
            at=at,
            loss=float(event["loss"]),
            figures={str(name): float(value) for name, value in event["figures"].items()},
            microbatches=int(event["microbatches"]),
            seconds=seconds,
        )
        return [Call("on_evaluation", metrics)]

    def _step(self, event: Mapping[str, Any], at: float) -> list[Call]:
        step, seconds = int(event["step"]), float(event["seconds"])
        self._next = step + 1
        if not self._done.add(step):
            return []
        self._useful_s += seconds
        elapsed = at - self._began
        metrics = StepMetrics(
            step=step,
            at=at,
            epoch=int(event["epoch"]),
            loss=float(event["loss"]),
            grad_norm=float(event["grad_norm"]),
            clip=float(event["clip"]),
            lr=float(event["lr"]),
            seconds=seconds,
            tokens=int(event["tokens"]),
            nodes=self._nodes,
            goodput=min(1.0, self._useful_s / elapsed) if elapsed > 0 else 1.0,
            mfu=self._step_flops / (seconds * self._peak) if seconds * self._peak > 0 else 0.0,
        )
        return [Call("on_step", metrics)]
