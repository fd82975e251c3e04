"""The job's configuration: one frozen object, validated once, saved as RUN_DIR/config.json.

`elastic run` writes the file; coordinators and agents load it. Code below the command line reads
neither flags nor `PET_*` variables.
"""

from __future__ import annotations

import os
import re
import string
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic.core.protocol.fault_spec import FaultKind, FaultSpec
from elastic.core.protocol.notice_source import NoticeSource, SourceKind
from elastic.core.protocol.store_spec import StoreSpec
from elastic.core.protocol.timeouts import SILENCE_S, Timeouts, budget
from elastic.domain import codec
from elastic.domain.errors import FieldError, UsageError
from elastic.domain.types import VERIFY_EVERY, Accumulate, OnNonfinite
from elastic.planning.cost.profile import LinkProfile, Profile
from elastic.planning.plan.schemes import refuse_useless
from elastic.planning.plan.shape import parse_shape

FILE = "config.json"
LOG_PREFIX = "[${node}:${rank}]: "
STDOUT, STDERR = 1, 2
"""Bits of `redirects` and `tee`, with torchrun's values."""
_RUN_PATH = (
    "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_RULE = "letters, digits, '.', '_' and '-', at most 64"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
LOG_FORMATS = ("text", "json")
PREFLIGHTS = ("on", "off", "strict")
SCHEDULES = ("auto", "1f1b", "interleaved", "zero-bubble")


def is_url(location: str) -> bool:
    """Return whether the location of checkpoints is a URL, and not the path of a directory."""
    return _URL.match(location) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """The program that every worker runs."""

    script: str
    """Path of a script; with `module` the name of a module, without `python` an executable."""
    args: tuple[str, ...] = ()
    module: bool = False
    python: bool = True
    run_path: bool = False
    """Whether the script runs through runpy.run_path in the worker's interpreter."""

    def __post_init__(self) -> None:
        if not self.script:
            raise FieldError("SCRIPT", self.script, "a script, or -m and a module")
        if self.module and not (self.python and not self.run_path):
            remedy = "it does not go with --no-python or --run-path: leave one out"
            raise FieldError("-m", self.script, remedy)

    def argv(self, python: str = "") -> tuple[str, ...]:
        """Return the worker's command line. `python`: the interpreter; "": that of this process."""
        python = python or sys.executable
        if self.run_path:
            return (python, "-u", "-c", _RUN_PATH, self.script, *self.args)
        if not self.python:
            return (self.script, *self.args)
        return (python, "-u", *(("-m",) if self.module else ()), self.script, *self.args)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """Settings that are fixed for a whole job.

    Raises FieldError, which names the flag, if a value is wrong.
    """

    job_id: str
    """Name of the job in logs, memory and the store; new per start, also with --resume."""
    run_dir: str
    """Absolute directory of this run: config.json, events.jsonl, summary.json, logs."""
    memory_dir: str
    """Directory of the job's vaults and stores, in shared memory if possible; finally removed."""
    checkpoint_dir: str
    """Absolute directory of durable checkpoints, or the URL of one in an object store."""
    command: WorkerCommand
    min_nodes: int = 1
    """Least number of nodes; the job waits until it has them."""
    max_nodes: int = 1
    """Most nodes that train; further nodes are hot spares."""
    nproc_per_node: int = 1
    """Workers per node."""
    local_nodes: int = 1
    """Number of nodes on this machine."""
    standalone: bool = False
    """Whether all nodes are local and the coordinator is embedded."""
    coordinator: str = ""
    """host:port of the coordinator, or several separated by commas; "": chosen at start and written
    to RUN_DIR/coordinator.json."""
    coordinators: int = 1
    """Number of coordinators of a standalone run; one of them leads."""
    store: StoreSpec = field(default_factory=StoreSpec)
    """Location of the coordinators' durable state."""
    run_id: str = "none"
    """torchrun's --rdzv-id, which the workers see."""
    rdzv_conf: tuple[tuple[str, str], ...] = ()
    """Keys and values of torchrun's --rdzv-conf."""
    master_addr: str = "127.0.0.1"
    """MASTER_ADDR of the workers under static rendezvous; "": the host of rank 0."""
    master_port: int = 0
    """MASTER_PORT under static rendezvous; 0: the launcher chooses a free port."""
    local_addr: str = ""
    """Address at which other machines reach this one; "": from the route to the coordinator."""
    backup: str = "auto"
    """auto, or GRADIENTS+STATE (`elastic.planning.plan.schemes`)."""
    accumulate: Accumulate = Accumulate.FAST
    verify_every: int = VERIFY_EVERY
    """Steps between two comparisons of the parameters of a layer's holders, with exact
    accumulation; 0: none."""
    on_nonfinite: OnNonfinite = OnNonfinite.STOP
    """Action in a step whose gradient norm is infinite or NaN."""
    pipelines: str = "auto"
    """auto, a number of pipelines, or the depth of each, as 3+1."""
    schedule: str = "auto"
    """auto, 1f1b, interleaved or zero-bubble."""
    vault_memory_bytes: int = 0
    """Most bytes of other nodes' copies in a vault; 0: as much as shared memory allows."""
    node_memories_bytes: tuple[int, ...] = ()
    """Memory of each local node that plans may use, or one value for all; (): no limit."""
    checkpoint_keep: int = 0
    """Number of newest checkpoints of the run that are kept; 0: all."""
    resume: str = ""
    """Location of checkpoints, or of one, to start from; "": start from scratch."""
    max_restarts: int = 0
    """Group restarts of a script that does not use elastic; membership changes do not count."""
    monitor_interval_s: float = 0.1
    """Longest interval between two checks of the processes."""
    shutdown_timeout_s: float = 30.0
    """Time from SIGTERM to SIGKILL."""
    heartbeat_s: float = 0.5
    lease_s: float = SILENCE_S
    """Silence after which a node is lost; the other limits follow from it (`timeouts`)."""
    notices: tuple[NoticeSource, ...] = ()
    """Sources of notices for the nodes of this machine."""
    metadata_services: tuple[tuple[str, str], ...] = ()
    """(cloud, address) of each metadata service that is not at its cloud's usual address."""
    grace_s: float = 0.0
    """Time to leave after SIGTERM, with several hosts; 0: SIGTERM ends the job on this machine."""
    metrics_port: int = -1
    """Port of the coordinator's metrics; this machine's agents use the ports after it. 0: any free
    ports; -1: no metrics."""
    metrics_host: str = "127.0.0.1"
    """Address of this machine for metrics."""
    coordinator_name: str = ""
    """Name of this machine's coordinator in logs and answers; "": coordinator, or coordinator-N."""
    log_dir: str = ""
    """Absolute directory of the workers' logs; "": RUN_DIR/logs."""
    log_format: str = "text"
    """Lines on the console: text for people, or json (`elastic.logs`)."""
    redirects: tuple[int, ...] = (0,)
    """Streams (1 stdout, 2 stderr, 3 both) only for the log file, per local rank or one for all."""
    tee: tuple[int, ...] = (0,)
    """Streams for the log file and, with a prefix per line, the console; as in `redirects`."""
    log_line_prefix: str = LOG_PREFIX
    """Template of the prefix of `tee`: ${node} ${rank} ${local_rank} ${role_name}."""
    local_ranks_filter: tuple[int, ...] = ()
    """Local ranks whose output reaches the console; (): all. Log files are always written."""
    role: str = "default"
    virtual_local_rank: bool = False
    """Whether every worker sees LOCAL_RANK=0 and one device."""
    domains: tuple[str, ...] = ()
    """Failure domain of each local node, or one value for all."""
    devices: tuple[str, ...] = ()
    """Device type of each local node, or one value for all, as the profile names it."""
    lifetimes_s: tuple[float, ...] = ()
    """Expected lifetime of each local node, or one value for all; 0: unknown."""
    peak_tflops: tuple[float, ...] = ()
    """Peak rate of a worker's device of each local node, or one value for all; 0: unknown."""
    compress: str = "auto"
    """Compression between vaults: auto, off or on (`elastic.core.protocol.compression`)."""
    link: LinkProfile = field(default_factory=LinkProfile)
    """Emulated speed of the links between local nodes."""
    preflight: str = "on"
    """Checks of a node before it joins: on, strict (warnings refuse it too) or off."""
    quarantine_s: float = 30.0
    """First quarantine of a node that fails repeatedly; later ones double."""
    profile: Profile | None = None
    """Costs of the layers per device type; None: the script's own figures."""
    emulate: bool = False
    """Whether workers wait for the times in `profile` instead of computing."""
    certs: str = ""
    """Directory with this machine's ca.crt, tls.crt and tls.key; "": no TLS. The join token is not
    part of the configuration."""
    certs_name: str = ""
    """Name that the certificates of other processes must carry; "": the host of the connection."""
    faults: tuple[FaultSpec, ...] = ()
    """Injected faults. The number of a fault is its index here."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def log_name(self) -> str:
        """Name of the job in JSON lines: that of --rdzv-id, if it has one."""
        return self.job_id if self.run_id == "none" else self.name

    @property
    def name(self) -> str:
        """Name of the job in a shared store, equal on all its machines."""
        return self.job_id if self.standalone else self.run_id

    def log_path(self, node: str, restart: int, local_rank: int) -> Path:
        """Return the directory of a worker's stdout.log, stderr.log and error.json."""
        return (
            Path(self.log_dir or Path(self.run_dir, "logs")) / node / str(restart) / str(local_rank)
        )

    @property
    def directories(self) -> tuple[tuple[str, Path], ...]:
        """(purpose, path) of each directory that a node writes to."""
        checkpoints = [] if is_url(self.checkpoint_dir) else [self.checkpoint_dir]
        return (
            *(("checkpoints", Path(path)) for path in checkpoints),
            ("run", Path(self.run_dir)),
            ("memory", Path(self.memory_dir)),
        )

    @property
    def standbys(self) -> bool:
        """Whether there may be several coordinators, one of which leads."""
        return self.store.shared and not (self.standalone and self.coordinators == 1)

    @property
    def timeouts(self) -> Timeouts:
        """All limits on waiting, before measurements change them."""
        return budget(self.lease_s, heartbeat_s=self.heartbeat_s)

    def save(self) -> Path:
        """Write RUN_DIR/config.json atomically; return its path."""
        path = Path(self.run_dir) / FILE
        draft = path.with_suffix(".tmp")
        draft.write_text(codec.dumps(self) + "\n")
        os.replace(draft, path)
        return path

    def of(self, **changes: object) -> JobConfig:
        """Return a copy with these fields changed, validated again."""
        return replace(self, **changes)  # type: ignore[arg-type]


def load_config(run_dir: str | Path) -> JobConfig:
    """Read RUN_DIR/config.json. Raises UsageError if it is missing, FieldError if it is wrong."""
    path = Path(run_dir) / FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}): give the directory of a run"
        ) from error
    try:
        return codec.loads(JobConfig, text)
    except FieldError as error:
        field = error.field.removeprefix(JobConfig.__name__).lstrip(".")
        what = f"{field}: {error.remedy}" if field else error.remedy
        remedy = f"the file is damaged ({what}); give the directory of another run"
        raise FieldError("--run-dir", str(path), remedy) from None


