"""Random real runs with random faults.

    python -m benchmarks.chaos --runs 300 --seed 1 [--json FILE] [--keep DIR]

Run i has the seed S + i. Each run is a case of `benchmarks.chaos.case`: three to six nodes, a
random shape, backup scheme and schedule, and one to four faults. It must end with the parameters
of the same training without faults, bit for bit, and with all due checkpoints; or it must refuse
with exit code 3, if all copies of a layer were lost and there was no checkpoint yet. A run that
fails prints the command that repeats it, and its files are kept.

The runs need root, for disks that are full and for network namespaces.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import functools
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos import verdict
from benchmarks.chaos.case import Case, random_case
from benchmarks.chaos.injector import Injector, unsupported
from benchmarks.chaos.job import COORDINATOR, ROOT, Job, begin, events_of
from benchmarks.chaos.verdict import FAILED, IDLE, REFUSED, RIGHT, Finished, judge
from benchmarks.results import DIRECTORY, Row, write
from benchmarks.results import show as print_rows
from elastic.core.protocol.fault_spec import FaultKind
from tests.kubernetes.network import missing

DEADLINE_S = 420.0
"""A run ends in one to two minutes on two busy cores."""
POLL_S, LEFT_S = 0.02, 10.0
SKIPPED, RUNS = "skipped", 300
"""Outcome of a run that this machine cannot do; number of runs to make in all."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run in the result file."""

    seed: int
    commit: str
    command: str
    outcome: str
    why: str
    place: str
    job: str
    flags: str
    faults: tuple[str, ...]
    fired: tuple[str, ...]
    code: int | None
    recoveries: int
    healthy_lost: tuple[str, ...]
    seconds: float


def reference(case: Case, cache: Path) -> str:
    """Return the hash of the parameters of this training without faults, on one node. Several
    processes may use the cache."""
    run_dir = cache / f"reference-{case.model}-{case.steps}"
    cache.mkdir(parents=True, exist_ok=True)
    with run_dir.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = verdict.read_json(run_dir / "summary.json")
        if found.get("exit_code") != 0:
            words = ["run", "--standalone", "--nnodes", "1", "--accumulate", "exact"]
            command = [sys.executable, "-m", "elastic", *words, "--run-dir", str(run_dir)]
            quiet = subprocess.DEVNULL
            subprocess.run(
                [*command, *case.script], cwd=ROOT, check=True, stdout=quiet, stderr=quiet
            )
            found = verdict.read_json(run_dir / "summary.json")
    return str(found["params_sha256"])


def carry_out(case: Case, folder: Path) -> Finished:
    """Run a case to its end."""
    job = begin(case, folder)
    try:
        injector = Injector(job)
        try:
            end = time.monotonic() + DEADLINE_S
            while not job.ended() and time.monotonic() < end:
                injector.poll()
                time.sleep(POLL_S)
        finally:
            injector.close()
        ended = job.ended()
        processes = _left(job) if ended else ()
        files = job.files_left()
        codes = job.codes()
    finally:
        job.close()
        job.keep_disks()
    run_dirs = [job.run_dir, *(folder / name for name in codes)]
    head = codes.get(COORDINATOR, codes.get("run"))
    summary = verdict.read_json(job.run_dir / "summary.json")
    if head is not None and case.place == "network":
        head = int(summary.get("exit_code", head))
    whole, damaged = verdict.read_checkpoints(job.checkpoints)
    return Finished(
        case=case,
        code=head if ended else None,
        summary=summary,
        events=events_of(job.run_dir),
        destroyed=verdict.destroyed_nodes(case, run_dirs, injector.done),
        partitions=verdict.partitions(case, run_dirs, injector.done),
        corrupted=verdict.corruptions(case, run_dirs),
        injections=injector.done,
        checkpoints=whole,
        damaged=damaged,
        processes=processes,
        files=tuple(files),
        agent_codes={name: code for name, code in codes.items() if name.startswith("node")},
        fired=tuple(verdict.fired(case, run_dirs, injector.done)),
    )


def _left(job: Job) -> tuple[str, ...]:
    """Return the processes that are left some seconds after the end."""
    end = time.monotonic() + LEFT_S
    while (found := job.everything()) and time.monotonic() < end:
        time.sleep(0.1)
    return tuple(" ".join(process.cmdline()[:6]) for process in found)


