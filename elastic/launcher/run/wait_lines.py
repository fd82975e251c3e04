"""Lines of the console about a job from which nothing else is heard."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic.launcher.run.event_tail import read_object

LASTING_PAUSE_S = 60.0
"""Pause between two lines about a state that is probably normal."""
FILE, STANDBY, WAITING_NODE = "waiting.json", "standby-{}.json", "waiting-{}.json"
"""Files in which the leader says what the job waits for, each coordinator why it does not lead, and
each node that it waits for a coordinator."""


def waiting_text(answer: dict[str, Any]) -> str:
    """Return what the job waits for, from an answer to `status`; "": nothing, or it is not told."""
    found = answer.get("waiting") or {}
    if not isinstance(found, dict) or not found.get("for"):
        return ""
    ends, seconds = str(found.get("ends", "")), float(found.get("seconds", 0.0))
    return sentence(str(found["for"]), seconds, ends)


def sentence(what: str, seconds: float, ends: str) -> str:
    """Return a wait as a line: what is awaited, for how long, and what ends it."""
    text = f"waiting for {seconds:.0f} s: {what}"
    return f"{text}; {ends}" if ends else text


class WaitLines:
    """Says what the job of a run directory waits for. Times are those of `clock`."""

    def __init__(
        self, run_dir: Path, hosted: Sequence[str], clock: Callable[[], float] = time.time
    ) -> None:
        """`hosted`: addresses of the coordinators that use this run directory."""
        self._run_dir, self._hosted, self._clock = run_dir, hosted, clock
        self._began = self._stepped = clock()
        self._entry: dict[str, Any] = {}
        """Newest progress of the job."""
        self._told, self._told_at = "", 0.0
        """Newest lasting wait that was told, and the time."""

    def observe(self, entry: dict[str, Any]) -> None:
        """Note an entry of progress.jsonl."""
        if entry.get("loss") is not None or entry.get("phase") != self._entry.get("phase"):
            self._stepped = self._clock()
        self._entry = entry

    @property
    def steps(self) -> int:
        """Number of steps of the job; 0: unknown, or the script does not use elastic."""
        return int(self._entry.get("steps") or 0)

    def line(self) -> str:
        """Return the line that is due because nothing else was printed; "": there is none."""
        now, found = self._clock(), self._standby() or read_object(self._run_dir / FILE)
        if found is None and not self._entry:
            log = self._run_dir / "logs" / "coordinator.log"
            what = f"the coordinator at {', '.join(self._hosted)} to start"
            return sentence(what, now - self._began, f"its log is {log}")
        if found and isinstance(found.get("since"), (int, float)):
            what, seconds = str(found.get("what")), max(0.0, now - found["since"])
            if found.get("lasting"):
                if self._told == what and now - self._told_at < LASTING_PAUSE_S:
                    return ""
                self._told, self._told_at = what, now
            return sentence(what, seconds, str(found.get("ends", "")))
        if self._entry.get("phase") != "running":
            return ""
        step, total = int(self._entry.get("step", 0)), self._entry.get("steps")
        number = f"{min(step + 1, total)}/{total}" if total else step + 1
        runs = f"step {number} runs for {now - self._stepped:.0f} s"
        return f"{runs}, micro-batch {int(self._entry.get('microbatch', 0)) + 1}"

    def _standby(self) -> dict[str, Any]:
        """Return why no coordinator of this directory leads; {}: one does, or it is not known. Its
        other files are then of a time when one did."""
        slots = range(len(self._hosted))
        found = [read_object(self._run_dir / STANDBY.format(slot)) or {} for slot in slots]
        return found[0] if found and all(found) else {}
