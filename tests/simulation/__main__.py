"""Runs jobs with fresh seeds for some time, and prints each failure with the command to repeat it.

python -m tests.simulation --seconds 60
python -m tests.simulation --seed 12345 --trail
python -m tests.simulation --seed 12345 --keep "a short text: what was wrong"
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.simulation.kept import keep
from tests.simulation.world import run, scenario_of


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
    args = parser.parse_args()
    began, failed, runs, injected, simulated_s = time.monotonic(), [], 0, Counter[str](), 0.0
    for seed in _seeds(args.seed, args.seconds):
        scenario = scenario_of(seed)
        if args.keep:
            keep(scenario, args.keep)
        outcome = run(scenario)
        runs, simulated_s = runs + 1, simulated_s + outcome.simulated_s
        injected += outcome.injected
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
    print("faults: " + ", ".join(f"{kind} {n}" for kind, n in sorted(injected.items())))
    print(f"failed seeds: {' '.join(map(str, failed)) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
