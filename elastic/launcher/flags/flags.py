"""The flags of `elastic run`: torchrun's, with torchrun's meanings, and ours. Only text here; meanings in
`options`.

Every flag may be written --a-b or --a_b, and PET_<A_B> in the environment replaces its default, as for
torchrun.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from elastic.domain.errors import FieldError, UsageError


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. Its value is text until `options` reads it."""

    name: str
    default: str | None
    help: str
    short: str = ""
    switch: bool = False
    repeat: bool = False
    metavar: str | None = None

    @property
    def dest(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def spellings(self) -> list[str]:
        names = [self.short, self.name, "--" + self.dest]
        return [name for name in dict.fromkeys(names) if name]


TORCHRUN = (
    Flag("--nnodes", "1:1", "number of nodes, or MIN:MAX"),
    Flag("--nproc-per-node", "1", "workers a node: a number, auto, cpu or gpu"),
    Flag("--rdzv-backend", "static", "static, c10d or elastic (the last two are the same here)"),
    Flag(
        "--rdzv-endpoint",
        "",
        "HOST:PORT of the coordinator, of several separated by commas; the machine that owns one starts it",
    ),
    Flag("--rdzv-id", "none", "name of the job, seen by the workers"),
    Flag("--rdzv-conf", "", "KEY=VALUE,...; is_host=true|false says who starts the coordinator"),
    Flag("--standalone", None, "embedded coordinator; every node is a local process group", switch=True),
    Flag("--max-restarts", "0", "group restarts of a script that does not use elastic"),
    Flag("--monitor-interval", "0.1", "longest time between two looks at processes, seconds"),
    Flag("--start-method", "spawn", "spawn, fork or forkserver; workers are always new processes"),
    Flag(
        "--event-log-handler", "null", "null, or console: print every event; events.jsonl is always written"
    ),
    Flag("--role", "default", "role of the workers"),
    Flag("--module", None, "SCRIPT is a module, run as python -m", short="-m", switch=True),
    Flag("--no-python", None, "SCRIPT is an executable of any kind", switch=True),
    Flag("--run-path", None, "run SCRIPT, an absolute path, with runpy.run_path", switch=True),
    Flag("--log-dir", None, "directory of the workers' logs (default RUN_DIR/logs)"),
    Flag("--redirects", "0", "streams to log files alone: 0..3, or as 0:1,1:2 by rank", short="-r"),
    Flag("--tee", "0", "streams to log files and, with a prefix, to the console", short="-t"),
    Flag("--log-line-prefix-template", None, "prefix of --tee: ${node} ${rank} ${local_rank} ${role_name}"),
    Flag("--local-ranks-filter", "", "only these local ranks reach the console, as 0,1"),
    Flag("--node-rank", "0", "this node's rank; static rendezvous only"),
    Flag("--master-addr", "127.0.0.1", "node rank 0's address; static rendezvous only"),
    Flag("--master-port", None, "its port (29500); static rendezvous only"),
    Flag("--local-addr", None, "address under which other nodes reach this one"),
    Flag("--numa-binding", None, "not available yet: bind with numactl and --no-python"),
    Flag("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "signals that end the job in order"),
    Flag("--shutdown-timeout", None, "seconds from SIGTERM to SIGKILL (30)"),
    Flag("--virtual-local-rank", None, "every worker sees LOCAL_RANK=0 and one device", switch=True),
)

OURS = (
    Flag("--run-dir", None, "directory of this run (default ./runs/TIME-ID; ./runs/latest points at it)"),
    Flag(
        "--backup",
        "auto",
        "auto, none, or GRADIENTS+STATE: stream, stream:K, reduce, reduce:K, log or recompute, "
        "+ snapshot, replica or replay:N, with /sharded after it where pipelines share optimizer state",
    ),
    Flag("--accumulate", "fast", "fast, or exact: bit-identical whatever fails"),
    Flag("--pipelines", "auto", "auto, a number of pipelines, or their depths as 2+2"),
    Flag("--schedule", "auto", "auto, 1f1b, interleaved or zero-bubble"),
    Flag(
        "--node-memory",
        "",
        "memory of this node that the plan may use, as 16GiB; with --standalone one for each, comma-separated",
    ),
    Flag(
        "--vault-memory",
        None,
        "memory for other nodes' copies on a node, as 2GiB; beyond it they are not kept",
    ),
    Flag("--compress", "auto", "copies between vaults: auto (compressed where it pays), off or on"),
    Flag("--checkpoint-dir", None, "directory of durable checkpoints (default RUN_DIR/checkpoints)"),
    Flag("--resume", None, "start from this checkpoint; auto: from the newest in --checkpoint-dir, if any"),
    Flag("--domain", "", "failure domain of this node; with --standalone one for each, comma-separated"),
    Flag("--profile", None, "what `elastic profile` measured; the plan goes by it"),
    Flag("--emulate", None, "as --profile, and workers wait the profiled times instead of computing"),
    Flag(
        "--device",
        "",
        "device type of this node in the profile; with --standalone one for each, comma-separated",
    ),
    Flag(
        "--lifetime",
        "",
        "seconds that this node is expected to stay, 0: unknown; with --standalone one for each, comma-separated",
    ),
    Flag("--link", None, 'make links between local nodes slow, as "bandwidth=1Gbit latency=1ms"'),
    Flag(
        "--store",
        "",
        "where coordinators keep state: an SQLite file here, or etcd://HOST:PORT[,HOST:PORT...]",
    ),
    Flag("--store-ca", "", "file of certificates that etcd's must come from; the connection is TLS then"),
    Flag("--store-cert", "", "file of the certificate to show to etcd"),
    Flag("--store-key", "", "file of its key"),
    Flag("--store-user", "", "user of etcd"),
    Flag("--store-password-file", "", "file that holds the user's password"),
    Flag(
        "--coordinators", "1", "coordinators of a --standalone run, one of which leads; several need --store"
    ),
    Flag(
        "--preflight", "on", "what a node looks at before it joins: on, strict (warnings count, too) or off"
    ),
    Flag(
        "--quarantine", "30", "seconds that a node which fails again and again is left out; doubles each time"
    ),
    Flag(
        "--silence",
        None,
        "how long a silent peer is tolerated, seconds (3); every other limit follows from it",
    ),
    Flag(
        "--heartbeat",
        None,
        "seconds between a node's signs of life (default: follows from --silence and --nnodes)",
    ),
    Flag("--lease", None, "the same as --silence"),
    Flag(
        "--notice",
        None,
        "where nodes hear that they go: auto, none, aws, gcp, azure, file:PATH or http:[HOST:]PORT, comma-separated "
        "(default auto, with --standalone none)",
    ),
    Flag(
        "--grace",
        "0",
        "SIGTERM is a notice so many seconds ahead, and the node leaves; 0: it ends the job here",
    ),
    Flag("--certs", None, "directory with ca.crt, tls.crt and tls.key: mutual TLS between all services"),
    Flag("--certs-name", "", "name that the others' certificates must carry (default: the address dialled)"),
    Flag(
        "--join-token-file",
        None,
        "file with the token that all parts of the job must know (or ELASTIC_JOIN_TOKEN); default with "
        "--standalone: a new one",
    ),
    Flag("--insecure", None, "serve addresses that others reach without --certs", switch=True),
    Flag(
        "--metrics-port",
        None,
        "serve Prometheus metrics: the coordinator here, agents at the ports after it; 0: any free ones, "
        "as RUN_DIR/metrics/ tells",
    ),
    Flag("--metrics-host", "127.0.0.1", "address of this machine under which metrics are served"),
    Flag(
        "--fault", None, 'inject a fault, as "kill node=2 step=3 microbatch=5"', repeat=True, metavar="SPEC"
    ),
)

RAY = (
    Flag(
        "--backend",
        "local",
        "where agents run: local (this machine), or ray (one on each node of a Ray cluster)",
    ),
    Flag(
        "--address",
        "auto",
        "the Ray cluster: auto (RAY_ADDRESS, or the one running here), HOST:PORT or ray://HOST:PORT",
    ),
    Flag(
        "--ray-resources",
        None,
        'what an agent takes of a Ray node, as \'{"GPU": 1, "CPU": 4}\' '
        "(default: a CPU, and a GPU where there are any, for each worker)",
    ),
    Flag(
        "--ray-spares",
        "1",
        "Ray nodes beyond the largest --nnodes that are kept as hot spares if they are there",
    ),
)
"""Of `elastic run` alone: who starts single services says where by doing it."""


RUN = "elastic run"


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing usage and leaving."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required: SCRIPT"):
            message = "SCRIPT is missing: give a script, or -m and a module"
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def run_parser(environ: Mapping[str, str], prog: str = RUN) -> Parser:
    """Parser of `elastic run` and of the commands that take the same flags."""
    parser = Parser(
        prog=prog,
        usage=f"{prog} [flags] SCRIPT|-m MODULE [args...]",
        description="Run a training script on elastic nodes.",
        allow_abbrev=False,
    )
    groups = [("torchrun's flags", TORCHRUN), ("elastic's flags", OURS)]
    if prog == RUN:
        groups.append(("Ray's flags", RAY))
    for title, flags in groups:
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag, environ)
    parser.add_argument("script", metavar="SCRIPT", help="what the workers run")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="args", help="its arguments")
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag, environ: Mapping[str, str]) -> None:
    variable = f"PET_{flag.dest.upper()}"
    given = environ.get(variable)
    text = flag.help.replace("%", "%%")
    if flag.switch:
        on = _switch(variable, given) if given is not None else False
        group.add_argument(*flag.spellings, dest=flag.dest, action="store_true", default=on, help=text)
    elif flag.repeat:
        default = [given] if given else []
        group.add_argument(
            *flag.spellings, dest=flag.dest, action="append", default=default, metavar=flag.metavar, help=text
        )
    else:
        default_text = flag.default if given is None else given
        group.add_argument(*flag.spellings, dest=flag.dest, default=default_text, metavar="X", help=text)


def _switch(variable: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise FieldError(variable, value, "1 (on) or 0 (off)")
    return value == "1"
