"""Planner benchmark: speed, distance from the best plan, and comparison with rival planners.

    python -m benchmarks.planning.planner [--quick] [--repeats 5] [--clusters 100] [--nodes 64]
                                          [--jobs N] [--only-clusters]

- Speed: median seconds of `make_plan` in a warm process.
- Quality: step time over a proven lower bound (`benchmarks.planning.planner_bound`) on random
  clusters of two or three device types.
- Rivals: models of Oobleck's and Varuna's planners (`elastic_sim.steps.rival_planners`) for 2 to 64
  nodes on five models. The same cost model prices every plan. The table is written to
  benchmarks/results/planner-rivals.csv.

`--quick` runs a small part of each and writes nothing.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import TypeVar

import numpy as np
from elastic_sim.steps.rival_planners import EqualNodes, plan_oobleck, plan_varuna
from tqdm import tqdm

from benchmarks.planning.planner_bound import lower_bound
from benchmarks.results import DIRECTORY, Row, load, save
from elastic.domain.errors import InfeasiblePlan
from elastic.domain.types import JobSpec, NodeInfo, Plan
from elastic.planning.cost.predict import closed_form, predict
from elastic.planning.cost.profile import Device, LinkProfile, Profile
from elastic.planning.cost.published_profiles import published_profile
from elastic.planning.search.search import PlanRequest, clear_caches, make_plan, problem_of

T = TypeVar("T")
NETWORK = LinkProfile(12.5e9, 10e-6)
"""Link between nodes: 100 Gbit/s, 10 us."""
TYPES = ("A100-80", "A100-40", "H100")
STEPS = {
    "bert-large": (256, 32),
    "gpt2": (128, 8),
    "gpt3-medium": (102, 8),
    "gpt3-2.7b": (256, 2),
    "gpt3-6.7b": (512, 2),
}
"""(micro-batches per step, sequences per micro-batch): about the samples per step of Oobleck."""
PUBLISHED = {
    "bert-large": 368.25,
    "gpt2": 110.01,
    "gpt3-medium": 38.47,
    "gpt3-2.7b": 9.214,
    "gpt3-6.7b": 5.508,
}
"""Samples per second of Oobleck on 30 A40 nodes, from its artifact (branch sosp23-artifact)."""


@dataclass(frozen=True, slots=True)
class PlannerRunSize:
    """Extent of a run of this benchmark."""

    repeats: int
    equal: int
    """Number of nodes in the speed rows with equal nodes."""
    layers: int
    growth: tuple[int, ...]
    clusters: int
    between: tuple[int, int]
    """Least and largest number of nodes of the random clusters."""
    models: tuple[str, ...]
    nodes: tuple[int, ...]
    """Node counts of the comparison with rivals."""
    splits: int | None = None
    """Branchings of the bound; None: as many as `lower_bound` allows."""


FULL = PlannerRunSize(
    5, 1024, 96, (64, 256, 1024, 4096, 8192), 100, (64, 512), tuple(STEPS), tuple(range(2, 65))
)
QUICK = PlannerRunSize(1, 3, 6, (3,), 1, (4, 5), ("gpt3-medium",), (2, 5), 3)


def nodes_of(counts: dict[str, int]) -> tuple[NodeInfo, ...]:
    """Return nodes with one device each; `counts` gives their number per device type."""
    types = [name for name, count in counts.items() for _ in range(count)]
    return tuple(NodeInfo(f"node{i}", "", "", device=name) for i, name in enumerate(types))


def request_of(profile: Profile, nodes: tuple[NodeInfo, ...], microbatches: int) -> PlanRequest:
    spec = JobSpec(
        profile.layers, microbatches, n_steps=1, tokens_per_microbatch=profile.tokens_per_microbatch
    )
    return PlanRequest(spec=spec, nodes=nodes, epoch=1, profile=profile)


def deep_profile(types: tuple[str, ...], layers: int) -> Profile:
    """Return the profile of GPT-3 6.7b stretched to `layers` layers."""
    base = published_profile("gpt3-6.7b", types, link=NETWORK)
    blocks = layers - 2

    def stretched(values: tuple[T, ...]) -> tuple[T, ...]:
        return (values[0], *[values[1]] * blocks, values[-1])

    devices = tuple(Device(d.name, stretched(d.layers), d.memory_bytes) for d in base.devices)
    name = f"gpt3-6.7b, {blocks} blocks"
    return replace(base, model=name, layers=stretched(base.layers), devices=devices)


def timed(
    work: Callable[[], object], repeats: int, *, first: Callable[[], object] | None = None
) -> float:
    """Return the median seconds of `work` without caches, except those that `first` fills.

    `first` makes the plan from which a re-plan starts. One unmeasured call loads all imports.
    """
    spent = []
    for _ in range(repeats + 1):
        clear_caches()
        if first is not None:
            first()
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[1:])


def three_types(nodes: int) -> dict[str, int]:
    return {name: nodes // 3 + (i < nodes % 3) for i, name in enumerate(TYPES)}


def reported(metric: str, value: float, unit: str, better: str = "lower") -> Row:
    """Return a row without a target."""
    return Row(metric, value, unit, None, better)


def speed(size: PlannerRunSize) -> Iterator[Row]:
    """Yield rows with the seconds of planning and re-planning."""
    one, three = deep_profile(TYPES[:1], size.layers), deep_profile(TYPES, size.layers)
    n, m = size.equal, 2 * size.equal
    equal, mixed = (
        request_of(one, nodes_of({TYPES[0]: n}), m),
        request_of(three, nodes_of(three_types(n)), m),
    )
    where = f"{n:,} equal nodes x {size.layers} layers"
    yield Row(where, timed(partial(make_plan, equal), size.repeats), "s", 0.1, "lower")
    where = f"{n:,} nodes of 3 types x {size.layers} layers"
    yield Row(where, timed(partial(make_plan, mixed), size.repeats), "s", 1.0, "lower")
    for name, request in (("equal nodes", equal), ("nodes of 3 types", mixed)):
        plan = make_plan(request)
        gone = frozenset({plan.nodes()[len(plan.nodes()) // 2]})
        after = replace(request, current=plan, dead=gone, epoch=2)
        spent = timed(partial(make_plan, after), size.repeats, first=partial(make_plan, request))
        yield Row(f"re-plan after one loss, {n:,} {name}", spent, "s", 0.05, "lower")
    for n in size.growth:
        for name, profile, counts in (
            ("equal nodes", one, {TYPES[0]: n}),
            ("nodes of 3 types", three, three_types(n)),
        ):
            larger = request_of(profile, nodes_of(counts), 2 * n)
            yield reported(f"growth: {n:,} {name}", timed(partial(make_plan, larger), 1), "s")


FAST, SLOW = (12.5e9, 25e9, 50e9), (3.125e9,)
"""Links of the random clusters in bytes per second: 100, 200 and 400 Gbit/s; and 25 Gbit/s, where
reduction dominates the step."""


def random_cluster(
    seed: int, between: tuple[int, int], links: tuple[float, ...] = FAST
) -> PlanRequest:
    """Return a random cluster and problem: two or three device types, random model and link.

    The plan is 1F1B without backups, because the bound assumes these.
    """
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(between[0], between[1] + 1))
    names = ("V100-32", "A100-40", "A100-80", "H100", "L40S", "A40", "A10G")
    kinds = [names[i] for i in rng.permutation(len(names))[: rng.integers(2, 4)]]
    shares = rng.dirichlet(np.ones(len(kinds)))
    counts = {kind: max(1, int(nodes * share)) for kind, share in zip(kinds, shares, strict=True)}
    model = ("gpt2", "gpt3-2.7b", "gpt3-6.7b", "llama3-8b")[rng.integers(4)]
    link = LinkProfile(float(rng.choice(links)), 10e-6)
    profile = published_profile(model, kinds, microbatch=int(rng.integers(1, 3)), link=link)
    request = request_of(profile, nodes_of(counts), int(nodes * rng.integers(2, 9)))
    return replace(request, schedule="1f1b", backup="none+none")


def step_s(plan: Plan, request: PlanRequest) -> float:
    assert request.profile is not None
    return predict(plan, request.profile, request.nodes).step_s


def closed_s(plan: Plan, request: PlanRequest) -> float:
    """Return the seconds of a step by the closed forms, to which the bound refers."""
    assert request.profile is not None
    found = predict(plan, request.profile, request.nodes)
    pairs = zip(plan.pipelines, found.stages, strict=True)
    return (
        max(closed_form(p.schedule, times, len(p.microbatches)) for p, times in pairs)
        + found.tail_s
    )


@dataclass(frozen=True, slots=True)
class BoundGap:
    """Planner and bound on one random cluster."""

    over_bound: float
    """Seconds of the plan divided by the bound, minus one."""
    plan_s: float
    """Seconds that planning took."""


def bound_gap(seed: int, size: PlannerRunSize, links: tuple[float, ...]) -> BoundGap | None:
    """Return the gap of the cluster drawn with `seed`; None: the cluster cannot hold its model."""
    request = random_cluster(seed, size.between, links)
    began = time.perf_counter()
    try:
        plan = make_plan(request)
    except InfeasiblePlan:
        return None
    spent = time.perf_counter() - began
    seconds = closed_s(plan, request)
    return BoundGap(seconds / lower_bound(problem_of(request), seconds, size.splits) - 1, spent)


def bound_gaps(
    size: PlannerRunSize, clusters: int, links: tuple[float, ...], jobs: int
) -> tuple[list[BoundGap], int]:
    """Return (gaps of so many clusters, number of drawn clusters that cannot hold their model)."""
    found: list[BoundGap] = []
    drawn = 0
    fresh = multiprocessing.get_context("spawn")  # locks that threads hold stay locked in a fork
    with (
        ProcessPoolExecutor(jobs, fresh) as pool,
        tqdm(total=clusters, unit="cluster", disable=None) as bar,
    ):
        while len(found) < clusters:
            seeds = range(drawn, drawn + clusters - len(found))
            drawn = seeds.stop
            for seed, one in zip(
                seeds, pool.map(bound_gap, seeds, repeat(size), repeat(links)), strict=True
            ):
                found += [one] if one else []
                if one and clusters > 1:
                    print(f"cluster {seed}: {one.over_bound:.3%}", flush=True)
                bar.update(one is not None)
    return found, drawn - clusters


def quality(size: PlannerRunSize, jobs: int = 1) -> Iterator[Row]:
    """Yield rows with the gaps to the lower bound."""
    a, b = size.between
    found, small = bound_gaps(size, size.clusters, FAST, jobs)
    percent = [100 * one.over_bound for one in found]
    wide = 100 * sum(p > 2 for p in percent) / len(percent)
    plan_s = [one.plan_s for one in found]
    what = f"gap to the lower bound, {size.clusters} random mixed clusters of {a} to {b} nodes"
    yield Row(f"{what}: median", statistics.median(percent), "%", 2.0, "lower")
    yield Row(f"{what}: worst", max(percent), "%", 5.0, "lower")
    yield reported(f"{what}: share above 2 %", wide, "%")
    yield reported(f"{what}: drawn clusters that are too small", small, "")
    yield reported(f"{what}: median time to plan", statistics.median(plan_s), "s")
    yield reported(f"{what}: longest time to plan", max(plan_s), "s")


def slow_links(size: PlannerRunSize, jobs: int = 1) -> Iterator[Row]:
    """Yield rows with the gaps on slow links, where reduction dominates the step."""
    few = max(1, size.clusters // 10)
    percent = [100 * one.over_bound for one in bound_gaps(size, few, SLOW, jobs)[0]]
    what = f"gap, {few} clusters with links of 25 Gbit/s"
    yield reported(f"{what}: median", statistics.median(percent), "%")
    yield reported(f"{what}: worst", max(percent), "%")


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """Seconds per step of the plans of three planners; inf: no plan."""

    model: str
    nodes: int
    ours: float
    oobleck: float
    varuna: float


def compare(model: str, nodes: int) -> PlanComparison:
    """Compare the planners on A40 nodes with links as in Oobleck's evaluation, without backups."""
    microbatches, sequences = STEPS[model]
    profile = published_profile(model, ["A40"], microbatch=sequences, link=LinkProfile(25e9, 10e-6))
    request = replace(
        request_of(profile, nodes_of({"A40": nodes}), microbatches), backup="none+none"
    )
    cluster = EqualNodes(profile, microbatches, profile.devices[0].memory_bytes)

    try:
        ours = step_s(make_plan(request), request)
    except InfeasiblePlan:
        ours = math.inf
    theirs = [
        min((step_s(plan, request) for plan in planner(cluster, request.nodes)), default=math.inf)
        for planner in (plan_oobleck, plan_varuna)
    ]
    return PlanComparison(model, nodes, ours, *theirs)


