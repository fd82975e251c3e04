"""Micro-batches of different sizes: the time of a stage is that of one of typical size."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from elastic.core.health import compute_speed
from elastic.core.health.compute_speed import SAMPLES_UNPROFILED, SPAN_UNPROFILED_S, ComputeSpeed
from elastic.core.protocol.messages import BackupTraffic
from elastic.domain.types import Accumulate
from elastic.planning.schedule.schedule import Action, Kind
from elastic.worker.control import step_timing
from elastic.worker.control.step_timing import StepTimer
from elastic.worker.engine.microbatch_cost import MOST_COUNTED, Sizes, StageCost, TypicalSize
from elastic.worker.engine.stage import LocalStage
from elastic.worker.engine.stage_runner import StageRunner
from elastic.worker.model.layers import ListStack
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.values import Message, Value, sizes_of
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned
from tests.worker.engine.models import (
    WIDTH,
    First,
    Last,
    Middle,
    RecordingHooks,
    replicas,
    single_rank_links,
    stack,
)
from tests.worker.model.toy_model import CPU

ROWS = (2, 8, 4)
"""Rows of each micro-batch."""
SHORT: tuple[Sizes, ...] = ((8, 16), (4, 24), (8, 12))
LONG: tuple[Sizes, ...] = ((1, 512), (1, 384), (2, 256))
"""(rows, length) of each micro-batch."""
PER_TOKEN, PER_PAIR = 20 * WIDTH**2, 8 * WIDTH
"""Operations of a forward pass through `attention_stack`."""
TOKENS = 128
SizesOfStep = Callable[[int], tuple[Sizes, ...]]
"""Step -> sizes of its micro-batches."""


class Attention(nn.Module):
    """A residual layer of 8 WIDTH**2 operations per token and 4 WIDTH per pair of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        heads = self.inner(hidden).view(*hidden.shape[:2], 3, 2, WIDTH // 2)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.outer(mixed.transpose(1, 2).reshape(hidden.shape))
        return hidden + out


class Fragile(Middle):
    """A layer that cannot run without a graph."""

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        if not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(hidden, microbatch)


def attention_stack() -> ListStack:
    return ListStack([First, Attention, Attention, Last], seed=5)


def data(step: int, index: int) -> Microbatch:
    fields = {name: torch.ones(ROWS[index], WIDTH) for name in ("x", "y")}
    return Microbatch(step, index, fields)


def always(sizes: tuple[Sizes, ...]) -> SizesOfStep:
    return lambda step: sizes


def documents(
    of_step: SizesOfStep, weights: tuple[float, ...], step: int, index: int
) -> Microbatch:
    generator = torch.Generator().manual_seed(1000 * step + index)
    sizes = of_step(step)[index]
    fields = {name: torch.randn(*sizes, WIDTH, generator=generator) for name in ("x", "y")}
    return Microbatch(step, index, fields, weight=weights[index])


def one_after_the_other(microbatches: int) -> list[Action]:
    return [Action(kind, m, 0) for m in range(microbatches) for kind in (Kind.F, Kind.B)]


class Node(RecordingHooks):
    """One worker with all layers of a model, whose time follows the true cost, on a clock of its
    own. `slow`: factor on its time. `weights`: those of the micro-batches."""

    def __init__(
        self,
        of_step: SizesOfStep,
        slow: float = 1.0,
        model: ListStack | None = None,
        weights: tuple[float, ...] = (1.0, 1.0, 1.0),
    ) -> None:
        super().__init__()
        model = model or attention_stack()
        self.layers = replicas(model, range(model.n_layers), Accumulate.EXACT)
        self.stage = LocalStage(self.layers, number=0)
        self.runner = StageRunner(
            [self.stage],
            single_rank_links(),
            n_microbatches=3,
            typical_size=TypicalSize(TOKENS),
            data=partial(documents, of_step, weights),
        )
        self.timer, self.now, self.slow = StepTimer(CPU, lambda: False), 0.0, slow
        self.weights = weights
        self.of_step, self.speed = of_step, ComputeSpeed(profiled=False)
        self.last: Action | None = None
        self.seconds: list[float] = []
        """Reported time per micro-batch of each step."""

    def before(self, action: Action | None) -> None:
        last, self.last = self.last, action
        if last is not None:
            rows, length = self.of_step(self.runner.step)[last.microbatch]
            operations = rows * length * (PER_TOKEN + PER_PAIR * length)
            empty = last.kind is Kind.B and not self.weights[last.microbatch]
            per_operation = 0.0 if empty else 1e-9 if last.kind is Kind.F else 2e-9
            self.now += self.slow * operations * per_operation
            self.timer.end(partial(self.runner.cost, last))
        if action is not None:
            self.timer.begin(action)

    def on_backward(self, index: int) -> None:
        self.before(None)

    def run(self, step: int) -> None:
        """Run a step, and add its time to the node's speed, as the coordinator does."""
        for layer in self.layers:
            layer.clear()
        self.runner.run(step, one_after_the_other(3), {}, self)
        taken = self.timer.take(1, step, 0, BackupTraffic())
        assert taken is not None
        self.seconds.append(taken.forward_s + taken.backward_s)
        at = 1.0 + step * SPAN_UNPROFILED_S
        self.speed = compute_speed.observe(self.speed, 1, step, self.seconds[-1], at)


def train(monkeypatch: pytest.MonkeyPatch, nodes: list[Node], steps: int) -> None:
    """Run steps of nodes with the same layers."""
    for step in range(steps):
        for node in nodes:
            monkeypatch.setattr(step_timing, "mark", lambda device, node=node: node.now)
            node.run(step)
            same = [other.speed for other in nodes if other is not node]
            node.speed = compute_speed.calibrate(node.speed, same)


@pytest.mark.parametrize(
    ("value", "sizes"),
    [
        (torch.zeros(2, 5, 8), (2, 5)),
        ((torch.zeros(4, dtype=torch.long), torch.zeros(3), torch.zeros(3, 4)), (3,)),
        ({"hidden": torch.zeros(6, 2), "other": torch.zeros(9, 9)}, (6,)),
        (torch.zeros(()), ()),
        (torch.zeros(3, 0), (3,)),
    ],
)
def test_sizes_of_a_value_are_all_but_its_features(value: Value, sizes: Sizes) -> None:
    assert sizes_of(value) == sizes


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("typical", [4, 0])
def test_the_cost_of_a_microbatch_is_that_of_its_rows(typical: int, recompute: bool) -> None:
    layers = replicas(stack(4), range(4), Accumulate.FAST)
    stage = LocalStage(layers, number=0, recompute=recompute)
    runner = StageRunner(
        [stage],
        single_rank_links(),
        n_microbatches=len(ROWS),
        typical_size=TypicalSize(typical),
        data=data,
    )
    costs: dict[tuple[Kind, int], float] = {}

    class Hooks(RecordingHooks):
        last: Action | None = None

        def note(self) -> None:
            if self.last is not None:
                costs[self.last.kind, self.last.microbatch] = runner.cost(self.last)

        def before(self, action: Action) -> None:
            self.note()
            self.last = action

        def on_backward(self, index: int) -> None:
            self.note()

    actions = one_after_the_other(len(ROWS))
    for step in range(2):  # the second one counts operations
        costs.clear()
        for layer in layers:
            layer.clear()
        runner.run(step, actions, {}, Hooks())
    wanted = {m: rows / typical if typical else 1.0 for m, rows in enumerate(ROWS)}
    assert costs == pytest.approx({(a.kind, a.microbatch): wanted[a.microbatch] for a in actions})


def test_a_later_stage_knows_the_sizes_from_what_it_receives() -> None:
    layers = replicas(stack(4), range(2, 4), Accumulate.FAST)
    stage = LocalStage(layers, previous=0, number=1)
    hidden = torch.ones(8, WIDTH)
    stage.forward(data(0, 1), Message.of(hidden))
    assert stage.sizes == {1: (8,)}


def test_times_are_divided_by_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches that are twice as long take twice as long."""
    now = [0.0]
    monkeypatch.setattr(step_timing, "mark", lambda device: now[0])
    timer = StepTimer(CPU, lambda: False)
    for cost in (2.0, 0.5, 1.0):
        for kind, seconds in ((Kind.F, 0.1), (Kind.B, 0.2)):
            timer.begin(Action(kind, 0, 0))
            now[0] += seconds * cost
            timer.end(partial(float, cost))
    taken = timer.take(1, 3, 0, BackupTraffic())
    assert taken is not None
    assert taken.forward_s == pytest.approx(0.1) and taken.backward_s == pytest.approx(0.2)


@pytest.mark.parametrize("shapes", [3, 1])
@pytest.mark.parametrize("slow", [None, 0, 2])
def test_long_documents_make_nobody_a_straggler(
    monkeypatch: pytest.MonkeyPatch, slow: int | None, shapes: int
) -> None:
    """Two nodes get short documents and one gets long ones, which take up to 11 times as long per
    token. A node that is twice as slow is found among them. With one shape, all documents of a
    node have the same length."""
    of_node = [(sizes * 3)[:3] for sizes in (SHORT[:shapes], SHORT[:shapes], LONG[:shapes])]
    nodes = [
        Node(always(sizes), slow=2.0 if index == slow else 1.0)
        for index, sizes in enumerate(of_node)
    ]
    train(monkeypatch, nodes, 3 + SAMPLES_UNPROFILED)
    found = [compute_speed.changed_factor(node.speed) for node in nodes]
    assert found == [2.0 if index == slow else None for index in range(3)]


@pytest.mark.parametrize("slow", [1.0, 2.0])
def test_documents_that_become_longer_are_not_a_slowdown(
    monkeypatch: pytest.MonkeyPatch, slow: float
) -> None:
    """A node alone is compared with its own first steps."""
    node = Node(lambda step: SHORT if step < 12 else LONG)
    train(monkeypatch, [node], 12)
    node.slow = slow
    for step in range(12, 12 + SAMPLES_UNPROFILED):
        node.run(step)
    assert compute_speed.changed_factor(node.speed) == (None if slow == 1.0 else 2.0)


def test_some_microbatches_are_counted_after_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counting delays no recovery, and ends."""
    counted: list[tuple[int, Sizes]] = []
    node = Node(lambda step: tuple((1 + (step + m) % 4, 7 + 13 * step + 3 * m) for m in range(3)))

    def count(stage: LocalStage, index: int) -> None:
        counted.append((node.runner.step, stage.sizes[index]))
        original(stage, index)

    original = LocalStage.count
    monkeypatch.setattr(LocalStage, "count", count)
    train(monkeypatch, [node], 12)
    assert len(counted) == len({sizes for _, sizes in counted}) == MOST_COUNTED
    assert min(step for step, _ in counted) == 1
    assert node.seconds[3:] == pytest.approx([3e-9 * TOKENS * PER_TOKEN] * 9)


@pytest.mark.parametrize("recompute", [False, True])
def test_counting_changes_no_result(monkeypatch: pytest.MonkeyPatch, recompute: bool) -> None:
    model = ListStack([First, Middle, Attention, Last], seed=5)
    sums = []
    for lacks in (StageCost.lacks, lambda cost, sizes: False):
        monkeypatch.setattr(StageCost, "lacks", lacks)
        node = Node(always(SHORT), model=model)
        node.stage._recompute = recompute
        for step in range(3):
            node.run(step)
        sums.append([layer.gradient.clone() for layer in node.layers])
    assert all(torch.equal(one, other) for one, other in zip(*sums, strict=True))


def test_a_pass_that_fails_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(always(LONG), model=ListStack([First, Fragile, Last], seed=5))
    train(monkeypatch, [node], 3)
    (record,) = caplog.records
    assert record.message == "the operations of a micro-batch cannot be counted: CUDA out of memory"
    assert node.stage.cost.relative((2, 256), TypicalSize(TOKENS)) == 512 / TOKENS


def test_empty_backward_passes_make_nobody_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage skips the backward pass of a micro-batch without weight."""
    alike = always(((4, 24),) * 3)
    node, other = Node(alike), Node(alike, weights=(0.0, 2.0, 0.0))
    train(monkeypatch, [node, other], 3)
    assert other.seconds == pytest.approx(node.seconds)


def test_no_rank_counts_alone() -> None:
    """The ranks of a tensor-parallel group agree before the pass, as before each pass."""
    node = Node(always(SHORT))
    signal = AbandonSignal()
    node.runner.run(0, one_after_the_other(3), {}, RecordingHooks())
    node.runner.agreement = type(node.runner.agreement)(None, signal)

    class Abandoning(RecordingHooks):
        def before(self, action: Action) -> None:
            if self.actions:
                signal.set("a newer epoch")
                node.runner.cost(self.actions[-1])
            super().before(action)

    with pytest.raises(EpochAbandoned):
        node.runner.run(1, one_after_the_other(3), {}, Abandoning())


def cost_of(counted: dict[Sizes, tuple[int, int]]) -> StageCost:
    """`counted`: sizes -> operations per token, with weights and between tokens."""
    cost = StageCost()
    for sizes, (with_weights, between_tokens) in counted.items():
        tokens = math.prod(sizes)
        cost.add(sizes, tokens * with_weights, tokens * between_tokens)
    return cost


@pytest.mark.parametrize("sequence", [0, 32])
@pytest.mark.parametrize("hidden", [0, 100])
@pytest.mark.parametrize("length_first", [False, True])
def test_the_cost_has_a_linear_and_a_square_term(
    length_first: bool, hidden: int, sequence: int
) -> None:
    """Whichever of the sizes is the length, and also if some products with weights are counted as
    ones between tokens (`hidden`)."""

    def sizes(rows: int, length: int) -> Sizes:
        return (length, rows) if length_first else (rows, length)

    shapes = [(8, 16), (2, 64), (3, 100)]
    cost = cost_of({sizes(*s): (PER_TOKEN - hidden, PER_PAIR * s[1] + hidden) for s in shapes})
    typical = TypicalSize(TOKENS, sequence)
    usual = TOKENS * (PER_TOKEN + PER_PAIR * sequence)
    for rows, length in [*shapes, (1, 4096), (64, 8)]:
        wanted = rows * length * (PER_TOKEN + PER_PAIR * length) / usual
        assert cost.relative(sizes(rows, length), typical) == pytest.approx(wanted)


def test_one_size_suffices_for_a_first_estimate() -> None:
    cost, usual = cost_of({(2, 64): (PER_TOKEN, PER_PAIR * 64)}), TOKENS * PER_TOKEN
    for sizes in ((2, 64), (2, 256), (8, 512)):
        wanted = math.prod(sizes) * (PER_TOKEN + PER_PAIR * sizes[1]) / usual
        assert cost.relative(sizes, TypicalSize(TOKENS)) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    "counted",
    [
        {},
        {(4, 8): (0, 0), (4, 16): (0, 0)},  # an embedding
        {(4, 8): (7, 0)},  # no attention
        {(4, 8): (7, 0), (2, 64): (7, 0)},
        {(4, 8): (0, 8), (4, 16): (0, 16)},  # nothing but attention
        {(4,): (7, 0), (8,): (7, 2)},  # another number of sizes
    ],
)
def test_tokens_decide_where_nothing_else_is_known(
    counted: dict[Sizes, tuple[int, int]],
) -> None:
    assert cost_of(counted).relative((1, 256), TypicalSize(TOKENS)) == pytest.approx(2.0)


def test_alike_sizes_are_counted_once() -> None:
    cost = cost_of({(4, 100): (1, 0)})
    assert cost.lacks((4, 130)) and cost.lacks((6, 100)) and cost.lacks((4, 70))
    assert not cost.lacks((4, 110)) and not cost.lacks((0, 300)) and not cost.lacks((4, 9, 9))
    cost.give_up()
    assert not cost.lacks((4, 130))
