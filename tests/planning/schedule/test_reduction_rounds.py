"""Rounds of sums over the holders: what falls into them, that no list of actions hangs on them, and
how far a lost
worker can have been ahead of what the others have."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.domain.types import Pipeline, Stage, Unit
from elastic.planning.schedule.reduction_rounds import Rounds, lag, rounds_of
from elastic.planning.schedule.schedule import Action, actions_of, message_of

N_LAYERS = 12


def pipeline(name: str, schedule: str, units: int, chunks: int = 1) -> Pipeline:
    n = units * chunks
    ends = [s * N_LAYERS // n for s in range(n + 1)]
    stages = tuple(Stage(Unit(f"{name}{s % units}"), ends[s], ends[s + 1]) for s in range(n))
    return Pipeline(stages, (), schedule)


SHAPES = [("1f1b", d, 1) for d in (1, 2, 3, 5)]
SHAPES += [("zero-bubble", d, 1) for d in (2, 4)]
SHAPES += [("interleaved", d, v) for d, v in ((2, 2), (3, 2), (4, 3), (6, 2))]


@given(shares=st.lists(st.integers(0, 40), min_size=1, max_size=4), every=st.integers(1, 50))
def test_every_round_takes_some_and_the_last_takes_the_rest(shares: list[int], every: int) -> None:
    pipelines = [pipeline(str(p), "1f1b", 2) for p in range(len(shares))]
    rounds = rounds_of(pipelines, shares, every)
    for p, share in enumerate(shares):
        due = [rounds.due(p, index) for index in range(rounds.number)]
        assert due[-1] == share == rounds.due(p, rounds.number + 3)
        assert all(b > a for a, b in zip([0, *due], due, strict=False)) or not share
    assert rounds.number <= max(1, -(-max(shares) // every))
    assert rounds.windows == (1,) * len(shares)


@pytest.mark.parametrize(
    ("shares", "every", "number"),
    [
        ((6, 6), 1, 6),
        ((6, 6), 4, 2),
        ((6, 6), 6, 1),
        ((8, 3), 2, 3),
        ((5, 0), 1, 5),
        ((0, 0), 2, 1),
    ],
)
def test_numbers_of_rounds(shares: tuple[int, ...], every: int, number: int) -> None:
    assert rounds_of([pipeline("a", "1f1b", 2)] * 2, shares, every).number == number


@dataclass
class Worker:
    """What the engine and `elastic.worker.engine.incremental_allreduce` do, as far as it waits."""

    pipeline: int
    unit: int
    actions: Sequence[Action]
    layers: set[int]
    at: int = 0
    joined: int = 0
    ended: int = 0
    finished: Counter[int] = field(default_factory=Counter)

    @property
    def slowest(self) -> int:
        return min(self.finished.values(), default=0)


class World:
    """All workers of a plan in one step; `move` lets one of them do one thing."""

    def __init__(self, pipelines: Sequence[Pipeline], shares: Sequence[int], every: int) -> None:
        self.rounds: Rounds = rounds_of(pipelines, shares, every)
        self.arrived: set[tuple[int, int, Action]] = set()
        self.sizes = [0] * len(pipelines)
        self.workers: list[Worker] = []
        first = 0
        for p, (pipe, share) in enumerate(zip(pipelines, shares, strict=True)):
            lists = actions_of(pipe, tuple(range(first, first + share)))
            first, self.sizes[p] = first + share, len(lists)
            for u, actions in enumerate(lists):
                held = {
                    la
                    for s, st_ in enumerate(pipe.stages)
                    if s % len(lists) == u
                    for la in st_.layers
                }
                worker = Worker(p, u, actions, held)
                worker.finished.update(dict.fromkeys({a.stage for a in actions}, 0))
                self.workers.append(worker)

    def over(self, worker: Worker) -> bool:
        """Whether the oldest round that this worker has under way is over."""
        holders = [w for w in self.workers if w.layers & worker.layers]
        return worker.joined > worker.ended and all(w.joined > worker.ended for w in holders)

    def move(self, worker: Worker, eager: bool) -> bool:
        """Do its next thing. `eager`: look at rounds first; else only where it must wait for
        them."""
        p, rounds = worker.pipeline, self.rounds
        due = worker.joined < rounds.number and rounds.due(p, worker.joined) <= worker.slowest
        full = worker.joined - worker.ended >= rounds.windows[p]
        done = worker.at == len(worker.actions)
        if (eager or (due and full) or (done and not due)) and self.over(worker):
            worker.ended += 1
            return True
        if due:
            worker.joined += not full
            return not full
        if done:
            return False
        action = worker.actions[worker.at]
        if action.kind.receives and (p, worker.unit, action) not in self.arrived:
            return False
        if not action.kind.receives and not action.kind.computes:
            unit, receive = message_of(worker.unit, action, self.sizes[p])
            self.arrived.add((p, unit, receive))
        worker.at += 1
        # the engine counts before its next action that computes or receives: after the sends that
        # follow
        follows = worker.actions[worker.at : worker.at + 1]
        if action.kind.finishes:
            worker.finished[action.stage] += 1
            if follows and not follows[0].kind.computes and not follows[0].kind.receives:
                unit, receive = message_of(worker.unit, follows[0], self.sizes[p])
                self.arrived.add((p, unit, receive))
                worker.at += 1
        return True

    @property
    def progress(self) -> int:
        return sum(worker.joined + worker.slowest for worker in self.workers)

    def check_bound(self) -> None:
        """Whoever is lost now has run no more than the bound says, given what another holder
        has."""
        for lost in self.workers:
            for other in (w for w in self.workers if w is not lost and w.layers & lost.layers):
                saved = self.rounds.due(lost.pipeline, other.ended - 1) if other.ended else 0
                assert lost.slowest <= self.rounds.most_finished(lost.pipeline, saved)


def run_to_the_end(world: World, seed: int) -> None:
    """Workers take turns at random, some much slower than others; nothing may hang."""
    order = random.Random(seed)
    weights = [order.choice([1, 1, 5, 30]) for _ in world.workers]
    idle: set[int] = set()
    while len(idle) < len(world.workers):
        index = order.choices(range(len(world.workers)), weights)[0]
        before = world.progress
        if world.move(world.workers[index], order.random() < 0.5) or world.move(
            world.workers[index], True
        ):
            idle.clear()
            if before != world.progress:
                world.check_bound()
        else:
            idle.add(index)
    assert all(w.at == len(w.actions) and w.ended == world.rounds.number for w in world.workers), [
        (w.pipeline, w.unit, w.at, len(w.actions), w.joined, w.ended) for w in world.workers
    ]


@pytest.mark.parametrize(("first", "second"), list(combinations_with_replacement(SHAPES, 2)))
def test_no_two_schedules_hang_and_a_lost_worker_was_not_further(
    first: tuple[str, int, int], second: tuple[str, int, int]
) -> None:
    order = random.Random(str((first, second)))
    for _ in range(2):
        shares = (order.randint(0, 14), order.randint(1, 14))
        world = World(
            [pipeline("a", *first), pipeline("b", *second)], shares, order.choice([1, 1, 2, 3, 5])
        )
        run_to_the_end(world, order.randint(0, 10**9))


def test_the_interleaved_schedule_needs_the_longer_window() -> None:
    """With one round under way, as the other schedules have, four units could hang."""
    pipe = pipeline("a", "interleaved", 4, 2)
    assert lag(pipe) == 2 and rounds_of([pipe], [12], 1).windows == (2,)
    assert rounds_of([pipe], [12], 2).windows == (1,)
    assert stuck_at(pipe, 12) == 2


def stuck_at(pipe: Pipeline, share: int) -> int:
    """By how much stages can stay behind, when each stops as soon as it has finished some
    number."""
    worst = 0
    for stop in range(1, share + 1):
        world = World([pipe], [share], share)
        moved = True
        while moved:
            moved = False
            for worker in world.workers:
                if worker.slowest < stop and worker.at < len(worker.actions):
                    moved |= world.move(worker, False)
        worst = max(worst, stop - min(worker.slowest for worker in world.workers))
    return worst


@pytest.mark.parametrize("shape", SHAPES)
def test_no_stage_stays_further_behind_than_the_lag(shape: tuple[str, int, int]) -> None:
    pipe = pipeline("a", *shape)
    for share in (1, 2, 5, 8, 12, 13):
        assert stuck_at(pipe, share) <= lag(pipe)
