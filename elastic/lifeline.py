"""No orphans: processes that end when the one that started them ends, however it ends.

Two ways, both without polling:

- `watch_parent(fd)`: the parent holds the write end of a pipe and never writes. When it dies the kernel closes
  that end, the child reads end-of-file and kills its whole process group. For the agent and the
  coordinator, which run our code.
- `tied_command(argv)`: the child is started through this file, which asks the kernel to kill it when its
  parent dies (PR_SET_PDEATHSIG; kept across exec), then becomes `argv`. For workers, which run anybody's
  code, and may be stopped. The kernel takes the *thread* that started the child for its parent: start it
  from one that outlives the child.

This file imports the standard library alone, because it also runs by itself, in an interpreter of 15 ms.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def watch_parent(fd: int, on_loss: Callable[[], None] | None = None) -> threading.Thread:
    """Call `on_loss` (default: kill this process group) once every holder of the other end of `fd` is gone.

    `fd` is the inherited read end of the parent's pipe; it is not passed on to children of this process.
    """
    os.set_inheritable(fd, False)
    thread = threading.Thread(
        target=_wait_for_end, args=(fd, on_loss or kill_group), name="lifeline", daemon=True
    )
    thread.start()
    return thread


def kill_group() -> None:
    """SIGKILL this process and, when it leads a process group, everything in the group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def tied_command(argv: tuple[str, ...]) -> list[str]:
    """The command line that runs `argv` in a process which dies with the thread that starts it."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *argv]


def _wait_for_end(fd: int, on_loss: Callable[[], None]) -> None:
    while os.read(fd, 64):
        pass
    on_loss()


def _become(parent: int, argv: list[str]) -> None:
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            print(f"cannot tie {argv[0]} to its parent: errno {ctypes.get_errno()}", file=sys.stderr)
    if os.getppid() != parent:
        sys.exit(f"the process that started {argv[0]} is gone")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
