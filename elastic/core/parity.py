"""What can be rebuilt from parities.

A parity of version v says which states it is the XOR of. One of them that is in no vault any more is the XOR of the
parity and all the others, if each of these lies in some living vault with the checksum that the parity says. What comes
out has to have the checksum that the parity says too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elastic.domain.types import PARITY, STATE, Copy, Part, Plan, Slot

States = Mapping[tuple[Slot, int], Sequence[Copy]]
"""(slot, version): copies in living vaults."""


def rebuildable(
    parities: Iterable[Copy], states: States, plan: Plan
) -> dict[tuple[Slot, int], tuple[Copy, ...]]:
    """Return, for every (slot, version) of `plan` that is not in `states` but can be rebuilt: what comes
    out, as a copy that lies nowhere, then the parity, then the other states. Of several parities the newest."""
    found: dict[tuple[Slot, int], tuple[Copy, ...]] = {}
    for parity in sorted(parities, key=lambda c: (c.epoch, c.sequence, c.node)):
        copies = [(part, _copy_of(part, parity.step, states)) for part in parity.parts]
        gone = [part for part, copy in copies if copy is None]
        if len(gone) != 1 or not (0 <= gone[0].layer < plan.n_layers and 0 <= gone[0].shard < plan.tp):
            continue
        slot = gone[0].slot
        if not states.get((slot, parity.step)):
            state = _outcome(parity, gone[0])
            found[slot, parity.step] = (state, parity, *(copy for _, copy in copies if copy is not None))
    return found


def missing_parts(parities: Iterable[Copy], states: States, slot: Slot, versions: Sequence[int]) -> list[int]:
    """Layers, besides that of `slot`, that parities which `slot` is in would need and no vault has."""
    return sorted(
        {
            part.layer
            for parity in parities
            if parity.step in versions and any(p.slot == slot for p in parity.parts)
            for part in parity.parts
            if part.slot != slot and _copy_of(part, parity.step, states) is None
        }
    )


def _copy_of(part: Part, version: int, states: States) -> Copy | None:
    """A copy of exactly the bytes that went into the parity."""
    copies = states.get((part.slot, version), ())
    wanted = part.nbytes, part.checksum
    return next((copy for copy in copies if copy.node and (copy.nbytes, copy.checksum) == wanted), None)


def _outcome(parity: Copy, part: Part) -> Copy:
    assert parity.kind == PARITY
    return Copy(
        kind=STATE,
        layer=part.layer,
        shard=part.shard,
        step=parity.step,
        epoch=parity.epoch,
        owner=part.owner,
        sequence=parity.sequence,
        nbytes=part.nbytes,
        checksum=part.checksum,
        portion=part.portion,
    )
