"""Micro-batches through some layers only: the same bits as in a whole run, under every schedule and cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.domain.errors import VaultError
from elastic.domain.types import (
    ACTIVATION,
    COTANGENT,
    Accumulate,
    Assignment,
    Copy,
    PartialRun,
    Pipeline,
    Stage,
    Unit,
)
from elastic.planning.plan.rank_map import roster
from elastic.planning.schedule.partial_schedule import excerpt, groups
from elastic.planning.schedule.schedule import Action, Kind, actions_of, message_of, one_f_one_b
from elastic.worker.backup.activation_log import LoggedMessage, read_message
from elastic.worker.engine.partial import PartialRunner, wanted
from elastic.worker.engine.stage import Chunk
from elastic.worker.engine.stage_runner import StageRunner
from elastic.worker.engine.step import chunks_of
from elastic.worker.replica.replica import LayerReplica
from tests.worker.engine.models import Quiet, data, lonely_links, replicas, runner, stack
from tests.worker.engine.ranks import Rank, run_ranks
from tests.worker.engine.test_schedules import N_LAYERS, PIPELINES, M, plan_of

SPANS = ((0, 2, 6), (1, 2, 6), (2, 0, 4), (3, 3, 4), (3, 5, N_LAYERS))
"""(micro-batch, first, last): what runs in part; the others run whole."""
WHOLE = (4,)
CUTS = {**PIPELINES, "other cuts": "schedule=1f1b: a[0:1] b[1:4] c[4:8]", "alone": "schedule=1f1b: a[0:8]"}


def copy_of(kind: str, layer: int, index: int) -> Copy:
    return Copy(kind, layer, 0, 0, 1, "x", 1000 * layer + index, 1, "", frozenset({index}))


def runs() -> tuple[PartialRun, ...]:
    return tuple(
        PartialRun(
            0, m, first, last,
            (copy_of(ACTIVATION, first, m),) if first else (),
            (copy_of(COTANGENT, last, m),) if last < N_LAYERS else (),
        )
        for m, first, last in SPANS
    )  # fmt: skip


def skipped() -> dict[int, frozenset[int]]:
    """Layer -> what it has already, so that each lacks what runs through it."""
    lacks = {layer: set(WHOLE) for layer in range(N_LAYERS)}
    for m, first, last in SPANS:
        for layer in range(first, last):
            lacks[layer].add(m)
    return {layer: frozenset(range(M)) - indices for layer, indices in lacks.items()}


def expected() -> list[LayerReplica]:
    layers = replicas(stack(N_LAYERS), range(N_LAYERS), Accumulate.EXACT)
    runner(layers, lonely_links(), M).run(0, one_f_one_b(0, 1, tuple(range(M))), skipped(), Quiet())
    return layers


def logged() -> dict[str, torch.Tensor]:
    """Everything that crosses any boundary in a step, as copies: from a run with every layer a stage of its own."""
    layers, found = replicas(stack(N_LAYERS), range(N_LAYERS), Accumulate.FAST), {}

    def keep(kind: str, layer: int, index: int, tensor: torch.Tensor) -> torch.Tensor:
        message = LoggedMessage(kind, layer, 0, index, tensor)
        out = torch.empty(message.nbytes, dtype=torch.uint8)
        message.write(out)
        found[copy_of(kind, layer, index).key] = out
        return tensor

    for index in range(M):
        chunks = [Chunk([layer]) for layer in layers]
        hidden = None
        for chunk in chunks:
            chunk.ends = chunk is chunks[-1]
            hidden = chunk.forward(data(0, index), hidden)
            if not chunk.ends:
                hidden = keep(ACTIVATION, chunk.layers[0].index + 1, index, hidden.clone())
        gradient: torch.Tensor | float | None = 1.0 / M
        for chunk in reversed(chunks):
            assert gradient is not None
            gradient = chunk.backward(index, gradient)
            if gradient is not None:
                gradient = keep(COTANGENT, chunk.layers[0].index, index, gradient.clone())
    return found


@dataclass(frozen=True)
class Found:
    gradients: dict[int, torch.Tensor]
    ledgers: dict[int, set[int]]
    losses: dict[int, float]
    actions: list[str]
    started: frozenset[int]


def run_units(rank: Rank, text: str) -> Found:
    plan = plan_of(text)
    ranks = roster(plan)
    layers = replicas(stack(N_LAYERS), ranks.members[rank.rank].layers, Accumulate.EXACT)
    links = lonely_links() if rank.size == 1 else rank.open(pairs=ranks.pairs())
    hooks, assignment = Quiet(), Assignment(plan, 0, partial=runs())
    everything = logged()
    needed = {copy.key: everything[copy.key] for copy in wanted(assignment, ranks.members[rank.rank])}
    part = PartialRunner(assignment, ranks, rank.rank, layers, needed)

    def make(chunks: list[Chunk]) -> StageRunner:
        return runner(layers, links, M, chunks)

    part.run(make, skipped(), hooks)  # type: ignore[arg-type]
    assert not part._messages, "fetched, and not used"
    actions = [str(action) for action in hooks.actions if action.kind.computes]
    worker = runner(layers, links, M, chunks_of(ranks, rank.rank, layers))
    worker.run(0, actions_of(plan.pipelines[0], WHOLE)[rank.rank], skipped(), hooks)
    assert all(p.grad is None for layer in layers for p in layer.module.parameters())
    return Found(
        {la.index: la.gradient for la in layers},
        {la.index: la.ledger for la in layers},
        layers[-1].losses,
        actions,
        part.started,
    )


@pytest.mark.parametrize("name", CUTS)
def test_some_layers_alone_change_no_bit(name: str) -> None:
    text = CUTS[name]
    n_units = len({word.split("[")[0] for word in text.split(":", 1)[1].split()})
    results = run_ranks(run_units, n_units, text)
    for layer in expected():
        result = next(r for r in results if layer.index in r.gradients)
        assert result.ledgers[layer.index] == layer.ledger
        assert torch.equal(result.gradients[layer.index], layer.gradient)
    assert results[-1].losses == expected()[-1].losses
    for result in results:
        mine = {m for m, first, last in SPANS if any(first <= layer < last for layer in result.gradients)}
        assert result.started == mine
        computed = {
            int("".join(c for c in text.rpartition("F")[2])) for text in result.actions if "F" in text
        }
        assert computed == mine, "who holds none of its layers computes nothing"


@pytest.mark.parametrize("nbytes", [0, 60, 128, 140])
def test_malformed_messages_are_refused(nbytes: int) -> None:
    whole = LoggedMessage(ACTIVATION, 1, 0, 0, torch.ones(4, dtype=torch.bfloat16))
    out = torch.empty(whole.nbytes, dtype=torch.uint8)
    whole.write(out)
    assert torch.equal(read_message(out), whole.tensor)
    with pytest.raises(VaultError, match="malformed"):
        read_message(torch.cat((out, out))[:nbytes])


# ---- the action lists


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    n_units = draw(st.integers(1, 4))
    chunks = draw(st.integers(2, 3)) if n_units > 1 and draw(st.booleans()) else 1
    sizes = draw(st.lists(st.integers(1, 3), min_size=n_units * chunks, max_size=n_units * chunks))
    ends = list(itertools.accumulate(sizes))
    stages = tuple(
        Stage(Unit(f"n{s % n_units}"), end - size, end)
        for s, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )
    schedule = "interleaved" if chunks > 1 else draw(st.sampled_from(("1f1b", "zero-bubble")))
    return Pipeline(stages, (), schedule)


@given(pipelines(), st.data())
@settings(max_examples=300, deadline=None)
def test_excerpts_end_and_do_everything_once(pipeline: Pipeline, draw: st.DataObject) -> None:
    n_layers = pipeline.stages[-1].last
    found = []
    for _ in range(draw.draw(st.integers(1, 3))):
        first = draw.draw(st.integers(0, n_layers - 1))
        last = draw.draw(st.integers(first + 1, n_layers))
        count = draw.draw(st.integers(1, 5))
        found += [PartialRun(0, len(found) + i, first, last) for i in range(count)]
    n_units = len({stage.unit for stage in pipeline.stages})
    rows: list[list[Action]] = [[] for _ in range(n_units)]
    for (first, last), group in groups(found, 0):
        lists = excerpt(pipeline, first, last, tuple(run.microbatch for run in group))
        inside = [s for s, stage in enumerate(pipeline.stages) if stage.first < last and stage.last > first]
        wanted_there = sorted((run.microbatch, s) for run in group for s in inside)
        for kind in (Kind.F, Kind.B):
            done = [
                (action.microbatch, action.stage if action.stage >= 0 else u)
                for u, row in enumerate(lists)
                for action in row
                if action.kind is kind
            ]
            assert sorted(done) == wanted_there
        for row, more in zip(rows, lists, strict=True):
            row.extend(more)
    play(rows)


def play(rows: list[list[Action]]) -> None:
    """Every unit takes its actions in order; a receive must find the very next message of its sender."""
    n_units = len(rows)
    queues: dict[tuple[int, int], list[Action]] = {}
    at = [0] * n_units
    while any(at[u] < len(rows[u]) for u in range(n_units)):
        moved = False
        for u in range(n_units):
            while at[u] < len(rows[u]):
                action = rows[u][at[u]]
                if action.kind.receives:
                    step = -1 if action.kind is Kind.RECV_F else 1
                    queue = queues.get(((u + step) % n_units, u), [])
                    if not queue:
                        break
                    assert queue.pop(0) == action, (
                        "messages arrive in another order than they are expected in"
                    )
                elif not action.kind.computes:
                    other, receive = message_of(u, action, n_units)
                    queues.setdefault((u, other), []).append(receive)
                at[u] += 1
                moved = True
        assert moved, f"deadlock at {[row[i : i + 1] for row, i in zip(rows, at, strict=True)]}"
    assert not any(queues.values())


def test_runs_of_the_same_layers_go_together() -> None:
    mine = [PartialRun(0, 0, 0, 2), PartialRun(0, 1, 0, 2), PartialRun(1, 2, 0, 2), PartialRun(0, 3, 2, 4)]
    assert [(span, [r.microbatch for r in found]) for span, found in groups(mine, 0)] == [
        ((0, 2), [0, 1]),
        ((2, 4), [3]),
    ]
