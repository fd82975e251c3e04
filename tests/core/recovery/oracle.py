"""An independent judge of recoveries: which versions do the copies in living vaults allow?

It shares no code with `elastic.core.recovery`. It tries everything, which only tests can afford,
and follows the rules of docs/design/design.md and of decision 038. Copies are of whole states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product

from elastic.domain.types import GRADIENT, STATE, UPDATE, WHOLE, Copy, JobSpec

Place = tuple[int, int]
"""(layer, TP rank)"""


def reachable_versions(
    copies: Iterable[Copy],
    spec: JobSpec,
    recorded: Collection[int],
    *,
    checkpoint: int | None = None,
    initial: bool = False,
) -> set[int]:
    """Return all versions that every layer can have on every TP rank.

    `recorded`: steps of which the record of the commit is known. `checkpoint`: version of the
    durable checkpoint. `initial`: whether layers may be initialised.
    """
    held: dict[Place, list[Copy]] = {
        place: [] for place in product(range(spec.n_layers), range(spec.tp))
    }
    for copy in copies:
        assert copy.portion == WHOLE, "the judge knows whole states only"
        held[copy.layer, copy.shard].append(copy)
    by_copies = {place: states_of(mine) for place, mine in held.items()}
    possible = []
    for (layer, shard), versions in by_copies.items():
        sharing = _sharing(layer, spec)
        repeated = {
            v + 1
            for v in versions
            if v in recorded
            and all(_complete(held[one, shard], v, spec.n_microbatches) for one in sharing)
        }
        possible.append(versions | repeated)
    common = set.intersection(*possible)
    if checkpoint is not None:
        common.add(checkpoint)
    if initial:
        common.add(0)
    return common


def states_of(copies: Collection[Copy]) -> set[int]:
    """Return the versions of the state copies, and those to which updates of the same owner and
    epoch lead."""
    found = set()
    for state in (copy for copy in copies if copy.kind == STATE):
        version = state.step
        found.add(version)
        while any(
            (one.kind, one.step, one.owner, one.epoch)
            == (UPDATE, version, state.owner, state.epoch)
            for one in copies
        ):
            version += 1
            found.add(version)
    return found


def _complete(copies: Collection[Copy], step: int, n_microbatches: int) -> bool:
    """Return whether some gradient copies of `step` have each micro-batch exactly once."""
    ledgers = {c.microbatches for c in copies if (c.kind, c.step) == (GRADIENT, step)}

    def fill(left: frozenset[int]) -> bool:
        return not left or any(fill(left - one) for one in ledgers if min(left) in one <= left)

    return fill(frozenset(range(n_microbatches)))


def _sharing(layer: int, spec: JobSpec) -> set[int]:
    """Return the layer and all layers that share a tensor with it, directly or through others."""
    found = {layer}
    while True:
        more = {other for pair in spec.tied if found & set(pair) for other in pair}
        if more <= found:
            return found
        found |= more


def of_present_history(copy: Copy, began: Mapping[int, int]) -> bool:
    """Return whether no later epoch began before the version that `copy` shows.

    `began`: first step of each epoch. An update shows the version after it. A gradient shows that
    its owner had the version of its step.
    """
    version = copy.step + 1 if copy.kind == UPDATE else copy.step
    return all(version <= step for epoch, step in began.items() if epoch > copy.epoch)
