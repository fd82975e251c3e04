"""How far the job is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Protocol, TextIO

RECOVERING = ("halting", "installing")
"""Phases of the job in which an epoch change is under way."""
OVER = ("finished", "failed")


class View(Protocol):
    """Shows progress to the user."""

    def update(self, entry: dict[str, Any]) -> None:
        """One line of progress.jsonl."""

    def note(self, text: str) -> None:
        """One line for the user that stays."""

    def close(self) -> None:
        """Nothing more comes."""


def describe(entry: dict[str, Any]) -> str:
    """What a progress entry says besides the step: loss, tokens/s, nodes, plan, phase."""
    parts = []
    if isinstance(entry.get("loss"), (int, float)):
        parts.append(f"loss {entry['loss']:.4f}")
    if isinstance(entry.get("tokens_per_s"), (int, float)):
        parts.append(f"{entry['tokens_per_s']:,.0f} tokens/s")
    if entry.get("nodes"):
        parts.append(f"{entry['nodes']} node{'s' if entry['nodes'] != 1 else ''}")
    if entry.get("plan"):
        parts.append(f"plan {entry['plan']}")
    return ", ".join(parts)


class Lines:
    """One line a finished step, and one a change of phase.

    A coordinator that comes back is told the last steps again: those were shown and are passed over.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self._phase = ""
        self._newest = (0, 0)
        """(epoch, step) of the last step shown."""

    def update(self, entry: dict[str, Any]) -> None:
        phase, step, epoch = (
            str(entry.get("phase", "")),
            int(entry.get("step", 0)),
            int(entry.get("epoch", 0)),
        )
        if entry.get("loss") is not None:
            shown_epoch, shown_step = self._newest
            if step <= shown_step and epoch <= shown_epoch:
                return
            self._newest = (epoch, step)
            total = f"/{entry['steps']}" if entry.get("steps") else ""
            self.note(f"step {step}{total}: {describe(entry)}")
        elif phase and phase != self._phase:
            self.note(f"{phase} at step {step}: {describe(entry)}".rstrip(": "))
        self._phase = phase or self._phase

    def note(self, text: str) -> None:
        try:
            print(f"elastic: {text}", file=self._file, flush=True)
        except BrokenPipeError:
            self._file = open(os.devnull, "w")  # noqa: SIM115 - nobody reads; the run goes on

    def close(self) -> None:
        """Lines need no ending."""


class Bar:
    """A progress bar; the workers' output is passed on above it."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=None, unit="step", dynamic_ncols=True, leave=True, file=sys.stderr)
        self._shown: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.console, write = os.pipe()
        self.output = write
        """Descriptor for the agents' standard output and error."""
        self._relay = threading.Thread(target=self._pass_on, name="console", daemon=True)
        self._relay.start()

    def update(self, entry: dict[str, Any]) -> None:
        with self._lock:
            self._shown |= {key: value for key, value in entry.items() if value not in (None, "")}
            if self._shown.get("steps"):
                self._bar.total = self._shown["steps"]
            self._bar.n = self._shown.get("step", 0)
            self._bar.set_description_str(str(self._shown.get("phase", "")), refresh=False)
            self._bar.set_postfix_str(describe(self._shown), refresh=False)
            self._bar.refresh()

    def note(self, text: str) -> None:
        with self._lock:
            self._bar.write(f"elastic: {text}", file=sys.stderr)

    def close(self) -> None:
        os.close(self.output)
        self._relay.join(1.0)
        with self._lock:
            self._bar.close()

    def _pass_on(self) -> None:
        with open(self.console, errors="replace", newline="\n") as lines:
            for line in lines:
                with self._lock:
                    self._bar.write(line.rstrip("\n"), file=sys.stdout)


def make_view() -> Bar | Lines:
    """A bar when the user looks at a terminal, else lines."""
    return Bar() if sys.stderr.isatty() and sys.stdout.isatty() else Lines()
