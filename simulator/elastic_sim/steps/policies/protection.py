"""What a loss truly costs our runtime in work that is done again, by backup scheme (docs/design/backup.md).

At the fault every pipeline has done the same share of its micro-batches. Those under way, in all pipelines, are
abandoned: the pipelines fill anew. Of those finished, the lost stage's gradients are gone where they were not saved:

    stream:k     those since the last copy, 0 to k - 1, and copies not yet acknowledged (at most two)
    reduce:k     those since the last sum, and the sum under way
    log          all, but only the lost layers run again, from the neighbours' messages, spread over the pipelines
    recompute    all that the pipeline finished

and are shared out over the pipelines. If the step's new state was not yet whole at the peer, everybody goes back to
the step before; under `log` only the lost layers run it again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.domain.types import Pipeline
from elastic.planning.backup.backup_cost import UNACKED
from elastic.planning.plan.schemes import LOG, NONE, REPLICA, gradients_of, state_of
from elastic_sim.steps.world import Running, World


@dataclass(frozen=True, slots=True)
class Loss:
    seconds: float = 0.0
    """Of the running step's time, what is done again."""
    whole_step: bool = False
    """The last finished step, too."""
    microbatches: float = 0.0
    """Run again for want of a saved gradient, all pipelines together."""


def lost(
    world: World,
    running: Running,
    nodes: Sequence[str],
    fraction: float,
    draw: random.Random,
    *,
    updated: bool = True,
) -> Loss:
    """What the loss of `nodes` costs when `fraction` of the step was done. `nodes` may hold nothing.

    `updated`: copies of the newest state may still have been under way.
    """
    plan = running.plan
    scheme, kept = gradients_of(plan.gradients), state_of(plan.state)
    refill = running.fill_s
    again_s = count = 0.0
    late = False
    for pipeline in plan.pipelines:
        gone = [stage for stage in pipeline.stages if stage.unit.node in nodes]
        if not gone:
            continue
        done = fraction * len(pipeline.microbatches)
        gradient = max(_bytes(world, pipeline, stage.first, stage.last, "gradient") for stage in gone)
        state = max(_bytes(world, pipeline, stage.first, stage.last, "state") for stage in gone)
        link = world.link_bytes_per_s
        if scheme.every:
            copy_s = gradient / link if link else 0.0
            under_way = (
                min(float(UNACKED), copy_s / (scheme.every * running.pace_s)) if running.pace_s else 0.0
            )
            unsaved = draw.uniform(0, scheme.every) + scheme.every * under_way
        elif scheme.rounds:
            unsaved = draw.uniform(0, scheme.rounds) + scheme.rounds * draw.random()
        else:
            unsaved = done
        unsaved = min(done, unsaved)
        count += unsaved
        share = 1.0
        if scheme.name == LOG:
            share = sum(_share(world, stage.first, stage.last) for stage in gone) * running.depth
        again_s += unsaved * running.pace_s * min(1.0, share) / running.pipelines
        away = kept.name not in (REPLICA, NONE)
        state_s = state / link / max(1, kept.every) if away and link else 0.0
        if updated and state_s > fraction * running.step_s:
            if scheme.name == LOG:
                parts = sum(_share(world, stage.first, stage.last) for stage in gone)
                again_s += running.step_s * parts / running.pipelines
            else:
                late = True
    return Loss(min(fraction * running.step_s, refill + again_s), late, count)


def _bytes(world: World, pipeline: Pipeline, first: int, last: int, what: str) -> float:
    """Of a node, all its workers together."""
    layers = world.profile.layers[first:last]
    if what == "gradient":
        return float(sum(la.gradient_bytes for la in layers))
    return sum(la.param_bytes + la.state_bytes for la in layers)


def _share(world: World, first: int, last: int) -> float:
    """Of a micro-batch's computing, what these layers are."""
    times = world.profile.devices[0].layers
    whole = sum(t.forward_s + t.backward_s for t in times) or 1.0
    return sum(t.forward_s + t.backward_s for t in times[first:last]) / whole
