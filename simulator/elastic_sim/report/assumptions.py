"""What a report says of its assumptions: constants with their sources, jobs, clusters, policies."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass, fields
from pathlib import Path

from elastic.domain.version import VERSION
from elastic.planning.cost.catalogue import hardware_of, model_of
from elastic_sim.report.durations import duration
from elastic_sim.steps.physics import Physics
from elastic_sim.steps.policies import abouts, maker_of
from elastic_sim.steps.policies.base import About
from elastic_sim.steps.scenario import Scenario
from elastic_sim.steps.world import World


@dataclass(frozen=True, slots=True)
class Fact:
    """A row of a table: what, how much, and where from."""

    name: str
    value: str
    source: str
    changed: bool = False
    """From its default."""


def field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
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


def constants(physics: Physics) -> list[Fact]:
    """Every constant of the simulated world."""
    docs, usual = field_docs(Physics), Physics()
    found = [
        Fact(
            field.name,
            f"{getattr(physics, field.name):g}",
            docs.get(field.name, ""),
            getattr(physics, field.name) != getattr(usual, field.name),
        )
        for field in fields(Physics)
    ]
    rule = " ".join(str(inspect.getdoc(Physics.restart_s)).split())
    return [*found, Fact("restart_s", f"{physics.restart_s(32):g} at 32", rule)]


def title(scenario: Scenario, world: World) -> str:
    """What is simulated, in a line."""
    model = "a measured profile" if "model" in scenario.files() else world.training.model
    kinds = ", ".join(kind.name for kind in world.types)
    if scenario.market is None:
        return f"{model} on {kinds} nodes, trace {scenario.name()}"
    m = scenario.market
    return f"{model} on {m.nodes} {kinds} nodes, a loss every {duration(m.mtbf_s)}"


def setting(scenario: Scenario, world: World) -> list[Fact]:
    """The job, its nodes, and how these come and go."""
    return [*_job(scenario, world), *_nodes(scenario, world), *market(scenario)]


def _job(scenario: Scenario, world: World) -> list[Fact]:
    job, profile = world.training, world.profile
    measured = "model" in scenario.files()
    size = sum(layer.param_bytes for layer in profile.layers) / 2**30
    text = f"{len(profile.layers)} layers, {size:.3g} GiB of parameters and {world.state_bytes / 2**30:.3g} GiB with "
    step = f"{world.samples} samples in {job.microbatches} micro-batches of {job.microbatch}"
    name = Path(scenario.model).name if measured else job.model
    return [
        Fact("model", f"{name}: {text}optimizer state", _source_of_model(job.model, measured)),
        Fact("step", step, Path(job.source).name if measured else job.source),
    ]


def _source_of_model(model: str, measured: bool) -> str:
    return "a measured profile" if measured else model_of(model).source


def _nodes(scenario: Scenario, world: World) -> list[Fact]:
    found = []
    for kind in world.types:
        value = (
            f"{kind.devices} x {kind.device}, {kind.link_bytes_per_s * 8 / 1e9:g} Gbit/s between nodes, "
            f"${kind.spot:g} an hour (${kind.on_demand:g} on demand)"
        )
        measured = "model" in scenario.files()
        found.append(
            Fact(f"node {kind.name}", value, Path(kind.source).name if measured else kind.source)
        )
        if not measured:
            device = hardware_of(kind.device)
            share = f"{device.achieved:.0%} of its peak of {device.peak / 1e12:g} Tflop/s"
            found.append(
                Fact(f"device {kind.device}", f"{share}; {device.memory:g} GiB", device.source)
            )
    return found


def market(scenario: Scenario) -> list[Fact]:
    """Where losses come from."""
    found = []
    if scenario.market is None:
        part = f", from {duration(scenario.first_s)} on" if scenario.first_s else ""
        part += f", until {duration(scenario.last_s)}" if scenario.last_s else ""
        found.append(Fact("trace", scenario.name() + part, "recorded; as its file says"))
    else:
        m = scenario.market
        sizes = [f"{n} (weight {weight:g})" for n, weight in m.bulk]
        one = "1 node" if m.bulk[0][0] == 1 else f"{m.bulk[0][0]} nodes"
        bulk = one if len(sizes) == 1 else " or ".join(sizes) + " nodes"
        value = (
            f"{m.nodes} nodes wanted; every {duration(m.mtbf_s)} on average a loss of {bulk}; replaced "
            + (f"after {duration(m.repair_s)} on average" if m.repair_s else "never")
        )
        found.append(
            Fact("failures", f"{value}; {duration(scenario.duration_s)}", "made up, not recorded")
        )
    if scenario.notice_s >= 0:
        found.append(Fact("notice", duration(scenario.notice_s), "before every loss, as asked for"))
    return found


def about(policy: str) -> About:
    """What a policy says of itself; of any pair of backup schemes, too."""
    known = next((one for one in abouts() if one.name == policy), None)
    if known is not None:
        return known
    from elastic_sim.steps.policies.ours import Ours

    maker_of(policy)
    return Ours.told_of(policy.partition(":")[2])


def is_model(told: About) -> bool:
    """Of somebody else's system."""
    return not told.ours and told.name not in ("oracle", "ceiling")


PROGRAM = f"elastic-sim {VERSION}"
