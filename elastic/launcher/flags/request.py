"""From flags to a validated request. Nothing is started, created or written here."""

from __future__ import annotations

import argparse
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
from typing import Any

from elastic.config import FILE, LOG_PREFIX, JobConfig, load_config
from elastic.core.protocol.fault_spec import FaultKind, FaultSpec, parse_fault
from elastic.domain.errors import FieldError, UsageError
from elastic.domain.types import Accumulate
from elastic.launcher.flags.guarding import Guard, certificates, guard, guard_cluster
from elastic.launcher.flags.ray_options import RayOptions, ray_options
from elastic.launcher.flags.script import check_command
from elastic.launcher.flags.values import (
    addresses,
    choice,
    folder,
    host,
    port,
    ranks,
    read_profile,
    seconds,
    signals,
    size,
    slug,
    store,
    streams,
    whole,
)
from elastic.launcher.flags.waiting import heartbeat, metadata_services, notices, silence
from elastic.planning.cost.profile import Link, Profile
from elastic.planning.plan.units import duration_of, rate_of

STATIC_PORT, DYNAMIC_PORT = 29500, 29400
"""torchrun's default ports."""
LOOPBACK = "127.0.0.1"


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


def request(args: argparse.Namespace, environ: Mapping[str, str]) -> Request:
    """Read and check all flags of `elastic run`. Raises FieldError at the first wrong one."""
    command = check_command(args)
    low, high = _nnodes(args.nnodes)
    ray = ray_options(args)
    standalone = ray is None and _standalone(args, high)
    _check_rest(args)
    nproc = _nproc(args.nproc_per_node, environ)
    token = secrets.token_hex(3)
    job_id = token if args.rdzv_id == "none" else f"{slug(args.rdzv_id)}-{token}"
    run_dir, in_place = _run_dir(args, token)
    checkpoints = folder("--checkpoint-dir", args.checkpoint_dir) or run_dir / "checkpoints"
    conf = _conf(args.rdzv_conf)
    coordinator = "" if standalone or (ray and not args.rdzv_endpoint) else _endpoint(args)
    secured = guard_cluster(args, environ) if ray else guard(args, environ, coordinator, standalone)
    certs, certs_name = certificates(args, secured, run_dir)
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
        run_id=job_id if standalone and args.rdzv_id == "none" else args.rdzv_id,
        rdzv_conf=tuple(conf.items()),
        master_addr=LOOPBACK if standalone else "" if ray else _master_addr(args),
        local_addr=args.local_addr or "",
        backup=_backup(args.backup),
        accumulate=_accumulate(args.accumulate),
        pipelines=args.pipelines,
        schedule=args.schedule,
        vault_memory_bytes=size("--vault-memory", args.vault_memory) if args.vault_memory else 0,
        compress=args.compress,
        resume=_resume(args.resume, checkpoints),
        max_restarts=whole("--max-restarts", args.max_restarts),
        monitor_interval_s=seconds("--monitor-interval", args.monitor_interval),
        shutdown_timeout_s=seconds("--shutdown-timeout", _shutdown(args, environ)),
        store=store(args),
        coordinators=whole("--coordinators", args.coordinators),
        heartbeat_s=heartbeat(args, high),
        lease_s=silence(args),
        notices=notices(args, standalone),
        metadata_services=metadata_services(environ),
        grace_s=seconds("--grace", args.grace),
        metrics_port=-1 if args.metrics_port is None else whole("--metrics-port", args.metrics_port),
        metrics_host=host("--metrics-host", args.metrics_host),
        log_dir=str(folder("--log-dir", args.log_dir) or run_dir / "logs"),
        redirects=streams("--redirects", args.redirects, nproc),
        tee=streams("--tee", args.tee, nproc),
        log_line_prefix=_prefix(args, environ),
        local_ranks_filter=ranks(args.local_ranks_filter),
        role=args.role,
        virtual_local_rank=args.virtual_local_rank,
        profile=_profile(args),
        emulate=args.emulate is not None,
        preflight=args.preflight,
        quarantine_s=seconds("--quarantine", args.quarantine),
        link=_link(args.link),
        certs=certs,
        certs_name=certs_name,
        faults=_faults(args.fault),
        **_of_nodes(args, standalone),
    )
    return Request(
        config=config,
        nodes=() if ray else _names(args, standalone, _at_start(config) if standalone else high),
        hosts=True if ray else _hosts(args, standalone, conf),
        signals=signals(args.signals_to_handle),
        console_events=args.event_log_handler == "console",
        in_place=in_place,
        ray=ray,
        guard=secured,
    )


