"""deploy/kuberay/rayjob.yaml: its pods are valid, and its command and resources fit together."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launcher.helpers import read

kubernetes_validate = pytest.importorskip("kubernetes_validate")
ROOT = Path(__file__).parents[2]
VERSION = "1.37.0"
JOB = {
    "entrypoint",
    "entrypointNumCpus",
    "submissionMode",
    "shutdownAfterJobFinishes",
    "ttlSecondsAfterFinished",
    "backoffLimit",
    "rayClusterSpec",
}
"""Fields of a RayJob that the manifest uses (KubeRay's API reference, ray.io/v1). No package ships
its schema."""
CLUSTER = {
    "rayVersion",
    "authOptions",
    "enableInTreeAutoscaling",
    "autoscalerOptions",
    "headGroupSpec",
    "workerGroupSpecs",
}
"""Fields of its cluster."""


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    text = (ROOT / "deploy" / "kuberay" / "rayjob.yaml").read_text()
    return {item["kind"]: item for item in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def cluster(objects: dict[str, Any]) -> dict[str, Any]:
    return dict(objects["RayJob"]["spec"]["rayClusterSpec"])


def test_fields(objects: dict[str, Any], cluster: dict[str, Any]) -> None:
    assert objects["RayJob"]["apiVersion"] == "ray.io/v1"
    assert set(objects["RayJob"]["spec"]) == JOB and set(cluster) == CLUSTER
    kubernetes_validate.validate(objects["PersistentVolumeClaim"], VERSION, strict=True)


def test_pods_are_valid_and_have_the_least_rights(cluster: dict[str, Any]) -> None:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    claims = set()
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)
        spec = group["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        (container,) = spec["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert {one["name"] for one in container["volumeMounts"]} == {"shared", "shm"}
        claims |= {
            one["persistentVolumeClaim"]["claimName"]
            for one in spec["volumes"]
            if "persistentVolumeClaim" in one
        }
    assert claims == {"elastic-shared"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "no agent runs there"


def test_the_command_fits_the_cluster(objects: dict[str, Any], cluster: dict[str, Any]) -> None:
    words = shlex.split(objects["RayJob"]["spec"]["entrypoint"])
    assert words[:2] == ["elastic", "run"]
    request = read(*words[2:])
    (group,) = cluster["workerGroupSpecs"]
    container = group["template"]["spec"]["containers"][0]
    assert request.ray is not None
    assert request.config.min_nodes == group["minReplicas"] == group["replicas"]
    assert request.config.max_nodes + request.ray.spares == group["maxReplicas"]
    limits, needs = container["resources"]["limits"], dict(request.ray.resources)
    assert needs == {"CPU": 7.0, "GPU": 8.0}, json.dumps(needs)
    assert needs["CPU"] < float(container["resources"]["requests"]["cpu"])
    assert str(int(needs["GPU"])) == limits["nvidia.com/gpu"] == group["rayStartParams"]["num-gpus"]
    assert request.config.nproc_per_node == int(needs["GPU"])
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    for path in (request.config.run_dir, request.config.checkpoint_dir):
        assert Path(path).parents[-2] in {Path(one) for one in mounts}, path
