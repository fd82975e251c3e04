"""Which micro-batches only some layers have to run again, between messages that their senders logged.

A micro-batch that some layers lack runs through those layers alone if the input of the first and the gradient of the
last one's output are at hand; layer 0 reads the data, the last layer gives the loss. Where a message is gone, the
nearest one further out is taken: the layers between have the micro-batch, compute it again and add nothing. What comes
to all layers in this way is an ordinary run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from elastic.core.recovery.copy_index import CopyIndex, on_node
from elastic.domain.ledger import format_indices
from elastic.domain.types import ACTIVATION, COTANGENT, Copy, LayerSpec, PartialRun, Pipeline, Plan, Unit

LayerRange = tuple[int, int]
"""Layers [first, last)."""


def split_runs(
    plan: Plan, shelf: CopyIndex, step: int, covered: Sequence[int], left: Iterable[int]
) -> tuple[list[tuple[int, LayerRange]], list[int]]:
    """Return those of the micro-batches `left` that some layers run, with these layers, and those that all run.

    `covered`: for each layer the mask of micro-batches that it has.
    """
    partial: list[tuple[int, LayerRange]] = []
    full: list[int] = []
    for index in left:
        lacking = [layer for layer, mask in enumerate(covered) if not mask >> index & 1]
        spans = _spans(plan, shelf, step, index, lacking)
        if spans == [(0, plan.n_layers)]:
            full.append(index)
        else:
            partial += [(index, span) for span in spans]
    partial.sort(key=lambda run: (run[1], run[0]))
    return partial, full


def _spans(plan: Plan, shelf: CopyIndex, step: int, index: int, lacking: Sequence[int]) -> list[LayerRange]:
    """The fewest layers around those `lacking`, in spans between logged messages; disjoint, ascending."""
    found: list[LayerRange] = []
    for _, group in groupby(enumerate(lacking), lambda item: item[1] - item[0]):
        layers = [layer for _, layer in group]
        first, last = layers[0], layers[-1] + 1
        while first > 0 and not _logged(plan, shelf, ACTIVATION, first, step, index):
            first -= 1
        while last < plan.n_layers and not _logged(plan, shelf, COTANGENT, last, step, index):
            last += 1
        while found and found[-1][1] > first:  # a layer that lacks it must not run it twice
            before = found.pop()
            first, last = min(first, before[0]), max(last, before[1])
        found.append((first, last))
    return found


def _logged(plan: Plan, shelf: CopyIndex, kind: str, layer: int, step: int, index: int) -> bool:
    return len(shelf.logs.get((kind, layer, step, index), ())) == plan.tp


def assign_runs(
    plan: Plan, shelf: CopyIndex, step: int, runs: Iterable[tuple[int, LayerRange]], layers: Sequence[LayerSpec]
) -> tuple[tuple[PartialRun, ...], tuple[float, ...]]:
    """Give every run to a pipeline so that the busiest unit is done earliest. Return also how long each pipeline's is.

    Runs of the same layers go through a pipeline's units one behind the other.
    """
    busy = [dict.fromkeys((stage.unit for stage in pipeline.stages), 0.0) for pipeline in plan.pipelines]
    dealt: list[PartialRun] = []
    for index, span in runs:
        after = [_with(busy[p], pipeline, span, layers) for p, pipeline in enumerate(plan.pipelines)]
        best = min(range(len(after)), key=lambda p: (max(after[p].values()), p))
        busy[best] = after[best]
        dealt.append(_with_copies(plan, shelf, step, PartialRun(best, index, *span)))
    return tuple(dealt), tuple(max(load.values()) for load in busy)


def _with(
    busy: Mapping[Unit, float], pipeline: Pipeline, span: LayerRange, layers: Sequence[LayerSpec]
) -> dict[Unit, float]:
    """`busy` after one more run of `span`."""
    after = dict(busy)
    for stage in pipeline.stages:
        inside = range(max(stage.first, span[0]), min(stage.last, span[1]))
        after[stage.unit] += sum(layers[i].forward_s + layers[i].backward_s for i in inside)
    return after


def _with_copies(plan: Plan, shelf: CopyIndex, step: int, run: PartialRun) -> PartialRun:
    """`run` with what it starts from: copies on the node that needs them where there are such, else the newest."""

    def taken(kind: str, boundary: int, layer: int) -> tuple[Copy, ...]:
        if not 0 < boundary < plan.n_layers:
            return ()
        node = plan.holders(layer)[run.pipeline].node
        by_rank = shelf.logs[kind, boundary, step, run.microbatch]
        return tuple(on_node(by_rank[rank], node) or by_rank[rank][0] for rank in range(plan.tp))

    return replace(
        run,
        inputs=taken(ACTIVATION, run.first, run.first),
        gradients=taken(COTANGENT, run.last, run.last - 1),
    )


def fetched_bytes(plan: Plan, runs: Iterable[PartialRun]) -> int:
    """Bytes that vaults send to other nodes for `runs`."""
    total = 0
    for run in runs:
        for copies, layer in ((run.inputs, run.first), (run.gradients, run.last - 1)):
            node = plan.holders(layer)[run.pipeline].node
            total += sum(copy.nbytes for copy in copies if copy.node != node)
    return total


def runs_beyond(runs: Iterable[PartialRun], layers: frozenset[int]) -> frozenset[int]:
    """Micro-batches of those runs that go through other layers than `layers`."""
    return frozenset(run.microbatch for run in runs if not layers.issuperset(range(run.first, run.last)))


def partial_orders(plan: Plan, runs: Sequence[PartialRun]) -> tuple[tuple[int, ...], ...]:
    """Micro-batches that each pipeline runs in part, in order."""
    return tuple(
        tuple(dict.fromkeys(run.microbatch for run in runs if run.pipeline == p))
        for p in range(len(plan.pipelines))
    )


def describe_runs(runs: Iterable[PartialRun]) -> str:
    """Print as "0-3 (layers 2-3), 5 (layers 0-3)"; empty for none."""
    spans: dict[LayerRange, list[int]] = {}
    for run in runs:
        spans.setdefault((run.first, run.last), []).append(run.microbatch)
    return ", ".join(
        f"{format_indices(sorted(indices))} (layers {format_indices(list(range(*span)))})"
        for span, indices in sorted(spans.items())
    )
