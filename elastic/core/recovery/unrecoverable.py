"""Explains in words why the vaults cannot bring every layer to one version."""

from __future__ import annotations

from elastic.core.recovery.set_packing import best_packing
from elastic.core.recovery.solver import Solver, union_of
from elastic.domain.ledger import format_indices, from_mask
from elastic.domain.types import Slot


def describe_lost_steps(version: int, newest: int) -> str:
    """Return a text with the steps that are computed again from `version` to `newest`."""
    if newest <= version:
        return "no step is lost"
    text = f"step {version} is" if newest == version + 1 else f"steps {version} to {newest - 1} are"
    return f"{text} computed again"


def explain_unreachable(solver: Solver, newest: int) -> str:
    """Return a text with the layers that cannot reach the version of the others, and the reasons.
    `newest`: version that was reached before the fault."""
    candidates = solver.candidates()
    reachable = {
        slot: frozenset(v for v in candidates if solver.reaches(slot, v)) for slot in solver.slots
    }
    goal = max((max(found) for found in reachable.values() if found), default=max(newest, 0))
    best = max(
        range(max(goal - 1, 0), goal + 1),
        key=lambda v: (sum(v in found for found in reachable.values()), v),
    )
    reasons: dict[str, list[int]] = {}
    for slot, versions in reachable.items():
        if best not in versions:
            reasons.setdefault(_reason(solver, slot, best), []).append(slot[0])
    if not reasons:
        return "vaults hold no state at all"
    return "; ".join(
        f"layers {format_indices(sorted(set(layers)))}: {why}" for why, layers in reasons.items()
    )


def _lost_portions(solver: Solver, slot: Slot, version: int) -> str:
    """Return a text with the lost portions of a state if other portions are left; "": none."""
    for number in solver.index.divisions.get(slot, ()):
        gone = [i for i in range(number) if solver.chain("", (*slot, i, number), version) is None]
        if len(gone) < number:
            return f"; portions {format_indices(gone)} of {number} of version {version} are gone"
    return ""


def _reason(solver: Solver, slot: Slot, version: int) -> str:
    """Return the reason why no vault can bring `slot` to `version`."""
    before = version - 1
    if solver.without_gradients("", slot, before) is None:
        missing_link = solver.index.missing_link(slot, version)
        if missing_link:
            return missing_link
        others = ", ".join(map(str, solver.index.versions(slot)))
        wanted = f"{before} or {version}" if before >= 0 else f"{version}"
        text = f"no copy of state {wanted} is left" + (f" (only {others})" if others else "")
        return text + _lost_portions(solver, slot, version)
    if before not in solver.records:
        return f"no copy of state {version} is left, nor the record of step {before}"
    for layer in (slot[0], *sorted(solver.tied.get(slot[0], ()))):
        by_mask = solver.index.gradients.get(((layer, slot[1]), before), {})
        held = union_of(best_packing(dict.fromkeys(by_mask, 0)))
        if held != solver.full:
            absent = format_indices(sorted(from_mask(solver.full & ~held)))
            which = "" if layer == slot[0] else f" of layer {layer}, which shares a tensor,"
            lack = f"gradients{which} of step {before} lack micro-batches {absent}"
            return f"no copy of state {version} is left, and {lack}"
    return f"version {version} can be reached"
