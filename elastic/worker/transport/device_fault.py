"""Tells faults of a node from errors of the script, and crashes the worker on a fault of its node.

A node is at fault if its device breaks, if its storage fails or is full, if it has no memory or no
threads left, or if it has other files of the model. The agent restarts a crashed worker, and the
job continues: recovery reads the published copies from the vaults. A node that crashes repeatedly
is left out. Running out of device memory, or an operation that no device supports, is an error of
the script and ends the job
(`elastic.core.protocol.device_errors`).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from elastic.core.protocol import messages as m
from elastic.core.protocol.device_errors import (
    is_device_error,
    is_host_fault,
    is_link_error,
    is_script_error,
)
from elastic.domain.errors import EXIT_FAILURE, OtherModel, SlotError, VaultFull

CAUSE_CHARS = 300
"""Maximum length of an error's text in a crash report."""


def is_device_fault(error: BaseException) -> bool:
    """Return whether a device, its driver or a link between devices caused `error`."""
    text, by_script = str(error), isinstance(error, torch.OutOfMemoryError)
    if not isinstance(error, RuntimeError) or by_script or is_script_error(text):
        return False
    return isinstance(error, torch.AcceleratorError) or is_device_error(text)


def is_local_fault(error: BaseException) -> bool:
    """Return whether `error` is a fault of this node, and not of another end of a link."""
    return is_node_fault(error) and not is_link_error(str(error))


def is_node_fault(error: BaseException) -> bool:
    """Return whether a device, the storage or the limits of this node caused `error`."""
    own = isinstance(error, VaultFull | SlotError | OtherModel)
    return own or is_host_fault(error) or is_device_fault(error)


@contextmanager
def crash_on_node_fault(send: Callable[[object], None], local_rank: int) -> Iterator[None]:
    """Report a fault of this node inside the block through `send`, and end this process.

    The process ends without the interpreter's cleanup, which would wait for a broken device.
    """
    try:
        yield
    except Exception as error:
        if not is_node_fault(error):
            raise
        try:
            traceback.print_exception(error)
            lines = str(error).splitlines()
            cause = ": ".join([type(error).__name__, *lines[:1]])[:CAUSE_CHARS]
            send(m.Crashed(cause, local_rank))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(EXIT_FAILURE)
