"""Rendered pods train across network namespaces while some are deleted and others preempted."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from elastic.domain.errors import EXIT_DRAINED, EXIT_OK
from tests.kubernetes.cluster import wait_for
from tests.kubernetes.jobs import STEADY, JobRun, allowed, reference
from tests.scenarios.harness import proved

PATIENT = "--env=PET_LEASE=30"
"""A long lease, so that no pod is lost because this machine is busy."""
pytestmark = pytest.mark.usefixtures("namespaces")


def same(summary: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether parameters and losses are bit-identical and every micro-batch ran once."""
    fields = ("params_sha256", "loss", "ledger")
    return summary["ledger"] == proved(summary) and all(summary[f] == expected[f] for f in fields)


@pytest.mark.chaos  # the next test does the same in fewer pods
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


@pytest.mark.parametrize("losses", [2, pytest.param(11, marks=pytest.mark.chaos)])
def test_a_later_loss_is_replaced_as_fast_as_the_first(losses: int, tmp_path: Path) -> None:
    """With the delays of a Job, the seventh pod would be replaced after ten minutes.

    Before, a pod is deleted, and drains. At the end of the training, the machines are given back.
    """
    with JobRun(tmp_path, "job", 3, PATIENT, "--env=PET_PIPELINES=1", pace=STEADY) as job:
        cluster = job.cluster
        cluster.controllers.control("agent")
        job.wait_for_step(2)
        check_isolation(job)
        for number in range(losses):
            lost, before, began = cluster.of("agent")[0], len(job.plans()), time.monotonic()
            if number == 0:
                assert cluster.delete(lost) < lost.grace_s and lost.code == EXIT_DRAINED, lost.log
            else:
                (cluster.preempt if number % 2 else cluster.kill)(lost)
            wait_for(f"replacement {number}", lambda: len(cluster.of("agent")) == 3, cluster)
            job.agents = cluster.of("agent")
            wait_for("its agent", job.agents[-1].ready, cluster)
            print(f"loss {number}: a new agent after {time.monotonic() - began:.1f} s")
            job.wait_for_everybody(before)
            job.wait_for_step(job.step + 1)
        pod, summary = job.give_back()
        assert pod.code == EXIT_OK and "has ended with exit code 0" in pod.log, pod.log
        for component in ("agent", "coordinator"):
            assert job.cluster.workload(component)["spec"]["replicas"] == 0
        assert job.cluster.of("etcd"), "its state is kept until it is deleted"
        statuses = {status for _, _, status in job.cluster.api.served}
        assert statuses <= {200, 404}, "the Role allows what the end Job does"
    assert same(summary, reference(tmp_path)), summary
    planned = [entry for entry in summary["recoveries"] if entry["planned"]]
    assert planned and all(entry["microbatches_lost"] == 0 for entry in planned)
    assert len(summary["recoveries"]) - len(planned) >= losses - 1


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
