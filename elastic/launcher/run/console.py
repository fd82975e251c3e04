"""Console of `elastic run`: a progress bar on a terminal, plain lines elsewhere.

The job continues if nobody reads the console, or if it fails: a thread prints (`elastic.console`),
and no method here waits for it, except `close`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from elastic.config import STDERR, STDOUT
from elastic.console import Console
from elastic.reminder import Reminder

if TYPE_CHECKING:
    from tqdm import tqdm

OVER = ("finished", "failed")
CHUNK = 1 << 16
"""Most bytes of the workers' output that are printed at once."""
QUIET_S = 1.0
"""At the end, the workers' output is printed until nothing comes for this long."""
LAST_OUTPUT_S = 10.0
"""Longest wait for the last output at the end, if its reader is slow."""
Entry = dict[str, Any]
"""A line of progress.jsonl or events.jsonl."""


def recorded_at(entry: Entry) -> float:
    """Return the time at which an entry was recorded; 0: unknown."""
    at = entry.get("at")
    return float(at) if isinstance(at, (int, float)) else 0.0


def describe(entry: Entry) -> str:
    """Return loss, tokens per second, nodes and plan of a progress entry, as far as it has them."""
    parts = []
    if isinstance(entry.get("loss"), (int, float)):
        parts.append(f"loss {entry['loss']:.4f}")
    parts += tokens_rate(entry)
    if entry.get("nodes"):
        parts.append(f"{entry['nodes']} node{'s' if entry['nodes'] != 1 else ''}")
    if entry.get("plan"):
        parts.append(f"plan {entry['plan']}")
    return ", ".join(parts)


def tokens_rate(entry: Entry) -> list[str]:
    """Return the tokens per second of an entry; []: its model has none."""
    rate = entry.get("tokens_per_s")
    return [f"{rate:,.0f} tokens/s"] if isinstance(rate, (int, float)) and rate > 0 else []


class ProgressLines:
    """Progress of the job without a terminal: a line per finished step and per change of phase.

    A restarted coordinator repeats its last steps; they are not printed again.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._newest = (0, 0)
        """(epoch, step) of the last printed step."""
        self.quiet = Reminder(time.monotonic())
        """When the user hears again what the job is doing, if nothing else is printed."""

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
            unknown = phase in OVER and not entry.get("steps")  # it does not use elastic
            place = phase if unknown else f"{phase} at step {step}"
            self.note(f"{place}: {describe(entry)}".rstrip(": "))
        self._phase = phase or self._phase

    def note(self, text: str) -> None:
        self.quiet.begin(time.monotonic())
        self._console.say(text)

    def remind(self, text: str) -> None:
        """Print what the job is doing."""
        self.note(text)

    @contextlib.contextmanager
    def output_of(self, name: str) -> Iterator[int | None]:
        """Yield the descriptor for the output of the agent `name`, while it is being started; None:
        it inherits the streams of this process."""
        yield None

    def put(self, name: str, data: bytes) -> None:
        """Print output of the agent `name`, which has no descriptor."""
        self._console.put_at_once(STDOUT, data)

    def close(self) -> None:
        """Wait for the last lines, for a limited time."""
        self._console.finish(LAST_OUTPUT_S)


class _Terminal:
    """Standard error, as a file for tqdm. Writing does not wait."""

    encoding = "utf-8"

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.put_at_once(STDERR, text.encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing."""

    def fileno(self) -> int:
        """Return the descriptor that tqdm asks for the width of the terminal."""
        return sys.stderr.fileno()


