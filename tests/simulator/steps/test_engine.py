"""The engine: node-milliseconds add up, samples count once, and runs are repeatable."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from elastic_sim.steps.engine import (
    ElasticPolicy,
    JobView,
    Reconfiguration,
    Setup,
    Simulation,
    SimulationResult,
    Slowdown,
)
from elastic_sim.steps.time_accounting import TimeAccount, Use
from elastic_sim.traces.generate import Market, generate
from elastic_sim.traces.trace import ADD, REMOVE, Event, Trace, build_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.steps.node_time import node_ms, present_ms


class FixedPolicy(ElasticPolicy):
    """Steps take ten seconds. A loss costs `pauses` and `lost_ms`, or a rollback (`every`)."""

    def __init__(self, *pauses: tuple[Use, int], lost_ms: int = 0, every: int = 0) -> None:
        self._pauses, self._lost_ms, self._every = pauses, lost_ms, every
        self._saved = 0

    def setup(self, job: JobView) -> Setup | None:
        return Setup(len(job.alive), 10_000, 100) if job.alive else None

    def on_start(self, job: JobView) -> Reconfiguration:
        return Reconfiguration(setup=self.setup(job))

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration:
        back = self._saved if self._every and lost else -1
        return Reconfiguration(self._pauses, self.setup(job), self._lost_ms if lost else 0, back)

    def on_step_end(self, job: JobView) -> None:
        if self._every and job.steps % self._every == 0:
            self._saved = job.steps


def trace_of(*events: tuple[float, str, str], end_s: float = 100.0) -> Trace:
    return build_trace([Event(at, kind, node) for at, kind, node in events], end_s)


TWO = trace_of((0, ADD, "a"), (0, ADD, "b"), (45, REMOVE, "b"))


def test_without_losses_all_is_useful() -> None:
    found = Simulation(trace_of((0, ADD, "a"), end_s=95), FixedPolicy()).run()
    assert (found.steps, found.samples) == (9, 900)
    assert found.account.totals()[Use.USEFUL] == present_ms(found.account) == 95_000


def test_a_loss_costs_its_pauses_and_what_it_takes_back() -> None:
    found = Simulation(
        TWO, FixedPolicy((Use.DETECT, 1000), (Use.TRANSFER, 2500), lost_ms=2000)
    ).run()
    totals = found.account.totals()
    assert totals[Use.DETECT] == 1000 and totals[Use.TRANSFER] == 2500
    assert totals[Use.LOST] == 2 * 2000, "of both nodes that did it"
    assert totals[Use.USEFUL] == 2 * 43_000 + 51_500
    assert sum(totals.values()) == present_ms(found.account) == 2 * 45_000 + 55_000
    assert found.steps == (43_000 + 51_500) // 10_000


def test_going_back_to_a_checkpoint_takes_samples_back() -> None:
    found = Simulation(TWO, FixedPolicy(every=3)).run()
    assert found.account.totals()[Use.LOST] == 2 * 15_000  # from step 3 to 4.5
    assert found.steps == 3 + 5 and found.samples == 800


def test_a_second_loss_ends_the_pauses_of_the_first() -> None:
    trace = trace_of(
        (0, ADD, "a"), (0, ADD, "b"), (0, ADD, "c"), (20, REMOVE, "b"), (21, REMOVE, "c")
    )
    found = Simulation(trace, FixedPolicy((Use.DETECT, 5000))).run()
    assert found.account.totals()[Use.DETECT] == 2 * 1000 + 5000


def test_no_nodes_means_no_time() -> None:
    trace = trace_of((10, ADD, "a"), (40, REMOVE, "a"), end_s=100)
    found = Simulation(trace, FixedPolicy()).run()
    assert present_ms(found.account) == 30_000 and found.steps == 3


def test_finished_share_of_a_step_survives_a_change_of_length() -> None:
    class Halving(FixedPolicy):
        def setup(self, job: JobView) -> Setup | None:
            return Setup(1, 10_000 * len(job.alive), 100) if job.alive else None

    found = Simulation(TWO, Halving()).run()
    # 2.25 steps of 20 s; then the rest of the third at 10 s per step, and 4.5 more.
    assert found.steps == 2 + 1 + 4
    assert found.account.totals()[Use.IDLE] == 45_000


class RandomPolicy(ElasticPolicy):
    """Answers every event at random."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def any(self, job: JobView) -> Reconfiguration:
        draw = self._draw
        if draw.random() < 0.5:
            job.set_timer(draw.randrange(1, 50_000) / 1000, "again")
        pauses = tuple(
            (draw.choice(list(Use)), draw.randrange(5000)) for _ in range(draw.randrange(4))
        )
        pauses = tuple(
            (use, ms) for use, ms in pauses if use not in (Use.USEFUL, Use.REDUNDANT, Use.IDLE)
        )
        used = draw.randrange(len(job.alive) + 1)
        setup = (
            Setup(used, draw.randrange(1, 20_000), draw.randrange(1, 9), draw.random())
            if used
            else None
        )
        back = draw.randrange(job.steps + 1) if draw.random() < 0.2 else -1
        return Reconfiguration(pauses, setup, draw.randrange(3000), back)

    def on_start(self, job: JobView) -> Reconfiguration:
        return self.any(job)

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration:
        return self.any(job)

    def on_notice(self, job: JobView, leaving: Sequence[Event]) -> Reconfiguration | None:
        return self.any(job) if self._draw.random() < 0.5 else None

    def on_speed_change(self, job: JobView) -> Reconfiguration | None:
        assert all(factor > 1 and node in job.alive for node, factor in job.slow.items())
        return self.any(job) if self._draw.random() < 0.5 else None

    def on_step_end(self, job: JobView) -> Reconfiguration | None:
        return self.any(job) if self._draw.random() < 0.1 else None

    def on_timer(self, job: JobView, name: str) -> Reconfiguration | None:
        return self.any(job) if self._draw.random() < 0.5 else None


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.floats(5, 500), st.floats(0, 300), st.floats(0, 30))
def test_every_node_millisecond_has_one_use(
    seed: int, mtbf_s: float, repair_s: float, notice_s: float
) -> None:
    market = Market(
        nodes=5, mtbf_s=mtbf_s, repair_s=repair_s, notice_s=notice_s, bulk=((1, 3), (3, 1))
    )
    trace = generate(market, 600.0, seed)
    noise = random.Random(seed + 1)
    factors = [noise.uniform(0.7, 1.5) for _ in range(1 << 16)]
    slow = [
        Slowdown(at * 20_000, at * 25_000 + 1, f"node{at % 7}", 1.0 + at) for at in range(1, 20)
    ]
    first, again = (
        Simulation(trace, RandomPolicy(seed), factors.__getitem__, slow).run() for _ in range(2)
    )
    totals = first.account.totals()
    assert sum(totals.values()) == present_ms(first.account) == node_ms(trace)
    assert all(amount >= 0 for amount in totals.values())
    assert first.ended == first.account.ended == 600_000
    assert _comparable(first) == _comparable(again)


def _comparable(outcome: SimulationResult) -> object:
    return (
        outcome.steps,
        outcome.samples,
        outcome.account.spans,
        outcome.decisions,
    )


def test_only_useful_time_can_be_lost() -> None:
    account = TimeAccount()
    account.add(1000, 2, 2, Use.USEFUL)
    account.add(1500, 2, 2, Use.PLAN)
    account.add(2000, 2, 1, Use.USEFUL, 0.5)
    account.lose(800)
    totals = account.totals()
    assert totals[Use.LOST] == 500 + 2 * 300 and totals[Use.USEFUL] == 2 * 700
    with pytest.raises(ValueError, match="more are lost"):
        account.lose(701)
    with pytest.raises(ValueError, match="3 of 2 nodes"):
        account.add(3000, 2, 3, Use.USEFUL)
