"""The buyer's question: for this model and budget, which nodes, spot or on demand, how many, and
which backup?

Every mix of so many on-demand nodes, which never go, and so many spot nodes, which come and go as
in the traces, is replayed on each trace with every policy and seed. Traces count alike, long or
short; intervals are over traces, or over seeds if there is one, for seeds of one trace share its
market. With a budget the mix is advised that makes most samples within it, without one the cheapest
a sample, beside all others. Nodes beyond what the plan can use wait as spares: `spares` and `idle`
tell. With `resized` the best mix is tried with fewer and more nodes, too.

A recorded trace knows its own nodes only: with more spot nodes than it has it is repeated under
other names, shifted in time, so that losses do not coincide more than they did."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from elastic.domain.errors import FieldError
from elastic_sim.replay.replay import Mean, PlanInForce, PolicyRun, mean_of, run_one
from elastic_sim.steps.clusters import NodeType, node_type_of
from elastic_sim.steps.engine import SimulationResult
from elastic_sim.steps.physics import node_lifetimes
from elastic_sim.steps.scenario import Scenario, check_profile_matches
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import SimulatedWorld
from elastic_sim.traces.trace import ADD, REMOVE, Event, Trace, window

MAX_NODES = 256
"""Nodes that are tried for a budget; more are named with --buy."""
ON_DEMAND = "on-demand"
"""The zone of nodes that never go."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What is rented."""

    on_demand: int
    spot: int
    """Asked for; how many there are the trace says."""

    def __str__(self) -> str:
        return f"{self.on_demand} on demand + {self.spot} spot"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a mix with a backup scheme gives."""

    mix: Mix
    policy: str
    samples_per_s: Mean
    dollars_per_h: Mean
    per_million: Mean
    """Dollars a million samples; inf if none is made."""
    per_million_tokens: Mean
    goodput: Mean
    """Samples over those of the best plan for all nodes of the mix, were they always there."""
    idle: float
    """Share of node time that nothing was done in: nodes that wait as spares, or do not fit."""
    spares: float
    """Nodes that are of use and do nothing, on average over the time."""
    backup: str
    """The pair of schemes of most of the time that a plan of ours was in force; "": there was
    none."""
    backup_share: float
    """Of that time."""
    within: bool
    """The budget."""
    by_trace: tuple[tuple[str, float, float], ...]
    """(trace, samples a second, dollars a million tokens), means over seeds."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A mix on one trace with one policy and one seed."""

    run: PolicyRun
    cost: float
    """Dollars."""
    hours: float
    spare_s: float
    """Node-seconds of nodes that are of use and do nothing."""
    pairs: Counter[str]
    """Milliseconds that each pair of schemes was in force."""

    @property
    def per_million(self) -> float:
        return 1e6 * self.cost / self.run.samples if self.run.samples else math.inf


def mixes(sizes: Sequence[int], steps: int) -> list[Mix]:
    """Of so many nodes in all, from all spot to all on demand."""
    found = [
        Mix(n, size - n)
        for size in sizes
        for i in range(steps + 1)
        for n in (round(size * i / steps),)
    ]
    return list(dict.fromkeys(found))


def affordable(kind: NodeType, budget_per_h: float, steps: int) -> list[Mix]:
    """From all spot to all on demand, each with as many nodes as the budget pays while all are
    there, `MAX_NODES` at most; one node where it pays none."""
    found = []
    for i in range(steps + 1):
        share = i / steps
        n = min(MAX_NODES, int(budget_per_h / (share * kind.on_demand + (1 - share) * kind.spot)))
        found.append(Mix(int(share * n), n - int(share * n)) if n else Mix(0, 1))
    return list(dict.fromkeys(found))


def resized(mix: Mix) -> list[Mix]:
    """An eighth fewer nodes, and an eighth more, of spot ones if it has any."""
    by = max(1, round((mix.on_demand + mix.spot) / 8))
    if mix.spot:
        found = [Mix(mix.on_demand, mix.spot - by), Mix(mix.on_demand, mix.spot + by)]
    else:
        found = [Mix(mix.on_demand - by, 0), Mix(mix.on_demand + by, 0)]
    return [one for one in found if min(one.on_demand, one.spot) >= 0 < one.on_demand + one.spot]


