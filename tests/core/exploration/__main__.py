"""Explore all joint states of a small job: `python -m tests.core.exploration --help`."""

from __future__ import annotations

import argparse
import sys
from itertools import combinations

from tests.core.exploration.cluster import KINDS, Cluster
from tests.core.exploration.explorer import Explorer, Result


def explore(
    args: argparse.Namespace, kinds: frozenset[str] | None, report_s: float = 60.0
) -> Result:
    cluster = Cluster(
        args.nodes,
        args.faults,
        kinds=kinds,
        steps=args.steps,
        coarse=not args.fine,
        until_end=not args.fine,
    )
    explorer = Explorer(cluster, args.most_states)
    start = cluster.start if args.from_start else cluster.running()
    return explorer.run(start, report_s)


def show(name: str, result: Result) -> None:
    done = "" if result.complete else " (INCOMPLETE)"
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(result.faults.items()))
    print(
        f"{name}: {result.states:,} states, {result.transitions:,} transitions{done}, "
        f"{result.seconds:.0f} s of CPU time; faults: {faults or 'none'}; "
        f"broken promises: {len(result.violations)}; stuck states: {result.stuck}",
        flush=True,
    )
    if result.interventions:
        print(f"  seen: {', '.join(sorted(result.interventions))}")
    for text, trace in result.violations.items():
        print(f"  {text}:", *trace, sep="\n    ")
    if result.stuck:
        print("  stuck:", *result.stuck_trace, sep="\n    ", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.core.exploration", description=__doc__)
    add = parser.add_argument
    add("--nodes", type=int, default=3)
    add("--faults", type=int, default=1)
    add("--steps", type=int, default=1, help="steps of the job")
    add("--kinds", nargs="*", default=list(KINDS), help=", ".join(KINDS))
    add("--fine", action="store_true", help="small steps of workers, and the way of all agents out")
    add("--from-start", action="store_true", help="begin before the nodes join")
    add("--most-states", type=int, default=0, help="stop after so many; 0: never")
    add("--together", action="store_true", help="one search over all kinds, not one per choice")
    args = parser.parse_args()
    # With n faults, each trace has at most n kinds: searches over every n kinds find all traces.
    count = min(args.faults, len(args.kinds))
    choices = [tuple(args.kinds)] if args.together else list(combinations(args.kinds, count))
    failed = False
    for kinds in choices:
        result = explore(args, frozenset(kinds))
        show(" + ".join(kinds) if kinds else "no faults", result)
        failed |= bool(result.violations or result.stuck or not result.complete)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
