"""The job's configuration: one frozen object, validated once, saved as RUN_DIR/config.json.

`elastic run` writes it; coordinator and agents load it. Nothing below the command line reads flags or
`PET_*` variables.
"""

from __future__ import annotations

import os
import re
import string
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic.core.protocol import compression
from elastic.core.protocol.fault_spec import FaultKind, FaultSpec
from elastic.core.protocol.notice_source import NoticeSource, SourceKind
from elastic.core.protocol.store_spec import StoreSpec
from elastic.core.protocol.timeouts import SILENCE_S, Timeouts, budget
from elastic.domain import codec
from elastic.domain.errors import FieldError, UsageError
from elastic.domain.types import Accumulate
from elastic.planning.cost.profile import Link, Profile
from elastic.planning.plan.schemes import refuse_useless

FILE = "config.json"
LOG_PREFIX = "[${node}:${rank}]: "
STDOUT, STDERR = 1, 2
"""Bits of `redirects` and `tee`, as torchrun counts them."""
_RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
PREFLIGHTS = ("on", "off", "strict")
SCHEDULES = ("auto", "1f1b", "interleaved", "zero-bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """What a worker runs."""

    script: str
    """Script file, module (with `module`) or executable (without `python`)."""
    args: tuple[str, ...] = ()
    module: bool = False
    python: bool = True
    run_path: bool = False
    """Run the script through runpy.run_path in its interpreter."""

    def __post_init__(self) -> None:
        if not self.script:
            raise FieldError("SCRIPT", self.script, "a script, or -m and a module")
        if self.module and not (self.python and not self.run_path):
            raise FieldError(
                "-m", self.script, "it does not go with --no-python or --run-path: leave one out"
            )

    def argv(self, python: str = "") -> tuple[str, ...]:
        """The worker's command line; `python` is the interpreter (default: this one)."""
        python = python or sys.executable
        if self.run_path:
            return (python, "-u", "-c", _RUN_PATH, self.script, *self.args)
        if not self.python:
            return (self.script, *self.args)
        return (python, "-u", *(("-m",) if self.module else ()), self.script, *self.args)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """Everything that is fixed for a whole job. Raises FieldError, naming the command line's flag, when
    it is wrong."""

    job_id: str
    """Names the job in logs, memory and the store; new for every start, also with --resume."""
    run_dir: str
    """Absolute directory of this run: config.json, events.jsonl, summary.json, logs."""
    memory_dir: str
    """Directory of this job alone, in shared memory where there is any: vaults, slots, stores. Removed at
    the end."""
    checkpoint_dir: str
    """Absolute directory of durable checkpoints."""
    command: WorkerCommand
    min_nodes: int = 1
    """Nodes without which the job waits."""
    max_nodes: int = 1
    """Nodes used at most; more are kept as hot spares."""
    nproc_per_node: int = 1
    """Workers a node."""
    local_nodes: int = 1
    """Nodes that this machine stands for."""
    standalone: bool = False
    """All nodes are local and the coordinator is embedded."""
    coordinator: str = ""
    """host:port of the coordinator, of several separated by commas; "": chosen at start and written to
    RUN_DIR/coordinator.json."""
    coordinators: int = 1
    """Coordinators that a standalone run starts; one of them leads."""
    store: StoreSpec = field(default_factory=StoreSpec)
    """Where coordinators keep what they must not lose."""
    run_id: str = "none"
    """torchrun's --rdzv-id, as the workers see it."""
    rdzv_conf: tuple[tuple[str, str], ...] = ()
    """torchrun's --rdzv-conf."""
    master_addr: str = "127.0.0.1"
    """What workers get as MASTER_ADDR under static rendezvous; else rank 0's host."""
    master_port: int = 0
    """MASTER_PORT under static rendezvous; 0: a free port at every launch."""
    local_addr: str = ""
    """Address under which other nodes reach this one; "": found from the route to the coordinator."""
    backup: str = "auto"
    """auto, or GRADIENTS+STATE: see `elastic.planning.plan.schemes`."""
    accumulate: Accumulate = Accumulate.FAST
    pipelines: str = "auto"
    """auto, a number of pipelines, or their depths as in 3+1."""
    schedule: str = "auto"
    """auto, 1f1b, interleaved or zero-bubble."""
    vault_memory_bytes: int = 0
    """Most bytes of other nodes' copies that a node keeps; 0: what shared memory there is."""
    node_memories_bytes: tuple[int, ...] = ()
    """Memory of each local node that the plan may use, in order; one entry: of all; empty: unlimited."""
    resume: str = ""
    """Checkpoint directory to start from; "": start anew."""
    max_restarts: int = 0
    """Group restarts of a script that does not use elastic. Changes of membership do not count."""
    monitor_interval_s: float = 0.1
    """Longest time between two looks at the processes."""
    shutdown_timeout_s: float = 30.0
    """From SIGTERM to SIGKILL."""
    heartbeat_s: float = 0.5
    lease_s: float = SILENCE_S
    """A node that is silent this long is lost; all other limits follow from it (`timeouts`)."""
    notices: tuple[NoticeSource, ...] = ()
    """Where the nodes of this machine hear that they go."""
    metadata_services: tuple[tuple[str, str], ...] = ()
    """(cloud, address) of metadata services that stand elsewhere than where the cloud has them."""
    grace_s: float = 0.0
    """Several hosts: SIGTERM is a notice, so many seconds ahead; 0: it ends the job on this machine."""
    metrics_port: int = -1
    """Where the coordinator serves metrics, the agents of this machine at the ports after it; 0: all at free ones;
    -1: nobody does."""
    metrics_host: str = "127.0.0.1"
    """Address of this machine under which metrics are served."""
    log_dir: str = ""
    """Absolute directory of the workers' logs; "": RUN_DIR/logs."""
    redirects: tuple[int, ...] = (0,)
    """For each local rank: streams (1 stdout, 2 stderr, 3 both) that go to the log file alone."""
    tee: tuple[int, ...] = (0,)
    """For each local rank: streams that go to the console with a prefix on every line, and to the log
    file."""
    log_line_prefix: str = LOG_PREFIX
    """Template of that prefix: ${node} ${rank} ${local_rank} ${role_name}."""
    local_ranks_filter: tuple[int, ...] = ()
    """Local ranks whose output reaches the console; (): all. Log files are always written."""
    role: str = "default"
    virtual_local_rank: bool = False
    """Every worker sees LOCAL_RANK=0 and one device."""
    domains: tuple[str, ...] = ()
    """Failure domain of each local node, in order; one entry: of all."""
    devices: tuple[str, ...] = ()
    """Device type of each local node, as the profile names it, in order; one entry: of all."""
    lifetimes_s: tuple[float, ...] = ()
    """Seconds that each local node is expected to stay, in order (0: unknown); one entry: of all."""
    compress: str = "auto"
    """Copies between vaults: auto (where it pays), off or on (`elastic.core.protocol.compression`)."""
    link: Link = field(default_factory=Link)
    """How slow the links between local nodes are made."""
    preflight: str = "on"
    """What a node looks at before it joins: on, strict (warnings count, too) or off."""
    quarantine_s: float = 30.0
    """First quarantine of a node that fails again and again."""
    profile: Profile | None = None
    """What layers cost on which devices; None: the script's own figures."""
    emulate: bool = False
    """Workers wait the profiled times instead of computing."""
    certs: str = ""
    """Directory with ca.crt, tls.crt and tls.key of this machine; "": plain text. The join token is not in here."""
    certs_name: str = ""
    """Name that the certificates of the others must carry; "": the host that is dialled."""
    faults: tuple[FaultSpec, ...] = ()
    """Injected faults; the position of a fault is its number."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def name(self) -> str:
        """Name of the job in a shared store: the same on every machine."""
        return self.job_id if self.standalone else self.run_id

    def log_path(self, node: str, restart: int, local_rank: int) -> Path:
        """Directory of one worker's stdout.log, stderr.log and error.json."""
        return Path(self.log_dir or Path(self.run_dir, "logs")) / node / str(restart) / str(local_rank)

    @property
    def directories(self) -> tuple[tuple[str, Path], ...]:
        """(role, path) of what a node writes to."""
        return (
            ("checkpoints", Path(self.checkpoint_dir)),
            ("run", Path(self.run_dir)),
            ("memory", Path(self.memory_dir)),
        )

    def domain(self, index: int) -> str:
        """Failure domain of local node `index`."""
        if not self.domains:
            return ""
        return self.domains[index % len(self.domains)]

    def device(self, index: int) -> str:
        """Device type of local node `index`; "": the profile's first."""
        if not self.devices:
            return ""
        return self.devices[index % len(self.devices)]

    def node_memory_bytes(self, index: int) -> int:
        """Memory of local node `index` that the plan may use; 0: unlimited."""
        return (
            self.node_memories_bytes[index % len(self.node_memories_bytes)] if self.node_memories_bytes else 0
        )

    def lifetime_s(self, index: int) -> float:
        """Seconds that local node `index` is expected to stay; 0: unknown."""
        return self.lifetimes_s[index % len(self.lifetimes_s)] if self.lifetimes_s else 0.0

    @property
    def timeouts(self) -> Timeouts:
        """Every limit on waiting, as far as it does not follow from what is measured."""
        return budget(self.lease_s, heartbeat_s=self.heartbeat_s)

    def save(self) -> Path:
        """Write RUN_DIR/config.json, whole or not at all."""
        path = Path(self.run_dir) / FILE
        draft = path.with_suffix(".tmp")
        draft.write_text(codec.dumps(self) + "\n")
        os.replace(draft, path)
        return path

    def of(self, **changes: object) -> JobConfig:
        """A copy with other values, validated again."""
        return replace(self, **changes)  # type: ignore[arg-type]


def load_config(run_dir: str | Path) -> JobConfig:
    """Read RUN_DIR/config.json. Raises UsageError when there is none, FieldError when it is not one of
    ours."""
    path = Path(run_dir) / FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}): give the directory of a run") from error
    return codec.loads(JobConfig, text)


def claim_fault(run_dir: str | Path, number: int) -> bool:
    """True once per run and fault: for the first process, on whichever node of this machine, that asks.

    Faults are claimed right before they are carried out, so that workers which are started again do not
    repeat them.
    """
    folder = Path(run_dir) / "faults"
    folder.mkdir(exist_ok=True)
    try:
        os.close(os.open(folder / f"{number}.fired", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def _check(config: JobConfig) -> None:
    """Raise FieldError, naming the command-line flag, for the first invalid value."""
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