def answer_text(best: Offer) -> str:
    """The three questions, answered: which mix, how many spares, which backup."""
    mix, backup = best.mix, f"{best.policy} keeps none of our schemes"
    if best.backup:
        backup = f"{best.backup}, in force {100 * best.backup_share:.0f} % of the time"
    spares = f"{best.spares:.1f} nodes wait on average"
    return f"Mix: {mix}, {mix.on_demand + mix.spot} in all. Spares: {spares}. Backup: {backup}."


def blended(trace: Trace, mix: Mix) -> Trace:
    """On-demand nodes from start to end beside `mix.spot` nodes of the trace (its first ones, and
    again shifted)."""
    fixed = [Event(0.0, ADD, f"on-demand-{i}", ON_DEMAND) for i in range(mix.on_demand)]
    most = _most(trace)
    if not most and mix.spot:
        raise FieldError("trace", trace.origin[:60], "it has no nodes; give another one")
    events: list[Event] = []
    wanted, copy = mix.spot, 0
    while wanted > 0:
        share = min(wanted, most)
        events += _limited(_shifted(trace, copy), share)
        wanted, copy = wanted - share, copy + 1
    rows = sorted([*fixed, *events], key=lambda e: (e.seconds, e.kind == ADD))
    return Trace(tuple(rows), trace.end_s, trace.origin)


def _most(trace: Trace) -> int:
    n = most = 0
    for event in trace.events:
        n += 1 if event.kind == ADD else -1
        most = max(most, n)
    return most


def _shifted(trace: Trace, copy: int) -> Trace:
    """The same market at another time: begins a golden part of the trace later, and goes round. Who
    is there at the trace's end goes on in the place of one who was there at its start."""
    shift = trace.end_s * ((copy * 0.618034) % 1.0)
    if not shift:
        return trace
    late, early = window(trace, shift, trace.end_s), window(trace, 0.0, shift)
    events = [replace(e, node=f"{e.node}.{copy}") for e in late.events]
    left: dict[str, Event] = {}
    for event in events:
        if event.kind == ADD:
            left[event.node] = event
        else:
            del left[event.node]
    names: dict[str, str] = {}
    for event in early.events:
        if event.kind == ADD:
            go_on = event.seconds == 0 and bool(left)
            names[event.node] = (
                left.pop(next(iter(left))).node if go_on else f"{event.node}.{copy}b"
            )
            if go_on:
                continue
        events.append(replace(event, seconds=event.seconds + late.end_s, node=names[event.node]))
    gone = [Event(late.end_s, REMOVE, node, e.zone, e.type) for node, e in left.items()]
    events.extend(gone)
    return Trace(
        tuple(sorted(events, key=lambda e: (e.seconds, e.kind == ADD))), trace.end_s, trace.origin
    )


def _limited(trace: Trace, most: int) -> list[Event]:
    """No more than `most` nodes at a time: who comes when there are so many is not rented."""
    here: set[str] = set()
    found = []
    for event in trace.events:
        if event.kind == ADD and len(here) < most:
            here.add(event.node)
            found.append(event)
        elif event.kind != ADD and event.node in here:
            here.discard(event.node)
            found.append(event)
    return found


def offers(
    scenarios: Sequence[Scenario],
    options: Sequence[Mix],
    policies: Sequence[str],
    seeds: Sequence[int],
    budget_per_h: float = math.inf,
    progress: Callable[[], object] = lambda: None,
) -> list[Offer]:
    """Every mix with every policy, the best first. `scenarios` differ in their traces alone. Prices
    are those of the first node type. Raises FieldError."""
    world, kind = scenarios[0].world(), node_type_of(scenarios[0].nodes_of[0])
    if "model" in scenarios[0].files():
        check_profile_matches(kind, world.profile)
    found = []
    for mix in options:
        traces = {
            one: {seed: blended(one.trace_of(seed), mix) for seed in seeds} for one in scenarios
        }
        for policy in policies:
            trials = {
                one.name(): [
                    _trial(world, kind, trace, policy, seed) for seed, trace in traces[one].items()
                ]
                for one in scenarios
            }
            found.append(_offer(world, mix, policy, trials, budget_per_h))
            progress()
    return ranked(found, budget_per_h)


