"""Runs the layers of a model that was cut, in any stages, within one process."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.domain.types import Accumulate
from elastic.worker.engine.microbatch_cost import TypicalSize
from elastic.worker.engine.stage import LocalStage
from elastic.worker.model.layers import LayerStack
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.values import Message
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica
from tests.worker.model.toy_model import ALONE, CPU, sgd


def replicas(stack: LayerStack) -> list[LayerReplica]:
    return [
        build_replica(stack, index, ALONE, sgd(), Accumulate.EXACT, 5, CPU)
        for index in range(stack.n_layers)
    ]


def stages_of(layers: list[LayerReplica], cuts: list[int]) -> list[LocalStage]:
    """Return the stages that end before the layers `cuts`."""
    ends = [*cuts, len(layers)]
    starts = [0, *cuts]
    return [
        LocalStage(
            layers[first:last],
            previous=0 if first else None,
            following=1 if last < len(layers) else None,
        )
        for first, last in zip(starts, ends, strict=True)
    ]


def excess(
    layers: list[LayerReplica], cuts: list[int], microbatches: Iterable[Microbatch]
) -> list[float]:
    """Count the operations of micro-batches. Return for each stage by how many times those of the
    last one exceed the operations that it would need without its square term."""
    stages = stages_of(layers, cuts)
    for microbatch in microbatches:
        message: Message | None = None
        for stage in stages:
            own = Microbatch(microbatch.step, microbatch.index, dict(microbatch.fields))
            message = stage.forward(own, message)
            stage.count(own.index)
    found = []
    for stage in stages:
        sizes = stage.sizes[microbatch.index]
        found.append(stage.cost.relative(sizes, TypicalSize(sizes[0] * sizes[1])) - 1)
    return found


def run(layers: list[LayerReplica], cuts: list[int], microbatch: Microbatch) -> float:
    """Run one micro-batch through stages that end before the layers `cuts`; return the loss."""
    stages = stages_of(layers, cuts)
    message: Message | None = None
    for stage in stages:  # each stage has fields of its own, as on its node
        fields = dict(microbatch.fields)
        message = stage.forward(Microbatch(microbatch.step, microbatch.index, fields), message)
    assert message is not None
    gradient: Message | float | None = 1.0
    for stage in reversed(stages):
        assert gradient is not None
        gradient = stage.backward(microbatch.index, gradient)
        stage.collect(microbatch.index, {})
    return message.tensor.item()
