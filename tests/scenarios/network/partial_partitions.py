"""Cuts between two of four nodes, each made while the job is held in a given phase.

A phase is held by a stopped process for which the others wait. The stopped process continues once
the cut is made, so each cut falls into its phase however slow the machine is.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic.planning.plan.plan import parse_plan
from tests.scenarios.network.job import NetworkJob
from tests.scenarios.paced import paced_reference

NODES = 4
NAMES = tuple(f"node{i}" for i in range(NODES))
Pair = tuple[str, str]
PAIRS: tuple[Pair, ...] = tuple(itertools.combinations(NAMES, 2))
FIRST = NAMES[0]
"""The node of the first stage, whose backward pass ends last."""
BEGUN = 2
"""Number of steps before the fault."""
LIMIT_S = 10.0
"""Longest time without a finished step after the network failed."""


@dataclass(frozen=True)
class Case:
    """A cut: between which nodes, in which directions, how, and when."""

    pair: Pair
    ways: str
    """Direction whose packets are dropped: `there`, `back` or `both`."""
    silently: bool
    phase: str

    def __str__(self) -> str:
        how = "silent-drop" if self.silently else "blackhole"
        return "-".join((*self.pair, self.ways, how, self.phase))

    @property
    def cuts(self) -> list[Pair]:
        there, back = self.pair, (self.pair[1], self.pair[0])
        return {"there": [there], "back": [back], "both": [there, back]}[self.ways]

    @property
    def others(self) -> list[str]:
        return [name for name in NAMES if name not in self.pair]


@dataclass(frozen=True)
class Arrangement:
    """How a phase is reached: the shape of the job, and the function that makes the cut there."""

    at: Callable[[NetworkJob, Case, Callable[[], None]], None]
    faults: tuple[str, ...] = ()
    """Injected faults; {first} and {second} are the nodes outside the pair."""
    flags: tuple[str, ...] = ()
    late: bool = False
    """Whether the last node joins during the training."""


def during_training(job: NetworkJob, case: Case, cut: Callable[[], None]) -> None:
    cut()


def with_stopped_worker(node: str) -> Callable[[NetworkJob, Case, Callable[[], None]], None]:
    """Make the cut while an injected fault keeps the worker of `node` stopped."""

    def at(job: NetworkJob, case: Case, cut: Callable[[], None]) -> None:
        name = node.format(first=case.others[0])
        job.wait_for("the stop of a worker", lambda: job.fault_reached(name, 0))
        if node == FIRST:
            plan = parse_plan(job.events("plan")[-1]["text"])
            assert plan.pipelines[0].stages[0].unit.node == name, "the others are still computing"
        (worker,) = job.agent(name).children()
        job.wait_for("the stopped state", lambda: worker.status() == "stopped")
        cut()
        worker.resume()

    return at


def while_halting(job: NetworkJob, case: Case, cut: Callable[[], None]) -> None:
    """A worker is killed, and the agent of another node is stopped before it can halt."""
    stopped, crashed = (job.agent(name) for name in case.others)
    stopped.suspend()
    for worker in crashed.children():
        worker.send_signal(signal.SIGKILL)
    job.wait_for("halting", lambda: job.phase == "halting")
    cut()
    stopped.resume()


def while_joining(job: NetworkJob, case: Case, cut: Callable[[], None]) -> None:
    """The coordinator knows the last node, whose worker then starts."""
    job.start(NAMES[-1])
    job.wait_for("the join", lambda: len(job.events("joined")) == NODES)
    cut()


PHASES = {
    "training": Arrangement(during_training),
    "reduction": Arrangement(
        with_stopped_worker(FIRST),
        faults=("stop node=0 step=3 phase=reduce",),
        flags=("--pipelines", "2"),
    ),
    # With one pipeline there is nothing to reduce: the others wait in the exchange of the commit.
    "commit": Arrangement(with_stopped_worker(FIRST), faults=("stop node=0 step=3 phase=reduce",)),
    "halting": Arrangement(while_halting),
    "installing": Arrangement(
        with_stopped_worker("{first}"),
        faults=("stop node={first} phase=recovery step=3", "kill-worker node={second} step=3"),
    ),
    "joining": Arrangement(while_joining, late=True),
}
WAYS = ("there", "back", "both")
CASES = tuple(Case(*values) for values in itertools.product(PAIRS, WAYS, (False, True), PHASES))


@dataclass(frozen=True)
class Figures:
    """Measured times in seconds, from the events of the coordinator."""

    longest_s: float
    """Longest time without a finished step from the cut on."""
    step_s: float
    """Longest step before the cut."""

    @property
    def limit_s(self) -> float:
        """The limit on `longest_s`: a step takes its time on this machine without a cut, too."""
        return LIMIT_S + self.step_s


def started(folder: Path, case: Case, *flags: str) -> NetworkJob:
    """Return the job in which `case` can be made."""
    plan = PHASES[case.phase]
    first, second = case.others
    faults = [fault.format(first=first, second=second) for fault in plan.faults]
    words = [word for fault in faults for word in ("--fault", fault)]
    late = NAMES[-1:] if plan.late else ()
    return NetworkJob(
        folder, NODES, *flags, *plan.flags, *words, fewest=NODES - len(late), late=late
    )


def cut_off(job: NetworkJob, case: Case) -> float:
    """Make the cut in its phase; return its time."""
    began: list[float] = []

    def cut() -> None:
        began.append(time.time())
        for node, peer in case.cuts:
            job.cut(node, peer, silently=case.silently)

    job.wait_for("training", lambda: job.step >= BEGUN)
    PHASES[case.phase].at(job, case, cut)
    return began[0]


def continued(job: NetworkJob, case: Case, began: float) -> Figures:
    """Wait until the job trains without one of the two; return how long it did not."""
    job.wait_for("an event that names the pair", lambda: job.path_events(case.pair))
    job.wait_for(
        "a plan without one of the two",
        lambda: not set(case.pair) <= job.planned() and len(job.planned()) == NODES - 1,
    )
    step = job.step
    job.wait_for("training without one of the two", lambda: job.step >= step + 2)
    steps = job.events("step")
    ends = [began, *(e["at"] for e in steps if e["at"] > began)]
    return Figures(
        longest_s=max(later - earlier for earlier, later in itertools.pairwise(ends)),
        step_s=max(e["seconds"] for e in steps if e["at"] <= began),
    )


def heal(job: NetworkJob, case: Case) -> None:
    for node, peer in case.cuts:
        job.heal(node, peer, silently=case.silently)


def check_end(job: NetworkJob, pair: Pair, folder: Path) -> None:
    """After the path is well, all nodes are used again, and nothing was lost."""
    job.wait_for("a plan with all nodes", lambda: len(job.planned()) == NODES)
    assert job.path_events(pair)[-1]["evidence"].get("well"), "no event says that the path is well"
    summary = job.finish()
    assert not job.events("lost"), f"lost: {job.events('lost')}"
    reference = paced_reference(folder).summary["params_sha256"]
    assert summary["params_sha256"] == reference, "other parameters than without a fault"


def check_case(case: Case, folder: Path) -> Figures:
    """The training continues without one of the two, and with all nodes once the path is well."""
    with started(folder, case) as job:
        began = cut_off(job, case)
        figures = continued(job, case, began)
        print(f"{case}: {figures}")
        assert figures.longest_s <= figures.limit_s, f"{figures}\n{job.output()}"
        heal(job, case)
        check_end(job, case.pair, folder)
    return figures
