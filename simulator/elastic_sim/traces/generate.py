"""Generates traces: at a failure rate, like a recorded trace, or of a shared cluster.

All randomness comes from one seed, in one order, so the same seed gives the same trace.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from elastic.domain.errors import FieldError
from elastic_sim.traces.statistics import Statistics, statistics
from elastic_sim.traces.trace import (
    ADD,
    MAX_EVENTS,
    MAX_NODES,
    MAX_SECONDS,
    REMOVE,
    Event,
    Trace,
    build_trace,
)

DAY_S = 86400.0
MIN_MTBF_S = 1.0
"""Times are whole seconds, so losses are at least this far apart."""
SHARE_EVERY_S = 300.0
"""Time between two changes of the nodes that inference takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """Rates at which nodes join and are lost."""

    nodes: int
    """Nodes wanted; lost ones are requested again."""
    mtbf_s: float
    """Mean time between two moments of loss in the whole cluster, from MIN_MTBF_S up."""
    bulk: tuple[tuple[int, float], ...] = ((1, 1.0),)
    """(number of nodes lost at once, weight) of each size of a loss."""
    repair_s: float = 0.0
    """Mean time until a lost node is replaced; 0: never."""
    notice_s: float = 0.0
    """Seconds of notice before each loss."""
    shape: float = 1.0
    """Weibull shape of the times between losses; 1: exponential, below 1: bursts."""
    lifetime_shape: float = 1.0
    """Approximate Weibull shape of the nodes' lifetimes; the times of losses do not depend on it.
    1: age has no effect, below 1: young nodes are lost more often, above 1: old ones."""
    diurnal: float = 0.0
    """Amplitude of the loss rate over a day: 1 - diurnal at midnight, 1 + diurnal at noon."""
    zones: tuple[str, ...] = ("a",)
    """Zones, which nodes get in turn. Nodes lost at once are from one zone as far as possible."""
    type: str = ""

    def __post_init__(self) -> None:
        sizes_usable = (
            bool(self.bulk)
            and all(n >= 1 and w > 0 for n, w in self.bulk)
            and math.isfinite(sum(w for _, w in self.bulk))
        )
        upto, shape = "at most a hundred years", self.lifetime_shape
        apart = f"seconds from {MIN_MTBF_S:g} up between two losses in the cluster, {upto}"
        biggest = max((n for n, _ in self.bulk), default=0)
        rules = (
            ("nodes", self.nodes, 1 <= self.nodes <= MAX_NODES, f"from 1 to {MAX_NODES} nodes"),
            ("mtbf", self.mtbf_s, MIN_MTBF_S <= self.mtbf_s <= MAX_SECONDS, apart),
            ("repair", self.repair_s, 0 <= self.repair_s <= MAX_SECONDS, f"seconds, {upto}"),
            ("notice", self.notice_s, 0 <= self.notice_s <= MAX_SECONDS, f"seconds, {upto}"),
            ("shape", self.shape, 0.1 <= self.shape <= 10, "from 0.1 to 10"),
            ("lifetime_shape", shape, 0.1 <= shape <= 10, "from 0.1 to 10"),
            ("diurnal", self.diurnal, 0 <= self.diurnal <= 1, "from 0 to 1"),
            ("zones", self.zones, len(self.zones) > 0, "at least one zone"),
            ("bulk", self.bulk, sizes_usable, "sizes from 1 up; weights above 0, finite sum"),
            ("bulk", biggest, biggest <= self.nodes, f"at most all {self.nodes} nodes at once"),
        )
        for name, value, good, remedy in rules:
            if not good:
                raise FieldError(f"market.{name}", value, remedy)


@dataclass(slots=True)
class _Cluster:
    """Nodes present while a trace is generated, and its events so far."""

    zones: tuple[str, ...]
    type: str
    events: list[Event] = field(default_factory=list)
    present: dict[str, Event] = field(default_factory=dict)
    """The event with which each node joined."""
    count: int = 0

    def add(self, at: float) -> None:
        self.count += 1
        node, zone = f"node{self.count}", self.zones[(self.count - 1) % len(self.zones)]
        self.present[node] = Event(at, ADD, node, zone, self.type)
        self.events.append(self.present[node])

    def remove(self, at: float, node: str, notice_s: float) -> None:
        joined = self.present.pop(node)
        self.events.append(replace(joined, seconds=at, kind=REMOVE, notice_s=notice_s))


