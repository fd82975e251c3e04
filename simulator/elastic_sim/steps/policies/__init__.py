"""Policies: the behaviour of one training system each, as answers to the engine's events.

- ours.py is our own coordinator on virtual time; lost_work.py models the work that it repeats.
- Rival systems, each modelled from its publication: varuna.py, bamboo.py, oobleck.py, parcae.py,
  recycle.py, torchft.py, ft_hsdp.py, recover.py, gemini.py and checkpoint_restart.py (torchrun with
  Megatron; spare nodes). The planners of Varuna and Oobleck are in
  `elastic_sim.steps.rival_planners`, ReCycle's schedule in `elastic_sim.steps.rerouted_schedule`.
- oracles.py has upper bounds. Goodput is measured against `OraclePolicy`.

Start with base.py. Policies decide; they must not compute durations, which `SimulatedWorld` and
`ClusterPhysics` give. A new policy is a subclass of `PolicyBase` that is listed in `RIVALS` below.
"""

from __future__ import annotations

from elastic.domain.errors import FieldError
from elastic.planning.plan.schemes import schemes_of
from elastic_sim.steps.policies.bamboo import BambooPolicy
from elastic_sim.steps.policies.base import PolicyBase
from elastic_sim.steps.policies.checkpoint_restart import CheckpointRestartPolicy, SparesPolicy
from elastic_sim.steps.policies.ft_hsdp import FTHSDPPolicy
from elastic_sim.steps.policies.gemini import GeminiPolicy
from elastic_sim.steps.policies.oobleck import OobleckPolicy
from elastic_sim.steps.policies.oracles import CeilingPolicy, OraclePolicy
from elastic_sim.steps.policies.ours import SCHEMES, our_policy
from elastic_sim.steps.policies.parcae import ParcaePolicy, ParcaeTrendPolicy
from elastic_sim.steps.policies.recover import ReCoVerPolicy
from elastic_sim.steps.policies.recycle import ReCyclePolicy
from elastic_sim.steps.policies.torchft import TorchFTPolicy
from elastic_sim.steps.policies.varuna import VarunaNoRollbackPolicy, VarunaPolicy

RIVALS: tuple[type[PolicyBase], ...] = (
    CheckpointRestartPolicy, VarunaPolicy, VarunaNoRollbackPolicy, BambooPolicy, OobleckPolicy,
    ParcaePolicy, ParcaeTrendPolicy, ReCyclePolicy, ReCoVerPolicy, TorchFTPolicy, FTHSDPPolicy,
    GeminiPolicy, SparesPolicy,
)  # fmt: skip
ORACLES: tuple[type[PolicyBase], ...] = (OraclePolicy, CeilingPolicy)


def policy_classes() -> dict[str, type[PolicyBase]]:
    """Return all listed policies by name."""
    ours = (our_policy(pair) for pair in SCHEMES)
    return {kind.about.name: kind for kind in (*ours, *RIVALS, *ORACLES)}


def policy_class(name: str) -> type[PolicyBase]:
    """Return a policy by name; ours:PAIR names any pair of backup schemes. Raises FieldError."""
    known = policy_classes()
    if name in known:
        return known[name]
    if name.startswith("ours:"):
        pair = name.partition(":")[2]
        schemes_of(pair, "--policy")
        return our_policy(pair)
    raise FieldError("--policy", name, f"one of {', '.join(known)}; or ours:GRADIENTS+STATE")
