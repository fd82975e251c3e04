"""Validation of flags: types that turn text into checked values, and rules over several flags.

A wrong value raises FieldError, which names the flag. Only loopback addresses are served in plain
text; every other address needs certificates or `--insecure`.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from click import Choice

from elastic.command_line import ParsedType, file_errors, input_text, time_of
from elastic.config import FILE as CONFIG_FILE
from elastic.config import is_url, load_config
from elastic.core.protocol.fault_spec import parse_fault
from elastic.core.protocol.notice_source import NoticeSource, SourceKind, parse_sources
from elastic.core.protocol.timeouts import SILENCE_S, budget
from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate, OnNonfinite
from elastic.launcher.flags.addresses import ENDPOINT_FLAG
from elastic.launcher.tracking.targets import parse_target
from elastic.planning.cost.profile import LinkProfile, Profile, parse_profile
from elastic.planning.plan.schemes import schemes_of
from elastic.planning.plan.shape import parse_shape
from elastic.planning.plan.units import duration_of, rate_of, size_of
from elastic.rpc.security import tls
from elastic.rpc.security.roles import Role, role_of
from elastic.store.checkpoints import open_checkpoints

STATIC_PORT, DYNAMIC_PORT = 29500, 29400
"""torchrun's default ports of static and dynamic rendezvous."""
TOKEN_VARIABLE = "ELASTIC_JOIN_TOKEN"
PRIVATE_CERTS = "job-certs"
"""Folder in the run directory with the certificates that the launcher makes for one job."""
PRIVATE_NAME = "elastic"
"""Name that the certificates in PRIVATE_CERTS carry."""
MOST_TFLOPS = 1e6
"""Largest peak of a device that is taken for one."""
METADATA_VARIABLES = {
    SourceKind.AWS: "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    SourceKind.GCP: "GCE_METADATA_HOST",
    SourceKind.AZURE: "ELASTIC_AZURE_METADATA_SERVICE",
}
"""Variables that replace the address of a cloud's metadata service. AWS's and Google's own tools
read the same variables; Azure's have none, so that name is ours."""


# ---- types of single flags ----


def _signals(flag: str, text: str) -> tuple[signal.Signals, ...]:
    found = []
    for name in text.split(","):
        number = signal.Signals.__members__.get(name.strip())
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            remedy = (
                "give names such as SIGTERM,SIGINT,SIGUSR1; SIGKILL and SIGSTOP cannot be handled"
            )
            raise FieldError(flag, name, remedy)
        found.append(number)
    return tuple(found)


def streams(flag: str, text: str, nproc: int) -> tuple[int, ...]:
    """Return the streams per local rank; a single value is for all ranks.

    torchrun's form: one digit 0..3 for all ranks, or RANK:DIGIT,... with 0 for other ranks.
    """
    text = text.removeprefix("=")  # click leaves the sign of -r=3 in the value
    if re.fullmatch(r"[0-3]", text):
        return (int(text),)
    values = [0] * nproc
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,4}):([0-3])", item)
        if match is None:
            remedy = "give 0, 1 (stdout), 2 (stderr) or 3 (both), or one per local rank as 0:1,1:2"
            raise FieldError(flag, text, remedy)
        if int(match[1]) >= nproc:
            raise FieldError(flag, text, f"local rank {match[1]} is not below {nproc}")
        values[int(match[1])] = int(match[2])
    return tuple(values)


