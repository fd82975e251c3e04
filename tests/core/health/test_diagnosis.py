"""What is wrong with a node: class, action, evidence; and above all, when nothing is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.coordinator.transitions import transition
from elastic.core.health import diagnosis as health
from elastic.core.health.diagnosis import AWAY, Finding, Kind, Limits, Record, Remedy
from elastic.core.job import quarantine
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState, LogEntry, NodeReported, Send
from elastic.core.policy import remediation as remedies
from elastic.core.protocol import device_errors as devicewords
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import DeviceSeen, Disk, HealthReport, LinkSeen, Mishap
from elastic.core.protocol.messages import NodePhase
from elastic.domain import codec
from tests.core.world.world import World

LIMITS = Limits()


def running(nodes: int = 3, most: int = 9) -> JobState:
    """A job in the middle of its training; `most` nodes hold stages, the others are spares."""
    made = World(5, nodes, steps=400, shape="1", max_nodes=most)
    made.run(limit=4.0)
    state = made.coordinator.state
    assert state.phase is JobPhase.RUNNING and state.trimmed == state.epoch and state.plan is not None
    return state.of(policy=replace(state.policy, lease_s=1e9))


def told(actions: tuple[Any, ...], kind: str = "health") -> list[dict[str, Any]]:
    return [action.data for action in actions if isinstance(action, LogEntry) and action.kind == kind]


def halts(actions: tuple[Any, ...]) -> list[bool]:
    return [note["boundary"] for note in told(actions, "halt")]


def report(state: JobState, node: str, **figures: Any) -> HealthReport:
    info = state.members[node].report.info
    return HealthReport(node, info.incarnation, state.updated_at, state.epoch, **figures)


def tell(state: JobState, given: HealthReport, later: float = 0.1) -> tuple[JobState, tuple[Any, ...]]:
    state, actions, _ = transition(state, job.HealthReported(given), state.updated_at + later)
    return state, actions


def fall(state: JobState, node: str, cause: str, times: int = 1) -> tuple[JobState, tuple[Any, ...]]:
    """The workers of `node` go down."""
    was = state.members[node].report
    now = replace(was, phase=NodePhase.STARTING, able=False, fallen=was.fallen + times, cause=cause)
    state, actions, _ = transition(state, NodeReported(now), state.updated_at + 0.1)
    return state, actions


# ---- processes ---------------------------------------------------------------------------------


def test_a_crash_is_a_process_that_is_restarted() -> None:
    state, actions = fall(running(), "node1", "worker 0 ended with signal 9")
    (note,) = told(actions)
    assert (note["node"], note["class"], note["action"]) == ("node1", "process", "restart")
    assert note["evidence"]["cause"] == "worker 0 ended with signal 9" and note["evidence"]["crashes"] == 1
    assert not quarantine.is_quarantined(state, "node1")


def test_a_hang_is_a_process_that_is_restarted() -> None:
    _, actions = fall(running(), "node1", "hang: the process is stopped and silent for 0.5 s")
    (note,) = told(actions)
    assert (note["class"], note["action"]) == ("process", "restart") and "stopped" in note["reason"]


def test_a_crash_loop_is_the_host_which_is_put_aside() -> None:
    state = running()
    for time in range(1, LIMITS.crashes):
        state, actions = fall(state, "node1", "signal 11")
        assert told(actions)[-1]["evidence"]["crashes"] == time
    state, actions = fall(state, "node1", "signal 11")
    note = told(actions)[-1]
    assert (note["class"], note["action"]) == ("host", "quarantine")
    assert note["evidence"]["crashes"] == LIMITS.crashes
    assert note["evidence"]["quarantine_s"] == LIMITS.quarantine_s
    assert quarantine.is_quarantined(state, "node1")


def test_putting_a_node_aside_leaves_the_finding_as_it_was() -> None:
    found = Finding(Kind.DEVICE, Remedy.QUARANTINE, "it is broken", {"errors": 3}, 5.0)
    state, actions = quarantine.add_finding(running(), "node1", found)
    assert found.evidence == {"errors": 3}
    wanted = {"errors": 3, "quarantine_s": LIMITS.quarantine_s, "quarantines": 1}
    assert told(actions)[-1]["evidence"] == wanted
    assert state.health["node1"].findings[0].evidence == wanted


ECC = "AcceleratorError: CUDA error: uncorrectable ECC error encountered"
"""As a worker's last words are (tests/scenarios/test_health_device.py)."""


