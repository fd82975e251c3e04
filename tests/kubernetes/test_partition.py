"""Pods whose network is cut for a while: sockets stay open, but no packet passes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from elastic.planning.plan.plan import parse_plan
from tests.kubernetes.cluster import wait_for
from tests.kubernetes.jobs import JobRun, reference
from tests.kubernetes.pods import Pod
from tests.kubernetes.test_pods import same

LEASE_S = 15
"""Far above the default: pods that start on a busy machine are silent for seconds."""
pytestmark = pytest.mark.usefixtures("namespaces")


def log_of(pod: Pod) -> str:
    """What the pod's agent wrote."""
    return (pod.volume("/elastic/run") / "runs/latest/logs" / f"{pod.name}.log").read_text()


def pipelines(plan: str) -> list[set[str]]:
    """Nodes of each pipeline of a plan."""
    return [{st.unit.node for st in p.stages} for p in parse_plan(plan).pipelines]


def lost(job: JobRun) -> set[str]:
    return {event["node"] for event in job.events if event["kind"] == "lost"}


@pytest.mark.chaos  # make test has a partial partition (tests/scenarios/network)
@pytest.mark.parametrize(("pods", "minority"), [(3, 1), (5, 2)])
def test_a_minority_that_is_a_whole_pipeline(pods: int, minority: int, tmp_path: Path) -> None:
    """The last pods reach only each other; they lack the other pods' gradients."""
    with JobRun(
        tmp_path, "statefulset", pods, f"--env=PET_LEASE={LEASE_S}", "--env=PET_PIPELINES=2"
    ) as job:
        job.wait_for_step(5)
        cut, stay = job.agents[-minority:], job.agents[:-minority]
        alone = {frozenset(names) for names in pipelines(job.plans()[-1])}
        assert frozenset(pod.name for pod in cut) in alone, alone
        job.cluster.cut(*cut)
        names = {pod.name for pod in cut}
        wait_for("the loss", lambda: names <= lost(job), job.cluster)
        wait_for(
            "the rest",
            lambda: [r for r in job.recoveries() if r["nodes_after"] == len(stay)],
            job.cluster,
        )
        job.wait_for_step(job.step + 5)

        assert job.agents[0].run(["elastic", "nodes", "--json"]).returncode == 0
        asked = cut[0].run(["elastic", "nodes", "--json"])
        assert asked.returncode == 2 and b"elastic nodes:" in asked.stderr
        wait_for(
            "detection of the cut",
            lambda: all("the coordinator cannot be reached" in log_of(p) for p in cut),
            job.cluster,
        )
        for pod in cut:
            after = log_of(pod).split("installing -> running")[1]
            assert " -> " not in after, "the minority decided something"

        job.cluster.heal(*cut)
        wait_for(
            "refused messages (some are not logged)",
            lambda: any(e["kind"] == "refused" and e["reason"] == "stale" for e in job.events),
            job.cluster,
        )
        wait_for(
            "the join of the cut nodes",
            lambda: [r for r in job.recoveries() if r["cause"].startswith("join")],
            job.cluster,
        )
        joined = [event["node"] for event in job.events if event["kind"] == "joined"]
        assert all(joined.count(name) == 2 for name in names), "a former member is a new one"
        summary = job.finish()
    assert same(summary, reference(tmp_path)), summary
    assert max(r["nodes_after"] for r in summary["recoveries"] if r["planned"]) > len(stay)


@pytest.mark.chaos
@pytest.mark.parametrize("cut_s", [0.5, 6.0])
def test_a_short_cut_costs_nobody_his_place(cut_s: float, tmp_path: Path) -> None:
    """The cut is shorter than the lease. Afterwards training continues where it stood."""
    with JobRun(
        tmp_path, "statefulset", 3, f"--env=PET_LEASE={LEASE_S}", "--env=PET_PIPELINES=1"
    ) as job:
        job.wait_for_step(5)
        job.cluster.cut(job.agents[2])
        end = time.monotonic() + cut_s
        wait_for("the time", lambda: time.monotonic() >= end, job.cluster)
        job.cluster.heal(job.agents[2])
        job.wait_for_step(job.step + 5)
        assert not lost(job)
        summary = job.finish()
    assert same(summary, reference(tmp_path)), summary
