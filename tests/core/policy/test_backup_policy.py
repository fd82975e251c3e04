"""`--backup auto`: measurements, the time of a check, and its result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.health.backup_metrics import (
    KEPT_SAMPLES,
    MIN_SAMPLES,
    BackupMetrics,
    median_of_nodes,
    record_measurements,
)
from elastic.core.health.compute_speed import ComputeSpeed
from elastic.core.job import measured_conditions as conditions
from elastic.core.job import state as job
from elastic.core.job.state import CauseKind, JobPhase, JobState, LogEntry, Send
from elastic.core.job.stragglers import profile_for
from elastic.core.policy import backup_policy as backup
from elastic.core.policy.backup_policy import CHECK_INTERVAL_S, MIN_STEPS
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import BackupTraffic, MicrobatchTiming
from elastic.planning.backup.loss_history import LossHistory
from tests.core.policy.test_straggler_policy import running
from tests.core.state_access import change_of

MB = 1_000_000


def measured(
    step: int, *, epoch: int = 1, sent: int = 10 * MB, sent_s: float = 0.1, slowed: float = 0.0
) -> MicrobatchTiming:
    traffic = BackupTraffic(copied_bytes=10 * MB, copied_s=0.01, sent_bytes=sent, sent_s=sent_s)
    return MicrobatchTiming(epoch, step, 0, 1.0, 2.0, slowed, traffic)


def test_each_step_counts_once() -> None:
    gauge = BackupMetrics()
    for step in (1, 2, 2, 1, 3):
        gauge = record_measurements(gauge, 1, [measured(step)])
    assert (
        gauge.steps == 3 and gauge.sending == (100 * MB,) * 3 and gauge.copying == (1000 * MB,) * 3
    )
    assert record_measurements(gauge, 1, []) is gauge


def test_a_change_of_plan_keeps_the_figures_and_resets_the_steps() -> None:
    gauge = record_measurements(
        record_measurements(BackupMetrics(), 1, [measured(5, slowed=1.5)]),
        2,
        [measured(6, epoch=2, sent=0, sent_s=0.0)],
    )
    assert gauge.steps == 1 and gauge.sending == (100 * MB,) and gauge.slowed == (1.5,)


def test_small_transfers_do_not_count_and_old_samples_are_dropped() -> None:
    assert record_measurements(BackupMetrics(), 1, [measured(1, sent=100)]).sending == ()
    gauge = BackupMetrics()
    for step in range(KEPT_SAMPLES + 5):
        gauge = record_measurements(gauge, 1, [measured(step, sent_s=1.0 if step < 5 else 0.1)])
    assert gauge.sending == (100 * MB,) * KEPT_SAMPLES


def test_workers_of_a_node_share_its_link() -> None:
    gauge = record_measurements(
        BackupMetrics(), 1, [measured(1), replace(measured(1), local_rank=1)]
    )
    assert gauge.sending == (200 * MB,)


def test_too_few_samples_do_not_count() -> None:
    assert median_of_nodes([(1.0,) * (MIN_SAMPLES - 1)]) == 0.0
    assert median_of_nodes([(1.0,) * MIN_SAMPLES, (3.0,) * MIN_SAMPLES, (100.0,)]) == 2.0


# ---- the job -----------------------------------------------------------------------------------


def after_heartbeats(
    state: JobState, steps: int, *, sent_s: float = 0.1, slowed: float = 0.0
) -> JobState:
    """State after both nodes measured `steps` steps."""
    for step in range(steps):
        for node in state.members:
            incarnation = state.members[node].report.info.incarnation
            one = measured(step, epoch=state.epoch, sent_s=sent_s, slowed=slowed)
            state = conditions.observe_backup(
                state, job.Heartbeat(node, incarnation, step, 0, (one,))
            )
    return state


def auto() -> JobState:
    state = running()
    return state.of(
        policy=replace(state.policy, backup="auto"), history=LossHistory(0, 1e9), pauses=(0.1,)
    )


def test_measurements_replace_figures_of_the_profile() -> None:
    state = after_heartbeats(auto(), MIN_STEPS, slowed=1.25)
    found = conditions.measured_profile(state)
    assert found.link.bytes_per_s == 100 * MB and found.copy_bytes_per_s == 1000 * MB
    assert found.contention == pytest.approx(0.2), (
        "a second of transfer, in which 0.8 s of work are done"
    )
    assert found.devices == profile_for(state).devices


def test_without_a_profile_times_are_scaled_to_seconds() -> None:
    state = after_heartbeats(auto(), MIN_STEPS)
    state = state.of(policy=replace(state.policy, profile=None))
    paces = {
        mb.report.info.incarnation: ComputeSpeed(profiled=False, unit=0.25)
        for mb in state.members.values()
    }
    before = conditions.measured_profile(state)
    after = conditions.measured_profile(state.of(paces=paces))
    assert after.devices[0].layers[0].forward_s == 0.25 * before.devices[0].layers[0].forward_s > 0


def test_unknown_links_lead_to_no_choice() -> None:
    assert conditions.backup_conditions(auto()) is None
    fixed = after_heartbeats(auto(), MIN_STEPS)
    assert conditions.backup_conditions(fixed) is not None
    assert (
        conditions.backup_conditions(
            fixed.of(policy=replace(fixed.policy, backup="stream+snapshot"))
        )
        is None
    )


def test_a_pair_that_saves_enough_is_installed_at_the_end_of_a_step() -> None:
    """On a link of 10 kB/s, copies cost more than the losses that they guard against."""
    state = after_heartbeats(auto(), MIN_STEPS, sent_s=1e6)
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


def test_a_small_saving_changes_nothing_and_is_checked_again_only_after_a_change() -> None:
    state = after_heartbeats(auto(), MIN_STEPS)
    result = backup.change_backup(state, CHECK_INTERVAL_S)
    assert result is not None
    state, actions, reason = result
    assert state.phase is JobPhase.RUNNING and "stays" in reason
    assert [a.data["changed"] for a in actions if isinstance(a, LogEntry)] == [False]
    assert backup.change_backup(state, CHECK_INTERVAL_S + 1) is None, "too soon"
    again = backup.change_backup(state, 3 * CHECK_INTERVAL_S)
    assert again is not None and again[1] == () and again[2] == "", "nothing has changed"


@pytest.mark.parametrize("short", [0, MIN_STEPS - 1])
def test_there_is_no_check_before_enough_was_measured(short: int) -> None:
    assert (
        backup.change_backup(after_heartbeats(auto(), short, sent_s=1e6), CHECK_INTERVAL_S) is None
    )


def test_schemes_of_the_user_are_never_changed() -> None:
    state = auto()
    state = state.of(policy=replace(state.policy, backup="stream+snapshot"))
    after = after_heartbeats(state, MIN_STEPS, sent_s=1e6)
    assert backup.change_backup(after, CHECK_INTERVAL_S) is None


def test_a_change_that_saves_less_than_its_pause_is_not_made() -> None:
    """With losses every few seconds and a pause of an hour, no change is worth a pause."""
    state = after_heartbeats(
        auto().of(history=LossHistory(10**6, 1e6), pauses=(3600.0,)), MIN_STEPS, sent_s=1e6
    )
    result = backup.change_backup(state, CHECK_INTERVAL_S)
    assert result is not None and result[0].phase is JobPhase.RUNNING


def test_a_change_that_did_not_install_its_pair_is_not_repeated() -> None:
    state = after_heartbeats(auto(), MIN_STEPS, sent_s=1e6)
    first = backup.change_backup(state, CHECK_INTERVAL_S)
    assert first is not None and first[0].requested_backup == change_of(
        first[0]
    ).cause.removeprefix("backup ")
    again = backup.change_backup(
        state.of(requested_backup=first[0].requested_backup), CHECK_INTERVAL_S
    )
    assert again is not None and again[0].phase is JobPhase.RUNNING


def test_tiny_contention_is_no_changed_figure() -> None:
    state = after_heartbeats(auto(), MIN_STEPS, slowed=1.001)
    result = backup.change_backup(state, CHECK_INTERVAL_S)
    assert result is not None
    noisy = result[0].of(
        gauges={key: replace(g, slowed=(1.1,) * 9) for key, g in result[0].gauges.items()}
    )
    assert (found := backup.change_backup(noisy, 3 * CHECK_INTERVAL_S)) is not None and found[
        1
    ] == ()


def test_measurements_of_departed_nodes_are_dropped() -> None:
    state = auto().of(gauges={f"gone{i}": BackupMetrics() for i in range(30)})
    assert set(after_heartbeats(state, 1).gauges) == {
        mb.report.info.incarnation for mb in state.members.values()
    }
