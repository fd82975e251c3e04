"""Common style of the commands `elastic` and `elastic-sim`: flags, files, help and errors.

Flags may be written --a-b or --a_b. A usage error is one line on standard error,
`PROG COMMAND: message`. An error of a file or directory is a usage error: `file_errors` names the
flag that gave it, and `CommandLine.run` reports those that no flag gave.
"""

from __future__ import annotations

import errno
import math
import os
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


def file_problem(error: OSError) -> str:
    """Return path and reason of an error of a file; "": it is of something else, as a socket."""
    if isinstance(error, FileNotFoundError) and error.filename is None and _is_cwd_gone():
        return "the working directory is gone: change to another"
    reason = error.strerror or str(error)
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
        raise FieldError(flag, str(given), f"it cannot be {done} ({why}); give another") from error


def input_bytes(flag: str, path: Path, most_bytes: int = MAX_INPUT_BYTES) -> bytes:
    """Return the content of a file. A device has no end, so no more than `most_bytes` are read.
    Raises FieldError."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        raise FieldError(flag, str(path), f"name a readable file: {error}") from error
    if len(data) > most_bytes:
        remedy = f"it has more than {most_bytes} bytes: give a smaller one"
        raise FieldError(flag, str(path), remedy)
    return data


def input_text(flag: str, path: Path, most_bytes: int = MAX_INPUT_BYTES) -> str:
    """Return the text of a file, without a byte order mark. Raises FieldError."""
    try:
        return input_bytes(flag, path, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FieldError(flag, str(path), f"name a readable text file: {error}") from error


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
            print(f"{command}: {error}{_origin(error, context)}", file=sys.stderr)
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
    return max(param.opts, key=len) if is_option else param.human_readable_name


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


def _origin(error: ElasticError, context: click.Context | None) -> str:
    """Return the end of an error's line: the variable that gave the value; "": none did."""
    if not isinstance(error, FieldError) or context is None:
        return ""
    name = error.field.partition(" ")[0]
    for param in context.command.params:
        if isinstance(param, click.Option) and name in param.opts:
            variable = _variable(param, context)
            return f" (given by the environment variable {variable})" if variable else ""
    return ""


def _variable(param: click.Option, context: click.Context) -> str:
    """Return the environment variable that gave a parameter's value; "": none did."""
    source = context.get_parameter_source(param.name or "")
    if source is not click.core.ParameterSource.ENVIRONMENT:
        return ""
    own = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
    names = [*own, f"{context.auto_envvar_prefix}_{(param.name or '').upper()}"]
    return next(name for name in names if os.environ.get(name))