def _of_nodes(args: argparse.Namespace, standalone: bool) -> dict[str, Any]:
    """What may differ between this machine's nodes."""

    def given(flag: str, text: str) -> tuple[str, ...]:
        return _domains(flag, text, standalone)

    return {
        "domains": given("--domain", args.domain),
        "devices": given("--device", args.device),
        "lifetimes_s": tuple(seconds("--lifetime", text) for text in given("--lifetime", args.lifetime)),
        "node_memories_bytes": tuple(
            size("--node-memory", text) for text in given("--node-memory", args.node_memory)
        ),
    }


# ---- who takes part ----


def _nnodes(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d{1,6}(:\d{1,6})?", text):
        raise FieldError("--nnodes", text, "a number of nodes, or MIN:MAX as in 2:4")
    low, _, high = text.partition(":")
    return int(low), int(high or low)


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


def _standalone(args: argparse.Namespace, high: int) -> bool:
    """As torchrun: asked for, or one node and no rendezvous given."""
    choice("--rdzv-backend", args.rdzv_backend, ("static", "c10d", "elastic"))
    static = args.rdzv_backend == "static"
    alone = high == 1 and static and not args.rdzv_endpoint and args.master_port is None
    if not args.standalone and not alone and not static and not args.rdzv_endpoint:
        raise FieldError("--rdzv-endpoint", "", f"--rdzv-backend {args.rdzv_backend} needs HOST:PORT")
    return bool(args.standalone or alone)


def _endpoint(args: argparse.Namespace) -> str:
    if args.rdzv_endpoint:
        default = STATIC_PORT if args.rdzv_backend == "static" else DYNAMIC_PORT
        return addresses("--rdzv-endpoint", args.rdzv_endpoint, default)
    number = STATIC_PORT if args.master_port is None else port("--master-port", args.master_port)
    return f"{host('--master-addr', args.master_addr)}:{number}"


def _master_addr(args: argparse.Namespace) -> str:
    """Fixed by the user under static rendezvous; else "", which is rank 0's host."""
    return _endpoint(args).rpartition(":")[0].strip("[]") if args.rdzv_backend == "static" else ""


def _at_start(config: JobConfig) -> int:
    """Local nodes to start with: the maximum, but room is left for nodes that join where none leaves before."""
    kinds = [spec.kind for spec in config.faults]
    joins = kinds.count(FaultKind.JOIN)
    leaving = sum(kind in (FaultKind.KILL, FaultKind.DRAIN, FaultKind.PARTITION) for kind in kinds)
    return max(config.min_nodes, config.max_nodes - max(0, joins - leaving))


def _names(args: argparse.Namespace, standalone: bool, high: int) -> tuple[str, ...]:
    rank = whole("--node-rank", args.node_rank)
    if standalone:
        return tuple(f"node{i}" for i in range(high))
    if args.rdzv_backend == "static":
        if rank >= high:
            raise FieldError("--node-rank", rank, f"from 0 to {high - 1}, as --nnodes says")
        return (f"node{rank}",)
    return (f"{slug(socket.gethostname())}-{secrets.token_hex(2)}",)


def _hosts(args: argparse.Namespace, standalone: bool, conf: Mapping[str, str]) -> bool | None:
    if standalone:
        return True
    if "is_host" in conf:
        return conf["is_host"].lower() in ("1", "true", "yes", "y", "t")
    if args.rdzv_backend == "static":
        return whole("--node-rank", args.node_rank) == 0
    return None


def _conf(text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    bad = [key for key, equals, value in pairs if not (key.strip() and equals and value.strip())]
    if bad:
        raise FieldError("--rdzv-conf", text, "KEY=VALUE,KEY=VALUE")
    conf = {key.strip(): value.strip() for key, _, value in pairs}
    words = ("1", "true", "yes", "y", "t", "0", "false", "no", "n", "f")
    if conf.get("is_host", "true").lower() not in words:
        raise FieldError("--rdzv-conf is_host", conf["is_host"], "true or false")
    return conf


def _domains(flag: str, text: str, standalone: bool) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    if any(not name for name in names):
        raise FieldError(flag, text, "one value, or several separated by commas, none of them empty")
    if len(names) > 1 and not standalone:
        raise FieldError(flag, text, "one value for this node; several go with --standalone")
    return names


def _profile(args: argparse.Namespace) -> Profile | None:
    """The profile to plan by, or None."""
    if args.profile is not None and args.emulate is not None:
        raise FieldError("--emulate", args.emulate, "it names the profile already: leave --profile out")
    flag = "--profile" if args.emulate is None else "--emulate"
    text = args.profile if args.emulate is None else args.emulate
    return None if text is None else read_profile(flag, text)


# ---- directories ----


def _run_dir(args: argparse.Namespace, token: str) -> tuple[Path, bool]:
    """(run directory, whether it was used before)."""
    if args.run_dir is None:
        return folder("--run-dir", f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{token}") or Path(), False
    path = folder("--run-dir", args.run_dir)
    assert path is not None
    if not path.exists() or not any(path.iterdir()):
        return path, False
    if args.resume is None:
        raise FieldError("--run-dir", args.run_dir, "it is not empty; give a new one, or --resume auto")
    if not (path / FILE).exists():
        raise FieldError(
            "--run-dir", args.run_dir, f"it holds no {FILE}, so it is no run to resume; give another"
        )
    try:
        load_config(path)
    except UsageError as error:
        raise FieldError("--run-dir", args.run_dir, f"it cannot be resumed: {error}") from error
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


# ---- what remains ----


def _check_rest(args: argparse.Namespace) -> None:
    """Flags that decide nothing here, but whose values are still checked."""
    choice("--event-log-handler", args.event_log_handler, ("null", "console"))
    choice("--start-method", args.start_method, ("spawn", "fork", "forkserver"))
    if args.numa_binding is not None:
        raise FieldError(
            "--numa-binding", args.numa_binding, "not available yet: use numactl and --no-python"
        )
    if args.local_addr is not None:
        host("--local-addr", args.local_addr)
    if not args.role.strip():
        raise FieldError("--role", args.role, "a name")
    if not args.rdzv_id.strip():
        raise FieldError("--rdzv-id", args.rdzv_id, "a name")


def _backup(text: str) -> str:
    return "none+none" if text in ("none", "off") else text


def _link(text: str | None) -> Link:
    """bandwidth=RATE latency=TIME, either or both, in any order."""
    if text is None:
        return Link()
    given: dict[str, str] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if name not in ("bandwidth", "latency") or not equals or name in given:
            raise FieldError(
                "--link", text, 'bandwidth=RATE and latency=TIME, as "bandwidth=1Gbit latency=1ms"'
            )
        given[name] = value
    rate = rate_of("--link bandwidth", given["bandwidth"]) if "bandwidth" in given else 0.0
    latency = duration_of("--link latency", given["latency"]) if "latency" in given else 0.0
    if not rate and not latency:
        raise FieldError("--link", text, 'a bandwidth or a latency, as "bandwidth=1Gbit latency=1ms"')
    return Link(rate, latency)


def _accumulate(text: str) -> Accumulate:
    return Accumulate(choice("--accumulate", text, tuple(mode.value for mode in Accumulate)))


def _faults(texts: list[str]) -> tuple[FaultSpec, ...]:
    return tuple(parse_fault(text) for text in texts)


def _prefix(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    given: str | None = args.log_line_prefix_template
    return given if given is not None else environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", LOG_PREFIX)


def _shutdown(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    given: str | None = args.shutdown_timeout
    return given if given is not None else environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
