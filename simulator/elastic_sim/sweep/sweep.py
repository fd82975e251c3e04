"""A sweep: runs many cells on a backend and keeps their results in a folder.

OUT/cells.jsonl has one line per finished cell, so an interrupted sweep can continue. OUT/sweep.json
is the summary. Its bytes do not depend on the backend, the order of cells or interruptions.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from elastic.command_line import file_errors, make_folder
from elastic.domain.errors import FieldError
from elastic_sim.replay import show
from elastic_sim.replay.replay import ORACLE, PolicyRun, PolicySummary, summarize
from elastic_sim.steps.scenario import Scenario
from elastic_sim.sweep.cells import Backend, Result, SweepCell, run_of, scenario_json

CELLS_FILE, SUMMARY_FILE = "cells.jsonl", "sweep.json"


@dataclass(slots=True)
class CellLog:
    """Log of finished cells: OUT/cells.jsonl, open for one sweep at a time."""

    file: IO[bytes]
    done: dict[str, Result] = field(default_factory=dict)
    """Results by key of their cell."""

    def add(self, cell: SweepCell, result: Result) -> None:
        """Append a result; it is on disk when this returns."""
        line = json.dumps(_line(cell, result), sort_keys=True)
        self.file.write(line.encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.done[cell.key] = result


@dataclass(frozen=True, slots=True)
class SweepRow:
    """All policies on one scenario of a finished sweep."""

    scenario: Scenario
    found: tuple[PolicySummary, ...]

    def of(self, policy: str) -> PolicySummary:
        """Return the summary of a policy."""
        return next(one for one in self.found if one.policy == policy)


@contextmanager
def open_log(out: Path, cells: Sequence[SweepCell]) -> Iterator[CellLog]:
    """Open a folder's results.

    Raises FieldError if the folder is not writable, is in use, or belongs to another sweep.
    """
    make_folder("OUT", out)
    with file_errors("OUT", out):
        file = (out / CELLS_FILE).open("a+b")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FieldError(
                "OUT", str(out), "another sweep is writing there; wait for it"
            ) from None
        file.seek(0)
        lines = file.read().split(b"\n")
        torn = lines.pop()
        done = _read(out / CELLS_FILE, lines, {cell.key: cell for cell in cells})
        if torn:
            file.truncate(file.tell() - len(torn))
        yield CellLog(file, done)


def _line(cell: SweepCell, result: Result) -> dict[str, Any]:
    return {"key": cell.key, "cell": cell.definition(), "result": result}


def _read(path: Path, lines: Sequence[bytes], cells: Mapping[str, SweepCell]) -> dict[str, Result]:
    """Return results by key. Raises FieldError for lines that do not belong to `cells`."""
    done: dict[str, Result] = {}
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            key, result, cell = str(entry["key"]), entry["result"], entry["cell"]
            if key in cells:
                run_of(cells[key], result)
        except (ValueError, KeyError, TypeError, AttributeError):
            remedy = "it holds no cell; remove the line, or name another folder"
            raise FieldError(str(path), f"line {number}", remedy) from None
        if key not in cells:
            remedy = "it holds a cell that this sweep has not: "
            remedy += "name another folder, or the options that made it"
            raise FieldError(str(path), _cell_text(cell), remedy)
        done.setdefault(key, result)
    return done


def _cell_text(cell: Any) -> str:
    try:
        scenario = cell["scenario"]
        rate = scenario["trace"] or f"mtbf {scenario['market']['mtbf_s']:g} s"
        version = cell["version"]
        return (
            f"{cell['policy']}, {scenario['model']}, {rate}, seed {cell['seed']}, version {version}"
        )
    except (KeyError, TypeError, ValueError):
        return str(cell)[:80]


def run(
    out: Path,
    cells: Sequence[SweepCell],
    backend: Backend,
    *,
    began: Callable[[int], None] = lambda done: None,
    progress: Callable[[SweepCell], None] = lambda cell: None,
) -> list[SweepRow]:
    """Run the cells that are not done yet; write the summary and return its rows.

    `began(done)` is called first, with the number of cells done before; `progress(cell)` after each
    cell. Raises FieldError before anything starts, and CellFailed later.
    """
    with open_log(out, cells) as log:
        began(len(log.done))
        left = [cell for cell in cells if cell.key not in log.done]
        if left:
            with closing(backend(left)) as results:
                for cell, result in results:
                    log.add(cell, result)
                    progress(cell)
        rows = _rows(cells, log.done)
        _replace_file(out / SUMMARY_FILE, _summary_text(cells, log.done, rows))
        return rows


def _rows(cells: Sequence[SweepCell], done: Mapping[str, Result]) -> list[SweepRow]:
    """Return rows by model: first traces, then failure rates, the most frequent losses first."""
    found = []
    scenarios = dict.fromkeys(cell.scenario for cell in cells)
    for scenario in sorted(scenarios, key=_sort_key):
        runs = defaultdict[str, list[PolicyRun]](list)
        for cell in sorted(cells, key=lambda cell: cell.seed):
            if cell.scenario == scenario:
                runs[cell.policy].append(run_of(cell, done[cell.key]))
        summaries = tuple(summarize(by_seed, runs[ORACLE]) for by_seed in runs.values())
        found.append(SweepRow(scenario, summaries))
    return found


def _sort_key(scenario: Scenario) -> tuple[str, float, str]:
    rate = scenario.market.mtbf_s if scenario.market is not None else 0.0
    return scenario.model, rate, json.dumps(scenario_json(scenario), sort_keys=True)


def _summary_text(
    cells: Sequence[SweepCell], done: Mapping[str, Result], rows: Sequence[SweepRow]
) -> str:
    """Return JSON of the scenarios, as `replay --json` writes them, and of the cells."""
    summary_json = {
        "cells": sorted(
            (_line(cell, done[cell.key]) for cell in cells),
            key=lambda line: json.dumps(line["cell"], sort_keys=True),
        ),
        "scenarios": [
            show.as_json(row.scenario, scenario_json(row.scenario), row.found) for row in rows
        ],
    }
    return json.dumps(summary_json, indent=1, sort_keys=True) + "\n"


def _replace_file(path: Path, text: str) -> None:
    """Write a file atomically. Raises FieldError."""
    fresh = path.with_name(f".{path.name}.new")
    with file_errors("OUT", path):
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)


def policies_of(rows: Sequence[SweepRow]) -> list[str]:
    """Return the policies of all rows, without the oracle."""
    names = (one.policy for row in rows for one in row.found)
    return [name for name in dict.fromkeys(names) if name != ORACLE]


def table(rows: Sequence[SweepRow]) -> str:
    """Return a table with one row per scenario: the oracle's samples/s and each goodput."""
    names = policies_of(rows)
    head = ["model, failures", "oracle samples/s", *names]
    body = [
        [
            f"{row.scenario.model}, {row.scenario.name()}",
            str(row.of(ORACLE).samples_per_s),
            *(f"{row.of(name).goodput:.3f}" for name in names),
        ]
        for row in rows
    ]
    return show.aligned([head, *body])
