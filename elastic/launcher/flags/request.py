"""From flags to a validated request. Nothing is started, created or written here."""

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
from typing import TypeVar

from elastic.config import FILE, JobConfig, load_config
from elastic.core.protocol.fault_spec import FaultKind
from elastic.core.protocol.store_spec import StoreSpec
from elastic.domain.errors import FieldError, UsageError
from elastic.domain.types import Accumulate
from elastic.launcher.flags.guarding import Guard, certificates, guard, guard_cluster
from elastic.launcher.flags.ray_options import RayOptions, ray_options
from elastic.launcher.flags.script import check_command
from elastic.launcher.flags.values import (
    DYNAMIC_PORT,
    STATIC_PORT,
    addresses,
    folder,
    slug,
    streams,
)
from elastic.launcher.flags.waiting import heartbeat, metadata_services, notices, silence
from elastic.planning.cost.profile import LinkProfile, Profile

LOOPBACK = "127.0.0.1"
T = TypeVar("T")
AS_GIVEN = (
    "compress",
    "coordinators",
    "max_restarts",
    "metrics_host",
    "pipelines",
    "preflight",
    "role",
    "schedule",
    "virtual_local_rank",
)
"""Flags that are fields of JobConfig under the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `elastic run` shall do on this machine."""

    config: JobConfig
    nodes: tuple[str, ...]
    """Names of the agents to start here."""
    hosts: bool | None
    """Start the coordinator here; None: if this machine owns the address and nothing listens there."""
    signals: tuple[signal.Signals, ...]
    """Signals that end the job in order."""
    console_events: bool = False
    in_place: bool = False
    """Resume in a run directory that was used before: what it holds is moved aside."""
    ray: RayOptions | None = None
    """Agents run on a Ray cluster; None: here."""
    as_service: bool = False
    """It is `elastic coordinator` or `elastic agent`: the exit code tells whether to start it again."""
    guard: Guard = field(default_factory=Guard)
    """The join token, and what the user is warned of."""
    services: tuple[str, str] = ("elastic.coordinator.service", "elastic.agent.service")
    """Modules that are run as coordinator and as agent."""


def request(flags: SimpleNamespace, environ: Mapping[str, str]) -> Request:
    """Check the flags of `elastic run` together. Raises FieldError at the first wrong one."""
    command = check_command(flags)
    low, high = flags.nnodes
    ray = ray_options(flags)
    standalone = ray is None and _standalone(flags, high)
    nproc = _nproc(flags.nproc_per_node, environ)
    token = secrets.token_hex(3)
    job_id = token if flags.rdzv_id == "none" else f"{slug(flags.rdzv_id)}-{token}"
    run_dir, in_place = _run_dir(flags, token)
    checkpoints = flags.checkpoint_dir or run_dir / "checkpoints"
    conf = flags.rdzv_conf or {}
    coordinator = "" if standalone or (ray and not flags.rdzv_endpoint) else _endpoint(flags)
    secured = guard_cluster(flags, environ) if ray else guard(flags, environ, coordinator, standalone)
    certs, certs_name = certificates(flags, secured, run_dir)
    config = JobConfig(
        job_id=job_id,
        run_dir=str(run_dir),
        memory_dir=str(memory_root() / f"elastic-{job_id}"),
        checkpoint_dir=str(checkpoints),
        command=command,
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=nproc,
        local_nodes=high if standalone else 1,
        standalone=standalone,
        coordinator=coordinator,
        run_id=job_id if standalone and flags.rdzv_id == "none" else flags.rdzv_id,
        rdzv_conf=tuple(conf.items()),
        master_addr=LOOPBACK if standalone else "" if ray else _master_addr(flags),
        local_addr=flags.local_addr or "",
        backup="none+none" if flags.backup in ("none", "off") else flags.backup,
        accumulate=Accumulate(flags.accumulate),
        vault_memory_bytes=flags.vault_memory or 0,
        resume=_resume(flags.resume, checkpoints),
        monitor_interval_s=flags.monitor_interval,
        shutdown_timeout_s=flags.shutdown_timeout,
        store=_store(flags),
        heartbeat_s=heartbeat(flags, high),
        lease_s=silence(flags),
        notices=notices(flags, standalone),
        metadata_services=metadata_services(environ),
        grace_s=flags.grace,
        metrics_port=-1 if flags.metrics_port is None else flags.metrics_port,
        log_dir=str(flags.log_dir or run_dir / "logs"),
        redirects=streams("--redirects", flags.redirects, nproc),
        tee=streams("--tee", flags.tee, nproc),
        log_line_prefix=flags.log_line_prefix_template,
        local_ranks_filter=flags.local_ranks_filter or (),
        profile=_profile(flags),
        emulate=flags.emulate is not None,
        quarantine_s=flags.quarantine,
        link=flags.link or LinkProfile(),
        certs=certs,
        certs_name=certs_name,
        faults=flags.fault,
        domains=_of_nodes("--domain", flags.domain, standalone),
        devices=_of_nodes("--device", flags.device, standalone),
        lifetimes_s=_of_nodes("--lifetime", flags.lifetime, standalone),
        node_memories_bytes=_of_nodes("--node-memory", flags.node_memory, standalone),
        **{name: getattr(flags, name) for name in AS_GIVEN},
    )
    return Request(
        config=config,
        nodes=() if ray else _names(flags, standalone, _at_start(config) if standalone else high),
        hosts=True if ray else _hosts(flags, standalone, conf),
        signals=flags.signals_to_handle,
        console_events=flags.event_log_handler == "console",
        in_place=in_place,
        ray=ray,
        guard=secured,
    )


