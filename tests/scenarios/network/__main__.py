"""Runs every case of a partial partition, and records what happened.

python -m tests.scenarios.network
python -m tests.scenarios.network --results FILE

A case that the file has, from whichever commit, is left out; so a run continues where the last
one ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.kubernetes.network import missing
from tests.scenarios.harness import ROOT
from tests.scenarios.network.partial_partitions import CASES, Case, check_case

RESULTS = ROOT / "benchmarks" / "results" / "partial-partitions.jsonl"
"""One line per case: its name, commit, times in seconds, and what went wrong."""


def commit() -> str:
    """Return the commit of the working tree; with "+" if files differ from it."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case, with files in `folder`; return its line."""
    began = time.monotonic()
    line: dict[str, Any] = {"case": str(case), "commit": commit()}
    try:
        figures = check_case(case, folder)
        line |= {"longest_s": round(figures.longest_s, 2), "step_s": round(figures.step_s, 2)}
        line["right"] = True
    except (AssertionError, psutil.Error, subprocess.SubprocessError) as error:
        line |= {"right": False, "error": f"{type(error).__name__}: {error}"}
    return line | {"seconds": round(time.monotonic() - began, 1)}


def summary(lines: list[dict[str, Any]]) -> str:
    """Return how many cases are right, and how long the training stood still in them."""
    right = [one for one in lines if one["right"]]
    text = f"{len(right)} of {len(lines)} cases are right; there are {len(CASES)}"
    if right:
        longest = [one["longest_s"] for one in right]
        text += f"; longest time between two steps: median {statistics.median(longest):.1f} s"
        text += f", at most {max(longest):.1f} s"
    return text


def known(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.network", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    results = parser.parse_args().results
    why = missing()
    if why:
        print(why, file=sys.stderr)
        return 2
    done = {line["case"] for line in known(results)}
    with tempfile.TemporaryDirectory(prefix="partitions-") as place:
        shared = Path(place) / "pytest-of-cases" / "0"  # where all cases find one reference run
        for case in CASES:
            if str(case) in done:
                continue
            folder = shared / str(case)
            folder.mkdir(parents=True)
            line = run(case, folder)
            with results.open("a") as file:
                print(json.dumps(line), file=file)
            if not line["right"]:
                print(f"{case}: {line['error']}", flush=True)
    lines = known(results)
    print(summary(lines))
    return 0 if all(line["right"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
