"""Warnings of flags and variables that have no effect in the job for which they are given.

They are no errors: a command line of torchrun goes on to work. Flags are only looked at if the
command line has them, because a variable may be the default of several commands and jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from types import SimpleNamespace

from elastic.config import JobConfig
from elastic.domain.types import Accumulate
from elastic.launcher.flags.flags import OURS, RAY, TORCHRUN

PREFIX = "PET_"
HOSTING_KEY = "is_host"
"""The only key of --rdzv-conf that has an effect."""


def unused_flags(
    flags: SimpleNamespace, config: JobConfig, unused: Iterable[str] = ()
) -> list[str]:
    """Return a text for each flag on the command line that has no effect in the job `config`.

    `unused`: flags that the command never uses.
    """
    own = "this command is told the coordinator's address by a flag of its own"
    why = {flag: text for flag, idle, text in _rules(flags, config) if idle}
    why |= dict.fromkeys(unused, own)
    found = [f"{flag} has no effect: {text}" for flag, text in why.items() if flag in flags.given]
    if "--rdzv-conf" in flags.given and "--rdzv-conf" not in why:
        keys = [key for key in flags.rdzv_conf if key != HOSTING_KEY]
        found += [f"--rdzv-conf {key} has no effect: only {HOSTING_KEY} has one" for key in keys]
    return found


def _rules(flags: SimpleNamespace, config: JobConfig) -> Iterator[tuple[str, bool, str]]:
    """Yield (flag, whether it has no effect in this job, reason)."""
    local = "with --standalone all nodes and the coordinator are on this machine"
    for flag in ("--rdzv-endpoint", "--rdzv-conf", "--local-addr", "--insecure"):
        yield flag, config.standalone, local
    static = flags.rdzv_backend == "static" and not config.standalone
    for flag in ("--node-rank", "--master-addr", "--master-port"):
        yield flag, not static, "it is for --rdzv-backend static on several machines"
    for flag in ("--master-addr", "--master-port"):
        yield flag, static and bool(flags.rdzv_endpoint), "--rdzv-endpoint replaces it"
    yield "--link", config.max_nodes == 1, "a single node has no links to others"
    yield "--metrics-host", config.metrics_port < 0, "it needs --metrics-port"
    exact = config.accumulate is Accumulate.EXACT
    yield "--verify-every", not exact, "it needs --accumulate exact"
    yield "--certs-name", not config.certs, "it needs --certs"
    yield "--log-line-prefix-template", not any(config.tee), "it needs --tee"


def unused_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a text for each variable PET_... that is the default of no flag."""
    known = {str(option.name).upper() for option in (*TORCHRUN, *OURS, *RAY)}
    found = []
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        if variable.startswith(PREFIX) and name not in known:
            close = get_close_matches(name, known, 1)
            hint = f"; did you mean {PREFIX}{close[0]}?" if close else ""
            found.append(f"{variable} has no effect: no flag of `elastic run` has this name{hint}")
    return found
