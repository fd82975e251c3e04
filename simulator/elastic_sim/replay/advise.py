"""Advises on nodes to rent: spot or on demand, how many, and with which backup.

A mix has on-demand nodes, which are never lost, and spot nodes, which follow a trace. Every mix is
replayed on each trace with every policy and seed. All traces have the same weight. Intervals are
over traces, or over seeds if there is one trace, because seeds of one trace share its market. With
a budget, the best mix makes the most samples within the budget; without one, it has the lowest cost
per sample. Nodes that the plan cannot use wait as spares. `resized` gives slightly smaller and
larger mixes.

A recorded trace has a fixed number of nodes. For more spot nodes, the trace is repeated under other
names and shifted in time, so that losses coincide as rarely as in the recording. If it has nodes of
several types, on-demand nodes are of these types, in the same proportion of time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

from elastic.domain.errors import FieldError
from elastic_sim.replay.replay import Mean, PolicyRun, dollars_for, mean_of, run_one
from elastic_sim.steps.clusters import NodeType, node_type_of
from elastic_sim.steps.engine import SimulationResult
from elastic_sim.steps.physics import node_lifetimes
from elastic_sim.steps.scenario import Scenario, check_profile_matches
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import SimulatedWorld
from elastic_sim.traces.trace import ADD, REMOVE, Event, Trace, window

MAX_NODES = 256
"""Largest number of nodes tried for a budget; `--buy` can name more."""
ON_DEMAND = "on-demand"
"""Zone of nodes that are never lost."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Numbers of rented nodes."""

    on_demand: int
    spot: int
    """Number of spot nodes requested; the trace decides how many are present."""

    def __str__(self) -> str:
        return f"{self.on_demand} on demand + {self.spot} spot"


@dataclass(frozen=True, slots=True)
class Offer:
    """Result of a mix with one policy, over all traces and seeds."""

    mix: Mix
    policy: str
    samples_per_s: Mean
    dollars_per_h: Mean
    per_million_samples: Mean
    """Dollars per million samples; inf: there are no samples."""
    per_million_tokens: Mean
    """Dollars per million tokens; inf: there are no samples."""
    goodput: Mean
    """Samples divided by those of the best plan, if all nodes of the mix were always present."""
    idle: float
    """Fraction of node time that is idle."""
    spares: float
    """Mean number of usable nodes that wait."""
    backup: str
    """Pair of backup schemes that was in force longest; "": none (rivals)."""
    backup_share: float
    """Fraction of the time with a plan of ours in which `backup` was in force."""
    within: bool
    """Whether the offer is within the budget."""
    by_trace: tuple[tuple[str, float, float], ...]
    """(trace, samples per second, dollars per million tokens), means over seeds."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a mix on one trace with one policy and one seed."""

    run: PolicyRun
    cost: float
    """Dollars."""
    hours: float
    spare_s: float
    """Node-seconds of usable nodes that wait."""
    pairs: Counter[str]
    """Milliseconds in which each pair of backup schemes was in force."""

    @property
    def per_million_samples(self) -> float:
        return 1e6 * self.cost / self.run.samples if self.run.samples else math.inf


def mixes(sizes: Sequence[int], steps: int) -> list[Mix]:
    """Return mixes of `sizes` nodes in total, from all spot to all on demand."""
    on_demand = [(size, round(size * i / steps)) for size in sizes for i in range(steps + 1)]
    return list(dict.fromkeys(Mix(n, size - n) for size, n in on_demand))


def composition(scenario: Scenario, traces: Sequence[Trace]) -> dict[NodeType, float]:
    """Return each type's share of the node time in the traces. Types without nodes are left out."""
    type_of, seconds = _types_of(scenario), defaultdict[NodeType, float](float)
    for trace in traces:
        for added, _, until in node_lifetimes(trace):
            seconds[type_of(added)] += until - added.seconds
    whole = sum(seconds.values())
    if not whole:
        return {type_of(Event(0.0, ADD, "")): 1.0}
    found = sorted(seconds.items(), key=lambda item: item[0].name)
    return {kind: time / whole for kind, time in found if time}


def _types_of(scenario: Scenario) -> Callable[[Event], NodeType]:
    """Return the function that gives the type of the node which an event adds. Nodes of a measured
    profile are of the type that is named for it."""
    if "model" in scenario.files():
        named = node_type_of(scenario.nodes_of[0])
        return lambda event: named
    return scenario.world().type_of