def generate(market: Market, end_s: float, seed: int = 0) -> Trace:
    """Return a generated trace of `end_s` seconds; times are whole seconds. Raises FieldError."""
    _check_duration(end_s)
    sizes, weights = zip(*market.bulk, strict=True)
    lost = sum(n * weight for n, weight in market.bulk) / sum(weights)
    changes = end_s / market.mtbf_s * lost * (2 if market.repair_s else 1)
    _check_events(market.nodes + changes, end_s, f"with a loss every {market.mtbf_s:g} s")
    draw, cluster = random.Random(seed), _Cluster(market.zones, market.type)
    for _ in range(market.nodes):
        cluster.add(0.0)
    repairs = list[float]()
    at = _next_loss(draw, market, 0.0)
    while min([at, *repairs]) <= end_s:
        if repairs and min(repairs) <= at:
            now = min(repairs)
            repairs.remove(now)
            cluster.add(now)
            continue
        now, size = math.floor(at), int(draw.choices(sizes, weights)[0])
        for node in _victims(draw, cluster, size, now, market.lifetime_shape):
            cluster.remove(now, node, market.notice_s)
            if market.repair_s:
                repaired = math.ceil(now + draw.expovariate(1 / market.repair_s))
                repairs.append(float(repaired or 1))
        at = _next_loss(draw, market, at)
    origin = f"generated, not recorded: {market}, seed {seed}"
    return build_trace(cluster.events, end_s, origin)


def _check_duration(end_s: float) -> None:
    if not 0 < end_s <= MAX_SECONDS:
        raise FieldError("duration", end_s, "seconds above 0, at most a hundred years")


def _check_events(expected: float, end_s: float, why: str) -> None:
    """Raise FieldError if a trace of `end_s` seconds would have too many events."""
    if expected > MAX_EVENTS:
        remedy = f"{why}, {expected:.2g} events are expected, and a trace holds {MAX_EVENTS:.2g}"
        raise FieldError("duration", end_s, f"{remedy}: shorten it, or let fewer nodes be lost")


def _next_loss(draw: random.Random, market: Market, after: float) -> float:
    """Draw the time of the next loss after `after`.

    Candidates are drawn at the highest rate of a day. A candidate is kept with the probability rate
    / highest rate at its time of day (thinning).
    """
    scale = market.mtbf_s / math.gamma(1 + 1 / market.shape)
    at = after
    while True:
        at += max(1.0, draw.weibullvariate(scale / (1 + market.diurnal), market.shape))
        rate = 1 - market.diurnal * math.cos(2 * math.pi * at / DAY_S)
        if draw.random() * (1 + market.diurnal) <= rate:
            return at


def _victims(
    draw: random.Random, cluster: _Cluster, size: int, now: float, shape: float
) -> list[str]:
    """Return the nodes that are lost at once.

    The first node is drawn by its Weibull hazard, age ^ (shape - 1). The others are from its zone
    as far as possible.
    """
    if not cluster.present:
        return []
    nodes = list(cluster.present)
    if shape == 1:
        first = draw.choice(nodes)
    else:
        hazards = [(now - cluster.present[node].seconds + 1) ** (shape - 1) for node in nodes]
        first = draw.choices(nodes, hazards)[0]
    zone = cluster.present[first].zone
    others = [node for node in cluster.present if node != first]
    draw.shuffle(others)
    others.sort(key=lambda node: cluster.present[node].zone != zone)
    return [first, *others[: size - 1]]


def fit_market(trace: Trace, *, zones: tuple[str, ...] = ()) -> Market:
    """Return a market with the statistics of a recorded trace.

    `zones`: zones instead of the trace's. Raises FieldError if the trace has no losses.
    """
    found = statistics(trace)
    if not found.loss_events:
        raise FieldError("--like", trace.origin[:60], "it has no losses to fit")
    moments = Counter(e.seconds for e in trace.events if e.kind == REMOVE)
    bulks = Counter(min(n, found.nodes_most) for n in moments.values())
    diurnal = _diurnal(trace)
    named = tuple(dict.fromkeys(e.zone for e in trace.events if e.kind == ADD and e.zone))
    missing = found.nodes_most - found.nodes_mean
    rate = found.losses / trace.end_s
    return Market(
        nodes=found.nodes_most,
        mtbf_s=max(1.0, trace.end_s / found.loss_events),
        bulk=tuple(sorted((n, float(weight)) for n, weight in bulks.items())),
        repair_s=max(1.0, missing / rate) if found.joins else 0.0,
        notice_s=median(e.notice_s for e in trace.events if e.kind == REMOVE),
        shape=_weibull_shape(_gaps(trace, diurnal)),
        lifetime_shape=_lifetime_shape(found),
        diurnal=diurnal,
        zones=zones or named or ("a",),
        type=trace.events[0].type if trace.events else "",
    )


