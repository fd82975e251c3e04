"""From plan to plan: least bytes, balanced senders."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations
from random import Random

import pytest

from elastic.domain.types import LayerSpec, NodeInfo, Pipeline, Plan, Stage, Unit
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile
from elastic.planning.placement.migration import (
    CHECKPOINT,
    FRESH,
    HELD,
    KEPT,
    LOCAL,
    links_of,
    transition,
)
from elastic.planning.placement.placement import Holdings, Host, Slot, assign

Lines = list[list[tuple[str, int]]]
"""Pipelines of (node, number of layers)."""


def plan_of(
    lines: Lines, *, peers: tuple[tuple[str, str], ...] = (), state: str = "snapshot"
) -> Plan:
    pipelines = []
    for p, line in enumerate(lines):
        first, stages = 0, []
        for node, n in line:
            stages.append(Stage(Unit(node), first, first + n))
            first += n
        pipelines.append(Pipeline(tuple(stages), (p,)))
    n_layers = sum(n for _, n in lines[0])
    return Plan(1, n_layers, len(lines), 1, tuple(pipelines), peers=peers, state=state)


def specs(sizes: list[int]) -> list[LayerSpec]:
    return [LayerSpec(size, 2 * size, size, 1.0, 2.0) for size in sizes]


def random_lines(rng: Random, names: list[str], n_layers: int) -> Lines:
    lines: Lines = []
    left = rng.sample(names, len(names))
    while left and (not lines or rng.random() < 0.7):
        depth = rng.randint(1, min(len(left), n_layers))
        cuts = [0, *sorted(rng.sample(range(1, n_layers), depth - 1)), n_layers]
        lines.append([(left.pop(), b - a) for a, b in pairwise(cuts)])
    return lines


def random_change(seed: int) -> tuple[Plan, Plan, list[LayerSpec], frozenset[str]]:
    """A plan, its nodes' losses, and what comes next, placed by `assign`."""
    rng = Random(seed)
    n_layers = rng.randint(1, 6)
    layers = specs([rng.choice((3, 4, 7)) for _ in range(n_layers)])
    names = [f"n{i}" for i in range(rng.randint(1, 6))]
    lines = random_lines(rng, names, n_layers)
    used = [node for line in lines for node, _ in line]
    peers = tuple(
        (node, rng.choice(others)) for node in used if (others := [n for n in names if n != node])
    )
    old = plan_of(lines, peers=peers, state=rng.choice(("snapshot", "replay:4", "replica")))
    dead = frozenset(rng.sample(names, rng.randint(0, len(names) - 1)))
    living = [name for name in [*names, "new"] if name not in dead]
    shape = random_lines(rng, living, n_layers)
    slots, first = [], 0
    for p, line in enumerate(shape):
        first = 0
        for _, n in line:
            slots.append(Slot(0, range(first, first + n), p))
            first += n
    full = [la.param_bytes + la.state_bytes for la in layers]
    held = Holdings.of(old, layers, gradients=False)
    nodes = iter(assign(slots, [Host(name, 0, "") for name in living], held, full))
    return old, plan_of([[(next(nodes), n) for _, n in line] for line in shape]), layers, dead


@pytest.mark.parametrize("seed", range(300))
def test_everything_comes_once_and_from_where_it_is(seed: int) -> None:
    old, new, layers, dead = random_change(seed)
    found = transition(old, new, layers, dead=dead)
    had = Holdings.of(old, layers)
    wanted = {(s.unit.node, i) for _, _, s in new.stages() for i in s.layers}
    moved = [(move.target, move.layer) for move in found.moves]
    assert len(set(moved)) == len(moved)
    assert set(moved) == {(node, i) for node, i in wanted if i not in had.live.get(node, ())}
    for move in found.moves:
        whole = {n for n in {*had.live, *had.kept} - dead if move.layer in had.live.get(n, ())}
        kept = {n for n, some in had.kept.items() if move.layer in some and n not in dead}
        if old.state == "replica":
            kept = set()
        assert move.nbytes == 3 * layers[move.layer].param_bytes
        if move.kind == LOCAL:
            assert move.source == move.target and move.target in kept
        elif move.kind == CHECKPOINT:
            assert not whole | kept
        else:
            assert move.source in (whole if move.kind == HELD else kept) and move.target not in kept
    assert found.nbytes == sum(move.nbytes for move in found.moves if move.sent)


