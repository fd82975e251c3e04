"""Assumptions of a simulation for its report: constants and their sources, job, nodes, policies."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass, fields
from pathlib import Path

from elastic.domain.version import VERSION
from elastic.planning.cost.catalogue import find_hardware, find_model
from elastic_sim.report.durations import duration
from elastic_sim.steps.physics import ClusterPhysics
from elastic_sim.steps.policies import policy_class
from elastic_sim.steps.policies.base import PolicyDescription
from elastic_sim.steps.scenario import Scenario
from elastic_sim.steps.world import SimulatedWorld

PROGRAM = f"elastic-sim {VERSION}"


@dataclass(frozen=True, slots=True)
class Assumption:
    """A row of a table: name, value and source."""

    name: str
    value: str
    source: str
    changed: bool = False
    """Whether it differs from its default."""


def _field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings under the fields of a dataclass, by field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[node.target.id] = " ".join(str(after.value.value).split())
    return found


def constants(physics: ClusterPhysics) -> list[Assumption]:
    """Return every constant of the simulated cluster, with its source."""
    docs, usual = _field_docs(ClusterPhysics), ClusterPhysics()
    found = []
    for name in (field.name for field in fields(ClusterPhysics)):
        value, changed = getattr(physics, name), getattr(physics, name) != getattr(usual, name)
        found.append(Assumption(name, f"{value:g}", docs.get(name, ""), changed))
    rule = " ".join(str(inspect.getdoc(ClusterPhysics.restart_s)).split())
    return [*found, Assumption("restart_s", f"{physics.restart_s(32):g} at 32", rule)]


def title(scenario: Scenario, world: SimulatedWorld) -> str:
    """Return a title of the simulation."""
    model = "a measured profile" if "model" in scenario.files() else world.training.model
    kinds = ", ".join(kind.name for kind in world.types)
    if scenario.market is None:
        return f"{model} on {kinds} nodes, trace {scenario.name()}"
    m = scenario.market
    return f"{model} on {m.nodes} {kinds} nodes, a loss every {duration(m.mtbf_s)}"


def setting(scenario: Scenario, world: SimulatedWorld) -> list[Assumption]:
    """Return the assumptions about the job, its nodes and the source of losses."""
    return [*_job(scenario, world), *_nodes(scenario, world), *_market(scenario)]


def _job(scenario: Scenario, world: SimulatedWorld) -> list[Assumption]:
    job, profile = world.training, world.profile
    measured = "model" in scenario.files()
    size = sum(layer.param_bytes for layer in profile.layers) / 2**30
    text = (
        f"{len(profile.layers)} layers, {size:.3g} GiB of parameters "
        f"and {world.state_bytes / 2**30:.3g} GiB with optimizer state"
    )
    source = "a measured profile" if measured else find_model(job.model).source
    step = f"{world.samples} samples in {job.microbatches} micro-batches of {job.microbatch}"
    name = Path(scenario.model).name if measured else job.model
    return [
        Assumption("model", f"{name}: {text}", source),
        Assumption("step", step, Path(job.source).name if measured else job.source),
    ]


def _nodes(scenario: Scenario, world: SimulatedWorld) -> list[Assumption]:
    found = []
    for kind in world.types:
        value = (
            f"{kind.devices} x {kind.device}, "
            f"{kind.link_bytes_per_s * 8 / 1e9:g} Gbit/s between nodes, "
            f"${kind.spot:g} an hour (${kind.on_demand:g} on demand)"
        )
        measured = "model" in scenario.files()
        source = Path(kind.source).name if measured else kind.source
        found.append(Assumption(f"node {kind.name}", value, source))
        if not measured:
            device = find_hardware(kind.device)
            share = f"{device.achieved:.0%} of its peak of {device.peak / 1e12:g} Tflop/s"
            value = f"{share}; {device.memory:g} GiB"
            found.append(Assumption(f"device {kind.device}", value, device.source))
    return found


def _market(scenario: Scenario) -> list[Assumption]:
    found = []
    if scenario.market is None:
        part = f", from {duration(scenario.first_s)} on" if scenario.first_s else ""
        part += f", until {duration(scenario.last_s)}" if scenario.last_s else ""
        found.append(Assumption("trace", scenario.name() + part, "recorded; as its file says"))
    else:
        m = scenario.market
        sizes = [f"{n} (weight {weight:g})" for n, weight in m.bulk]
        one = "1 node" if m.bulk[0][0] == 1 else f"{m.bulk[0][0]} nodes"
        bulk = one if len(sizes) == 1 else " or ".join(sizes) + " nodes"
        repair = f"after {duration(m.repair_s)} on average" if m.repair_s else "never"
        value = (
            f"{m.nodes} nodes wanted; every {duration(m.mtbf_s)} on average a loss of {bulk}; "
            f"replaced {repair}; {duration(scenario.duration_s)}"
        )
        found.append(Assumption("failures", value, "made up, not recorded"))
    if scenario.notice_s >= 0:
        source = "before every loss, as asked for"
        found.append(Assumption("notice", duration(scenario.notice_s), source))
    return found


def about(policy: str) -> PolicyDescription:
    """Return the description of a policy. Raises FieldError."""
    return policy_class(policy).about
