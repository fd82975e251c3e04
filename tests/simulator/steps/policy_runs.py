"""Small clusters without noise, and runs of policies on them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from elastic_sim.replay.replay import PolicyRun, run_one
from elastic_sim.steps.clusters import node_type_of, training_of
from elastic_sim.steps.engine import SimulationResult
from elastic_sim.steps.physics import ClusterPhysics
from elastic_sim.steps.world import SimulatedWorld
from elastic_sim.traces.trace import ADD, REMOVE, Event, Trace, build_trace

QUIET = ClusterPhysics(boot_s=0.0, noise=0.0)


@cache
def world(
    model: str = "bert-large", kind: str = "a40", physics: ClusterPhysics = QUIET
) -> SimulatedWorld:
    """Few micro-batches, so that plans are found quickly."""
    training = training_of(model)
    return SimulatedWorld(
        replace(training, samples=16 * training.microbatch), (node_type_of(kind),), physics
    )


def trace(
    n: int, *events: tuple[float, str, str], end_s: float = 3600.0, notice_s: float = 0.0
) -> Trace:
    """`n` nodes from the start."""
    there = [Event(0.0, ADD, f"n{i}") for i in range(n)]
    return build_trace(
        [
            *there,
            *(
                Event(at, kind, node, notice_s=notice_s if kind == REMOVE else 0.0)
                for at, kind, node in events
            ),
        ],
        end_s,
    )


def run(policy: str, of: Trace, **kwargs: object) -> PolicyRun:
    return run_one(world(**kwargs), of, policy, 0, keep=True)


def outcome(run: PolicyRun) -> SimulationResult:
    assert run.outcome is not None
    return run.outcome
