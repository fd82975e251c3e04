"""Training with steps of a fixed length, which a test ends once its events have happened."""

from __future__ import annotations

from pathlib import Path

from tests.scenarios.harness import DEADLINE_S, Run
from tests.scenarios.jobs import Job
from tests.scenarios.shared import made_once

STEPS = 60
TRAIN = ("-m", "tests.kubernetes.train", "--steps", str(STEPS))
PACE = ("--pace", "0.03", "--doubling", "10")
"""A step of two nodes takes a second, one of the last ten half a minute."""


def paced(hurry: Path) -> list[str]:
    """Script and flags. Once the file `hurry` exists, steps take no extra time."""
    return [*TRAIN, *PACE, "--hurry", str(hurry)]


def finish_after(job: Job, hurry: Path, *causes: str) -> Run:
    """Wait until the causes of the job's recoveries contain all of `causes`. Then let it hurry, and
    return the finished run. The job is killed in any case."""

    def recovered() -> bool:
        found = " ".join(event["cause"] for event in job.of("recovery"))
        return all(cause in found for cause in causes)

    try:
        job.wait(" and ".join(causes), recovered, DEADLINE_S)
        hurry.touch()
        return job.finish()
    finally:
        job.kill()


def paced_reference(directory: Path) -> Run:
    """The same training without faults and extra time."""
    return made_once(directory, ["--nnodes", "1", "--accumulate", "exact"], TRAIN)
