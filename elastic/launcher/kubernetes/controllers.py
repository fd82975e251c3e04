"""Controllers of a job's pods: those of deploy/, or others made from them.

    job           as in deploy/: a Deployment of agents, a StatefulSet of coordinators, and the end
                  Job, which scales both to 0 when the training is over
    statefulset   two StatefulSets, whose pods are replaced also after the job's end; needs no
                  rights at the Kubernetes API
    jobset        one JobSet, which ends with its coordinators; needs JobSet's controller. Its Jobs
                  replace lost pods with growing delays

All three run the same pods, because each template is copied.
"""

from __future__ import annotations

import copy
from typing import Any

from elastic.domain.errors import EXIT_JOB_FAILED, EXIT_UNRECOVERABLE
from elastic.launcher.kubernetes.kustomize import Object

KINDS = ("job", "statefulset", "jobset")
COMPONENT = "app.kubernetes.io/component"
PARTS = {"coordinator": "StatefulSet", "agent": "Deployment"}
"""Components that end with the job, and their controllers in deploy/. etcd stays a StatefulSet."""
END = "end"
"""Component of the end Job, its account, rights and network policy."""
FINAL = [EXIT_UNRECOVERABLE, EXIT_JOB_FAILED]
"""Exit codes after which a new pod would fail as well. Other pods are replaced: crashes end with 1,
a coordinator that did not find etcd with 2."""
BACKOFF_LIMIT = 10_000
"""Failed pods per Job. Failures are expected, so Kubernetes' default of 6 is too small."""


def convert(objects: list[Object], kind: str, name: str) -> list[Object]:
    """Return the objects, with controllers of `kind` for PARTS."""
    if kind == "job":
        return objects
    rest = [item for item in objects if _component(item) != END]
    found = {part: item for item in rest for part in PARTS if _runs(item, part)}
    if kind == "statefulset":
        return [_statefulset(item) if item is found["agent"] else item for item in rest]
    return [*(item for item in rest if all(item is not one for one in found.values())),
            _jobset(found, name)]  # fmt: skip


def coordinators(objects: list[Object], kind: str, name: str) -> list[str]:
    """Return the host names of the coordinators' pods under controllers of `kind`."""
    (item,) = (item for item in objects if _runs(item, "coordinator"))
    first, service = item["metadata"]["name"], item["spec"]["serviceName"]
    if kind == "jobset":
        first, service = f"{name}-coordinator-0", name
    return [f"{first}-{index}.{service}" for index in range(item["spec"]["replicas"])]


def pod_template(item: Object) -> Object | None:
    """Return the pod template of a controller; None for other objects."""
    if item["kind"] == "CronJob":
        return item["spec"]["jobTemplate"]["spec"]["template"]  # type: ignore[no-any-return]
    return item["spec"]["template"] if item["kind"] in (*PARTS.values(), "Job") else None


def _runs(item: Object, part: str) -> bool:
    return bool(item["kind"] == PARTS[part] and _component(item) == part)


def _component(item: Object) -> str:
    return str(item["metadata"].get("labels", {}).get(COMPONENT, ""))


def _statefulset(item: Object) -> Object:
    """Return the Deployment of the agents as a StatefulSet with the same pods."""
    kept = ("replicas", "minReadySeconds", "selector", "template")
    spec = {key: copy.deepcopy(item["spec"][key]) for key in kept if key in item["spec"]}
    return {
        **item,
        "kind": "StatefulSet",
        "spec": {
            "serviceName": item["metadata"]["name"],
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            **spec,
        },
    }


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


def _jobset(found: dict[str, Object], name: str) -> Object:
    jobs = [
        {"name": part, "replicas": 1, "template": {"spec": _job_spec(found[part], part)}}
        for part in PARTS
    ]
    metadata = {**copy.deepcopy(found["agent"]["metadata"]), "name": name}
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
