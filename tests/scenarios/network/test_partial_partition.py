"""Two of four nodes cannot reach each other, and both reach the coordinator.

Each node is a network namespace. A route of the kernel, or a wrong entry in the table of
neighbours, drops the packets of one or both directions. All jobs have the default silence limit.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.kubernetes.network import missing
from tests.scenarios.network.partial_partitions import (
    CASES,
    PHASES,
    Case,
    check_case,
    check_end,
    continued,
    cut_off,
    heal,
    started,
)

EACH = 2
"""Number of cases of each phase that a run of `make chaos` draws."""


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    """Skip the tests if this machine cannot have network namespaces."""
    why = missing()
    if why:
        pytest.skip(why)


def test_training_continues_without_one_of_the_two(tmp_path: Path) -> None:
    case = Case(("node1", "node2"), "both", silently=False, phase="training")
    pair = case.pair
    with started(tmp_path, case) as job:
        began = cut_off(job, case)
        figures = continued(job, case, began)
        assert figures.longest_s <= figures.limit_s, f"{figures}\n{job.output()}"
        event = job.path_events(pair)[0]
        assert "node1 and node2 cannot reach each other" in event["reason"]
        assert event["evidence"]["directions"][0] in ("node1 -> node2", "node2 -> node1")
        health = {node["node"]: node["health"] for node in job.status()["nodes"]}
        assert [name for name, text in sorted(health.items()) if "path" in text] == list(pair)
        assert len(job.events("plan")) == 2, "one change of plan is enough"
        heal(job, case)
        check_end(job, pair, tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("number", range(EACH))
@pytest.mark.parametrize("phase", PHASES)
def test_each_pair_way_and_phase(phase: str, number: int, tmp_path: Path) -> None:
    """Random cases of all pairs, directions and kinds of a cut, other ones in each run."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    cases = [case for case in CASES if case.phase == phase]
    check_case(random.Random(seed).choice(cases), tmp_path)
