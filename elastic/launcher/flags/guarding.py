"""The command line's side of security: `--certs`, `--join-token-file`, and what may be served where.

Only loopback is served in plain text: another address needs certificates, or `--insecure`.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from elastic.command_line import ParsedType
from elastic.domain.errors import FieldError
from elastic.rpc.security import tls
from elastic.rpc.security.tls import TOKEN_FILE, SecuritySettings

TOKEN_VARIABLE = "ELASTIC_JOIN_TOKEN"
TOKEN_BYTES = 32
PRIVATE = "job-certs"
"""Of a run directory: certificates that were made for this job alone."""
PRIVATE_NAME = "elastic"
"""The name that they carry: their authority has signed nothing else."""


@dataclass(frozen=True, slots=True)
class Guard:
    """What of a job's security is not for its config.json."""

    token: str = field(default="", repr=False)
    warning: str = ""
    """What the user must read before the job starts; "": nothing."""
    private: bool = False
    """The launcher makes the job's certificates, and hands them to the agents that it starts."""


def _certs(flag: str, text: str) -> str:
    """Absolute path of a certificate directory that can be used."""
    path = Path(text).expanduser().absolute()
    tls.Certificates(path)
    return str(path)


CERTS = ParsedType("DIR", _certs)


def certificates(flags: SimpleNamespace, secured: Guard, run_dir: Path) -> tuple[str, str]:
    """(directory of certificates, name that they must carry), for the job's configuration. Raises FieldError."""
    certs, name = flags.certs or "", flags.certs_name or ""
    return (str(run_dir / PRIVATE), name or PRIVATE_NAME) if secured.private else (certs, name)


def read_token(flags: SimpleNamespace, environ: Mapping[str, str], *, alone: bool = False) -> str:
    """The join token that was given; for a job on this machine alone a new one if none was. Raises FieldError."""
    if flags.join_token_file:
        return tls.read_token(Path(flags.join_token_file).expanduser(), "--join-token-file")
    if environ.get(TOKEN_VARIABLE):
        return tls.check_token(TOKEN_VARIABLE, environ[TOKEN_VARIABLE].strip(), "...")
    return secrets.token_hex(TOKEN_BYTES) if alone else ""


def guard_cluster(flags: SimpleNamespace, environ: Mapping[str, str]) -> Guard:
    """The same where the launcher itself starts all agents: what is not given, it makes and hands to them."""
    token = read_token(flags, environ, alone=True)
    warning = "WARNING: --insecure: the job's services are reached in plain text" if flags.insecure else ""
    if flags.certs and flags.insecure:
        raise FieldError("--insecure", "on", "certificates are given: leave it or --certs out")
    return Guard(token, warning, private=not flags.certs and not flags.insecure)


def guard(flags: SimpleNamespace, environ: Mapping[str, str], coordinator: str, standalone: bool) -> Guard:
    """Check what the job would serve. Raises FieldError unless it is loopback, or encrypted, or --insecure.

    `coordinator`: its address, or several separated by commas.
    """
    token = read_token(flags, environ, alone=standalone)
    if standalone or flags.certs:
        return Guard(token)
    hosts = [
        *(place.rpartition(":")[0] for place in coordinator.split(",")),
        *([flags.local_addr] if flags.local_addr else []),
    ]
    open_to = [place for place in hosts if not is_loopback(place)]
    if not open_to:
        return Guard(token)
    if not flags.insecure:
        flag = "--local-addr" if open_to[0] == flags.local_addr else "--rdzv-endpoint"
        raise FieldError(
            flag, open_to[0], "other machines reach it: give --certs DIR (see `elastic certs`), or --insecure"
        )
    open_text = "" if token else ", and anybody may join: give --join-token-file"
    return Guard(
        token,
        f"WARNING: --insecure: {open_to[0]} is served in plain text, on a network that others use{open_text}",
    )


def is_loopback(place: str) -> bool:
    """Whether `place`, a name or an address, is reached from this machine alone."""
    bare = place.strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        pass
    if bare == "localhost":
        return True
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback for *_, where in found)


def asking(flags: SimpleNamespace, environ: Mapping[str, str], run_dir: Path | None) -> SecuritySettings:
    """What a command goes by that asks a running job: its flags, and what lies in the run directory if it has one."""
    certs, name, token = flags.certs or "", flags.certs_name or "", read_token(flags, environ)
    if run_dir is not None:
        token = token or tls.read_token(run_dir / TOKEN_FILE)
        certs, name = _configured(run_dir) if not certs else (certs, name)
    return SecuritySettings(Path(certs) if certs else None, name, token)


def _configured(run_dir: Path) -> tuple[str, str]:
    from elastic.config import FILE, load_config

    if not (run_dir / FILE).is_file():
        return "", ""
    config = load_config(run_dir)
    return config.certs, config.certs_name
