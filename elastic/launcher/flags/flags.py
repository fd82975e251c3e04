"""The flags of `elastic run`: those of torchrun, with the same meanings, and elastic's own.

The environment variable PET_A_B replaces the default of --a-b, as for torchrun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import click
from click import Choice, IntRange
from click.core import ParameterSource

from elastic.command_line import TIME, Command, flag
from elastic.config import LOG_PREFIX, PREFLIGHTS, SCHEDULES
from elastic.core.protocol import compression
from elastic.domain.types import VERIFY_EVERY
from elastic.launcher.flags.ray_options import ADDRESS, RESOURCES
from elastic.launcher.flags.request import ETCD_BACKENDS
from elastic.launcher.flags.validators import (
    ACCUMULATE,
    BACKUP,
    BINDING,
    CERTS,
    CONF,
    FAULT,
    FILE,
    FOLDER,
    HOST,
    LINK,
    LOCAL_ADDR,
    LOCATION,
    NAME,
    NAMES,
    NODES,
    NONFINITE,
    PROFILE,
    RANKS,
    RATES,
    SHAPE,
    SIGNALS,
    SIZE,
    SIZES,
    SOURCES,
    TARGET,
    TIMES,
)

# fmt: off
TORCHRUN = (
    flag("--nnodes", type=NODES, default="1:1", help="number of nodes, or MIN:MAX"),
    flag("--nproc-per-node", metavar="N", default="1",
         help="workers per node: a number, auto, cpu or gpu"),
    flag("--rdzv-backend", type=Choice(["static", "c10d", "elastic", *ETCD_BACKENDS]),
         default="static",
         help="kind of rendezvous; c10d and elastic are the same here, etcd and etcd-v2 too with "
              "--standalone; --store keeps the state in etcd"),
    flag("--rdzv-endpoint", metavar="HOST:PORT,...",
         help="address of the coordinator, or of several; the machine that owns one starts it"),
    flag("--rdzv-id", type=NAME, default="none", help="name of the job, seen by the workers"),
    flag("--rdzv-conf", type=CONF,
         help="settings of the rendezvous; is_host=true|false says who starts the coordinator"),
    flag("--standalone", is_flag=True,
         help="embedded coordinator; every node is a local process group"),
    flag("--max-restarts", type=IntRange(0), default=0,
         help="group restarts of a script that does not use elastic"),
    flag("--monitor-interval", type=TIME, default="0.1",
         help="longest time between two checks of the processes, in seconds"),
    flag("--start-method", type=Choice(["spawn", "fork", "forkserver"]), default="spawn",
         help="accepted for torchrun; workers are always new processes"),
    flag("--event-log-handler", type=Choice(["null", "console"]), default="null",
         help="console prints every event; events.jsonl is always written"),
    flag("--role", type=NAME, default="default", help="role of the workers"),
    flag("--module", "-m", is_flag=True, help="SCRIPT is a module, run as python -m"),
    flag("--no-python", is_flag=True, help="SCRIPT is an executable of any kind"),
    flag("--run-path", is_flag=True, help="run SCRIPT, an absolute path, with runpy.run_path"),
    flag("--log-dir", type=FOLDER, help="directory of the workers' logs (default RUN_DIR/logs)"),
    flag("--redirects", "-r", metavar="STREAMS", default="0",
         help="streams only to log files: 0..3, or per local rank as 0:1,1:2"),
    flag("--tee", "-t", metavar="STREAMS", default="0",
         help="streams to log files and, with a prefix, to the console"),
    flag("--log-line-prefix-template", default=LOG_PREFIX,
         envvar=["PET_LOG_LINE_PREFIX_TEMPLATE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"],
         help="prefix of --tee: ${node} ${rank} ${local_rank} ${role_name}"),
    flag("--local-ranks-filter", type=RANKS,
         help="only these local ranks reach the console, as 0,1"),
    flag("--node-rank", type=IntRange(0), default=0,
         help="this node's rank; static rendezvous only"),
    flag("--master-addr", type=HOST, default="127.0.0.1",
         help="node rank 0's address; static rendezvous only"),
    flag("--master-port", type=IntRange(1, 65535), help="its port (29500); static rendezvous only"),
    flag("--local-addr", type=LOCAL_ADDR, help="address under which other nodes reach this one"),
    flag("--numa-binding", type=BINDING,
         help="not available yet: bind with numactl and --no-python"),
    flag("--signals-to-handle", type=SIGNALS, default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
         help="signals that end the job in order"),
    flag("--shutdown-timeout", type=TIME, default="30",
         envvar=["PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
         help="seconds from SIGTERM to SIGKILL"),
    flag("--virtual-local-rank", is_flag=True,
         help="every worker sees LOCAL_RANK=0 and one device"),
)

OURS = (
    flag("--log-format", type=Choice(["text", "json"]), default="text",
         help="console lines: text, or JSON objects with level, job, node and epoch"),
    flag("--run-dir", type=FOLDER,
         help="directory of this run (default ./runs/TIME-ID; ./runs/latest points at it)"),
    flag("--backup", type=BACKUP, default="auto",
         help="auto, none, or GRADIENTS+STATE: stream, stream:K, reduce, reduce:K, log or "
              "recompute, + snapshot, replica or replay:N, with /sharded after it where "
              "pipelines share optimizer state"),
    flag("--accumulate", type=ACCUMULATE, default="fast",
         help="gradient sums; exact is bit-identical whatever fails"),
    flag("--verify-every", type=IntRange(0), default=VERIFY_EVERY,
         help="steps between two comparisons of the replicas' parameters, with --accumulate "
              "exact; 0: never"),
    flag("--on-nonfinite", type=NONFINITE, default="stop",
         help="what to do if a gradient norm is infinite or NaN: end the job, leave the update "
              "out, or update"),
    flag("--pipelines", type=SHAPE, default="auto",
         help="auto, a number of pipelines, or their depths as 2+2"),
    flag("--schedule", type=Choice(SCHEDULES), default="auto",
         help="order of the micro-batches in a pipeline"),
    flag("--node-memory", type=SIZES,
         help="memory per worker of this node that the plan may use, as 16GiB; with --standalone "
              "one for each node, comma-separated"),
    flag("--vault-memory", type=SIZE,
         help="memory of a node for copies of other nodes, as 2GiB; further copies are refused"),
    flag("--compress", type=Choice(compression.MODES), default="auto",
         help="compression of copies between vaults; auto: where it pays"),
    flag("--checkpoint-dir", type=LOCATION,
         help="directory of durable checkpoints, or a URL such as s3://BUCKET/FOLDER "
              "(default RUN_DIR/checkpoints)"),
    flag("--checkpoint-keep", type=IntRange(0), metavar="N", default=0,
         help="keep the newest N checkpoints of this run, and remove older ones; 0: keep all"),
    flag("--resume", metavar="LOCATION",
         help="start from this checkpoint; auto: from the newest of this job in --checkpoint-dir, "
              "else of another one, if any"),
    flag("--domain", type=NAMES,
         help="failure domain of this node; with --standalone one for each, comma-separated"),
    flag("--profile", type=PROFILE, help="file of `elastic profile`, from which plans are made"),
    flag("--emulate", type=PROFILE,
         help="like --profile; workers wait for the profiled times instead of computing"),
    flag("--device", type=NAMES,
         help="device type of this node in the profile; with --standalone one for each, "
              "comma-separated"),
    flag("--lifetime", type=TIMES,
         help="expected seconds until this node leaves, 0: unknown; with --standalone one for "
              "each, comma-separated"),
    flag("--peak-tflops", type=RATES,
         help="peak of a worker's device in 10^12 operations per second, for the reported "
              "utilisation (MFU); with --standalone one for each, comma-separated"),
    flag("--link", type=LINK,
         help='make links between local nodes slow, as "bandwidth=1Gbit latency=1ms"'),
    flag("--store",
         help="where several coordinators keep state: etcd://HOST:PORT[,HOST:PORT...] (default: "
              "one coordinator, with an SQLite file in RUN_DIR)"),
    flag("--store-ca", type=FILE,
         help="file of certificates that etcd's must come from; the connection is TLS then"),
    flag("--store-cert", type=FILE, help="file of the certificate to show to etcd"),
    flag("--store-key", type=FILE, help="file of its key"),
    flag("--store-user", help="user of etcd"),
    flag("--store-password-file", type=FILE, help="file that holds the user's password"),
    flag("--coordinators", type=IntRange(1, 9), default=1,
         help="number of coordinators of a --standalone run; one leads, the others stand by; "
              "several need --store"),
    flag("--preflight", type=Choice(PREFLIGHTS), default="on",
         help="checks of a node before it joins; strict: warnings are errors"),
    flag("--quarantine", type=TIME, default="30",
         help="seconds that a node with repeated failures is excluded; doubles each time"),
    flag("--silence", type=TIME,
         help="seconds that a silent peer is tolerated (default 3); every other limit follows "
              "from it"),
    flag("--heartbeat", type=TIME,
         help="seconds between heartbeats of a node (default: follows from --silence and "
              "--nnodes)"),
    flag("--lease", type=TIME, help="the same as --silence"),
    flag("--notice", type=SOURCES,
         help="sources of notices that nodes will end: auto, none, aws, gcp, azure, file:PATH or "
              "http:[HOST:]PORT, comma-separated (default auto, with --standalone none)"),
    flag("--grace", type=TIME, default="0",
         help="seconds that a node has to leave after SIGTERM; 0: SIGTERM ends the job here"),
    flag("--certs", type=CERTS,
         help="directory with ca.crt, tls.crt and tls.key: mutual TLS between all services"),
    flag("--certs-name", type=HOST,
         help="name that the others' certificates must carry (default: the address dialled)"),
    flag("--join-token-file",
         help="file with the token that all parts of the job must know (or ELASTIC_JOIN_TOKEN); "
              "default with --standalone: a new one"),
    flag("--insecure", is_flag=True, help="serve addresses that others reach without --certs"),
    flag("--metrics-port", type=IntRange(0, 65535),
         help="serve Prometheus metrics: the coordinator here, agents at the ports after it; 0: "
              "any free ones, as RUN_DIR/metrics/ tells"),
    flag("--metrics-host", type=HOST, default="127.0.0.1",
         help="address of this machine under which metrics are served"),
    flag("--track", type=TARGET, multiple=True,
         help="write metrics to tensorboard:FOLDER, wandb:PROJECT, mlflow:EXPERIMENT or "
              "callback:MODULE:NAME, on the machine of the coordinator; repeatable"),
    flag("--fault", type=FAULT, multiple=True,
         help='inject a fault, as "kill node=2 step=3 microbatch=5"; repeatable'),
)

RAY = (
    flag("--backend", type=Choice(["local", "ray"]), default="local",
         help="where agents run: on this machine, or one per node of a Ray cluster"),
    flag("--address", type=ADDRESS, default="auto",
         help="the Ray cluster: auto (RAY_ADDRESS, or the one running here), HOST:PORT or "
              "ray://HOST:PORT"),
    flag("--ray-resources", type=RESOURCES,
         help="resources of a Ray node per agent, as '{\"GPU\": 1, \"CPU\": 4}' (default: per "
              "worker a CPU, and a GPU if there are any)"),
    flag("--ray-spares", type=IntRange(0), default=1,
         help="Ray nodes beyond the largest --nnodes that are kept as hot spares if they are "
              "there"),
)
# fmt: on
"""Flags only of `elastic run`: `elastic coordinator` and `elastic agent` run on this machine."""

SCRIPT = (
    click.Argument(["script"], default="", metavar="SCRIPT|-m MODULE"),
    click.Argument(["script_args"], nargs=-1, type=click.UNPROCESSED, metavar="[args...]"),
)
"""The script and its arguments, which are not parsed."""
Sections = Mapping[str, Sequence[click.Option]]
SECTIONS: Sections = {"torchrun's flags": TORCHRUN, "elastic's flags": OURS}


UNUSED_BY_SERVICES = (
    "--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf", "--standalone", "--node-rank",
    "--master-addr", "--master-port", "--coordinators",
)  # fmt: skip
"""Flags of `elastic run` that only tell how nodes find their coordinator. `elastic coordinator`
and `elastic agent` accept them, for variables that hold for several commands, and do not use them:
they have an address of their own."""


class RunCommand(Command):
    """A command that takes the flags in `sections`, in this order, and a script."""

    def __init__(
        self,
        name: str,
        callback: Callable[..., int],
        help: str,
        sections: Sections,
        unused: Sequence[str] = (),
    ) -> None:
        """`unused`: flags that have no effect and are not in the help."""
        self.sections = sections
        self.unused = frozenset(unused)
        params = [option for options in self.sections.values() for option in options]
        super().__init__(
            name,
            params=[*params, *SCRIPT],
            callback=callback,
            help=help,
            options_metavar="[flags]",
            context_settings={"auto_envvar_prefix": "PET", "allow_interspersed_args": False},
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; the parameter `given` has the flags that are on the command line."""
        rest = super().parse_args(ctx, args)
        ctx.params["given"] = frozenset(
            param.opts[0]
            for param in self.params
            if isinstance(param, click.Option)
            and ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        )
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, options in self.sections.items():
            used = (option for option in options if option.opts[0] not in self.unused)
            with formatter.section(title):
                formatter.write_dl([row for row in (o.get_help_record(ctx) for o in used) if row])
        with formatter.section("Options"):
            formatter.write_dl([("-h, --help", "Show this message and exit.")])