def affordable(shares: Mapping[NodeType, float], budget_per_h: float, steps: int) -> list[Mix]:
    """Return mixes from all spot to all on demand, each with all nodes that the budget pays for.

    At most `MAX_NODES` nodes; one spot node if the budget pays for none. `shares`: `composition`.
    """
    on_demand = sum(share * kind.on_demand for kind, share in shares.items())
    spot = sum(share * kind.spot for kind, share in shares.items())
    found = []
    for i in range(steps + 1):
        share = i / steps
        n = min(MAX_NODES, int(budget_per_h / (share * on_demand + (1 - share) * spot)))
        found.append(Mix(int(share * n), n - int(share * n)) if n else Mix(0, 1))
    return list(dict.fromkeys(found))


def resized(mix: Mix) -> list[Mix]:
    """Return the mix with an eighth fewer and more nodes: of spot nodes, if it has any."""
    by = max(1, round((mix.on_demand + mix.spot) / 8))
    if mix.spot:
        found = [Mix(mix.on_demand, mix.spot - by), Mix(mix.on_demand, mix.spot + by)]
    else:
        found = [Mix(mix.on_demand - by, 0), Mix(mix.on_demand + by, 0)]
    return [one for one in found if min(one.on_demand, one.spot) >= 0 < one.on_demand + one.spot]


def answer_text(best: Offer) -> str:
    """Return one line: the mix, its spares and its backup."""
    mix, backup = best.mix, f"{best.policy} has none of our schemes"
    if best.backup:
        backup = f"{best.backup}, in force {100 * best.backup_share:.0f} % of the time"
    spares = f"{best.spares:.1f} nodes wait on average"
    return f"Mix: {mix}, {mix.on_demand + mix.spot} in all. Spares: {spares}. Backup: {backup}."


def blended(trace: Trace, mix: Mix, shares: Mapping[NodeType, float] | None = None) -> Trace:
    """Return the trace of a mix: on-demand nodes, and spot nodes from shifted copies of `trace`.

    `shares`: `composition`, for the types of the on-demand nodes; None: they have none.
    """
    types = [""] * mix.on_demand if shares is None else _dealt(shares, mix.on_demand)
    fixed = [Event(0.0, ADD, f"on-demand-{i}", ON_DEMAND, name) for i, name in enumerate(types)]
    changes = (1 if event.kind == ADD else -1 for event in trace.events)
    most = max(accumulate(changes, initial=0))
    if not most and mix.spot:
        raise FieldError("trace", trace.origin[:60], "it has no nodes; name another one")
    events: list[Event] = []
    wanted, copy = mix.spot, 0
    while wanted > 0:
        share = min(wanted, most)
        events += _limited(_shifted(trace, copy), share)
        wanted, copy = wanted - share, copy + 1
    rows = sorted([*fixed, *_lasting(events)], key=lambda e: (e.seconds, e.kind == ADD))
    return Trace(tuple(rows), trace.end_s, trace.origin)


def _lasting(events: Sequence[Event]) -> list[Event]:
    """Return the events without nodes that are added and removed in the same second."""
    found: list[Event] = []
    added: dict[str, int] = {}
    for event in events:
        begin = added.pop(event.node, None) if event.kind != ADD else None
        if begin is not None and found[begin].seconds == event.seconds:
            found[begin] = replace(found[begin], node="")
            continue
        if event.kind == ADD:
            added[event.node] = len(found)
        found.append(event)
    return [event for event in found if event.node]


def _dealt(shares: Mapping[NodeType, float], number: int) -> list[str]:
    """Return the type of each of `number` nodes, in these shares: each node is of the type that
    lacks most."""
    counts = dict.fromkeys(shares, 0)
    for n in range(1, number + 1):
        wanting = max(shares, key=lambda kind: n * shares[kind] - counts[kind])
        counts[wanting] += 1
    return [kind.name for kind, count in counts.items() for _ in range(count)]


def _shifted(trace: Trace, copy: int) -> Trace:
    """Return the trace shifted by `copy` golden fractions of its length, with wrap-around.

    At the seam, a node that is present at the trace's end replaces one present at its start.
    """
    shift = trace.end_s * ((copy * 0.618034) % 1.0)
    if not shift:
        return trace
    late, early = window(trace, shift, trace.end_s), window(trace, 0.0, shift)
    events = [replace(e, node=f"{e.node}.{copy}") for e in late.events]
    lives = node_lifetimes(replace(late, events=tuple(events)))
    left = {added.node: added for added, removed, _ in lives if removed is None}
    names: dict[str, str] = {}
    for event in early.events:
        if event.kind == ADD:
            if event.seconds == 0 and left:
                names[event.node] = left.pop(next(iter(left))).node
                continue
            names[event.node] = f"{event.node}.{copy}b"
        at = event.seconds + late.end_s
        events.append(replace(event, seconds=at, node=names[event.node]))
    events.extend(Event(late.end_s, REMOVE, node, e.zone, e.type) for node, e in left.items())
    events.sort(key=lambda e: (e.seconds, e.kind == ADD))
    return Trace(tuple(events), trace.end_s, trace.origin)


