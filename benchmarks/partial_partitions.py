"""Runs every case of a partial partition, and records how long the training stood still.

python -m benchmarks.partial_partitions

Two of four nodes, each a network namespace, cannot reach each other: 6 pairs, 3 directions, 2 kinds
of drop, 6 phases of the job (`tests/scenarios/network/partial_partitions.py`). Cases that the
result file has, from whichever commit, are left out; so a run continues where the last one ended.
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

from benchmarks.chaos.__main__ import commit
from benchmarks.results import DIRECTORY, Row, show, write
from tests.kubernetes.network import missing
from tests.scenarios.network.partial_partitions import CASES, LIMIT_S, Case, check_case

NAME = "partial_partitions"


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case, with files in `folder`; return its record."""
    began = time.monotonic()
    record: dict[str, Any] = {"case": str(case), "commit": commit()}
    try:
        figures = check_case(case, folder)
        record |= {"longest_s": round(figures.longest_s, 2), "step_s": round(figures.step_s, 2)}
        record["right"] = True
    except (AssertionError, psutil.Error, subprocess.SubprocessError) as error:
        record |= {"right": False, "error": f"{type(error).__name__}: {error}"}
    return record | {"seconds": round(time.monotonic() - began, 1)}


def rows(records: list[dict[str, Any]]) -> list[Row]:
    """Return the rows of the result file."""
    right = [one for one in records if one["right"]]
    found = [
        Row("cases with the failure-free result", len(right), "", len(CASES), "higher"),
        Row("cases that failed", len(records) - len(right), "", 0, "lower"),
    ]
    if right:
        longest = [one["longest_s"] for one in right]
        median, most = statistics.median(longest), max(longest)
        beyond = max(one["longest_s"] - one["step_s"] for one in right)
        found += [
            Row("longest time between two steps, median", median, "s", None, ""),
            Row("longest time between two steps, max", most, "s", None, ""),
            Row("the same less a usual step, max", beyond, "s", LIMIT_S, "lower"),
        ]
    return found


def known(path: Path) -> list[dict[str, Any]]:
    """Return the records of a result file."""
    return list(json.loads(path.read_text())["cases"]) if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.partial_partitions", description=__doc__
    )
    parser.add_argument("--json", type=Path, default=DIRECTORY / f"{NAME}.json", help="result file")
    parser.add_argument("--runs", type=int, default=len(CASES), help="most cases in this call")
    args = parser.parse_args()
    why = missing()
    if why:
        print(why, file=sys.stderr)
        return 2
    records = known(args.json)
    done = {one["case"] for one in records}
    with tempfile.TemporaryDirectory(prefix="partitions-") as place:
        shared = Path(place) / "pytest-of-cases" / "0"  # where all cases find one reference run
        for case in [case for case in CASES if str(case) not in done][: args.runs]:
            folder = shared / str(case)
            folder.mkdir(parents=True)
            record = run(case, folder)
            records.append(record)
            write(NAME, rows(records), args.json, cases=records)
            if not record["right"]:
                print(f"{case}: {record['error']}", flush=True)
    show(rows(records))
    return 0 if all(one["right"] for one in records) else 1


if __name__ == "__main__":
    sys.exit(main())
