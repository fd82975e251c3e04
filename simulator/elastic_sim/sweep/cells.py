"""Cells of a sweep: one scenario, one policy and one seed each, with a result in JSON."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from elastic.domain.errors import ElasticError
from elastic.domain.version import VERSION
from elastic_sim.replay.replay import ORACLE, PolicyRun, run_one
from elastic_sim.steps.scenario import Scenario
from elastic_sim.steps.time_accounting import Use
from elastic_sim.traces.trace import read_bytes

Result = dict[str, Any]
"""Figures of a cell; `time` maps each use to node-seconds."""
FIGURES = ("samples", "samples_per_s", "cost", "time", "changes", "node_s")
MAX_DEATHS = 3
"""Deaths of a cell's process after which the sweep fails."""


class CellFailed(ElasticError):
    """A cell failed; the message names it."""


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One simulation of a sweep."""

    scenario: Scenario
    policy: str
    seed: int

    def __str__(self) -> str:
        return f"{self.policy}, {self.scenario.model}, {self.scenario.name()}, seed {self.seed}"

    def definition(self) -> dict[str, Any]:
        """Return all inputs of the result; files count by name and content."""
        return {
            "policy": self.policy,
            "scenario": scenario_json(self.scenario),
            "seed": self.seed,
            "version": VERSION,
        }

    @property
    def key(self) -> str:
        """Hash of the definition."""
        text = json.dumps(self.definition(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def run(self) -> Result:
        """Simulate the cell. Raises FieldError."""
        trace = self.scenario.trace_of(self.seed)
        run = run_one(self.scenario.world(), trace, self.policy, self.seed)
        return {name: getattr(run, name) for name in FIGURES}


def attempt(cell: SweepCell) -> Result | str:
    """Return the result or the text of the error, since not every error can be pickled."""
    try:
        return cell.run()
    except ElasticError as error:
        return str(error)
    except Exception:  # noqa: BLE001 - the caller raises it again
        return traceback.format_exc()


def died(cell: SweepCell) -> CellFailed:
    """Return the error of a cell whose processes died too often."""
    return CellFailed(f"{cell}: {MAX_DEATHS} processes died while they ran it")


def result_or_raise(cell: SweepCell, found: Result | str) -> Result:
    """Return the result of `attempt`. Raises CellFailed."""
    if isinstance(found, str):
        raise CellFailed(f"{cell}: {found}")
    return found


Backend = Callable[[Sequence[SweepCell]], Generator[tuple[SweepCell, Result]]]
"""Runs cells and yields each result when it is ready, in any order. Raises CellFailed."""


def scenario_json(scenario: Scenario) -> dict[str, Any]:
    """Return a scenario as JSON, with names and SHA-256 of its files. Raises FieldError."""
    found = asdict(scenario)
    for name, path in scenario.files().items():
        found[name], found[f"{name}_sha256"] = Path(path).name, _sha256(path)
    return found


@lru_cache(maxsize=256)
def _sha256(path: str) -> str:
    return hashlib.sha256(read_bytes(Path(path))).hexdigest()


def cells_of(scenarios: Iterable[Scenario], policies: Sequence[str], seeds: int) -> list[SweepCell]:
    """Return the cells of all combinations and of the oracle, without duplicates.

    Cells with the same plans are neighbours.
    """
    named = tuple(dict.fromkeys((ORACLE, *policies)))
    combinations = product(scenarios, range(seeds), named)
    found = (SweepCell(scenario, policy, seed) for scenario, seed, policy in combinations)
    unique = {cell.key: cell for cell in found}
    return sorted(unique.values(), key=lambda cell: plan_key(cell.scenario))


def plan_key(scenario: Scenario) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
    """Return a key that is equal for scenarios with the same plans, which are cached."""
    return scenario.model, f"{scenario.microbatches}", scenario.nodes_of, scenario.physics


def check_cells(cells: Sequence[SweepCell]) -> None:
    """Raise FieldError for a scenario that cannot run."""
    for scenario in dict.fromkeys(cell.scenario for cell in cells):
        scenario.world()
        scenario.trace_of(0)


def run_of(cell: SweepCell, result: Result) -> PolicyRun:
    """Return the run that gave a result. Raises ValueError for a malformed result."""
    if set(result) != set(FIGURES) or set(result["time"]) != {use.value for use in Use}:
        raise ValueError(f"figures of a cell are {', '.join(FIGURES)}")
    return PolicyRun(
        policy=cell.policy,
        seed=cell.seed,
        samples=int(result["samples"]),
        samples_per_s=float(result["samples_per_s"]),
        cost=float(result["cost"]),
        time={use.value: float(result["time"][use.value]) for use in Use},
        changes=int(result["changes"]),
    )
