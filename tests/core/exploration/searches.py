"""Single searches, which may run in processes of their own, and their results as text."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path
from typing import Any

from tests.core.exploration.cluster import Cluster
from tests.core.exploration.explorer import Explorer, Result
from tests.core.exploration.native import NativeExplorer

ROOT = Path(__file__).parents[3]
SOURCES = ("elastic/core", "elastic/planning", "elastic/domain", "tests/core/exploration")
STATES = {
    "return": 26,
    "duplicate": 54,
    "drop": 453,
    "takeover": 1_246,
    "lost save": 2_180,
    "node crash": 12_787,
    "cut": 51_374,
    "coordinator cut": 171_606,
    "worker crash": 274_429,
}
"""Number of states with one fault of each kind, to begin with the smallest searches."""


@dataclass(frozen=True)
class Search:
    """One search: the size of the job, and the faults that may happen."""

    kinds: tuple[str, ...]
    """Kinds of the faults, in any order; with `together` any of these each time."""
    faults: int
    together: bool
    nodes: int
    steps: int
    fine: bool
    from_start: bool
    lost_writes: int = 1
    """Most last writes that the store loses at a time."""
    reduced: bool = True
    """Whether orders of steps are left out that make no difference."""
    pipelines: int = 1
    """Number of pipelines; with several, an epoch change may leave some outside."""
    microbatches: int = 1
    """Micro-batches per step."""
    spares: int | None = None
    """Nodes without a stage; None: with one pipeline all but two, else none."""

    @property
    def name(self) -> str:
        return " + ".join(self.kinds) if self.kinds else "no faults"

    def cluster(self) -> Cluster:
        any_kind = product(self.kinds, repeat=self.faults)
        return Cluster(
            self.nodes,
            self.faults,
            sequences=frozenset(any_kind if self.together else permutations(self.kinds)),
            steps=self.steps,
            coarse=not self.fine,
            until_end=not self.fine,
            lost_writes=self.lost_writes,
            reduced=self.reduced,
            pipelines=self.pipelines,
            microbatches=self.microbatches,
            spares=self.spares,
        )

    def key(self, *ignored: str) -> dict[str, Any]:
        """Return what identifies the search in a file of results."""
        facts = {"version": version(), **self.__dict__}
        return {name: value for name, value in facts.items() if name not in ignored}


def version() -> str:
    """Return a digest of the sources on which results depend."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".c") and not path.name.startswith(("test_", "__main__")):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def explore(search: Search, native: bool, most_states: int, most_bytes: int) -> Result:
    cluster = search.cluster()
    start = cluster.start if search.from_start else cluster.running()
    if not native:
        return Explorer(cluster, most_states).run(start, 60.0)
    return NativeExplorer(cluster, most_states, most_bytes).run(start, 60.0)


def as_json(search: Search, result: Result) -> str:
    values = {
        **search.key(),
        "complete": result.complete,
        "states": result.states,
        "transitions": result.transitions,
        "seconds": round(result.seconds, 1),
        "found": dict(sorted(result.faults.items())),
        "seen": sorted(result.interventions),
        "violations": result.violations,
        "stuck": result.stuck,
        "stuck_trace": result.stuck_trace,
    }
    return json.dumps(values)