class ProgressBar:
    """Progress of the job as a bar on a terminal. The output of the workers is printed above it."""

    def __init__(self, console: Console) -> None:
        self._console, self._bar = console, _make_bar(_Terminal(console))
        self._shown: Entry = {}
        self.quiet = Reminder(time.monotonic())
        self._lock = threading.Lock()
        """Guards the bar and the last, unfinished line; never held while the terminal prints."""
        self._rest, self._closing = b"", False
        self._pipe, self._output = os.pipe()
        """`_output`: descriptor for the agents' standard output and error."""
        self._passed = 0
        """Number of chunks of output that were passed on."""
        self._relay = threading.Thread(target=self._pass_on, name="console", daemon=True)
        self._relay.start()

    def update(self, entry: Entry) -> None:
        self.quiet.begin(time.monotonic())
        with self._lock:
            self._shown |= {key: value for key, value in entry.items() if value not in (None, "")}
            if self._shown.get("steps"):
                self._bar.total = self._shown["steps"]
            self._bar.n = self._shown.get("step", 0)
            self._bar.set_description_str(str(self._shown.get("phase", "")), refresh=False)
            self._bar.set_postfix_str(describe(self._shown), refresh=False)
            if self._console.flush(0.0):  # else bars would queue up; the next one comes soon
                self._bar.refresh(nolock=True)

    def note(self, text: str) -> None:
        self.quiet.begin(time.monotonic())
        with self._lock:
            self._print(STDERR, f"elastic: {text}\n".encode(errors="replace"))

    def remind(self, text: str) -> None:
        """Show what the job is doing: in the bar, and above it if it is a wait."""
        if not text.startswith("step "):
            return self.note(text)
        with self._lock:
            self._bar.refresh(nolock=True)

    @contextlib.contextmanager
    def output_of(self, name: str) -> Iterator[int]:
        """Yield the descriptor for the output of the agent `name`, while it is being started."""
        yield self._output

    def put(self, name: str, data: bytes) -> None:
        """Print output of agents, as many whole lines as there are."""
        with self._lock:
            whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
            if newline:
                self._print(STDOUT, whole + newline)

    def close(self) -> None:
        """Print the rest of the output, for a limited time. A process that outlives the job may
        hold the pipe open, so this also ends when nothing comes for `QUIET_S`."""
        until = time.monotonic() + LAST_OUTPUT_S
        os.close(self._output)
        self._closing, passed = True, -1
        while self._relay.is_alive() and passed != self._passed and time.monotonic() < until:
            passed = self._passed
            self._relay.join(QUIET_S)
        with self._lock:
            if self._rest:
                self._print(STDOUT, self._rest + b"\n")
            self._bar.close()
        self._console.finish(max(0.0, until - time.monotonic()))

    def _pass_on(self) -> None:
        """Print what comes through the pipe. While nobody reads the terminal it stays in the pipe,
        and the agents keep what they can."""
        with open(self._pipe, "rb", buffering=0) as pipe:
            while chunk := pipe.read(CHUNK):
                self.put("", chunk)
                self._passed += 1
                while not self._closing and not self._console.flush(QUIET_S):
                    pass

    def _print(self, stream: int, lines: bytes) -> None:
        """Print lines above the progress bar. The caller holds the lock."""
        self._bar.clear(nolock=True)
        self._console.put_at_once(stream, lines)
        self._bar.refresh(nolock=True)


def _make_bar(file: _Terminal) -> tqdm[Any]:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]  # it takes no type at run time
        monitor_interval = 0  # tqdm's own thread is not needed

    return Bar(total=None, unit="step", dynamic_ncols=True, leave=True, file=file)


def make_view() -> ProgressBar | ProgressLines:
    """Return a bar if both standard output and error are terminals, else lines of text."""
    console, streams = Console(program="elastic"), (sys.stderr, sys.stdout)
    terminal = all(stream is not None and stream.isatty() for stream in streams)
    return ProgressBar(console) if terminal else ProgressLines(console)