@pytest.mark.parametrize("seed", range(80))
def test_no_placement_of_the_same_slots_needs_fewer_bytes(seed: int) -> None:
    """Judges `assign`. `transition` only counts the bytes; the test above judges it."""
    old, new, layers, dead = random_change(seed)
    if any(move.kind == CHECKPOINT for move in transition(old, new, layers, dead=dead).moves):
        return  # Nobody alive has some layer: nothing that is sent between nodes.
    lines = [[(s.unit.node, len(s.layers)) for s in p.stages] for p in new.pipelines]
    living = sorted({*old.nodes(), *new.nodes(), "new"} - dead)
    used = sum(map(len, lines))
    best = None
    for chosen in permutations(living, used):
        nodes = iter(chosen)
        other = plan_of([[(next(nodes), n) for _, n in line] for line in lines])
        nbytes = transition(old, other, layers, dead=dead).nbytes
        best = nbytes if best is None else min(best, nbytes)
    assert transition(old, new, layers, dead=dead).nbytes == best


def test_senders_share_the_work_and_seconds_follow_the_busiest() -> None:
    old = plan_of([[("a", 4)], [("b", 4)]])
    new = plan_of([[("a", 4)], [("b", 4)], [("c", 4)], [("d", 4)]])
    found = transition(old, new, specs([1] * 4), links=lambda s, t: LinkProfile(6.0, 0.5))
    assert found.nbytes == 24
    assert sorted(move.source for move in found.moves) == ["a"] * 4 + ["b"] * 4
    assert found.seconds == pytest.approx(12 / 6 + 0.5)
    shared = transition(
        old, replace(new, tp=2), specs([1] * 4), links=lambda s, t: LinkProfile(6.0, 0.5)
    )
    assert shared.nbytes == 24
    assert shared.seconds == pytest.approx(12 / 2 / 6 + 0.5), (
        "each worker its part, over its own link"
    )


def test_a_sender_in_the_same_domain_is_preferred() -> None:
    times = (LayerTimes(1.0, 2.0),) * 4
    profile = Profile(
        model="m",
        layers=tuple(specs([1] * 4)),
        devices=(Device("d", times),),
        link=LinkProfile(100.0),
        across=LinkProfile(1.0),
    )
    infos = [
        NodeInfo(name, "i", "v", domain=domain)
        for name, domain in zip("abc", ("x", "y", "y"), strict=True)
    ]
    old, new = plan_of([[("a", 4)], [("b", 4)]]), plan_of([[("a", 4)], [("b", 4)], [("c", 4)]])
    found = transition(old, new, specs([1] * 4), links=links_of(profile, infos))
    assert {move.source for move in found.moves} == {"b"}
    assert found.seconds == pytest.approx(0.12)


def test_a_vault_stands_in_for_a_lost_node() -> None:
    old = plan_of([[("a", 2), ("b", 2)]], peers=(("a", "b"), ("b", "a")))
    new = plan_of([[("a", 2), ("c", 2)]])
    found = transition(old, new, specs([1] * 4), dead={"b"}, gradients=True)
    assert [(move.source, move.kind, move.nbytes) for move in found.moves] == [("a", KEPT, 4)] * 2
    alone = transition(old, plan_of([[("a", 4)]]), specs([1] * 4), dead={"b"})
    assert [move.kind for move in alone.moves] == [LOCAL] * 2 and alone.nbytes == 0
    gone = transition(old, plan_of([[("c", 4)]]), specs([1] * 4), dead={"a", "b"})
    assert {move.kind for move in gone.moves} == {CHECKPOINT} and gone.seconds == 0


def test_the_first_plan_moves_nothing() -> None:
    found = transition(None, plan_of([[("a", 2), ("b", 2)]]), specs([1] * 4))
    assert (
        {move.kind for move in found.moves} == {FRESH} and found.nbytes == 0 and found.seconds == 0
    )
