"""Runs policies on a trace over several seeds: throughput, goodput, cost and use of node time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, stdev

from scipy.special import stdtrit

from elastic.domain.types import NodeInfo, Plan
from elastic_sim.steps.engine import Reconfiguration, Simulation, SimulationResult
from elastic_sim.steps.physics import (
    draw_slowdowns,
    node_lifetimes,
    node_ms,
    spread_losses,
    step_noise,
    usable_trace,
)
from elastic_sim.steps.policies import policy_factory
from elastic_sim.steps.policies.ours import OurPolicy
from elastic_sim.steps.policies.parcae import ParcaePolicy
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import SimulatedWorld
from elastic_sim.traces.trace import Trace

ORACLE = "oracle"
TraceOf = Callable[[int], Trace]
"""The trace for a seed: always the same recorded one, or another generated one each time."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean over seeds, with half the width of its 95 % interval (Student's t; 0 for one seed)."""

    value: float
    margin: float = 0.0

    def __str__(self) -> str:
        return f"{self.value:.4g}" + (f" ± {self.margin:.2g}" if self.margin else "")


def mean_of(values: Sequence[float]) -> Mean:
    n = len(values)
    if n < 2 or not all(map(math.isfinite, values)):
        return Mean(mean(values))
    return Mean(mean(values), float(stdtrit(n - 1, 0.975)) * stdev(values) / math.sqrt(n))


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A plan and the nodes that were present when it was made."""

    plan: Plan
    nodes: tuple[NodeInfo, ...]


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """Result of one policy with one seed."""

    policy: str
    seed: int
    samples: int
    samples_per_s: float
    goodput: float
    """Samples divided by those of the oracle on the same trace; 0 if the oracle made none."""
    cost: float
    """Dollars for all nodes while they were present."""
    time: dict[str, float]
    """Node-seconds by use, of all nodes that are paid for; booting nodes are idle."""
    changes: int
    """Number of reconfigurations."""
    outcome: SimulationResult | None = field(default=None, compare=False)
    seen: tuple[PlanInForce | None, ...] = field(default=(), compare=False)
    """With `outcome`: the plan after each decision of our policy; None for rivals and pauses."""


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """Results of one policy over all seeds."""

    policy: str
    samples_per_s: Mean
    goodput: Mean
    cost: Mean
    cost_per_million: Mean
    """Dollars per million samples; inf if there are none."""
    time: dict[str, float]
    """Shares of all node-seconds, by use."""
    runs: tuple[PolicyRun, ...]


def run_one(
    world: SimulatedWorld, trace: Trace, policy: str, seed: int, *, keep: bool = False
) -> PolicyRun:
    """Simulate one policy. `keep`: also store the simulation result and the plans.

    Goodput is 0 until `replay` compares the run with the oracle.
    """
    made = policy_factory(policy)(world, seed)
    usable = usable_trace(trace, world.physics, seed)
    if isinstance(made, ParcaePolicy):
        made.set_future(usable)
    plans: list[PlanInForce | None] = []

    def record_plan(change: Reconfiguration) -> None:
        state = made.state if isinstance(made, OurPolicy) else None
        if change.setup is None or state is None or state.plan is None:
            plans.append(None)
        else:
            nodes = tuple(member.report.info for member in state.members.values())
            plans.append(PlanInForce(state.plan, nodes))

    outcome = Simulation(
        usable,
        made,
        step_noise(world.physics, seed),
        draw_slowdowns(world.physics, usable, seed),
        record_plan if keep else None,
    ).run()
    totals = outcome.account.totals()
    booting_ms = node_ms(spread_losses(trace, world.physics, seed)) - node_ms(usable)
    totals[Use.IDLE] += booting_ms
    return PolicyRun(
        policy=policy,
        seed=seed,
        samples=outcome.samples,
        samples_per_s=outcome.samples_per_s,
        goodput=0.0,
        cost=cost_of(world, trace),
        time={use.value: totals[use] / 1000 for use in Use},
        changes=len(outcome.decisions),
        outcome=outcome if keep else None,
        seen=tuple(plans),
    )


def replay(
    world: SimulatedWorld,
    trace_of: TraceOf,
    policies: Sequence[str],
    seeds: Sequence[int] = (0,),
    *,
    keep: bool = False,
    progress: Callable[[str], None] | None = None,
) -> list[PolicySummary]:
    """Run all policies, in the given order. The oracle always runs, to measure goodput.

    `keep`: store simulation results and plans of the first seed. Raises FieldError.
    """

    def one(policy: str, seed: int) -> PolicyRun:
        return run_one(world, trace_of(seed), policy, seed, keep=keep and seed == seeds[0])

    oracles = {seed: one(ORACLE, seed) for seed in seeds}
    found = []
    for policy in dict.fromkeys(policies):
        runs = []
        for seed in seeds:
            run = oracles[seed] if policy == ORACLE else one(policy, seed)
            runs.append(with_goodput(run, oracles[seed]))
        found.append(summarize(runs))
        if progress:
            progress(policy)
    return found


def with_goodput(run: PolicyRun, oracle: PolicyRun) -> PolicyRun:
    return replace(run, goodput=run.samples / oracle.samples if oracle.samples else 0.0)


def summarize(runs: Sequence[PolicyRun]) -> PolicySummary:
    """Summary of the runs of one policy."""
    whole = sum(sum(run.time.values()) for run in runs) or 1.0
    costs = [1e6 * run.cost / run.samples if run.samples else math.inf for run in runs]
    return PolicySummary(
        policy=runs[0].policy,
        samples_per_s=mean_of([run.samples_per_s for run in runs]),
        goodput=mean_of([run.goodput for run in runs]),
        cost=mean_of([run.cost for run in runs]),
        cost_per_million=mean_of(costs),
        time={use.value: sum(run.time[use.value] for run in runs) / whole for use in Use},
        runs=tuple(runs),
    )


def cost_of(world: SimulatedWorld, trace: Trace) -> float:
    """Dollars at spot prices for all nodes of the trace, booting included."""
    return sum(
        world.type_of(added).spot
        * ((removed.seconds if removed else trace.end_s) - added.seconds)
        / 3600
        for added, removed in node_lifetimes(trace)
    )
