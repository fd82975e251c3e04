"""Values of flags: text in, checked values out, a FieldError naming the flag otherwise."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
from pathlib import Path

from elastic.core.protocol.store_spec import StoreSpec
from elastic.domain.errors import FieldError
from elastic.planning.cost.profile import Profile, parse_profile

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def signals(text: str) -> tuple[signal.Signals, ...]:
    found = []
    for name in text.split(","):
        number = getattr(signal.Signals, name.strip(), None)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise FieldError(
                "--signals-to-handle", name, "names as in SIGTERM,SIGINT,SIGUSR1; not SIGKILL or SIGSTOP"
            )
        found.append(number)
    return tuple(found)


def streams(flag: str, text: str, nproc: int) -> tuple[int, ...]:
    """torchrun's form: one digit 0..3 for all ranks, or RANK:DIGIT,... with 0 for the ranks left out."""
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


def ranks(text: str) -> tuple[int, ...]:
    if text and not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise FieldError("--local-ranks-filter", text, "local ranks separated by commas, as 0,1,2")
    return tuple(int(item) for item in text.split(",")) if text else ()


def size(flag: str, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise FieldError(flag, text, "a size above 0, as 16GiB, 500MB or a number of bytes")
    unit = match[2] or ""
    return int(float(match[1]) * (_BINARY[unit] if unit in _BINARY else _UNITS[unit]))


def address(flag: str, text: str, default_port: int) -> str:
    """host:port, or [IPv6]:port, with a default port."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s/]+)(?::(\d{1,6}))?", text)
    if match is None:
        raise FieldError(flag, text, "HOST:PORT, as in 10.0.0.5:29400")
    return f"{match[1]}:{port(flag, match[2]) if match[2] else default_port}"


def addresses(flag: str, text: str, default_port: int) -> str:
    """One address as `address` or several, separated by commas."""
    return ",".join(dict.fromkeys(address(flag, part.strip(), default_port) for part in text.split(",")))


def store(args: argparse.Namespace) -> StoreSpec:
    """Where the state is kept; files are there and can be read."""
    files = {
        name: _readable(f"--store-{name.replace('_', '-')}", getattr(args, f"store_{name}"))
        for name in ("ca", "cert", "key", "password_file")
    }
    return StoreSpec(url=args.store, user=args.store_user, **files)


def _readable(flag: str, text: str) -> str:
    """Absolute path of a file that can be read; "" for ""."""
    if not text:
        return ""
    path = os.path.abspath(os.path.expanduser(text))
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise FieldError(flag, text, "a file that can be read")
    return path


def host(flag: str, text: str) -> str:
    bare = text.strip("[]")
    if re.fullmatch(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*", bare):
        return f"[{bare}]"
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*)", bare):
        raise FieldError(flag, text, "a host name or an IP address, without a port")
    return bare


def port(flag: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text) or not 1 <= int(text) <= 65535:
        raise FieldError(flag, text, "a port from 1 to 65535")
    return int(text)


def whole(flag: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise FieldError(flag, text, "a whole number from 0 up")
    return int(text)


def seconds(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FieldError(flag, text, "a number of seconds")
    return value


def choice(flag: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise FieldError(flag, text, f"one of {', '.join(choices)}")
    return text


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:40] or "job"


def folder(flag: str, text: str | None) -> Path | None:
    """Absolute path of a directory that exists or can be made; None for no text."""
    if text is None:
        return None
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
