"""Restores etcd from a snapshot: a container fills each member's empty volume.

The command gets the member's own flags, so that the restored cluster is the one of the manifest.
docs/operate/kubernetes.md has the steps.
"""

from __future__ import annotations

import copy
import re

from elastic.command_line import ParsedType
from elastic.domain.errors import FieldError, UsageError
from elastic.launcher.kubernetes.controllers import COMPONENT
from elastic.launcher.kubernetes.kustomize import Object

FOLDER = "/elastic/snapshots"
SHARED = (
    "--name",
    "--data-dir",
    "--initial-cluster",
    "--initial-cluster-token",
    "--initial-advertise-peer-urls",
)
"""Flags of etcd that `etcdctl snapshot restore` has, too."""


def _snapshot(flag: str, text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*\.db", text):
        raise FieldError(
            flag, text, "give the name of a snapshot, as demo-snapshot-29402897-x7k2p.db"
        )
    return text


SNAPSHOT = ParsedType("FILE", _snapshot)


def add_restore(objects: list[Object], name: str, snapshot: str) -> None:
    """Let the members of etcd of the job `name` begin with a snapshot. Changes `objects`."""
    found = [
        item
        for item in objects
        if item["kind"] == "StatefulSet" and item["metadata"]["labels"].get(COMPONENT) == "etcd"
    ]
    if not found:
        raise UsageError("--restore-etcd: the overlay has no StatefulSet of etcd; leave it out")
    spec = found[0]["spec"]["template"]["spec"]
    (etcd,) = spec["containers"]
    flags = [word for word in etcd["command"] if word.partition("=")[0] in SHARED]
    restore = {key: copy.deepcopy(etcd[key]) for key in ("image", "env", "resources")}
    restore |= {
        "name": "restore",
        "command": ["etcdctl", "snapshot", "restore", f"{FOLDER}/{snapshot}", *flags],
        "securityContext": copy.deepcopy(etcd["securityContext"]),
        "volumeMounts": [
            *(mount for mount in etcd["volumeMounts"] if mount["name"] == "data"),
            {"name": "snapshots", "mountPath": FOLDER, "readOnly": True},
        ],
    }
    spec["initContainers"] = [restore]
    claim = {"claimName": f"{name}-snapshots", "readOnly": True}
    spec["volumes"].append({"name": "snapshots", "persistentVolumeClaim": claim})
