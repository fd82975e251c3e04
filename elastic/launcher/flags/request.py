"""The validated request of `elastic run`, made of its flags. Nothing is started or written here."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elastic.command_line import file_errors
from elastic.config import FILE, JobConfig, is_url, load_config
from elastic.core.protocol.fault_spec import FaultKind
from elastic.core.protocol.store_spec import StoreSpec
from elastic.domain.errors import FieldError, UsageError
from elastic.domain.types import Accumulate, OnNonfinite
from elastic.launcher.flags import validators
from elastic.launcher.flags.addresses import ENDPOINT_FLAG
from elastic.launcher.flags.local_gpus import visible_gpus
from elastic.launcher.flags.ray_options import RayOptions, ray_options
from elastic.launcher.flags.script import check_command
from elastic.launcher.flags.slow_storage import OBJECTS_S, ends_in_time
from elastic.launcher.flags.validators import Guard, folder, slug, streams
from elastic.launcher.tracking.targets import Target
from elastic.planning.cost.profile import LinkProfile
from elastic.planning.plan.shape import check_shape
from elastic.store.checkpoint_format import Manifest
from elastic.store.checkpoints import open_checkpoints

LOOPBACK = "127.0.0.1"
ETCD_BACKENDS = ("etcd", "etcd-v2")
"""torchrun's backends whose --rdzv-endpoint is etcd's address, not the coordinator's."""
# fmt: off
SAME_NAME = (
    "compress", "coordinators", "log_format", "max_restarts", "metrics_host", "pipelines",
    "preflight", "role", "schedule", "verify_every", "virtual_local_rank",
)
# fmt: on
"""Flags that are fields of JobConfig under the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The task of a launcher on this machine, validated."""

    config: JobConfig
    nodes: tuple[str, ...]
    """Names of the agents to start here."""
    hosts: bool | None
    """Whether to start a coordinator here; None: if its address is this machine's and free."""
    signals: tuple[signal.Signals, ...]
    """Signals that end the job in order."""
    console_events: bool = False
    in_place: bool = False
    """Whether the run directory was used before; its content is then moved aside."""
    ray: RayOptions | None = None
    """Settings of agents on a Ray cluster; None: agents run on this machine."""
    as_service: bool = False
    """`elastic coordinator` or `elastic agent`: exit codes tell whether a restart would help."""
    trackers: tuple[Target, ...] = ()
    """Where the machine of the coordinator writes what the run does."""
    endpoint_flag: str = ENDPOINT_FLAG
    """Flag that gave the coordinator's address, for errors."""
    guard: Guard = field(default_factory=Guard)
    services: tuple[str, str] = ("elastic.coordinator.service", "elastic.agent.service")
    """Modules that run as coordinator and as agent."""


def request(flags: SimpleNamespace, environ: Mapping[str, str]) -> Request:
    """Return the job that the flags ask for. Raises FieldError for the first wrong flag."""
    command = check_command(flags)
    nproc = _nproc(flags.nproc_per_node, environ)
    _check_combinations(flags, nproc)
    low, high = flags.nnodes
    ray = ray_options(flags)
    standalone = ray is None and _standalone(flags, high)
    token = secrets.token_hex(3)
    job_id = token if flags.rdzv_id == "none" else f"{slug(flags.rdzv_id)}-{token}"
    run_dir, in_place = _run_dir(flags, token)
    checkpoints = flags.checkpoint_dir or str(run_dir / "checkpoints")
    coordinator = "" if standalone or (ray and not flags.rdzv_endpoint) else _endpoint(flags)
    static, host = flags.rdzv_backend == "static", coordinator.rpartition(":")[0].strip("[]")
    if ray:
        guard = validators.cluster_guard(flags, environ)
    else:
        guard = validators.service_guard(flags, environ, coordinator, standalone)
    certs, certs_name = validators.certificates(flags, guard, run_dir)
    config = JobConfig(
        job_id=job_id,
        run_dir=str(run_dir),
        memory_dir=str(memory_root() / f"elastic-{job_id}"),
        checkpoint_dir=checkpoints,
        checkpoint_keep=flags.checkpoint_keep,
        command=command,
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=nproc,
        local_nodes=high if standalone else 1,
        standalone=standalone,
        coordinator=coordinator,
        run_id=job_id if standalone and flags.rdzv_id == "none" else flags.rdzv_id,
        rdzv_conf=tuple((flags.rdzv_conf or {}).items()),
        master_addr=LOOPBACK if standalone else host if static and not ray else "",
        local_addr=flags.local_addr or "",
        backup="none+none" if flags.backup in ("none", "off") else flags.backup,
        accumulate=Accumulate(flags.accumulate),
        on_nonfinite=OnNonfinite(flags.on_nonfinite),
        vault_memory_bytes=flags.vault_memory or 0,
        resume=_resume(flags.resume, checkpoints),
        monitor_interval_s=flags.monitor_interval,
        shutdown_timeout_s=flags.shutdown_timeout,
        store=_store(flags),
        heartbeat_s=validators.heartbeat(flags, high),
        lease_s=validators.silence(flags),
        notices=validators.notices(flags, standalone),
        metadata_services=validators.metadata_services(environ),
        grace_s=flags.grace,
        metrics_port=-1 if flags.metrics_port is None else flags.metrics_port,
        log_dir=str(flags.log_dir or run_dir / "logs"),
        redirects=streams("--redirects", flags.redirects, nproc),
        tee=streams("--tee", flags.tee, nproc),
        log_line_prefix=flags.log_line_prefix_template,
        local_ranks_filter=flags.local_ranks_filter or (),
        profile=flags.profile or flags.emulate,
        emulate=flags.emulate is not None,
        quarantine_s=flags.quarantine,
        link=flags.link or LinkProfile(),
        certs=certs,
        certs_name=certs_name,
        faults=flags.fault,
        **_per_node(flags),
        **{name: getattr(flags, name) for name in SAME_NAME},
    )
    return Request(
        config=config,
        nodes=() if ray else _names(flags, standalone, _at_start(config) if standalone else high),
        hosts=True if ray else _hosts(flags, standalone),
        signals=flags.signals_to_handle,
        console_events=flags.event_log_handler == "console",
        in_place=in_place,
        ray=ray,
        trackers=_trackers(flags.track),
        endpoint_flag=validators.endpoint_flag(flags),
        guard=guard,
    )