def _of_nodes(flag: str, given: tuple[T, ...] | None, standalone: bool) -> tuple[T, ...]:
    """Values that may differ between this machine's nodes."""
    if given and len(given) > 1 and not standalone:
        raise FieldError(flag, given, "one value for this node; several go with --standalone")
    return given or ()


# ---- who takes part ----


def _nproc(text: str, environ: Mapping[str, str]) -> int:
    if re.fullmatch(r"\d{1,6}", text):
        return int(text)
    gpus = _gpus(environ)
    if text == "gpu" and gpus == 0:
        raise FieldError("--nproc-per-node", text, "there is no GPU here: give a number or cpu")
    if text in ("gpu", "auto") and gpus:
        return gpus
    if text in ("cpu", "auto"):
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    raise FieldError("--nproc-per-node", text, "a number, auto, cpu or gpu")


def _gpus(environ: Mapping[str, str]) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])


def _standalone(flags: SimpleNamespace, high: int) -> bool:
    """As torchrun: asked for, or one node and no rendezvous given."""
    static = flags.rdzv_backend == "static"
    alone = high == 1 and static and not flags.rdzv_endpoint and flags.master_port is None
    if not flags.standalone and not alone and not static and not flags.rdzv_endpoint:
        raise FieldError("--rdzv-endpoint", "", f"--rdzv-backend {flags.rdzv_backend} needs HOST:PORT")
    return bool(flags.standalone or alone)


def _endpoint(flags: SimpleNamespace) -> str:
    if flags.rdzv_endpoint:
        default = STATIC_PORT if flags.rdzv_backend == "static" else DYNAMIC_PORT
        return addresses("--rdzv-endpoint", flags.rdzv_endpoint, default)
    return f"{flags.master_addr}:{flags.master_port or STATIC_PORT}"


def _master_addr(flags: SimpleNamespace) -> str:
    """Fixed by the user under static rendezvous; else "", which is rank 0's host."""
    return _endpoint(flags).rpartition(":")[0].strip("[]") if flags.rdzv_backend == "static" else ""


def _at_start(config: JobConfig) -> int:
    """Local nodes to start with: the maximum, but room is left for nodes that join where none leaves before."""
    kinds = [spec.kind for spec in config.faults]
    joins = kinds.count(FaultKind.JOIN)
    leaving = sum(kind in (FaultKind.KILL, FaultKind.DRAIN, FaultKind.PARTITION) for kind in kinds)
    return max(config.min_nodes, config.max_nodes - max(0, joins - leaving))


def _names(flags: SimpleNamespace, standalone: bool, high: int) -> tuple[str, ...]:
    if standalone:
        return tuple(f"node{i}" for i in range(high))
    if flags.rdzv_backend == "static":
        if flags.node_rank >= high:
            raise FieldError("--node-rank", flags.node_rank, f"from 0 to {high - 1}, as --nnodes says")
        return (f"node{flags.node_rank}",)
    return (f"{slug(socket.gethostname())}-{secrets.token_hex(2)}",)


def _hosts(flags: SimpleNamespace, standalone: bool, conf: Mapping[str, str]) -> bool | None:
    if standalone:
        return True
    if "is_host" in conf:
        return conf["is_host"].lower() in ("1", "true", "yes", "y", "t")
    if flags.rdzv_backend == "static":
        return bool(flags.node_rank == 0)
    return None


def _profile(flags: SimpleNamespace) -> Profile | None:
    """The profile to plan by, or None."""
    if flags.profile is not None and flags.emulate is not None:
        name = flags.emulate.model
        raise FieldError("--emulate", name, "it names the profile already: leave --profile out")
    found: Profile | None = flags.profile or flags.emulate
    return found


def _store(flags: SimpleNamespace) -> StoreSpec:
    return StoreSpec(
        url=flags.store or "",
        ca=flags.store_ca or "",
        cert=flags.store_cert or "",
        key=flags.store_key or "",
        user=flags.store_user or "",
        password_file=flags.store_password_file or "",
    )


# ---- directories ----


def _run_dir(flags: SimpleNamespace, token: str) -> tuple[Path, bool]:
    """(run directory, whether it was used before)."""
    if flags.run_dir is None:
        return folder("--run-dir", f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{token}"), False
    path: Path = flags.run_dir
    if not path.exists() or not any(path.iterdir()):
        return path, False
    if flags.resume is None:
        raise FieldError("--run-dir", str(path), "it is not empty; give a new one, or --resume auto")
    if not (path / FILE).exists():
        raise FieldError(
            "--run-dir", str(path), f"it holds no {FILE}, so it is no run to resume; give another"
        )
    try:
        load_config(path)
    except UsageError as error:
        raise FieldError("--run-dir", str(path), f"it cannot be resumed: {error}") from error
    return path, True


def _resume(text: str | None, checkpoints: Path) -> str:
    """The directory to resume from, or "": nothing asked for, or auto and nothing there yet."""
    if text is None or (text == "auto" and not _holds_checkpoint(checkpoints)):
        return ""
    path = checkpoints if text == "auto" else Path(os.path.abspath(os.path.expanduser(text)))
    if not path.is_dir():
        raise FieldError("--resume", text, "there is no such directory; give one, or auto")
    if not _holds_checkpoint(path):
        raise FieldError("--resume", text, f"{path} holds no checkpoint (step-...); give another, or auto")
    return str(path)


def _holds_checkpoint(path: Path) -> bool:
    """`path` is a checkpoint, or a directory of checkpoints."""
    names = [path.name, *(entry.name for entry in path.glob("step-*/"))] if path.is_dir() else []
    return any(re.fullmatch(r"step-\d+", name) for name in names)


def memory_root() -> Path:
    """Where memory directories of jobs lie on this machine."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
