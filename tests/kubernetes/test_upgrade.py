"""A rolling upgrade of etcd, coordinators and agents to the next version while the job trains.
Pods are replaced as soon as a controller would replace them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from elastic.core.protocol.version import PROTOCOL
from tests.kubernetes.cluster import Cluster, wait_for
from tests.kubernetes.jobs import STEADY, JobRun, reference, run_dir
from tests.kubernetes.pods import IMAGE_ENVIRONMENT, Pod
from tests.scenarios.membership import test_neighbouring_versions

pytestmark = [pytest.mark.usefixtures("namespaces"), pytest.mark.chaos]
TOLD = "/tmp"
SITE = test_neighbouring_versions.SITE


def upgrade(cluster: Cluster, component: str) -> None:
    """Change the template of a workload, as a new image does."""
    settings = {"node": "*", "number": PROTOCOL + 1, "folder": TOLD}
    (container,) = cluster.workload(component)["spec"]["template"]["spec"]["containers"]
    container["env"] = [
        *container.get("env", ()),
        {"name": "PYTHONPATH", "value": f"{SITE}:{IMAGE_ENVIRONMENT['PYTHONPATH']}"},
        {"name": "OTHER_VERSION", "value": json.dumps(settings)},
    ]


def told(pod: Pod) -> set[str]:
    """What the processes of a pod of the next version added to their messages."""
    lines = set[str]()
    for path in pod.volume(TOLD).iterdir():
        if path.name.isdecimal():
            lines |= set(path.read_text().splitlines())
    return lines


def rolled(cluster: Cluster, pod: Pod) -> Pod:
    """Delete a pod; return the one in its place, when it is ready."""
    cluster.delete(pod)
    new = cluster.replace(pod)
    wait_for(f"the new {new.name}", new.ready, cluster)
    return new


def test_a_rolling_upgrade_loses_nothing(tmp_path: Path) -> None:
    words = ("--env=PET_LEASE=30", "--env=PET_PIPELINES=1", "--overlay", "spot-pool")
    found: list[dict[str, Any]] = []
    with JobRun(tmp_path, "job", 3, *words, pace=STEADY) as job:
        cluster = job.cluster
        job.wait_for_step(2)
        for pod in reversed(cluster.of("etcd")):
            rolled(cluster, pod)
        job.wait_for_step(job.step + 1)

        upgrade(cluster, "coordinator")
        for pod in reversed(cluster.of("coordinator")):
            job.coordinators.append(rolled(cluster, pod))
            job.wait_for_step(job.step + 1)
        coordinators = cluster.of("coordinator")
        assert len(coordinators) == 3

        upgrade(cluster, "agent")
        before, pods = len(job.plans()), cluster.of("agent")
        for pod in pods:
            rolled(cluster, pod)
            job.agents = cluster.of("agent")
            # A controller asks for no more than this time before it replaces the next pod.
            time.sleep(cluster.workload("agent")["spec"]["minReadySeconds"])
        job.wait_for_everybody(before)
        found = job.recoveries()
        spoken = {pod.name: told(pod) for pod in (*coordinators, *job.agents)}
        job.coordinators = coordinators
        summary = job.finish()
    assert all("added: Heartbeat.field_of_tomorrow" in spoken[agent.name] for agent in job.agents)
    assert any("added: Install.field_of_tomorrow" in spoken[pod.name] for pod in coordinators)
    assert len(found) >= 3 and all(entry["planned"] for entry in found), found
    assert all(entry["microbatches_lost"] == 0 for entry in found)
    expected = reference(tmp_path)
    assert summary["params_sha256"] == expected["params_sha256"]
    assert summary["loss"] == expected["loss"]


def test_a_coordinator_whose_pod_was_just_replaced_hears_the_nodes_at_once(tmp_path: Path) -> None:
    """Agents have resolved the names of those that stand by, which then have new addresses. One of
    them leads, and must hear the nodes before it doubts its own network."""
    with JobRun(tmp_path, "job", 2, "--overlay", "spot-pool", pace=STEADY) as job:
        cluster = job.cluster
        job.wait_for_step(2)
        leader = next(pod for pod in job.coordinators if (run_dir(pod) / "events.jsonl").exists())
        others = [pod for pod in job.coordinators if pod is not leader]
        job.coordinators = [rolled(cluster, pod) for pod in others]
        cluster.delete(leader)
        wait_for("a leader", lambda: job.events, cluster)
        job.wait_for_step(job.step + 3)
        kinds = [event["kind"] for event in job.events]
        job.finish()
    assert "doubt" not in kinds and "lost" not in kinds, kinds
