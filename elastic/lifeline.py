"""Ways to end a process when its parent ends, so that no orphan remains. None of them polls.

- `watch(fd)`, for agents and coordinators, which run our code: the parent holds the write
  end of a pipe and never writes. When the parent dies, the kernel closes that end, the child reads
  end-of-file and kills its whole process group. A stopped child could not read, so the kernel then
  also continues it (PR_SET_PDEATHSIG with SIGCONT). With SIGKILL, the child would end before it had
  killed the rest of its group.
- `tied_command(argv)`, for workers, which run any code and may be stopped: the child starts through
  this file. It asks the kernel to kill it when its parent dies (PR_SET_PDEATHSIG, kept across exec)
  and then becomes `argv`. The kernel means the *thread* that started the child: start it from a
  thread that outlives it.

This file imports only the standard library, because it also runs by itself, in an interpreter that
starts in 15 ms.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def watch(fd: int) -> None:
    """Kill this process, and the group that it leads, once all writers of the pipe `fd` are gone.

    `fd` is the inherited read end of the parent's pipe; children of this process do not inherit it.
    """
    os.set_inheritable(fd, False)
    _on_death_of_parent(signal.SIGCONT, "this process")
    threading.Thread(target=_wait_for_end, args=(fd,), name="lifeline", daemon=True).start()


def _wait_for_end(fd: int) -> None:
    while os.read(fd, 64):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def tied_command(argv: tuple[str, ...]) -> list[str]:
    """Return a command line for `argv` whose process dies with the thread that starts it."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *argv]


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this fork of process `parent` when the thread that forked it ends."""
    _on_death_of_parent(signal.SIGKILL, "this process")
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def _on_death_of_parent(number: signal.Signals, name: str) -> None:
    """Let the kernel send this process a signal when the thread that started it ends."""
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            print(f"cannot tie {name} to its parent: errno {ctypes.get_errno()}", file=sys.stderr)


def _become(parent: int, argv: list[str]) -> None:
    _on_death_of_parent(signal.SIGKILL, argv[0])
    if os.getppid() != parent:
        sys.exit(f"the process that started {argv[0]} is gone")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