def _ranks(flag: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise FieldError(flag, text, "give local ranks separated by commas, as 0,1,2")
    return tuple(int(item) for item in text.split(","))


def _nodes(flag: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise FieldError(flag, text, "give N or MIN:MAX with 1 <= MIN <= MAX, as 4 or 2:4")
    return low, high


def address(flag: str, text: str, default_port: int) -> str:
    """Return HOST:PORT or [IPv6]:PORT, with `default_port` where `text` has no port."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s/]+)(?::(\d{1,6}))?", text)
    if match is None or (match[1].startswith("[") and not _is_ipv6(match[1][1:-1])):
        raise FieldError(flag, text, "give HOST:PORT, as 10.0.0.5:29400 or [fd00::5]:29400")
    port = int(match[2] or default_port)
    if not 1 <= port <= 65535:
        raise FieldError(flag, text, "give a port from 1 to 65535")
    return f"{match[1]}:{port}"


def addresses(flag: str, text: str, default_port: int) -> str:
    """Return the comma-separated addresses of `text`, each with a port, without repetitions."""
    parts = (address(flag, part.strip(), default_port) for part in text.split(","))
    return ",".join(dict.fromkeys(parts))


def _host(flag: str, text: str) -> str:
    bare = text.strip("[]")
    if _is_ipv6(bare):
        return f"[{bare}]"
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*)", bare):
        raise FieldError(flag, text, "give a host name or an IP address, without a port")
    return bare


def _is_ipv6(text: str) -> bool:
    try:
        return not ipaddress.IPv6Address(text).scope_id
    except ValueError:
        return False


def _name(flag: str, text: str) -> str:
    if not text.strip():
        raise FieldError(flag, text, "give a name")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FieldError(flag, text, "give a name in UTF-8") from None
    return text


def _conf(flag: str, text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    if not all(key.strip() and equals and value.strip() for key, equals, value in pairs):
        raise FieldError(flag, text, "give KEY=VALUE,KEY=VALUE")
    conf = {key.strip(): value.strip() for key, _, value in pairs}
    booleans = ("1", "true", "yes", "y", "t", "0", "false", "no", "n", "f")
    if conf.get("is_host", "true").lower() not in booleans:
        raise FieldError(f"{flag} is_host", conf["is_host"], "give true or false")
    return conf


def _link(flag: str, text: str) -> LinkProfile:
    """Return the link of a text "bandwidth=RATE latency=TIME"; either may be left out."""
    given: dict[str, str] = {}
    example = 'as "bandwidth=1Gbit latency=1ms"'
    for word in text.split():
        name, equals, value = word.partition("=")
        if name not in ("bandwidth", "latency") or not equals or name in given:
            raise FieldError(flag, text, f"give bandwidth=RATE and latency=TIME, {example}")
        given[name] = value
    rate = rate_of(f"{flag} bandwidth", given["bandwidth"]) if "bandwidth" in given else 0.0
    latency = duration_of(f"{flag} latency", given["latency"]) if "latency" in given else 0.0
    if not rate and not latency:
        raise FieldError(flag, text, f"give a bandwidth or a latency, {example}")
    return LinkProfile(rate, latency)


def _binding(flag: str, text: str) -> NoReturn:
    raise FieldError(flag, text, "not available yet: use numactl and --no-python")


def slug(text: str) -> str:
    """Return `text` changed to fit into file and host names, at most 40 characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:40] or "job"


def _file(flag: str, text: str) -> str:
    # No realpath: Kubernetes renews files by links.
    path = os.path.abspath(os.path.expanduser(text))
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise FieldError(flag, text, "give a file that can be read")
    return path


def folder(flag: str, text: str) -> Path:
    """Return the absolute path of a directory that exists or can be created."""
    if not text.strip() or "\0" in text:
        raise FieldError(flag, text, "give a directory")
    with file_errors(flag, text):
        path = Path(os.path.abspath(os.path.expanduser(text)))
        existing = next(parent for parent in (path, *path.parents) if _is_there(parent))
    if not existing.is_dir():
        raise FieldError(flag, text, f"{existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise FieldError(flag, text, f"{existing} is not writable; change that or give another")
    return path


def location(flag: str, text: str) -> str:
    """Return the absolute path of a directory that exists or can be created, or a URL."""
    if not is_url(text):
        return str(folder(flag, text))
    open_checkpoints(text, flag)
    return text.rstrip("/")


def _saved(flag: str, text: str) -> str:
    """Return the path of an existing directory, or a URL."""
    if is_url(text):
        return location(flag, text)
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if not path.is_dir():
        raise FieldError(flag, text, "there is no such directory; give another, or a URL")
    return str(path)


def _is_there(path: Path) -> bool:
    """Return whether `path` exists, be it a link to nothing. Raises OSError if it cannot exist."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read_profile(flag: str, text: str) -> Profile:
    """Return the profile in the file `text`."""
    profile = input_text(flag, Path(os.path.expanduser(text)))
    try:
        return parse_profile(profile)
    except FieldError as error:
        raise FieldError(flag, text, f"the file is not a profile: {error}") from None


def _certs(flag: str, text: str) -> str:
    """Return the absolute path of a directory with usable certificates."""
    path = Path(os.path.abspath(os.path.expanduser(text)))
    tls.Certificates(path)
    return str(path)


def _shape(flag: str, text: str) -> str:
    parse_shape(text, flag)
    return text


def _backup(flag: str, text: str) -> str:
    if text not in ("auto", "none", "off"):
        schemes_of(text, flag)
    return text


def _rate(flag: str, text: str) -> float:
    """Return a rate in 10^12 operations per second; 0: unknown."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 <= rate <= MOST_TFLOPS:
        remedy = f"a number from 0 to {MOST_TFLOPS:g}, as 989 for an H100"
        raise FieldError(flag, text, remedy)
    return rate


def _several(read: Callable[[str, str], Any]) -> Callable[[str, str], tuple[Any, ...]]:
    """Return a parser of comma-separated values, each of which `read` parses."""
    return lambda flag, text: tuple(read(flag, part.strip()) for part in text.split(","))


ENDPOINT = ParsedType("HOST:PORT", lambda flag, text: address(flag, text, DYNAMIC_PORT))
ENDPOINTS = ParsedType("HOST:PORT,...", lambda flag, text: addresses(flag, text, DYNAMIC_PORT))
BINDING, SIGNALS = ParsedType("BINDING", _binding), ParsedType("NAME,...", _signals)
RANKS, NODES = ParsedType("RANK,...", _ranks), ParsedType("MIN:MAX", _nodes)
HOST, NAME = ParsedType("HOST", _host), ParsedType("NAME", _name)
LOCAL_ADDR = ParsedType("HOST", lambda flag, text: _host(flag, text) and text)
ACCUMULATE = Choice(tuple(mode.value for mode in Accumulate))
NONFINITE = Choice(tuple(mode.value for mode in OnNonfinite))
SIZE, SIZES = ParsedType("SIZE", size_of), ParsedType("SIZE,...", _several(size_of))
NAMES, TIMES = ParsedType("NAME,...", _several(_name)), ParsedType("TIME,...", _several(time_of))
RATES = ParsedType("NUMBER,...", _several(_rate))
FILE, FOLDER = ParsedType("FILE", _file), ParsedType("DIR", folder)
LOCATION, SAVED = ParsedType("LOCATION", location), ParsedType("CHECKPOINT", _saved)
PROFILE, CERTS = ParsedType("FILE", read_profile), ParsedType("DIR", _certs)
CONF, LINK = ParsedType("KEY=VALUE,...", _conf), ParsedType("LINK", _link)
SHAPE, BACKUP = ParsedType("SHAPE", _shape), ParsedType("SCHEMES", _backup)
TARGET = ParsedType("TARGET", parse_target)
FAULT = ParsedType("SPEC", lambda _, text: parse_fault(text))
SOURCES = ParsedType("SOURCE,...", lambda _, text: parse_sources(text))


# ---- timeouts and notices ----


def silence(flags: SimpleNamespace) -> float:
    """Return the seconds of a peer's silence that are tolerated (--silence, or --lease)."""
    given = {value for value in (flags.silence, flags.lease) if value is not None}
    if len(given) > 1:
        remedy = f"--lease is another name of --silence, which is {flags.silence}: leave it out"
        raise FieldError("--lease", flags.lease, remedy)
    return float(given.pop()) if given else SILENCE_S


def heartbeat(flags: SimpleNamespace, nodes: int) -> float:
    """Return the seconds between two heartbeats of a node, in a job of up to `nodes` nodes."""
    if flags.heartbeat is not None:
        return float(flags.heartbeat)
    return budget(silence(flags), nodes=nodes).heartbeat_s


def notices(flags: SimpleNamespace, standalone: bool) -> tuple[NoticeSource, ...]:
    given: tuple[NoticeSource, ...] | None = flags.notice
    return parse_sources("none" if standalone else "auto") if given is None else given


def metadata_services(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return (cloud, address) of each metadata service whose address `environ` replaces."""
    found = ((cloud.value, environ.get(name, "")) for cloud, name in METADATA_VARIABLES.items())
    return tuple((cloud, address) for cloud, address in found if address)


# ---- security ----


@dataclass(frozen=True, slots=True)
class Guard:
    """Security settings of a job that are not saved in its config.json."""

    token: str = field(default="", repr=False)
    warning: str = ""
    """Warning to print before the job starts; "": none."""
    private: bool = False
    """Whether the launcher makes certificates for this job and passes them to the agents."""


def certificates(flags: SimpleNamespace, guard: Guard, run_dir: Path) -> tuple[str, str]:
    """Return (directory of certificates, name that they must carry) for the job's configuration."""
    if guard.private:
        return str(run_dir / PRIVATE_CERTS), flags.certs_name or PRIVATE_NAME
    return flags.certs or "", flags.certs_name or ""


def read_token(flags: SimpleNamespace, environ: Mapping[str, str], *, create: bool = False) -> str:
    """Return the given join token; "" without one, or a new token if `create`."""
    if flags.join_token_file is not None:
        file = Path(os.path.expanduser(flags.join_token_file))
        return tls.read_token(file, "--join-token-file")
    if environ.get(TOKEN_VARIABLE):
        return tls.check_token(TOKEN_VARIABLE, environ[TOKEN_VARIABLE].strip(), "...")
    return secrets.token_hex(32) if create else ""


def member_token(
    flags: SimpleNamespace, environ: Mapping[str, str], *, create: bool = False
) -> str:
    """Return the token of a node or a coordinator (`read_token`). Raises FieldError if it is that
    of another role."""
    token = read_token(flags, environ, create=create)
    role = role_of(token)
    if role is not Role.MEMBER:
        file = flags.join_token_file
        field, shown = ("--join-token-file", file) if file else (TOKEN_VARIABLE, "...")
        remedy = f"this is the token of a job's {role}, and nodes need the join token"
        raise FieldError(field, str(shown), remedy)
    return token


def cluster_guard(flags: SimpleNamespace, environ: Mapping[str, str]) -> Guard:
    """Return the security settings of a job whose launcher passes token and certificates on."""
    token = member_token(flags, environ, create=True)
    if flags.certs and flags.insecure:
        raise FieldError("--insecure", "on", "certificates are given: leave out it or --certs")
    plain = "WARNING: --insecure: the services of this job use plain text"
    private = not flags.certs and not flags.insecure
    return Guard(token, plain if flags.insecure else "", private=private)


def service_guard(
    flags: SimpleNamespace, environ: Mapping[str, str], coordinators: str, standalone: bool
) -> Guard:
    """Return the security settings of a job with services at `coordinators` and --local-addr.

    Raises FieldError unless all addresses are loopback, or --certs or --insecure is given.
    """
    token = member_token(flags, environ, create=standalone)
    if standalone or flags.certs:
        return Guard(token)
    hosts = [address.rpartition(":")[0] for address in coordinators.split(",")]
    hosts += [flags.local_addr] if flags.local_addr else []
    exposed = next((host for host in hosts if not is_loopback(host)), None)
    if exposed is None:
        return Guard(token)
    if not flags.insecure:
        flag = "--local-addr" if exposed == flags.local_addr else endpoint_flag(flags)
        remedy = "other machines reach it: give --certs DIR (see `elastic certs`), or --insecure"
        raise FieldError(flag, exposed, remedy)
    warning = f"WARNING: --insecure: {exposed} is served in plain text to other machines"
    return Guard(
        token, warning if token else f"{warning}, and anybody may join: give --join-token-file"
    )


def endpoint_flag(flags: SimpleNamespace) -> str:
    """Return the flag that gives the coordinator's address."""
    if hasattr(flags, "endpoint_flag"):  # of `elastic coordinator` or `elastic agent`
        return str(flags.endpoint_flag)
    return ENDPOINT_FLAG if flags.rdzv_endpoint else "--master-addr"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`, a name or an address."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: it cannot be a name of a host
        return False
    found_addresses = (str(socket_address[0]).partition("%")[0] for *_, socket_address in found)
    return all(ipaddress.ip_address(text).is_loopback for text in found_addresses)


def client_security(
    flags: SimpleNamespace, environ: Mapping[str, str], run_dir: Path | None
) -> tls.SecuritySettings:
    """Return the settings of a command that calls a job, from its flags or the run directory."""
    certs, name, token = flags.certs or "", flags.certs_name or "", read_token(flags, environ)
    if run_dir is not None:
        token = token or tls.read_token(run_dir / tls.TOKEN_FILE)
        if not certs and (run_dir / CONFIG_FILE).is_file():
            config = load_config(run_dir)
            certs, name = config.certs, config.certs_name
        elif not certs:
            name = ""
    return tls.SecuritySettings(Path(certs) if certs else None, name, token)
