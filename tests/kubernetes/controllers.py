"""Plays the controllers that replace pods, and the kubelet that starts ended containers again.

    Deployment, StatefulSet   missing pods are started at once, surplus ones are deleted
    Job                       a pod that failed or was lost is replaced after `JobBackoff`

Containers of pods with restartPolicy Always are started again in their pods after
`container_delay_s`. Such a container finds the volumes of the former one, except those in memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.kubernetes.backoff import JobBackoff, container_delay_s
from tests.kubernetes.pods import Pod

if TYPE_CHECKING:
    from tests.kubernetes.cluster import Cluster

COMPONENT = "app.kubernetes.io/component"


def wanted(owner: dict[str, Any]) -> int:
    """Number of pods that a workload asks for."""
    return int(owner["spec"].get("replicas", owner["spec"].get("completions", 1)))


@dataclass
class Watched:
    """A component whose pods are controlled."""

    owner: dict[str, Any]
    backoff: JobBackoff = field(default_factory=JobBackoff)
    done: bool = False
    """Whether a pod of a Job has succeeded, or the Job has failed for good."""


class Controllers:
    """Controls the components that were given to `control`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._watched: dict[str, Watched] = {}
        self._restart_at: dict[str, float] = {}

    def control(self, *components: str) -> None:
        """From now on `act` replaces pods of these components."""
        for component in components:
            self._watched[component] = Watched(self._cluster.workload(component))

    def lost(self, pod: Pod) -> None:
        """A pod was deleted or lost; called by the cluster."""
        watched = self._watched.get(pod.labels[COMPONENT])
        if watched is not None and not watched.done:
            watched.backoff.failed(time.monotonic())

    def act(self, now: float) -> None:
        """Start, restart and delete pods as the controllers would at `now`."""
        for component, watched in self._watched.items():
            for pod in self._cluster.of(component):
                if not pod.running:
                    self._ended(pod, watched, now)
            self._scale(component, watched, now)

    def _ended(self, pod: Pod, watched: Watched, now: float) -> None:
        if watched.owner["kind"] == "Job":
            self._ended_in_job(pod, watched)
        elif now >= self._restart_at.setdefault(pod.name, now + container_delay_s(len(pod.ended))):
            assert pod.code is not None
            del self._restart_at[pod.name]
            pod.ended.append(pod.code)
            pod.start()

    def _ended_in_job(self, pod: Pod, watched: Watched) -> None:
        """The pod stays if the Job is done, as a real one does."""
        if watched.done:
            return
        final = [
            code
            for rule in watched.owner["spec"]["podFailurePolicy"]["rules"]
            if rule["action"] == "FailJob"
            for code in rule["onExitCodes"]["values"]
        ]
        watched.done = pod.code in (0, *final)
        if pod.code == 0:
            watched.backoff.succeeded()
        elif not watched.done:
            self._cluster.kill(pod)

    def _scale(self, component: str, watched: Watched, now: float) -> None:
        pods, number = self._cluster.of(component), wanted(watched.owner)
        is_job = watched.owner["kind"] == "Job"
        if len(pods) > number:
            self._cluster.delete_all(pods[number:])
        elif (
            len(pods) < number and not watched.done and (not is_job or now >= watched.backoff.until)
        ):
            for index in self._missing(watched.owner, pods, number):
                self._cluster.start_one(watched.owner, index)

    def _missing(self, owner: dict[str, Any], pods: list[Pod], number: int) -> list[int]:
        if owner["kind"] != "StatefulSet":
            return [0] * (number - len(pods))
        present = {int(pod.hostname.rpartition("-")[2]) for pod in pods}
        return sorted(set(range(number)) - present)
