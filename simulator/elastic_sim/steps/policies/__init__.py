"""Policies: ours, models of rivals by what they published, and what could be reached at most."""

from __future__ import annotations

from collections.abc import Callable

from elastic.domain.errors import FieldError
from elastic_sim.steps.policies.base import About, Base
from elastic_sim.steps.policies.oracles import Ceiling, Feasible
from elastic_sim.steps.policies.ours import SCHEMES, Ours
from elastic_sim.steps.policies.parcae import Parcae, ParcaeFitted
from elastic_sim.steps.policies.replicas import Bamboo, Oobleck, ReCycle, TorchFT
from elastic_sim.steps.policies.restarting import Gemini, Restarting, Spares, Varuna, VarunaKept
from elastic_sim.steps.world import World

RIVALS: tuple[type[Base], ...] = (
    Restarting, Varuna, VarunaKept, Bamboo, Oobleck, Parcae, ParcaeFitted, ReCycle, TorchFT, Gemini, Spares,
)  # fmt: skip
ORACLES: tuple[type[Base], ...] = (Feasible, Ceiling)
Maker = Callable[[World, int], Base]


def _ours(pair: str) -> Maker:
    return lambda world, seed: Ours(world, seed, pair)


def makers() -> dict[str, Maker]:
    """All policies by name."""
    found: dict[str, Maker] = {"ours" if pair == "auto" else f"ours:{pair}": _ours(pair) for pair in SCHEMES}
    for kind in (*RIVALS, *ORACLES):
        found[kind.about.name] = kind
    return found


def abouts() -> list[About]:
    """What each policy is, and where its rules and constants come from."""
    ours = [Ours.told_of(pair) for pair in SCHEMES]
    return [*ours, *(kind.about for kind in (*RIVALS, *ORACLES))]


def maker_of(name: str) -> Maker:
    """A policy by name; ours:PAIR for any pair of backup schemes. Raises FieldError."""
    known = makers()
    if name in known:
        return known[name]
    if name.startswith("ours:"):
        return _ours(Ours.checked(name.partition(":")[2]))
    raise FieldError("--policy", name, f"one of {', '.join(known)}; or ours:GRADIENTS+STATE")