def claim_fault(run_dir: str | Path, number: int) -> bool:
    """Claim fault `number` of the run; return False if it was claimed on this machine before.

    A process claims a fault right before it carries it out, so that restarted workers do not repeat
    it.
    """
    mark = fault_mark(run_dir, number)
    mark.parent.mkdir(exist_ok=True)
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def fault_mark(run_dir: str | Path, number: int) -> Path:
    """Return the file that exists once fault `number` was claimed."""
    return Path(run_dir) / "faults" / f"{number}.fired"


def _check(config: JobConfig) -> None:
    """Raise FieldError for the first invalid value. The error names the flag of this value."""
    _check_size(config)
    _check_per_node(config)
    _check_times(config)
    _check_notices(config)
    _check_schemes(config)
    _check_streams(config)
    _check_devices(config)
    _check_faults(config)
    _check_coordinators(config)


def _check_size(config: JobConfig) -> None:
    nodes = f"{config.min_nodes}:{config.max_nodes}"
    if not 1 <= config.min_nodes <= config.max_nodes:
        raise FieldError("--nnodes", nodes, "N or MIN:MAX with 1 <= MIN <= MAX")
    if config.max_nodes > 100_000:
        raise FieldError("--nnodes", nodes, "at most 100000 nodes")
    if not 1 <= config.nproc_per_node <= 1024:
        raise FieldError(
            "--nproc-per-node", config.nproc_per_node, "from 1 to 1024 workers per node"
        )
    if any(memory < 1 for memory in config.node_memories_bytes):
        memories = ",".join(map(str, config.node_memories_bytes))
        raise FieldError("--node-memory", memories, "bytes, or a size as 16GiB")
    if not -1 <= config.metrics_port <= 65535 - config.max_nodes - config.coordinators + 1:
        remedy = "0 (any free ports), or a port with room for one more per node"
        raise FieldError("--metrics-port", config.metrics_port, remedy)


