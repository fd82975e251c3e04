"""Choosing gradients that can be summed: sets of micro-batches of which no two share one.

Copies of several epochs and owners overlap, so the best choice is a weighted set packing. Ledgers are few
and nearly consecutive; walking over the micro-batches from low to high and remembering only which higher
ones are taken keeps the search small. It is exact as long as no more than `WIDTH` partial choices are open
at once (dozens of overlapping epochs would be needed for more); beyond that only the best of them are
followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WIDTH = 512
"""Partial choices followed at once."""


@dataclass(frozen=True, slots=True)
class _Choice:
    useful: int
    total: int
    cost: int
    masks: tuple[int, ...]
    union: int

    @property
    def rank(self) -> tuple[int, int, int, int]:
        return self.useful, self.total, -self.cost, -len(self.masks)


def best_packing(costs: Mapping[int, int], useful: int = -1) -> tuple[int, ...]:
    """Return pairwise disjoint masks, ascending by lowest bit.

    They cover the most bits of `useful` (-1: all bits), then the most bits at all, then cost least in sum,
    then are fewest. `costs` maps mask to cost; the empty mask is never chosen.
    """
    choice = _walk(costs, useful, 0)
    return choice.masks if choice else ()


def exact_cover(costs: Mapping[int, int], full: int) -> tuple[int, ...] | None:
    """Return the cheapest disjoint masks that together are exactly `full`, or None if there are none."""
    choice = _walk({mask: cost for mask, cost in costs.items() if not mask & ~full}, -1, full)
    return choice.masks if choice and choice.union == full else None


def _walk(costs: Mapping[int, int], useful: int, needed: int) -> _Choice | None:
    """Return the best choice; with `needed`, only among those that hold all of these bits."""
    groups: dict[int, list[int]] = {}
    for mask in sorted(costs):
        if mask:
            groups.setdefault(mask & -mask, []).append(mask)
    lows = sorted(groups)
    frontier = {0: _Choice(0, 0, 0, (), 0)}
    for i, low in enumerate(lows):
        above = -(lows[i + 1]) if i + 1 < len(lows) else 0
        following: dict[int, _Choice] = {}
        for choice in _widest(frontier):
            options = [_extend(choice, m, costs[m], useful) for m in groups[low] if not choice.union & m]
            for option in (choice, *options):
                if not needed & ~above & ~option.union:
                    _keep(following, option, above)
        frontier = following
    return max(frontier.values(), key=lambda choice: choice.rank, default=None)


def _widest(frontier: Mapping[int, _Choice]) -> list[_Choice]:
    choices = list(frontier.values())
    if len(choices) > WIDTH:
        choices.sort(key=lambda choice: choice.rank, reverse=True)
    return choices[:WIDTH]


def _extend(choice: _Choice, mask: int, cost: int, useful: int) -> _Choice:
    return _Choice(
        choice.useful + (mask & useful).bit_count(),
        choice.total + mask.bit_count(),
        choice.cost + cost,
        (*choice.masks, mask),
        choice.union | mask,
    )


def _keep(frontier: dict[int, _Choice], choice: _Choice, above: int) -> None:
    """Keep `choice` if it is the best of those that leave the same later micro-batches free."""
    key = choice.union & above
    known = frontier.get(key)
    if known is None or choice.rank > known.rank:
        frontier[key] = choice
