"""What is wrong with a node: class, action, evidence; and above all, when nothing is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core import codec, health, job, quarantine, remedies
from elastic.core import messages as m
from elastic.core.coordinator import transition
from elastic.core.health import AWAY, Limits, Record
from elastic.core.job import JobPhase, JobState, Note, Reported, Send
from elastic.core.messages import NodePhase
from elastic.core.vitals import (
    Check,
    DeviceSeen,
    Disk,
    HealthReport,
    LinkSeen,
    Mishap,
    Preflight,
    Refused,
)
from tests.core.world import World

LIMITS = Limits()


def running(nodes: int = 3, most: int = 9) -> JobState:
    """A job in the middle of its training; `most` nodes hold stages, the others are spares."""
    made = World(5, nodes, steps=400, shape="1", max_nodes=most)
    made.run(limit=4.0)
    state = made.boss.state
    assert state.phase is JobPhase.RUNNING and state.trimmed == state.epoch and state.plan is not None
    return state.of(policy=replace(state.policy, lease_s=1e9))


def told(actions: tuple[Any, ...], kind: str = "health") -> list[dict[str, Any]]:
    return [action.data for action in actions if isinstance(action, Note) and action.kind == kind]


def halts(actions: tuple[Any, ...]) -> list[bool]:
    return [note["boundary"] for note in told(actions, "halt")]


def report(state: JobState, node: str, **figures: Any) -> HealthReport:
    info = state.members[node].report.info
    return HealthReport(node, info.incarnation, state.ticked, state.epoch, **figures)


def tell(state: JobState, given: HealthReport, later: float = 0.1) -> tuple[JobState, tuple[Any, ...]]:
    state, actions, _ = transition(state, job.HealthSeen(given), state.ticked + later)
    return state, actions


def fall(state: JobState, node: str, cause: str, times: int = 1) -> tuple[JobState, tuple[Any, ...]]:
    """The workers of `node` go down."""
    was = state.members[node].report
    now = replace(was, phase=NodePhase.STARTING, able=False, fallen=was.fallen + times, cause=cause)
    state, actions, _ = transition(state, Reported(now), state.ticked + 0.1)
    return state, actions


# ---- processes ---------------------------------------------------------------------------------


def test_a_crash_is_a_process_that_is_restarted() -> None:
    state, actions = fall(running(), "node1", "worker 0 ended with signal 9")
    (note,) = told(actions)
    assert (note["node"], note["class"], note["action"]) == ("node1", "process", "restart")
    assert note["evidence"]["cause"] == "worker 0 ended with signal 9" and note["evidence"]["crashes"] == 1
    assert not quarantine.holds(state, "node1")


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
    assert quarantine.holds(state, "node1")


def test_a_crash_loop_of_the_device_is_told_by_its_cause() -> None:
    _, actions = fall(running(), "node1", "CUDA error: an illegal instruction", LIMITS.crashes)
    assert told(actions)[-1]["class"] == "device"


def test_a_script_that_crashes_everywhere_puts_nobody_aside() -> None:
    state = running()
    for _ in range(LIMITS.crashes + 1):
        for node in ("node0", "node1", "node2"):
            state, actions = fall(state, node, "exit code 1")
            assert {note["class"] for note in told(actions)} <= {"process"}, told(actions)
    assert not any(quarantine.holds(state, node) for node in state.members)


def test_nobody_is_put_aside_without_whom_no_plan_fits() -> None:
    state, actions = fall(running(1), "node0", "signal 11", LIMITS.crashes)
    (note,) = told(actions)
    assert (note["class"], note["action"]) == ("process", "restart") and "no plan" in note["reason"]
    assert not quarantine.holds(state, "node0")


def test_crashes_long_ago_do_not_count() -> None:
    record = Record()
    for at in (0.0, 1.0, 2.0 + LIMITS.window_s):
        record = health.crashed(record, at, LIMITS)
    assert not health.crash_loops(record, LIMITS) and len(record.crashes) == 1


# ---- quarantine --------------------------------------------------------------------------------


def test_quarantines_double_up_to_the_most_and_are_forgiven() -> None:
    record, lengths, now = Record(), [], 0.0
    for _ in range(9):
        record, seconds = health.quarantine(record, now, LIMITS)
        lengths.append(seconds)
        now += seconds
        record = health.released(record, now)
    assert lengths == [min(30.0 * 2**i, LIMITS.quarantine_most_s) for i in range(9)]
    later, seconds = health.quarantine(record, now + 8 * LIMITS.good_s, LIMITS)
    assert seconds == 60.0 and later.quarantines == 2
    assert health.quarantine(record, now + 9 * LIMITS.good_s, LIMITS)[1] == 30.0


@given(st.lists(st.floats(0.0, 5000.0), max_size=12))
def test_a_quarantine_is_never_outside_its_bounds(waits: list[float]) -> None:
    record, now = Record(), 0.0
    for wait in waits:
        now += wait
        record, seconds = health.quarantine(record, now, LIMITS)
        assert LIMITS.quarantine_s <= seconds <= LIMITS.quarantine_most_s and record.until == now + seconds
        record = health.released(record, record.until)
        now = record.offended
        assert codec.loads(Record, codec.dumps(record)) == record


def test_a_node_out_of_quarantine_is_considered_again() -> None:
    state, _ = fall(running(), "node1", "signal 11", LIMITS.crashes)
    record = quarantine.of(state, "node1")
    state = settled(state.of(considered=(state.members["node1"].report.info.incarnation,)), without="node1")
    state, _, _ = transition(state, job.Tick(), record.until - 0.1)
    assert quarantine.holds(state, "node1") and state.considered
    state, actions, _ = transition(state, job.Tick(), record.until + 0.1)
    assert not quarantine.holds(state, "node1") and state.joining == ("node1",)
    (note,) = told(actions)
    assert note["action"] == "none" and "may be used again" in note["reason"]


def settled(state: JobState, without: str) -> JobState:
    """As after the change that took `without` out: its workers are there again, and idle."""
    from elastic.core.change import request
    from elastic.planning.search import make_plan

    members = {}
    for node, mb in state.members.items():
        phase = NodePhase.IDLE if node == without else NodePhase.RUNNING
        mine = replace(mb.report, epoch=state.epoch, phase=phase, able=True, protected=state.epoch)
        members[node] = replace(mb, report=mine, seen=1e9)
    state = state.of(members=members, phase=JobPhase.RUNNING, change=None, trimmed=state.epoch)
    return state.of(plan=make_plan(request(state, state.epoch)))


def test_a_doubtful_node_is_better_than_none() -> None:
    """The others are lost while it is in quarantine: it is let out at once."""
    state, _ = fall(running(2), "node1", "signal 11", LIMITS.crashes)
    state = settled(state, "node1")
    assert state.plan is not None and state.plan.nodes() == ("node0",)
    state, _, _ = transition(
        state, job.Closed("node0", state.members["node0"].report.info.incarnation), state.ticked
    )
    state, _, _ = transition(state, job.Tick(), state.ticked + 0.3)
    assert state.phase is JobPhase.HALTING and "node0" not in state.members
    halted = replace(state.members["node1"].report, epoch=state.epoch, phase=NodePhase.HALTED)
    state, actions, _ = transition(state, Reported(halted), state.ticked + 0.1)
    assert not quarantine.holds(state, "node1"), "it was let out"
    assert any("no plan" in note["reason"] or "nobody" in note["reason"] for note in told(actions))


def test_a_flapping_node_is_put_aside_when_it_comes_back() -> None:
    state, notes = running(), []
    for _ in range(LIMITS.departures):
        state, more = remedies.departed(state, "node1", "connection closed", state.ticked)
        notes += told(more)
    (note,) = notes
    assert (note["class"], note["action"]) == ("host", "quarantine") and note["evidence"]["departures"] == 3
    assert quarantine.holds(state, "node1")


def test_a_network_that_loses_everybody_puts_nobody_aside() -> None:
    state = running()
    for _ in range(LIMITS.departures + 1):
        for node in ("node0", "node1", "node2"):
            state, actions = remedies.departed(state, node, "silent", state.ticked)
            assert not actions
    assert not any(record.quarantined for record in state.health.values())


def test_records_of_nodes_that_went_are_forgotten() -> None:
    state = running()
    for number in range(500):
        state, _ = remedies.departed(state, f"spot-{number}", "gone", state.ticked + 100.0 * number)
    assert len(state.health) <= len(state.members) + remedies.KEPT_MORE + 1


# ---- devices, disks, memory, clock ---------------------------------------------------------------


def test_a_broken_device_is_replaced_by_a_spare() -> None:
    state = running(3, most=2)
    assert remedies.spares(state)
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
    state, actions, _ = transition(state, job.CheckpointCommitted("/c/step-9", 9), state.ticked)
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


# ---- pre-flight --------------------------------------------------------------------------------


def asks(flight: Preflight, node: str = "new") -> Reported:
    info = replace(running().members["node0"].report.info, node=node, incarnation=f"{node}.1")
    return Reported(m.NodeReport(info, NodePhase.EMPTY, 0, preflight=flight), True)


BAD = Check("disk:memory", 0.0, "bytes", False, True, "/dev/shm has 0 bytes left: make room")
WARN = Check("disk:checkpoints", 0.0, "bytes", False, False, "/c has 0 bytes left: make room")


def test_a_node_that_fails_its_preflight_is_refused_and_may_try_again() -> None:
    state = running()
    waits = []
    for _ in range(3):
        state, actions, reason = transition(state, asks(Preflight("on", 0.1, (BAD,))), state.ticked + 0.01)
        assert "new" not in state.members and "refused" in reason
        (note,) = told(actions, "preflight")
        assert note["ok"] is False and "make room" in note["reason"]
        (answer,) = [a.message for a in actions if isinstance(a, Send) and a.node == "new"]
        assert isinstance(answer, Refused) and answer.retry_s == note["retry_s"]
        waits.append(answer.retry_s)
        state = state.of(ticked=state.ticked + answer.retry_s)
    assert waits == [5.0, 10.0, 20.0]
    state, actions, _ = transition(state, asks(Preflight("on", 0.1, (WARN,), 9.0)), state.ticked + 0.01)
    assert "new" in state.members and told(actions, "preflight")[0]["warnings"] == [WARN.remedy]
    assert quarantine.of(state, "new").refusals == 0


def test_asking_before_the_pause_is_over_costs_nothing() -> None:
    state, _, _ = transition(running(), asks(Preflight("on", 0.1, (BAD,))), 10.0)
    again, actions, _ = transition(state, asks(Preflight("on", 0.1, (BAD,))), 10.5)
    assert not told(actions, "preflight") and quarantine.of(again, "new").refusals == 1
    assert any(isinstance(a, Send) and isinstance(a.message, Refused) for a in actions)


def test_strict_preflight_takes_warnings_and_lame_nodes_for_failures() -> None:
    state = running()
    assert Preflight("strict", 0.1, (WARN,)).failed and not Preflight("on", 0.1, (WARN,)).failed
    for node in state.members:
        record = replace(quarantine.of(state, node), preflight=Preflight("strict", 0.1, (), 100.0))
        state = quarantine.put(state, node, record)
    for score, taken in ((49.0, False), (51.0, True)):
        after, _, _ = transition(state, asks(Preflight("strict", 0.1, (), score)), state.ticked)
        assert ("new" in after.members) is taken
    after, _, _ = transition(state, asks(Preflight("on", 0.1, (), 49.0)), state.ticked)
    assert "new" in after.members


def test_spares_are_taken_by_their_standing() -> None:
    from elastic.planning.request import PlanRequest, pick

    info = running().members["node0"].report.info
    nodes = tuple(replace(info, node=f"node{i}", standing=s) for i, s in enumerate((3, 9, 0, 5)))
    spec = running().spec
    assert spec is not None
    request = PlanRequest(spec=spec, nodes=nodes, epoch=1, max_nodes=2)
    assert [one.node for one in pick(request)[0]] == ["node1", "node3"]


def test_the_state_survives_the_store() -> None:
    state = running(3, most=2)
    held = state.plan.nodes()[0] if state.plan else ""
    devices = (DeviceSeen(0, "H200", 61.0, fault="XID 79"),)
    state, _ = tell(state, report(state, held, devices=devices, disks=disk(0), mishaps=FULL))
    assert any(one.action in AWAY for one in quarantine.of(state, held).findings)
    assert codec.loads(JobState, codec.dumps(state)) == state
