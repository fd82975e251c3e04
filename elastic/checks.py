"""What must hold of a job's configuration, flag by flag."""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING

from elastic.core.protocol import compression
from elastic.core.protocol.fault_spec import FaultKind
from elastic.core.protocol.notice_source import SourceKind
from elastic.domain.errors import FieldError
from elastic.planning.plan.schemes import refuse_useless

if TYPE_CHECKING:
    from elastic.config import JobConfig

PREFLIGHTS = ("on", "off", "strict")
SCHEDULES = ("auto", "1f1b", "interleaved", "zero-bubble")


def check(config: JobConfig) -> None:
    """Raise FieldError, naming the command line's flag, for the first value that is wrong."""
    _check_size(config)
    _check_times(config)
    _check_notices(config)
    _check_schemes(config)
    _check_streams(config)
    _check_devices(config)
    _check_lifetimes(config)
    _check_faults(config)
    _check_coordinators(config)


def _check_size(config: JobConfig) -> None:
    nodes = f"{config.min_nodes}:{config.max_nodes}"
    if not 1 <= config.min_nodes <= config.max_nodes:
        raise FieldError("--nnodes", nodes, "N or MIN:MAX with 1 <= MIN <= MAX")
    if config.max_nodes > 100_000:
        raise FieldError("--nnodes", nodes, "at most 100000 nodes")
    if not 1 <= config.nproc_per_node <= 1024:
        raise FieldError("--nproc-per-node", config.nproc_per_node, "from 1 to 1024 workers a node")
    if config.max_restarts < 0:
        raise FieldError("--max-restarts", config.max_restarts, "a whole number from 0 up")
    memories = config.node_memories_bytes
    if any(memory < 1 for memory in memories):
        raise FieldError("--node-memory", ",".join(map(str, memories)), "bytes, or a size as 16GiB")
    if config.standalone and len(memories) not in (0, 1, config.max_nodes):
        remedy = f"one size, or one for each of the {config.max_nodes} nodes"
        raise FieldError("--node-memory", ",".join(map(str, memories)), remedy)
    if not -1 <= config.metrics_port <= 65535 - config.max_nodes - config.coordinators + 1:
        remedy = "0 (any free ports), or a port that leaves room for one more a node"
        raise FieldError("--metrics-port", config.metrics_port, remedy)
    if not 0 <= config.master_port <= 65535:
        raise FieldError("--master-port", config.master_port, "a port from 1 to 65535")
    if config.standalone and len(config.domains) not in (0, 1, config.max_nodes):
        raise FieldError(
            "--domain", ",".join(config.domains), f"one name, or one for each of the {config.max_nodes} nodes"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", config.job_id):
        raise FieldError("--rdzv-id", config.job_id, "letters, digits, '.', '_' and '-', at most 64")


def _check_times(config: JobConfig) -> None:
    for flag, value, low, high in (
        ("--monitor-interval", config.monitor_interval_s, 0.001, 60.0),
        ("--shutdown-timeout", config.shutdown_timeout_s, 0.0, 86400.0),
        ("--silence", config.lease_s, 0.06, 86400.0),
        ("--heartbeat", config.heartbeat_s, 0.01, 3600.0),
        ("--quarantine", config.quarantine_s, 0.1, 86400.0),
        ("--grace", config.grace_s, 0.0, 86400.0),
    ):
        if not low <= value <= high:
            raise FieldError(flag, value, f"seconds from {low:g} to {high:g}")
    if config.lease_s < 2 * config.heartbeat_s:
        remedy = f"at most half of the {config.lease_s:g} s of silence that are tolerated"
        raise FieldError("--heartbeat", config.heartbeat_s, remedy)


def _check_notices(config: JobConfig) -> None:
    if config.standalone and config.grace_s:
        raise FieldError(
            "--grace", config.grace_s, "it goes with several hosts; --standalone ends as a whole"
        )
    hooks = [one for one in config.notices if one.kind is SourceKind.HTTP and not one.where.endswith(":0")]
    if config.standalone and hooks and config.local_nodes > 1:
        raise FieldError("--notice", str(hooks[0]), "http:0 with several local nodes: each takes a free port")
    for cloud, where in config.metadata_services:
        if not re.fullmatch(r"(http://)?[A-Za-z0-9\[][^\s?#@]*", where):
            raise FieldError(f"metadata service of {cloud}", where, "http://HOST[:PORT]")


def _check_schemes(config: JobConfig) -> None:
    if config.backup != "auto":
        refuse_useless(config.backup, config.pipelines)
    if config.compress not in compression.MODES:
        raise FieldError("--compress", config.compress, f"one of {', '.join(compression.MODES)}")
    if config.preflight not in PREFLIGHTS:
        raise FieldError("--preflight", config.preflight, f"one of {', '.join(PREFLIGHTS)}")
    if config.schedule not in SCHEDULES:
        raise FieldError("--schedule", config.schedule, f"one of {', '.join(SCHEDULES)}")
    if config.pipelines != "auto" and not re.fullmatch(r"[1-9]\d{0,4}(\+[1-9]\d{0,4})*", config.pipelines):
        raise FieldError(
            "--pipelines", config.pipelines, "auto, a number of pipelines as 2, or their depths as 2+2"
        )


def _check_streams(config: JobConfig) -> None:
    for flag, values in (("--redirects", config.redirects), ("--tee", config.tee)):
        if any(value not in (0, 1, 2, 3) for value in values):
            raise FieldError(flag, values, "0 (none), 1 (stdout), 2 (stderr) or 3 (both)")
        if len(values) not in (1, config.nproc_per_node):
            raise FieldError(
                flag, values, f"one value, or one for each of {config.nproc_per_node} local ranks"
            )
    bad = [rank for rank in config.local_ranks_filter if not 0 <= rank < config.nproc_per_node]
    if bad:
        raise FieldError("--local-ranks-filter", bad[0], f"local ranks from 0 to {config.nproc_per_node - 1}")
    names = {"node": "", "rank": "", "local_rank": "", "role_name": ""}
    try:
        string.Template(config.log_line_prefix).substitute(names)
    except (KeyError, ValueError):
        raise FieldError(
            "--log-line-prefix-template",
            config.log_line_prefix,
            "it may use ${node}, ${rank}, ${local_rank}, ${role_name}",
        ) from None


def _check_devices(config: JobConfig) -> None:
    given = ",".join(config.devices)
    if config.devices and config.profile is None:
        raise FieldError(
            "--device", given, "device types are those of a profile: give --profile or --emulate"
        )
    if config.standalone and len(config.devices) not in (0, 1, config.max_nodes):
        raise FieldError("--device", given, f"one type, or one for each of the {config.max_nodes} nodes")
    for name in config.devices:
        assert config.profile is not None
        known = ", ".join(device.name for device in config.profile.devices)
        if name not in {device.name for device in config.profile.devices}:
            raise FieldError("--device", name, f"the profile of {config.profile.model} knows {known}")
    if config.emulate and config.profile is None:
        raise FieldError("--emulate", "on", "it needs a profile")
    if config.emulate and config.profile is not None and config.profile.tp != 1:
        raise FieldError(
            "--emulate", f"tp {config.profile.tp}", "a profile of layers that are not split (tp 1)"
        )


def _check_lifetimes(config: JobConfig) -> None:
    given = ",".join(f"{value:g}" for value in config.lifetimes_s)
    if any(not 0 <= value <= 1e9 for value in config.lifetimes_s):
        raise FieldError("--lifetime", given, "seconds from 0 (unknown) up")
    if config.standalone and len(config.lifetimes_s) not in (0, 1, config.max_nodes):
        raise FieldError("--lifetime", given, f"one value, or one for each of the {config.max_nodes} nodes")


def _check_faults(config: JobConfig) -> None:
    joins = sum(spec.kind is FaultKind.JOIN for spec in config.faults)
    names = {f"node{i}" for i in range(config.local_nodes + joins)}
    for spec in config.faults:
        if config.standalone and spec.node and spec.node not in names:
            known = (
                f"this job has node0 to node{len(names) - 1}"
                if len(names) > 1
                else "this job has node0 alone"
            )
            raise FieldError("--fault node", spec.node, known)
        if spec.worker is not None and spec.worker >= config.nproc_per_node:
            raise FieldError("--fault worker", spec.worker, f"a local rank below {config.nproc_per_node}")
        if spec.kind is FaultKind.SLOW_LINK and not config.link.bytes_per_s:
            remedy = 'a link that is made slower needs a speed: give --link, as "bandwidth=1Gbit"'
            raise FieldError("--fault", spec.kind.value, remedy)


def _check_coordinators(config: JobConfig) -> None:
    count = config.coordinators
    if not 1 <= count <= 9:
        raise FieldError("--coordinators", count, "from 1 to 9")
    if count > 1 and not config.standalone:
        raise FieldError("--coordinators", count, "it goes with --standalone; else start one on each machine")
    if count > 1 and not config.store.shared:
        raise FieldError(
            "--coordinators", count, "several need a store that they share: give --store etcd://..."
        )
    if config.store.shared and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", config.name):
        raise FieldError("--rdzv-id", config.name, "letters, digits, '.', '_' and '-', at most 64")
    if config.store.shared and not config.standalone and config.run_id == "none":
        raise FieldError(
            "--rdzv-id", config.run_id, "with --store, machines find the job by this name: give one"
        )
