"""A small model with real layer replicas, for engine tests, and its results on one worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from elastic.domain.types import Accumulate
from elastic.planning.schedule.schedule import Action
from elastic.worker.engine.stage import LocalStage
from elastic.worker.engine.stage_runner import StageRunner
from elastic.worker.model.layers import LayerStack, ListStack, TensorParallel
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import OptimizerSpec
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import AbandonSignal
from elastic.worker.transport.links import Links
from tests.planning.schedule.action_text import one_f_one_b
from tests.worker.engine.rank_processes import Rank

WIDTH, BATCH = 16, 3


class First(nn.Module):
    """Reads field x of the micro-batch, [BATCH, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        assert hidden is None
        return microbatch.fields["x"] @ self.weight


class Middle(nn.Module):
    """A residual layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        return hidden + nn.functional.dropout(torch.tanh(self.linear(hidden)), 0.1)


class Last(nn.Module):
    """Returns the mean squared error against field y of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        return (hidden @ self.weight - microbatch.fields["y"]).square().mean()


def stack(n_layers: int, tied: bool = False) -> ListStack:
    """`tied`: the weights of the first and the last layer are one tensor."""
    builders: list[Callable[[], nn.Module]] = [First, *[Middle] * (n_layers - 2), Last]
    groups = (((0, "weight"), (n_layers - 1, "weight")),) if tied else ()
    return ListStack(builders, seed=5, tied=groups)


def data(step: int, index: int) -> Microbatch:
    generator = torch.Generator().manual_seed(1000 * step + index)
    fields = {name: torch.randn(BATCH, WIDTH, generator=generator) for name in ("x", "y")}
    return Microbatch(step, index, fields)


def replicas(
    model: LayerStack, layers: Sequence[int], accumulate: Accumulate
) -> list[LayerReplica]:
    optimizer = OptimizerSpec(
        factory=lambda groups: torch.optim.SGD(groups, lr=0.1), lr=lambda step: 0.1
    )
    device = torch.device("cpu")
    return [
        build_replica(model, i, TensorParallel(), optimizer, accumulate, 5, device) for i in layers
    ]


class RecordingHooks:
    """Hooks that record the actions and the finished micro-batches."""

    def __init__(self) -> None:
        self.finished: list[int] = []
        self.actions: list[Action] = []

    def before(self, action: Action) -> None:
        self.actions.append(action)

    def on_backward(self, index: int) -> None:
        self.finished.append(index)


def runner(
    layers: Sequence[LayerReplica],
    links: Links,
    n_microbatches: int,
    stages: Sequence[LocalStage] | None = None,
    data: Callable[[int, int], Microbatch] = data,
) -> StageRunner:
    return StageRunner(
        stages or [LocalStage(layers)],
        links,
        n_microbatches=n_microbatches,
        data=data,
    )


def single_rank_links(abandon: AbandonSignal | None = None) -> Links:
    """Links of an epoch with one rank."""
    return Links.open(
        epoch=1,
        rank=0,
        world_size=1,
        store_address="",
        device=torch.device("cpu"),
        timeout_s=1.0,
        abandon=abandon or AbandonSignal(),
    )


def train_on_one_worker(
    model: ListStack, n_microbatches: int, accumulate: Accumulate
) -> list[LayerReplica]:
    """All layers after one step's micro-batches. Every other plan must give the same result."""
    layers = replicas(model, range(model.n_layers), accumulate)
    everything = tuple(range(n_microbatches))
    actions = one_f_one_b(0, 1, everything)
    runner(layers, single_rank_links(), n_microbatches).run(0, actions, {}, RecordingHooks())
    return layers


class PauseBefore(RecordingHooks):
    """Before one action, reports "paused" and waits for the test."""

    def __init__(self, rank: Rank, at: str) -> None:
        super().__init__()
        self._rank, self._at = rank, at

    def before(self, action: Action) -> None:
        super().before(action)
        if str(action) == self._at:
            self._rank.report("paused")
            self._rank.wait_for_parent()