def _check_per_node(config: JobConfig) -> None:
    for flag, given, noun in (
        ("--node-memory", config.node_memories_bytes, "size"),
        ("--domain", config.domains, "name"),
        ("--device", config.devices, "type"),
        ("--lifetime", config.lifetimes_s, "value"),
        ("--peak-tflops", config.peak_tflops, "number"),
    ):
        text = ",".join(map(str, given))
        if not config.standalone and len(given) > 1:
            raise FieldError(flag, text, f"one {noun} for this node; several need --standalone")
        if len(given) not in (0, 1, config.max_nodes):
            remedy = f"one {noun}, or one for each of the {config.max_nodes} nodes"
            raise FieldError(flag, text, remedy)


def _check_times(config: JobConfig) -> None:
    for flag, value, low, high in (
        ("--monitor-interval", config.monitor_interval_s, 0.001, 60.0),
        ("--shutdown-timeout", config.shutdown_timeout_s, 0.0, 86400.0),
        ("--silence", config.lease_s, 0.06, 86400.0),
        ("--heartbeat", config.heartbeat_s, 0.01, 3600.0),
        ("--quarantine", config.quarantine_s, 0.1, 86400.0),
        ("--grace", config.grace_s, 0.0, 86400.0),
        *(("--lifetime", lifetime_s, 0.0, 1e9) for lifetime_s in config.lifetimes_s),
    ):
        if not low <= value <= high:
            raise FieldError(flag, value, f"seconds from {low:g} to {high:g}")
    if config.lease_s < 2 * config.heartbeat_s:
        remedy = f"at most half of the tolerated silence of {config.lease_s:g} s"
        raise FieldError("--heartbeat", config.heartbeat_s, remedy)


