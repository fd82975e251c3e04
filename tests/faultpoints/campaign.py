"""Random fault points of real jobs, for every backup scheme: `make fault-points`.

    python -m tests.faultpoints.campaign --results FILE [--runs N] [--seed S] [--scheme S]...

One run per scheme records the points of all agents, workers and of the coordinator. Then each run
has one fault at a random point. A run must end with code 0, the failure-free parameters and all due
checkpoints, or with an error that names the fault, if the fault is a lasting one. Runs that are in
FILE are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faultpoints.injection import FAULTS, parse_point
from tests.faultpoints.mini_job import SCHEMES
from tests.scenarios.catalogue import BASE
from tests.scenarios.harness import ROOT, Run, elastic_run

SITE = Path(__file__).parent / "site"
SCRIPT = ("-m", "examples.train_gpt", *BASE, "--steps", "4", "--checkpoint-every", "2")
DEADLINE_S = 240.0


def run_real(
    folder: Path, scheme: str, pipelines: int, settings: dict[str, Any], nodes: int = 4
) -> Run:
    """Run a job in `folder` with these settings of `site/sitecustomize.py`."""
    run_dir = folder / "run"
    settings = {"folders": [str(run_dir), "/dev/shm/"], "claim": str(folder / "claim"), **settings}
    environment = {
        "PYTHONPATH": f"{SITE}:{ROOT}",
        "FAULT_POINTS": json.dumps(settings),
        "TMPDIR": str(folder),
    }
    shape = ["--nnodes", str(nodes), "--pipelines", str(pipelines), "--backup", scheme]
    flags = [*shape, "--accumulate", "exact"]
    return elastic_run(run_dir, flags, SCRIPT, DEADLINE_S, environment)


def points_of(folder: Path, scheme: str, pipelines: int, nodes: int = 4) -> tuple[str, list[str]]:
    """Return the hash of a failure-free run, and its points."""
    record = folder / "points"
    run = run_real(folder, scheme, pipelines, {"record": str(record)}, nodes)
    assert run.code == 0, run.output
    return run.summary["params_sha256"], sorted(set(record.read_text().splitlines()))


def judge(run: Run, fault: str, sha: str, claimed: bool) -> tuple[str, str]:
    """Return the verdict (ok | refused | not reached | FAILED) and its reason."""
    if run.code != 0:
        named = fault.endswith("+") and "injected" in run.output
        return ("refused" if named else "FAILED"), run.output[-1500:]
    if run.summary["params_sha256"] != sha:
        return "FAILED", "other parameters"
    if not claimed:
        return "not reached", ""
    return "ok", f"{len(run.summary['recoveries'])} recoveries"


def one(folder: Path, scheme: str, pipelines: int, point: str, fault: str, sha: str) -> Any:
    """Run one case; return its line of the results."""
    began = time.monotonic()
    try:
        run = run_real(folder, scheme, pipelines, {"target": point, "fault": fault})
        verdict, why = judge(run, fault, sha, (folder / "claim").exists())
    except AssertionError as error:  # a checkpoint is missing; the text has the events about it
        named = fault.endswith("+") and "injected" in str(error)
        verdict, why = "refused" if named else "FAILED", str(error)[-1500:]
    except subprocess.TimeoutExpired:
        verdict, why = "FAILED", f"the job did not end within {DEADLINE_S:g} s"
    seconds = round(time.monotonic() - began, 1)
    case = {"scheme": scheme, "point": point, "fault": fault}
    return {**case, "verdict": verdict, "why": why, "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description="random fault points of real jobs")
    flags.add_argument("--results", type=Path, required=True)
    flags.add_argument("--runs", type=int, default=5, help="runs per scheme")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--scheme", action="append", choices=[name for name, _ in SCHEMES])
    args = flags.parse_args(argv)
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    known = {(d["scheme"], d["point"], d["fault"]): d for d in map(json.loads, lines)}
    failed = 0
    for scheme, pipelines in SCHEMES:
        if args.scheme and scheme not in args.scheme:
            continue
        with tempfile.TemporaryDirectory(prefix="faultpoints-") as folder:
            sha, points = points_of(Path(folder), scheme, pipelines)
        print(f"{scheme}: {len(points)} points", flush=True)
        chosen = random.Random(f"{args.seed} {scheme}")
        for _ in range(args.runs):
            point = chosen.choice(points)
            fault = chosen.choice(FAULTS[parse_point(point).kind])
            line = known.get((scheme, point, fault))
            if line is None:
                with tempfile.TemporaryDirectory(prefix="faultpoints-") as folder:
                    line = one(Path(folder), scheme, pipelines, point, fault, sha)
                with args.results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            failed += line["verdict"] == "FAILED"
            print(f"{scheme} {point} {fault}: {line['verdict']} ({line['seconds']} s)", flush=True)
            if line["verdict"] == "FAILED":
                print(line["why"], flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
