"""Diagnosis: class, action and evidence of a node's problems, and cases without a problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.coordinator.transitions import transition
from elastic.core.health import diagnosis as health
from elastic.core.health.diagnosis import (
    EXCLUDING_ACTIONS,
    FaultClass,
    Finding,
    HealthAction,
    HealthLimits,
    NodeHealth,
)
from elastic.core.job import quarantine
from elastic.core.job import state as job
from elastic.core.job.epoch_change import plan_request
from elastic.core.job.state import JobPhase, JobState, LogEntry, Send
from elastic.core.policy import remediation as remedies
from elastic.core.protocol import device_errors as devicewords
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import (
    DeviceHealth,
    DiskSpace,
    FailedOperation,
    HealthReport,
    LinkTraffic,
)
from elastic.core.protocol.messages import NodePhase
from elastic.domain import codec
from elastic.planning.search.search import make_plan
from tests.core.state_access import plan_of
from tests.core.world.world import World

LIMITS = HealthLimits()


def running(nodes: int = 3, most: int = 9) -> JobState:
    """A job in training; `most` nodes hold stages, the others are spares."""
    made = World(5, nodes, steps=400, shape="1", max_nodes=most)
    made.run(limit=4.0)
    state = made.coordinator.state
    assert (
        state.phase is JobPhase.RUNNING and state.trimmed == state.epoch and state.plan is not None
    )
    return state.of(policy=replace(state.policy, lease_s=1e9))


def health_notes(actions: tuple[Any, ...], kind: str = "health") -> list[dict[str, Any]]:
    return [
        action.data for action in actions if isinstance(action, LogEntry) and action.kind == kind
    ]


def halts(actions: tuple[Any, ...]) -> list[bool]:
    return [note["boundary"] for note in health_notes(actions, "halt")]


def report(state: JobState, node: str, **figures: Any) -> HealthReport:
    info = state.members[node].report.info
    return HealthReport(node, info.incarnation, state.updated_at, state.epoch, **figures)


def send_report(
    state: JobState, given: HealthReport, later: float = 0.1
) -> tuple[JobState, tuple[Any, ...]]:
    state, actions, _ = transition(state, given, state.updated_at + later)
    return state, actions


def crash_workers(
    state: JobState, node: str, cause: str, times: int = 1
) -> tuple[JobState, tuple[Any, ...]]:
    """Crash the workers of `node` `times` times."""
    was = state.members[node].report
    now = replace(
        was, phase=NodePhase.STARTING, able=False, crash_count=was.crash_count + times, cause=cause
    )
    state, actions, _ = transition(state, now, state.updated_at + 0.1)
    return state, actions


# ---- processes ---------------------------------------------------------------------------------


def test_a_crash_is_class_process_and_restarts() -> None:
    state, actions = crash_workers(running(), "node1", "worker 0 ended with signal 9")
    (note,) = health_notes(actions)
    assert (note["node"], note["class"], note["action"]) == ("node1", "process", "restart")
    assert (
        note["evidence"]["cause"] == "worker 0 ended with signal 9"
        and note["evidence"]["crashes"] == 1
    )
    assert not quarantine.is_quarantined(state, "node1")


def test_a_hang_is_class_process_and_restarts() -> None:
    _, actions = crash_workers(
        running(), "node1", "hang: the process is stopped and silent for 0.5 s"
    )
    (note,) = health_notes(actions)
    assert (note["class"], note["action"]) == ("process", "restart") and "stopped" in note["reason"]


def test_a_crash_loop_is_class_host_and_leads_to_quarantine() -> None:
    state = running()
    for time in range(1, LIMITS.crashes):
        state, actions = crash_workers(state, "node1", "signal 11")
        assert health_notes(actions)[-1]["evidence"]["crashes"] == time
    state, actions = crash_workers(state, "node1", "signal 11")
    note = health_notes(actions)[-1]
    assert (note["class"], note["action"]) == ("host", "quarantine")
    assert note["evidence"]["crashes"] == LIMITS.crashes
    assert note["evidence"]["quarantine_s"] == LIMITS.quarantine_s
    assert quarantine.is_quarantined(state, "node1")


def test_a_quarantine_does_not_change_the_finding_given() -> None:
    found = Finding(FaultClass.DEVICE, HealthAction.QUARANTINE, "it is broken", {"errors": 3}, 5.0)
    state, actions = quarantine.add_finding(running(), "node1", found)
    assert found.evidence == {"errors": 3}
    wanted = {"errors": 3, "quarantine_s": LIMITS.quarantine_s, "quarantines": 1}
    assert health_notes(actions)[-1]["evidence"] == wanted
    assert state.health["node1"].findings[0].evidence == wanted


ECC = "AcceleratorError: CUDA error: uncorrectable ECC error encountered"
"""An error of a worker as in tests/scenarios/health/test_health_device.py."""


def test_the_crash_cause_shows_a_device_fault() -> None:
    """The first fault restarts the worker; repeated ones quarantine the node."""
    state, actions = crash_workers(running(), "node1", ECC)
    (note,) = health_notes(actions)
    assert (note["class"], note["action"]) == ("device", "restart") and note["evidence"][
        "cause"
    ] == ECC
    state, actions = send_report(
        state, report(state, "node1", devices=(DeviceHealth(0, "H200", 61.0),))
    )
    assert not health_notes(actions), "the driver reports no fault"
    _, actions = crash_workers(state, "node1", "signal 11", LIMITS.crashes - 1)
    assert health_notes(actions)[-1]["class"] == "host", "that was another fault"
    _, actions = crash_workers(state, "node1", ECC, LIMITS.crashes - 1)
    assert (health_notes(actions)[-1]["class"], health_notes(actions)[-1]["action"]) == (
        "device",
        "quarantine",
    )


@pytest.mark.parametrize(
    ("text", "device", "link"),
    [
        (ECC, True, False),
        ("CUDA error: an illegal memory access was encountered", True, False),
        ("CUDA error: unspecified launch failure", True, False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm", True, False),
        (
            "NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited or network error",
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
def test_error_texts_are_classified(text: str, device: bool, link: bool) -> None:
    assert (devicewords.is_device_error(text), devicewords.is_link_error(text)) == (device, link)


def finish_reasons(actions: tuple[Any, ...]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, job.JobFinished)]


def finish_step(state: JobState) -> JobState:
    assert state.record is not None
    return state.of(record=replace(state.record, step=state.record.step + 1))


def test_endless_crashes_in_one_step_end_the_job() -> None:
    """The fourth crash ends it; finished steps between crashes prevent that."""
    state = running(1)
    for _ in range(3 * LIMITS.hopeless):
        state, actions = crash_workers(finish_step(state), "node0", ECC)
        assert not finish_reasons(actions) and state.ending is None
    for _ in range(LIMITS.hopeless - 2):
        state, actions = crash_workers(state, "node0", ECC)
        assert not finish_reasons(actions)
    state, actions = crash_workers(state, "node0", ECC)
    (why,) = finish_reasons(actions)
    assert state.phase is JobPhase.FAILED and "4 times" in why and ECC in why
    assert {a.node for a in actions if isinstance(a, Send) and isinstance(a.message, m.Stop)} == {
        "node0"
    }


def test_a_short_lack_of_descriptors_does_not_end_the_job() -> None:
    """Found by simulation seed 3795335329: the only node that could train crashed four times within
    4 s, while other processes of its machine held all descriptors for 15 s."""
    shortage = "SlotError: cannot create a slot for a copy of 7104 bytes (Too many open files)"
    state, began = running(1), 0.0
    for _ in range(2 * LIMITS.hopeless):
        state, actions = crash_workers(state, "node0", shortage)
        began = began or state.updated_at
        assert not finish_reasons(actions) and state.updated_at - began < remedies.SHORTAGE_S
    state = state.of(updated_at=began + remedies.SHORTAGE_S)
    state, actions = crash_workers(state, "node0", shortage)
    (why,) = finish_reasons(actions)
    assert "9 times" in why and shortage in why


@pytest.mark.parametrize("cause", ["SlotError: x", "OSError: [Errno 24] Too many open files"])
def test_a_lack_that_comes_once_per_attempt_ends_the_job(cause: str) -> None:
    """Each attempt takes so long that the crash before it is out of the record."""
    state = running(1)
    for number in range(LIMITS.hopeless):
        state = state.of(updated_at=state.updated_at + 2 * LIMITS.window_s)
        state, actions = crash_workers(state, "node0", cause)
        assert bool(finish_reasons(actions)) == (number == LIMITS.hopeless - 1)


def replanned(state: JobState) -> JobState:
    """All workers are back, and the nodes that are not quarantined train."""
    members = {
        node: replace(
            mb, report=replace(mb.report, phase=NodePhase.RUNNING, able=True, epoch=state.epoch)
        )
        for node, mb in state.members.items()
    }
    state = state.of(members=members, phase=JobPhase.RUNNING, change=None)
    return state.of(plan=make_plan(plan_request(state, state.epoch)))


@pytest.mark.parametrize("text", [ECC, "signal 11"])
@pytest.mark.parametrize("nodes", [2, 3, 8, 16])
def test_crashes_of_one_node_after_another_end_the_job(nodes: int, text: str) -> None:
    """The work of each quarantined node makes the next one crash. The third is not the cause."""
    state, crashes = running(nodes, nodes), 0
    while state.ending is None:
        state = replanned(state)
        state, _ = crash_workers(state, plan_of(state).nodes()[0], text)
        crashes += 1
        assert crashes <= LIMITS.crashes * LIMITS.fatal_nodes
    assert text in state.ending.reason and "no step" in state.ending.reason


def test_a_finished_step_between_shows_that_the_nodes_are_the_cause() -> None:
    """Three broken nodes of eight are left out, one after another."""
    state = running(8, 8)
    for _ in range(LIMITS.fatal_nodes):
        node = plan_of(state).nodes()[0]
        for _ in range(LIMITS.crashes):
            state, _ = crash_workers(replanned(state), node, ECC)
        assert quarantine.is_quarantined(state, node)
        state = finish_step(replanned(state))
    assert state.ending is None


NO_ROOM = "VaultFull: no room for a copy of 4096 bytes"


def short_of_memory(nodes: int) -> JobState:
    """A job in training of which each node can hold a part: 2 of 3 nodes, 4 of 5."""
    state = running(nodes)
    memory = {3: 80, 5: 48}[nodes]
    members = {
        node: replace(
            mb, report=replace(mb.report, info=replace(mb.report.info, memory_bytes=memory))
        )
        for node, mb in state.members.items()
    }
    return planned(state.of(members=members, policy=replace(state.policy, shape="auto")))


def planned(state: JobState, *starting: str) -> JobState:
    """The nodes except `starting` train."""
    members = {
        node: replace(mb, report=replace(mb.report, phase=NodePhase.STARTING, able=False))
        if node in starting
        else mb
        for node, mb in state.members.items()
    }
    state = state.of(members=members)
    return state.of(plan=make_plan(plan_request(state, state.epoch)))


def cut_off(state: JobState, node: str) -> JobState:
    """Reset the control connection of the node, which may come back."""
    closed = job.ConnectionClosed(node, state.members[node].report.info.incarnation)
    state, _, _ = transition(state, closed, state.updated_at + 0.01)
    assert not state.members[node].connected
    return state


def test_crashes_of_a_node_without_layers_do_not_end_the_job() -> None:
    """Another node is cut off for a moment, without which no plan fits."""
    state = planned(short_of_memory(3), "node2")
    state, _ = crash_workers(state, "node2", NO_ROOM, LIMITS.crashes)
    assert quarantine.is_quarantined(state, "node2")
    state, _ = crash_workers(cut_off(state, "node1"), "node2", NO_ROOM)
    assert state.ending is None and state.phase is JobPhase.RUNNING


def test_crashes_of_three_joining_nodes_do_not_end_the_job() -> None:
    """The others train. All three crashed within one step."""
    joining = ("node5", "node6", "node7")
    state = planned(running(8), *joining)
    for node in joining:
        state, _ = crash_workers(state, node, NO_ROOM, LIMITS.crashes)
        state, _ = crash_workers(state, node, ECC)
    assert state.ending is None and state.phase is JobPhase.RUNNING


def test_nodes_that_start_or_are_cut_off_replace_a_node_in_a_crash_loop() -> None:
    """So its fourth crash does not end the job, during training or before it."""
    state = short_of_memory(3)
    crashed = cut_off(state, "node1")
    for _ in range(LIMITS.hopeless):
        crashed, _ = crash_workers(crashed, "node2", NO_ROOM)
    assert crashed.ending is None
    starting = planned(state, "node1").of(phase=JobPhase.LAUNCHED, plan=None)
    for _ in range(LIMITS.hopeless):
        starting, _ = crash_workers(starting, "node2", NO_ROOM)
    assert starting.ending is None


def test_two_crash_loops_end_a_job_that_needs_one_of_the_nodes() -> None:
    """Each node starts while the other one crashes, but neither replaces the other."""
    state = short_of_memory(5)
    for _ in range(LIMITS.hopeless - 1):
        for node in ("node0", "node1"):
            state, _ = crash_workers(state, node, "signal 11")
            assert state.ending is None
    state, _ = crash_workers(state, "node0", "signal 11")
    assert state.ending is not None and "no plan fits without it" in state.ending.reason


def test_the_same_device_error_on_both_nodes_ends_the_job() -> None:
    """One of the two has it twice. Numbers in the text do not count, other errors do."""
    state = running(2)
    for node, text in (("node0", f"{ECC} at 0x17"), ("node1", f"{ECC} at 0x18")):
        state, actions = crash_workers(state, node, text)
        assert not finish_reasons(actions)
    other, actions = crash_workers(state, "node1", "CUDA error: an illegal memory access")
    assert not finish_reasons(actions) and other.ending is None
    moved, actions = crash_workers(finish_step(state), "node1", f"{ECC} at 0x18")
    assert not finish_reasons(actions) and moved.ending is None
    state, actions = crash_workers(state, "node1", f"{ECC} at 0x19")
    (why,) = finish_reasons(actions)
    assert "same device error occurs on node0 node1" in why and ECC in why
    assert "no step is finished between" in why


@pytest.mark.parametrize("text", [ECC, "CUDA driver initialization failed", "signal 11"])
def test_crashes_of_a_minority_do_not_end_the_job(text: str) -> None:
    """One broken rack or switch is no reason to end a large job."""
    state = running(12, 12)
    crashing = plan_of(state).nodes()[:3]
    for _ in range(LIMITS.crashes):
        for node in crashing:
            state, _ = crash_workers(state, node, text)
    assert state.ending is None
    assert all(quarantine.is_quarantined(state, node) for node in crashing)


def test_repeated_crashes_of_most_nodes_end_the_job() -> None:
    """The third of five nodes is one too many, although all crash under the same plan."""
    state = running(5)
    first, second, third, _ = plan_of(state).nodes()
    for _ in range(LIMITS.crashes):
        for node in (first, second):
            state, _ = crash_workers(state, node, "signal 11")
    state, _ = crash_workers(state, third, "signal 11", LIMITS.crashes - 1)
    assert state.ending is None
    state, _ = crash_workers(state, third, "signal 11")
    names = " ".join(sorted((first, second, third)))
    assert state.ending is not None and f"workers crash on {names}" in state.ending.reason


def test_nodes_that_crash_at_the_same_time_count_as_one() -> None:
    """Those that take their place crash, too, and at last the nodes are not the cause."""
    state, rounds = running(12, 12), 0
    while state.ending is None:
        state, rounds = replanned(state), rounds + 1
        nodes = plan_of(state).nodes()
        for _ in range(LIMITS.crashes):
            for node in nodes[:2]:
                if state.ending is None:
                    state, _ = crash_workers(state, node, "signal 11")
    assert rounds == LIMITS.fatal_nodes


def test_the_same_device_error_on_a_minority_does_not_end_the_job() -> None:
    """One of three nodes has it twice."""
    state = running(12, 12)
    bad = plan_of(state).nodes()[:3]
    for node in (*bad, bad[0]):
        state, _ = crash_workers(state, node, ECC)
    assert state.ending is None


NCCL = "NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited or network error"


@pytest.mark.parametrize("own", ["", "signal 9"])
def test_link_errors_of_all_other_nodes_accuse_the_last_one(own: str) -> None:
    """It is the cause, whether its own workers crash or not, and the others train without it."""
    state = running(4)
    bad, *good = plan_of(state).nodes()
    for _ in range(LIMITS.crashes):
        state = replanned(state)
        if own:
            state, _ = crash_workers(state, bad, own)
        for node in good:
            state, _ = crash_workers(state, node, NCCL)
    assert state.ending is None and quarantine.is_quarantined(state, bad)
    assert not any(quarantine.is_quarantined(state, node) for node in good)
    state = replanned(state)
    assert set(plan_of(state).nodes()) == set(good)
    # Without the node nothing is better. Its own crashes have explained the errors until now.
    for _ in range(LIMITS.hopeless if own else 1):
        assert state.ending is None
        for node in good:
            state, _ = crash_workers(state, node, NCCL)
        state = state if state.ending is not None else replanned(state)
    assert state.ending is not None and NCCL in state.ending.reason


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("nodes", [3, 4])
def test_one_kill_after_another_quarantines_no_node(nodes: int, last: bool) -> None:
    """Each is in another step, and workers of the other nodes report errors of their links. The
    report of the killed node comes first or last."""
    state = running(nodes)
    names = plan_of(state).nodes()
    for victim in (*names, *names):
        state = finish_step(replanned(state))
        others = [node for node in names if node != victim]
        for node in [*others, victim] if last else [victim, *others]:
            cause = "worker 0 ended with signal 9" if node == victim else NCCL
            state, _ = crash_workers(state, node, cause)
        assert not any(quarantine.is_quarantined(state, node) for node in names), victim
    assert state.ending is None


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(("nodes", "times"), [(3, 1), (6, 1), (8, 2)])
def test_one_kill_after_another_in_a_step_quarantines_no_node(
    nodes: int, times: int, last: bool
) -> None:
    """The step is never finished. All other nodes report errors of their links each time."""
    state = running(nodes)
    names = plan_of(state).nodes()
    for victim in names * times:
        state = replanned(state)
        others = [node for node in names if node != victim]
        for node in [*others, victim] if last else [victim, *others]:
            cause = "worker 0 ended with signal 9" if node == victim else NCCL
            state, _ = crash_workers(state, node, cause)
            assert state.ending is None, (victim, node)
        assert not any(quarantine.is_quarantined(state, node) for node in names), victim


def test_one_loss_after_another_in_a_step_accuses_no_other_node() -> None:
    """The nodes that stay report errors of their links before each loss is known."""
    state = running(9)
    stays = plan_of(state).nodes()[-1]
    for _ in range(LIMITS.hopeless + 1):
        state = replanned(state)
        lost, *others = sorted(plan_of(state).nodes(), key=lambda node: node == stays)
        for node in others:
            state, _ = crash_workers(state, node, NCCL)
        incarnation = state.members[lost].report.info.incarnation
        for event in (job.ConnectionClosed, job.PortRefused):
            state, _, _ = transition(state, event(lost, incarnation), state.updated_at + 0.1)
        assert lost not in state.members and state.ending is None
        assert not any(quarantine.is_quarantined(state, node) for node in state.members)
    assert quarantine.record_of(state, stays).stuck == LIMITS.hopeless + 1


def test_link_errors_of_nodes_in_turn_do_not_end_the_job() -> None:
    """The neighbours of one bad node crash, and so do those that take their place."""
    state = running(8, 8)
    for number in range(LIMITS.fatal_nodes):
        for _ in range(LIMITS.crashes):
            state = replanned(state)
            state, _ = crash_workers(state, plan_of(state).nodes()[0], NCCL)
        assert state.ending is None, number


def test_a_fall_back_to_an_older_step_does_not_reset_the_count() -> None:
    record = NodeHealth()
    for step in (5, 5, 3, 4, 5):
        record = health.record_crash(record, 0.0, LIMITS, step=step)
    assert record.stuck == 5
    assert health.record_crash(record, 0.0, LIMITS, step=6).stuck == 1


def test_a_script_that_crashes_everywhere_quarantines_no_node() -> None:
    state = running()
    for _ in range(LIMITS.crashes + 1):
        for node in ("node0", "node1", "node2"):
            state, actions = crash_workers(state, node, "exit code 1")
            assert {note["class"] for note in health_notes(actions)} <= {"process"}, health_notes(
                actions
            )
    assert not any(quarantine.is_quarantined(state, node) for node in state.members)


@pytest.mark.parametrize("pause_s", [5.0, 3600.0])
def test_earlier_crashes_of_another_node_excuse_no_crash_loop(pause_s: float) -> None:
    """The other node has been well since the loop began."""
    state = running()
    for _ in range(2):
        state, _ = crash_workers(finish_step(state), "node1", "worker 0 ended with signal 9")
    state = state.of(updated_at=state.updated_at + pause_s)
    for _ in range(LIMITS.crashes):
        state, actions = crash_workers(finish_step(state), "node2", "no memory")
    assert health_notes(actions)[-1]["action"] == "quarantine"
    assert quarantine.is_quarantined(state, "node2")


def test_a_node_that_every_plan_needs_is_not_quarantined() -> None:
    state, actions = crash_workers(running(1), "node0", "signal 11", LIMITS.crashes)
    (note,) = health_notes(actions)
    assert (note["class"], note["action"]) == ("process", "restart") and "no plan" in note["reason"]
    assert not quarantine.is_quarantined(state, "node0")


def test_crashes_long_ago_do_not_count() -> None:
    record = NodeHealth()
    for at in (0.0, 1.0, 2.0 + LIMITS.window_s):
        record = health.record_crash(record, at, LIMITS)
    assert len(record.crashes) == 1


# ---- devices, disks, memory, clock ---------------------------------------------------------------


def test_a_broken_device_is_replaced_by_a_spare() -> None:
    state = running(3, most=2)
    assert remedies.spare_nodes(state)
    held = state.plan.nodes()[0] if state.plan else ""
    devices = (DeviceHealth(0, "H200", 61.0, fault="XID 79"),)
    state, actions = send_report(state, report(state, held, devices=devices))
    (note,) = health_notes(actions)
    assert (note["class"], note["action"]) == ("device", "replace") and "XID 79" in note["reason"]
    assert note["evidence"]["temperature_c"] == 61.0 and halts(actions) == [True], (
        "at the end of the step"
    )


def test_memory_errors_count_once() -> None:
    state = running()
    devices = (DeviceHealth(0, "H200", 61.0, errors=2),)
    state, actions = send_report(state, report(state, "node1", devices=devices))
    assert [note["action"] for note in health_notes(actions)] == ["quarantine"]
    assert health_notes(send_report(state, report(state, "node1", devices=devices))[1]) == []


def test_a_throttled_device_leads_to_a_warning_only() -> None:
    state = running()
    hot = (DeviceHealth(0, "H200", 95.0, throttled="too hot"),)
    state, actions = send_report(state, report(state, "node1", devices=hot))
    (note,) = health_notes(actions)
    assert (note["class"], note["action"]) == ("device", "none") and not halts(actions)
    state, actions = send_report(
        state, report(state, "node1", devices=(DeviceHealth(0, "H200", 60.0),))
    )
    assert health_notes(actions)[0]["evidence"] == {"well": True}


def disk(free: int, volume: str = "own") -> tuple[DiskSpace, ...]:
    return (DiskSpace("checkpoints", "/c", free, 1 << 40, volume),)


FULL = (FailedOperation("checkpoint", "/c", "[Errno 28] No space left on device", 4),)


def test_a_full_disk_is_class_storage_and_training_goes_on() -> None:
    """The finding names path and free bytes. A shared disk does not exclude a node."""
    state = running(3, most=2)
    held, other = state.plan.nodes() if state.plan else ("", "")
    state, _ = send_report(state, report(state, other, disks=disk(0, "nfs")))
    state, actions = send_report(
        state, report(state, held, disks=disk(0, "nfs"), failed_operations=FULL)
    )
    note = health_notes(actions)[-1]
    assert (note["class"], note["action"]) == ("storage", "none") and "training goes on" in note[
        "reason"
    ]
    assert note["evidence"]["path"] == "/c" and note["evidence"]["free_bytes"] == 0
    assert not halts(actions)
    state, actions = send_report(
        state, report(state, held, disks=disk(0, "nfs"), failed_operations=FULL)
    )
    assert not health_notes(actions), "reported once"
    state, actions, _ = transition(state, job.CheckpointCommitted("/c/step-9", 9), state.updated_at)
    assert {note["reason"] for note in health_notes(actions)} == {"checkpoints are written again"}


def test_a_full_disk_of_its_own_is_replaced_by_a_spare() -> None:
    state = running(3, most=2)
    held = state.plan.nodes()[0] if state.plan else ""
    state, actions = send_report(state, report(state, held, disks=disk(0), failed_operations=FULL))
    assert health_notes(actions)[-1]["action"] == "replace" and halts(actions) == [True]


def test_without_a_spare_a_node_with_a_full_disk_stays() -> None:
    state = running(3)
    _, actions = send_report(state, report(state, "node1", disks=disk(0), failed_operations=FULL))
    assert health_notes(actions)[-1]["action"] == "none" and not halts(actions)


def test_low_disk_space_leads_to_a_warning() -> None:
    state = running()
    state, actions = send_report(state, report(state, "node1", disks=disk(1 << 20)))
    (note,) = health_notes(actions)
    assert (note["class"], note["action"]) == ("storage", "none") and "nothing failed" in note[
        "reason"
    ]
    assert (
        health_notes(send_report(state, report(state, "node1", disks=disk(1 << 36)))[1])[0][
            "reason"
        ]
        == "there is room again"
    )


def test_low_memory_leads_to_a_warning() -> None:
    state = running()
    _, actions = send_report(
        state, report(state, "node1", memory_free_bytes=1 << 20, memory_total_bytes=1 << 34)
    )
    (note,) = health_notes(actions)
    assert (note["class"], note["action"]) == ("host", "none") and note["evidence"][
        "free_bytes"
    ] == 1 << 20


def test_enough_memory_does_not_end_the_finding_that_a_node_is_slow() -> None:
    state = running()
    slow = Finding(FaultClass.HOST, HealthAction.NONE, "it is slow", {"slow": 2.0})
    state, _ = quarantine.add_finding(state, "node1", slow)
    state, actions = send_report(
        state, report(state, "node1", memory_free_bytes=1 << 33, memory_total_bytes=1 << 34)
    )
    assert not health_notes(actions)
    assert quarantine.record_of(state, "node1").finding(FaultClass.HOST) == slow


@pytest.mark.parametrize("jump_s", [-86400.0, -30.0, 30.0, 86400.0])
def test_a_clock_jump_leads_to_a_warning_only(jump_s: float) -> None:
    """A lasting jump warns once, and its end is reported."""
    state, notes = running(), []
    plan = state.plan
    for turn in range(20):
        off = jump_s if 3 <= turn < 13 else 0.0
        given = report(state, "node1")
        state, actions = send_report(state, replace(given, at=given.at + off))
        notes += health_notes(actions)
        assert not halts(actions)
    assert [note["evidence"].get("well", False) for note in notes] == [False, True]
    assert notes[0]["evidence"]["clock_s"] == pytest.approx(-jump_s, abs=1.0)
    assert state.plan == plan and state.phase is JobPhase.RUNNING


def test_single_late_messages_are_no_clock_jump() -> None:
    state = running()
    for late in (0.0, 60.0, 0.0, 0.1, 90.0, 0.0, 0.0):
        given = report(state, "node1")
        state, actions = send_report(state, replace(given, at=given.at - late))
        assert not health_notes(actions)


def test_reports_of_non_members_are_ignored() -> None:
    state = running()
    bad = report(state, "node1", devices=(DeviceHealth(0, "H200", fault="XID 79"),))
    for stranger in (replace(bad, incarnation="former"), replace(bad, node="nobody")):
        after, actions = send_report(state, stranger, 0.0)
        assert not health_notes(actions) and after.health == state.health


figures: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    load=st.floats(0.0, 1000.0),
    memory_free_bytes=st.integers(1 << 30, 1 << 34),
    memory_total_bytes=st.just(1 << 34),
    disks=st.sampled_from([(), disk(1 << 39), disk(1 << 30)]),
    devices=st.sampled_from([(), (DeviceHealth(0, "H200", 90.0),)]),
    links=st.sampled_from(
        [
            (),
            (LinkTraffic("node2", 9, 9 << 20, 1.0, 9e6),),
            (LinkTraffic("node2", 3, 3 << 20, 9.0, 3e5),),
        ]
    ),
)


@given(st.lists(st.tuples(st.sampled_from(["node0", "node1", "node2"]), figures), max_size=20))
def test_no_action_without_slower_steps(seen: list[tuple[str, dict[str, Any]]]) -> None:
    """Load, slow copies and low space change no plan while steps take as long as before."""
    state = running()
    assert state.plan is not None
    state = state.of(durations=tuple((state.plan.epoch, 1.0) for _ in range(9)))
    for node, given_figures in seen:
        state, actions = send_report(state, report(state, node, **given_figures))
        assert not halts(actions) and not [
            note for note in health_notes(actions) if note["action"] != "none"
        ]
        assert not any(
            isinstance(a, Send) and isinstance(a.message, m.Halt | m.Fenced | m.Stop)
            for a in actions
        )


def test_the_state_survives_the_store() -> None:
    state = running(3, most=2)
    held = state.plan.nodes()[0] if state.plan else ""
    devices = (DeviceHealth(0, "H200", 61.0, fault="XID 79"),)
    state, _ = send_report(
        state, report(state, held, devices=devices, disks=disk(0), failed_operations=FULL)
    )
    assert any(
        one.action in EXCLUDING_ACTIONS for one in quarantine.record_of(state, held).findings
    )
    assert codec.loads(JobState, codec.dumps(state)) == state
