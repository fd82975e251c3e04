"""`elastic kubernetes render`: the manifests of deploy/kubernetes with the values of one job.

All values are checked before anything is printed. No cluster is needed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click import IntRange

from elastic.command_line import Command, ParsedType
from elastic.domain.errors import EXIT_OK, FieldError, UsageError, needs_extra
from elastic.launcher.flags.flags import OURS, TORCHRUN
from elastic.launcher.flags.validators import NODES
from elastic.launcher.kubernetes.controllers import (
    COMPONENT,
    KINDS,
    convert,
    coordinators,
    pod_template,
)
from elastic.launcher.kubernetes.etcd_restore import SNAPSHOT, add_restore
from elastic.launcher.kubernetes.kustomize import FILE, Object, build
from elastic.planning.plan.units import size_of

with needs_extra("kubernetes", "`elastic kubernetes`"):
    import yaml

PLACEHOLDER = "elastic"
"""Name of the job in deploy/, with which the names of all its objects begin."""
AGENT_IMAGE, COORDINATOR_IMAGE = "elastic-runtime:", "elastic-coordinator:"
"""Beginnings of the images' names in deploy/. The coordinators' image has no torch."""
BASE = "base"
"""Default overlay: coordinators, etcd and agents on machines that stay."""
PORT = 29400
"""Port of coordinators."""
SEPARATE = (
    "elastic-certs", "elastic-etcd-certs", "elastic-scrape-certs", "elastic-token",
    "elastic-checkpoints",
)  # fmt: skip
"""Objects that the user creates: secrets, and the volume claim of `claim`."""
MAX_NAME_CHARS = 40
"""Limit for a job's name. Pods' names add a part and a number, and must fit into 63 characters."""
MAX_NODES = 10_000
INSTANCE = "app.kubernetes.io/instance"
GPU = "nvidia.com/gpu"
ZONE = "topology.kubernetes.io/zone"
QUEUE = "kueue.x-k8s.io/queue-name"
CLUSTER_WIDE = ("PriorityClass",)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_IMAGE = re.compile(r"[a-z0-9][\w./:-]*(@sha256:[0-9a-f]{64})?")
_LABEL_KEY = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


# ---- values ----


def _label(flag: str, text: str) -> str:
    longest = MAX_NAME_CHARS if flag == "--name" else 63
    if len(text) > longest or not _LABEL.fullmatch(text):
        form = "small letters, digits and '-', with a letter or digit at both ends"
        raise FieldError(flag, text, f"give at most {longest} {form} (RFC 1123)")
    if flag == "--name" and text[0].isdigit():
        raise FieldError(
            flag, text, "begin with a letter, because services have this name (RFC 1035)"
        )
    return text


def _image(flag: str, text: str) -> str:
    if not _IMAGE.fullmatch(text):
        raise FieldError(flag, text, "give REGISTRY/NAME:TAG, or @sha256:DIGEST after the name")
    return text


def _memory(flag: str, text: str) -> int:
    found = size_of(flag, text)
    if found < 256 << 20:
        raise FieldError(flag, text, "give at least 256MiB")
    return found


def _variable(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise FieldError(flag, text, "give NAME=VALUE")
    known = {f"PET_{option.name}".upper() for option in (*TORCHRUN, *OURS)}
    if name.startswith("PET_") and name not in known:
        raise FieldError(flag, text, f"`elastic run` has no flag for {name}")
    return name, value


def _domain(flag: str, text: str) -> str:
    """Return the field of a pod that names its failure domain."""
    known = {"zone": f"metadata.labels['{ZONE}']", "machine": "spec.nodeName"}
    if text not in known and not _LABEL_KEY.fullmatch(text):
        raise FieldError(
            flag, text, "give zone, machine, or the key of a label, as example.com/rack"
        )
    return known.get(text, f"metadata.labels['{text}']")


# ---- manifests ----


def manifests() -> Path:
    """Return the folder with `base` and `overlays`: elastic/manifests in an installed wheel,
    deploy/kubernetes in a clone."""
    package = Path(__file__).resolve().parents[2]
    packed = package / "manifests"
    return packed if packed.is_dir() else package.parent / "deploy" / "kubernetes"


def shipped_overlays() -> dict[str, Path]:
    """Return the folders of the overlays that come with elastic, by name; `base` first."""
    folders = sorted((manifests() / "overlays").iterdir())
    named = (path for path in (manifests() / BASE, *folders) if (path / FILE).is_file())
    return {path.name: path for path in named}


def _overlay(flag: str, text: str) -> Path:
    shipped = shipped_overlays()
    if text in shipped:
        return shipped[text]
    if (Path(text) / FILE).is_file():
        return Path(text)
    raise FieldError(flag, text, f"give {', '.join(shipped)}, or a folder with {FILE}")


def _only_one(_: click.Context, param: click.Parameter, given: tuple[Path, ...]) -> Path:
    """Return the one value of a flag; raise FieldError if it was given several times."""
    if len(given) > 1:
        remedy = (
            f"give {param.opts[0]} once; to combine overlays, make a folder with a {FILE} that "
            "names one as resource and patches it"
        )
        raise FieldError(param.opts[0], str(given[1]), remedy)
    return given[0]


def check_variables(objects: list[Object], env: Iterable[tuple[str, str]]) -> None:
    """Raise FieldError for a variable of --env that a container of the overlay sets itself: the
    container's own value would win."""
    for item in objects:
        template = pod_template(item)
        for container in template["spec"]["containers"] if template is not None else ():
            own = {entry["name"] for entry in container.get("env", ())}
            for name, value in env:
                if name in own and "envFrom" in container:
                    where = f"{item['kind']} {item['metadata']['name']}"
                    raise FieldError("--env", f"{name}={value}", _remedy(name, container, where))


