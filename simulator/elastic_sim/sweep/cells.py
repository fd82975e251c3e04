"""Cells of a sweep: one scenario, one policy, one seed; and what each gives, as JSON."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from elastic.domain.errors import ElasticError, FieldError
from elastic.domain.version import VERSION
from elastic_sim.replay.replay import ORACLE, Run, run_one
from elastic_sim.steps.scenario import Scenario
from elastic_sim.steps.time_accounting import Use

Result = dict[str, Any]
"""samples, samples_per_s, cost, time by use in node-seconds, changes, node_s."""
FIGURES = ("samples", "samples_per_s", "cost", "time", "changes", "node_s")
MOST_DEATHS = 3
"""Times that a cell may take its process down before the sweep gives up."""


class CellFailed(ElasticError):
    """A cell could not be run; the text names it."""


@dataclass(frozen=True, slots=True)
class Cell:
    scenario: Scenario
    policy: str
    seed: int

    def __str__(self) -> str:
        return f"{self.policy}, {self.scenario.model}, {self.scenario.name()}, seed {self.seed}"

    def definition(self) -> dict[str, Any]:
        """All that the result depends on; files by name and content, wherever they lie."""
        return {
            "policy": self.policy,
            "scenario": defined(self.scenario),
            "seed": self.seed,
            "version": VERSION,
        }

    @property
    def key(self) -> str:
        text = json.dumps(self.definition(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def run(self) -> Result:
        """Simulate it. Raises FieldError."""
        world = self.scenario.world()
        return result_of(run_one(world, self.scenario.trace_of(self.seed), self.policy, self.seed))


def attempt(cell: Cell) -> Result | str:
    """The result, or why there is none: for processes, which not every error survives the way back from."""
    try:
        return cell.run()
    except ElasticError as error:
        return str(error)
    except Exception:  # noqa: BLE001 - raised again by who asked
        return traceback.format_exc()


def result_or_raise(cell: Cell, found: Result | str) -> Result:
    """What `attempt` returned. Raises CellFailed."""
    if isinstance(found, str):
        raise CellFailed(f"{cell}: {found}")
    return found


class Backend(Protocol):
    """Runs cells somewhere. Yields each result as soon as it is there, in any order. Raises CellFailed."""

    def __call__(self, cells: Sequence[Cell]) -> Generator[tuple[Cell, Result]]: ...


def defined(scenario: Scenario) -> dict[str, Any]:
    """A scenario as JSON, files by their names and SHA-256. Raises FieldError."""
    told: dict[str, Any] = json.loads(scenario.dumps())
    for name, path in scenario.files().items():
        told[name], told[f"{name}_sha256"] = Path(path).name, sha256_of(path)
    return told


@lru_cache(maxsize=256)
def sha256_of(path: str) -> str:
    """Of a file. Raises FieldError."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise FieldError("file", path, f"a readable file is needed: {error}") from error


def cells_of(scenarios: Iterable[Scenario], policies: Sequence[str], seeds: int) -> list[Cell]:
    """Every policy on every scenario and seed, and the oracle; each once, those of one world side by side."""
    named = tuple(dict.fromkeys((ORACLE, *policies)))
    found = [
        Cell(scenario, p, seed) for scenario in scenarios for seed in range(seeds) for p in named
    ]
    unique = {cell.key: cell for cell in found}
    return sorted(unique.values(), key=lambda cell: world_of(cell.scenario))


def world_of(scenario: Scenario) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
    """Equal where plans are the same, and so are remembered."""
    return scenario.model, f"{scenario.microbatches}", scenario.nodes_of, scenario.physics


def checked(cells: Sequence[Cell]) -> None:
    """Refuse at once what no process could run. Raises FieldError."""
    for scenario in dict.fromkeys(cell.scenario for cell in cells):
        scenario.world()
        scenario.trace_of(0)


def result_of(run: Run) -> Result:
    return {
        "samples": run.samples,
        "samples_per_s": run.samples_per_s,
        "cost": run.cost,
        "time": run.time,
        "changes": run.changes,
        "node_s": sum(run.time.values()),
    }


def run_of(cell: Cell, result: Result) -> Run:
    """Goodput not yet known. Raises ValueError for what is no result."""
    if set(result) != set(FIGURES) or set(result["time"]) != {use.value for use in Use}:
        raise ValueError(f"figures of a cell are {', '.join(FIGURES)}")
    return Run(
        policy=cell.policy,
        seed=cell.seed,
        samples=int(result["samples"]),
        samples_per_s=float(result["samples_per_s"]),
        goodput=0.0,
        cost=float(result["cost"]),
        time={use.value: float(result["time"][use.value]) for use in Use},
        changes=int(result["changes"]),
    )
