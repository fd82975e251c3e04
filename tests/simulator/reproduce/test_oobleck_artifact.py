"""The artifact's simulation on small traces. test_published.py has the published values."""

from __future__ import annotations

import pytest
from elastic_sim.reproduce.oobleck_artifact import (
    MODELS,
    ArtifactBamboo,
    ArtifactOobleck,
    ArtifactOobleckTimes,
    ArtifactVaruna,
    ThroughputTable,
    oracle,
    throughputs,
)
from elastic_sim.traces.trace import ADD, REMOVE, Event, build_trace

from elastic.domain.errors import FieldError

MODEL = MODELS[0]
FLAT: ThroughputTable = dict.fromkeys(range(15, 31), MODEL.samples_per_step / 10)
"""Ten seconds per step for any number of nodes."""


def trace_of(*lost: tuple[float, str], nodes: int = 30, end_s: float = 1000.0):  # type: ignore[no-untyped-def]
    first = [Event(0, ADD, f"n{i}") for i in range(nodes)]
    last = Event(end_s, REMOVE, "n0")
    return build_trace((*first, *(Event(at, REMOVE, node) for at, node in lost), last), end_s)


def test_without_losses_steps_follow_each_other() -> None:
    oobleck = ArtifactOobleck(MODEL, FLAT)
    assert oobleck.run(trace_of()) == pytest.approx(MODEL.samples_per_step / 10)
    assert oobleck.began == 47_000 and len(oobleck.steps) == 95


def test_oobleck_repeats_the_running_step() -> None:
    oobleck = ArtifactOobleck(MODEL, FLAT)
    oobleck.run(trace_of((452.0, "n7")))
    assert [s.ended for s in oobleck.steps if 440_000 < s.ended < 480_000] == [
        447_000,
        464_000,
        474_000,
    ]


def test_varuna_goes_back_to_its_checkpoint() -> None:
    """From 100.3 s on: a checkpoint after ten steps, and a loss in the fourth step after it."""
    restart = MODEL.varuna_ms - MODEL.checkpoint_ms
    varuna = ArtifactVaruna(MODEL, FLAT, rollback=True)
    varuna.run(trace_of((300.0, "n7"), end_s=350))
    assert varuna.began == 45_000 + restart
    done = varuna.samples()
    assert done[:10] == [MODEL.samples_per_step] * 10
    assert done[10:13] == [0.0] * 3
    kept = ArtifactVaruna(MODEL, FLAT, rollback=False)
    kept.run(trace_of((300.0, "n7"), end_s=350))
    assert all(kept.samples())


def test_bamboo_is_slower_until_the_step_ends() -> None:
    bamboo = ArtifactBamboo(MODEL, FLAT)
    bamboo.run(trace_of((100.0, "n3"), end_s=400))
    lengths = [step.ended - step.began for step in bamboo.steps]
    assert (
        lengths.count(10_000) == len(lengths) - 2
    )  # the one that was hit, and that after the new deal
    assert max(lengths) == 10_000 + MODEL.bamboo_ms


def test_loss_of_two_neighbours_begins_a_global_rendezvous() -> None:
    bamboo = ArtifactBamboo(MODEL, FLAT)
    slots: dict[str, list[tuple[int, int]]] = {}
    original = bamboo.lost

    def lost(node: str) -> None:
        if not slots:
            slots.update({name: list(held) for name, held in bamboo.slots.items()})
        original(node)

    bamboo.lost = lost  # type: ignore[method-assign]
    bamboo.run(trace_of((100.0, "n3"), end_s=101))
    place = slots["n3"][0]
    before = next(node for node, held in slots.items() if (place[0], (place[1] - 1) % 12) in held)
    again = ArtifactBamboo(MODEL, FLAT)
    meetings = list[str]()
    meet = again.meet
    again.meet = lambda kind: (meetings.append(kind.name), meet(kind))[1]  # type: ignore[method-assign,func-returns-value]
    again.run(trace_of((100.0, "n3"), (100.5, before), end_s=400))
    assert meetings[:2] == ["GLOBAL", "GLOBAL"]


def test_tables_in_another_format_are_refused() -> None:
    for text in ("[]", '{"a": {"tputs": [1]}}', "x"):
        with pytest.raises(FieldError, match="16 numbers"):
            throughputs(text)


def test_use_of_time_with_one_loss() -> None:
    """From 47 s: 40.5 steps, a rendezvous of 2 s, 54 steps; the trace ends during another."""
    trace = trace_of((452.0, "n7"))
    times = ArtifactOobleckTimes(MODEL, FLAT, trace)
    begun, meetings, lost = (40 + 1 + 54 + 1) * 10, 2 * 2, 10
    total = begun + meetings + lost
    assert list(times.counted().values()) == pytest.approx(
        [100 * part / total for part in (begun, meetings, lost)]
    )
    span = 400 + 5 + 2 + 540
    assert list(times.by_the_clock().values()) == pytest.approx(
        [100 * part / span for part in (940, 2, 5)]
    )
    assert times.step_seconds() == (10.0, 10.0)


def test_no_time_gives_zero_shares() -> None:
    few = ArtifactOobleckTimes(MODEL, FLAT, trace_of(nodes=5))
    assert set(few.by_the_clock().values()) == {0.0}
    assert few.step_seconds() == (0.0, 0.0)


def test_the_oracle_takes_the_best_table_at_each_number_of_nodes() -> None:
    """30 nodes for 400 s, then 29 for 600 s; the table of another model is ignored."""
    tables: dict[str, ThroughputTable] = {
        f"oobleck/{MODEL.key}": {**FLAT, 30: 10.0, 29: 1.0},
        f"varuna/{MODEL.key}": {**FLAT, 30: 4.0, 29: 5.0},
        "oobleck/other": dict.fromkeys(range(15, 31), 1e9),
    }
    trace = trace_of((400.0, "n7"))
    assert oracle(MODEL, trace, tables) == pytest.approx((400 * 10 + 600 * 5) / 1000)
    assert oracle(MODEL, trace, {}) == 0.0
    later = build_trace(
        [Event(e.seconds + 100, e.kind, e.node) for e in trace.events], trace.end_s + 100
    )
    assert oracle(MODEL, later, tables) == oracle(MODEL, trace, tables)
