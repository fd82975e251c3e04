"""Runs the small job once per fault point, fault and backup scheme.

    python -m tests.faultpoints.enumeration --results FILE [--scheme S]... [--part I/N] [--sample N]

The scheme "coordinator" stands for the saves and commits of the coordinator.

A run without a fault records the points; a second one shows which of them every run passes. The
same is done for a job that recovers from a loss, so that the points of a recovery are included.
Each line of FILE is one result. Points with a result in FILE are not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faultpoints import mini_worker
from tests.faultpoints.injection import FAULTS, parse_point
from tests.faultpoints.mini_coordinator import CoordinatorResult, run_coordinator
from tests.faultpoints.mini_job import N_STEPS, NO_NODE, SCHEMES, Failed, Fault, Result, run_job

COORDINATOR = "coordinator"
CLEAN, WORKER_LOST, NODE_LOST = "clean", "worker lost", "node lost"
SCENARIOS = (CLEAN, WORKER_LOST, NODE_LOST)
KILLS = ("kill", "kill-after")
TRIES = 3
"""Runs of a fault whose point was not reached, because threads came in another order."""


@dataclass(frozen=True)
class Case:
    """One fault at one point of one scenario."""

    scheme: str
    scenario: str
    point: str
    fault: str


@dataclass(frozen=True)
class Outcome:
    """The result of a case. `verdict`: ok | refused | not reached | FAILED."""

    case: Case
    verdict: str
    why: str
    seconds: float


class Enumeration:
    """Cases of one backup scheme. `folder` is an empty folder in shared memory."""

    def __init__(
        self, folder: Path, scheme: str, pipelines: int, scenarios: Sequence[str] = SCENARIOS
    ) -> None:
        self._folder, self._scheme, self._pipelines = folder, scheme, pipelines
        self._runs = 0
        self._bases: dict[str, tuple[Fault, ...]] = {CLEAN: ()}
        self.points: dict[str, list[str]] = {}
        """Scenario -> points that every run passes."""
        self.unstable: dict[str, int] = {}
        """Scenario -> number of points that only one of two runs passed."""
        clean = self._record(CLEAN)
        self.sha = clean.sha
        publishes = [p for p in clean.points if p.startswith("worker-b/publish/")]
        acks = [p for p in clean.points if p.startswith("agent-b/ack/BundleAcknowledged")]
        self._bases[WORKER_LOST] = (Fault(parse_point(publishes[len(publishes) // 2]), "kill"),)
        self._bases[NODE_LOST] = (Fault(parse_point(acks[len(acks) // 2]), "kill"),)
        for scenario in (WORKER_LOST, NODE_LOST):
            if scenario in scenarios:
                self._record(scenario)
        if CLEAN not in scenarios:
            del self.points[CLEAN]

    def _run(self, *faults: Fault, record: bool = False) -> Result:
        self._runs += 1
        root = self._folder / f"job{self._runs}"
        try:
            return run_job(root, self._scheme, self._pipelines, faults, record=record)
        except Failed as failed:
            logs = "".join(f"\n{p.name}: {p.read_text()[-800:]}" for p in root.glob("*.log"))
            raise Failed(f"{failed}{logs}") from None
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def _record(self, scenario: str) -> Result:
        base = self._bases[scenario]
        first, second = self._run(*base, record=True), self._run(*base, record=True)
        for result in (first, second):
            if result.refusal or result.lost or not result.sha:
                why = result.refusal or f"checkpoints lost: {result.lost}"
                raise Failed(f"{self._scheme}, {scenario}: the job without the fault ended: {why}")
        both = sorted(set(first.points) & set(second.points))
        known = set(self.points.get(CLEAN, ()))
        roles = {fault.point.role for fault in base}  # this process has its fault already
        self.points[scenario] = [
            text for text in both if text not in known and parse_point(text).role not in roles
        ]
        self.unstable[scenario] = len(set(first.points) ^ set(second.points))
        return first

    def cases(self) -> Iterator[Case]:
        for scenario, points in self.points.items():
            for text in points:
                for fault in FAULTS[parse_point(text).kind]:
                    yield Case(self._scheme, scenario, text, fault)

    def run(self, case: Case) -> Outcome:
        """Run one case and judge it."""
        began, fault = time.monotonic(), Fault(parse_point(case.point), case.fault)
        verdict, why = "not reached", ""
        for _ in range(TRIES):
            try:
                result = self._run(*self._bases[case.scenario], fault)
            except Failed as failed:
                verdict, why = "FAILED", str(failed)
                break
            if case.point in result.reached:
                verdict, why = judge(case, result, self.sha)
                break
        return Outcome(case, verdict, why, round(time.monotonic() - began, 3))


def judge(case: Case, result: Result, sha: str) -> tuple[str, str]:
    """Return the verdict on a case whose point was reached, and its reason. `sha`: hash of the
    parameters of a run without the fault."""
    lasting = case.fault.endswith("+")
    if result.refusal:
        named = lasting and "injected" in result.refusal
        right = named or _took_last_node(case, result)
        return ("refused" if right else "FAILED"), result.refusal
    if result.sha != sha:
        return "FAILED", f"other parameters: {result.sha[:12]}, not {sha[:12]}"
    if result.lost:
        named = lasting and all("injected" in why for why in result.lost.values())
        right = named and N_STEPS not in result.lost
        return ("refused" if right else "FAILED"), f"checkpoints lost: {result.lost}"
    return "ok", f"{result.epochs} epochs"


def _took_last_node(case: Case, result: Result) -> bool:
    """Whether the fault killed the agent of the only node that was left. No other second loss takes
    the last copies: the other node has copies of everything, or keeps its vault."""
    killed = case.fault in KILLS and parse_point(case.point).role.startswith("agent")
    return case.scenario == NODE_LOST and killed and result.refusal == NO_NODE


class CoordinatorEnumeration:
    """Cases of the coordinator's script. `folder` is an empty folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, 0
        first, second = self._run(None, record=True), self._run(None, record=True)
        self.points = {CLEAN: sorted(set(first.points) & set(second.points))}
        self.unstable = {CLEAN: len(set(first.points) ^ set(second.points))}

    def _run(self, fault: Fault | None, *, record: bool = False) -> CoordinatorResult:
        self._runs += 1
        root = self._folder / f"run{self._runs}"
        try:
            return run_coordinator(root, fault, record=record)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def cases(self) -> Iterator[Case]:
        for text in self.points[CLEAN]:
            for fault in FAULTS[parse_point(text).kind]:
                yield Case(COORDINATOR, CLEAN, text, fault)

    def run(self, case: Case) -> Outcome:
        """Run one case and judge it."""
        began = time.monotonic()
        verdict, why = "not reached", ""
        for _ in range(TRIES):
            try:
                result = self._run(Fault(parse_point(case.point), case.fault))
            except Failed as failed:
                verdict, why = "FAILED", str(failed)
                break
            if result.reached:
                named = case.fault.endswith("+") and all("injected" in t for t in result.failed)
                verdict = "ok" if not result.failed else "refused" if named else "FAILED"
                why = "; ".join(result.failed) or f"{result.coordinators} coordinators"
                break
        return Outcome(case, verdict, why, round(time.monotonic() - began, 3))