def _check_notices(config: JobConfig) -> None:
    if config.standalone and config.grace_s:
        remedy = "it goes with several hosts; --standalone ends as a whole"
        raise FieldError("--grace", config.grace_s, remedy)
    hooks = [
        source
        for source in config.notices
        if source.kind is SourceKind.HTTP and not source.where.endswith(":0")
    ]
    if config.standalone and hooks and config.local_nodes > 1:
        remedy = "http:0 with several local nodes: each takes a free port"
        raise FieldError("--notice", str(hooks[0]), remedy)
    for cloud, where in config.metadata_services:
        if not re.fullmatch(r"(http://)?[A-Za-z0-9\[][^\s?#@]*", where):
            raise FieldError(f"metadata service of {cloud}", where, "http://HOST[:PORT]")


def _check_schemes(config: JobConfig) -> None:
    if config.backup != "auto":
        refuse_useless(config.backup, config.pipelines)
    parse_shape(config.pipelines, "--pipelines")
    exact = config.accumulate is Accumulate.EXACT
    if exact and config.on_nonfinite is OnNonfinite.CONTINUE:
        remedy = "stop or skip with --accumulate exact, whose sums hold finite values only"
        raise FieldError("--on-nonfinite", config.on_nonfinite.value, remedy)


def _check_streams(config: JobConfig) -> None:
    for flag, values in (("--redirects", config.redirects), ("--tee", config.tee)):
        if len(values) not in (1, config.nproc_per_node):
            remedy = f"one value, or one for each of {config.nproc_per_node} local ranks"
            raise FieldError(flag, values, remedy)
    bad = [rank for rank in config.local_ranks_filter if not 0 <= rank < config.nproc_per_node]
    if bad:
        remedy = f"local ranks from 0 to {config.nproc_per_node - 1}"
        raise FieldError("--local-ranks-filter", bad[0], remedy)
    names = {"node": "", "rank": "", "local_rank": "", "role_name": ""}
    try:
        string.Template(config.log_line_prefix).substitute(names)
    except (KeyError, ValueError):
        remedy = "it may use ${node}, ${rank}, ${local_rank}, ${role_name}"
        raise FieldError("--log-line-prefix-template", config.log_line_prefix, remedy) from None


