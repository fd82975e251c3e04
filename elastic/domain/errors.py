"""Every error that users of this project can meet.

ElasticError
 +-- UsageError            a flag, file or message is wrong (exit code 2)
 |    +-- FieldError       names the field, the value and the remedy
 |    |    +-- CorruptCheckpoint  a durable checkpoint is incomplete or damaged
 |    |    |    +-- MissingCheckpoint  its files are not there, on this node at least
 |    |    +-- UnknownMessage  a message of a kind that this version does not know
 |    +-- IncompatibleVersion  another version wrote the state or is at the other end
 |    +-- MissingExtra     an optional package is not installed
 +-- StaleError            an older term or epoch was refused
 +-- VaultError            a copy is missing, torn or corrupt
 |    +-- VaultFull        there is no room for another copy
 |    +-- SlotError        the node's memory and disk refuse new copies
 |    +-- VaultUnreachable no connection to a vault, or it broke
 |    +-- Unanswered       a vault that can be reached has not answered in time
 +-- OtherModel            a node has built other frozen parameters than the training began with
 +-- LedgerError           a micro-batch would be doubled or is missing
 +-- DivergenceError       holders of a layer disagree about it
 +-- NonfiniteError        a gradient norm is infinite or NaN
 +-- InfeasiblePlan        no plan fits the available nodes
 +-- Unrecoverable         redundancy exceeded and no checkpoint (exit code 3)
 +-- ChannelClosed         the other side of a local channel is gone
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from elastic.domain.types import Divergence, StepRecord

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_UNRECOVERABLE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
EXIT_TERMINATED = 143
EXIT_DRAINED = 4
"""Exit code of an agent whose node was drained. It does not mean that the job ended."""
EXIT_JOB_FAILED = 5
"""Exit code of a service whose job failed. Unlike after a crash (1), a restart does not help."""


EXIT_INCOMPATIBLE = 6
"""Exit code of a service whose version does not fit the job. A restart does not help."""
MAX_DESCRIPTION_CHARS = 1000
"""Longest text of `describe`. The text is cut, because it travels in reports and log lines."""


_PACKAGE = __file__.removesuffix("domain/errors.py")
_NOT_THE_USERS = (_PACKAGE, "/site-packages/", "/dist-packages/", "<frozen ", "/lib/python3")
"""Parts of the names of files that are not the user's code."""


def describe(error: BaseException) -> str:
    """Return type and message of an error in one line of at most MAX_DESCRIPTION_CHARS."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    return (f"{kind}: {text}" if text else kind)[:MAX_DESCRIPTION_CHARS]


def place_of(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return the place of an error as "FILE:LINE in FUNCTION", from the (file, line, function) of
    its frames, outermost first; "": there are none.

    It is the innermost frame of the user's own code, else the innermost frame.
    """
    known = list(frames)
    own = [frame for frame in known if is_users(frame[0])]
    file, line, function = ([("", 0, ""), *known, *own])[-1]
    return f"{file}:{line}{f' in {function}' if function else ''}" if file else ""


def is_users(file: str) -> bool:
    """Return whether a file has the user's own code, not that of this package or a library."""
    return not any(part in file for part in _NOT_THE_USERS)


def with_place(text: str, error: BaseException) -> str:
    """Add the place where `error` was raised to a text of at most MAX_DESCRIPTION_CHARS."""
    frames, step = [], error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        frames.append((code.co_filename, step.tb_lineno, code.co_name))
        step = step.tb_next
    return placed(text, place_of(frames))


def placed(text: str, place: str) -> str:
    """Add a place to a text of at most MAX_DESCRIPTION_CHARS, at the cost of the text's end."""
    end = f" ({place})" if place else ""
    return text[: MAX_DESCRIPTION_CHARS - len(end)] + end


def service_exit(code: int) -> int:
    """Return the exit code of a service whose job ended with `code`. The script's own codes become
    EXIT_JOB_FAILED."""
    own = (EXIT_OK, EXIT_UNRECOVERABLE, EXIT_DRAINED, EXIT_INTERRUPTED, EXIT_TERMINATED)
    return code if code in own else EXIT_JOB_FAILED


class ElasticError(Exception):
    """Base class of all errors that this package raises."""

    exit_code = EXIT_FAILURE


class UsageError(ElasticError):
    """The user gave an unusable value; the text tells how to correct it."""

    exit_code = EXIT_USAGE


class FieldError(UsageError):
    """A named field holds an unusable value."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field}: {value!r} is not usable: {remedy}")


class CorruptCheckpoint(FieldError):
    """A durable checkpoint is incomplete or damaged. An older one may be good."""


class MissingCheckpoint(CorruptCheckpoint):
    """Files of a durable checkpoint are not there. Another node may see them."""


class UnknownMessage(FieldError):
    """This version does not know the kind of a message, which is ignored."""


class IncompatibleVersion(UsageError):
    """The text names both versions and the remedy."""

    exit_code = EXIT_INCOMPATIBLE


class MissingExtra(UsageError, ImportError):
    """An optional package is not installed; the text names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed: "
            f"pip install 'elastic-runtime[{extra}]'"
        )


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Raise `MissingExtra` if an import inside the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or extra, extra, purpose) from None


class StaleError(ElasticError):
    """A message of an older term or epoch was refused."""


class VaultError(ElasticError):
    """A copy in a vault is missing, torn or corrupt."""


class VaultFull(VaultError):
    """A vault has no room for a copy; the copies in it stay whole."""


class SlotError(VaultError):
    """A node can create no room for copies, for another reason than a lack of room."""


class VaultUnreachable(VaultError):
    """A vault could not be reached, or contact with it was lost: by a refused or broken connection,
    a failed TLS handshake or a time limit. The copies may be whole."""


class Unanswered(VaultError):
    """A vault has not answered in time, although its machine has acknowledged all bytes. So the
    network is sound, and the vault is busy, stopped or hung."""


class OtherModel(ElasticError):
    """The frozen parameters that this node has built are not those of the training."""


class LedgerError(ElasticError):
    """A layer's gradient would hold a micro-batch twice, or lacks one."""

    def __init__(self, text: str, doubled: int = 0, missing: int = 0) -> None:
        """`doubled`, `missing`: number of micro-batches that a commit found twice or nowhere."""
        super().__init__(text)
        self.doubled, self.missing = doubled, missing


class DivergenceError(ElasticError):
    """Holders of a layer disagree about its gradient or its parameters."""

    def __init__(self, step: int, found: tuple[Divergence, ...]) -> None:
        super().__init__(f"step {step}: {'; '.join(one.text for one in found)}")
        self.step, self.found = step, found


class NonfiniteError(ElasticError):
    """The gradient norm of a step is infinite or NaN."""

    def __init__(self, text: str, record: StepRecord) -> None:
        super().__init__(text)
        self.record = record


class InfeasiblePlan(ElasticError):
    """No plan fits the available nodes; the text says which resource is short and by how much."""


class Unrecoverable(ElasticError):
    """Redundancy was exceeded and no durable checkpoint exists."""

    exit_code = EXIT_UNRECOVERABLE


class ChannelClosed(ElasticError):
    """The process at the other end of a channel is gone."""