def read_results(path: Path) -> dict[Case, Outcome]:
    """Return the results of former runs."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [Outcome(Case(**line.pop("case")), **line) for line in lines]
    return {outcome.case: outcome for outcome in found}


def enumerate_all(
    enumeration: Enumeration | CoordinatorEnumeration,
    name: str,
    args: argparse.Namespace,
    known: dict[Case, Outcome],
) -> int:
    """Run the cases that `known` lacks; return the number of failures."""
    part, parts = map(int, args.part.split("/"))
    cases = [case for case in enumeration.cases() if args.fault in ("", case.fault)]
    if args.sample:
        cases = random.Random(args.seed).sample(cases, min(args.sample, len(cases)))
    for scenario, points in enumeration.points.items():
        kinds = dict(sorted(Counter(parse_point(text).kind for text in points).items()))
        unstable = enumeration.unstable[scenario]
        print(f"{name}, {scenario}: {len(points)} points {kinds}, {unstable} unstable", flush=True)
    print(f"{name}: {len(cases)} cases", flush=True)
    verdicts = Counter[str]()
    for case in cases[part - 1 :: parts]:
        if case not in known:
            known[case] = enumeration.run(case)
            with args.results.open("a") as file:
                file.write(json.dumps(asdict(known[case])) + "\n")
        outcome = known[case]
        verdicts[outcome.verdict] += 1
        if outcome.verdict == "FAILED":
            print(f"FAILED {case}: {outcome.why}", flush=True)
    print(f"{name}: {dict(verdicts)}", flush=True)
    return verdicts["FAILED"]


def main(argv: Sequence[str] | None = None) -> int:
    names = [COORDINATOR, *(name for name, _ in SCHEMES)]
    flags = argparse.ArgumentParser(description="fault points by enumeration")
    flags.add_argument("--results", type=Path, required=True)
    flags.add_argument("--scheme", action="append", choices=names)
    flags.add_argument("--scenario", action="append", choices=SCENARIOS)
    flags.add_argument("--part", default="1/1", help="I/N: every N-th case, beginning with I")
    flags.add_argument("--sample", type=int, default=0, help="cases per scheme; 0: all")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--fault", default="", help="only this fault")
    args = flags.parse_args(argv)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    mini_worker.prepare()
    known, failed = read_results(args.results), 0
    pipelines = dict(SCHEMES)
    for name in args.scheme or names:
        with tempfile.TemporaryDirectory(prefix="faultpoints-", dir="/dev/shm") as folder:
            path = Path(folder)
            if name == COORDINATOR:
                failed += enumerate_all(CoordinatorEnumeration(path), name, args, known)
            else:
                scheme = Enumeration(path, name, pipelines[name], args.scenario or SCENARIOS)
                failed += enumerate_all(scheme, name, args, known)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
