"""A sweep: many cells, on whatever runs them, into a folder from which it goes on after an interruption.

OUT/cells.jsonl has a line a cell, on disk as soon as the cell is done; OUT/sweep.json is the whole, and the same bytes
whatever ran the cells, in whatever order, with whatever interruptions.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from elastic.domain.errors import FieldError
from elastic_sim.replay import show
from elastic_sim.replay.replay import ORACLE, Summary, summary, with_goodput
from elastic_sim.steps.scenario import Scenario
from elastic_sim.sweep.cells import Backend, Cell, Result, defined, run_of

CELLS, WHOLE = "cells.jsonl", "sweep.json"


@dataclass(slots=True)
class Log:
    """OUT/cells.jsonl, open for one sweep at a time."""

    file: IO[bytes]
    done: dict[str, Result] = field(default_factory=dict)
    """By key."""

    def add(self, cell: Cell, result: Result) -> None:
        """Keep a result. On disk when this returns."""
        line = json.dumps(
            {"key": cell.key, "cell": cell.definition(), "result": result}, sort_keys=True
        )
        self.file.write(line.encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.done[cell.key] = result


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario of a finished sweep, all policies."""

    scenario: Scenario
    found: tuple[Summary, ...]

    def of(self, policy: str) -> Summary:
        return next(one for one in self.found if one.policy == policy)


@contextmanager
def opened(out: Path, cells: Sequence[Cell]) -> Iterator[Log]:
    """The folder's results so far. Raises FieldError where it cannot be written, is in use, or of another sweep."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / CELLS).open("a+b")
    except OSError as error:
        raise FieldError(
            "OUT", str(out), f"a folder that can be written is needed: {error}"
        ) from error
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
        done = _read(out / CELLS, lines, {cell.key: cell for cell in cells})
        if torn:
            file.truncate(file.tell() - len(torn))
        yield Log(file, done)


def _read(path: Path, lines: Sequence[bytes], cells: Mapping[str, Cell]) -> dict[str, Result]:
    """Results by key, of `cells` alone."""
    done: dict[str, Result] = {}
    for number, line in enumerate(lines, 1):
        try:
            told = json.loads(line)
            key, result, cell = str(told["key"]), told["result"], told["cell"]
            if key in cells:
                run_of(cells[key], result)
        except (ValueError, KeyError, TypeError, AttributeError):
            remedy = "it holds no cell; remove the line, or name another folder"
            raise FieldError(str(path), f"line {number}", remedy) from None
        if key not in cells:
            remedy = "it holds a cell that this sweep has not: name another folder, or the options that made it"
            raise FieldError(str(path), _named(cell), remedy)
        done.setdefault(key, result)
    return done


def _named(cell: Any) -> str:
    """A cell of a file, in short."""
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
    cells: Sequence[Cell],
    backend: Backend,
    *,
    began: Callable[[int], None] = lambda done: None,
    progress: Callable[[Cell], None] = lambda cell: None,
) -> list[Row]:
    """Run the cells that are not done yet; write and return the whole. `began`: told how many were done before.
    Raises FieldError before anything is started, CellFailed after."""
    with opened(out, cells) as log:
        began(len(log.done))
        left = [cell for cell in cells if cell.key not in log.done]
        if left:
            with closing(backend(left)) as results:
                for cell, result in results:
                    log.add(cell, result)
                    progress(cell)
        rows = rows_of(cells, log.done)
        replaced(out / WHOLE, dumps(cells, log.done, rows))
        return rows


def rows_of(cells: Sequence[Cell], done: Mapping[str, Result]) -> list[Row]:
    """By model, traces before rates, rates from often to seldom; policies in the order of the cells."""
    found = []
    scenarios = dict.fromkeys(cell.scenario for cell in cells)
    for scenario in sorted(scenarios, key=_place):
        runs: dict[str, dict[int, Any]] = {}
        for cell in cells:
            if cell.scenario == scenario:
                runs.setdefault(cell.policy, {})[cell.seed] = run_of(cell, done[cell.key])
        oracles = runs[ORACLE]
        summaries = [
            summary([with_goodput(run, oracles[seed]) for seed, run in sorted(by_seed.items())])
            for by_seed in runs.values()
        ]
        found.append(Row(scenario, tuple(summaries)))
    return found


def _place(scenario: Scenario) -> tuple[str, float, str]:
    rate = scenario.market.mtbf_s if scenario.market is not None else 0.0
    return scenario.model, rate, json.dumps(defined(scenario), sort_keys=True)


def dumps(cells: Sequence[Cell], done: Mapping[str, Result], rows: Sequence[Row]) -> str:
    """{"scenarios": [as `replay --json` has them], "cells": [..]}, sorted."""
    told = {
        "cells": sorted(
            (
                {"key": cell.key, "cell": cell.definition(), "result": done[cell.key]}
                for cell in cells
            ),
            key=lambda line: json.dumps(line["cell"], sort_keys=True),
        ),
        "scenarios": [
            show.as_json(
                row.scenario.name(), row.scenario.model, row.found, scenario=defined(row.scenario)
            )
            for row in rows
        ],
    }
    return json.dumps(told, indent=1, sort_keys=True) + "\n"


def replaced(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises FieldError."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise FieldError("output", str(path), f"it must be writable: {error}") from error


def table(rows: Sequence[Row]) -> str:
    """A row a scenario: goodput of each policy; of the oracle, samples a second."""
    names = list(
        dict.fromkeys(one.policy for row in rows for one in row.found if one.policy != ORACLE)
    )
    head = ["model, failures", "oracle samples/s", *names]
    body = [
        [
            f"{row.scenario.model}, {row.scenario.name()}",
            str(row.of(ORACLE).samples_per_s),
            *(show.three(row.of(name).goodput) for name in names),
        ]
        for row in rows
    ]
    return show.aligned([head, *body])
