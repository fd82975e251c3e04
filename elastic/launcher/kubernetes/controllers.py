"""Controllers of a job's pods: StatefulSets as in deploy/, or Jobs or a JobSet made from them.

    statefulset   pods are always replaced, also after the job's end; works in every cluster
    job           two indexed Jobs, of coordinators and of agents (Kubernetes 1.31 or newer);
                  lost pods are replaced until a pod ends with exit code 0: training is done
    jobset        one JobSet of the two, which ends with its coordinators; needs JobSet's controller

All three run the same pods, because the template of each StatefulSet is copied.
"""

from __future__ import annotations

import copy
from typing import Any

from elastic.domain.errors import EXIT_JOB_FAILED, EXIT_UNRECOVERABLE
from elastic.launcher.kubernetes.kustomize import Object

KINDS = ("job", "statefulset", "jobset")
COMPONENT = "app.kubernetes.io/component"
PARTS = ("coordinator", "agent")
"""Components that end with the job. etcd stays a StatefulSet."""
FINAL = [EXIT_UNRECOVERABLE, EXIT_JOB_FAILED]
"""Exit codes after which a new pod would fail as well. Other pods are replaced: crashes end with 1,
a coordinator that did not find etcd with 2."""
BACKOFF_LIMIT = 10_000
"""Failed pods per Job. Failures are expected, so Kubernetes' default of 6 is too small."""


def convert(objects: list[Object], kind: str, name: str) -> list[Object]:
    """Return the objects, with the StatefulSets of PARTS replaced by controllers of `kind`."""
    if kind == "statefulset":
        return objects
    sets = {part: item for item in objects for part in PARTS if _runs(item, part)}
    rest = [item for item in objects if not any(item is taken for taken in sets.values())]
    if kind == "job":
        return rest + [_job(sets[part], part) for part in PARTS]
    return [*rest, _jobset(sets, name)]


def coordinators(objects: list[Object], kind: str, name: str) -> list[str]:
    """Return the host names of the coordinators' pods under controllers of `kind`."""
    (item,) = (item for item in objects if _runs(item, "coordinator"))
    first, service = item["metadata"]["name"], item["spec"]["serviceName"]
    if kind == "jobset":
        first, service = f"{name}-coordinator-0", name
    return [f"{first}-{index}.{service}" for index in range(item["spec"]["replicas"])]


def pod_template(item: Object) -> Object | None:
    """Return the pod template of a StatefulSet, Job or CronJob; None for other objects."""
    if item["kind"] == "CronJob":
        return item["spec"]["jobTemplate"]["spec"]["template"]  # type: ignore[no-any-return]
    return item["spec"]["template"] if item["kind"] in ("StatefulSet", "Job") else None


def _runs(item: Object, part: str) -> bool:
    return bool(item["kind"] == "StatefulSet" and item["metadata"]["labels"].get(COMPONENT) == part)


def _job(item: Object, part: str) -> Object:
    metadata = copy.deepcopy(item["metadata"])
    spec = _job_spec(item, part)
    spec["template"]["spec"]["subdomain"] = item["spec"]["serviceName"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _job_spec(item: Object, part: str) -> dict[str, Any]:
    template = copy.deepcopy(item["spec"]["template"])
    template["spec"]["restartPolicy"] = "Never"
    codes = {"containerName": part, "operator": "In", "values": FINAL}
    return {
        "completionMode": "Indexed",
        "completions": item["spec"]["replicas"],
        "parallelism": item["spec"]["replicas"],
        "backoffLimit": BACKOFF_LIMIT,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {"action": "FailJob", "onExitCodes": codes},
            ]
        },
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "template": template,
    }


def _jobset(sets: dict[str, Object], name: str) -> Object:
    jobs = [
        {"name": part, "replicas": 1, "template": {"spec": _job_spec(sets[part], part)}}
        for part in PARTS
    ]
    metadata = {**copy.deepcopy(sets["agent"]["metadata"]), "name": name}
    del metadata["labels"][COMPONENT]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "Any", "targetReplicatedJobs": ["coordinator"]},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": jobs,
        },
    }
