"""Parts of the micro-batch level: clock, uplinks, vaults, physics files and run histories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from elastic_sim.microbatches import physics as files
from elastic_sim.microbatches.clock import BEGIN_S, Uplink, VirtualClock
from elastic_sim.microbatches.physics import MicrobatchPhysics
from elastic_sim.microbatches.recorded_run import history_of, matched_recoveries
from elastic_sim.microbatches.vault import SimulatedVault
from hypothesis import given
from hypothesis import strategies as st

from elastic.domain.codec import dumps
from elastic.domain.errors import FieldError
from elastic.domain.types import (
    ACTIVATION,
    GRADIENT,
    STATE,
    UPDATE,
    Copy,
    Pipeline,
    Plan,
    Stage,
    Unit,
)
from elastic.planning.plan.plan import format_plan


def copy(kind: str, step: int, sequence: int = 0, **more: object) -> Copy:
    made = Copy(kind, 3, 0, step, 1, "a", sequence, 8, "", node="a")
    return replace(made, **more)  # type: ignore[arg-type]


def test_actions_run_in_order_of_time_then_of_scheduling() -> None:
    clock, told = VirtualClock(0, 0.0), list[str]()
    for name, seconds in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        clock.after(seconds, lambda name=name: told.append(f"{name}{clock.ms}"))  # type: ignore[misc]
    clock.run(5.0, lambda: False)
    assert told == ["a1000", "b2000", "c2000"] and clock.now == BEGIN_S + 5.0


@given(st.integers(0, 1 << 30), st.floats(0.0, 0.9), st.floats(0.0, 100.0))
def test_jitter_stays_in_its_bounds(seed: int, jitter: float, seconds: float) -> None:
    varied = VirtualClock(seed, jitter).vary(seconds)
    assert seconds * (1 - jitter) - 1e-9 <= varied <= seconds * (1 + jitter) + 1e-9


def test_streams_share_an_uplink_evenly_and_keep_their_order() -> None:
    clock, there = VirtualClock(0, 0.0), list[tuple[str, int]]()
    wire = Uplink(clock, 100.0, 0.5)
    for name, stream, nbytes in (("a1", "a", 100), ("a2", "a", 100), ("b1", "b", 50)):
        wire.send(stream, nbytes, lambda name=name: there.append((name, clock.ms)))  # type: ignore[misc]
    assert wire.busy_s == 2.5
    clock.run(10.0, lambda: False)
    assert there == [("b1", 1500), ("a1", 2000), ("a2", 3000)] and wire.busy_s == 0.0


def test_dropped_streams_free_bandwidth() -> None:
    clock, there = VirtualClock(0, 0.0), list[int]()
    wire = Uplink(clock, 100.0, 0.0)
    wire.send("a", 100, lambda: there.append(clock.ms))
    wire.send("b", 100, lambda: there.append(-1))
    clock.after(1.0, lambda: wire.drop("b"))
    clock.run(10.0, lambda: False)
    assert there == [1500]
    Uplink(clock, 0.0, 0.5).send("a", 1e12, lambda: there.append(clock.ms))
    clock.run(12.0, lambda: False)
    assert there == [1500, 10500]


def test_a_vault_keeps_two_steps_and_of_gradients_two_ledgers() -> None:
    vault = SimulatedVault("a")
    for step in range(4):
        vault.add(copy(STATE, step, step))
    assert sorted(c.step for c in vault) == [2, 3]
    for n in range(1, 4):
        vault.add(copy(GRADIENT, 3, n, microbatches=frozenset(range(n))))
    assert sorted(len(c.microbatches) for c in vault if c.kind == GRADIENT) == [2, 3]
    assert [c.step for c in vault.newest_state(3)] == [3] and vault.newest_state(4) == ()


def test_a_vault_keeps_updates_since_the_older_state() -> None:
    vault = SimulatedVault("a")
    vault.add(copy(STATE, 0))
    for step in range(6):
        vault.add(copy(UPDATE, step))
    assert len([c for c in vault if c.kind == UPDATE]) == 6
    vault.add(copy(STATE, 4, 1))
    vault.add(copy(STATE, 5, 2))
    assert sorted(c.step for c in vault if c.kind == UPDATE) == [4, 5]


def test_a_trim_leaves_messages_of_the_running_step() -> None:
    vault = SimulatedVault("a")
    vault.add(copy(STATE, 5))
    vault.add(copy(ACTIVATION, 5, 1, microbatches=frozenset({0})))
    vault.add(copy(ACTIVATION, 4, 2, microbatches=frozenset({0})))
    vault.trim(2, 5)
    assert [(c.kind, c.step) for c in vault] == [(ACTIVATION, 5)]


def test_entering_an_epoch_drops_a_history_that_was_given_up() -> None:
    vault = SimulatedVault("a")
    vault.add(copy(STATE, 5))
    vault.add(copy(STATE, 6, 1))
    vault.enter(2, 5)
    assert (
        [c.step for c in vault] == [5]
        and copy(STATE, 5) in vault
        and copy(STATE, 6, 1) not in vault
    )


def test_physics_are_kept_in_files(tmp_path: Path) -> None:
    path, found = tmp_path / "physics.json", MicrobatchPhysics(plan_s=0.25)
    path.write_text(dumps(found))
    assert files.read(path) == found


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"version":1}', "version"),
        ('{"plan_s":-1.0}', "plan_s"),
        ('{"jitter":0.95}', "jitter"),
        ('{"speed":1.0}', "speed"),
        ("{", "--physics: .*physics.json' is not usable: it is not a file that .*: not JSON: line"),
    ],
)
def test_wrong_physics_are_refused(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "physics.json"
    path.write_text(text)
    with pytest.raises(FieldError, match=field):
        files.read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="--physics"):
        files.read(tmp_path / "none.json")


PLAN = format_plan(Plan(1, 1, 1, 1, (Pipeline((Stage(Unit("x"), 0, 1),), (0,)),)))
ENTRY = {
    "kind": "recovery",
    "cause_kinds": ["lost"],
    "planned": False,
    "nodes_before": 3,
    "nodes_after": 2,
    "decide_s": 0.2,
}


def test_a_history_is_read_from_events() -> None:
    events = [
        {"at": 1.0, "kind": "plan", "epoch": 1, "text": PLAN},
        *({"at": 2.0 + s, "kind": "step", "step": s, "seconds": 1.0} for s in range(5)),
        {"at": 7.0, "kind": "halt", "epoch": 2, "cause_kind": "lost", "cause_nodes": ["x"]},
        {"at": 7.5, "kind": "plan", "epoch": 2, "text": PLAN},
        {"at": 8.0, **ENTRY, "epoch": 2},
        {"at": 9.0, "kind": "joined", "node": "y"},
        {"at": 12.0, "kind": "prefetch", "nodes": ["y"]},
        {"at": 12.5, "kind": "halt", "epoch": 3, "cause_kind": "join", "cause_nodes": ["y"]},
        {"at": 13.0, "kind": "step", "step": 5, "seconds": 3.0},
    ]
    history = history_of(events)
    assert history.seconds == 11.0
    assert history.planning_s(False) == [pytest.approx(0.3)] and history.planning_s(True) == []
    assert history.startups == (3.0,) and history.prefetches == (0.5,)
    assert [step for step, _ in history.undisturbed()] == [2, 3]
    assert [
        step
        for step, *_ in history_of(
            [*events, {"at": 20.0, "kind": "lost-steps", "from_step": 3}]
        ).steps
    ] == [0, 1, 2]


def test_recoveries_of_one_kind_are_paired_in_order() -> None:
    plan = {"at": 1.0, "kind": "plan", "epoch": 1, "text": PLAN}
    other = {**ENTRY, "nodes_after": 1}
    one = history_of([plan, *({"at": 2.0, "epoch": 9, **e} for e in (ENTRY, other, ENTRY))])
    two = history_of([plan, *({"at": 2.0, "epoch": 9, **e} for e in (ENTRY, ENTRY))])
    assert len(matched_recoveries(one, two)) == 2 and len(matched_recoveries(two, one)) == 2
    assert history_of([]).seconds == 0.0