def compare_all(size: PlannerRunSize) -> list[PlanComparison]:
    return [compare(model, nodes) for model in size.models for nodes in size.nodes]


def rivals(found: list[PlanComparison]) -> Iterator[Row]:
    """Yield rows that summarise the comparison with each rival."""
    for name in ("oobleck", "varuna"):
        able = [m for m in found if math.isfinite(getattr(m, name))]
        ratios = [getattr(m, name) / m.ours for m in able]
        worse = sum(ratio < 1 - 1e-9 for ratio in ratios)
        title = name.capitalize()
        yield Row(f"{title}: cases in which its plan is faster", worse, "", 0, "lower")
        mean = f"{title}: its step over ours, mean of {len(able)}"
        yield Row(mean, statistics.fmean(ratios), "x", 1.0, "higher")
        yield Row(f"{title}: its step over ours, least", min(ratios), "x", 1.0, "higher")
        yield reported(f"{title}: its step over ours, greatest", max(ratios), "x", "higher")
        no_plan = sum(math.isfinite(m.ours) and not math.isfinite(getattr(m, name)) for m in found)
        yield reported(f"{title}: cases without a plan where ours has one", no_plan, "", "higher")


def published(found: list[PlanComparison]) -> Iterator[Row]:
    """Yield rows: predicted over published speed of Oobleck's plan. No rate is fitted."""
    for m in found:
        if m.nodes == 30 and math.isfinite(m.oobleck):
            microbatches, sequences = STEPS[m.model]
            ratio = microbatches * sequences / m.oobleck / PUBLISHED[m.model]
            yield reported(f"Oobleck on 30 A40, {m.model}: predicted over published", ratio, "x")