def _remedy(name: str, container: Object, where: str) -> str:
    if name == "PET_DOMAIN":
        return "give --domain instead"
    patch = f"the variable {name} of the container {container['name']} in the {where}"
    if name == "PET_GRACE":
        patch = f"terminationGracePeriodSeconds, and 10 s less in {patch}"
    return f"the overlay sets it: patch {patch}, in an overlay of your own (--overlay DIR)"


LABEL, IMAGE = ParsedType("NAME", _label), ParsedType("IMAGE", _image)


@click.command(
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[flags]",
)
@click.option("--name", type=LABEL, required=True,
              help="name of the job; all its objects' names begin with it")  # fmt: skip
@click.option("--image", type=IMAGE, required=True,
              help="image with elastic and your script (deploy/Dockerfile makes one)")  # fmt: skip
@click.option("--coordinator-image", type=IMAGE,
              help="image of coordinators, without torch (default: that of --image)")  # fmt: skip
@click.option("--namespace", type=LABEL, help="namespace of all objects (default: kubectl's)")
@click.option(
    "--nodes", type=NODES, default="2:4", help="N or MIN:MAX agents; MAX pods are asked for"
)
@click.option(
    "--nproc-per-node", type=IntRange(1, 1024), help="workers per pod (default: its GPUs, or 1)"
)
@click.option("--gpus", type=IntRange(0, 64), default=0, help=f"{GPU} per agent")
@click.option("--cpus", type=IntRange(1, 4096), help="CPUs per agent (default: as in deploy/)")
@click.option("--memory", type=ParsedType("SIZE", _memory),
              help="memory per agent, half of it for shared memory, as 64GiB")  # fmt: skip
@click.option("--overlay", type=ParsedType("DIR", _overlay), default=(BASE,),
              multiple=True, callback=_only_one,
              help="base (machines that stay), spot-pool, shared-inference, rdma, local (a test "
                   "cluster on one machine), or your own folder")  # fmt: skip
@click.option("--kind", type=click.Choice(KINDS), default="job", help="objects that start the pods")
@click.option("--domain", type=ParsedType("zone|machine|LABEL", _domain),
              help="failure domain of an agent: its zone (default; Kubernetes 1.35), its machine, "
                   "or a label of its pod")  # fmt: skip
@click.option("--queue", type=LABEL, help="Kueue queue of the agents")
@click.option("--env", type=ParsedType("NAME=VALUE", _variable), multiple=True,
              help="variable of all pods, as PET_ACCUMULATE=exact for --accumulate exact; "
                   "repeatable")  # fmt: skip
@click.option("--restore-etcd", type=SNAPSHOT, metavar="FILE",
              help="file in the claim NAME-snapshots, with which etcd begins")  # fmt: skip
@click.option("--module", "-m", is_flag=True, help="SCRIPT is a module, run as python -m")
@click.argument("script", metavar="SCRIPT|-m MODULE")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED, metavar="[args...]")
def render(**given: Any) -> int:
    """Print the Kubernetes manifests of a job, for kubectl apply -f -.

    SCRIPT is a path in the image, or a module.
    """
    job = SimpleNamespace(**given)
    if job.nodes[1] > MAX_NODES:
        raise FieldError("--nodes", job.nodes[1], f"give at most {MAX_NODES}")
    if not job.module and not job.script.startswith("/"):
        raise FieldError(
            "SCRIPT", job.script, "give an absolute path in the image, or -m and a module"
        )
    return show(fill(build(job.overlay), job))


