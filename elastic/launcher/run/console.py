"""Console of `elastic run`: a progress bar on a terminal, plain lines elsewhere.

The job continues if the console fails: output that cannot be written is lost.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

CHUNK = 1 << 16
"""Most bytes of the workers' output that are printed at once."""
QUIET_S = 1.0
"""At the end, the workers' output is printed until nothing comes for this long."""
Entry = dict[str, Any]
"""A line of progress.jsonl or events.jsonl."""


def describe(entry: Entry) -> str:
    """Return loss, tokens per second, nodes and plan of a progress entry, as far as it has them."""
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


class ProgressLines:
    """Progress of the job without a terminal: a line per finished step and per change of phase.

    A restarted coordinator repeats its last steps; they are not printed again.
    """

    output: int | None = None
    """Descriptor for the agents' output; None: they inherit the streams of this process."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self._phase = ""
        self._newest = (0, 0)
        """(epoch, step) of the last printed step."""

    def update(self, entry: Entry) -> None:
        phase, step = str(entry.get("phase", "")), int(entry.get("step", 0))
        if entry.get("loss") is not None:
            epoch, (newest_epoch, newest_step) = int(entry.get("epoch", 0)), self._newest
            if step <= newest_step and epoch <= newest_epoch:
                return
            self._newest = (epoch, step)
            total = f"/{entry['steps']}" if entry.get("steps") else ""
            self.note(f"step {step}{total}: {describe(entry)}")
        elif phase and phase != self._phase:
            self.note(f"{phase} at step {step}: {describe(entry)}".rstrip(": "))
        self._phase = phase or self._phase

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the reader has gone, or the disk is full
            print(f"elastic: {text}", file=self._file, flush=True)

    def close(self) -> None:
        """Do nothing."""


class ProgressBar:
    """Progress of the job as a bar on a terminal. The output of the workers is printed above it."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=None, unit="step", dynamic_ncols=True, leave=True, file=sys.stderr)
        self._shown: Entry = {}
        self._lock = threading.Lock()
        self._console, self.output = os.pipe()
        """`output`: descriptor for the agents' standard output and error."""
        self._passed = 0
        """Number of chunks of output that were printed."""
        self._relay = threading.Thread(target=self._pass_on, name="console", daemon=True)
        self._relay.start()

    def update(self, entry: Entry) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._shown |= {key: value for key, value in entry.items() if value not in (None, "")}
            if self._shown.get("steps"):
                self._bar.total = self._shown["steps"]
            self._bar.n = self._shown.get("step", 0)
            self._bar.set_description_str(str(self._shown.get("phase", "")), refresh=False)
            self._bar.set_postfix_str(describe(self._shown), refresh=False)
            self._bar.refresh(nolock=True)  # an error would leave the lock of tqdm held

    def note(self, text: str) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._bar.write(f"elastic: {text}", file=sys.stderr)

    def close(self) -> None:
        """Print the rest of the output. A process that outlives the job may hold the pipe open, so
        this ends when nothing comes for `QUIET_S`."""
        os.close(self.output)
        passed = -1
        while self._relay.is_alive() and passed != self._passed:
            passed = self._passed
            self._relay.join(QUIET_S)
        with self._lock, contextlib.suppress(OSError):
            self._bar.close()

    def _pass_on(self) -> None:
        """Print what comes through the pipe, as many whole lines at a time as there are."""
        rest = b""
        with open(self._console, "rb", buffering=0) as pipe:
            while chunk := pipe.read(CHUNK):
                whole, newline, rest = (rest + chunk).rpartition(b"\n")
                if newline:
                    self._print(whole)
                self._passed += 1
        if rest:
            self._print(rest)

    def _print(self, lines: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._bar.write(lines.decode(errors="replace"), file=sys.stdout)


def make_view() -> ProgressBar | ProgressLines:
    """Return a bar if both standard output and error are terminals, else lines."""
    return ProgressBar() if sys.stderr.isatty() and sys.stdout.isatty() else ProgressLines()


# ---- events ----


def recovery_line(event: Entry) -> str:
    """Return a recovery in a line: place, cause, seconds of each phase, lost micro-batches."""
    phases = ("detect_s", "decide_s", "transfer_s", "rebuild_s", "total_s")
    times = [f"{k[:-2]} {event[k]:.3f}" for k in phases if isinstance(event.get(k), (int, float))]
    nodes = f"{_field(event, 'nodes_before')} -> {_field(event, 'nodes_after')} nodes"
    lost = f"{_field(event, 'microbatches_lost')} micro-batches lost"
    where = f"step {_field(event, 'step')}, micro-batch {_field(event, 'microbatch')}"
    cause = _field(event, "cause")
    return f"recovered at {where} ({cause}): {nodes}, {lost}; seconds: {', '.join(times)}"


def _field(event: Entry, name: str) -> object:
    """Return a field of an event. An event of another version may lack it."""
    return event.get(name, f"(no {name})")


def _backup_short_line(event: Entry) -> str:
    owner, keeper = _field(event, "owner"), _field(event, "keeper")
    short = f"{keeper} has no room for more copies of {owner}"
    return f"warning: {short}; training continues without them: {event.get('detail', '')}"


def _keeper_failed_line(event: Entry) -> str:
    owner, keeper = _field(event, "owner"), _field(event, "keeper")
    return f"warning: {keeper} cannot keep copies of {owner}: {event.get('detail', '')}"


def _checkpoint_unusable_line(event: Entry) -> str:
    return f"warning: {_field(event, 'path')} is passed over: {event.get('why', '')}"


def _checkpoint_resumed_line(event: Entry) -> str:
    what = f"continues from the checkpoint of step {_field(event, 'step')}"
    text = f"{what} of run {event.get('run') or 'unknown'}, {_field(event, 'path')}"
    return f"warning: {text}: {event['note']}" if event.get("note") else text


def _checkpoint_lost_line(event: Entry) -> str:
    where = f" on {event['node']}" if event.get("node") else ""
    return f"warning: no checkpoint of step {_field(event, 'step')}{where}: {event.get('why', '')}"


def _checkpoint_late_line(event: Entry) -> str:
    text = f"warning: the checkpoint of step {_field(event, 'step')} cannot be completed yet"
    return f"{text}: {event.get('why', '')}; it is tried for {_field(event, 'patience_s')} s"


def _corrupt_line(event: Entry) -> str:
    where = f"copy of {_field(event, 'owner')} on {_field(event, 'keeper')} is corrupt"
    return f"warning: {where}: {event.get('detail', '')}"


def _health_line(event: Entry) -> str:
    text = f"{_field(event, 'node')} ({_field(event, 'class')}): {_field(event, 'reason')}"
    if event.get("evidence", {}).get("well"):
        return text
    action = event.get("action", "none")
    return f"warning: {text}" + ("" if action == "none" else f" [{action}]")


def _preflight_line(event: Entry) -> str:
    if event.get("ok"):
        return ""
    why = f"{_field(event, 'node')} may not join: {_field(event, 'reason')}"
    return f"warning: {why}; it checks again in {_field(event, 'retry_s')} s"


def _halt_line(event: Entry) -> str:
    """Return the cause of an unplanned epoch, because its recovery may never come."""
    if event.get("boundary") or event.get("cause_kind") == "start":
        return ""
    return f"epoch {_field(event, 'epoch')} begins: {_field(event, 'cause')}"


def _paused_line(event: Entry) -> str:
    return f"paused: {_field(event, 'why')}; the job continues when a plan fits"


def _certificate_line(event: Entry) -> str:
    return f"warning: {_field(event, 'reason')}"


def _agent_failed_line(event: Entry) -> str:
    return f"warning: the agent of {_field(event, 'node')} failed: {_field(event, 'error')}"


def _refused_line(event: Entry) -> str:
    """Return a refusal that the user can remedy; attacks are only in the event log."""
    if event.get("reason") not in ("version", "expired"):
        return ""
    return f"warning: {_field(event, 'node')} refused {event.get('peer')}: {event.get('detail')}"


def _nonfinite_line(event: Entry) -> str:
    done = {
        "stop": "the job ends",
        "skip": "its update is left out",
        "continue": "training goes on",
    }
    where = f"the gradient norm of step {_field(event, 'step')} is {_field(event, 'grad_norm')}"
    return f"warning: {where}: {done.get(str(event.get('action')), '')}"


def _divergence_line(event: Entry) -> str:
    text = f"step {_field(event, 'step')}: {event.get('reason', '')}"
    return f"warning: {text}" + ("" if event.get("fatal") else "; the step runs again")


def _doubt_line(event: Entry) -> str:
    return f"warning: {_field(event, 'why')}; it waits for the nodes, and training continues"


def _doubt_over_line(event: Entry) -> str:
    heard = f"{_field(event, 'heard')} of {_field(event, 'nodes')} nodes"
    return f"the coordinator hears {heard} again, after {_field(event, 'seconds')} s"


def _stalled_line(event: Entry) -> str:
    evidence = event.get("evidence") or {}
    found = "; ".join(f"{node}: {why}" for node, why in evidence.items())
    quiet_s, action = _field(event, "quiet_s"), _field(event, "action")
    return f"warning: no progress for {quiet_s} s ({found}) [{action}]"


def _retry_line(event: Entry) -> str:
    pause_s = event.get("pause_s", 0)
    when = f"in {pause_s} s" if pause_s else "now"
    attempt, cause = _field(event, "attempt"), _field(event, "cause")
    return f"warning: attempt {attempt} failed: {cause}; next attempt {when}"


EVENT_LINES: dict[str, Callable[[Entry], str]] = {
    "stalled": _stalled_line,
    "retry": _retry_line,
    "nonfinite": _nonfinite_line,
    "divergence": _divergence_line,
    "recovery": recovery_line,
    "backup-short": _backup_short_line,
    "copy-corrupt": _corrupt_line,
    "keeper-failed": _keeper_failed_line,
    "checkpoint-unusable": _checkpoint_unusable_line,
    "checkpoint-resumed": _checkpoint_resumed_line,
    "checkpoint-lost": _checkpoint_lost_line,
    "checkpoint-late": _checkpoint_late_line,
    "health": _health_line,
    "preflight": _preflight_line,
    "doubt": _doubt_line,
    "doubt-over": _doubt_over_line,
    "halt": _halt_line,
    "paused": _paused_line,
    "certificate": _certificate_line,
    "agent-failed": _agent_failed_line,
    "refused": _refused_line,
}
"""Functions that make the line of an event, by kind; "": the event is not printed."""


def event_line(event: Entry) -> str:
    """Return an event as key=value pairs, without nested values."""
    pairs = (f"{k}={value}" for k, value in event.items() if not isinstance(value, (dict, list)))
    return " ".join(pairs)
