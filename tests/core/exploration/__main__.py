"""Explore all joint states of a small job: `python -m tests.core.exploration --help`.

One search is done for each choice of kinds of faults, the smallest first. With `--results` each
one is written to a file when it ends, and searches whose result is there are left out, unless the
core has changed since.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import combinations_with_replacement
from math import prod
from pathlib import Path
from typing import Any

from tests.core.exploration.cluster import KINDS
from tests.core.exploration.explorer import Result
from tests.core.exploration.searches import STATES, Search, as_json, explore


def show(name: str, result: Result) -> None:
    done = "" if result.complete else " (INCOMPLETE)"
    faults = ", ".join(f"{kind} {count:,}" for kind, count in sorted(result.faults.items()))
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


def known_results(path: Path | None) -> list[dict[str, Any]]:
    """Return the complete searches of a file of results."""
    if path is None or not path.exists():
        return []
    lines = map(json.loads, path.read_text().splitlines())
    return [line for line in lines if line["complete"]]


def searches(args: argparse.Namespace) -> Iterator[Search]:
    size = (args.nodes, args.steps, args.fine, args.from_start, args.lost_writes)
    job = (args.pipelines, args.microbatches, args.spares)
    reduced = not args.all_orders
    if args.together:
        yield Search(tuple(args.kinds), args.faults, True, *size, reduced, *job)
        return
    choices = combinations_with_replacement(args.kinds, args.faults)
    for kinds in sorted(choices, key=lambda chosen: prod(STATES[kind] for kind in chosen)):
        # A node returns only after a crash.
        if set(kinds) != {"return"}:
            yield Search(kinds, args.faults, False, *size, reduced, *job)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.core.exploration", description=__doc__)
    add = parser.add_argument
    add("--nodes", type=int, default=3)
    add("--faults", type=int, default=1)
    add("--steps", type=int, default=1, help="steps of the job")
    add("--pipelines", type=int, default=1, help="with several, --steps 2 has more promises")
    add("--microbatches", type=int, default=1, help="micro-batches per step")
    add("--spares", type=int, help="nodes without a stage; all but two of one pipeline, else none")
    add("--kinds", nargs="*", default=list(KINDS), help=", ".join(KINDS))
    add("--fine", action="store_true", help="small steps of workers, and the way of all agents out")
    add("--from-start", action="store_true", help="begin before the nodes join")
    add("--lost-writes", type=int, default=1, help="most last writes that the store loses")
    add("--most-states", type=int, default=0, help="stop after so many; 0: never")
    add("--memory", type=float, default=8.0, help="GiB for all searches at a time")
    add("--together", action="store_true", help="one search over all kinds, not one per choice")
    add("--all-orders", action="store_true", help="also orders of steps that make no difference")
    add("--python", action="store_true", help="search without compiled code, which is slower")
    add("--jobs", type=int, default=1, help="searches at a time")
    add("--results", type=Path, help="file of results, one a line; to continue later")
    add("--any-version", action="store_true", help="accept results of other versions of the core")
    return parser.parse_args()


def main() -> int:
    args = parse()
    known = known_results(args.results)
    failed = any(line["violations"] or line["stuck"] for line in known)
    native = not args.python and shutil.which("cc") is not None
    most_bytes = int(args.memory * 2**30 / args.jobs)
    ignored = {"version"} if args.any_version else set()
    done = [{key: line[key] for key in line if key not in ignored} for line in known]
    todo = [
        search
        for search in searches(args)
        if not any(json.loads(json.dumps(search.key(*ignored))).items() <= x.items() for x in done)
    ]
    context = multiprocessing.get_context("spawn")
    # A process ends with its search, which frees its memory.
    with ProcessPoolExecutor(args.jobs, context, max_tasks_per_child=1) as pool:
        limits = (native, args.most_states, most_bytes)
        running = {pool.submit(explore, search, *limits): search for search in todo}
        for future in as_completed(running):
            search, result = running[future], future.result()
            show(search.name, result)
            if args.results:
                with args.results.open("a") as file:
                    print(as_json(search, result), file=file)
            failed |= bool(result.violations or result.stuck or not result.complete)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