class _Dumper(yaml.SafeDumper):
    """Writes an object that occurs twice twice: anchors confuse readers, `diff` and `yq`."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def show(objects: list[Object]) -> int:
    """Print objects as YAML; return the exit code."""
    yaml.dump_all(objects, sys.stdout, Dumper=_Dumper, sort_keys=False, width=120)
    return EXIT_OK


def own_settings(env: Iterable[tuple[str, str]], *, of_store: bool) -> dict[str, str]:
    """Return the user's variables of the store, which only coordinators get, or the others."""
    return {name: value for name, value in env if name.startswith("PET_STORE") == of_store}


def fill(objects: list[Object], job: SimpleNamespace) -> list[Object]:
    """Return copies of an overlay's objects with the values of `job`, the flags of `render`."""
    check_variables(objects, job.env)
    objects = renamed(objects, job.name)
    images = {AGENT_IMAGE: job.image, COORDINATOR_IMAGE: job.coordinator_image or job.image}
    command = [*(("-m",) if job.module else ()), job.script, *job.script_args]
    endpoint = ",".join(f"{host}:{PORT}" for host in coordinators(objects, job.kind, job.name))
    low, high = job.nodes
    for item in objects:
        metadata, kind = item["metadata"], item["kind"]
        if job.namespace and kind not in CLUSTER_WIDE:
            metadata["namespace"] = job.namespace
        if kind == "ConfigMap" and metadata["name"] == f"{job.name}-store":
            item["data"] |= own_settings(job.env, of_store=True)
        elif kind == "ConfigMap":
            item["data"] |= {
                "PET_NNODES": f"{low}:{high}",
                "PET_NPROC_PER_NODE": str(job.nproc_per_node or max(1, job.gpus)),
                "PET_RDZV_ENDPOINT": endpoint,
                "PET_RDZV_ID": job.name,
                "PET_CERTS_NAME": job.name,
                **own_settings(job.env, of_store=False),
            }
        elif kind == "PodDisruptionBudget" and metadata["name"] == f"{job.name}-agent":
            item["spec"]["minAvailable"] = low
        elif kind == "Deployment" and metadata["labels"].get(COMPONENT) == "agent":
            item["spec"]["replicas"] = high
            _size(item, job)
            _place(item, job)
        template = pod_template(item)
        for container in template["spec"]["containers"] if template is not None else ():
            for placeholder, image in images.items():
                if container["image"].startswith(placeholder):
                    container["image"] = image
                    if "args" in container:  # an agent or a coordinator
                        container["args"] = list(command)
    if job.restore_etcd:
        add_restore(objects, job.name, job.restore_etcd)
    return convert(objects, job.kind, job.name)


def _size(item: Object, job: SimpleNamespace) -> None:
    """Set the resources of an agent's container, and the size of its shared memory."""
    spec = item["spec"]["template"]["spec"]
    resources = spec["containers"][0]["resources"]
    if job.gpus:
        resources["limits"][GPU] = str(job.gpus)
    if job.cpus:
        resources["requests"]["cpu"] = str(job.cpus)
    if job.memory:
        resources["requests"]["memory"] = resources["limits"]["memory"] = str(job.memory)
        for volume in spec["volumes"]:
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                volume["emptyDir"]["sizeLimit"] = str(job.memory // 2)


def _place(item: Object, job: SimpleNamespace) -> None:
    """Set the queue of the agents, and the field with an agent's failure domain."""
    if job.queue:
        item["metadata"]["labels"][QUEUE] = job.queue
    if job.domain:
        container = item["spec"]["template"]["spec"]["containers"][0]
        others = [entry for entry in container["env"] if entry["name"] != "PET_DOMAIN"]
        source = {"fieldRef": {"fieldPath": job.domain}}
        container["env"] = [*others, {"name": "PET_DOMAIN", "valueFrom": source}]


def renamed(objects: list[Object], name: str) -> list[Object]:
    """Return copies with `name` for PLACEHOLDER in names, references and the instance label."""
    names = [item["metadata"]["name"] for item in objects if item["kind"] not in CLUSTER_WIDE]
    if wrong := [text for text in names if not text.startswith(PLACEHOLDER)]:
        raise UsageError(f"names of objects must begin with {PLACEHOLDER!r}: {', '.join(wrong)}")
    rest = "|".join(re.escape(text.removeprefix(PLACEHOLDER)) for text in (*names, *SEPARATE))
    pattern = re.compile(rf"(?<![\w-]){PLACEHOLDER}(?=(?:{rest})(?![a-z]))")

    def copy(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {field: copy(entry, field) for field, entry in value.items()}
        if isinstance(value, list):
            return [copy(entry) for entry in value]
        if key == INSTANCE:
            return name
        if key == "image":  # an image's name may begin with an object's name
            return value
        return pattern.sub(name, value) if isinstance(value, str) else value

    return [copy(item) for item in objects]
