"""Plans on nodes of one kind: one more node is never slower, and times are those of simulations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.domain.types import JobSpec, NodeInfo
from elastic.planning.cost.predict import predict
from elastic.planning.cost.profile import LinkProfile, Profile
from elastic.planning.cost.published_profiles import published_profile
from elastic.planning.search import equal_nodes
from elastic.planning.search.evaluate import simulated_seconds
from elastic.planning.search.problem import Problem
from elastic.planning.search.search import PlanRequest, decide, problem_of

LINK = LinkProfile(1.25e9, 5e-5)
DEVICE = "V100"


def request(model: str, microbatch: int, nodes: int, devices: tuple[str, ...] = ()) -> PlanRequest:
    profile: Profile = published_profile(
        model, [DEVICE, *devices], microbatch=microbatch, link=LINK
    )
    infos = tuple(
        NodeInfo(f"node{i}", "1", "", device=devices[i] if i < len(devices) else DEVICE)
        for i in range(nodes)
    )
    spec = JobSpec(layers=profile.layers, n_microbatches=128, n_steps=1)
    return PlanRequest(spec=spec, nodes=infos, epoch=1, profile=profile, backup="none+none")


def problem(nodes: int, devices: tuple[str, ...] = ()) -> Problem:
    return problem_of(request("gpt3-2.7b", 4, nodes, devices))


def step_s(model: str, microbatch: int, nodes: int) -> float:
    asked = request(model, microbatch, nodes)
    return predict(decide(asked).plan, asked.effective_profile(), asked.nodes).step_s


@pytest.mark.parametrize(
    ("model", "microbatch", "nodes"),
    [("gpt3-2.7b", 4, 21), ("gpt3-2.7b", 4, 51), ("gpt2", 8, 29)],
)
def test_one_more_node_is_never_slower(model: str, microbatch: int, nodes: int) -> None:
    assert step_s(model, microbatch, nodes + 1) <= step_s(model, microbatch, nodes) * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("depth", [5, 12, 18])
def test_the_time_of_a_full_pipeline_is_nearly_a_line(schedule: str, depth: int) -> None:
    model = problem(depth).model
    lines = equal_nodes.simulated_lines(model, schedule, depth, 1, 128)
    assert lines
    for line in lines:
        for microbatches in (2 * depth, 3 * depth + 1, 5 * depth):
            shape = replace(line.shape, microbatches=microbatches)
            simulated = simulated_seconds(model, shape)
            assert line.seconds(microbatches) == pytest.approx(simulated, rel=5e-3)


def test_all_micro_batches_are_done_on_the_nodes_that_are_there() -> None:
    for nodes in (7, 22, 40):
        found = equal_nodes.solutions(problem(nodes))
        assert found
        for solution in found:
            assert sum(shape.microbatches for shape in solution.shapes) == 128
            assert sum(len(shape.kinds) for shape in solution.shapes) <= nodes
            assert all(shape.cuts[0] == 0 and shape.cuts[-1] == 34 for shape in solution.shapes)


def test_several_kinds_of_nodes_are_not_for_this_search() -> None:
    assert equal_nodes.solutions(problem(12, ("A40",))) == ()


def test_nothing_is_found_if_memory_is_short() -> None:
    assert equal_nodes.solutions(problem(2)) == ()
