"""`--backup auto`: what is measured, when it is looked at, and what follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.health.backup_metrics import ENOUGH, NEWEST, Gauge, middle, note
from elastic.core.health.compute_speed import Pace
from elastic.core.job import measured_conditions as conditions
from elastic.core.job import state as job
from elastic.core.job.state import CauseKind, JobPhase, JobState, LogEntry, Send
from elastic.core.policy import backup_policy as backup
from elastic.core.policy.backup_policy import CHECK_INTERVAL_S, MIN_STEPS
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import Measured, Traffic
from tests.core.policy.test_straggler_policy import running

MB = 1_000_000


def measured(
    step: int, *, epoch: int = 1, sent: int = 10 * MB, sent_s: float = 0.1, slowed: float = 0.0
) -> Measured:
    traffic = Traffic(copied_bytes=10 * MB, copied_s=0.01, sent_bytes=sent, sent_s=sent_s)
    return Measured(epoch, step, 0, 1.0, 2.0, slowed, traffic)


def test_each_step_counts_once() -> None:
    gauge = Gauge()
    for step in (1, 2, 2, 1, 3):
        gauge = note(gauge, 1, [measured(step)])
    assert gauge.steps == 3 and gauge.sending == (100 * MB,) * 3 and gauge.copying == (1000 * MB,) * 3
    assert note(gauge, 1, []) is gauge


def test_figures_stay_over_changes_of_plan_and_steps_do_not() -> None:
    gauge = note(note(Gauge(), 1, [measured(5, slowed=1.5)]), 2, [measured(6, epoch=2, sent=0, sent_s=0.0)])
    assert gauge.steps == 1 and gauge.sending == (100 * MB,) and gauge.slowed == (1.5,)


def test_few_bytes_tell_nothing_of_bandwidth_and_old_samples_go() -> None:
    assert note(Gauge(), 1, [measured(1, sent=100)]).sending == ()
    gauge = Gauge()
    for step in range(NEWEST + 5):
        gauge = note(gauge, 1, [measured(step, sent_s=1.0 if step < 5 else 0.1)])
    assert gauge.sending == (100 * MB,) * NEWEST


def test_workers_of_a_node_share_its_link() -> None:
    gauge = note(Gauge(), 1, [measured(1), replace(measured(1), local_rank=1)])
    assert gauge.sending == (200 * MB,)


def test_too_few_samples_are_not_believed() -> None:
    assert middle([(1.0,) * (ENOUGH - 1)]) == 0.0
    assert middle([(1.0,) * ENOUGH, (3.0,) * ENOUGH, (100.0,)]) == 2.0


# ---- the job -----------------------------------------------------------------------------------


def beaten(state: JobState, steps: int, **figures: float) -> JobState:
    """Both nodes measured `steps` steps."""
    for step in range(steps):
        for node in state.members:
            incarnation = state.members[node].report.info.incarnation
            one = measured(step, epoch=state.epoch, **figures)  # type: ignore[arg-type]
            state = conditions.observe_backup(state, job.Heartbeat(node, incarnation, step, 0, (one,)))
    return state


def auto() -> JobState:
    state = running()
    return state.of(policy=replace(state.policy, backup="auto"), losses=0, node_seconds=1e9, pauses=(0.1,))


def test_what_was_measured_replaces_what_the_profile_says() -> None:
    state = beaten(auto(), MIN_STEPS, slowed=1.25)
    found = conditions.measured_profile(state)
    assert found.link.bytes_per_s == 100 * MB and found.copy_bytes_per_s == 1000 * MB
    assert found.contention == pytest.approx(0.2), "a second of transfer, in which 0.8 s of work are done"
    assert found.devices == conditions.profile_for(state).devices


def test_without_a_profile_times_are_scaled_to_seconds() -> None:
    state = beaten(auto(), MIN_STEPS)
    state = state.of(policy=replace(state.policy, profile=None))
    paces = {mb.report.info.incarnation: Pace(profiled=False, unit=0.25) for mb in state.members.values()}
    before = conditions.measured_profile(state)
    after = conditions.measured_profile(state.of(paces=paces))
    assert after.devices[0].layers[0].forward_s == 0.25 * before.devices[0].layers[0].forward_s > 0


def test_unknown_links_are_not_weighed() -> None:
    assert conditions.backup_conditions(auto()) is None
    fixed = beaten(auto(), MIN_STEPS)
    assert conditions.backup_conditions(fixed) is not None
    assert (
        conditions.backup_conditions(fixed.of(policy=replace(fixed.policy, backup="stream+snapshot"))) is None
    )


def test_another_pair_is_taken_at_the_end_of_a_step_if_it_saves_enough() -> None:
    """A link of 10 kB/s: eight bytes a layer take longer than computing beside losses that never come."""
    state = beaten(auto(), MIN_STEPS, sent_s=1e6)
    result = backup.change_backup(state, CHECK_INTERVAL_S)
    assert result is not None
    state, actions, reason = result
    assert state.phase is JobPhase.HALTING and state.change is not None and state.change.boundary
    assert state.change.cause.startswith("backup recompute+")
    assert state.change.causes[0].kind is CauseKind.BACKUP
    assert [a.message for a in actions if isinstance(a, Send)] == [m.Halt(state.epoch, True)] * 2
    told = next(a for a in actions if isinstance(a, LogEntry) and a.kind == "backup")
    assert told.data["changed"] is True and told.data["now"].startswith("stream+")
    assert len(told.data["weighed"]) > 1 and "expected time" in reason


def test_a_pair_that_saves_little_stays_and_is_not_weighed_again_until_something_changes() -> None:
    state = beaten(auto(), MIN_STEPS)
    result = backup.change_backup(state, CHECK_INTERVAL_S)
    assert result is not None
    state, actions, reason = result
    assert state.phase is JobPhase.RUNNING and "stays" in reason
    assert [a.data["changed"] for a in actions if isinstance(a, LogEntry)] == [False]
    assert backup.change_backup(state, CHECK_INTERVAL_S + 1) is None, "too soon"
    again = backup.change_backup(state, 3 * CHECK_INTERVAL_S)
    assert again is not None and again[1] == () and again[2] == "", "nothing has changed"


@pytest.mark.parametrize("short", [0, MIN_STEPS - 1])
def test_nothing_is_weighed_before_enough_was_measured(short: int) -> None:
    assert backup.change_backup(beaten(auto(), short, sent_s=1e6), CHECK_INTERVAL_S) is None


def test_schemes_that_the_user_fixed_are_never_weighed() -> None:
    state = auto()
    state = state.of(policy=replace(state.policy, backup="stream+snapshot"))
    after = beaten(state, MIN_STEPS, sent_s=1e6)
    assert backup.change_backup(after, CHECK_INTERVAL_S) is None


def test_a_change_that_its_pause_outweighs_is_left() -> None:
    """Losses every few seconds and a pause of an hour: nothing is worth another one."""
    state = beaten(auto().of(losses=10**6, node_seconds=1e6, pauses=(3600.0,)), MIN_STEPS, sent_s=1e6)
    result = backup.change_backup(state, CHECK_INTERVAL_S)
    assert result is not None and result[0].phase is JobPhase.RUNNING


def test_a_change_that_did_not_bring_the_pair_is_not_made_again() -> None:
    state = beaten(auto(), MIN_STEPS, sent_s=1e6)
    first = backup.change_backup(state, CHECK_INTERVAL_S)
    assert first is not None and first[0].requested_backup == first[0].change.cause.removeprefix("backup ")  # type: ignore[union-attr]
    again = backup.change_backup(state.of(requested_backup=first[0].requested_backup), CHECK_INTERVAL_S)
    assert again is not None and again[0].phase is JobPhase.RUNNING


def test_contention_that_is_all_but_none_is_no_change() -> None:
    state = beaten(auto(), MIN_STEPS, slowed=1.001)
    result = backup.change_backup(state, CHECK_INTERVAL_S)
    assert result is not None
    noisy = result[0].of(gauges={key: replace(g, slowed=(1.1,) * 9) for key, g in result[0].gauges.items()})
    assert (found := backup.change_backup(noisy, 3 * CHECK_INTERVAL_S)) is not None and found[1] == ()


def test_what_left_nodes_measured_is_forgotten_in_time() -> None:
    state = auto().of(gauges={f"gone{i}": Gauge() for i in range(30)})
    assert set(beaten(state, 1).gauges) == {mb.report.info.incarnation for mb in state.members.values()}
