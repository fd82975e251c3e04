"""Plays the controllers of Kubernetes: makes pods from manifests, with volumes, names and
environment."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.kubernetes.api_server import ApiServer, listen
from tests.kubernetes.controllers import COMPONENT, Controllers, wanted
from tests.kubernetes.network import Network
from tests.kubernetes.pods import IMAGE_ENVIRONMENT, Pod, expand

Object = dict[str, Any]
NAMESPACE = "default"


class Cluster:
    """Use as a context manager: at the end every process, namespace and folder is gone."""

    def __init__(self, objects: list[Object], folder: Path) -> None:
        self.objects, self._folder = objects, folder
        self._network = Network()
        self.pods: dict[str, Pod] = {}
        self._count = 0
        self.controllers = Controllers(self)
        listening = listen(self._network.service_address(), self._network.switch)
        self.api = ApiServer(objects, folder / "api", self._as_the_api_shows, listening)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for pod in self.pods.values():
                with contextlib.suppress(psutil.Error):  # it ended by itself just now
                    pod.kill()
        finally:
            self.api.close()
            self._network.close()

    # ---- actions of users and of the cluster ----

    def start(self, component: str, count: int | None = None) -> list[Pod]:
        """The pods of the workload of a component: as many as it asks for, or the first `count`."""
        owner = self.workload(component)
        return [self.start_one(owner, i) for i in range(wanted(owner) if count is None else count)]

    def of(self, component: str) -> list[Pod]:
        """The pods of a component that exist now."""
        return [pod for pod in self.pods.values() if pod.labels[COMPONENT] == component]

    def preempt(self, pod: Pod) -> None:
        """Lose the pod's machine: cut its network and kill it at the same moment."""
        self._network.cut(pod.space)
        pod.kill()
        self._gone(pod)

    def kill(self, pod: Pod) -> None:
        """Kill the pod without grace; its machine closes the connections."""
        pod.kill()
        self._gone(pod)

    def delete(self, pod: Pod) -> float:
        """kubectl delete pod, or an eviction. Return the seconds that the pod took to end."""
        took = pod.delete()
        self._gone(pod)
        return took

    def delete_all(self, pods: list[Pod]) -> None:
        """Delete pods at the same time, as a controller does that needs fewer."""
        with ThreadPoolExecutor(len(pods)) as pool:
            list(pool.map(Pod.delete, pods))
        for pod in pods:
            self._gone(pod)

    def replace(self, pod: Pod) -> Pod:
        """Start the pod that replaces a lost one."""
        owner = self.workload(pod.labels[COMPONENT])
        named = owner["kind"] == "StatefulSet"
        return self.start_one(owner, int(pod.hostname.rpartition("-")[2]) if named else 0)

    def cut(self, *pods: Pod) -> None:
        self._network.cut(*(pod.space for pod in pods))

    def heal(self, *pods: Pod) -> None:
        self._network.heal(*(pod.space for pod in pods))

    def part(self, pod: Pod, *others: Pod) -> None:
        """Cut a pod off from some pods only."""
        self._network.part(pod.space, *(other.space for other in others))

    def unite(self, pod: Pod, *others: Pod) -> None:
        self._network.unite(pod.space, *(other.space for other in others))

    def listening(self, pod: Pod) -> set[int]:
        return self._network.listening(pod.space)

    def claim(self, name: str) -> Path:
        """The folder behind a PersistentVolumeClaim."""
        return _folder(self._folder / f"claim-{name}")

    def logs(self) -> str:
        """The end of each pod's log, for messages of failed tests."""
        return "\n".join(f"--- {pod.name}\n{pod.log[-4000:]}" for pod in self.pods.values())

    # ---- pods ----

    def workload(self, component: str) -> Object:
        (one,) = (
            item for item in self.objects
            if item["kind"] in ("Deployment", "StatefulSet", "Job")
            and item["metadata"]["labels"][COMPONENT] == component
        )  # fmt: skip
        return one

    def start_one(self, owner: Object, index: int) -> Pod:
        """Start a pod of a workload; only pods of a StatefulSet have a number, `index`."""
        template, first = owner["spec"]["template"], owner["metadata"]["name"]
        named = owner["kind"] == "StatefulSet"
        hostname = f"{first}-{index}" if named else f"{first}-{secrets.token_hex(3)[:5]}"
        self._count += 1
        space, address = self._network.add(str(self._count))
        folder = self._folder / f"{hostname}-{self._count}"
        folder.mkdir(parents=True)
        pod = Pod(
            name=hostname,
            hostname=hostname,
            subdomain=owner["spec"]["serviceName"] if named else "",
            namespace=NAMESPACE,
            labels=dict(template["metadata"]["labels"]),
            spec=template["spec"],
            space=space,
            address=address,
            node=f"machine-{self._count}",
            folder=folder,
        )
        pod.environment = self._environment(pod)
        pod.mounts = self._mounts(pod, owner)
        self.pods[pod.name] = pod
        self._publish()
        pod.start()
        return pod

    def _gone(self, pod: Pod) -> None:
        self.controllers.lost(pod)
        self._network.remove(pod.space)
        if self.pods.get(pod.name) is pod:
            del self.pods[pod.name]
        self._publish()

    def _publish(self) -> None:
        """Publish names as the cluster's DNS does: of pods and of headless services."""
        hosts: dict[str, list[str]] = {}
        for pod in self.pods.values():
            hosts[pod.hostname] = [pod.address]
            short = f"{pod.hostname}.{pod.subdomain}"
            for name in (short, f"{short}.{NAMESPACE}.svc.cluster.local") if pod.subdomain else ():
                hosts[name] = [pod.address]
        for item in self.objects:
            if item["kind"] == "Service":
                selector = item["spec"]["selector"].items()
                hosts[item["metadata"]["name"]] = [
                    pod.address for pod in self.pods.values() if selector <= pod.labels.items()
                ]
        self._network.names(hosts)

    # ---- environment and volumes ----

    def _find(self, kind: str, name: str) -> Object:
        (one,) = (o for o in self.objects if o["kind"] == kind and o["metadata"]["name"] == name)
        return one

    def _environment(self, pod: Pod) -> dict[str, str]:
        host, port = self.api.address
        service = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": str(port)}
        found = IMAGE_ENVIRONMENT | service
        for source in pod.container.get("envFrom", ()):
            found |= self._find("ConfigMap", source["configMapRef"]["name"])["data"]
        for entry in pod.container.get("env", ()):
            if "value" in entry:
                found[entry["name"]] = expand(entry["value"], found)
            else:
                found[entry["name"]] = _field(pod, entry["valueFrom"]["fieldRef"]["fieldPath"])
        return found

    def _mounts(self, pod: Pod, owner: Object) -> dict[str, Path | str]:
        claims = {
            claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", ())
        }
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", ())}
        mounts: dict[str, Path | str] = {}
        for mount in pod.container["volumeMounts"]:
            name = mount["name"]
            own = (
                self._folder / f"claim-{name}-{pod.hostname}"
                if name in claims
                else pod.folder / name
            )
            mounts[mount["mountPath"]] = (
                _folder(own) if name in claims else self._volume(volumes[name], own, pod)
            )
        return mounts

    def _volume(self, volume: Object, own: Path, pod: Pod) -> Path | str:
        match {key: value for key, value in volume.items() if key != "name"}:
            case {"emptyDir": {"medium": "Memory", "sizeLimit": limit}}:
                return f"mode=1777,size={_bytes(limit)}"
            case {"emptyDir": _}:
                return _folder(own)
            case {"persistentVolumeClaim": {"claimName": claim}}:
                self._find("PersistentVolumeClaim", claim)
                return self.claim(claim)
            case {"configMap": {"name": name}}:
                return _files(own, self._find("ConfigMap", name)["data"])
            case {"secret": {"secretName": name}}:
                return _files(own, self._find("Secret", name)["stringData"])
            case {"projected": {"sources": sources}}:
                return _files(own, dict(self._projected(source, pod) for source in sources))
            case other:
                raise NotImplementedError(f"volume {other}")

    def _projected(self, source: Object, pod: Pod) -> tuple[str, str]:
        """Name and content of a file of a projected volume."""
        match source:
            case {"serviceAccountToken": {"path": path}}:
                return path, self.api.token(pod.spec["serviceAccountName"])
            case {"configMap": {"name": "kube-root-ca.crt", "items": [{"path": path}]}}:
                return path, self.api.ca.read_text()
            case other:
                raise NotImplementedError(f"projected volume {other}")

    def _as_the_api_shows(self, name: str) -> Object | None:
        """A pod's name and the states of its container."""
        pod = self.pods.get(name)
        if pod is None:
            return None
        state = {"running": {}} if pod.running else {"terminated": {"exitCode": pod.code}}
        shown = {"name": pod.container["name"], "state": state}
        former = {"lastState": {"terminated": {"exitCode": pod.ended[-1]}}} if pod.ended else {}
        return {
            "metadata": {"name": name},
            "status": {"containerStatuses": [shown | former]},
        }


def wait_for(
    what: str, condition: Callable[[], Any], cluster: Cluster, timeout_s: float = 150.0
) -> Any:
    """Wait until `condition` returns a true value; after the timeout, fail with the pods' logs."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        cluster.controllers.act(time.monotonic())
        assert time.monotonic() < end, (
            f"{what} did not happen within {timeout_s:g} s\n{cluster.logs()}"
        )
        time.sleep(0.1)
    return value


def _field(pod: Pod, path: str) -> str:
    label = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
    if label:
        return pod.labels.get(label[1], "")
    known = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "status.podIP": pod.address,
        "spec.nodeName": pod.node,
    }
    return known[path]


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    path.chmod(0o777)
    return path


def _files(path: Path, content: dict[str, str]) -> Path:
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    for name, text in content.items():
        (path / name).write_text(text)
    return path


def _bytes(text: str) -> int:
    units = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    return int(text[:-2]) * units[text[-2:]] if text[-2:] in units else int(text)
