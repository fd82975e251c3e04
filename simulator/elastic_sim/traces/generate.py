"""Made-up traces: at a chosen failure rate, fitted to a recorded one, or as a cluster shared with inference gives them.

All randomness comes from one seed, in one order: the same seed, the same trace.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from elastic.domain.errors import FieldError
from elastic_sim.traces.statistics import Statistics, statistics
from elastic_sim.traces.trace import ADD, MOST_NODES, MOST_SECONDS, REMOVE, Event, Trace, check

DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """How nodes come and go."""

    nodes: int
    """Wanted; what is lost is asked for again."""
    mtbf_s: float
    """Mean time between two losses of the whole cluster (moments, not nodes)."""
    bulk: tuple[tuple[int, float], ...] = ((1, 1.0),)
    """(nodes lost at once, weight)."""
    repair_s: float = 0.0
    """Mean time until a lost node is replaced; 0: never."""
    notice_s: float = 0.0
    shape: float = 1.0
    """Of the Weibull distribution of the times between losses; 1: exponential, below 1: in bursts."""
    lifetime_shape: float = 1.0
    """Of the Weibull distribution of nodes' lifetimes, nearly (losses keep to their own times); 1: age says nothing,
    below 1 young nodes go rather, above 1 old ones."""
    diurnal: float = 0.0
    """Swing of the loss rate over a day: from 1 - diurnal at night to 1 + diurnal in the afternoon."""
    zones: tuple[str, ...] = ("a",)
    """Nodes are spread over them; a bulk loss stays inside one while it can."""
    type: str = ""

    def __post_init__(self) -> None:
        problems = (
            ("nodes", self.nodes, 1 <= self.nodes <= MOST_NODES, f"from 1 to {MOST_NODES} nodes"),
            (
                "mtbf",
                self.mtbf_s,
                0 < self.mtbf_s <= MOST_SECONDS,
                "seconds above 0, at most a hundred years",
            ),
            ("repair", self.repair_s, 0 <= self.repair_s <= MOST_SECONDS, "seconds, 0 to a hundred years"),
            ("notice", self.notice_s, 0 <= self.notice_s <= MOST_SECONDS, "seconds, 0 to a hundred years"),
            ("shape", self.shape, 0.1 <= self.shape <= 10, "from 0.1 to 10"),
            ("lifetime_shape", self.lifetime_shape, 0.1 <= self.lifetime_shape <= 10, "from 0.1 to 10"),
            ("diurnal", self.diurnal, 0 <= self.diurnal <= 1, "from 0 to 1"),
            ("zones", self.zones, len(self.zones) > 0, "at least one zone"),
            (
                "bulk",
                self.bulk,
                bool(self.bulk)
                and all(n >= 1 and w > 0 for n, w in self.bulk)
                and math.isfinite(sum(w for _, w in self.bulk)),
                "sizes from 1 up; weights above 0 with a finite sum",
            ),
        )
        for name, value, good, remedy in problems:
            if not good:
                raise FieldError(f"market.{name}", value, remedy)


@dataclass(slots=True)
class _Cluster:
    zones: tuple[str, ...]
    type: str
    events: list[Event] = field(default_factory=list)
    present: dict[str, str] = field(default_factory=dict)
    """Node: zone."""
    born: dict[str, float] = field(default_factory=dict)
    made: int = 0

    def add(self, at: float) -> None:
        self.made += 1
        node, zone = f"node{self.made}", self.zones[(self.made - 1) % len(self.zones)]
        self.present[node], self.born[node] = zone, at
        self.events.append(Event(at, ADD, node, zone, self.type))

    def remove(self, at: float, node: str, notice_s: float) -> None:
        self.events.append(Event(at, REMOVE, node, self.present.pop(node), self.type, notice_s))


def generate(market: Market, end_s: float, seed: int = 0) -> Trace:
    """A trace of `end_s` seconds. Times are whole seconds. Raises FieldError."""
    _check_duration(end_s)
    draw, cluster = random.Random(seed), _Cluster(market.zones, market.type)
    for _ in range(market.nodes):
        cluster.add(0.0)
    coming = list[float]()
    at = _next_loss(draw, market, 0.0)
    while min([at, *coming]) <= end_s:
        if coming and min(coming) <= at:
            now = min(coming)
            coming.remove(now)
            cluster.add(now)
            continue
        now, size = math.floor(at), _bulk(draw, market)
        for node in _victims(draw, cluster, size, now, market.lifetime_shape):
            cluster.remove(now, node, market.notice_s)
            if market.repair_s:
                coming.append(float(math.ceil(now + draw.expovariate(1 / market.repair_s)) or 1))
        at = _next_loss(draw, market, at)
    origin = f"generated, not recorded: {market}, seed {seed}"
    return check(cluster.events, end_s, origin)


def _check_duration(end_s: float) -> None:
    if not 0 < end_s <= MOST_SECONDS:
        raise FieldError("duration", end_s, "seconds above 0, at most a hundred years")


def _next_loss(draw: random.Random, market: Market, after: float) -> float:
    """By thinning where the rate swings over the day."""
    scale = market.mtbf_s / math.gamma(1 + 1 / market.shape)
    at = after
    while True:
        at += max(1.0, draw.weibullvariate(scale / (1 + market.diurnal), market.shape))
        hour = 1 - market.diurnal * math.cos(2 * math.pi * at / DAY_S)
        if draw.random() * (1 + market.diurnal) <= hour:
            return at


def _bulk(draw: random.Random, market: Market) -> int:
    sizes, weights = zip(*market.bulk, strict=True)
    return int(draw.choices(sizes, weights)[0])


def _victims(draw: random.Random, cluster: _Cluster, size: int, now: float, shape: float) -> list[str]:
    """The first by its age, with the hazard of a Weibull distribution, age ^ (shape - 1); others of its zone first."""
    if not cluster.present:
        return []
    nodes = list(cluster.present)
    if shape == 1:
        first = draw.choice(nodes)
    else:
        hazards = [(now - cluster.born[node] + 1) ** (shape - 1) for node in nodes]
        first = draw.choices(nodes, hazards)[0]
    zone = cluster.present[first]
    others = [node for node in cluster.present if node != first]
    draw.shuffle(others)
    others.sort(key=lambda node: cluster.present[node] != zone)
    return [first, *others[: size - 1]]


def fitted(trace: Trace, *, zones: tuple[str, ...] = ()) -> Market:
    """A market like that of a recorded trace, in its own zones unless others are given. Raises FieldError where nothing
    was lost."""
    found = statistics(trace)
    if not found.loss_events:
        raise FieldError("trace", trace.origin, "it has no losses to fit")
    bulks = Counter(Counter(e.seconds for e in trace.events if e.kind == REMOVE).values())
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
    """1 where it is within two standard errors of that, which chance gives, too; these are 0.78 shape / sqrt(n)."""
    shape = found.lifetime_shape
    chance = 2 * 0.78 * shape / math.sqrt(found.losses)
    return shape if shape and abs(shape - 1) > chance else 1.0


def _moments(trace: Trace) -> list[float]:
    return sorted({event.seconds for event in trace.events if event.kind == REMOVE})


def _diurnal(trace: Trace) -> float:
    """By least squares: moments of loss per second in each hour of the day, against 1 - diurnal x cosine. 0 for less
    than a day, and for a swing below twice its standard error, which chance gives, too."""
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
    """Between losses, on a clock that runs faster by day."""
    turn = 2 * math.pi / DAY_S
    times = [at - diurnal / turn * math.sin(turn * at) for at in _moments(trace)]
    return [b - a for a, b in itertools.pairwise(times)]


def _weibull_shape(gaps: list[float]) -> float:
    """By moments: the coefficient of variation of a Weibull distribution falls with its shape."""
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
    nodes: int, end_s: float, *, least: int, seed: int = 0, notice_s: float = 30.0, noise: float = 0.05
) -> Trace:
    """A cluster that inference takes nodes back from as its load rises by day: looked at every five minutes, training
    has between `least` nodes (at noon) and all `nodes` (at midnight)."""
    _check_duration(end_s)
    if not 1 <= nodes <= MOST_NODES:
        raise FieldError("nodes", nodes, f"from 1 to {MOST_NODES} nodes")
    if not 0 <= least <= nodes:
        raise FieldError("least", least, f"from 0 to the {nodes} nodes")
    draw, cluster = random.Random(seed), _Cluster(("a",), "")
    for _ in range(nodes):
        cluster.add(0.0)
    at = 300.0
    while at <= end_s:
        load = (1 - math.cos(2 * math.pi * at / DAY_S)) / 2 + draw.gauss(0, noise)
        wanted = round(nodes - (nodes - least) * min(max(load, 0.0), 1.0))
        while len(cluster.present) > wanted:
            cluster.remove(at, draw.choice(list(cluster.present)), notice_s)
        while len(cluster.present) < wanted:
            cluster.add(at)
        at += 300.0
    origin = (
        f"generated, not recorded: inference takes up to {nodes - least} of {nodes} nodes by day, seed {seed}"
    )
    return check(cluster.events, end_s, origin)
