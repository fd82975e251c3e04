"""Training with steps of a set length, until all events that a test waits for have happened."""

from __future__ import annotations

from pathlib import Path

from tests.scenarios.harness import Run, elastic_run

STEPS = 60
TRAIN = ("-m", "tests.kubernetes.train", "--steps", str(STEPS))
PACE = ("--pace", "0.03", "--doubling", "10")
"""A step of two nodes takes a second, one of the last ten half a minute."""

_done: list[Run] = []


def paced(hurry: Path) -> list[str]:
    """The script and its flags; from when the file `hurry` exists on, steps take no time."""
    return [*TRAIN, *PACE, "--hurry", str(hurry)]


def paced_reference(directory: Path) -> Run:
    """The same training without faults and pace; made in `directory` when it is first asked for."""
    if not _done:
        run = elastic_run(
            directory / "paced-reference", ["--nnodes", "1", "--accumulate", "exact"], TRAIN
        )
        assert run.code == 0, run.output
        _done.append(run)
    return _done[0]
