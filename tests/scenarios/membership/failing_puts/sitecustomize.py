"""Lets the agents of a real job fail to send copies to other vaults while a file exists.

Python imports this module at the start of every process whose PYTHONPATH has this folder. The
variable FAILING_PUTS names the file.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from typing import Any

PUT = b'{"kind":"Put"'
"""Beginning of a request that brings copies, after the four bytes of its length."""


def begin(trigger: str) -> None:
    send = socket.socket.send

    def sent(self: socket.socket, data: Any, flags: int = 0) -> int:
        if bytes(memoryview(data)[4 : 4 + len(PUT)]) == PUT and os.path.exists(trigger):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return send(self, data, flags)

    socket.socket.send = sent  # type: ignore[method-assign,assignment]


if "FAILING_PUTS" in os.environ and "elastic.agent.service" in sys.orig_argv:
    begin(os.environ["FAILING_PUTS"])
