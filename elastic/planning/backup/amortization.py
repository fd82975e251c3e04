"""Payoff of a plan change: the expected gain in steps against its pause.

A plan that runs after a pause of p seconds until the horizon H makes (H - p) * r steps, with
r = 1 / step time. So `choose` takes the plan with the largest (H - p) * r.

A node that leaves after H seconds costs two pauses: one to join and one to leave. Until training
continues without it, using the node makes (H - pause_in) * r1 steps, and not using it makes
(H + pause_out) * r0 steps. So using it gains only if

    H * (r1 - r0) > pause_in * r1 + pause_out * r0, that is
    H > (pause_in * s + pause_out) / (s - 1)

with the speed-up s = r1 / r0. H is the expected lifetime of the node, or the time to the next
change of the cluster if that is shorter. At such a change all nodes pause anyway, and an unused
node joins without cost. So pause_out does not count in this case.

The next change is expected after 1 / (hazard * nodes) seconds. The hazard is
(observed events + 1) / (observed node-seconds + 3600): the posterior mean under a gamma prior of
one event per hour (`elastic.planning.backup.loss_history` counts them). Without losses the horizon
grows about as fast as the observed time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

PRIOR_EVENTS, PRIOR_NODE_S = 1, 3600.0
"""Prior of the hazard: one event per node-hour."""
DEFAULT_PAUSE_S = 1.0
"""Assumed pause of a change before the first one is measured, seconds."""


@dataclass(frozen=True, slots=True)
class Option:
    """A plan that could come next."""

    step_s: float
    pause_s: float
    """Seconds without training until the plan runs."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision whether to use some more nodes, with the reason."""

    use: bool
    reason: str
    again_s: float = inf
    """Seconds without a loss after which the nodes are worth using; inf: never."""


def hazard_per_s(events: float, node_seconds: float) -> float:
    """Return the expected events per node and second."""
    return (events + PRIOR_EVENTS) / (node_seconds + PRIOR_NODE_S)


def horizon_s(hazard: float, nodes: int) -> float:
    """Return the expected seconds to the next loss among `nodes`; inf if `hazard` is 0."""
    return 1 / (hazard * nodes) if hazard > 0 and nodes > 0 else inf


def progress(option: Option, horizon: float) -> float:
    """Return the steps until `horizon` (seconds); steps per second if `horizon` is inf."""
    if option.step_s <= 0:
        return inf
    return (1 if horizon == inf else max(0.0, horizon - option.pause_s)) / option.step_s


def choose(options: Sequence[Option], horizon: float) -> tuple[int, str]:
    """Return (index, reason) of the option with most progress; ties: shortest pause, then first.

    `options` has at least two options.
    """
    made = [progress(option, horizon) for option in options]
    best, other, *_ = sorted(range(len(made)), key=lambda i: (-made[i], options[i].pause_s))
    first, second = _format_option(options[best]), _format_option(options[other])
    if horizon == inf:
        return best, f"{first}, rather than {second}"
    steps = f"{made[best]:.4g} steps in the {horizon:.4g} s to the next change expected"
    return best, f"{steps} ({first}), rather than {made[other]:.4g} ({second})"


def _format_option(option: Option) -> str:
    return f"{option.step_s:.4g} s a step after a pause of {option.pause_s:.4g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Basis for the expected losses and pauses of a job."""

    events: float = 0.0
    """Observed losses; those that belong together count once."""
    node_seconds: float = 0.0
    """Observed seconds, summed over all nodes."""
    pause_in_s: float = DEFAULT_PAUSE_S
    """Pause of a change that adds nodes; 0 if training pauses anyway."""
    pause_out_s: float = DEFAULT_PAUSE_S
    """Pause of a change that removes a node."""

    @property
    def hazard_per_s(self) -> float:
        return hazard_per_s(self.events, self.node_seconds)


def worth(outlook: Outlook, *, speedup: float, lifetime_s: float, nodes: int) -> Verdict:
    """Return whether some more nodes are worth their pauses.

    Args:
        speedup: step time without these nodes / step time with them.
        lifetime_s: expected seconds until the first of these nodes leaves; inf: unknown.
        nodes: number of nodes in the plan that uses them.
    """
    change_s = horizon_s(outlook.hazard_per_s, nodes)
    leaves = lifetime_s <= change_s
    stays_s = min(lifetime_s, change_s)
    gain = f"{100 * (speedup - 1):.3g} % more speed"
    if speedup <= 1:
        return Verdict(False, f"no gain in speed ({100 * (speedup - 1):+.3g} %)")
    pause_out_s = outlook.pause_out_s if leaves else 0.0
    needed_s = (outlook.pause_in_s * speedup + pause_out_s) / (speedup - 1)
    until = "expected to stay" if leaves else "to the next change expected:"
    last = f"{stays_s:.3g} s" if stays_s < inf else "for good"
    cost = (
        f"pauses of {outlook.pause_in_s:.3g} s in and {pause_out_s:.3g} s out "
        f"need {needed_s:.3g} s to pay"
    )
    if stays_s > needed_s:
        return Verdict(True, f"{until} {last}, {gain}: {cost}")
    # The horizon (node-seconds + prior) / (nodes * events) grows by a second in `events` seconds.
    again_s = (needed_s - stays_s) * (outlook.events + PRIOR_EVENTS) if not leaves else inf
    if lifetime_s - again_s <= needed_s:
        again_s = inf
    return Verdict(False, f"{until} {last}, {gain}: {cost}", again_s)
