"""Nodes to slots: least bytes, as brute force says, and ties settled for failure domains."""

from __future__ import annotations

from itertools import pairwise, permutations, product
from random import Random

import pytest

from elastic.domain.types import LayerSpec, Pipeline, Plan, Stage, Unit
from elastic.planning.placement.assignment import Sort, cheapest
from elastic.planning.placement.placement import Holdings, Host, Slot, assign, recut


def random_holdings(rng: Random, names: list[str], n_layers: int, full: list[int]) -> Holdings:
    live: dict[str, frozenset[int]] = {}
    kept: dict[str, dict[int, int]] = {}
    for name in names:
        if rng.random() < 0.8:
            first = rng.randrange(n_layers)
            live[name] = frozenset(range(first, rng.randint(first + 1, n_layers)))
        if rng.random() < 0.6:
            few = rng.sample(range(n_layers), rng.randint(1, n_layers))
            kept[name] = {i: rng.choice((full[i], full[i] // 2)) for i in few}
    return Holdings(live, kept)


def cost(
    slots: list[Slot], chosen: tuple[str, ...] | list[str], held: Holdings, full: list[int]
) -> list[int]:
    """[bytes over the network, layers to load]"""
    total = [0, 0]
    for slot, name in zip(slots, chosen, strict=True):
        fetched = held.fetched(name, full)
        total[0] += sum(fetched[i] for i in slot.layers)
        total[1] += sum(i not in held.live.get(name, ()) for i in slot.layers)
    return total


def least(slots: list[Slot], nodes: list[Host], held: Holdings, full: list[int]) -> list[int]:
    kinds = {node.name: node.kind for node in nodes}
    return min(
        cost(slots, chosen, held, full)
        for chosen in permutations(kinds, len(slots))
        if all(kinds[name] == slot.kind for name, slot in zip(chosen, slots, strict=True))
    )


@pytest.mark.parametrize("seed", range(600))
def test_bytes_and_loads_are_least(seed: int) -> None:
    rng = Random(seed)
    n_layers = rng.randint(1, 6)
    full = [rng.choice((4, 6, 10)) for _ in range(n_layers)]
    nodes = [
        Host(f"n{i}", rng.randrange(2), rng.choice(("", "a", "b")))
        for i in range(rng.randint(1, 6))
    ]
    held = random_holdings(rng, [node.name for node in nodes], n_layers, full)
    takers = rng.sample(nodes, rng.randint(1, len(nodes)))
    # Slots as a plan has them: few different ones, many equal, so that pairs are settled before the
    # search.
    spans = [
        range(a, rng.randint(a + 1, n_layers)) for a in (rng.randrange(n_layers) for _ in range(3))
    ]
    spans += [range(min(s), max(s) + 1) for s in held.live.values()]
    slots = [Slot(node.kind, rng.choice(spans), p % 2) for p, node in enumerate(takers)]
    chosen = assign(slots, nodes, held, full)
    assert len(set(chosen)) == len(slots)
    kinds = {node.name: node.kind for node in nodes}
    assert all(kinds[name] == slot.kind for name, slot in zip(chosen, slots, strict=True))
    assert cost(slots, chosen, held, full) == least(slots, nodes, held, full)
    assert assign(slots, nodes, held, full) == chosen


def test_a_pair_that_fits_is_broken_where_a_vault_makes_that_cheaper() -> None:
    """Fixing all nodes that hold a slot exactly would be wrong: a's vault has what nobody else
    has."""
    slots = [Slot(0, range(1), 0), Slot(0, range(1, 2), 0)]
    held = Holdings(live={"a": frozenset({0}), "b": frozenset({0})}, kept={"a": {1: 10}})
    assert assign(slots, [Host("a", 0, ""), Host("b", 0, "")], held, [10, 10]) == ["b", "a"]


def test_a_worker_that_holds_the_layers_is_preferred_to_a_vault() -> None:
    held = Holdings(live={"b": frozenset({0})}, kept={"a": {0: 10}})
    assert assign([Slot(0, range(1), 0)], [Host("a", 0, ""), Host("b", 0, "")], held, [10]) == ["b"]


def test_pipelines_stay_inside_domains_and_differ_in_them() -> None:
    nodes = [Host(f"n{i}", 0, "ab"[i % 2]) for i in range(8)]
    slots = [Slot(0, range(s, s + 1), p) for p in range(2) for s in range(4)]
    chosen = assign(slots, nodes, Holdings(), [1] * 4)
    assert chosen == ["n0", "n2", "n4", "n6", "n1", "n3", "n5", "n7"]


def test_domains_never_cost_bytes() -> None:
    nodes = [
        Host(name, 0, domain)
        for name, domain in (("a0", "a"), ("b0", "b"), ("a1", "a"), ("b1", "b"))
    ]
    held = Holdings(live={"a0": frozenset({0}), "b0": frozenset({1})})
    slots = [Slot(0, range(s, s + 1), p) for p in range(2) for s in range(2)]
    chosen = assign(slots, nodes, held, [1, 1])
    assert cost(slots, chosen, held, [1, 1]) == [2, 2]
    assert {frozenset(chosen[:2]), frozenset(chosen[2:])} == {
        frozenset(("a0", "a1")),
        frozenset(("b0", "b1")),
    }


def test_without_domains_a_pipeline_keeps_its_nodes() -> None:
    plan = lines(["n0", "n1"], ["n2", "n3"])
    held = Holdings.of(plan, [LayerSpec(1, 2, 3, 1.0, 2.0)] * 4)
    slots = [Slot(0, span, p) for p in range(2) for span in (range(2), range(2, 4))]
    hosts = [Host(name, 0, "") for name in ("n0", "n2", "n3", "n9")]
    assert assign(slots, hosts, held, [6] * 4) == ["n0", "n9", "n2", "n3"]


def test_holdings_read_off_a_plan() -> None:
    layers = [LayerSpec(1, 2, 3, 1.0, 2.0)] * 4
    plan = lines(["n0", "n1"], peers=(("n0", "n1"), ("n1", "n9")))
    held = Holdings.of(plan, layers)
    assert held.fetched("n1", [6] * 4) == [0, 0, 0, 0]
    assert held.fetched("n9", [6] * 4) == [6, 6, 0, 0]
    assert held.missing("n9", [6] * 4) == [0, 31, 62, 63, 64]
    assert Holdings.of(plan, layers[:3]) == Holdings()
    only = Holdings.of(lines(["n0", "n1"], peers=(("n1", "n9"),), state="replica"), layers)
    assert only.fetched("n9", [6] * 4) == [6, 6, 3, 3]


@pytest.mark.parametrize("seed", range(60))
def test_a_recut_moves_least(seed: int) -> None:
    rng = Random(seed)
    n_layers, depth = rng.randint(3, 8), rng.randint(1, 3)
    cuts = [0, *sorted(rng.sample(range(1, n_layers), depth - 1)), n_layers]
    widest = [max(cuts[s + 1] - cuts[s], rng.randint(1, n_layers)) for s in range(depth)]
    reach = [[min(i + widest[s], n_layers) for i in range(n_layers + 1)] for s in range(depth)]
    moved = []
    for _ in range(depth):
        row = [0]
        for _ in range(n_layers):
            row.append(row[-1] + rng.choice((0, 0, 1, 5)))
        moved.append(row)

    def fetched(ends: tuple[int, ...]) -> int:
        return sum(moved[s][b] - moved[s][a] for s, (a, b) in enumerate(pairwise(ends)))

    def fits(ends: tuple[int, ...]) -> bool:
        return all(a < b <= reach[s][a] for s, (a, b) in enumerate(pairwise(ends)))

    all_cuts = [(0, *inner, n_layers) for inner in product(range(1, n_layers), repeat=depth - 1)]
    best = recut(reach, moved, cuts)
    assert fits(best)
    assert fetched(best) == min(fetched(ends) for ends in all_cuts if fits(ends))


def lines(
    *pipelines: list[str], peers: tuple[tuple[str, str], ...] = (), state: str = "snapshot"
) -> Plan:
    """A plan of pipelines of two stages with two layers each."""
    return Plan(
        epoch=1,
        n_layers=4,
        n_microbatches=len(pipelines),
        tp=1,
        pipelines=tuple(
            Pipeline(tuple(Stage(Unit(n), 2 * s, 2 * s + 2) for s, n in enumerate(names)), (p,))
            for p, names in enumerate(pipelines)
        ),
        peers=peers,
        state=state,
    )


@pytest.mark.parametrize("seed", range(40))
def test_flows_between_sorts_are_as_cheap_as_pairs(seed: int) -> None:
    rng = Random(seed)
    n_layers = rng.randint(2, 8)
    full = [rng.choice((4, 6, 10)) * 10**8 for _ in range(n_layers)]
    held = random_holdings(rng, [f"n{i}" for i in range(6)], n_layers, full)
    kinds: list[Sort] = [
        (held.live.get(f"n{i}", frozenset()), frozenset(held.kept.get(f"n{i}", {}).items()))
        for i in range(6)
    ]
    sorts = [rng.choice(kinds) for _ in range(60)]
    spans = [
        range(a, rng.randint(a + 1, n_layers)) for a in (rng.randrange(n_layers) for _ in range(5))
    ]
    wanted = [rng.choice(spans) for _ in range(rng.randint(1, 60))]

    def total(pairs: list[tuple[int, int]]) -> list[int]:
        assert sorted(s for s, _ in pairs) == list(range(len(wanted)))
        assert len({n for _, n in pairs}) == len(wanted)
        fetched = [
            max(0, full[i] - dict(sorts[n][1]).get(i, 0))
            for s, n in pairs
            for i in wanted[s]
            if i not in sorts[n][0]
        ]
        return [sum(fetched), len(fetched)]

    assert total(cheapest(wanted, sorts, full, dense=100)) == total(cheapest(wanted, sorts, full))
