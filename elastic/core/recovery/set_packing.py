"""Chooses gradients that can be summed: ledgers without a common micro-batch.

Ledgers of several epochs and owners overlap, so the best choice is a weighted set packing. A ledger
is a bit mask. The search visits the masks by their lowest bit, in ascending order. Of all partial
choices that take the same higher bits it keeps the best one. Ledgers are few and nearly
consecutive, so few partial choices are kept at a time. The result is exact up to `WIDTH` of them;
beyond (dozens of overlapping epochs), only the best `WIDTH` are continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nlargest
from typing import NamedTuple

WIDTH = 512
"""Maximum number of partial choices that are continued at a time."""


class _Choice(NamedTuple):
    masks: tuple[int, ...]
    union: int
    cost: int


def best_packing(costs: Mapping[int, int], useful: int = -1) -> tuple[int, ...]:
    """Return pairwise disjoint masks, ascending by lowest bit.

    They cover the most bits of `useful` (-1: all bits); among equal choices the most bits in total,
    then the lowest cost in total, then the fewest masks. `costs` maps mask to cost; mask 0 is never
    chosen.
    """
    choice = _walk(costs, useful, 0)
    return choice.masks if choice else ()


def exact_cover(costs: Mapping[int, int], full: int) -> tuple[int, ...] | None:
    """Return the cheapest disjoint masks whose union is `full`; None if no masks give it."""
    choice = _walk({mask: cost for mask, cost in costs.items() if not mask & ~full}, -1, full)
    return choice.masks if choice and choice.union == full else None


def _walk(costs: Mapping[int, int], useful: int, needed: int) -> _Choice | None:
    """Return the best choice that has all bits of `needed`, or None."""

    def rank(choice: _Choice) -> tuple[int, int, int, int]:
        masks, union, cost = choice
        return (union & useful).bit_count(), union.bit_count(), -cost, -len(masks)

    groups: dict[int, list[int]] = {}
    for mask in sorted(costs):
        if mask:
            groups.setdefault(mask & -mask, []).append(mask)
    lows = sorted(groups)
    frontier = {0: _Choice((), 0, 0)}
    for i, low in enumerate(lows):
        above = -(lows[i + 1]) if i + 1 < len(lows) else 0
        following: dict[int, _Choice] = {}
        choices = list(frontier.values())
        for choice in nlargest(WIDTH, choices, key=rank) if len(choices) > WIDTH else choices:
            masks, union, cost = choice
            free = [mask for mask in groups[low] if not union & mask]
            options = [_Choice((*masks, m), union | m, cost + costs[m]) for m in free]
            for option in (choice, *options):
                # Of all options that leave the same higher bits free, keep the best.
                key = option.union & above
                better = key not in following or rank(option) > rank(following[key])
                if better and not needed & ~above & ~option.union:
                    following[key] = option
        frontier = following
    return max(frontier.values(), key=rank, default=None)
