"""The planner: how fast it is, how far its plans are from the best, and how they compare with its rivals'.

    python -m benchmarks.planner [--quick] [--repeats 5] [--clusters 100] [--nodes 64] [--jobs N] [--only-clusters]

- Speed: median seconds of `make_plan` in a warm process.
- Quality: step time over a proven lower bound (`benchmarks.planner_bound`) on random clusters of two or three types.
- Rivals: models of Oobleck's and Varuna's planners (`elastic_sim.steps.rival_planners`), every plan priced by the same cost model, for
  2 to 64 nodes on five models. The table goes to benchmarks/results/planner-rivals.csv.

`--quick` runs a small part of each and writes nothing.
"""

from __future__ import annotations

import argparse
import json
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

import numpy as np
from elastic_sim.steps.rival_planners import EqualNodes, plan_oobleck, plan_varuna
from tqdm import tqdm

from benchmarks.planner_bound import lower_bound
from benchmarks.results import DIRECTORY, Row, save
from elastic.domain.errors import InfeasiblePlan
from elastic.domain.types import JobSpec, NodeInfo, Plan
from elastic.planning.cost.predict import closed_form, predict
from elastic.planning.cost.profile import Device, Link, Profile
from elastic.planning.cost.published_profiles import zoo_profile
from elastic.planning.search.search import PlanRequest, forget, make_plan, problem_of

NETWORK = Link(12.5e9, 10e-6)
"""Between nodes: 100 Gbit/s, 10 us."""
TYPES = ("A100-80", "A100-40", "H100")
STEPS = {
    "bert-large": (256, 32),
    "gpt2": (128, 8),
    "gpt3-medium": (102, 8),
    "gpt3-2.7b": (256, 2),
    "gpt3-6.7b": (512, 2),
}
"""(micro-batches, sequences of one): the samples of a step in Oobleck's published simulation, or nearly."""


PUBLISHED = {
    "bert-large": 368.25,
    "gpt2": 110.01,
    "gpt3-medium": 38.47,
    "gpt3-2.7b": 9.214,
    "gpt3-6.7b": 5.508,
}
"""Samples a second that Oobleck measured on 30 A40 (table of its artifact, branch sosp23-artifact)."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything to measure."""

    repeats: int
    equal: int
    """Nodes of the speed rows."""
    layers: int
    growth: tuple[int, ...]
    clusters: int
    between: tuple[int, int]
    """Nodes of the random clusters."""
    models: tuple[str, ...]
    nodes: tuple[int, ...]
    """Of the comparison with rivals."""
    splits: int | None = None
    """Branchings of the bound; None: its own measure."""


FULL = Size(5, 1024, 96, (64, 256, 1024, 4096, 8192), 100, (64, 512), tuple(STEPS), tuple(range(2, 65)))
QUICK = Size(1, 5, 10, (4,), 1, (8, 12), ("gpt3-medium", "gpt3-2.7b"), (2, 5, 9), 3)


def nodes_of(counts: dict[str, int]) -> tuple[NodeInfo, ...]:
    """So many nodes of each type, one device each."""
    types = [name for name, count in counts.items() for _ in range(count)]
    return tuple(NodeInfo(f"node{i}", "", "", device=name) for i, name in enumerate(types))


def request_of(profile: Profile, nodes: tuple[NodeInfo, ...], microbatches: int) -> PlanRequest:
    spec = JobSpec(
        profile.layers, microbatches, n_steps=1, tokens_per_microbatch=profile.tokens_per_microbatch
    )
    return PlanRequest(spec=spec, nodes=nodes, epoch=1, profile=profile)


def deep(types: tuple[str, ...], layers: int) -> Profile:
    """GPT-3 6.7b with more blocks: `layers` layers in all."""
    base = zoo_profile("gpt3-6.7b", types, link=NETWORK)
    blocks = layers - 2

    def stretched(values: tuple[object, ...]) -> tuple[object, ...]:
        return (values[0], *[values[1]] * blocks, values[-1])

    devices = tuple(Device(d.name, stretched(d.layers), d.memory_bytes) for d in base.devices)  # type: ignore[arg-type]
    return replace(base, model=f"gpt3-6.7b, {blocks} blocks", layers=stretched(base.layers), devices=devices)  # type: ignore[arg-type]


def timed(work: Callable[[], object], repeats: int, *, first: Callable[[], object] | None = None) -> float:
    """Median seconds of `work`, which remembers nothing of earlier calls but what `first` made it plan (the plan from
    which a re-plan starts). One call goes before, for imports."""
    spent = []
    for _ in range(repeats + 1):
        forget()
        if first is not None:
            first()
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[1:])


