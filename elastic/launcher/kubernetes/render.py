"""`elastic kubernetes render`: the manifests of deploy/kubernetes, filled in for one job, ready for kubectl apply.

Nothing is asked of a cluster. What users give is checked here, before anything is printed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.domain.errors import EXIT_OK, FieldError, UsageError, needs_extra
from elastic.launcher.flags.flags import OURS, TORCHRUN, Parser
from elastic.launcher.flags.values import choice, size, whole
from elastic.launcher.kubernetes.controllers import COMPONENT, KINDS, convert, coordinators, pod_template
from elastic.launcher.kubernetes.kustomize import FILE, Object, build

with needs_extra("kubernetes", "`elastic kubernetes`"):
    import yaml

PLACEHOLDER = "elastic"
"""The job's name in deploy/, and how the names of all its objects begin."""
IMAGE = "elastic-runtime:"
"""How the placeholder of our image begins."""
PORT = 29400
"""Of coordinators."""
SECRETS = ("elastic-certs", "elastic-token")
"""Made by the user, not by us."""
LONGEST_NAME = 40
"""So that names of pods, which are longer by part and number, fit a label."""
MOST_NODES = 10_000
INSTANCE = "app.kubernetes.io/instance"
GPU = "nvidia.com/gpu"
CLUSTER_WIDE = ("PriorityClass",)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_IMAGE = re.compile(r"[a-z0-9][\w./:-]*(@sha256:[0-9a-f]{64})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is filled in, checked."""

    name: str
    image: str
    namespace: str
    """"": none is named; kubectl's own."""
    low: int
    high: int
    nproc: int
    gpus: int
    memory_bytes: int
    """Of an agent's container; 0: as deploy/ says."""
    cpus: int
    """Of an agent's container; 0: as deploy/ says."""
    kind: str
    environment: tuple[tuple[str, str], ...]
    command: tuple[str, ...]


def kubernetes(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run `elastic kubernetes render`."""
    if not argv or argv[0] != "render":
        given = argv[0] if argv else ""
        if given in ("-h", "--help"):
            print("usage: elastic kubernetes render [flags] SCRIPT|-m MODULE [args...]")
            return EXIT_OK
        raise FieldError("elastic kubernetes", given, "render (see `elastic kubernetes render --help`)")
    return render(argv[1:], environ)


def render(argv: list[str], environ: Mapping[str, str]) -> int:
    """Print the Kubernetes manifests of a job, for kubectl apply -f -."""
    args = _parser().parse_args(argv)
    job, folder = _job(args), _overlay(args.overlay)
    objects = fill(build(folder), job)
    yaml.safe_dump_all(objects, sys.stdout, sort_keys=False, width=120)
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser(
        prog="elastic kubernetes render",
        usage="elastic kubernetes render [flags] SCRIPT|-m MODULE [args...]",
        description="Print the Kubernetes manifests of a job, for kubectl apply -f -.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--name", required=True, help="name of the job; all its objects' names begin with it")
    add("--image", required=True, help="image with elastic and your script (deploy/Dockerfile makes one)")
    add("--namespace", help="namespace of all objects (default: kubectl's)")
    add("--nodes", default="2:4", help="N or MIN:MAX agents; MAX pods are asked for (2:4)")
    add("--nproc-per-node", "--nproc_per_node", help="workers a pod (default: its GPUs, or 1)")
    add("--gpus", default="0", help=f"{GPU} of each agent (0)")
    add("--cpus", help="processors of each agent (default: as deploy/ says)")
    add("--memory", help="memory of each agent, half of it for copies in shared memory, as 64GiB")
    add(
        "--overlay",
        default="local",
        help="local, spot-pool, shared-inference, or a folder of your own (local)",
    )
    add("--kind", default="job", help=f"what starts the pods: {', '.join(KINDS)} (job)")
    add("--env", action="append", default=[], metavar="NAME=VALUE",
        help="a variable of all pods, as PET_ACCUMULATE=exact for --accumulate exact; repeatable")  # fmt: skip
    add("--module", "-m", action="store_true", help="SCRIPT is a module, run as python -m")
    add("script", metavar="SCRIPT", help="what the workers run: a module, or a path in the image")
    add("script_args", nargs=argparse.REMAINDER, metavar="args", help="its arguments")
    return parser


# ---- what the user gave ----


def _job(args: argparse.Namespace) -> Job:
    low, high = _nodes(args.nodes)
    gpus = whole("--gpus", args.gpus)
    if gpus > 64:
        raise FieldError("--gpus", args.gpus, "at most 64 a pod")
    nproc = whole("--nproc-per-node", args.nproc_per_node) if args.nproc_per_node else max(1, gpus)
    if not 1 <= nproc <= 1024:
        raise FieldError("--nproc-per-node", args.nproc_per_node, "from 1 to 1024 workers a pod")
    if args.cpus is not None and not 1 <= whole("--cpus", args.cpus) <= 4096:
        raise FieldError("--cpus", args.cpus, "from 1 to 4096 processors")
    return Job(
        name=_label("--name", args.name, LONGEST_NAME),
        image=_image(args.image),
        namespace=_label("--namespace", args.namespace, 63) if args.namespace is not None else "",
        low=low,
        high=high,
        nproc=nproc,
        gpus=gpus,
        memory_bytes=_memory(args.memory),
        cpus=int(args.cpus or 0),
        kind=choice("--kind", args.kind, KINDS),
        environment=tuple(_variable(text) for text in args.env),
        command=_command(args),
    )


def _label(flag: str, text: str, longest: int) -> str:
    if len(text) > longest or not _LABEL.fullmatch(text):
        remedy = (
            f"small letters, digits and '-', beginning and ending with a letter or digit, at most {longest}"
        )
        raise FieldError(flag, text, f"{remedy} (RFC 1123)")
    if flag == "--name" and text[0].isdigit():
        raise FieldError(flag, text, "a letter first: it begins the names of services (RFC 1035)")
    return text


def _image(text: str) -> str:
    if not _IMAGE.fullmatch(text):
        raise FieldError("--image", text, "REGISTRY/NAME:TAG, or with @sha256:DIGEST")
    return text


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high <= MOST_NODES:
        raise FieldError("--nodes", text, f"N or MIN:MAX with 1 <= MIN <= MAX <= {MOST_NODES}")
    return low, high


def _memory(text: str | None) -> int:
    found = size("--memory", text) if text is not None else 0
    if text is not None and found < 256 << 20:
        raise FieldError("--memory", text, "at least 256MiB")
    return found


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise FieldError("--env", text, "NAME=VALUE")
    known = {f"PET_{flag.dest.upper()}" for flag in (*TORCHRUN, *OURS)}
    if name.startswith("PET_") and name not in known:
        raise FieldError("--env", text, f"{name} stands for no flag of `elastic run`")
    return name, value


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    if not args.module and not args.script.startswith("/"):
        raise FieldError("SCRIPT", args.script, "an absolute path in the image, or -m and a module")
    return (*(("-m",) if args.module else ()), args.script, *args.script_args)


# ---- manifests ----


def manifests() -> Path:
    """The folder of base and overlays: in a wheel beside the modules, in a checkout deploy/kubernetes."""
    package = Path(__file__).resolve().parents[2]
    packed = package / "manifests"
    return packed if packed.is_dir() else package.parent / "deploy" / "kubernetes"


def _overlay(text: str) -> Path:
    shipped = manifests() / "overlays" / text
    if re.fullmatch(r"[\w-]+", text) and (shipped / FILE).is_file():
        return shipped
    if (Path(text) / FILE).is_file():
        return Path(text)
    names = sorted(path.name for path in (manifests() / "overlays").iterdir() if (path / FILE).is_file())
    raise FieldError("--overlay", text, f"one of {', '.join(names)}, or a folder that holds {FILE}")


def fill(objects: list[Object], job: Job) -> list[Object]:
    """The objects of an overlay, for this job: new objects, the given ones are not touched."""
    objects = _renamed(objects, job.name)
    endpoint = ",".join(f"{host}:{PORT}" for host in coordinators(objects, job.kind, job.name))
    for item in objects:
        if job.namespace and item["kind"] not in CLUSTER_WIDE:
            item["metadata"]["namespace"] = job.namespace
        part = item["metadata"].get("labels", {}).get(COMPONENT)
        if item["kind"] == "ConfigMap":
            _configure(item, job, endpoint)
        elif item["kind"] == "PodDisruptionBudget" and item["metadata"]["name"] == f"{job.name}-agent":
            item["spec"]["minAvailable"] = job.low
        elif part == "agent" and item["kind"] == "StatefulSet":
            item["spec"]["replicas"] = job.high
            _size(item, job)
        template = pod_template(item)
        for container in template["spec"]["containers"] if template is not None else ():
            if container["image"].startswith(IMAGE):
                container["image"], container["args"] = job.image, list(job.command)
    return convert(objects, job.kind, job.name)


def _configure(item: Object, job: Job, endpoint: str) -> None:
    item["data"] |= {
        "PET_NNODES": f"{job.low}:{job.high}",
        "PET_NPROC_PER_NODE": str(job.nproc),
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_ID": job.name,
        "PET_CERTS_NAME": job.name,
        **dict(job.environment),
    }


def _size(item: Object, job: Job) -> None:
    """Resources of an agent's container, and of its shared memory."""
    spec = item["spec"]["template"]["spec"]
    resources = spec["containers"][0]["resources"]
    if job.gpus:
        resources["limits"][GPU] = str(job.gpus)
    if job.cpus:
        resources["requests"]["cpu"] = str(job.cpus)
    if job.memory_bytes:
        resources["requests"]["memory"] = resources["limits"]["memory"] = str(job.memory_bytes)
        for volume in spec["volumes"]:
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                volume["emptyDir"]["sizeLimit"] = str(job.memory_bytes // 2)


def _renamed(objects: list[Object], name: str) -> list[Object]:
    """Copies in which the job's name stands for the placeholder: in names, wherever they are referred to, and in
    the label that tells jobs apart."""
    names = [item["metadata"]["name"] for item in objects if item["kind"] not in CLUSTER_WIDE]
    odd = [text for text in names if not text.startswith(PLACEHOLDER)]
    if odd:
        raise UsageError(f"names of objects must begin with {PLACEHOLDER!r}: {', '.join(odd)}")
    rest = "|".join(re.escape(text.removeprefix(PLACEHOLDER)) for text in (*names, *SECRETS))
    pattern = re.compile(rf"(?<![\w-]){PLACEHOLDER}(?=(?:{rest})(?![a-z]))")

    def copy(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {field: copy(entry, field) for field, entry in value.items()}
        if isinstance(value, list):
            return [copy(entry) for entry in value]
        if key == INSTANCE:
            return name
        return pattern.sub(name, value) if isinstance(value, str) else value

    return [copy(item) for item in objects]
