"""Runs jobs with fresh seeds for some time, and prints each failure with the command to repeat it.

python -m tests.simulation --seconds 60
python -m tests.simulation --seconds 3600 --record
python -m tests.simulation --campaigns
python -m tests.simulation --seed 12345 --trail
python -m tests.simulation --seed 12345 --keep "a short text: what was wrong"
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.simulation.kept import keep
from tests.simulation.world import run, scenario_of

CAMPAIGNS = Path(__file__).with_name("campaigns.jsonl")
"""One line per recorded campaign: commit, CPU seconds, seeds, faults by kind, failed seeds."""


def _commit() -> str:
    """Return the commit of the working tree; with "+" if files differ from it."""
    git = ["git", "-C", str(CAMPAIGNS.parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def summary(campaigns: list[dict[str, Any]]) -> str:
    """Return the total of all campaigns, and of those since the last failure."""
    lines = []
    clean = 0
    for number, one in enumerate(campaigns, 1):
        clean = number if one["failed"] else clean
    for name, part in (("in all", campaigns), ("since the last failure", campaigns[clean:])):
        seeds, cpu_h = sum(one["seeds"] for one in part), sum(one["cpu_s"] for one in part) / 3600
        lines.append(f"{name}: {seeds:,} seeds in {cpu_h:.2f} CPU-hours, {len(part)} campaigns")
    faults = sum((Counter(one["faults"]) for one in campaigns), Counter[str]())
    found = sum((Counter(one.get("scopes", {})) for one in campaigns), Counter[str]())
    lines.append(f"{_scopes(found)}, since they are counted")
    lines.append("faults: " + ", ".join(f"{kind} {n:,}" for kind, n in sorted(faults.items())))
    return "\n".join(lines)


def _scopes(found: Counter[str]) -> str:
    return f"changes with a scope: {found['begun']:,}, complete: {found['complete']:,}"


def _seeds(given: list[int], seconds: float) -> Iterator[int]:
    """Yield the given seeds, or fresh ones until the time is over."""
    yield from given
    end = time.monotonic() + seconds
    while not given and time.monotonic() < end:
        yield secrets.randbits(32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="time for fresh seeds")
    parser.add_argument("--seed", type=int, action="append", default=[], help="run this seed only")
    parser.add_argument("--trail", action="store_true", help="print what happened in each run")
    parser.add_argument("--keep", default="", help="keep the seeds as tests, with this reason")
    parser.add_argument("--record", action="store_true", help=f"add a line to {CAMPAIGNS.name}")
    parser.add_argument("--campaigns", action="store_true", help="print the recorded campaigns")
    args = parser.parse_args()
    if args.campaigns:
        print(summary([json.loads(line) for line in CAMPAIGNS.read_text().splitlines()]))
        return 0
    commit = _commit() if args.record else ""
    began, failed, runs, simulated_s = time.monotonic(), [], 0, 0.0
    injected, scopes = Counter[str](), Counter[str]()
    for seed in _seeds(args.seed, args.seconds):
        scenario = scenario_of(seed)
        if args.keep:
            keep(scenario, args.keep)
        outcome = run(scenario)
        runs, simulated_s = runs + 1, simulated_s + outcome.simulated_s
        injected += outcome.injected
        scopes += outcome.scopes
        if args.trail:
            print("\n".join(outcome.trail))
        if outcome.problems:
            failed.append(seed)
            command = f"python -m tests.simulation --seed {seed} --trail"
            print(f"FAILED {outcome.text()}\nrepeat it with: {command}\n", flush=True)
    seconds = time.monotonic() - began
    per_hour, per_cpu_hour = runs / seconds * 3600, runs / time.process_time() * 3600
    speed = f"{per_hour:.0f} per hour, {per_cpu_hour:.0f} per CPU-hour"
    print(f"{runs} seeds in {seconds:.1f} s, {speed}; {simulated_s:.0f} s simulated")
    print(_scopes(scopes))
    print("faults: " + ", ".join(f"{kind} {n}" for kind, n in sorted(injected.items())))
    if args.record:
        entry = {
            "commit": commit,
            "cpu_s": round(time.process_time(), 1),
            "seeds": runs,
            "simulated_s": round(simulated_s),
            "scopes": dict(sorted(scopes.items())),
            "faults": dict(sorted(injected.items())),
            "failed": failed,
        }
        with CAMPAIGNS.open("a") as file:
            file.write(json.dumps(entry) + "\n")
    print(f"failed seeds: {' '.join(map(str, failed)) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
