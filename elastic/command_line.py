"""Common style of the commands `elastic` and `elastic-sim`: flags, files, help and errors.

Flags may be written --a-b or --a_b. A usage error is one line on standard error,
`PROG COMMAND: message`. An error of a file or directory is a usage error: `file_errors` names the
flag that gave it, and `CommandLine.run` reports those that no flag gave. It also replaces the name
of an internal field by the flag that gave the value (`_with_flag`).
"""

from __future__ import annotations

import errno
import math
import os
import re
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import click

from elastic.domain.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, ElasticError, FieldError
from elastic.planning.plan.units import duration_of

PATH = "elastic.command_line.path"
"""Key in a click context's `meta`; its value is the running command as the user wrote it."""
CONTEXT = "elastic.command_line.context"
"""Key in a click context's `meta`; its value is the context of the running command."""


def _dashes(name: str) -> str:
    return name.replace("_", "-")


SETTINGS: dict[str, Any] = {
    "token_normalize_func": _dashes,
    "help_option_names": ["-h", "--help"],
    "show_default": True,
}


class ParsedType(click.ParamType):  # type: ignore[type-arg]
    """Parameter type of values that `read(flag, text)` parses; `read` raises FieldError."""

    def __init__(self, name: str, read: Callable[[str, str], Any]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):  # a default
            return value
        return self._read(_flag_of(param) if param else self.name, value)

    def split_envvar_value(self, rv: str) -> list[str]:
        """Return the whole variable as one value: a repeatable option is not split at spaces."""
        return [rv]


def time_of(flag: str, text: str) -> float:
    """Return the seconds in `text`: a number, or 10us, 30s, 2m, 1h or 2d. Raises FieldError."""
    with suppress(ValueError):
        seconds = float(text.removesuffix("s"))
        if 0 <= seconds < math.inf:
            return seconds
    return duration_of(flag, text)


# ---- files and directories ----

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
TRIAL_BYTES = 4096
MAX_INPUT_BYTES = 64 << 20
"""Largest file that a flag may name, unless its command allows more."""
_REASONS = {
    errno.ENOENT: "there is no such file",
    errno.EISDIR: "it is a directory",
    errno.ENOTDIR: "a part of its path is not a directory",
    errno.EEXIST: "it is not a directory",
    errno.EACCES: "access is denied",
    errno.EPERM: "access is denied",
    errno.ELOOP: "it is a link to itself",
    errno.ENAMETOOLONG: "its name is too long",
    errno.EROFS: "its file system is read-only",
    errno.ECONNREFUSED: "it refuses the connection",
    errno.ECONNRESET: "it broke the connection",
    errno.EHOSTUNREACH: "no network leads there",
    errno.ENETUNREACH: "no network leads there",
}


def reason_of(error: Exception) -> str:
    """Return in plain words why a file cannot be used, or why an address cannot be reached."""
    if isinstance(error, socket.gaierror):
        unknown = error.errno != socket.EAI_AGAIN
        return "there is no host of this name" if unknown else "no name server answers"
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, OSError):
        return _REASONS.get(error.errno or 0) or error.strerror or str(error)
    return "it cannot be the name of a file"  # ValueError: a NUL


def file_problem(error: OSError) -> str:
    """Return path and reason of an error of a file; "": it is of something else, as a socket."""
    if isinstance(error, FileNotFoundError) and error.filename is None and _is_cwd_gone():
        return "the working directory is gone: change to another"
    reason = reason_of(error)
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {reason}"
    return reason if error.errno in NO_ROOM else ""


def _is_cwd_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


@contextmanager
def file_errors(flag: str, given: object, done: str = "written") -> Iterator[None]:
    """Raise FieldError for an error of a file inside the block: `flag` gave the path `given`.

    `done`: "written" or "read", for the text.
    """
    try:
        yield
    except OSError as error:
        problem = file_problem(error)
        if not problem:
            raise
        why = problem.removeprefix(f"{given}: ")
        if isinstance(error, FileNotFoundError) and done == "written" and not _is_cwd_gone():
            why = "no file can be made there"
        raise FieldError(flag, str(given), f"it cannot be {done} ({why}); give another") from error


def unreadable(flag: str, path: object, error: Exception) -> FieldError:
    """Return the error of a file that `flag` gave and that cannot be read."""
    return FieldError(flag, str(path), f"{reason_of(error)}; name a readable file")


@contextmanager
def content_errors(flag: str, path: object, wanted: str) -> Iterator[None]:
    """Raise FieldError about the file `path`, which `flag` gave, for a wrong value in its content.

    `wanted`: what the file must be, as "a profile".
    """
    try:
        yield
    except FieldError as error:
        kind, _, inner = error.field.partition(".")
        inner = inner if kind[:1].isupper() else error.field
        shown = f"{inner}: {error.value!r} is not usable: " if inner else ""
        remedy = f"it is not {wanted}: {shown}{error.remedy}"
        raise FieldError(flag, str(path), remedy) from error


