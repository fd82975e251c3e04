"""Rendered pods train across network namespaces while some are deleted and others preempted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from elastic.domain.errors import EXIT_DRAINED
from tests.kubernetes.jobs import JobRun, allowed, reference
from tests.scenarios.harness import proved

PATIENT = "--env=PET_LEASE=30"
"""A long lease, so that no pod is lost because this machine is busy."""
pytestmark = pytest.mark.usefixtures("namespaces")


def same(summary: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether parameters and losses are bit-identical and every micro-batch ran once."""
    fields = ("params_sha256", "loss", "ledger")
    return summary["ledger"] == proved(summary) and all(summary[f] == expected[f] for f in fields)


def test_one_pod_is_deleted_and_one_preempted(tmp_path: Path) -> None:
    with JobRun(tmp_path, "job", 4, PATIENT, "--env=PET_PIPELINES=1") as job:
        job.wait_for_step(5)
        assert all(pod.ready() for pod in (*job.agents, *job.coordinators))
        check_isolation(job)

        gone = job.agents[1]
        assert job.cluster.delete(gone) < gone.grace_s, gone.log
        assert gone.code == EXIT_DRAINED, "an exit code of 0 would end the Job"
        first = job.wait_for_change(gone.name)
        assert first["planned"] and first["microbatches_lost"] == 0
        assert (first["nodes_before"], first["nodes_after"]) == (4, 3)

        job.wait_for_step(job.step + 3)
        job.cluster.kill(job.agents[2])
        second = job.wait_for_change(job.agents[2].name)
        assert not second["planned"] and second["microbatches_lost"] <= 6

        for index in (1, 2):
            job.agents[index] = job.cluster.replace(job.agents[index])
        assert job.wait_for_change(job.agents[1].name, job.agents[2].name)["planned"], "they join"
        summary = job.finish()
    assert same(summary, reference(tmp_path)), summary
    planned = [entry for entry in summary["recoveries"] if entry["planned"]]
    assert planned and all(entry["microbatches_lost"] == 0 for entry in planned)


def check_isolation(job: JobRun) -> None:
    """Network policies, user, capabilities and the read-only root are in effect."""
    for pod in (*job.agents, *job.coordinators):
        opened = allowed(job.objects, pod)
        closed = {
            port
            for port in job.cluster.listening(pod)
            if not any(port in ports for ports in opened)
        }
        assert not closed, f"{pod.name} listens where the network policies let nobody in"
    tried = job.agents[0].run(
        ["sh", "-c", "id -u; id -G; touch /x /usr/x /etc/x; grep Cap /proc/1/status"]
    )
    user, groups, *capabilities = tried.stdout.decode().splitlines()
    assert (user, groups) == ("10001", "10001")
    assert {line.split()[1] for line in capabilities} == {"0" * 16}
    assert tried.stderr.decode().count("Read-only file system") == 3


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["job", "statefulset"])
@pytest.mark.parametrize("seed", range(3))
def test_pods_come_and_go(kind: str, seed: int, tmp_path: Path) -> None:
    """Pods are deleted, killed or lost with their machine in random order, and replaced."""
    choose, stage_each = random.Random(seed), "--env=PET_PIPELINES=1"  # no pod is a spare
    with JobRun(tmp_path, kind, 4, stage_each) as job:
        job.wait_for_step(5)
        for index in choose.sample([0, 1, 2, 3] * 2, 6):  # three losses mean quarantine
            before = len(job.plans())
            leave = choose.choice([job.cluster.delete, job.cluster.kill, job.cluster.preempt])
            leave(job.agents[index])
            job.agents[index] = job.cluster.replace(job.agents[index])
            job.wait_for_everybody(before)
            job.wait_for_step(job.step + 3)
        summary = job.finish()
    assert same(summary, reference(tmp_path)), summary