def thirds(nodes: int) -> dict[str, int]:
    return {name: nodes // 3 + (i < nodes % 3) for i, name in enumerate(TYPES)}


def speed(size: Size) -> Iterator[Row]:
    """Issue row 3."""
    one, three = deep(TYPES[:1], size.layers), deep(TYPES, size.layers)
    n, m = size.equal, 2 * size.equal
    equal, mixed = (
        request_of(one, nodes_of({TYPES[0]: n}), m),
        request_of(three, nodes_of(thirds(n)), m),
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
        larger = request_of(one, nodes_of({TYPES[0]: n}), 2 * n)
        yield Row(f"growth: {n:,} equal nodes", timed(partial(make_plan, larger), 1), "s", None, "lower")
        larger = request_of(three, nodes_of(thirds(n)), 2 * n)
        yield Row(f"growth: {n:,} nodes of 3 types", timed(partial(make_plan, larger), 1), "s", None, "lower")


FAST, SLOW = (12.5e9, 25e9, 50e9), (3.125e9,)
"""Links of the random clusters, bytes/s: 100, 200 and 400 Gbit/s; 25 Gbit/s, where reduction rules the step."""


def random_cluster(seed: int, between: tuple[int, int], links: tuple[float, ...] = FAST) -> PlanRequest:
    """Two or three device types in random numbers, a random model, link and number of micro-batches; 1F1B and no
    backups, as the bound has it."""
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(between[0], between[1] + 1))
    names = ("V100-32", "A100-40", "A100-80", "H100", "L40S", "A40", "A10G")
    kinds = [names[i] for i in rng.permutation(len(names))[: rng.integers(2, 4)]]
    shares = rng.dirichlet(np.ones(len(kinds)))
    counts = {kind: max(1, int(nodes * share)) for kind, share in zip(kinds, shares, strict=True)}
    model = ("gpt2", "gpt3-2.7b", "gpt3-6.7b", "llama3-8b")[rng.integers(4)]
    link = Link(float(rng.choice(links)), 10e-6)
    profile = zoo_profile(model, kinds, microbatch=int(rng.integers(1, 3)), link=link)
    request = request_of(profile, nodes_of(counts), int(nodes * rng.integers(2, 9)))
    return replace(request, schedule="1f1b", backup="none+none")


def step_s(plan: Plan, request: PlanRequest) -> float:
    assert request.profile is not None
    return predict(plan, request.profile, request.nodes).step_s


def closed_s(plan: Plan, request: PlanRequest) -> float:
    """By the closed forms, which the bound bounds."""
    assert request.profile is not None
    found = predict(plan, request.profile, request.nodes)
    pairs = zip(plan.pipelines, found.stages, strict=True)
    return max(closed_form(p.schedule, times, len(p.microbatches)) for p, times in pairs) + found.tail_s


@dataclass(frozen=True, slots=True)
class Gap:
    """One random cluster."""

    over_bound: float
    """Seconds of the plan over the bound, less one."""
    plan_s: float
    """What planning took."""


def gap(seed: int, size: Size, links: tuple[float, ...]) -> Gap | None:
    """None: the cluster cannot hold its model."""
    request = random_cluster(seed, size.between, links)
    began = time.perf_counter()
    try:
        plan = make_plan(request)
    except InfeasiblePlan:
        return None
    spent = time.perf_counter() - began
    seconds = closed_s(plan, request)
    return Gap(seconds / lower_bound(problem_of(request), seconds, size.splits) - 1, spent)


def gaps(size: Size, clusters: int, links: tuple[float, ...], jobs: int) -> tuple[list[Gap], int]:
    """(gaps to the bound of so many clusters, clusters that were drawn and cannot hold their model)."""
    found: list[Gap] = []
    drawn = 0
    fresh = multiprocessing.get_context("spawn")  # locks that threads hold stay locked in a fork
    with ProcessPoolExecutor(jobs, fresh) as pool, tqdm(total=clusters, unit="cluster", disable=None) as bar:
        while len(found) < clusters:
            seeds = range(drawn, drawn + clusters - len(found))
            drawn = seeds.stop
            for seed, one in zip(seeds, pool.map(gap, seeds, repeat(size), repeat(links)), strict=True):
                found += [one] if one else []
                if one and clusters > 1:
                    print(f"cluster {seed}: {one.over_bound:.3%}", flush=True)
                bar.update(one is not None)
    return found, drawn - clusters


def quality(size: Size, jobs: int = 1) -> Iterator[Row]:
    """Issue row 4."""
    a, b = size.between
    found, small = gaps(size, size.clusters, FAST, jobs)
    percent = [100 * one.over_bound for one in found]
    what = f"gap to the lower bound, {size.clusters} random mixed clusters of {a} to {b} nodes"
    yield Row(f"{what}: median", statistics.median(percent), "%", 2.0, "lower")
    yield Row(f"{what}: worst", max(percent), "%", 5.0, "lower")
    yield Row(
        f"{what}: share above 2 %", 100 * sum(p > 2 for p in percent) / len(percent), "%", None, "lower"
    )
    yield Row(f"{what}: drawn and too small", small, "", None, "lower")
    yield Row(f"{what}: median time to plan", statistics.median(g.plan_s for g in found), "s", None, "lower")
    yield Row(f"{what}: longest time to plan", max(g.plan_s for g in found), "s", None, "lower")


def slow_links(size: Size, jobs: int = 1) -> Iterator[Row]:
    """The same where reduction rules the step."""
    few = max(1, size.clusters // 10)
    slow = [100 * one.over_bound for one in gaps(size, few, SLOW, jobs)[0]]
    what = f"gap, {few} clusters with links of 25 Gbit/s"
    yield Row(f"{what}: median", statistics.median(slow), "%", None, "lower")
    yield Row(f"{what}: worst", max(slow), "%", None, "lower")


@dataclass(frozen=True, slots=True)
class Match:
    """Seconds of a step of three planners' plans; inf: no plan."""

    model: str
    nodes: int
    ours: float
    oobleck: float
    varuna: float


def match(model: str, nodes: int) -> Match:
    """One line of the table: A40 nodes and links as in Oobleck's evaluation, no backups for anybody."""
    microbatches, sequences = STEPS[model]
    profile = zoo_profile(model, ["A40"], microbatch=sequences, link=Link(25e9, 10e-6))
    request = replace(request_of(profile, nodes_of({"A40": nodes}), microbatches), backup="none+none")
    cluster = EqualNodes(profile, microbatches, profile.devices[0].memory_bytes)

    def price(plan: Plan | None) -> float:
        return math.inf if plan is None else step_s(plan, request)

    try:
        ours = price(make_plan(request))
    except InfeasiblePlan:
        ours = math.inf
    theirs = [price(planner(cluster, request.nodes, price)) for planner in (plan_oobleck, plan_varuna)]
    return Match(model, nodes, ours, *theirs)


def matches(size: Size) -> list[Match]:
    return [match(model, nodes) for model in size.models for nodes in size.nodes]


def rivals(found: list[Match]) -> Iterator[Row]:
    """Issue row 5."""
    for name in ("oobleck", "varuna"):
        able = [m for m in found if math.isfinite(getattr(m, name))]
        ratios = [getattr(m, name) / m.ours for m in able]
        worse = sum(ratio < 1 - 1e-9 for ratio in ratios)
        title = name.capitalize()
        yield Row(f"{title}: cases in which its plan is faster", worse, "", 0, "lower")
        yield Row(
            f"{title}: its step over ours, mean of {len(able)}", statistics.fmean(ratios), "x", 1.0, "higher"
        )
        yield Row(f"{title}: its step over ours, least", min(ratios), "x", 1.0, "higher")
        yield Row(f"{title}: its step over ours, greatest", max(ratios), "x", None, "higher")
        no_plan = sum(math.isfinite(m.ours) and not math.isfinite(getattr(m, name)) for m in found)
        yield Row(f"{title}: cases without a plan where ours has one", no_plan, "", None, "higher")


def published(found: list[Match]) -> Iterator[Row]:
    """Our prediction of Oobleck's plan against what Oobleck measured: rates assumed, nothing fitted."""
    for m in found:
        if m.nodes == 30 and math.isfinite(m.oobleck):
            microbatches, sequences = STEPS[m.model]
            ratio = microbatches * sequences / m.oobleck / PUBLISHED[m.model]
            yield Row(f"Oobleck on 30 A40, {m.model}: predicted over published", ratio, "x", None, "lower")


def table(found: list[Match]) -> str:
    """The comparison as CSV: seconds of a step; inf where there is no plan."""
    lines = [f"{m.model},{m.nodes},{m.ours:.6g},{m.oobleck:.6g},{m.varuna:.6g}" for m in found]
    return "\n".join(("model,nodes,ours_s,oobleck_s,varuna_s", *lines, ""))


def measure(size: Size, jobs: int = 1) -> tuple[list[Row], list[Match]]:
    """Everything at one size."""
    fast = list(speed(size))  # before anything is remembered
    found = matches(size)
    return [*fast, *quality(size, jobs), *slow_links(size, jobs), *rivals(found), *published(found)], found


def again(size: Size, jobs: int) -> list[Row]:
    """The random clusters alone; all other rows stay as they were written last."""
    rows = {row.metric: row for row in quality(size, jobs)}
    old = json.loads((DIRECTORY / "planner.json").read_text())["rows"]
    return [rows.get(row["metric"], Row(**row)) for row in old]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small part of each; nothing is written")
    parser.add_argument("--repeats", type=int, default=FULL.repeats, help="of each speed row")
    parser.add_argument("--clusters", type=int, default=FULL.clusters, help="random ones")
    parser.add_argument("--nodes", type=int, default=max(FULL.nodes), help="most nodes against rivals")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes for the random clusters")
    parser.add_argument("--only-clusters", action="store_true", help="the random clusters; other rows stay")
    args = parser.parse_args()
    if args.quick:
        for row in measure(QUICK)[0]:
            print(f"{row.metric}: {row.value:.4g} {row.unit} {row.met}")
        return
    size = replace(FULL, repeats=args.repeats, clusters=args.clusters, nodes=tuple(range(2, args.nodes + 1)))
    if args.only_clusters:
        print(f"written to {save('planner', again(size, args.jobs))}")
        return
    rows, found = measure(size, args.jobs)
    print(f"written to {save('planner', rows)}")
    (DIRECTORY / "planner-rivals.csv").write_text(table(found))


if __name__ == "__main__":
    main()
