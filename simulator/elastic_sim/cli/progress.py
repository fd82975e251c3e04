"""Shows on standard error how far a long command is. Standard output has only the results."""

from __future__ import annotations

import signal
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

import click
from tqdm import tqdm

from elastic.reminder import EVERY_S

BAR = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"

FIRST_S = 2.0
"""Time in seconds until the first line. The user has waited for Python's imports, too."""


class Progress:
    """Share of a command's work that is done, and what is computed now.

    A command that takes less than FIRST_S shows nothing. Later there is a bar on a terminal, and
    elsewhere one line per EVERY_S. Another thread shows it, because one step may take long.
    """

    def __init__(self, command: str) -> None:
        """`command`: as the user wrote it, for the lines."""
        self._command, self._began = command, time.monotonic()
        self._share, self._text = 0.0, "reading the input"
        bar = tqdm(
            total=1.0,
            desc=command,
            bar_format=BAR,
            delay=FIRST_S,
            miniters=0,
            disable=not sys.stderr.isatty(),
        )
        self._bar, self._ended = bar, threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def show(self, share: float, text: str) -> None:
        """Set the share of the work that is done, and what is computed now."""
        self._share, self._text = share, text

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        place: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if error is None:
            self._share = 1.0
        self._bar.update(self._share - self._bar.n)
        self._bar.close()

    def _run(self) -> None:
        """Show the progress until the command has ended. Ctrl-C is for the main thread."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        wait_s = FIRST_S
        while not self._ended.wait(wait_s):
            wait_s = EVERY_S
            with suppress(OSError, ValueError):  # nobody reads standard error
                if self._bar.disable:
                    click.echo(self._line(), err=True)
                else:
                    self._bar.set_postfix_str(self._text, refresh=False)
                    self._bar.update(self._share - self._bar.n)

    def _line(self) -> str:
        seconds = time.monotonic() - self._began
        return f"{self._command}: {self._share:.0%} done after {seconds:.0f} s: {self._text}"
