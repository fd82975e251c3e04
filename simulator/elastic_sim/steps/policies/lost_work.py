"""Work that our runtime repeats after a loss, by backup scheme (docs/design/backup.md).

ReCycle's model uses `recompute`, because its plans have no gradient scheme.

At the fault, every pipeline has finished the same share of its micro-batches. Unfinished
micro-batches of all pipelines are abandoned, and the pipelines fill again. Of the finished ones,
the gradients of the lost stage are missing where they were not saved:

    stream:k     those since the last copy (0 to k - 1), and at most two unacknowledged copies
    reduce:k     those since the last sum, and those of the sum under way
    log          all, but only the lost layers run again, from messages of neighbours
    recompute    all that the pipeline finished

All pipelines share the repeated work. If the state of the last step was not yet complete at the
peer, all nodes return to the step before; under `log`, only the lost layers repeat it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.planning.backup.backup_cost import UNACKED
from elastic.planning.plan.schemes import LOG, NONE, REPLICA, gradients_of, state_of
from elastic_sim.steps.world import PricedPlan, SimulatedWorld


@dataclass(frozen=True, slots=True)
class LostWork:
    """Work that is repeated after one loss."""

    seconds: float = 0.0
    """Seconds of the running step that are repeated."""
    whole_step: bool = False
    """Whether the last finished step is also repeated."""


def lost_work(
    world: SimulatedWorld,
    running: PricedPlan,
    nodes: Sequence[str],
    fraction: float,
    rng: random.Random,
    *,
    updated: bool = True,
) -> LostWork:
    """Return the work that the loss of `nodes` costs after `fraction` of the step.

    `updated`: whether copies of the newest state may still have been in flight.
    """
    scheme, state_scheme = gradients_of(running.plan.gradients), state_of(running.plan.state)
    link = world.link_bytes_per_s
    again_s = 0.0
    whole_step = False
    for pipeline in running.plan.pipelines:
        lost = [stage for stage in pipeline.stages if stage.unit.node in nodes]
        if not lost:
            continue
        layers = [world.profile.layers[stage.first : stage.last] for stage in lost]
        gradient = max(float(sum(la.gradient_bytes for la in some)) for some in layers)
        state = max(sum(la.param_bytes + la.state_bytes for la in some) for some in layers)
        compute_share = sum(_compute_share(world, stage.first, stage.last) for stage in lost)
        finished = fraction * len(pipeline.microbatches)
        if scheme.every:
            copy_s = gradient / link if link else 0.0
            pending = 0.0
            if running.slowest_stage_s:
                pending = min(float(UNACKED), copy_s / (scheme.every * running.slowest_stage_s))
            unsaved = rng.uniform(0, scheme.every) + scheme.every * pending
        elif scheme.rounds:
            unsaved = rng.uniform(0, scheme.rounds) + scheme.rounds * rng.random()
        else:
            unsaved = finished
        unsaved = min(finished, unsaved)
        share = compute_share * running.depth if scheme.name == LOG else 1.0
        again_s += unsaved * running.slowest_stage_s * min(1.0, share) / running.pipelines
        copied = state_scheme.name not in (REPLICA, NONE)
        state_s = state / link / max(1, state_scheme.every) if copied and link else 0.0
        if updated and state_s > fraction * running.step_s:
            if scheme.name == LOG:
                again_s += running.step_s * compute_share / running.pipelines
            else:
                whole_step = True
    seconds = min(fraction * running.step_s, running.pipeline_latency_s + again_s)
    return LostWork(seconds, whole_step)


def _compute_share(world: SimulatedWorld, first: int, last: int) -> float:
    """Return the fraction of a micro-batch's computing that layers [first, last) take."""
    times = world.profile.devices[0].layers
    whole = sum(t.forward_s + t.backward_s for t in times) or 1.0
    return sum(t.forward_s + t.backward_s for t in times[first:last]) / whole