def test_a_device_is_told_by_the_cause_of_the_crash() -> None:
    """It is restarted at first; if that does not help it is put aside, and not for what it did long ago."""
    state, actions = fall(running(), "node1", ECC)
    (note,) = told(actions)
    assert (note["class"], note["action"]) == ("device", "restart") and note["evidence"]["cause"] == ECC
    state, actions = tell(state, report(state, "node1", devices=(DeviceSeen(0, "H200", 61.0),)))
    assert not told(actions), "the driver does not deny it"
    _, actions = fall(state, "node1", "signal 11", LIMITS.crashes - 1)
    assert told(actions)[-1]["class"] == "host", "that was another fault"
    _, actions = fall(state, "node1", ECC, LIMITS.crashes - 1)
    assert (told(actions)[-1]["class"], told(actions)[-1]["action"]) == ("device", "quarantine")


@pytest.mark.parametrize(
    ("text", "device", "link"),
    [
        (ECC, True, False),
        ("CUDA error: an illegal memory access was encountered", True, False),
        ("CUDA error: unspecified launch failure", True, False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm", True, False),
        (
            "NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited or there was a network error",
            True,
            True,
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False, False),
        ("CUDA error: out of memory", False, False),
        ("CUDA error: device-side assert triggered", False, False),
        ("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling cublasSgemm", False, False),
        ("mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)", False, False),
        ("worker 0 ended with signal 9", False, False),
    ],
)
def test_words(text: str, device: bool, link: bool) -> None:
    assert (devicewords.of_device(text), devicewords.of_link(text)) == (device, link)


def ended(actions: tuple[Any, ...]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, job.JobFinished)]


def finish_step(state: JobState) -> JobState:
    assert state.record is not None
    return state.of(record=replace(state.record, step=state.record.step + 1))


def test_who_crashes_in_one_step_for_ever_ends_the_job() -> None:
    """Not before the fourth time, and not if steps are finished between."""
    state = running(1)
    for _ in range(3 * LIMITS.hopeless):
        state, actions = fall(finish_step(state), "node0", ECC)
        assert not ended(actions) and state.ending is None
    for _ in range(LIMITS.hopeless - 2):
        state, actions = fall(state, "node0", ECC)
        assert not ended(actions)
    state, actions = fall(state, "node0", ECC)
    (why,) = ended(actions)
    assert state.phase is JobPhase.FAILED and "4 times" in why and ECC in why
    assert {a.node for a in actions if isinstance(a, Send) and isinstance(a.message, m.Stop)} == {"node0"}


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_what_crashes_one_node_after_the_other_ends_the_job(nodes: int) -> None:
    """Each is put aside in its turn, but three of them are not at fault for the same."""
    state, crashes = running(nodes), 0
    while state.ending is None:
        node = next(n for n in state.members if not quarantine.is_quarantined(state, n))
        state, _ = fall(state, node, ECC)
        crashes += 1
        assert crashes <= LIMITS.crashes * LIMITS.hopeless_nodes
    assert ECC in state.ending.reason and "no step" in state.ending.reason


def test_falling_back_to_an_older_step_is_no_way_out() -> None:
    record = Record()
    for step in (5, 5, 3, 4, 5):
        record = health.crashed(record, 0.0, LIMITS, step=step)
    assert record.stuck == 5
    assert health.crashed(record, 0.0, LIMITS, step=6).stuck == 1


def test_a_script_that_crashes_everywhere_puts_nobody_aside() -> None:
    state = running()
    for _ in range(LIMITS.crashes + 1):
        for node in ("node0", "node1", "node2"):
            state, actions = fall(state, node, "exit code 1")
            assert {note["class"] for note in told(actions)} <= {"process"}, told(actions)
    assert not any(quarantine.is_quarantined(state, node) for node in state.members)


