"""Chooses gradients that can be summed: ledgers with no micro-batch in common.

Copies of several epochs and owners overlap, so the best choice is a weighted set packing. The
search walks over the micro-batches from low to high. For each set of higher micro-batches that are
taken it keeps only the best partial choice. Ledgers are few and nearly consecutive, so few partial
choices are open. The result is exact up to `WIDTH` open choices; more would need dozens of
overlapping epochs, and then only the best ones are followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WIDTH = 512
"""Partial choices followed at once, at most."""


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
    groups: dict[int, list[int]] = {}
    for mask in sorted(costs):
        if mask:
            groups.setdefault(mask & -mask, []).append(mask)
    lows = sorted(groups)
    frontier = {0: _Choice(0, 0, 0, (), 0)}
    for i, low in enumerate(lows):
        above = -(lows[i + 1]) if i + 1 < len(lows) else 0
        following: dict[int, _Choice] = {}
        for choice in _best_choices(frontier):
            options = [
                _extend(choice, m, costs[m], useful) for m in groups[low] if not choice.union & m
            ]
            for option in (choice, *options):
                if not needed & ~above & ~option.union:
                    _keep(following, option, above)
        frontier = following
    return max(frontier.values(), key=lambda choice: choice.rank, default=None)


def _best_choices(frontier: Mapping[int, _Choice]) -> list[_Choice]:
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
    """Keep `choice` if it is the best that leaves the same later micro-batches free."""
    key = choice.union & above
    known = frontier.get(key)
    if known is None or choice.rank > known.rank:
        frontier[key] = choice
