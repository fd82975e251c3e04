"""`elastic preflight`: what this machine would find about itself before it joins a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

from elastic.domain.errors import EXIT_FAILURE, EXIT_OK
from elastic.launcher.commands.queries import add_secrets, show
from elastic.launcher.flags.flags import Parser
from elastic.launcher.flags.guarding import asking
from elastic.launcher.flags.request import DYNAMIC_PORT, memory_root
from elastic.launcher.flags.values import addresses, folder, size
from elastic.rpc import security


def preflight(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run the checks once; exit code 1 if the node would be refused."""
    parser = Parser(prog="elastic preflight", description="Check this machine as a node.", allow_abbrev=False)
    parser.add_argument("--run-dir", "--run_dir", default=".", help="directory of runs (default: this one)")
    parser.add_argument("--checkpoint-dir", "--checkpoint_dir", default=None, help="directory of checkpoints")
    parser.add_argument(
        "--node-memory", "--node_memory", default=None, help="memory that plans may use, as 16GiB"
    )
    parser.add_argument(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        default=environ.get("PET_RDZV_ENDPOINT"),
        help="HOST:PORT of a coordinator, or several, for the checks of clock and links",
    )
    add_secrets(parser, environ)
    parser.add_argument("--strict", action="store_true", help="warnings count, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    run_dir = folder("--run-dir", args.run_dir) or Path()
    checkpoints = folder("--checkpoint-dir", args.checkpoint_dir)
    directories = [("run", run_dir), ("memory", memory_root())]
    directories += [("checkpoints", checkpoints)] if checkpoints else []
    memory = size("--node-memory", args.node_memory) if args.node_memory else 0
    where = addresses("--rdzv-endpoint", args.rdzv_endpoint, DYNAMIC_PORT) if args.rdzv_endpoint else ""
    security.use(asking(args, environ, None))

    from elastic.agent.health.preflight import local_checks, network_checks, standing_of
    from elastic.core.protocol.health_report import Preflight

    began = perf_counter()
    checks, score = local_checks(directories, memory, trial=True)
    checks += network_checks(where) if where else []
    flight = Preflight("strict" if args.strict else "on", perf_counter() - began, tuple(checks), score)
    rows = [
        {
            "check": c.name,
            "value": c.value if args.json else f"{c.value:.4g}",
            "unit": c.unit,
            "ok": c.ok,
            "fatal": c.fatal,
            "remedy": c.remedy,
        }
        for c in flight.checks
    ]
    figures = {"seconds": round(flight.seconds, 3), "score": round(score, 2), "standing": standing_of(score)}
    show({"ok": not flight.failed, **figures, "checks": rows}, args.json)
    return EXIT_FAILURE if flight.failed else EXIT_OK