def test_nobody_is_put_aside_without_whom_no_plan_fits() -> None:
    state, actions = fall(running(1), "node0", "signal 11", LIMITS.crashes)
    (note,) = told(actions)
    assert (note["class"], note["action"]) == ("process", "restart") and "no plan" in note["reason"]
    assert not quarantine.is_quarantined(state, "node0")


def test_crashes_long_ago_do_not_count() -> None:
    record = Record()
    for at in (0.0, 1.0, 2.0 + LIMITS.window_s):
        record = health.crashed(record, at, LIMITS)
    assert not health.crash_loops(record, LIMITS) and len(record.crashes) == 1


# ---- devices, disks, memory, clock ---------------------------------------------------------------


def test_a_broken_device_is_replaced_by_a_spare() -> None:
    state = running(3, most=2)
    assert remedies.spare_nodes(state)
    held = state.plan.nodes()[0] if state.plan else ""
    devices = (DeviceSeen(0, "H200", 61.0, fault="XID 79"),)
    state, actions = tell(state, report(state, held, devices=devices))
    (note,) = told(actions)
    assert (note["class"], note["action"]) == ("device", "replace") and "XID 79" in note["reason"]
    assert note["evidence"]["temperature_c"] == 61.0 and halts(actions) == [True], "at the end of the step"


def test_memory_errors_count_once() -> None:
    state = running()
    devices = (DeviceSeen(0, "H200", 61.0, errors=2),)
    state, actions = tell(state, report(state, "node1", devices=devices))
    assert [note["action"] for note in told(actions)] == ["quarantine"]
    assert told(tell(state, report(state, "node1", devices=devices))[1]) == []


def test_a_hot_device_is_told_of_and_left_alone() -> None:
    state = running()
    hot = (DeviceSeen(0, "H200", 95.0, throttled="too hot"),)
    state, actions = tell(state, report(state, "node1", devices=hot))
    (note,) = told(actions)
    assert (note["class"], note["action"]) == ("device", "none") and not halts(actions)
    state, actions = tell(state, report(state, "node1", devices=(DeviceSeen(0, "H200", 60.0),)))
    assert told(actions)[0]["evidence"] == {"well": True}


def disk(free: int, volume: str = "own") -> tuple[Disk, ...]:
    return (Disk("checkpoints", "/c", free, 1 << 40, volume),)


FULL = (Mishap("checkpoint", "/c", "[Errno 28] No space left on device", 4),)


def test_a_full_disk_is_storage_and_training_goes_on() -> None:
    """It names the path and the free bytes; shared disks are nobody's own."""
    state = running(3, most=2)
    held, other = state.plan.nodes() if state.plan else ("", "")
    state, _ = tell(state, report(state, other, disks=disk(0, "nfs")))
    state, actions = tell(state, report(state, held, disks=disk(0, "nfs"), mishaps=FULL))
    note = told(actions)[-1]
    assert (note["class"], note["action"]) == ("storage", "none") and "training goes on" in note["reason"]
    assert note["evidence"]["path"] == "/c" and note["evidence"]["free_bytes"] == 0
    assert not halts(actions)
    state, actions = tell(state, report(state, held, disks=disk(0, "nfs"), mishaps=FULL))
    assert not told(actions), "told once"
    state, actions, _ = transition(state, job.CheckpointCommitted("/c/step-9", 9), state.updated_at)
    assert {note["reason"] for note in told(actions)} == {"checkpoints are written again"}


def test_a_full_disk_of_its_own_is_replaced_by_a_spare() -> None:
    state = running(3, most=2)
    held = state.plan.nodes()[0] if state.plan else ""
    state, actions = tell(state, report(state, held, disks=disk(0), mishaps=FULL))
    assert told(actions)[-1]["action"] == "replace" and halts(actions) == [True]


def test_without_a_spare_a_full_disk_is_kept() -> None:
    state = running(3)
    _, actions = tell(state, report(state, "node1", disks=disk(0), mishaps=FULL))
    assert told(actions)[-1]["action"] == "none" and not halts(actions)


