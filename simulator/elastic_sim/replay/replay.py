"""Runs policies on a trace over several seeds: throughput, goodput, cost and use of node time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import mean, stdev

from scipy.special import stdtrit

from elastic_sim.steps.engine import Simulation, SimulationResult
from elastic_sim.steps.physics import (
    draw_slowdowns,
    node_lifetimes,
    node_ms,
    step_noise,
    usable_trace,
)
from elastic_sim.steps.policies import policy_class
from elastic_sim.steps.policies.parcae import ParcaePolicy
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import SimulatedWorld
from elastic_sim.traces.trace import Event, Trace

ORACLE = "oracle"
Progress = Callable[[float, str], object]
"""Called often with the share of the work that is done, and with what is computed now."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with half the width of its 95 % interval (Student's t; 0 for one value)."""

    value: float
    margin: float = 0.0

    def __str__(self) -> str:
        return format(self)

    def __format__(self, spec: str) -> str:
        """Format both numbers by `spec`; "": mean with four significant digits, margin with two."""
        margin = f" ± {self.margin:{spec or '.2g'}}" if self.margin else ""
        return f"{self.value:{spec or '.4g'}}{margin}"

    @property
    def percent(self) -> Mean:
        return Mean(100 * self.value, 100 * self.margin)


def mean_of(values: Sequence[float]) -> Mean:
    n = len(values)
    if n < 2 or not all(map(math.isfinite, values)):
        return Mean(mean(values))
    return Mean(mean(values), float(stdtrit(n - 1, 0.975)) * stdev(values) / math.sqrt(n))


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """Result of one policy with one seed."""

    policy: str
    seed: int
    samples: int
    samples_per_s: float
    cost: float
    """Dollars for all nodes while they were present."""
    time: dict[str, float]
    """Node-seconds by use, of all nodes that are paid for; booting nodes are idle."""
    changes: int
    """Number of reconfigurations."""
    outcome: SimulationResult | None = field(default=None, compare=False)

    @property
    def node_s(self) -> float:
        return sum(self.time.values())


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """Results of one policy over all seeds."""

    policy: str
    samples_per_s: Mean
    goodput: Mean
    """Samples divided by those of the oracle on the same trace; 0 if the oracle made none."""
    cost: Mean
    cost_per_million: Mean
    """Dollars per million samples; inf if there are none."""
    time: dict[str, float]
    """Shares of all node-seconds, by use."""
    runs: tuple[PolicyRun, ...]


def run_one(
    world: SimulatedWorld,
    trace: Trace,
    policy: str,
    seed: int,
    *,
    keep: bool = False,
    progress: Callable[[float], object] = lambda share: None,
) -> PolicyRun:
    """Simulate one policy with one seed. `keep`: also store the simulation result.

    `progress(share)` is called often with the share of the trace that is simulated.
    """
    made = policy_class(policy)(world, seed)
    usable = usable_trace(trace, world.physics, seed)
    if isinstance(made, ParcaePolicy):
        made.set_future(usable)
    slowdowns = draw_slowdowns(world.physics, usable, seed)
    noise = step_noise(world.physics, seed)
    outcome = Simulation(usable, made, noise, slowdowns, progress).run()
    totals = outcome.account.totals()
    paid = usable_trace(trace, replace(world.physics, boot_s=0.0), seed)
    totals[Use.IDLE] += node_ms(paid) - node_ms(usable)  # booting nodes
    return PolicyRun(
        policy=policy,
        seed=seed,
        samples=outcome.samples,
        samples_per_s=outcome.samples_per_s,
        cost=dollars_for(trace, lambda event: world.type_of(event).spot),
        time={use.value: totals[use] / 1000 for use in Use},
        changes=len(outcome.decisions),
        outcome=outcome if keep else None,
    )


def replay(
    world: SimulatedWorld,
    trace_of: Callable[[int], Trace],
    policies: Sequence[str],
    seeds: Sequence[int] = (0,),
    *,
    keep: bool = False,
    progress: Progress = lambda share, text: None,
) -> list[PolicySummary]:
    """Run all policies, in the given order. The oracle always runs, to measure goodput.

    `trace_of(seed)`: its trace. `keep`: store the simulation results of the first seed. Raises
    FieldError.
    """

    total, numbers = len({ORACLE, *policies}) * len(seeds), count()

    def run(policy: str, seed: int) -> PolicyRun:
        number = next(numbers)
        text = f"{policy}, seed {seed} (run {number + 1} of {total})"

        def report(share: float) -> None:
            progress((number + share) / total, text)

        report(0.0)
        trace, kept = trace_of(seed), keep and seed == seeds[0]
        return run_one(world, trace, policy, seed, keep=kept, progress=report)

    def runs_of(policy: str) -> list[PolicyRun]:
        return [run(policy, seed) for seed in seeds]

    oracles = runs_of(ORACLE)
    return [
        summarize(oracles if policy == ORACLE else runs_of(policy), oracles)
        for policy in dict.fromkeys(policies)
    ]


def summarize(runs: Sequence[PolicyRun], oracles: Sequence[PolicyRun]) -> PolicySummary:
    """Summarize the runs of one policy; `oracles`: the oracle's runs of the same seeds."""
    whole = sum(run.node_s for run in runs) or 1.0
    costs = [1e6 * run.cost / run.samples if run.samples else math.inf for run in runs]
    goodputs = [
        run.samples / oracle.samples if oracle.samples else 0.0
        for run, oracle in zip(runs, oracles, strict=True)
    ]
    return PolicySummary(
        policy=runs[0].policy,
        samples_per_s=mean_of([run.samples_per_s for run in runs]),
        goodput=mean_of(goodputs),
        cost=mean_of([run.cost for run in runs]),
        cost_per_million=mean_of(costs),
        time={use.value: sum(run.time[use.value] for run in runs) / whole for use in Use},
        runs=tuple(runs),
    )


def dollars_for(trace: Trace, price_per_h: Callable[[Event], float]) -> float:
    """Return the dollars for all nodes of the trace while they are present, booting included."""
    return sum(
        price_per_h(added) * (until - added.seconds) / 3600
        for added, _, until in node_lifetimes(trace)
    )