def input_bytes(flag: str, path: Path, most_bytes: int = MAX_INPUT_BYTES) -> bytes:
    """Return the content of a file with at most `most_bytes`. Raises FieldError.

    A device may have no end, so no more than MAX_INPUT_BYTES of it are read.
    """
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            regular = stat.S_ISREG(about.st_mode)
            most = most_bytes if regular else min(most_bytes, MAX_INPUT_BYTES)
            data = b"" if regular and about.st_size > most else file.read(most + 1)
    except (OSError, ValueError) as error:
        raise unreadable(flag, path, error) from error
    if len(data) > most or (regular and about.st_size > most):
        raise FieldError(flag, str(path), f"it has more than {most} bytes: give a smaller one")
    return data


def input_text(flag: str, path: Path, most_bytes: int = MAX_INPUT_BYTES) -> str:
    """Return the text of a file, without a byte order mark. Raises FieldError."""
    try:
        return input_bytes(flag, path, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        remedy = "it is not text in UTF-8; name a readable text file"
        raise FieldError(flag, str(path), remedy) from error


def make_folder(flag: str, path: Path, *, may_be_full: bool = False) -> None:
    """Create directory `path` if it is missing, and make sure that files can be written there.

    `may_be_full`: a lack of room is no error. Raises FieldError.
    """
    with file_errors(flag, path):
        try:
            path.mkdir(parents=True, exist_ok=True)
            _try_to_write(path)
        except OSError as error:
            if not (may_be_full and error.errno in NO_ROOM):
                raise


def _try_to_write(folder: Path) -> None:
    """Write a nameless file into `folder` and remove it. Raises OSError."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(TRIAL_BYTES))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def output_file(flag: str, text: str) -> Path:
    """Return the path of a file that can be written. Raises FieldError. No file is made here."""
    with file_errors(flag, text):
        path = Path(os.path.expanduser(text))
        target = Path(os.path.realpath(path))  # a link may lead to a file that does not exist yet
        if not text:
            raise FieldError(flag, text, "name a file")
        if target.is_dir():
            raise FieldError(flag, text, "it is a directory; name a file")
        if target.is_symlink():
            raise FieldError(flag, text, "it is a link to itself; name a file")
        if not target.exists():
            if not target.parent.is_dir():
                remedy = f"the directory {target.parent} does not exist; make it first"
                raise FieldError(flag, text, remedy)
            _try_to_write(target.parent)
        elif not os.access(path, os.W_OK):
            raise FieldError(flag, text, "it is not writable; change that or give another")
    return path


TIME, OUTPUT = ParsedType("TIME", time_of), ParsedType("FILE", output_file)


class Command(click.Command):
    """Command with the common settings; a flag in place of an option's value is an error."""

    def __init__(self, name: str | None, *, context_settings: Any = None, **more: Any) -> None:
        super().__init__(name, context_settings={**SETTINGS, **(context_settings or {})}, **more)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[PATH], ctx.meta[CONTEXT] = ctx.command_path, ctx
        try:
            given, _, _ = self.make_parser(ctx).parse_args(list(args))
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # a missing value has none
            raise
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        flags = {name for option in options for name in option.opts if name.startswith("--")}
        for option in options:
            value = given.get(option.name or "")
            if isinstance(value, str) and _dashes(value.partition("=")[0]) in flags:
                text = f"Option {_flag_of(option)!r} requires an argument, but {value!r} follows."
                raise click.BadOptionUsage(_flag_of(option), text, ctx)
        return super().parse_args(ctx, args)

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the first sentence of the help. It is wrapped, never cut."""
        return super().get_short_help_str(sys.maxsize)


def flag(*names: str, **more: Any) -> click.Option:
    """Return an option with these names; `more` are the arguments of click.Option."""
    return click.Option(names, **more)


def read_flags(command: click.Command, words: Sequence[str] | None) -> SimpleNamespace:
    """Return the parameters of `command` that `words` give, by name; the command does not run.

    `words` None: the arguments of this process. Raises FieldError and click's errors.
    """
    given = sys.argv[1:] if words is None else list(words)
    return SimpleNamespace(**command.make_context(command.name, given).params)


class CommandLine(click.Group):
    """Group of commands that reports each usage error in one line."""

    command_class = Command
    group_class = type

    def __init__(self, name: str | None, *, context_settings: Any = None, **more: Any) -> None:
        more.setdefault("no_args_is_help", False)
        super().__init__(name, context_settings={**SETTINGS, **(context_settings or {})}, **more)

    def run(self, words: Sequence[str]) -> int:
        """Run the command `words`; return the exit code."""
        command, context = self.name, None
        try:
            with self.make_context(self.name, list(words)) as root:
                try:
                    return self.invoke(root) or EXIT_OK
                finally:
                    command, context = root.meta.get(PATH, command), root.meta.get(CONTEXT)
        except click.exceptions.Exit as ended:
            return ended.exit_code
        except click.ClickException as error:
            print(_error_line(error), file=sys.stderr)
            return error.exit_code
        except ElasticError as error:
            print(f"{command}: {_with_flag(error, context)}", file=sys.stderr)
            return error.exit_code
        except BrokenPipeError:  # The reader of the output is gone.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_OK
        except OSError as error:
            if not (problem := file_problem(error)):
                raise
            print(f"{command}: {problem}", file=sys.stderr)
            return EXIT_USAGE
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED

    def main(self, args: Sequence[str] | None = None, *_: Any, **__: Any) -> NoReturn:
        sys.exit(self.run(sys.argv[1:] if args is None else args))


def _flag_of(param: click.Parameter) -> str:
    """Return a parameter's name in messages: its longest flag, or SCRIPT for an argument."""
    is_option = isinstance(param, click.Option)
    return max(param.opts, key=len) if is_option else param.human_readable_name.strip("[].")


def _error_line(error: click.ClickException) -> str:
    """Return an error of click in one line, with its remedy."""
    text, context = " ".join(error.format_message().split()), getattr(error, "ctx", None)
    if context is None:
        return text
    hint = f"see `{context.command_path} --help`"
    if isinstance(context.command, click.Group):
        hint = f"commands: {', '.join(context.command.list_commands(context))}; {hint}"
    param = getattr(error, "param", None)
    if isinstance(error, click.MissingParameter) and isinstance(param, click.Option):
        text = f"{text.rstrip('.')}: {param.make_metavar(context)} ({param.help})"
    if isinstance(param, click.Option) and (variable := _variable(param, context)):
        hint = f"given by the environment variable {variable}; {hint}"
    return f"{context.command_path}: {text} ({hint})"


def _with_flag(error: ElasticError, context: click.Context | None) -> str:
    """Return the text of an error that names the flag or argument that gave the value, and the
    environment variable if one gave it."""
    if not isinstance(error, FieldError) or context is None:
        return str(error)
    field = _field_in_flags(error, context)
    text = f"{field}: {str(error).removeprefix(f'{error.field}: ')}"
    name = re.split("[ :]", field, maxsplit=1)[0]
    for param in context.command.params:
        if isinstance(param, click.Option) and name in param.opts:
            variable = _variable(param, context)
            return f"{text} (given by the environment variable {variable})" if variable else text
    return text


def _field_in_flags(error: FieldError, context: click.Context) -> str:
    """Return the field of an error in terms of the command's flags and arguments.

    A field that names one of them stays. A place in a file that a flag gave ("t.csv, line 3")
    follows the flag. The name of an internal field ("market.nodes") is replaced by the flag that
    gave the same text or has the same name. Every other field stays.
    """
    field, params = error.field, context.command.params
    names = {_flag_of(param) for param in params}
    names |= {name for param in params if isinstance(param, click.Option) for name in param.opts}
    if not names.isdisjoint(re.split("[ ,:]+", field)):
        return field
    for param in params:
        for path in _values(param, context):
            if isinstance(path, Path) and _is_inside(field, path):
                return f"{_flag_of(param)}: {field}"
    if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", field):
        return field
    for param in params:
        if isinstance(error.value, str) and error.value in map(str, _values(param, context)):
            return _flag_of(param)
    parts = field.split(".")
    given = [param for param in params if _is_given(param, context, error.value)]
    for number in reversed(range(len(parts))):
        for param in given:
            if parts[number] in (param.name, _flag_of(param).strip("-").replace("-", "_").lower()):
                return " ".join((_flag_of(param), *parts[number + 1 :]))
    return field


def _is_given(param: click.Parameter, context: click.Context, value: object) -> bool:
    """Return whether the user gave a parameter, or its default is `value`."""
    name = param.name or ""
    default = context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT
    return not default or context.params.get(name) == value


def _values(param: click.Parameter, context: click.Context) -> tuple[Any, ...]:
    """Return the values of a parameter: several if it is repeatable, none if it was not given."""
    value = context.params.get(param.name or "")
    if isinstance(value, tuple):
        return value
    return () if value is None or value == "" else (value,)


def _is_inside(field: str, path: Path) -> bool:
    """Return whether a field is a file or a folder, or a place in it."""
    return any(
        field.startswith(name) and field[len(name) :][:1] in ("", ",", ":", "/")
        for name in (str(path), path.name)
        if name
    )


def _variable(param: click.Option, context: click.Context) -> str:
    """Return the environment variable that gave a parameter's value; "": none did."""
    source = context.get_parameter_source(param.name or "")
    if source is not click.core.ParameterSource.ENVIRONMENT:
        return ""
    own = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
    names = [*own, f"{context.auto_envvar_prefix}_{(param.name or '').upper()}"]
    return next(name for name in names if os.environ.get(name))