def _limited(trace: Trace, most: int) -> list[Event]:
    """Return the events with at most `most` nodes at a time; further nodes are not rented."""
    present: set[str] = set()
    found = []
    for event in trace.events:
        if event.kind == ADD and len(present) < most:
            present.add(event.node)
            found.append(event)
        elif event.kind != ADD and event.node in present:
            present.discard(event.node)
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
    """Return an offer for every mix with every policy, the best first.

    `scenarios` differ only in their traces. Each node has the price of its type. Raises
    FieldError.
    """
    world = scenarios[0].world()
    if "model" in scenarios[0].files():
        check_profile_matches(node_type_of(scenarios[0].nodes_of[0]), world.profile)
    cases = [(one, seed) for one in scenarios for seed in seeds]
    recorded = [one.trace_of(seed) for one, seed in cases]
    type_of, shares = _types_of(scenarios[0]), composition(scenarios[0], recorded)
    found = []
    for mix in options:
        traces = [blended(trace, mix, shares) for trace in recorded]
        for policy in policies:
            trials = defaultdict[str, list[Trial]](list)
            for (one, seed), trace in zip(cases, traces, strict=True):
                trials[one.name()].append(_trial(world, type_of, trace, policy, seed))
            found.append(_offer(world, mix, policy, trials, budget_per_h))
            progress()
    return ranked(found, budget_per_h)


def _trial(
    world: SimulatedWorld,
    type_of: Callable[[Event], NodeType],
    trace: Trace,
    policy: str,
    seed: int,
) -> Trial:
    run = run_one(world, trace, policy, seed, keep=True)
    assert run.outcome is not None
    return Trial(
        run=replace(run, outcome=None),  # the outcome is large
        cost=dollars_for(trace, lambda event: _price(type_of(event), event)),
        hours=trace.end_s / 3600,
        spare_s=run.outcome.account.totals()[Use.IDLE] / 1000,
        pairs=_pairs(run.outcome),
    )


def _price(kind: NodeType, event: Event) -> float:
    """Return the dollars per hour of the node that `event` adds."""
    return kind.on_demand if event.zone == ON_DEMAND else kind.spot


def ranked(found: Sequence[Offer], budget_per_h: float) -> list[Offer]:
    """Return the offers, the best first."""
    if math.isfinite(budget_per_h):
        return sorted(
            found,
            key=lambda o: (
                not o.within,
                -o.samples_per_s.value if o.within else o.dollars_per_h.value,
                o.dollars_per_h.value,
            ),
        )
    return sorted(found, key=lambda o: (o.per_million_samples.value, o.dollars_per_h.value))


def _pairs(outcome: SimulationResult) -> Counter[str]:
    """Return the milliseconds in which each pair of backup schemes was in force."""
    found = Counter[str]()
    for decision, until in outcome.decision_spans():
        if (seen := decision.change.in_force) is not None:
            found[f"{seen.plan.gradients}+{seen.plan.state}"] += until - decision.at
    return found


def _offer(
    world: SimulatedWorld,
    mix: Mix,
    policy: str,
    trials: Mapping[str, Sequence[Trial]],
    budget_per_h: float,
) -> Offer:
    """Return the offer of a mix with a policy. `trials`: one per seed, by trace."""
    every = [one for seeds in trials.values() for one in seeds]

    def over(figure: Callable[[Trial], float]) -> Mean:
        values = [[figure(one) for one in seeds] for seeds in trials.values()]
        return mean_of(values[0] if len(values) == 1 else [fmean(some) for some in values])

    tokens = world.profile.tokens_per_microbatch / world.training.microbatch
    dollars = over(lambda one: one.cost / one.hours)
    whole = sum(one.run.node_s for one in every) or 1.0
    best = world.best(mix.on_demand + mix.spot)
    full = world.samples / best.step_s if best else math.inf
    pairs = sum((one.pairs for one in every), Counter[str]())
    ((backup, longest),) = pairs.most_common(1) or [("", 0)]
    return Offer(
        mix=mix,
        policy=policy,
        samples_per_s=over(lambda one: one.run.samples_per_s),
        dollars_per_h=dollars,
        per_million_samples=over(lambda one: one.per_million_samples),
        per_million_tokens=over(lambda one: one.per_million_samples / tokens),
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
                fmean(o.per_million_samples / tokens for o in seeds),
            )
            for name, seeds in trials.items()
        ),
    )
