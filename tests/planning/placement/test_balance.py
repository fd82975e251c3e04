"""Senders: exact for items of one size, within the stated bounds for others."""

from __future__ import annotations

from itertools import product
from math import log2
from random import Random

import pytest

from elastic.planning.placement.balance import balance


def heaviest(
    items: list[dict[str, float]], chosen: list[str] | tuple[str, ...], load: dict[str, float]
) -> float:
    total = dict(load)
    for item, sender in zip(items, chosen, strict=True):
        total[sender] = total.get(sender, 0) + item[sender]
    return max(total.values(), default=0.0)


def best(items: list[dict[str, float]], load: dict[str, float]) -> float:
    return min(heaviest(items, chosen, load) for chosen in product(*items))


@pytest.mark.parametrize("seed", range(200))
def test_equal_items_are_spread_as_well_as_possible(seed: int) -> None:
    rng = Random(seed)
    names = "abcd"[: rng.randint(1, 4)]
    items = [
        dict.fromkeys(rng.sample(names, rng.randint(1, len(names))), 5.0)
        for _ in range(rng.randint(0, 7))
    ]
    assert heaviest(items, balance(items), {}) == best(items, {})


@pytest.mark.parametrize("seed", range(200))
def test_other_items_within_the_bound(seed: int) -> None:
    rng = Random(seed)
    names = "abcd"[: rng.randint(1, 4)]
    items = []
    for _ in range(rng.randint(1, 6)):
        size = float(rng.randint(1, 9))
        items.append(dict.fromkeys(rng.sample(names, rng.randint(1, len(names))), size))
    found, least = heaviest(items, balance(items), {}), best(items, {})
    assert least <= found <= (1 + log2(len(names))) * least
    alike = [dict.fromkeys(names, min(item.values())) for item in items]
    assert heaviest(alike, balance(alike), {}) <= 4 / 3 * best(alike, {})


def test_a_chain_of_senders_makes_room() -> None:
    """The third item fits only if the first two are passed on: a to b, b to c."""
    items = [{"a": 1.0, "b": 1.0}, {"b": 1.0, "c": 1.0}, {"a": 1.0}]
    assert sorted(balance(items)) == ["a", "b", "c"]


def test_what_senders_have_to_do_already_counts() -> None:
    assert balance([{"a": 1.0, "b": 1.0}], {"a": 3.0}) == ["b"]
    assert balance([{"a": 1.0, "b": 1.0}]) == ["a"]


def test_a_slow_link_is_avoided() -> None:
    items = [{"near": 1.0, "far": 10.0} for _ in range(4)]
    assert balance(items) == ["near"] * 4


def test_many_items_of_many_senders() -> None:
    rng = Random(1)
    names = [f"n{i}" for i in range(128)]
    items = [dict.fromkeys(rng.sample(names, 8), 1.0) for _ in range(512)]
    assert heaviest(items, balance(items), {}) == 4.0