def _trial(world: SimulatedWorld, kind: NodeType, trace: Trace, policy: str, seed: int) -> Trial:
    run = run_one(world, trace, policy, seed, keep=True)
    assert run.outcome is not None
    return Trial(
        run=replace(run, outcome=None, seen=()),  # they are large
        cost=_cost(kind, trace),
        hours=trace.end_s / 3600,
        spare_s=run.outcome.account.totals()[Use.IDLE] / 1000,
        pairs=_pairs(run.outcome, run.seen),
    )


def ranked(found: Sequence[Offer], budget_per_h: float) -> list[Offer]:
    """The best first."""
    if math.isfinite(budget_per_h):
        return sorted(
            found,
            key=lambda o: (
                not o.within,
                -o.samples_per_s.value if o.within else o.dollars_per_h.value,
                o.dollars_per_h.value,
            ),
        )
    return sorted(found, key=lambda o: (o.per_million.value, o.dollars_per_h.value))


def _pairs(outcome: SimulationResult, plans: Sequence[PlanInForce | None]) -> Counter[str]:
    """Milliseconds that each pair of schemes was in force."""
    made = outcome.decisions
    ends = [*(decision.at for decision in made[1:]), outcome.ended]
    found = Counter[str]()
    for decision, until, seen in zip(made, ends, plans, strict=True):
        if seen is not None:
            found[f"{seen.plan.gradients}+{seen.plan.state}"] += until - decision.at
    return found


def _offer(
    world: SimulatedWorld,
    mix: Mix,
    policy: str,
    trials: Mapping[str, Sequence[Trial]],
    budget_per_h: float,
) -> Offer:
    """`trials`: of each trace, one a seed."""
    every = [one for seeds in trials.values() for one in seeds]

    def over(figure: Callable[[Trial], float]) -> Mean:
        told = [[figure(one) for one in seeds] for seeds in trials.values()]
        return mean_of(told[0] if len(told) == 1 else [fmean(values) for values in told])

    tokens = world.profile.tokens_per_microbatch / world.training.microbatch
    dollars = over(lambda one: one.cost / one.hours)
    whole = sum(sum(one.run.time.values()) for one in every) or 1.0
    best = world.best(mix.on_demand + mix.spot)
    full = world.samples / best.step_s if best else math.inf
    pairs = sum((one.pairs for one in every), Counter[str]())
    ((backup, longest),) = pairs.most_common(1) or [("", 0)]
    return Offer(
        mix=mix,
        policy=policy,
        samples_per_s=over(lambda one: one.run.samples_per_s),
        dollars_per_h=dollars,
        per_million=over(lambda one: one.per_million),
        per_million_tokens=over(lambda one: one.per_million / tokens),
        goodput=over(lambda one: one.run.samples_per_s / full),
        idle=sum(one.run.time["idle"] for one in every) / whole,
        spares=sum(one.spare_s for one in every) / sum(3600 * one.hours for one in every),
        backup=backup,
        backup_share=longest / pairs.total() if backup else 0.0,
        within=dollars.value <= budget_per_h,
        by_trace=tuple(
            (
                name,
                fmean(o.run.samples_per_s for o in seeds),
                fmean(o.per_million / tokens for o in seeds),
            )
            for name, seeds in trials.items()
        ),
    )


def _cost(kind: NodeType, trace: Trace) -> float:
    """Dollars: on-demand nodes at their price, spot nodes at theirs, while they are there."""
    return sum(
        (kind.on_demand if came.zone == ON_DEMAND else kind.spot)
        * ((gone.seconds if gone else trace.end_s) - came.seconds)
        / 3600
        for came, gone in node_lifetimes(trace)
    )
