"""Where the nodes' time goes, as the coordinator sees it: every node is in one use at every moment.

node-seconds = useful + detect + plan + transfer + lost + idle, in the words of the simulator's account (it also knows
`redundant`: time that backups take inside of a step; here that is part of `useful`).

Whether time was useful is known afterwards. What nodes compute is put aside until the step is done (useful, or lost if
that step was done before and fell back to a checkpoint) or a fault ends it: then the last of it, from the fault to the
decision, is `detect`, and of the rest the share of the micro-batches that have to run again is `lost`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.core.job.state import Change, JobPhase, JobState

USES = ("useful", "detect", "plan", "transfer", "lost", "idle")


@dataclass(slots=True)
class Usage:
    """Adds up node-seconds. `step` and `fault` are told what happened, `advance` that time passes."""

    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(USES, 0.0))
    """Node-seconds by use; they only grow."""
    pending: float = 0.0
    """Node-seconds of computing of which it is not known yet what they were good for."""
    newest: int = -1
    """Newest step that was ever done."""
    _at: float = 0.0

    def advance(self, state: JobState, now: float) -> None:
        """Count the time up to `now`, through which the job was in `state`."""
        since, self._at = (max(0.0, now - self._at) if self._at else 0.0), now
        if not since or not state.members or state.ending is not None:
            return
        held = state.plan.nodes() if state.plan is not None else ()
        used = sum(node in state.members for node in held)
        idle = len(state.members) - used
        use = _use(state)
        if use == "idle" or state.plan is None:
            self.totals["plan" if use == "plan" else "idle"] += (used + idle) * since
            return
        self.totals["idle"] += idle * since
        if use == "useful":
            self.pending += used * since
        else:
            self.totals[use] += used * since

    def forget(self) -> None:
        """Time passed of which nothing is known, and what was put aside with it."""
        self.pending, self._at = 0.0, 0.0

    def step(self, number: int) -> None:
        """Step `number` is done."""
        use = "useful" if number > self.newest else "lost"
        self.newest = max(self.newest, number)
        self._settle(use)

    def fault(self, change: Change, detect_s: float) -> None:
        """Training was ended by a fault, not at the end of a step, `detect_s` before it was known."""
        late = min(self.pending, detect_s * change.nodes_before)
        self.totals["detect"] += late
        self.pending -= late

    def resumed(self, change: Change) -> None:
        """The change is complete: of the step's computing before it, what runs again was lost."""
        begun = max(change.microbatch + 1, change.rerun)
        lost = 0.0 if change.boundary else self.pending * change.rerun / begun
        self.totals["lost"] += lost
        self.pending -= lost

    def _settle(self, use: str) -> None:
        self.totals[use] += self.pending
        self.pending = 0.0


def _use(state: JobState) -> str:
    """What nodes of the plan do."""
    change = state.change
    match state.phase:
        case JobPhase.RUNNING:
            return "transfer" if change is not None else "useful"
        case JobPhase.HALTING:
            return "useful" if change is not None and change.boundary else "plan"
        case JobPhase.INSTALLING:
            return "transfer"
        case JobPhase.WAITING | JobPhase.LAUNCHED:
            return "plan"
        case _:
            return "idle"