def _per_node(flags: SimpleNamespace) -> dict[str, Any]:
    """Return the fields of JobConfig that have a value for each local node, or one for all."""
    return {
        "domains": flags.domain or (),
        "devices": flags.device or (),
        "lifetimes_s": flags.lifetime or (),
        "peak_tflops": flags.peak_tflops or (),
        "node_memories_bytes": flags.node_memory or (),
    }


def _check_combinations(flags: SimpleNamespace, nproc: int) -> None:
    """Raise FieldError for flags that do not go together."""
    if flags.profile is not None and flags.emulate is not None:
        remedy = "it gives the profile already: leave out --profile"
        raise FieldError("--emulate", flags.emulate.model, remedy)
    check_shape(flags.pipelines, flags.nnodes[1], nproc, "--pipelines")
    if flags.rdzv_backend in ETCD_BACKENDS and not flags.standalone:
        endpoint = (flags.rdzv_endpoint or "HOST:2379").removeprefix("http://")
        remedy = (
            "nodes meet at the coordinator, not in etcd: give --rdzv-backend c10d and "
            "--rdzv-endpoint COORDINATOR:29400, the address of one of the machines; "
            f"--store etcd://{endpoint} keeps the job's state in etcd"
        )
        raise FieldError("--rdzv-backend", flags.rdzv_backend, remedy)


def _trackers(targets: tuple[Target, ...]) -> tuple[Target, ...]:
    """Return the targets of --track. Raises FieldError for one that is given twice."""
    for number, target in enumerate(targets):
        if target in targets[:number]:
            raise FieldError("--track", str(target), "it is given twice: leave one out")
    return targets


# ---- nodes, workers and addresses ----


def _nproc(text: str, environ: Mapping[str, str]) -> int:
    if re.fullmatch(r"\d{1,6}", text):
        return int(text)
    gpus = len(visible_gpus(environ))
    if text == "gpu" and gpus == 0:
        raise FieldError("--nproc-per-node", text, "this machine has no GPU: give a number or cpu")
    if text in ("gpu", "auto") and gpus:
        return gpus
    if text in ("cpu", "auto"):
        affinity = getattr(os, "sched_getaffinity", None)
        return len(affinity(0)) if affinity else os.cpu_count() or 1
    raise FieldError("--nproc-per-node", text, "give a number, auto, cpu or gpu")


def _standalone(flags: SimpleNamespace, high: int) -> bool:
    """Return whether --standalone is given, or --nnodes is 1 and no rendezvous is given."""
    static = flags.rdzv_backend == "static"
    alone = high == 1 and static and not flags.rdzv_endpoint and flags.master_port is None
    if not flags.standalone and not alone and not static and not flags.rdzv_endpoint:
        remedy = f"--rdzv-backend {flags.rdzv_backend} needs HOST:PORT"
        raise FieldError("--rdzv-endpoint", "", remedy)
    return bool(flags.standalone or alone)


def _endpoint(flags: SimpleNamespace) -> str:
    static = flags.rdzv_backend == "static"
    if flags.rdzv_endpoint:
        port = validators.STATIC_PORT if static else validators.DYNAMIC_PORT
        return validators.addresses("--rdzv-endpoint", flags.rdzv_endpoint, port)
    return f"{flags.master_addr}:{flags.master_port or validators.STATIC_PORT}"


