"""Policies: the behaviour of one training system each, as answers to the engine's events.

- ours.py is our own coordinator on virtual time; lost_work.py is the work that it repeats per loss.
- Rival systems, each modelled from its publication: varuna.py, bamboo.py, oobleck.py, parcae.py,
  recycle.py, torchft.py, gemini.py and checkpoint_restart.py (torchrun with Megatron; spare nodes).
  The planners of Varuna and Oobleck are in `elastic_sim.steps.rival_planners`.
- oracles.py has the upper bounds that goodput is measured against.

Start with base.py. Policies decide; they must not compute durations, which `SimulatedWorld` and
`ClusterPhysics` give. A new policy is a subclass of `PolicyBase` that is listed in `RIVALS` below.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic.domain.errors import FieldError
from elastic.planning.plan.schemes import schemes_of
from elastic_sim.steps.policies.bamboo import BambooPolicy
from elastic_sim.steps.policies.base import PolicyBase, PolicyDescription
from elastic_sim.steps.policies.checkpoint_restart import CheckpointRestartPolicy, SparesPolicy
from elastic_sim.steps.policies.gemini import GeminiPolicy
from elastic_sim.steps.policies.oobleck import OobleckPolicy
from elastic_sim.steps.policies.oracles import CeilingPolicy, OraclePolicy
from elastic_sim.steps.policies.ours import SCHEMES, OurPolicy
from elastic_sim.steps.policies.parcae import ParcaePolicy, ParcaeTrendPolicy
from elastic_sim.steps.policies.recycle import ReCyclePolicy
from elastic_sim.steps.policies.torchft import TorchFTPolicy
from elastic_sim.steps.policies.varuna import VarunaNoRollbackPolicy, VarunaPolicy
from elastic_sim.steps.world import SimulatedWorld

RIVALS: tuple[type[PolicyBase], ...] = (
    CheckpointRestartPolicy, VarunaPolicy, VarunaNoRollbackPolicy, BambooPolicy, OobleckPolicy,
    ParcaePolicy, ParcaeTrendPolicy, ReCyclePolicy, TorchFTPolicy, GeminiPolicy, SparesPolicy,
)  # fmt: skip
ORACLES: tuple[type[PolicyBase], ...] = (OraclePolicy, CeilingPolicy)
PolicyFactory = Callable[[SimulatedWorld, int], PolicyBase]


def _our_policy(pair: str) -> PolicyFactory:
    return lambda world, seed: OurPolicy(world, seed, pair)


def policy_factories() -> dict[str, PolicyFactory]:
    """All policies by name."""
    ours = {"ours" if pair == "auto" else f"ours:{pair}": _our_policy(pair) for pair in SCHEMES}
    return {**ours, **{kind.about.name: kind for kind in (*RIVALS, *ORACLES)}}


def policy_descriptions() -> list[PolicyDescription]:
    """Behaviour and source of each policy, in the order of `policy_factories`."""
    ours = [OurPolicy.describe(pair) for pair in SCHEMES]
    return [*ours, *(kind.about for kind in (*RIVALS, *ORACLES))]


def policy_factory(name: str) -> PolicyFactory:
    """A policy by name; ours:PAIR for any pair of backup schemes. Raises FieldError."""
    known = policy_factories()
    if name in known:
        return known[name]
    if name.startswith("ours:"):
        pair = name.partition(":")[2]
        schemes_of(pair)
        return _our_policy(pair)
    raise FieldError("--policy", name, f"one of {', '.join(known)}; or ours:GRADIENTS+STATE")
