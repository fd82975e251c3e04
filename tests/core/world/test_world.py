"""Whole jobs under random faults: the job ends correctly and the invariants hold.

The invariants are checked at every decision, in `tests.core.world.world.CoordinatorShell`.
"""

from __future__ import annotations

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from elastic.core.job.state import JobPhase
from tests.core.world.world import Fault, World

KINDS = (
    "kill", "power", "back", "crash", "hang", "slow", "partition", "path", "blip",
    "coordinator-kill", "coordinator-save", "coordinator-stall", "coordinator-cut", "reset",
    "drain", "join",
)  # fmt: skip
HARMLESS = (
    "slow", "blip", "coordinator-kill", "coordinator-save", "coordinator-stall", "coordinator-cut",
    "reset",
)  # fmt: skip
SCHEMES = ("stream+replica", "stream+replay:2", "recompute+replay:3", "log+snapshot", "log+replica")
SEEDS = st.integers(0, 2**20)
TIMES = st.floats(0.2, 5.0, allow_nan=False)


def faults(
    kinds: tuple[str, ...], most: int, seconds: tuple[float, ...] = (0.3, 1.0, 2.0, 6.0)
) -> st.SearchStrategy:
    one = st.builds(
        Fault, st.sampled_from(kinds), TIMES, st.integers(0, 7), st.sampled_from(seconds)
    )
    return st.lists(one, min_size=1, max_size=most)


def run(seed: int, nodes: int, tp: int, planned: list[Fault], backup: str = "auto") -> World:
    world = World(seed, nodes, tp=tp, backup=backup)
    for fault in planned:
        world.inject(fault)
    world.run()
    return world


def property_test(examples: int) -> settings:
    return settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])


@property_test(120)
@given(SEEDS, st.integers(1, 4), st.sampled_from([1, 2]), faults(KINDS, 4))
@example(57, 1, 1, [Fault("coordinator-save", 0.29, 0, 2.0), Fault("blip", 1.6)])
@example(3, 2, 1, [Fault("coordinator-save", 0.26, 0, 2.0), Fault("back", 1.98, 1, 0.3)])
def test_every_job_ends(seed: int, nodes: int, tp: int, planned: list[Fault]) -> None:
    """The job finishes, waits because no node can train, or fails because no backup is left."""
    world = run(seed, nodes, tp, planned)
    world.check_end()
    assert world.coordinator.state.epoch <= 2 + 4 * len(planned), "epochs without end"


@property_test(40)
@given(SEEDS, st.integers(1, 4), st.sampled_from(SCHEMES), faults(KINDS, 3))
def test_every_job_ends_under_every_scheme(
    seed: int, nodes: int, backup: str, planned: list[Fault]
) -> None:
    run(seed, nodes, 1, planned, backup).check_end()


@property_test(40)
@given(SEEDS, st.integers(1, 4), faults(HARMLESS, 3))
def test_harmless_faults_halt_nothing(seed: int, nodes: int, planned: list[Fault]) -> None:
    """Training continues with a slow worker, a broken stream or an absent coordinator."""
    world = run(seed, nodes, 1, planned)
    world.check_end()
    assert world.coordinator.state.phase is JobPhase.FINISHED
    # A coordinator that dies while it saves the first epoch is followed by one that repeats it.
    causes = {cause for _, _, cause in world.coordinator.halts}
    assert causes == {"start"}, world.coordinator.halts
    assert not world.coordinator.dropped


@property_test(40)
@given(SEEDS, st.integers(2, 4), faults(("join", "join", "drain"), 3, (30.0,)))
def test_planned_changes_lose_nothing(seed: int, nodes: int, planned: list[Fault]) -> None:
    """Joins and drains wait for the end of a step, and no micro-batch runs twice."""
    world = run(seed, nodes, 1, planned)
    world.check_end()
    for epoch, boundary, cause in world.coordinator.halts[1:]:
        assert boundary or cause == "resume", f"epoch {epoch} halted at once: {cause}"
    for recovered in world.coordinator.recovered:
        assert not recovered.change.replayed and not recovered.change.rerun


@property_test(40)
@given(SEEDS, st.integers(2, 4), st.sampled_from([1, 2]), faults(("crash", "hang", *HARMLESS), 3))
def test_dead_workers_never_end_a_job(seed: int, nodes: int, tp: int, planned: list[Fault]) -> None:
    """While all vaults live, every job finishes with all its members."""
    world = run(seed, nodes, tp, planned)
    world.check_end()
    assert world.coordinator.state.phase is JobPhase.FINISHED
    assert not world.coordinator.dropped


@property_test(40)
@given(
    SEEDS, st.integers(2, 4), st.sampled_from(["kill", "power", "back"]), TIMES, faults(HARMLESS, 2)
)
def test_a_job_survives_one_lost_node(
    seed: int, nodes: int, kind: str, at: float, planned: list[Fault]
) -> None:
    """This includes a loss while the coordinator is away."""
    world = run(seed, nodes, 1, [Fault(kind, at, seed), *planned])
    world.check_end()
    assert world.coordinator.state.phase in (JobPhase.FINISHED, JobPhase.WAITING)


@property_test(60)
@given(SEEDS, st.integers(2, 5), faults(("partition", *HARMLESS), 6, (0.3, 2.0, 6.0, 15.0)))
def test_healthy_nodes_never_end_a_job(seed: int, nodes: int, planned: list[Fault]) -> None:
    """Nodes that are cut off, all of them if need be, keep their copies and bring them back."""
    world = run(seed, nodes, 1, planned)
    world.check_end()
    assert world.coordinator.state.phase is JobPhase.FINISHED
    assert not world.vaults_lost


def test_a_run_is_a_function_of_its_seed() -> None:
    planned = [Fault("kill", 2.0, 1), Fault("coordinator-kill", 2.1), Fault("join", 1.5)]
    first, second = run(7, 3, 1, planned), run(7, 3, 1, planned)
    assert first.trail == second.trail
    assert first.trail != run(8, 3, 1, planned).trail
