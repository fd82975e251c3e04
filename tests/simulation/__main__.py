"""Runs jobs with fresh seeds for some time, and prints the failures with the command to repeat.

    python -m tests.simulation --seconds 60
    python -m tests.simulation --seed 12345 --trail
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter

from tests.simulation.world import run, scenario_of


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, action="append", default=[])
    parser.add_argument("--trail", action="store_true", help="print what happened")
    args = parser.parse_args()
    began, failures, runs, injected = time.perf_counter(), [], 0, Counter[str]()
    simulated_s = 0.0
    seeds = iter(args.seed) if args.seed else iter(lambda: secrets.randbits(32), None)
    for seed in seeds:
        outcome = run(scenario_of(seed))
        runs, simulated_s = runs + 1, simulated_s + outcome.simulated_s
        injected += outcome.injected
        if args.trail:
            print("\n".join(outcome.trail))
        if outcome.problems:
            failures.append(seed)
            print(f"FAILED {outcome.text()}")
            print(f"repeat it with: python -m tests.simulation --seed {seed} --trail\n", flush=True)
        elif args.seed:
            print(outcome.text(), outcome.code, outcome.real_s, outcome.switches)
        if not args.seed and time.perf_counter() - began > args.seconds:
            break
    seconds = time.perf_counter() - began
    per_hour = runs / seconds * 3600
    print(f"{runs} seeds in {seconds:.1f} s ({per_hour:.0f} per hour), {simulated_s:.0f} s simulated")
    print("faults: " + ", ".join(f"{kind} {n}" for kind, n in sorted(injected.items())))
    print(f"failed: {failures or 'none'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