class NoteHandler(logging.Handler):
    """Prints warnings of the libraries as lines for the user: logging itself would wait for a
    console that nobody reads."""

    def __init__(self, note: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(f"warning: {record.getMessage()}")


# ---- events ----


def recovery_line(event: Entry) -> str:
    """Return an epoch change in a line: place, cause, nodes, lost micro-batches, seconds."""
    phases = ("detect_s", "decide_s", "transfer_s", "rebuild_s", "total_s")
    times = [f"{k[:-2]} {event[k]:.3f}" for k in phases if isinstance(event.get(k), (int, float))]
    cause, step = _field(event, "cause"), _field(event, "step")
    if event.get("planned"):
        paused = f"training paused for {event.get('pause_s') or 0.0:.3f} s"
        return f"{recovered(event, f'after step {step} ({cause})')}; {paused}"
    where = f"at step {step}, micro-batch {_field(event, 'microbatch')} ({cause})"
    return f"{recovered(event, where)}; seconds: {', '.join(times)}"


def recovered(event: Entry, where: str) -> str:
    """Return the effect of an epoch change. Nothing is recovered by a planned one: all nodes stop
    after the same step, and nothing is lost."""
    before, after = _field(event, "nodes_before"), _field(event, "nodes_after")
    if not event.get("planned"):
        lost = f"{_field(event, 'microbatches_lost')} micro-batches lost"
        return f"recovered {where}: {before} -> {after} nodes, {lost}"
    same = f"{after} {'node' if after == 1 else 'nodes'} as before"
    nodes = same if before == after else f"{before} -> {after} nodes"
    return f"the plan changed {where}: {nodes}"


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
    return f"warning: paused: {_field(event, 'why')}; the job continues when a plan fits"


def _restart_line(event: Entry) -> str:
    number = f", restart {event['restart']}" if event.get("restart") else ""
    return f"all workers start again{number}: {_field(event, 'why')}"


def _profile_wrong_line(event: Entry) -> str:
    what = f"all nodes compute at least {_field(event, 'slow')}x slower than the profile says"
    why = "it was measured alone, or on other machines, so it shows no node to be slow"
    then = "nodes are compared with each other; profile again under the load of this job"
    return f"warning: {what}: {why}; {then}"


def _certificate_line(event: Entry) -> str:
    return f"warning: {_field(event, 'reason')}"


def _agent_failed_line(event: Entry) -> str:
    return f"warning: the agent of {_field(event, 'node')} failed: {_field(event, 'error')}"


def _refused_line(event: Entry) -> str:
    """Return a refusal that the user can remedy; others are only in the event log."""
    remedy = _REMEDIES.get(str(event.get("reason")))
    if remedy is None:
        return ""
    what = f"warning: {_field(event, 'node')} refused {event.get('peer') or 'a connection'}"
    return f"{what}: {event.get('detail') or event.get('reason')}{remedy}"


_CERTIFICATES = "; give all nodes --certs with certificates of this job's authority"
_REMEDIES = {
    "version": "",
    "expired": "",
    "token": "; give it this job's --join-token-file",
    "plain-text": _CERTIFICATES,
    "no-certificate": _CERTIFICATES,
    "wrong-ca": _CERTIFICATES,
    "handshake": _CERTIFICATES,
}
"""Ends of lines about refusals, by reason. "": the detail has the remedy."""


def _evaluation_line(event: Entry) -> str:
    figures = {"loss": _field(event, "loss"), **(event.get("figures") or {})}
    texts = [f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()]
    size = f"{_field(event, 'microbatches')} micro-batches, {event.get('seconds', 0.0):.2f} s"
    return f"evaluated after step {_field(event, 'step')}: {', '.join(texts)} ({size})"


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


def _plan_line(event: Entry) -> str:
    """Return a warning if the plan has another shape than --pipelines asks for."""
    if not event.get("instead_of"):
        return ""
    return f"warning: --pipelines {event['instead_of']} does not fit; the plan is {event['shape']}"


EVENT_LINES: dict[str, Callable[[Entry], str]] = {
    "stalled": _stalled_line,
    "retry": _retry_line,
    "evaluation": _evaluation_line,
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
    "plan": _plan_line,
    "restart": _restart_line,
    "profile-wrong": _profile_wrong_line,
    "profile-right": lambda event: "a node is as fast as profiled: the profile counts again",
    "certificate": _certificate_line,
    "agent-failed": _agent_failed_line,
    "refused": _refused_line,
}
"""Functions that make the line of an event, by kind; "": the event is not printed."""


def event_line(event: Entry) -> str:
    """Return an event as key=value pairs, without nested values."""
    pairs = (f"{k}={value}" for k, value in event.items() if not isinstance(value, (dict, list)))
    return " ".join(pairs)
