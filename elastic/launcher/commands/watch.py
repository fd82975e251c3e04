"""`elastic status --watch`: a page on a terminal, lines elsewhere, until the job is over."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TextIO

from elastic.domain.errors import EXIT_INTERRUPTED, EXIT_OK, ElasticError
from elastic.launcher.run.console import recovered, tokens_rate
from elastic.launcher.run.event_tail import read_object
from elastic.launcher.run.wait_lines import waiting_text
from elastic.reminder import Reminder

if TYPE_CHECKING:
    from rich.console import RenderableType

Answer = dict[str, Any]
NO_ANSWER_S = 30.0
"""Time without answers after which the command fails, unless it knows the run directory."""
MAX_NODES = 40
"""Most rows in the table of nodes; nodes with problems come first."""


def watch(
    args: SimpleNamespace, query: Callable[[], Answer], interval_s: float, latest: Path
) -> int:
    """Show answers of `query` until the job is over; return the exit code.

    Raises the errors of the first query.
    """
    answer: Answer | None = query()
    run_dir = None if args.rdzv_endpoint else args.run_dir or latest
    lines = args.json or not sys.stdout.isatty()
    view = StatusLines(sys.stdout, args.json) if lines else StatusPage()
    answered = time.monotonic()
    try:
        while True:
            if answer is not None:
                view.show(answer)
                answered = time.monotonic()
            result = read_object(run_dir / "exit.json") if run_dir is not None else None
            if result is not None:
                view.note(f"{result.get('reason')} (exit code {result.get('code')})")
                return EXIT_OK
            if answer is not None and answer["phase"] in ("finished", "failed"):
                reason = f": {answer['cause']}" if answer.get("cause") else ""
                view.note(f"the job is over: {answer['phase']}{reason}")
                return EXIT_OK
            time.sleep(interval_s)
            try:
                answer = query()
            except ElasticError as error:
                if run_dir is None and time.monotonic() - answered > NO_ANSWER_S:
                    raise
                answer = None
                if run_dir is None or not (run_dir / "exit.json").exists():
                    view.note(f"no answer from the coordinator; retrying: {error}")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        view.close()


class StatusLines:
    """View of the status without a terminal: a line per change; with JSON, an object per answer."""

    def __init__(self, file: TextIO, as_json: bool) -> None:
        self._file, self._as_json = file, as_json
        self._shown: tuple[Any, ...] = ()
        self._recoveries: list[Any] = []
        self._quiet = Reminder(time.monotonic())

    def show(self, answer: Answer) -> None:
        if self._as_json:
            self._print(json.dumps(answer))
            return
        for entry in answer.get("recoveries", ()):
            if entry not in self._recoveries:
                self._print(recovery_text(entry))
        self._recoveries = list(answer.get("recoveries", ()))
        place = (answer["phase"], answer["step"], answer["epoch"])
        waits = (answer.get("waiting") or {}).get("for")
        state = (*place, len(answer["nodes"]), answer.get("cause"), waits)
        if state != self._shown or self._quiet.is_due(time.monotonic()):
            self._shown = state
            self._print(headline(answer))
            self._quiet.begin(time.monotonic())

    def note(self, text: str) -> None:
        if not self._as_json:
            self._print(text)

    def close(self) -> None:
        """Do nothing."""

    def _print(self, text: str) -> None:
        print(text, file=self._file, flush=True)


class StatusPage:
    """View of the status on a terminal: a page that rich redraws in place."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def show(self, answer: Answer) -> None:
        self._live.update(page(answer), refresh=True)

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


def headline(answer: Answer) -> str:
    """Return phase, step, time per step and nodes of the job in one line."""
    total = f"/{answer['steps']}" if answer.get("steps") else ""
    parts = [f"{answer['phase']} at step {answer['step']}{total}", f"epoch {answer['epoch']}"]
    if isinstance(answer.get("loss"), (int, float)):
        parts.append(f"loss {answer['loss']:.4f}")
    newest = answer.get("evaluation")
    if newest:
        parts.append(f"evaluated after step {newest['step']}: loss {newest['loss']:.4f}")
    if answer.get("step_s"):
        parts.append(f"{answer['step_s']:.3g} s per step")
        parts += tokens_rate(answer)
    training = sum(node["role"] == "stage" for node in answer["nodes"])
    parts.append(f"{training} nodes train, {len(answer['nodes']) - training} spare")
    if answer.get("term"):
        parts.append(f"coordinator term {answer['term']}")
    if answer.get("attention"):
        parts.append(answer["attention"])
    if waits := waiting_text(answer):  # it names the cause
        parts.append(waits)
    elif answer.get("cause"):
        parts.append(str(answer["cause"]))
    return ", ".join(parts)


def recovery_text(entry: Answer) -> str:
    """Return an epoch change in a line."""
    where = f"at step {entry['step']} ({entry['cause']})"
    seconds = entry.get("pause_s") if entry.get("planned") else entry["total_s"]
    return f"{recovered(entry, where)}, {seconds or 0.0:.3f} s"


def problems(node: Answer) -> str:
    """Return the problems of a node, separated by commas; "": none."""
    slow, health = node.get("slow", 1.0), node.get("health", "ok")
    found = {
        "disconnected": not node["connected"],
        "leaving": node["draining"],
        node.get("error", ""): bool(node.get("error")),
        health: health != "ok",
        f"{slow:.1f}x slower": slow != 1.0,
    }
    return ", ".join(text for text, present in found.items() if present)


def page(answer: Answer) -> RenderableType:
    """Return the whole answer as a page: headline, nodes, plan and last recoveries."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    colors = {"running": "green", "finished": "green", "failed": "red", "paused": "red"}
    color = colors.get(answer["phase"], "yellow")
    heads = ("node", "phase", "role", "health", "domain")
    nodes = Table(*heads, box=None, header_style="dim", pad_edge=False)
    ordered = sorted(answer["nodes"], key=lambda node: not problems(node))
    for node in ordered[:MAX_NODES]:
        found = problems(node)
        health = Text(found or "ok", "red" if found else "green")
        nodes.add_row(node["node"], node["phase"], node["role"], health, node["domain"] or "")
    if len(ordered) > MAX_NODES:
        nodes.add_row(f"... {len(ordered) - MAX_NODES} more")
    last = [Text(recovery_text(entry)) for entry in answer.get("recoveries", ())]
    plan = Text(str(answer.get("plan", "")).rstrip(), "dim")
    return Group(Text(headline(answer), color), Text(), nodes, Text(), plan, Text(), *last)