def _check_devices(config: JobConfig) -> None:
    profile = config.profile
    if profile is None:
        if config.devices:
            remedy = "device types are those of a profile: give --profile or --emulate"
            raise FieldError("--device", ",".join(config.devices), remedy)
        return
    known = [device.name for device in profile.devices]
    for name in config.devices:
        if name not in known:
            remedy = f"the profile of {profile.model} has {', '.join(known)}"
            raise FieldError("--device", name, remedy)
    if config.emulate and profile.tp != 1:
        remedy = "a profile of layers that are not split (tp 1)"
        raise FieldError("--emulate", f"tp {profile.tp}", remedy)


def _check_faults(config: JobConfig) -> None:
    joins = sum(spec.kind is FaultKind.JOIN for spec in config.faults)
    static = bool(config.coordinator and config.master_addr)
    named = config.standalone or static  # else agents have names of hosts
    number = config.local_nodes + joins if config.standalone else config.max_nodes
    names = {f"node{i}" for i in range(number)}
    for spec in config.faults:
        for role, node in (("node", spec.node), ("peer", spec.peer)):
            if named and node and node not in names:
                last = number - 1
                known = f"this job has node0 to node{last}" if last else "this job has only node0"
                raise FieldError(f"--fault {role}", node, known)
        if spec.peer and spec.peer == spec.node:
            raise FieldError("--fault peer", spec.peer, "another node than node=")
        if spec.worker is not None and spec.worker >= config.nproc_per_node:
            remedy = f"a local rank below {config.nproc_per_node}"
            raise FieldError("--fault worker", spec.worker, remedy)
        if spec.kind is FaultKind.CUT and config.standalone:
            remedy = "local nodes share an address: use several machines or network namespaces"
            raise FieldError("--fault", spec.kind.value, remedy)
        if spec.kind is FaultKind.SLOW_LINK and not config.link.bytes_per_s:
            remedy = 'a slow link needs a normal speed: give --link, as "bandwidth=1Gbit"'
            raise FieldError("--fault", spec.kind.value, remedy)


def _check_coordinators(config: JobConfig) -> None:
    count = config.coordinators
    if count > 1 and not config.standalone:
        remedy = "it goes with --standalone; else start one on each machine"
        raise FieldError("--coordinators", count, remedy)
    if count > 1 and not config.store.shared:
        remedy = "several coordinators need a shared store: give --store etcd://..."
        raise FieldError("--coordinators", count, remedy)
    if config.store.shared and not NAME.fullmatch(config.name):
        raise FieldError("--rdzv-id", config.name, NAME_RULE)
    if config.store.shared and not config.standalone and config.run_id == "none":
        remedy = "with --store, machines find the job by this name: give one"
        raise FieldError("--rdzv-id", config.run_id, remedy)
