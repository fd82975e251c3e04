"""The step level and the micro-batch level agree on the same job and delays."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from elastic_sim.microbatches.physics import MicrobatchPhysics
from elastic_sim.replay.replay import run_one
from elastic_sim.steps.clusters import node_type_of, training_of
from elastic_sim.steps.physics import ClusterPhysics
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import SimulatedWorld
from elastic_sim.traces.trace import ADD, REMOVE, Event, Trace, build_trace

from tests.simulator.microbatches.sample_runs import MicrobatchJob, Outcome, simulate

COARSE = ClusterPhysics(
    boot_s=0.0,
    noise=0.0,
    decide_s=0.4,
    groups_base_s=0.2,
    group_s=0.0,
    contention=0.2,
    copy_exposed=0.1,
)
FINE = MicrobatchPhysics(
    closed_s=3.0,
    plan_s=0.3,
    replan_s=0.3,
    leave_s=0.05,
    group_s=0.2,
    install_s=0.0,
    start_s=0.0,
    spawn_s=0.0,
    jitter=0.0,
)
"""Connections close after the lease, when the step level notices a lost node."""


def trace(*events: tuple[float, str, str], notice_s: float = 0.0) -> Trace:
    there = [Event(0.0, ADD, f"n{i}") for i in range(6)]
    more = [
        Event(at, kind, node, notice_s=notice_s if kind == REMOVE else 0.0)
        for at, kind, node in events
    ]
    return build_trace([*there, *more], 900.0)


def recovery_node_s(found: Outcome, microbatches: int) -> dict[Use, float]:
    """Node-seconds that the recoveries took, by use, from their phases."""
    uses = dict.fromkeys((Use.DETECT, Use.PLAN, Use.TRANSFER, Use.LOST), 0.0)
    step_s = median(found.step_s)
    for one in found.recoveries:
        nodes = one["nodes_after"]
        waited_s = one["decide_s"] + one["transfer_s"] + one["rebuild_s"]
        pause_s = one["pause_s"] if one["planned"] else waited_s
        uses[Use.DETECT] += nodes * one["detect_s"]
        uses[Use.PLAN] += nodes * (pause_s - one["transfer_s"])
        uses[Use.TRANSFER] += nodes * one["transfer_s"]
        uses[Use.LOST] += nodes * step_s * one["microbatches_rerun"] / microbatches
    return uses


TRACES = {
    "calm": trace(),
    "losses and joins": trace(
        (200.3, REMOVE, "n2"), (300.0, ADD, "n7"), (650.0, REMOVE, "n1"), (655.0, ADD, "n8")
    ),
    "notice": trace((400.0, REMOVE, "n3"), notice_s=60.0),
    "every node lost": trace(
        *(
            (start + 140.0 * i, kind, f"{name}{i}")
            for i in range(6)
            for start, kind, name in ((60.3, REMOVE, "n"), (100.0, ADD, "m"))
        )
    ),
}
PAIRS = ("log+replica", "stream:4+snapshot")
SMALL = {("losses and joins", "log+replica")}


@pytest.mark.parametrize(
    ("of", "pair"),
    [
        pytest.param(
            of, pair, id=f"{name}-{pair}",
            marks=[] if (name, pair) in SMALL else [pytest.mark.chaos],
        )
        for name, of in TRACES.items()
        for pair in PAIRS
    ],
)  # fmt: skip
def test_levels_agree(of: Trace, pair: str) -> None:
    training = training_of("bert-large")
    world = SimulatedWorld(
        replace(training, samples=32 * training.microbatch), (node_type_of("a40"),), COARSE
    )
    coarse = run_one(world, of, f"ours:{pair}", 0, keep=True).outcome
    job = MicrobatchJob(steps=10_000, microbatches=32, backup=pair, min_nodes=6, max_nodes=32)
    fine = simulate(of, world.profile, job, FINE)
    assert coarse is not None
    made = coarse.samples / training.microbatch
    assert 32 * len(fine.step_s) == pytest.approx(made, rel=0.05), "micro-batches"
    b = recovery_node_s(fine, 32)
    a = {use: coarse.account.totals()[use] / 1000 for use in b}
    assert sum(a.values()) == pytest.approx(sum(b.values()), rel=0.7, abs=8.0), "all recoveries"
    for use in b:
        assert a[use] / 4 - 5 <= b[use] <= 4 * a[use] + 5, f"node-seconds of {use}"
