"""Builds replicas of layers."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from elastic.domain.errors import FieldError
from elastic.domain.types import WHOLE, Accumulate, Portion
from elastic.worker.model.checks import Described
from elastic.worker.model.gradients import Accumulator, FlatLayout, exact_limit
from elastic.worker.model.layer_checks import check_module
from elastic.worker.model.layers import LayerStack, TensorParallel, Tied, trained
from elastic.worker.model.optimizer import LayerOptimizer, OptimizerSpec
from elastic.worker.replica.replica import LayerReplica, shard_dim


def build_replica(
    stack: LayerStack,
    index: int,
    tp: TensorParallel,
    optimizer: OptimizerSpec,
    accumulate: Accumulate,
    seed: int,
    device: torch.device,
    *,
    n_microbatches: int = 1,
    empty: bool = False,
    portion: Portion = WHOLE,
) -> LayerReplica:
    """Return a replica of layer `index` at version 0.

    `n_microbatches`: micro-batches of a step, over all pipelines. `empty`: with arbitrary values to
    replace; those of frozen parameters, which no copy has, are replaced by `fill_frozen`. Raises
    FieldError if the module or the optimizer is not usable.
    """
    module = (stack.build_empty if empty else stack.build)(index, device, tp)
    if isinstance(module, nn.Module):
        module.train()
    check_module(index, module)
    parameters, tied = trained(module.named_parameters()), stack.tied_trained
    _check_tied(index, tied, {name for name, _ in parameters})
    outside_norm = {name for group in tied for layer, name in group[1:] if layer == index}
    if tp.rank > 0:
        outside_norm |= {name for name, parameter in parameters if shard_dim(parameter) < 0}
    limit = exact_limit(n_microbatches, tied)
    return LayerReplica(
        index,
        tp,
        module,
        LayerOptimizer(parameters, optimizer, empty=empty, portion=portion),
        Accumulator(FlatLayout.of(parameters), accumulate, device, f"layer {index}", limit),
        seed=seed,
        outside_norm=frozenset(outside_norm),
        last=index == stack.n_layers - 1,
        loss_scale=optimizer.loss_scale,
        initial=partial(stack.build, index, device, tp) if empty else None,
    )


def _check_tied(index: int, tied: Tied, names: set[str]) -> None:
    """Raise FieldError if the layer has a tied parameter that should be trained, and is frozen."""
    for layer, name in (owner for group in tied for owner in group):
        if layer == index and name not in names:
            what = Described("a tied parameter that is not trained")
            remedy = "freeze all parameters of its group, and leave the group out of tied_trained"
            raise FieldError(f"layer {index}, {name}", what, remedy)


def warm_up(
    stack: LayerStack,
    tp: TensorParallel,
    optimizer: OptimizerSpec,
    accumulate: Accumulate,
    device: torch.device,
) -> None:
    """Build and drop the first, middle and last layer, so that a recovery imports fewer modules."""
    for index in sorted({0, stack.n_layers // 2, stack.n_layers - 1}):
        replica = build_replica(stack, index, tp, optimizer, accumulate, 0, device, empty=True)
        replica.read_state(replica.state_run())
