"""Why memory alone does not bring every layer to one version, in words."""

from __future__ import annotations

from elastic.core.recovery.replay_chains import gap
from elastic.core.recovery.set_packing import best_packing
from elastic.core.recovery.solver import Solver, union_of
from elastic.domain.ledger import format_indices, format_microbatches, from_mask
from elastic.domain.types import Slot


def describe_lost_steps(version: int, newest: int) -> str:
    if newest <= version:
        return "no step is lost"
    text = f"step {version} is" if newest == version + 1 else f"steps {version} to {newest - 1} are"
    return f"{text} computed again"


def explain_unreachable(solver: Solver, newest: int) -> str:
    """Say which layers can reach no version near `newest` that the others can, and what they lack."""
    reach = {slot: _reaches(solver, slot) for slot in solver.slots}
    goal = max((max(versions) for versions in reach.values() if versions), default=max(newest, 0))
    best = max(
        range(max(goal - 1, 0), goal + 1),
        key=lambda v: (sum(v in versions for versions in reach.values()), v),
    )
    reasons: dict[str, list[int]] = {}
    for slot, versions in reach.items():
        if best not in versions:
            reasons.setdefault(_why(solver, slot, best), []).append(slot[0])
    if not reasons:
        return "vaults hold no state at all"
    return "; ".join(
        f"layers {format_indices(sorted(set(layers)))}: {why}" for why, layers in reasons.items()
    )


def _reaches(solver: Solver, slot: Slot) -> frozenset[int]:
    return frozenset(
        v for v in solver.candidates() if solver.base("", slot, v) is not None or solver.replayable(slot, v)
    )


def _portions(solver: Solver, slot: Slot, version: int) -> str:
    """Which portions of a divided state are gone, where others are left."""
    for number in solver.shelf.divisions.get(slot, ()):
        gone = [i for i in range(number) if solver.line("", (*slot, i, number), version) is None]
        if len(gone) < number:
            return f"; portions {format_indices(gone)} of {number} of version {version} are gone"
    return ""


def _why(solver: Solver, slot: Slot, version: int) -> str:
    """Why no vault can bring `slot` to `version`."""
    before = version - 1
    if solver.base("", slot, before) is None:
        broken = gap(solver.shelf, slot, version)
        if broken:
            return broken
        others = ", ".join(map(str, solver.shelf.versions(slot)))
        wanted = f"{before} or {version}" if before >= 0 else f"{version}"
        text = f"no copy of state {wanted} is left" + (f" (only {others})" if others else "")
        return text + _portions(solver, slot, version)
    if before not in solver.records:
        return f"no copy of state {version} is left, nor the record of step {before}"
    for layer in (slot[0], *sorted(solver.tied.get(slot[0], ()))):
        by_mask = solver.shelf.gradients.get(((layer, slot[1]), before), {})
        held = union_of(best_packing(dict.fromkeys(by_mask, 0)))
        if held != solver.full:
            absent = format_microbatches(from_mask(solver.full & ~held))
            which = "" if layer == slot[0] else f" of layer {layer}, which shares a tensor,"
            lack = f"gradients{which} of step {before} lack micro-batches {absent}"
            return f"no copy of state {version} is left, and {lack}"
    return f"version {version} can be reached"
