"""Small reference runs that several test files compare with. Each is made once per session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.scenarios.catalogue import BASE
from tests.scenarios.harness import Run, elastic_run

SCRIPT = ("-m", "examples.train_gpt", *BASE)
"""The small example; later flags override earlier ones."""

_done: dict[tuple[str, ...], Run] = {}


def exact(*flags: str) -> list[str]:
    """Flags of `elastic run` for a run whose parameters are compared bit for bit."""
    return ["--accumulate", "exact", *flags]


def reference(directory: Path, *script_flags: str, accumulate: str = "exact") -> Run:
    """The failure-free run on one node. The first call runs it in `directory`."""
    key = (accumulate, *script_flags)
    if key not in _done:
        flags = ["--nnodes", "1", "--accumulate", accumulate]
        run = elastic_run(directory / "reference", flags, [*SCRIPT, *script_flags])
        assert run.code == 0, run.output
        _done[key] = run
    return _done[key]


def faults(*texts: str) -> list[str]:
    """Command-line flags that inject these faults."""
    return [word for text in texts for word in ("--fault", text)]


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