def test_little_room_is_told_of_before_something_fails() -> None:
    state = running()
    state, actions = tell(state, report(state, "node1", disks=disk(1 << 20)))
    (note,) = told(actions)
    assert (note["class"], note["action"]) == ("storage", "none") and "nothing failed" in note["reason"]
    assert (
        told(tell(state, report(state, "node1", disks=disk(1 << 36)))[1])[0]["reason"]
        == "there is room again"
    )


def test_little_memory_is_told_of() -> None:
    state = running()
    _, actions = tell(state, report(state, "node1", memory_free_bytes=1 << 20, memory_total_bytes=1 << 34))
    (note,) = told(actions)
    assert (note["class"], note["action"]) == ("host", "none") and note["evidence"]["free_bytes"] == 1 << 20


@pytest.mark.parametrize("jump_s", [-86400.0, -30.0, 30.0, 86400.0])
def test_a_clock_that_jumps_is_told_of_and_changes_nothing(jump_s: float) -> None:
    """Once, when it lasts; and told when it is right again."""
    state, notes = running(), []
    plan = state.plan
    for turn in range(20):
        off = jump_s if 3 <= turn < 13 else 0.0
        given = report(state, "node1")
        state, actions = tell(state, replace(given, at=given.at + off))
        notes += told(actions)
        assert not halts(actions)
    assert [note["evidence"].get("well", False) for note in notes] == [False, True]
    assert notes[0]["evidence"]["clock_s"] == pytest.approx(-jump_s, abs=1.0)
    assert state.plan == plan and state.phase is JobPhase.RUNNING


def test_one_late_message_is_no_clock() -> None:
    state = running()
    for late in (0.0, 60.0, 0.0, 0.1, 90.0, 0.0, 0.0):
        given = report(state, "node1")
        state, actions = tell(state, replace(given, at=given.at - late))
        assert not told(actions)


def test_former_members_and_strangers_are_not_heard() -> None:
    state = running()
    bad = report(state, "node1", devices=(DeviceSeen(0, "H200", fault="XID 79"),))
    for stranger in (replace(bad, incarnation="former"), replace(bad, node="nobody")):
        after, actions = tell(state, stranger, 0.0)
        assert not told(actions) and after.health == state.health


figures = st.builds(
    dict,
    load=st.floats(0.0, 1000.0),
    memory_free_bytes=st.integers(1 << 30, 1 << 34),
    memory_total_bytes=st.just(1 << 34),
    disks=st.sampled_from([(), disk(1 << 39), disk(1 << 30)]),
    devices=st.sampled_from([(), (DeviceSeen(0, "H200", 90.0),)]),
    links=st.sampled_from(
        [(), (LinkSeen("node2", 9, 9 << 20, 1.0, 9e6),), (LinkSeen("node2", 3, 3 << 20, 9.0, 3e5),)]
    ),
)


@given(st.lists(st.tuples(st.sampled_from(["node0", "node1", "node2"]), figures), max_size=20))
def test_nothing_is_done_on_a_guess(seen: list[tuple[str, dict[str, Any]]]) -> None:
    """Whatever load, copies and little room are told of: while steps take as long as they did, the plan stays."""
    state = running()
    assert state.plan is not None
    state = state.of(durations=tuple((state.plan.epoch, 1.0) for _ in range(9)))
    for node, given_figures in seen:
        state, actions = tell(state, report(state, node, **given_figures))
        assert not halts(actions) and not [note for note in told(actions) if note["action"] != "none"]
        assert not any(
            isinstance(a, Send) and isinstance(a.message, m.Halt | m.Fenced | m.Stop) for a in actions
        )


def test_the_state_survives_the_store() -> None:
    state = running(3, most=2)
    held = state.plan.nodes()[0] if state.plan else ""
    devices = (DeviceSeen(0, "H200", 61.0, fault="XID 79"),)
    state, _ = tell(state, report(state, held, devices=devices, disks=disk(0), mishaps=FULL))
    assert any(one.action in AWAY for one in quarantine.record_of(state, held).findings)
    assert codec.loads(JobState, codec.dumps(state)) == state
