"""`elastic status --watch`: a job, again and again until it is over. A page on a terminal, lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from elastic.domain.errors import EXIT_INTERRUPTED, EXIT_OK, ElasticError
from elastic.launcher.run.event_tail import read_object

if TYPE_CHECKING:
    from rich.console import RenderableType

PATIENCE_S = 30.0
"""How long a coordinator that does not answer is asked again, where no run directory tells whether the job is over."""
MOST_NODES = 40
"""Rows of the table of nodes; of larger jobs those in trouble come first."""
Answer = dict[str, Any]


class Screen(Protocol):
    """Shows what the coordinator says."""

    def show(self, answer: Answer) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def watch(args: SimpleNamespace, ask: Callable[[], Answer], interval_s: float, latest: Path) -> int:
    """Show answers until the job is over; return the exit code. Raises what `ask` does at first: nobody is there."""
    answer: Answer | None = ask()
    run_dir = None if args.rdzv_endpoint else args.run_dir or latest
    screen = screen_for(args, sys.stdout)
    answered = time.monotonic()
    try:
        while True:
            if answer is not None:
                screen.show(answer)
                answered = time.monotonic()
            verdict = read_object(run_dir / "exit.json") if run_dir is not None else None
            if verdict is not None:
                screen.note(f"{verdict.get('reason')} (exit code {verdict.get('code')})")
                return EXIT_OK
            if answer is not None and answer["phase"] in ("finished", "failed"):
                screen.note(f"the job is over: {answer['phase']}")
                return EXIT_OK
            time.sleep(interval_s)
            try:
                answer = ask()
            except ElasticError as error:
                if run_dir is None and time.monotonic() - answered > PATIENCE_S:
                    raise
                answer = None
                if run_dir is None or not (run_dir / "exit.json").exists():
                    screen.note(f"no answer, asking again: {error}")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        screen.close()


def screen_for(args: SimpleNamespace, file: TextIO) -> Screen:
    if args.json or not file.isatty():
        return Lines(file, args.json)
    return Page()


class Lines:
    """One line whenever something has changed; with JSON, one object an answer."""

    def __init__(self, file: TextIO, as_json: bool) -> None:
        self._file, self._as_json = file, as_json
        self._shown: tuple[Any, ...] = ()
        self._recoveries: list[Any] = []

    def show(self, answer: Answer) -> None:
        if self._as_json:
            self._print(json.dumps(answer))
            return
        for entry in answer.get("recoveries", ()):
            if entry not in self._recoveries:
                self._print(recovery_text(entry))
        self._recoveries = list(answer.get("recoveries", ()))
        here = (answer["phase"], answer["step"], answer["epoch"], len(answer["nodes"]))
        if here != self._shown:
            self._shown = here
            self._print(headline(answer))

    def note(self, text: str) -> None:
        if not self._as_json:
            self._print(text)

    def close(self) -> None:
        """Nothing is left open."""

    def _print(self, text: str) -> None:
        print(text, file=self._file, flush=True)


class Page:
    """Redrawn in place by rich."""

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
    """Where the job is, in a line."""
    total = f"/{answer['steps']}" if answer.get("steps") else ""
    parts = [f"{answer['phase']} at step {answer['step']}{total}", f"epoch {answer['epoch']}"]
    if isinstance(answer.get("loss"), (int, float)):
        parts.append(f"loss {answer['loss']:.4f}")
    if answer.get("step_s"):
        parts.append(f"{answer['step_s']:.3g} s a step, {answer.get('tokens_per_s', 0.0):,.0f} tokens/s")
    stages = sum(node["role"] == "stage" for node in answer["nodes"])
    parts.append(f"{stages} nodes train, {len(answer['nodes']) - stages} spare")
    if answer.get("term"):
        parts.append(f"coordinator term {answer['term']}")
    return ", ".join(parts)


def recovery_text(entry: Answer) -> str:
    nodes = f"{entry['nodes_before']} -> {entry['nodes_after']} nodes"
    lost = f"{entry['microbatches_lost']} micro-batches lost"
    return f"recovered at step {entry['step']} ({entry['cause']}): {nodes}, {lost}, {entry['total_s']:.3f} s"


def trouble(node: Answer) -> str:
    """What is wrong with a node, or ""."""
    words = ["cut off"] * (not node["connected"]) + ["leaving"] * bool(node["draining"])
    words += [node["health"]] if node.get("health", "ok") != "ok" else []
    return ", ".join(words + ([f"{node['slow']:.1f}x slower"] if node.get("slow", 1.0) != 1.0 else []))


def page(answer: Answer) -> RenderableType:
    """Everything at once."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    color = {"running": "green", "finished": "green", "failed": "red", "paused": "red"}.get(
        answer["phase"], "yellow"
    )
    nodes = Table("node", "phase", "role", "health", "domain", box=None, header_style="dim", pad_edge=False)
    ordered = sorted(answer["nodes"], key=lambda node: not trouble(node))
    for node in ordered[:MOST_NODES]:
        wrong = trouble(node)
        health = Text(wrong or "well", "red" if wrong else "green")
        nodes.add_row(node["node"], node["phase"], node["role"], health, node["domain"] or "")
    if len(ordered) > MOST_NODES:
        nodes.add_row(f"... {len(ordered) - MOST_NODES} more")
    last = [Text(recovery_text(entry)) for entry in answer.get("recoveries", ())]
    plan = Text(str(answer.get("plan", "")).rstrip(), "dim")
    return Group(Text(headline(answer), color), Text(), nodes, Text(), plan, Text(), *last)
