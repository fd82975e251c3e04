"""Divergence: holders of a layer that must be equal, but are not. This module decides which holders
are wrong, and which copies a recovery does not use.

The evidence comes from the commit of a step (`elastic.worker.engine.commit`). No worker updated, so
the step runs again from the same state, and all gradients of it are computed anew: a wrong replica
has spoiled those of its whole pipeline.

- If most holders agree, the others are wrong.
- Else a worker whose live parameters differ from the copy that it made after its last update is
  wrong. If the rest agrees, the rest is right.
- Else, if only norms differ, nobody's state is wrong: the step runs again, once. A node that was
  lost meanwhile is wrong if the rest agrees.
- Else, if the holders share the layer's state and have right copies of all its portions
  (`Diverged.portions`), all of them load these copies, whoever is wrong.
- Else the job ends. It never continues on a state without proof. A loss proves nothing.

The copies of a wrong layer are not used as sources, and its live state is loaded anew. Only if it
is a portion of a shared state, of which no other holder has a copy, its right copy is used. A node
that the next plans do not use keeps the wrong state in its workers, so the entry stays until an
epoch with the node is protected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.core.protocol.messages import Diverged
from elastic.domain.types import PARAMETERS, STATE, UPDATE, Copy, Divergence

Place = tuple[str, int, int]
"""(node, layer, TP rank)."""
MOST_AT_ONE_STEP = 3
"""Divergences at one step after which the job ends: another attempt does not help."""


@dataclass(frozen=True, slots=True)
class Distrust:
    """Copies and live layers that a recovery must not use after a divergence."""

    epoch: int
    """Epoch of the divergence. Copies of later epochs were made after the repair."""
    step: int
    """Step that runs again. Its gradients are not used."""
    places: tuple[Place, ...] = ()
    """Wrong replicas that may still be in a worker's memory. Their states and updates are not
    used."""
    reload: tuple[Place, ...] = ()
    """Replicas that may be wrong too, but have right copies, which are used."""

    @property
    def suspects(self) -> tuple[Place, ...]:
        """Replicas whose live state must not be used."""
        return self.places + self.reload

    def repaired(self, nodes: Collection[str]) -> Distrust:
        """Return this entry for recoveries after `nodes` have loaded all their layers anew."""
        places = tuple(place for place in self.places if place[0] not in nodes)
        reload = tuple(place for place in self.reload if place[0] not in nodes)
        return replace(self, places=places, reload=reload)

    def allows(self, copy: Copy) -> bool:
        """Return whether a recovery may use `copy`."""
        if copy.epoch > self.epoch:
            return True
        if copy.kind in (STATE, UPDATE):
            return (copy.owner, copy.layer, copy.shard) not in self.places
        return copy.step != self.step


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision about one divergence."""

    distrust: Distrust
    reasons: tuple[str, ...]
    """One text per divergent layer: what differs, and who is wrong by which evidence."""
    wrong: tuple[Place, ...] = ()
    """Replicas that are proven wrong."""
    fatal: str = ""
    """Reason to end the job; "": the step runs again."""


def allowed(copies: Iterable[Copy], distrusted: Collection[Distrust]) -> tuple[Copy, ...]:
    """Return the copies that no entry of `distrusted` forbids."""
    return tuple(copy for copy in copies if all(entry.allows(copy) for entry in distrusted))


def judge(
    reports: Sequence[Diverged], living: Collection[str], earlier: Collection[Distrust]
) -> Verdict:
    """Decide about the divergence that workers of one epoch report.

    Args:
        reports: reports of one epoch and step, at least one.
        living: nodes that are members now.
        earlier: former decisions.
    """
    first = reports[0]
    found = tuple(dict.fromkeys(one for report in reports for one in report.found))
    sound = {entry[:3]: entry[3] for report in reports for entry in report.sound}
    portions = {entry[:3]: entry[3:] for report in reports for entry in report.portions}
    places: list[Place] = []
    proven: list[Place] = []
    reload: list[Place] = []
    reasons, undecided = [], []
    for one in found:
        wrong, why = _wrong_holders(one, sound, living)
        proven += [(_node(holder), one.layer, one.shard) for holder in wrong]
        suspects = wrong
        if not wrong and one.what == PARAMETERS and _has_all_portions(one, portions):
            suspects = tuple(holder for holder, _ in one.values)
            why += ", and all of them load their right copies"
        reasons.append(f"{one.text}; {why}")
        for holder in suspects:
            kept = (holder, one.layer, one.shard) in portions
            (reload if kept else places).append((_node(holder), one.layer, one.shard))
        if not suspects:
            undecided.append(one)
    before = sum(entry.step == first.step for entry in earlier)
    fatal = ""
    if any(one.what == PARAMETERS for one in undecided) or (undecided and before):
        fatal = "no evidence tells which holder is right"
    elif before >= MOST_AT_ONE_STEP:
        fatal = f"the same step diverged {before} times before"
    where = f"step {first.step}: {'; '.join(reasons)}"
    distrust = Distrust(first.epoch, first.step, _distinct(places), _distinct(reload))
    ending = f"{where}; {fatal}" if fatal else ""
    return Verdict(distrust, tuple(reasons), _distinct(proven), ending)


def _has_all_portions(
    one: Divergence, portions: Mapping[tuple[str, int, int], tuple[int, int]]
) -> bool:
    """Return whether the holders of a layer together have right copies of its whole state."""
    held = {portion for place, portion in portions.items() if place[1:] == (one.layer, one.shard)}
    return any(held >= {(i, number) for i in range(number)} for _, number in held)


def _distinct(places: Iterable[Place]) -> tuple[Place, ...]:
    return tuple(dict.fromkeys(places))


def _wrong_holders(
    one: Divergence, sound: Mapping[tuple[str, int, int], bool], living: Collection[str]
) -> tuple[tuple[str, ...], str]:
    """Return the holders whose replica is wrong, and the evidence; () if nothing tells."""
    values = dict(one.values)
    value, most = Counter(values.values()).most_common(1)[0]
    if 2 * most > len(values):
        wrong = tuple(holder for holder in values if values[holder] != value)
        return wrong, f"{' '.join(wrong)} differs from {most} that agree"
    damaged = tuple(h for h in values if sound.get((h, one.layer, one.shard)) is False)
    rest = {holder: value for holder, value in values.items() if holder not in damaged}
    if damaged and len(set(rest.values())) <= 1:
        return damaged, f"{' '.join(damaged)} does not equal its own copy any more"
    present = {holder: value for holder, value in rest.items() if _node(holder) in living}
    recomputed = one.what != PARAMETERS
    if recomputed and len(present) < len(rest) and len(set(present.values())) == 1:
        gone = tuple(holder for holder in values if holder not in present)
        return gone, f"{' '.join(gone)} is lost, and the living holders agree"
    return (), "no holder is proven wrong"


def _node(holder: str) -> str:
    """Return the node of a holder (`Unit.name`)."""
    return holder.partition("/")[0]
