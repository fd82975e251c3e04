"""Policies on a trace: what each delivers, costs, and where the nodes' time went, over several seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, stdev

from scipy.special import stdtrit

from elastic_sim.replay.watch import Seen, Watched
from elastic_sim.steps.engine import Outcome, Simulation
from elastic_sim.steps.physics import node_ms, noise_of, prepared, slowdowns_of, spread, stays
from elastic_sim.steps.policies import maker_of
from elastic_sim.steps.policies.parcae import Parcae
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import World
from elastic_sim.traces.trace import Trace

ORACLE = "oracle"
TraceOf = Callable[[int], Trace]
"""The trace of a seed: always the same recorded one, or each time another generated one."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Over seeds, with half the width of its 95 % confidence interval (Student's t; 0 with one seed)."""

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
class Run:
    """One policy, one seed."""

    policy: str
    seed: int
    samples: int
    samples_per_s: float
    goodput: float
    """Samples over those of the feasible oracle on the same trace; 0 if it made none."""
    cost: float
    """Dollars for all nodes while they were there."""
    time: dict[str, float]
    """Node-seconds by use, of all nodes that are paid for: those that boot are idle."""
    changes: int
    outcome: Outcome | None = field(default=None, compare=False)
    seen: tuple[Seen | None, ...] = field(default=(), compare=False)
    """Of our policy, with the outcome: the plan after each decision."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy over all seeds."""

    policy: str
    samples_per_s: Mean
    goodput: Mean
    cost: Mean
    cost_per_million: Mean
    """Dollars a million samples; inf where none was made."""
    time: dict[str, float]
    """Shares of all node-seconds, by use."""
    runs: tuple[Run, ...]


def run_one(world: World, trace: Trace, policy: str, seed: int, *, keep: bool = False) -> Run:
    """Simulate one policy; `keep`: its whole outcome and its plans, too. Goodput is filled in by `replay`."""
    made = maker_of(policy)(world, seed)
    seen = prepared(trace, world.physics, seed)
    if isinstance(made, Parcae):
        made.know(seen)
    watched = Watched(made)
    outcome = Simulation(
        seen,
        watched if keep else made,
        noise_of(world.physics, seed),
        slowdowns_of(world.physics, seen, seed),
    ).run()
    totals = outcome.account.totals()
    totals[Use.IDLE] += node_ms(spread(trace, world.physics, seed)) - node_ms(seen)  # booting
    return Run(
        policy=policy,
        seed=seed,
        samples=outcome.samples,
        samples_per_s=outcome.samples_per_s,
        goodput=0.0,
        cost=cost_of(world, trace),
        time={use.value: totals[use] / 1000 for use in Use},
        changes=len(outcome.decisions),
        outcome=outcome if keep else None,
        seen=tuple(watched.seen),
    )


def replay(
    world: World,
    trace_of: TraceOf,
    policies: Sequence[str],
    seeds: Sequence[int] = (0,),
    *,
    keep: bool = False,
    progress: Callable[[str], None] | None = None,
) -> list[Summary]:
    """All policies, in the order given. The oracle runs in any case, to measure goodput. `keep`: outcomes and plans of
    the first seed. Raises FieldError."""

    def one(policy: str, seed: int) -> Run:
        return run_one(world, trace_of(seed), policy, seed, keep=keep and seed == seeds[0])

    oracles = {seed: one(ORACLE, seed) for seed in seeds}
    found = []
    for policy in dict.fromkeys(policies):
        runs = []
        for seed in seeds:
            run = oracles[seed] if policy == ORACLE else one(policy, seed)
            runs.append(with_goodput(run, oracles[seed]))
        found.append(summary(runs))
        if progress:
            progress(policy)
    return found


def with_goodput(run: Run, oracle: Run) -> Run:
    share = run.samples / oracle.samples if oracle.samples else 0.0
    return replace(run, goodput=share)


def summary(runs: Sequence[Run]) -> Summary:
    """Of one policy."""
    whole = sum(sum(run.time.values()) for run in runs) or 1.0
    return Summary(
        policy=runs[0].policy,
        samples_per_s=mean_of([run.samples_per_s for run in runs]),
        goodput=mean_of([run.goodput for run in runs]),
        cost=mean_of([run.cost for run in runs]),
        cost_per_million=mean_of([1e6 * run.cost / run.samples if run.samples else math.inf for run in runs]),
        time={use.value: sum(run.time[use.value] for run in runs) / whole for use in Use},
        runs=tuple(runs),
    )


def cost_of(world: World, trace: Trace) -> float:
    """Dollars at spot prices for all nodes of the trace, booting included."""
    return sum(
        world.type_of(came).spot * ((gone.seconds if gone else trace.end_s) - came.seconds) / 3600
        for came, gone in stays(trace)
    )
