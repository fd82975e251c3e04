"""The artifact's simulation on small traces; against its published values: tests/simulator/test_published.py."""

from __future__ import annotations

import pytest

from elastic.errors import FieldError
from simulator.reproduce.artifact import MODELS, Bamboo, Oobleck, Table, Varuna, throughputs
from simulator.trace import ADD, REMOVE, Event, check

MODEL = MODELS[0]
FLAT: Table = dict.fromkeys(range(15, 31), MODEL.samples_per_step / 10)
"""Ten seconds a step whatever nodes there are."""


def trace_of(*lost: tuple[float, str], nodes: int = 30, end_s: float = 1000.0):  # type: ignore[no-untyped-def]
    first = [Event(0, ADD, f"n{i}") for i in range(nodes)]
    last = Event(end_s, REMOVE, "n0")
    return check((*first, *(Event(at, REMOVE, node) for at, node in lost), last), end_s)


def test_without_losses_steps_follow_each_other() -> None:
    oobleck = Oobleck(MODEL, FLAT)
    assert oobleck.run(trace_of()) == pytest.approx(MODEL.samples_per_step / 10)
    assert oobleck.began == 47_000 and len(oobleck.steps) == 95


def test_oobleck_does_the_running_step_again() -> None:
    oobleck = Oobleck(MODEL, FLAT)
    oobleck.run(trace_of((452.0, "n7")))
    assert [s.ended for s in oobleck.steps if 440_000 < s.ended < 480_000] == [447_000, 464_000, 474_000]


def test_varuna_goes_back_to_its_checkpoint() -> None:
    """From 100.3 s on: the first checkpoint after ten steps, then a loss in the fourth step after it."""
    restart = MODEL.varuna_ms - MODEL.checkpoint_ms
    varuna = Varuna(MODEL, FLAT, rollback=True)
    varuna.run(trace_of((300.0, "n7"), end_s=350))
    assert varuna.began == 45_000 + restart
    done = varuna.samples()
    assert done[:10] == [MODEL.samples_per_step] * 10
    assert done[10:13] == [0.0] * 3
    kept = Varuna(MODEL, FLAT, rollback=False)
    kept.run(trace_of((300.0, "n7"), end_s=350))
    assert all(kept.samples())


def test_bamboo_runs_on_at_half_the_speed_until_the_step_ends() -> None:
    bamboo = Bamboo(MODEL, FLAT)
    bamboo.run(trace_of((100.0, "n3"), end_s=400))
    lengths = [step.ended - step.began for step in bamboo.steps]
    assert lengths.count(10_000) == len(lengths) - 2  # the one that was hit, and that after the new deal
    assert max(lengths) == 10_000 + MODEL.bamboo_ms


def test_two_neighbours_make_everybody_meet() -> None:
    bamboo = Bamboo(MODEL, FLAT)
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
    again = Bamboo(MODEL, FLAT)
    meetings = list[str]()
    meet = again.meet
    again.meet = lambda kind: (meetings.append(kind.name), meet(kind))[1]  # type: ignore[method-assign,func-returns-value]
    again.run(trace_of((100.0, "n3"), (100.5, before), end_s=400))
    assert meetings[:2] == ["GLOBAL", "GLOBAL"]


def test_tables_of_another_form_are_refused() -> None:
    for text in ("[]", '{"a": {"tputs": [1]}}', "x"):
        with pytest.raises(FieldError, match="16 numbers"):
            throughputs(text)
