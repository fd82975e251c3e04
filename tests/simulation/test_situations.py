"""Jobs with faults of one kind only: here more is known about what must happen, or must not.

Each test runs fresh seeds for a short time.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from elastic.core.protocol.messages import NodePhase
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from tests.simulation.oracles import of
from tests.simulation.store import StoreMachine
from tests.simulation.test_simulation import QUIET, check
from tests.simulation.world import Fault, Outcome, Scenario, World, run, scenario_of

EACH_S = 2.0
"""Time for the fresh seeds of a test."""
HARMLESS = (
    "lead-kill",
    "lead-pause",
    "lead-reset",
    "lead-hang",
    "store-away",
    "disk-slow",
    "disk-hang",
)
"""Faults that halt nothing: training needs neither the coordinator nor a certain speed."""


def scenarios(
    kinds: tuple[str, ...],
    most: int,
    lengths: tuple[float, ...],
    nodes: tuple[int, ...] = (2, 3, 4),
) -> Iterator[Scenario]:
    """Yield jobs with fresh seeds and one to `most` faults of these kinds, after the start."""
    end = time.monotonic() + EACH_S
    while time.monotonic() < end:
        seed = secrets.randbits(32)
        rng = random.Random(seed)
        faults = [
            Fault(
                rng.choice(kinds),
                round(rng.uniform(3.5, 8.0), 3),
                rng.randrange(8),
                rng.randrange(8),
                rng.choice(lengths),
            )
            for _ in range(rng.randint(1, most))
        ]
        yield dataclasses.replace(
            scenario_of(seed),
            nodes=rng.choice(nodes),
            steps=12,
            faults=tuple(sorted(faults, key=lambda fault: fault.at)),
            grace_s=30.0,
        )


def test_harmless_faults_halt_nothing() -> None:
    """A coordinator that dies while it saves the first epoch is followed by one that repeats it."""
    for scenario in scenarios(HARMLESS, 3, (0.3, 1.0, 2.5)):
        outcome = run(scenario)
        check(outcome)
        causes = {one["cause_kind"] for one in of(outcome.events, "halt")}
        assert causes == {"start"}, (causes, outcome.text())
        assert not of(outcome.events, "lost"), outcome.text()


def test_planned_changes_lose_nothing() -> None:
    """Nodes join and leave at the end of a step, and no micro-batch is computed twice.

    A node that is told to leave before its workers have attached has nothing to move. It just ends.
    """
    during = (Fault("join", 3.2, 0, 0, 0.0), Fault("drain", 4.0, 0, 0, 0.0))
    first = dataclasses.replace(
        QUIET, seed=secrets.randbits(32), steps=20, grace_s=30.0, faults=during
    )
    moved = 0
    for scenario in itertools.chain([first], scenarios(("join", "join", "drain"), 3, (1.0,))):
        outcome = run(scenario)
        check(outcome)
        trained: set[str] = set()
        for event in outcome.events:
            if event["kind"] == "plan":
                trained |= set(re.findall(r"(\w+)\[", event["text"]))
            assert event["kind"] != "lost" or event["node"] not in trained, (event, outcome.text())
        for one in of(outcome.events, "recovery"):
            moved += 1
            repeated = [one[f"microbatches_{how}"] for how in ("replayed", "rerun")]
            assert not any(repeated), (one, outcome.text())
    assert moved, "no node joined or left during the training"


def test_dead_workers_never_end_a_job() -> None:
    for scenario in scenarios(("worker-kill", "worker-stop", *HARMLESS), 2, (0.3, 1.0)):
        outcome = run(scenario)
        check(outcome)
        assert outcome.code == 0 and not of(outcome.events, "lost"), outcome.text()


def test_a_job_survives_one_lost_node() -> None:
    """Also while the coordinator is away. A job that has not begun waits for its minimum."""
    for scenario in scenarios(HARMLESS, 2, (0.3, 1.0, 2.5), nodes=(3, 4)):
        lost = Fault(random.Random(scenario.seed).choice(("kill", "power", "back")), 5.0, 1, 0, 2.5)
        faults = sorted((*scenario.faults, lost), key=lambda fault: fault.at)
        outcome = run(dataclasses.replace(scenario, faults=tuple(faults)))
        check(outcome)
        assert outcome.code == 0 or not of(outcome.events, "step"), outcome.text()


def test_a_job_survives_one_lost_node_while_the_run_directory_hangs() -> None:
    hang, lost = Fault("lead-hang", 3.0, 0, 0, 40.0), Fault("kill", 4.0, 1, 0, 0.0)
    outcome = run(dataclasses.replace(QUIET, steps=12, faults=(hang, lost)))
    check(outcome)
    steps = [one["at"] for one in of(outcome.events, "step")]
    assert len(steps) == 12 and steps[-1] < 20.0, "nobody waits for the disk"
    assert of(outcome.events, "end")[0]["at"] > 40.0, "the last records do"


def test_the_end_waits_for_a_disk_that_all_nodes_share() -> None:
    """It hangs when the last checkpoint is written. The wait is reported, and no epoch begins."""
    hang_s = DEFAULT_TIMEOUTS.disk_s + 10.0
    faults = tuple(Fault("disk-hang", 4.3, node, 0, hang_s) for node in range(3))
    outcome = run(dataclasses.replace(QUIET, faults=faults))
    check(outcome)
    assert outcome.code == 0 and len(of(outcome.events, "halt")) == 1, outcome.text()
    (late,) = of(outcome.events, "checkpoint-late")
    assert "have written no part for 30 s" in late["why"] and late["step"] == QUIET.steps
    assert of(outcome.events, "end")[0]["at"] < 4.3 + hang_s + 5.0, outcome.text()


def test_training_does_not_wait_for_disks() -> None:
    """Not even for those of all nodes and of the coordinator: only checkpoints are late."""
    faults = [Fault("disk-hang", 4.3, node, 0, 40.0) for node in range(3)]
    faults.append(Fault("lead-hang", 4.3, 0, 0, 40.0))
    outcome = run(dataclasses.replace(QUIET, steps=60, faults=tuple(faults)))
    check(outcome)
    assert outcome.code == 0 and len(of(outcome.events, "halt")) == 1, outcome.text()
    steps = [event["at"] for event in of(outcome.events, "step")]
    assert max(after - before for before, after in itertools.pairwise(steps)) < 2.0


def test_healthy_nodes_never_end_a_job() -> None:
    """Nodes that are cut off, all of them if need be, bring their copies back."""
    cuts = ("cut-out", "cut-in", "cut-pair", "cut-path", "lead-cut", "pause")
    for scenario in scenarios((*cuts, *HARMLESS), 5, (0.3, 2.5, 6.0, 15.0)):
        outcome = run(scenario)
        check(outcome)
        assert outcome.code == 0, outcome.text()


# ---- one bad path, in each phase of the job ----

PAIRS = tuple(itertools.combinations(range(4), 2))
AWAY_S, BOUND_S = 15.0, 10.0
"""Length of a cut, and the time after which training must continue."""
MINUTES_S = 220.0
"""Length of a cut that is longer than all limits of the product for bad paths."""
LOOK_S = 0.0001
"""Pause between two looks at the phases; they last two latencies at least."""
CRASH = Fault("worker-kill", 4.0, 0, 0, 0.0)
BACK = Fault("back", 4.0, 3, 0, 1.0)
MOMENTS: dict[str, tuple[NodePhase, int, Fault | None]] = {
    "starting": (NodePhase.STARTING, 0, None),
    "training": (NodePhase.RUNNING, 1, None),
    "halting": (NodePhase.HALTING, 2, CRASH),
    "installing": (NodePhase.INSTALLING, 2, CRASH),
    "joining": (NodePhase.STARTING, 0, BACK),
}
"""Per phase of the job: (phase of a node, its least epoch, a fault that leads to the phase)."""
SMALL = ("training", "installing")
"""Phases in `make test`; `make chaos` has all."""


def cut(pair: tuple[int, int], ways: str, moment: str) -> Outcome:
    """Run a job of four nodes. Cut one path at the moment at which a node enters the phase."""
    phase, epoch, fault = MOMENTS[moment]
    one, other = pair if ways != "back" else pair[::-1]
    kind = "cut-pair" if ways == "both" else "cut-path"
    cut_at: list[float] = []

    def watch(world: World) -> None:
        def look() -> None:
            living = [agent for agent in world.agents.values() if agent.alive]
            services = [agent.local.get("service") for agent in living]
            states = [service._state for service in services if service is not None]
            if any(state.phase is phase and state.epoch >= epoch for state in states):
                cut_at.append(world.scheduler.now)
                far = other if other < one else other - 1
                world.inject(Fault(kind, world.scheduler.now, one, far, AWAY_S))
            else:
                world.scheduler.at(LOOK_S, look)

        world.scheduler.at(fault.at if fault is not None else 1.0, look)

    scenario = dataclasses.replace(
        QUIET,
        seed=secrets.randbits(32),
        nodes=4,
        steps=40,
        microbatches=8,
        faults=(fault,) if fault is not None else (),
    )
    outcome = run(scenario, watch)
    check(outcome)
    assert cut_at, "the phase did not come"
    steps = [event["at"] for event in of(outcome.events, "step")]
    began, ended = cut_at[0], cut_at[0] + AWAY_S
    during = [at for at in steps if began + BOUND_S <= at <= ended]
    assert during or steps[-1] < ended, f"no training while the path is bad\n{outcome.text()}"
    lost = {event["node"] for event in of(outcome.events, "lost")}
    assert lost <= ({"node3"} if fault is BACK else set()), outcome.text()
    return outcome


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=[] if moment in SMALL else [pytest.mark.chaos])
        for moment in MOMENTS
    ],
)
def test_training_continues_without_one_path(moment: str) -> None:
    cut(random.choice(PAIRS), random.choice(("there", "back", "both")), moment)


@pytest.mark.chaos
def test_a_path_that_is_bad_for_minutes_costs_two_changes() -> None:
    """One when it becomes bad, and one when it is well again. Reports about it must stay valid for
    as long as it is bad."""
    ends = 6.0 + MINUTES_S
    scenario = dataclasses.replace(
        QUIET,
        seed=secrets.randbits(32),
        nodes=4,
        steps=95,
        microbatch_s=0.8,
        checkpoint_every=50,
        faults=(Fault("cut-pair", 6.0, 0, 1, MINUTES_S),),
    )
    outcome = run(scenario)
    check(outcome)
    assert outcome.code == 0 and not of(outcome.events, "lost"), outcome.text()
    plans = [event["at"] for event in of(outcome.events, "plan")]
    start, away, back = plans
    assert start < 6.0 < away < 6.0 + BOUND_S and ends < back < ends + BOUND_S, plans
    steps = [event["at"] for event in of(outcome.events, "step")]
    assert max(b - a for a, b in itertools.pairwise(steps)) < BOUND_S and steps[-1] > ends


@pytest.mark.chaos
@pytest.mark.parametrize("ways", ["there", "back", "both"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("pair", PAIRS)
def test_training_continues_without_any_path(pair: tuple[int, int], moment: str, ways: str) -> None:
    cut(pair, ways, moment)


# ---- paths that refuse connections ----


def refuse(paths: tuple[tuple[float, int, int], ...], **changes: Any) -> Outcome:
    """Run a job in which each (time, node, node) is the beginning of a path that refuses
    connections."""

    def watch(world: World) -> None:
        for at, one, other in paths:
            world.scheduler.at(at, partial(refuse_path, world, one, other))

    def refuse_path(world: World, one: int, other: int) -> None:
        here, there = (world.agents[f"node{node}"].host for node in (one, other))
        world.network.refuse(here, there, REFUSED_S)
        world.well_at = max(world.well_at, world.scheduler.now + REFUSED_S)

    scenario = dataclasses.replace(QUIET, microbatches=8, checkpoint_every=0, **changes)
    outcome = run(scenario, watch)
    check(outcome)
    return outcome


REFUSED_S = 25.0
"""Length of the fault of a path that refuses connections."""


@pytest.mark.parametrize(
    ("paths", "seed", "backup"),
    [
        (((6.0, 1, 0), (9.5, 0, 2)), 33181, "log+snapshot"),
        (((6.0, 2, 0), (10.5, 2, 1)), 36112, "stream+replica"),
    ],
)
def test_two_paths_that_refuse_connections_stall_nothing(
    paths: tuple[tuple[float, int, int], ...], seed: int, backup: str
) -> None:
    """Epochs that fail before a path is known do not use up the attempts without a pause."""
    outcome = refuse(paths, nodes=3, steps=30, seed=seed, backup=backup)
    steps = [event["at"] for event in of(outcome.events, "step")]
    longest = max(after - before for before, after in itertools.pairwise(steps))
    assert longest < BOUND_S, outcome.text()


def test_the_ends_of_a_known_bad_path_are_not_blamed() -> None:
    outcome = refuse(((6.0, 0, 1), (6.0, 0, 2)), nodes=4, steps=40)
    found = of(outcome.events, "health")
    quarantined = {event["node"] for event in found if event["action"] == "quarantine"}
    assert quarantined <= {"node0"}, outcome.text()


# ---- slow networks ----


@pytest.mark.parametrize(
    ("latency_s", "reset_after_s"),
    [
        pytest.param(0.1, 1.0),
        pytest.param(0.1, 5.0, marks=pytest.mark.chaos),
        pytest.param(0.04, 1.0, marks=pytest.mark.chaos),
        pytest.param(0.04, 5.0, marks=pytest.mark.chaos),
    ],
)
def test_a_reset_after_the_latency_grew_loses_nobody(
    latency_s: float, reset_after_s: float
) -> None:
    """A reconnect takes several round trips. They are measured, but not at once."""

    def watch(world: World) -> None:
        def slow_down() -> None:
            for one, other in itertools.permutations(world.network.hosts.values(), 2):
                world.network.link(one, other).latency_s = latency_s

        world.scheduler.at(8.0, slow_down)

    faults = (Fault("reset", 8.0 + reset_after_s, 1, 0, 0.0),)
    scenario = dataclasses.replace(
        QUIET, nodes=4, steps=30, microbatches=8, checkpoint_every=0, faults=faults
    )
    check(run(scenario, watch))


def test_a_bad_path_to_a_leaving_node_keeps_nobody_away() -> None:
    """node1 is lost while node0 leaves. Its path from node0 stays bad, but who joins need not work
    with a node that leaves."""
    away, path = Fault("cut-out", 6.0, 1, 0, 3.5), Fault("cut-path", 6.5, 0, 0, 60.0)
    leaves = Fault("drain", 7.8, 0, 1, 0.3)
    job = dataclasses.replace(QUIET, nodes=2, steps=40, checkpoint_every=1)
    outcome = run(dataclasses.replace(job, faults=(away, path, leaves)))
    check(outcome)
    assert of(outcome.events, "lost")[0]["node"] == "node1", outcome.text()
    steps = [event["at"] for event in of(outcome.events, "step")]
    assert max(after - before for before, after in itertools.pairwise(steps)) < BOUND_S


def test_a_node_that_leaves_waits_for_no_checkpoint_that_the_store_has_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store is restored from a snapshot. Since then, other incarnations of the nodes have
    joined, and checkpoints were completed of which some nodes report their parts again."""
    forget = StoreMachine.forget
    monkeypatch.setattr(StoreMachine, "forget", lambda store, _: forget(store, 9.0))
    back = [Fault("back", 5.0 + 2.0 * node, node, 0, 0.5) for node in range(3)]
    restored = Fault("lead-amnesia", 12.0, 0, 0, 0.5)
    leaves = Fault("drain", 32.0, 2, 0, 0.0)
    job = dataclasses.replace(QUIET, nodes=4, steps=110, checkpoint_every=2, grace_s=30.0)
    outcome = run(dataclasses.replace(job, faults=(*back, restored, leaves)))
    check(outcome)
    (left,) = of(outcome.events, "drained")
    assert left["at"] - of(outcome.events, "notice")[0]["at"] < 10.0, outcome.text()
