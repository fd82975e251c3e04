"""Two of four nodes cannot reach each other, and both reach the coordinator.

Each node is a network namespace. A route of the kernel, or a wrong entry in the table of
neighbours, drops the packets of one or both directions.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.kubernetes.network import missing
from tests.scenarios.network.job import NetworkJob
from tests.scenarios.paced import paced_reference

NODES = 4
PAIRS = tuple(itertools.combinations([f"node{i}" for i in range(NODES)], 2))
SILENCE = ("--silence", "4")


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    """Skip the tests if this machine cannot have network namespaces."""
    why = missing()
    if why:
        pytest.skip(why)


def check_end(job: NetworkJob, pair: tuple[str, str], folder: Path) -> None:
    """After the path is well, all nodes are used again, and nothing was lost."""
    job.wait_for("a plan with all nodes", lambda: len(job.planned()) == NODES)
    assert job.path_events(pair)[-1]["evidence"].get("well")
    summary = job.finish()
    assert not job.events("lost"), "nobody is lost"
    assert summary["params_sha256"] == paced_reference(folder).summary["params_sha256"]


def test_training_continues_without_one_of_the_two(tmp_path: Path) -> None:
    pair = ("node1", "node2")
    with NetworkJob(tmp_path, NODES, *SILENCE) as job:
        job.wait_for("training", lambda: job.step >= 2)
        for node, peer in (pair, pair[::-1]):
            job.cut(node, peer)
        event = job.wait_for("an event that names the pair", lambda: job.path_events(pair))[0]
        assert "node1 and node2 cannot reach each other" in event["reason"]
        assert event["evidence"]["directions"][0] in ("node1 -> node2", "node2 -> node1")
        job.wait_for("a plan without one of the two", lambda: len(job.planned()) == NODES - 1)
        assert not set(pair) <= job.planned()
        step = job.step
        job.wait_for("training without one of the two", lambda: job.step >= step + 2)
        health = {node["node"]: node["health"] for node in job.status()["nodes"]}
        assert [name for name, text in sorted(health.items()) if "path" in text] == list(pair)
        assert len(job.events("plan")) == 2, "one change of plan is enough"
        for node, peer in (pair, pair[::-1]):
            job.heal(node, peer)
        check_end(job, pair, tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("silently", [False, True], ids=["blackhole", "silent-drop"])
@pytest.mark.parametrize("ways", ["there", "back", "both"])
@pytest.mark.parametrize("pair", PAIRS)
def test_each_pair_and_direction(
    pair: tuple[str, str], ways: str, silently: bool, tmp_path: Path
) -> None:
    cuts = {"there": [pair], "back": [pair[::-1]], "both": [pair, pair[::-1]]}[ways]
    with NetworkJob(tmp_path, NODES, *SILENCE) as job:
        job.wait_for("training", lambda: job.step >= 2)
        for node, peer in cuts:
            job.cut(node, peer, silently=silently)
        job.wait_for("an event that names the pair", lambda: job.path_events(pair))
        job.wait_for("a plan without one of the two", lambda: len(job.planned()) == NODES - 1)
        step = job.step
        job.wait_for("training without one of the two", lambda: job.step >= step + 2)
        for node, peer in cuts:
            job.heal(node, peer, silently=silently)
        check_end(job, pair, tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("point", ["phase=reduce", "phase=optimizer", "phase=recovery", "step=3"])
@pytest.mark.parametrize("pair", PAIRS)
def test_each_pair_at_points_of_a_step(pair: tuple[str, str], point: str, tmp_path: Path) -> None:
    """The fault `cut` drops the packets of one direction. `phase=recovery` is in an installation
    after a worker was killed."""
    node, peer = pair
    faults = [f"cut node={node} peer={peer} {point} duration=20"]
    if point == "phase=recovery":
        other = next(f"node{i}" for i in range(NODES) if f"node{i}" not in pair)
        faults.append(f"kill-worker node={other} step=3")
    flags = [word for fault in faults for word in ("--fault", fault)]
    shape = ("--pipelines", "2") if point == "phase=reduce" else ()
    with NetworkJob(tmp_path, NODES, *SILENCE, *shape, *flags) as job:
        job.wait_for("an event that names the pair", lambda: job.path_events(pair))
        job.wait_for("a plan without one of the two", lambda: not set(pair) <= job.planned())
        step = job.step
        job.wait_for("training without one of the two", lambda: job.step >= step + 2)
        check_end(job, pair, tmp_path)