def _lifetime_shape(found: Statistics) -> float:
    """Return the fitted shape; 1 if within two standard errors (0.78 shape / sqrt(n)) of 1."""
    shape = found.lifetime_shape
    two_errors = 2 * 0.78 * shape / math.sqrt(found.losses)
    return shape if shape and abs(shape - 1) > two_errors else 1.0


def _moments(trace: Trace) -> list[float]:
    return sorted({event.seconds for event in trace.events if event.kind == REMOVE})


def _diurnal(trace: Trace) -> float:
    """Return the diurnal amplitude, by least squares on the loss rate in each hour of the day.

    0 for less than a day, and for an amplitude below two standard errors.
    """
    moments = _moments(trace)
    if trace.end_s < DAY_S:
        return 0.0
    hours = np.arange(25) * DAY_S / 24
    days, rest = divmod(trace.end_s, DAY_S)
    seconds = days * DAY_S / 24 + np.diff(np.minimum(hours, rest))
    lost, _ = np.histogram(np.array(moments) % DAY_S, hours)
    swing = -np.cos(2 * math.pi * (hours[:-1] + DAY_S / 48) / DAY_S)
    weight = np.sqrt(seconds)
    design = np.stack((np.ones(24), swing), axis=1) * weight[:, None]
    (mean, slope), *_ = np.linalg.lstsq(design, lost / seconds * weight, rcond=None)
    share = float(slope / mean) if mean > 0 else 0.0
    return round(min(share, 1.0), 3) if share > 2 * math.sqrt(2 / len(moments)) else 0.0


def _gaps(trace: Trace, diurnal: float) -> list[float]:
    """Return the times between losses, on a clock whose speed follows the diurnal rate."""
    turn = 2 * math.pi / DAY_S
    times = [at - diurnal / turn * math.sin(turn * at) for at in _moments(trace)]
    return [b - a for a, b in itertools.pairwise(times)]


def _weibull_shape(gaps: list[float]) -> float:
    """Return the Weibull shape with the gaps' variation coefficient; 1: fewer than 5 gaps."""
    if len(gaps) < 5:
        return 1.0
    mean = sum(gaps) / len(gaps)
    wanted = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
    low, high = 0.3, 5.0
    for _ in range(60):
        shape = (low + high) / 2
        first, second = math.gamma(1 + 1 / shape), math.gamma(1 + 2 / shape)
        low, high = (shape, high) if math.sqrt(second / first**2 - 1) > wanted else (low, shape)
    return round((low + high) / 2, 3)


def shared_with_inference(
    nodes: int,
    end_s: float,
    *,
    least: int,
    seed: int = 0,
    notice_s: float = 30.0,
    noise: float = 0.05,
) -> Trace:
    """Return the trace of a cluster that training shares with inference, whose load rises by day.

    Every five minutes, training gets between `least` nodes (at noon) and all `nodes` (at midnight).
    `noise`: standard deviation of the load. Raises FieldError.
    """
    _check_duration(end_s)
    if not 1 <= nodes <= MAX_NODES:
        raise FieldError("nodes", nodes, f"from 1 to {MAX_NODES} nodes")
    if not 0 <= least <= nodes:
        raise FieldError("--inference", least, f"from 0 to the {nodes} nodes")
    swing = 2 * noise / math.sqrt(math.pi) * (nodes - least)  # mean change by the noise
    _check_events(nodes + end_s / SHARE_EVERY_S * (1 + swing), end_s, f"with {nodes} nodes")
    draw, cluster = random.Random(seed), _Cluster(("a",), "")
    for _ in range(nodes):
        cluster.add(0.0)
    at = SHARE_EVERY_S
    while at <= end_s:
        load = (1 - math.cos(2 * math.pi * at / DAY_S)) / 2 + draw.gauss(0, noise)
        wanted = round(nodes - (nodes - least) * min(max(load, 0.0), 1.0))
        while len(cluster.present) > wanted:
            cluster.remove(at, draw.choice(list(cluster.present)), notice_s)
        while len(cluster.present) < wanted:
            cluster.add(at)
        at += SHARE_EVERY_S
    origin = (
        f"generated, not recorded: inference takes up to {nodes - least} of {nodes} nodes by day, "
        f"seed {seed}"
    )
    return build_trace(cluster.events, end_s, origin)