def _at_start(config: JobConfig) -> int:
    """Return the number of local nodes at the start: the maximum, less joins of extra nodes."""
    kinds = [spec.kind for spec in config.faults]
    joins = kinds.count(FaultKind.JOIN)
    leaving = sum(kind in (FaultKind.KILL, FaultKind.DRAIN, FaultKind.PARTITION) for kind in kinds)
    return max(config.min_nodes, config.max_nodes - max(0, joins - leaving))


def _names(flags: SimpleNamespace, standalone: bool, high: int) -> tuple[str, ...]:
    if standalone:
        return tuple(f"node{i}" for i in range(high))
    if flags.rdzv_backend == "static":
        if flags.node_rank >= high:
            remedy = f"give 0 to {high - 1}, because of --nnodes"
            raise FieldError("--node-rank", flags.node_rank, remedy)
        return (f"node{flags.node_rank}",)
    return (f"{slug(socket.gethostname())}-{secrets.token_hex(2)}",)


def _hosts(flags: SimpleNamespace, standalone: bool) -> bool | None:
    conf: Mapping[str, str] = flags.rdzv_conf or {}
    if standalone:
        return True
    if "is_host" in conf:
        return conf["is_host"].lower() in ("1", "true", "yes", "y", "t")
    return bool(flags.node_rank == 0) if flags.rdzv_backend == "static" else None


def _store(flags: SimpleNamespace) -> StoreSpec:
    names = ("ca", "cert", "key", "user", "password_file")
    given = {name: getattr(flags, f"store_{name}") or "" for name in names}
    return StoreSpec(url=flags.store or "", **given)


# ---- directories ----


def _run_dir(flags: SimpleNamespace, token: str) -> tuple[Path, bool]:
    """Return (run directory, whether it was used before)."""
    if flags.run_dir is None:
        return folder("--run-dir", f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{token}"), False
    path: Path = flags.run_dir
    with file_errors("--run-dir", path):
        if not path.exists() or not any(path.iterdir()):
            return path, False
    problem = ""
    if flags.resume is None:
        problem = "it is not empty; give a new one, or --resume auto"
    elif not (path / FILE).exists():
        problem = f"it has no {FILE}, so no run can be resumed from it; give another"
    else:
        try:
            load_config(path)
        except UsageError as error:
            problem = f"it cannot be resumed: {error}"
    if problem:
        raise FieldError("--run-dir", str(path), problem)
    return path, True


def _resume(text: str | None, checkpoints: str) -> str:
    """Return the location to resume from; "": without --resume, or with auto and no checkpoint."""
    if text is None:
        return ""
    with file_errors("--resume", text, "read"):
        return _checkpoint(text, checkpoints)


def _checkpoint(text: str, checkpoints: str) -> str:
    if is_url(checkpoints if text == "auto" else text):
        return _checkpoint_objects(text, checkpoints)
    if text == "auto" and not _holds_checkpoint(Path(checkpoints)):
        return ""
    path = Path(checkpoints if text == "auto" else os.path.abspath(os.path.expanduser(text)))
    if not path.is_dir():
        raise FieldError("--resume", text, "there is no such directory; give one, or auto")
    if not _holds_checkpoint(path):
        remedy = f"{path} holds no checkpoint (step-...); give another, or auto"
        raise FieldError("--resume", text, remedy)
    _complete(text, str(path))
    return str(path)


def _checkpoint_objects(text: str, checkpoints: str) -> str:
    """Return the URL to resume from; "": auto, and there is no checkpoint."""
    url = (checkpoints if text == "auto" else text).rstrip("/")
    if _complete(text, url):
        return url
    if text == "auto":
        return ""
    remedy = f"{url} holds no complete checkpoint (step-... with a manifest); give another, or auto"
    raise FieldError("--resume", text, remedy)


def _complete(text: str, location: str) -> bool:
    """Return whether a location has a complete checkpoint. Raises FieldError if all are damaged, or
    if an object store does not answer."""
    found: list[tuple[str, Manifest]] = []
    problems: list[FieldError] = []

    def look() -> None:
        complete, damaged = open_checkpoints(location, "--resume").complete(newest=True)
        found.extend(complete)
        problems.extend(damaged)

    if is_url(location):
        why = f"it does not answer within {OBJECTS_S:g} s"
        try:
            answered = ends_in_time(look, OBJECTS_S, location)
        except OSError as error:
            answered, why = False, str(error)
        if not answered:
            remedy = f"{location} cannot be read: {why}; check bucket, credentials and endpoint"
            raise FieldError("--resume", text, remedy)
    else:
        look()
    if not found and problems:
        remedy = f"no checkpoint is complete: {'; '.join(str(one) for one in problems)}"
        raise FieldError("--resume", text, remedy)
    return bool(found)


def _holds_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint or a directory of checkpoints."""
    names = [path.name, *(entry.name for entry in path.glob("step-*/"))] if path.is_dir() else []
    return any(re.fullmatch(r"step-\d+", name) for name in names)


def memory_root() -> Path:
    """Return the parent of the memory directories of all jobs on this machine."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
