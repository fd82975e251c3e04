"""What a tracker is told about a run, and the base class of all callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Setting = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """A run whose training begins."""

    name: str
    """--rdzv-id, or the job's generated name."""
    run_dir: str
    steps: int
    """Number of steps of the whole training; 0: unknown."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Settings of the job, as script, backup and microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """A finished step."""

    step: int
    at: float
    """Time of its end, in seconds since 1970."""
    epoch: int
    """Number of the epoch, which grows with each change of the plan."""
    loss: float
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    clip: float
    """Factor by which the gradient was scaled; 1: not at all. It clips, and with weights of
    micro-batches it also makes the mean."""
    lr: float
    seconds: float
    """Duration of the step."""
    tokens: int
    """Tokens of the step; 0: the model has no tokens."""
    nodes: int
    """Nodes that the plan uses."""
    goodput: float
    """Share of the time since the training began that finished steps took, each counted once."""
    mfu: float = 0.0
    """Operations that the model needs, relative to the peak of the plan's devices; 0: unknown."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def scalars(self) -> dict[str, float]:
        """Return the values that trackers draw, by name."""
        found = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "clip": self.clip,
            "lr": self.lr,
            "step_s": self.seconds,
            "nodes": float(self.nodes),
            "goodput": self.goodput,
        }
        rate = {"tokens_per_s": self.tokens_per_s} if self.tokens else {}
        return found | rate | ({"mfu": self.mfu} if self.mfu else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMetrics:
    """An evaluation of the model."""

    step: int
    """Number of steps before it."""
    at: float
    """Time at which it became known, in seconds since 1970."""
    loss: float
    """Mean loss of its micro-batches."""
    figures: Mapping[str, float]
    """Means of the figures that layers reported (`Microbatch.report`)."""
    microbatches: int
    seconds: float
    """Duration of the evaluation."""

    def scalars(self) -> dict[str, float]:
        """Return the values that trackers draw, by name."""
        found = {"loss": self.loss, **self.figures, "seconds": self.seconds}
        return {f"evaluation/{name}": value for name, value in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """A recovery, a new plan, a checkpoint, or the end of a run."""

    at: float
    """Seconds since 1970."""
    step: int
    """Number of the step that was next at that time."""
    fields: Mapping[str, Any]
    """Its fields in events.jsonl: of a recovery as in `summary.json`; `text` and `reason` of a
    plan; `path` of a checkpoint; `code` and `reason` of the end."""


class Callback:
    """Base class of callbacks; each method may be left out.

    `elastic run --track callback:MODULE:NAME` calls NAME() and then its methods, in a process of
    its own, one at a time, in the order of the record. Each finished step comes once: a step that
    is repeated after a fall-back to a checkpoint does not come again.

    An OSError means that a disk or a network is away: the call is repeated until it returns. After
    any other exception the call is skipped; after three in a row the tracker ends. The training
    goes on in any case.
    """

    def on_start(self, run: RunInfo, key: str) -> str:
        """The tracker has started. Return a text by which a later start finds its place again.

        `key`: the text that the former start returned; "": this is the first start.
        """
        return key

    def on_step(self, step: StepMetrics) -> None:
        """A step has finished."""

    def on_evaluation(self, evaluation: EvaluationMetrics) -> None:
        """The model was evaluated. Each evaluation comes once, after the step before it."""

    def on_recovery(self, recovery: RunEvent) -> None:
        """Nodes were lost or have joined, and training goes on."""

    def on_plan(self, plan: RunEvent) -> None:
        """The job has a new plan."""

    def on_checkpoint(self, checkpoint: RunEvent) -> None:
        """A checkpoint is complete."""

    def on_end(self, end: RunEvent) -> None:
        """The job has ended."""

    def flush(self) -> None:
        """Make everything durable that was told so far. Called after each batch of calls."""

    def close(self) -> None:
        """The tracker ends: after `on_end`, or because it was interrupted."""