def run(seed: int, base: Path, cache: Path) -> Result:
    """Carry out the case of a seed and judge it."""
    case, begun = random_case(seed), time.monotonic()
    why = next((text for fault in case.own if (text := unsupported(fault))), "")
    why = why or missing()
    if why:
        return result(case, None, verdict.Verdict(SKIPPED, why), 0.0)
    sha256 = reference(case, cache)
    done = carry_out(case, base / str(seed))
    found = judge(done, sha256)
    return result(case, done, found, time.monotonic() - begun)


@functools.cache
def commit() -> str:
    """Return the commit of the working tree; with "+" if other files than results differ."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    code = [*git, "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"]
    dirty = subprocess.run(code, check=False).returncode
    return head.stdout.strip() + ("+" if dirty else "")


def result(case: Case, done: Finished | None, found: verdict.Verdict, seconds: float) -> Result:
    return Result(
        seed=case.seed,
        commit=commit(),
        command=f"python -m benchmarks.chaos --runs 1 --seed {case.seed}",
        outcome=found.outcome,
        why=found.why,
        place=case.place,
        job=f"{case.model}, {case.nodes} nodes, {case.steps} steps",
        flags=" ".join(case.flags),
        faults=case.faults,
        fired=done.fired if done else (),
        code=done.code if done else None,
        recoveries=len(done.summary.get("recoveries", [])) if done else 0,
        healthy_lost=tuple(verdict.healthy_lost(done)) if done else (),
        seconds=round(seconds, 1),
    )


def kind_of(fault: str, place: str) -> str:
    """Return the kind of a fault. A partition on one machine loses no packet, so it is another
    fault than one in network namespaces."""
    kind = fault.split()[0]
    if kind != FaultKind.PARTITION:
        return kind
    return f"{kind}, {'cable pulled' if place == 'network' else 'agent muted'}"


def rows(results: list[dict[str, Any]]) -> list[Row]:
    """Return the figures of all runs."""
    outcomes = collections.Counter(one["outcome"] for one in results)
    kinds = collections.Counter(
        kind_of(text, one["place"]) for one in results for text in one["fired"]
    )
    ran = [one for one in results if one["outcome"] not in (SKIPPED, IDLE)]
    lost = sum(len(one["healthy_lost"]) for one in ran)
    return [
        Row("runs", len(ran), "", RUNS, "higher"),
        Row("runs that failed", outcomes[FAILED], "", 0, "lower"),
        Row("runs with the right result", outcomes[RIGHT], "", None, "higher"),
        Row("runs with a right refusal", outcomes[REFUSED], "", None, "lower"),
        Row("runs that ended before a fault was due", outcomes[IDLE], "", None, "lower"),
        Row("runs that this machine cannot do", outcomes[SKIPPED], "", None, "lower"),
        Row("recoveries", sum(one["recoveries"] for one in ran), "", None, "higher"),
        Row("nodes lost that no fault had hit", lost, "", 0, "lower"),
        *(Row(f"faults: {kind}", n, "", None, "higher") for kind, n in sorted(kinds.items())),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--json", type=Path, default=DIRECTORY / "chaos.json", help="result file")
    parser.add_argument("--add", action="store_true", help="keep other runs of the result file")
    parser.add_argument("--keep", type=Path, help="keep the files of all runs here")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error("--runs: a whole number from 1 up")
    old = verdict.read_json(args.json).get("runs", []) if args.add else []
    results = {one["seed"]: one for one in old}
    base = args.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    failed = 0
    for number, seed in enumerate(range(args.seed, args.seed + args.runs), 1):
        one = run(seed, base, base)
        failed += one.outcome == FAILED
        show(number, args.runs, one, base)
        results[seed] = asdict(one)
        ordered = [results[key] for key in sorted(results)]
        write("chaos", rows(ordered), args.json, runs=ordered)
        if not args.keep and one.outcome != FAILED:
            subprocess.run(["rm", "-rf", base / str(seed)], check=True)
    print_rows(rows([results[key] for key in sorted(results)]))
    return 1 if failed else 0


def show(number: int, count: int, one: Result, base: Path) -> None:
    faults = "; ".join(one.fired) or "no fault"
    print(
        f"{number}/{count}  seed {one.seed}: {one.outcome}  {one.seconds:.0f} s  {one.job}, "
        f"{one.place}, {one.flags}: {faults}" + (f": {one.why}" if one.why else ""),
        flush=True,
    )
    if one.outcome == FAILED:
        print(f"    repeat: {one.command}    files: {base / str(one.seed)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