def table(found: list[PlanComparison]) -> str:
    """Return the comparison as CSV. Each value is the seconds of a step; inf means no plan."""
    lines = [f"{m.model},{m.nodes},{m.ours:.6g},{m.oobleck:.6g},{m.varuna:.6g}" for m in found]
    return "\n".join(("model,nodes,ours_s,oobleck_s,varuna_s", *lines, ""))


def measure(size: PlannerRunSize, jobs: int = 1) -> tuple[list[Row], list[PlanComparison]]:
    """Return all rows, and the comparison with rivals."""
    fast = list(speed(size))  # before the caches are filled
    found = compare_all(size)
    return [
        *fast,
        *quality(size, jobs),
        *slow_links(size, jobs),
        *rivals(found),
        *published(found),
    ], found


def remeasure_clusters(size: PlannerRunSize, jobs: int) -> list[Row]:
    """Return the rows of the last run, with the random clusters measured again."""
    rows = {row.metric: row for row in quality(size, jobs)}
    return [rows.get(row.metric, row) for row in load("planner")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="run a small part; write nothing")
    parser.add_argument("--repeats", type=int, default=FULL.repeats, help="calls per speed row")
    parser.add_argument(
        "--clusters", type=int, default=FULL.clusters, help="number of random clusters"
    )
    parser.add_argument(
        "--nodes", type=int, default=max(FULL.nodes), help="most nodes against rivals"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes for the random clusters"
    )
    parser.add_argument(
        "--only-clusters",
        action="store_true",
        help="measure only the random clusters; keep other rows",
    )
    args = parser.parse_args()
    if args.quick:
        for row in measure(QUICK)[0]:
            print(f"{row.metric}: {row.value:.4g} {row.unit} {row.met}")
        return
    size = replace(
        FULL, repeats=args.repeats, clusters=args.clusters, nodes=tuple(range(2, args.nodes + 1))
    )
    if args.only_clusters:
        print(f"written to {save('planner', remeasure_clusters(size, args.jobs))}")
        return
    rows, found = measure(size, args.jobs)
    print(f"written to {save('planner', rows)}")
    (DIRECTORY / "planner-rivals.csv").write_text(table(found))


if __name__ == "__main__":
    main()
