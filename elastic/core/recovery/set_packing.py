"""Chooses gradients that can be summed: ledgers with no micro-batch in common.

Copies of several epochs and owners overlap, so the best choice is a weighted set packing. The
search walks over the micro-batches from low to high. For each set of higher micro-batches that are
taken it keeps only the best partial choice. Ledgers are few and nearly consecutive, so few partial
choices are open. The result is exact up to `WIDTH` open choices; more would need dozens of
overlapping epochs, and then only the best ones are followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nlargest
from typing import NamedTuple

WIDTH = 512
"""Partial choices followed at once, at most."""


class _Choice(NamedTuple):
    masks: tuple[int, ...]
    union: int
    cost: int


def best_packing(costs: Mapping[int, int], useful: int = -1) -> tuple[int, ...]:
    """Return pairwise disjoint masks, ascending by lowest bit.

    They cover the most bits of `useful` (-1: all bits); among equals the most bits at all, then
    the lowest total cost, then the fewest masks. `costs` maps mask to cost; the empty mask is never
    chosen.
    """
    choice = _walk(costs, useful, 0)
    return choice.masks if choice else ()


def exact_cover(costs: Mapping[int, int], full: int) -> tuple[int, ...] | None:
    """Return the cheapest disjoint masks whose union is `full`, or None without any."""
    choice = _walk({mask: cost for mask, cost in costs.items() if not mask & ~full}, -1, full)
    return choice.masks if choice and choice.union == full else None


def _walk(costs: Mapping[int, int], useful: int, needed: int) -> _Choice | None:
    """Return the best choice; with `needed`, only one that holds all of these bits."""

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
                # Of all options that leave the same later micro-batches free, the best is kept.
                key = option.union & above
                better = key not in following or rank(option) > rank(following[key])
                if better and not needed & ~above & ~option.union:
                    following[key] = option
        frontier = following
    return max(frontier.values(), key=rank, default=None)
