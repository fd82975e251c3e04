"""The end of a training script: usage errors in one line, and a warning if it never trained.

`watch_errors` is called when a script imports a name of the public interface. Without it a wrong
argument would end in a traceback through this package, which does not help the script's author.
The traceback of an error in the script's own functions does not show the calls of this package.
`watch_script` is called when it imports `Trainer`.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType

from elastic.core.protocol import messages as m
from elastic.domain.errors import ElasticError, UsageError, is_users
from elastic.worker.control.agent_client import WorkerSettings, connect_agent

ONCE = (
    "a script trains once: this process has called Trainer.run() before; "
    "use one Trainer, with the steps of the whole training"
)
NEVER = "ended without training: it never called Trainer(...).run()"
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _Script:
    """State of the script that runs in this process."""

    trained = False
    process = 0
    """Process that imported a public name; 0: none has. A fork of it is not the script."""
    should_train = False
    """Whether the script has imported `Trainer`."""


def watch_errors() -> None:
    """Install the hook that reports usage errors in one line, once."""
    if not _Script.process:
        _Script.process = os.getpid()
        sys.excepthook = partial(_on_uncaught, sys.excepthook)


def watch_script() -> None:
    """Install all hooks of this process, once."""
    watch_errors()
    if not _Script.should_train:
        _Script.should_train = True
        atexit.register(_warn_if_never_trained)


def begin_training() -> None:
    """Called when the script begins to train. Raises UsageError if it has trained before."""
    if _Script.trained:
        raise UsageError(ONCE)
    _Script.trained = True


def user_place(trace: TracebackType | None) -> str:
    """Return "FILE:LINE: " of the innermost line of `trace` in the user's own code; "": none."""
    place = ""
    while trace is not None:
        code, module = trace.tb_frame.f_code, trace.tb_frame.f_globals.get("__name__", "")
        # Methods that dataclasses make have no file, and the name of the class's module.
        if is_users(code.co_filename) and not module.startswith("elastic."):
            place = f"{_short(code.co_filename)}:{trace.tb_lineno}: "
        trace = trace.tb_next
    return place


def without_own_calls(trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` without the frames of this package, if it called the user's function that
    failed. The whole trace of an error of this package, or of a library that it called, is kept."""
    steps: list[TracebackType] = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    own = [_is_own(step.tb_frame.f_code.co_filename) for step in steps]
    last = max((at for at, ours in enumerate(own) if ours), default=-1)
    below = steps[last + 1 :]
    hides = any(is_users(step.tb_frame.f_code.co_filename) for step in below)
    kept: TracebackType | None = None
    for step, ours in reversed(list(zip(steps, own, strict=True))):
        if not (ours and hides):
            kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return kept


def _is_own(file: str) -> bool:
    """Return whether a file belongs to this package."""
    return file.startswith(_PACKAGE)


def _short(path: str) -> str:
    """Return `path` relative to the working directory, if it is below it."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the directory is gone
        return path
    return path if relative.startswith(os.pardir) else relative


def _on_uncaught(
    former: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report a usage error in one line, and end with its exit code; pass on all other errors."""
    if not isinstance(error, UsageError) or hasattr(sys, "ps1"):
        trace = without_own_calls(trace)
        former(kind, error.with_traceback(trace), trace)  # the interpreter prints that of `error`
        return
    text = f"{user_place(trace)}{error}"
    if not _told_agent(text, error.exit_code):
        print(f"elastic: {text}", file=sys.stderr, flush=True)
    raise SystemExit(error.exit_code)


def _told_agent(text: str, code: int) -> bool:
    """Report the job's failure, which the launcher prints once. Return False without an agent, and
    after the training, when the job has its result."""
    if not _is_worker() or _Script.trained:
        return False
    try:
        settings = WorkerSettings.from_environment()
        connect_agent(settings).send(m.Failed(text, code, settings.local_rank))
    except (ElasticError, OSError):
        return False
    return True


def _warn_if_never_trained() -> None:
    """Print a warning, once per job. It goes to stdout, because the last line on stderr counts as
    the cause if the script ends with an exit code."""
    raised = getattr(sys, "last_value", None) is not None
    if _Script.trained or raised or not _is_worker() or os.environ.get("RANK") != "0":
        return
    with contextlib.suppress(OSError, ValueError):
        print(f"elastic: warning: {sys.argv[0]} {NEVER}", flush=True)


def _is_worker() -> bool:
    """Return whether this process is a worker of `elastic run`, and no child of one."""
    first = multiprocessing.parent_process() is None and os.getpid() == _Script.process
    return first and bool(os.environ.get("ELASTIC_AGENT"))
