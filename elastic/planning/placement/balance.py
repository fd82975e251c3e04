"""Choice of senders that keeps the largest load of a sender small.

Items go, largest first, to the sender that would finish first (list scheduling, longest processing
time first). The largest load is at most 4/3 of the optimum if every sender has every item (Graham
1969), and at most 1 + log2(senders) times the optimum otherwise (Azar, Naor and Rom 1995). Then
items move from the most loaded sender along chains of senders, while the whole chain stays below
that sender's load. For items of equal size the result is optimal (Harvey, Ladner, Lovasz and Tamir
2006: semi-matchings).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

MAX_EXAMINED = 50_000
"""Maximum number of choices examined while moving items; enough for hundreds of items."""


def balance(
    items: Sequence[Mapping[str, float]], load: Mapping[str, float] | None = None
) -> list[str]:
    """Return the sender of each item.

    An item is {sender: cost}, in order of preference among equal senders. `load` is the initial
    load of senders. All costs and loads are in the same measure (bytes or seconds).
    """
    assignment = _SenderAssignment(items, dict(load or {}))
    for i in sorted(range(len(items)), key=lambda i: (-min(items[i].values()), i)):
        assignment.give(
            i, min(items[i], key=lambda s: (assignment.load.get(s, 0) + items[i][s], items[i][s]))
        )
    while assignment.examined < MAX_EXAMINED and assignment.relieve_heaviest():
        pass
    return [assignment.sender[i] for i in range(len(items))]


class _SenderAssignment:
    """Items assigned to senders so far."""

    def __init__(self, items: Sequence[Mapping[str, float]], load: dict[str, float]) -> None:
        self.items, self.load = items, load
        self.sender: dict[int, str] = {}
        self.of: dict[str, dict[int, None]] = {}
        """Items of each sender, in the order in which they were assigned."""
        self.examined = 0

    def give(self, item: int, sender: str) -> None:
        former = self.sender.get(item)
        if former is not None:
            self.load[former] -= self.items[item][former]
            del self.of[former][item]
        self.sender[item] = sender
        self.load[sender] = self.load.get(sender, 0) + self.items[item][sender]
        self.of.setdefault(sender, {})[item] = None

    def relieve_heaviest(self) -> bool:
        """Take an item from the heaviest sender by the shortest chain; False: there is no chain."""
        if not self.of:
            return False
        heaviest = max(self.load, key=lambda s: self.load[s])
        most = self.load[heaviest]
        # came[s]: the item that sender s would get in the chain found so far.
        came: dict[str, int] = {}
        queue = deque([heaviest])
        while queue:
            giver = queue.popleft()
            added = self.items[came[giver]][giver] if giver in came else 0.0
            for item in self.of.get(giver, ()):
                freed = self.items[item][giver]
                if freed <= 0 or (giver in came and self.load[giver] + added - freed >= most):
                    continue
                for taker, cost in self.items[item].items():
                    self.examined += 1
                    if taker in came or taker == heaviest:
                        continue
                    came[taker] = item
                    if self.load.get(taker, 0) + cost < most:
                        self._pass_on(taker, came)
                        return True
                    queue.append(taker)
        return False

    def _pass_on(self, taker: str, came: Mapping[str, int]) -> None:
        """Move every item of the chain that ends at `taker` to the next sender in the chain."""
        at: str | None = taker
        while at is not None and at in came:
            item = came[at]
            former = self.sender[item]
            self.give(item, at)
            at = former
