"""The `elastic` command. Starts in a blink: neither torch, numpy nor grpc is imported before it is needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from elastic.domain.errors import EXIT_OK, EXIT_USAGE, ElasticError, FieldError

if TYPE_CHECKING:
    from elastic.launcher.flags.request import Request

USAGE = """usage: elastic COMMAND [flags]

  run           train a script or module on elastic nodes; torchrun's flags and more
  profile       measure a script's layers and the links, for the planner and --emulate
  status        phase, step, loss, nodes and plan of a running job
  nodes         who takes part
  preflight     what a node would find about itself before it joins
  drain NODE    move a node's state out, then release it
  plan [FILE]   the plan of a running job, of a text file, or the best one for a cluster file
  export CHECKPOINT OUT.safetensors
  certs         make an authority and certificates for --certs
  coordinator, agent   one service of a job in the foreground, for several machines
  kubernetes render   manifests of a job, for kubectl apply
  --version

`elastic COMMAND --help` tells the flags. Try:
  elastic run --standalone --nnodes 4 -m examples.train_gpt --steps 10 --fault "kill node=2 step=3"
"""

Command = Callable[[list[str], Mapping[str, str]], int]


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code. Users' mistakes are one line on standard error and exit code
    2."""
    words = sys.argv[1:] if argv is None else argv
    name, rest = (words[0], words[1:]) if words else ("", [])
    try:
        if name in ("-h", "--help", "help"):
            print(USAGE, end="")
            return EXIT_OK
        if name in ("-V", "--version", "version"):
            return _version()
        command = _commands().get(name)
        if command is None:
            known = ", ".join(_commands())
            print(f"elastic: {name!r} is no command: {known} (see `elastic --help`)", file=sys.stderr)
            return EXIT_USAGE
        return command(rest, os.environ)
    except ElasticError as error:
        print(f"elastic {name}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _commands() -> dict[str, Command]:
    return {
        "run": _run,
        "profile": _profile,
        "status": _query("status"),
        "nodes": _query("nodes"),
        "preflight": _preflight,
        "drain": _query("drain"),
        "plan": _plan,
        "export": _query("export"),
        "certs": _certs,
        "coordinator": _service("coordinator"),
        "agent": _service("agent"),
        "kubernetes": _kubernetes,
    }


def _run(argv: list[str], environ: Mapping[str, str]) -> int:
    from elastic.launcher.flags.flags import run_parser
    from elastic.launcher.flags.request import request

    wanted = request(run_parser(environ).parse_args(argv), environ)
    if wanted.ray is not None:
        return _on_ray(wanted)
    from elastic.launcher.run.supervisor import launch

    return launch(wanted)


def _on_ray(wanted: Request) -> int:
    try:
        from elastic.launcher.ray.ray import launch
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise FieldError("--backend", "ray", "ray is missing: pip install 'elastic-runtime[ray]'") from None
    return launch(wanted)


def _plan(argv: list[str], environ: Mapping[str, str]) -> int:
    from elastic.launcher.commands.plans import plan

    return plan(argv, environ)


def _profile(argv: list[str], environ: Mapping[str, str]) -> int:
    from elastic.launcher.commands.profile import profile

    return profile(argv, environ)


def _kubernetes(argv: list[str], environ: Mapping[str, str]) -> int:
    from elastic.launcher.kubernetes.render import kubernetes

    return kubernetes(argv, environ)


def _preflight(argv: list[str], environ: Mapping[str, str]) -> int:
    from elastic.launcher.commands.preflight import preflight

    return preflight(argv, environ)


def _certs(argv: list[str], environ: Mapping[str, str]) -> int:
    from elastic.launcher.flags.certs import certs

    return certs(argv, environ)


def _query(name: str) -> Command:
    def ask(argv: list[str], environ: Mapping[str, str]) -> int:
        from elastic.launcher.commands import queries

        command: Command = getattr(queries, name)
        return command(argv, environ)

    return ask


def _service(name: str) -> Command:
    def serve(argv: list[str], environ: Mapping[str, str]) -> int:
        from elastic.launcher.commands import services

        command: Command = getattr(services, name)
        return command(argv, environ)

    return serve


def _version() -> int:
    from elastic.domain.version import VERSION

    print(f"elastic {VERSION}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
