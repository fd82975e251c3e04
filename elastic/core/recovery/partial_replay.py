"""Partial replay: finds the layers that must run a micro-batch again, from logged messages.

If only some layers lack a micro-batch, only these layers run it. They need the logged input of
their first layer (unless it is the model's first, which reads the data) and the logged gradient of
their last layer's output (unless it is the model's last, which computes the loss). If such a
message is gone, the run includes more layers, up to the nearest logged message. These added layers
already have the micro-batch: they compute it again and add no gradient. A run that includes all
layers is an ordinary run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from elastic.core.recovery.copy_index import CopyIndex, copy_on
from elastic.domain.ledger import format_indices
from elastic.domain.types import (
    ACTIVATION,
    COTANGENT,
    Copy,
    LayerSpec,
    PartialRun,
    Pipeline,
    Plan,
    Unit,
)

LayerRange = tuple[int, int]
"""Range [first, last) of layers."""


def split_runs(
    plan: Plan, index: CopyIndex, step: int, covered: Sequence[int], left: Iterable[int]
) -> tuple[list[tuple[int, LayerRange]], list[int]]:
    """Divide the micro-batches `left` into those that some layers run and those that all run.

    `covered`: for each layer, the mask of its ledger. Returns ([(micro-batch, layers)],
    [micro-batch]).
    """
    partial: list[tuple[int, LayerRange]] = []
    full: list[int] = []
    for microbatch in left:
        lacking = [layer for layer, mask in enumerate(covered) if not mask >> microbatch & 1]
        ranges = _ranges(plan, index, step, microbatch, lacking)
        if ranges == [(0, plan.n_layers)]:
            full.append(microbatch)
        else:
            partial += [(microbatch, layers) for layers in ranges]
    partial.sort(key=lambda run: (run[1], run[0]))
    return partial, full


def _ranges(
    plan: Plan, index: CopyIndex, step: int, microbatch: int, lacking: Sequence[int]
) -> list[LayerRange]:
    """Return disjoint ranges between logged messages with the fewest layers around `lacking`."""

    def is_logged(kind: str, layer: int) -> bool:
        return len(index.logs.get((kind, layer, step, microbatch), ())) == plan.tp

    found: list[LayerRange] = []
    for _, group in groupby(enumerate(lacking), lambda item: item[1] - item[0]):
        layers = [layer for _, layer in group]
        first, last = layers[0], layers[-1] + 1
        while first > 0 and not is_logged(ACTIVATION, first):
            first -= 1
        while last < plan.n_layers and not is_logged(COTANGENT, last):
            last += 1
        while found and found[-1][1] > first:  # a layer must not run the micro-batch twice
            before = found.pop()
            first, last = min(first, before[0]), max(last, before[1])
        found.append((first, last))
    return found


def assign_runs(
    plan: Plan,
    index: CopyIndex,
    step: int,
    runs: Iterable[tuple[int, LayerRange]],
    layers: Sequence[LayerSpec],
    begins: Sequence[float],
) -> tuple[tuple[PartialRun, ...], tuple[float, ...]]:
    """Assign every run to a pipeline so that the busiest unit finishes earliest.

    `begins`: time at which each pipeline can begin, measured like `LayerSpec.forward_s`. Returns
    the runs, and for each pipeline the time at which its busiest unit has finished its runs.
    """
    busy = [
        dict.fromkeys((stage.unit for stage in pipeline.stages), begin)
        for pipeline, begin in zip(plan.pipelines, begins, strict=True)
    ]
    assigned: list[PartialRun] = []
    for microbatch, span in runs:
        after = [_with_run(busy[p], pl, span, layers) for p, pl in enumerate(plan.pipelines)]
        best = min(range(len(after)), key=lambda p: (max(after[p].values()), p))
        busy[best] = after[best]
        assigned.append(_with_copies(plan, index, step, PartialRun(best, microbatch, *span)))
    return tuple(assigned), tuple(max(load.values()) for load in busy)


def _with_run(
    busy: Mapping[Unit, float], pipeline: Pipeline, span: LayerRange, layers: Sequence[LayerSpec]
) -> dict[Unit, float]:
    """Return `busy` after one more run of the layers `span`."""
    after = dict(busy)
    for stage in pipeline.stages:
        inside = range(max(stage.first, span[0]), min(stage.last, span[1]))
        after[stage.unit] += sum(layers[i].forward_s + layers[i].backward_s for i in inside)
    return after


def _with_copies(plan: Plan, index: CopyIndex, step: int, run: PartialRun) -> PartialRun:
    """Add the logged messages to `run`: copies on the node that needs them, else the newest."""

    def messages(kind: str, boundary: int, layer: int) -> tuple[Copy, ...]:
        if not 0 < boundary < plan.n_layers:
            return ()
        node = plan.holders(layer)[run.pipeline].node
        by_rank = index.logs[kind, boundary, step, run.microbatch]
        return tuple(copy_on(by_rank[rank], node) or by_rank[rank][0] for rank in range(plan.tp))

    return replace(
        run,
        inputs=messages(ACTIVATION, run.first, run.first),
        gradients=messages(COTANGENT, run.last, run.last - 1),
    )


def fetched_bytes(plan: Plan, runs: Iterable[PartialRun]) -> int:
    """Return the bytes that vaults send to other nodes for `runs`."""
    total = 0
    for run in runs:
        for copies, layer in ((run.inputs, run.first), (run.gradients, run.last - 1)):
            node = plan.holders(layer)[run.pipeline].node
            total += sum(copy.nbytes for copy in copies if copy.node != node)
    return total


def runs_beyond(runs: Iterable[PartialRun], layers: frozenset[int]) -> frozenset[int]:
    """Return the micro-batches of the runs that include other layers than `layers`."""
    return frozenset(r.microbatch for r in runs if not layers.issuperset(range(r.first, r.last)))


def partial_orders(plan: Plan, runs: Sequence[PartialRun]) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches of each pipeline's partial runs, in order."""
    return tuple(
        tuple(dict.fromkeys(run.microbatch for run in runs if run.pipeline == p))
        for p in range(len(plan.pipelines))
    )


def describe_runs(runs: Iterable[PartialRun]) -> str:
    """Return a text such as "0-3 (layers 2-3), 5 (layers 0-3)"; "": no runs."""
    ranges: dict[LayerRange, list[int]] = {}
    for run in runs:
        ranges.setdefault((run.first, run.last), []).append(run.microbatch)
    return ", ".join(
        f"{format_indices(sorted(indices))} (layers {format_indices(range(*layers))})"
        for layers, indices in sorted(ranges.items())
    )
