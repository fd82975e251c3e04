"""Types of flags: text in, checked values out, a FieldError naming the flag otherwise."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from click import Choice

from elastic.command_line import ParsedType, time_of
from elastic.core.protocol.fault_spec import parse_fault
from elastic.core.protocol.notice_source import parse_sources
from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate
from elastic.planning.cost.profile import LinkProfile, Profile, parse_profile
from elastic.planning.plan.units import duration_of, rate_of, size_of

STATIC_PORT, DYNAMIC_PORT = 29500, 29400
"""torchrun's default ports."""


def _signals(flag: str, text: str) -> tuple[signal.Signals, ...]:
    found = []
    for name in text.split(","):
        number = getattr(signal.Signals, name.strip(), None)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise FieldError(flag, name, "names as in SIGTERM,SIGINT,SIGUSR1; not SIGKILL or SIGSTOP")
        found.append(number)
    return tuple(found)


def streams(flag: str, text: str, nproc: int) -> tuple[int, ...]:
    """torchrun's form: one digit 0..3 for all ranks, or RANK:DIGIT,... with 0 for the ranks left out."""
    text = text.removeprefix("=")  # click takes the sign of -r=3 for a part of the value
    if re.fullmatch(r"[0-3]", text):
        return (int(text),)
    values = [0] * nproc
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,4}):([0-3])", item)
        if match is None:
            raise FieldError(flag, text, "0, 1 (stdout), 2 (stderr), 3 (both), or by local rank as 0:1,1:2")
        if int(match[1]) >= nproc:
            raise FieldError(flag, text, f"local rank {match[1]} is not below {nproc}")
        values[int(match[1])] = int(match[2])
    return tuple(values)


def _ranks(flag: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise FieldError(flag, text, "local ranks separated by commas, as 0,1,2")
    return tuple(int(item) for item in text.split(","))


def _nodes(flag: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise FieldError(flag, text, "N or MIN:MAX with 1 <= MIN <= MAX, as 4 or 2:4")
    return low, high


def address(flag: str, text: str, default_port: int) -> str:
    """host:port, or [IPv6]:port, with a default port."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s/]+)(?::(\d{1,6}))?", text)
    if match is None:
        raise FieldError(flag, text, "HOST:PORT, as in 10.0.0.5:29400")
    port = int(match[2] or default_port)
    if not 1 <= port <= 65535:
        raise FieldError(flag, text, "a port from 1 to 65535")
    return f"{match[1]}:{port}"


def addresses(flag: str, text: str, default_port: int) -> str:
    """One address as `address` or several, separated by commas."""
    return ",".join(dict.fromkeys(address(flag, part.strip(), default_port) for part in text.split(",")))


def _host(flag: str, text: str) -> str:
    bare = text.strip("[]")
    if re.fullmatch(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*", bare):
        return f"[{bare}]"
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*)", bare):
        raise FieldError(flag, text, "a host name or an IP address, without a port")
    return bare


def _name(flag: str, text: str) -> str:
    if not text.strip():
        raise FieldError(flag, text, "a name")
    return text


def _conf(flag: str, text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    bad = [key for key, equals, value in pairs if not (key.strip() and equals and value.strip())]
    if bad:
        raise FieldError(flag, text, "KEY=VALUE,KEY=VALUE")
    conf = {key.strip(): value.strip() for key, _, value in pairs}
    words = ("1", "true", "yes", "y", "t", "0", "false", "no", "n", "f")
    if conf.get("is_host", "true").lower() not in words:
        raise FieldError(f"{flag} is_host", conf["is_host"], "true or false")
    return conf


def _link(flag: str, text: str) -> LinkProfile:
    """bandwidth=RATE latency=TIME, either or both, in any order."""
    given: dict[str, str] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if name not in ("bandwidth", "latency") or not equals or name in given:
            raise FieldError(flag, text, 'bandwidth=RATE and latency=TIME, as "bandwidth=1Gbit latency=1ms"')
        given[name] = value
    rate = rate_of(f"{flag} bandwidth", given["bandwidth"]) if "bandwidth" in given else 0.0
    latency = duration_of(f"{flag} latency", given["latency"]) if "latency" in given else 0.0
    if not rate and not latency:
        raise FieldError(flag, text, 'a bandwidth or a latency, as "bandwidth=1Gbit latency=1ms"')
    return LinkProfile(rate, latency)


def _binding(flag: str, text: str) -> NoReturn:
    raise FieldError(flag, text, "not available yet: use numactl and --no-python")


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:40] or "job"


def _file(flag: str, text: str) -> str:
    path = os.path.abspath(os.path.expanduser(text))  # no realpath: Kubernetes renews files by links
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise FieldError(flag, text, "a file that can be read")
    return path


def folder(flag: str, text: str) -> Path:
    """Absolute path of a directory that exists or can be made."""
    if not text.strip() or "\0" in text:
        raise FieldError(flag, text, "a directory")
    path = Path(os.path.abspath(os.path.expanduser(text)))
    standing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not standing.is_dir():
        raise FieldError(flag, text, f"{standing} is not a directory")
    if not os.access(standing, os.W_OK | os.X_OK):
        raise FieldError(flag, text, f"{standing} is not writable; give another or change its permissions")
    return path


def read_profile(flag: str, text: str) -> Profile:
    """The profile in file `text`. Raises FieldError naming the flag."""
    try:
        content = Path(text).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError(
            flag, text, f"a profile that `elastic profile` wrote; it cannot be read ({error})"
        ) from None
    try:
        return parse_profile(content)
    except FieldError as error:
        raise FieldError(flag, text, f"it is no profile: {error}") from None


def _several(read: Callable[[str, str], Any]) -> Callable[[str, str], tuple[Any, ...]]:
    """Reads values separated by commas."""
    return lambda flag, text: tuple(read(flag, part.strip()) for part in text.split(","))


ENDPOINT = ParsedType("HOST:PORT", lambda flag, text: address(flag, text, DYNAMIC_PORT))
ENDPOINTS = ParsedType("HOST:PORT,...", lambda flag, text: addresses(flag, text, DYNAMIC_PORT))
BINDING = ParsedType("BINDING", _binding)
SIGNALS, RANKS, NODES = ParsedType("NAME,...", _signals), ParsedType("RANK,...", _ranks), ParsedType("MIN:MAX", _nodes)
HOST, NAME = ParsedType("HOST", _host), ParsedType("NAME", _name)
LOCAL_ADDR = ParsedType("HOST", lambda flag, text: _host(flag, text) and text)
ACCUMULATE = Choice(tuple(mode.value for mode in Accumulate))
SIZE, SIZES = ParsedType("SIZE", size_of), ParsedType("SIZE,...", _several(size_of))
NAMES, TIMES = ParsedType("NAME,...", _several(_name)), ParsedType("TIME,...", _several(time_of))
FILE, FOLDER, PROFILE = ParsedType("FILE", _file), ParsedType("DIR", folder), ParsedType("FILE", read_profile)
CONF, LINK = ParsedType("KEY=VALUE,...", _conf), ParsedType("LINK", _link)
FAULT = ParsedType("SPEC", lambda _, text: parse_fault(text))
SOURCES = ParsedType("SOURCE,...", lambda _, text: parse_sources(text))
