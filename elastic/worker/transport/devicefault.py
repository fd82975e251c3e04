"""A device that breaks is a crash of its worker: the agent starts it again, and the job goes on.

What a broken device holds is lost with the process; what was published lies in the vaults. Running out of memory, or
asking for what no device can do, is the script's own fault and ends the job (`elastic.core.protocol.device_errors`).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from elastic.core.protocol import messages as m
from elastic.core.protocol.device_errors import is_device_error, is_link_error, is_script_error
from elastic.domain.errors import EXIT_FAILURE

CAUSE_CHARS = 300
"""Of an error's text, as the cause of a crash."""
_ACCELERATOR: type[BaseException] | tuple[()] = getattr(torch, "AcceleratorError", ())
_MEMORY: type[BaseException] | tuple[()] = getattr(torch, "OutOfMemoryError", ())


def broke(error: BaseException) -> bool:
    """Whether a device, its driver or a link of devices raised this, and not for what the script asked."""
    if not isinstance(error, RuntimeError) or isinstance(error, _MEMORY) or is_script_error(str(error)):
        return False
    return isinstance(error, _ACCELERATOR) or is_device_error(str(error))


def broke_here(error: BaseException) -> bool:
    """The same, where the other end of a link cannot have caused it."""
    return broke(error) and not is_link_error(str(error))


@contextmanager
def crashing(send: Callable[[object], None], local_rank: int) -> Iterator[None]:
    """End this process, with the error as its last words, when its device breaks inside.

    At once: what the interpreter would tidy up waits for the device, which may never answer.
    """
    try:
        yield
    except RuntimeError as error:
        if not broke(error):
            raise
        try:
            traceback.print_exception(error)
            send(m.Crashed(f"{type(error).__name__}: {error}".splitlines()[0][:CAUSE_CHARS], local_rank))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(EXIT_FAILURE)
