"""Every message to the coordinator: only permitted senders have an effect."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.coordinator import authorization as speech
from elastic.core.coordinator.authorization import FORGED, MALFORMED, STALE, check_message
from elastic.core.coordinator.transitions import record_event
from elastic.core.job.state import JobPhase, JobState, Member, Policy
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import (
    MAX_ENTRIES,
    MAX_TEXT_LENGTH,
    DeviceHealth,
    DiskSpace,
    FailedOperation,
    HealthReport,
    LinkTraffic,
    NoticeKind,
    Preflight,
    PreflightCheck,
)
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import JobSpec, LayerSpec, NodeInfo, StepRecord
from elastic.rpc.control.envelope import KINDS
from tests.agent.vault.copies import content, make
from tests.core.recovery.job_model import make_spec

SPEC = make_spec(2, 2, 4)


def report(node: str, incarnation: str = "i1", **changes: object) -> m.NodeReport:
    info = NodeInfo(node=node, incarnation=incarnation, vault="127.0.0.1:1")
    made = m.NodeReport(info, NodePhase.RUNNING, 4, restart=0)
    return replace(made, **changes)  # type: ignore[arg-type]


def new(node: str, incarnation: str) -> m.NodeReport:
    return report(node, incarnation, phase=NodePhase.EMPTY, epoch=0, restart=-1)


def state_of(spec: JobSpec = SPEC) -> JobState:
    members = {n: Member(report=report(n), seen=1.0) for n in ("node0", "node1")}
    return JobState(policy=Policy(min_nodes=1, max_nodes=2)).of(
        members=members,
        epoch=4,
        phase=JobPhase.RUNNING,
        spec=spec,
        record=StepRecord(1, 1.0, 1.0, 1.0),
    )


STATE = state_of()
DONE = m.StepDone(4, StepRecord(2, 1.0, 1.0, 1.0), 0.1, 0.1)
SHORT = m.BackupNote(m.BACKUP_SHORT, "node0", "node1", "")
CORRUPT = m.BackupNote(m.COPY_CORRUPT, "node1", "node0", "")
PART = m.CheckpointPart(2, ((0, 0),))
BEAT = m.Heartbeat("node0", "i1", 2, 0)
REFUSED = m.RefusalNote("node0", "vault", "token", "x", "", 1, 1)
FAILED = m.AgentFailed("node0", "i1", "OSError: no room")
GOOD = (report("node0"), BEAT, DONE, SHORT, CORRUPT, PART, REFUSED, FAILED)


@pytest.mark.parametrize("message", GOOD, ids=lambda g: type(g).__name__)
def test_a_member_may_say_it(message: object) -> None:
    assert check_message(STATE, "node0", message) is None


@pytest.mark.parametrize(
    "message",
    [report("node0"), BEAT, SHORT, CORRUPT, REFUSED, FAILED],
    ids=lambda g: type(g).__name__,
)
def test_no_other_member_may_say_it_in_its_name(message: object) -> None:
    found = check_message(STATE, "node1", message)
    assert found is not None and (found.reason, found.fence) == (FORGED, False)


@pytest.mark.parametrize("message", GOOD, ids=lambda g: type(g).__name__)
def test_nobody_says_anything_without_a_name(message: object) -> None:
    for sender in ("", "../x", "a b", "\n"):
        found = check_message(STATE, sender, message)
        assert found is not None and found.reason == FORGED


@pytest.mark.parametrize(
    "message", [DONE, PART, replace(SHORT, owner="node9"), replace(REFUSED, node="node9")]
)
def test_who_is_no_member_may_not_say_it(message: object) -> None:
    found = check_message(STATE, "node9", message)
    assert found is not None and found.reason == STALE


@pytest.mark.parametrize(
    "message",
    [
        report("node0", "i0"),
        replace(BEAT, incarnation="i0"),
        report("node0", "i0", phase=NodePhase.EMPTY),
        report("node0", "i2", epoch=9),
    ],
)
def test_a_former_incarnation_is_fenced(message: object) -> None:
    found = check_message(STATE, "node0", message)
    assert found is not None and (found.reason, found.fence) == (STALE, True)


def test_a_new_incarnation_joins_and_a_retired_one_never_again() -> None:
    assert check_message(STATE, "node0", new("node0", "i2")) is None
    assert check_message(STATE, "node5", new("node5", "i1")) is None
    found = check_message(STATE.of(retired=(("node0", "i0"),)), "node0", new("node0", "i0"))
    assert found is not None and (found.reason, found.fence) == (STALE, True)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (report("node0", inventory=(replace(make(content(1)), node="node1"),)), FORGED),
        (report("node0", epoch=1 << 60), MALFORMED),
        (report("node0", step=-2), MALFORMED),
        (report("node0", store="x" * 300), MALFORMED),
        (report("node0", ""), MALFORMED),
        (replace(BEAT, step=-1), MALFORMED),
        (replace(BEAT, microbatch=1 << 60), MALFORMED),
        (replace(DONE, epoch=5), FORGED),
        (replace(DONE, record=StepRecord(-1, 1.0, 1.0, 1.0)), MALFORMED),
        (replace(DONE, record=StepRecord(SPEC.n_steps, 1.0, 1.0, 1.0)), MALFORMED),
        (replace(SHORT, kind="joke"), MALFORMED),
        (replace(PART, step=-1), MALFORMED),
        (replace(FAILED, incarnation="i0"), STALE),
        (replace(FAILED, error="x" * 5000), MALFORMED),
        (replace(PART, layers=((SPEC.n_layers, 0),)), MALFORMED),
    ],
)
def test_what_cannot_be_is_refused(message: object, reason: str) -> None:
    found = check_message(STATE, "node0", message)
    assert found is not None and found.reason == reason


def test_a_former_member_tells_of_the_past_and_changes_nothing() -> None:
    past = replace(DONE, epoch=3, record=StepRecord(1, 1.0, 1.0, 1.0))
    assert check_message(STATE, "node7", past) is None


def test_all_other_messages_are_not_for_nodes_to_say() -> None:
    said = {
        m.NodeReport, m.Heartbeat, m.StepDone, m.BackupNote, m.CheckpointPart, m.RefusalNote,
        m.Notice, HealthReport, m.AgentFailed,
    }  # fmt: skip
    for name, kind in KINDS.items():
        if kind in said:
            continue
        found = check_message(STATE, "node0", object.__new__(kind))
        assert found is not None and found.reason == FORGED, name


@given(
    sender=st.sampled_from(["node0", "node1", "node2", ""]),
    node=st.sampled_from(["node0", "node1", "node2"]),
    incarnation=st.sampled_from(["i0", "i1", "i2"]),
    epoch=st.integers(-2, 1 << 61),
    phase=st.sampled_from(NodePhase),
)
def test_only_the_member_itself_changes_its_report(
    sender: str, node: str, incarnation: str, epoch: int, phase: NodePhase
) -> None:
    said = report(node, incarnation, epoch=epoch, phase=phase)
    if check_message(STATE, sender, said) is None:
        assert sender == node
        assert epoch < speech.MAX_COUNT
        assert incarnation == "i1" or node == "node2" or phase is NodePhase.EMPTY


HEALTH = HealthReport(
    "node0", "i1", 1.0,
    disks=(DiskSpace("run", "/x", 1, 2),) * MAX_ENTRIES,
    devices=(DeviceHealth(0, "gpu"),) * MAX_ENTRIES,
    links=(LinkTraffic("node1", 1, 1, 1.0, 1.0),) * MAX_ENTRIES,
    failed_operations=(
        FailedOperation("checkpoint", "/x" * (MAX_TEXT_LENGTH // 2), "y" * MAX_TEXT_LENGTH),
    ) * MAX_ENTRIES,
)  # fmt: skip
TAKEN_BACK = m.Notice("node0", "i1", NoticeKind.LEAVE, "file", 30.0)
MEASURED = m.MicrobatchTiming(4, 2, 0, 0.1, 0.2, traffic=m.BackupTraffic(1, 0.1, 0.1, 1, 0.1))


@pytest.mark.parametrize(
    "message",
    [
        replace(HEALTH, failed_operations=(FailedOperation("checkpoint", "/x", "y" * 10_000_000),)),
        replace(HEALTH, disks=HEALTH.disks + HEALTH.disks[:1]),
        replace(HEALTH, devices=(DeviceHealth(0, "gpu", math.nan),)),
        replace(HEALTH, links=(LinkTraffic("node1", 10**400, 1, 1.0, 1.0),)),
        replace(TAKEN_BACK, deadline_s=math.nan),
        replace(TAKEN_BACK, deadline_s=1e300),
        replace(TAKEN_BACK, deadline_s=speech.MAX_DEADLINE_S + 1),
        replace(TAKEN_BACK, detail="x" * 5000),
        replace(BEAT, measured=(replace(MEASURED, backward_s=math.inf),)),
        replace(BEAT, measured=(replace(MEASURED, traffic=m.BackupTraffic(sent_s=-math.inf)),)),
        replace(DONE, seconds=math.nan),
        report("node0", resumed_at=math.inf),
        report("node0", cause="x" * (speech.MAX_CHARS + 1)),
        report(
            "node0", preflight=Preflight("on", 1.0, (PreflightCheck("clock", math.nan, "s", True),))
        ),
        report("node0", suspects=("node1",) * (speech.MAX_ITEMS + 1)),
        replace(SHORT, detail="x" * (speech.MAX_CHARS + 1)),
    ],
    ids=lambda g: type(g).__name__,
)
def test_what_is_out_of_bounds_is_refused(message: object) -> None:
    found = check_message(STATE, "node0", message)
    assert found is not None and (found.reason, found.fence) == (MALFORMED, False)
    assert len(found.text) < 300


def test_the_largest_that_a_node_says_is_taken() -> None:
    """A thousand layers, messages of a thousand micro-batches, and a report of maximal length."""
    copies = [
        replace(
            make(content(layer % 3), layer=layer, microbatches=frozenset(range(1024))), node="node0"
        )
        for layer in range(1000)
    ]
    layers = (LayerSpec(1, 2, 3, 0.1, 0.2),) * 1000
    last_words = m.Failed("x" * 200_000)
    whole = report(
        "node0", inventory=tuple(copies * 2), spec=JobSpec(layers, 1024, 10, seed=(1 << 64) - 1)
    )
    for message in (
        whole,
        replace(whole, failed=last_words),
        HEALTH,
        TAKEN_BACK,
        replace(BEAT, measured=(MEASURED,) * 16),
    ):
        assert check_message(STATE, "node0", message) is None


def test_a_training_that_diverges_may_be_told() -> None:
    record = StepRecord(2, math.nan, math.inf, math.nan)
    gradient = replace(make(content(1)), node="node0", losses=((0, math.nan),))
    for message in (
        replace(DONE, record=record, lr=math.nan),
        report("node0", halted=(m.Halted(4, 2, record=record),), inventory=(gradient,)),
    ):
        assert check_message(STATE, "node0", message) is None


def floats(value: Any) -> list[tuple[Any, str]]:
    """Every number of every dataclass in it: (dataclass, field)."""
    found = []
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if isinstance(inner, float):
            found.append((value, field.name))
        for one in inner if isinstance(inner, tuple) else (inner,):
            found += floats(one) if dataclasses.is_dataclass(one) else []
    return found


@pytest.mark.parametrize(
    "message", [HEALTH, TAKEN_BACK, DONE, MEASURED], ids=lambda g: type(g).__name__
)
def test_every_number_is_looked_at(message: Any) -> None:
    for part, name in floats(message):
        if f"{type(part).__name__}.{name}" not in speech.UNBOUNDED:
            assert speech.invalid_field(replace(part, **{name: math.nan})), name
            assert speech.invalid_field(replace(part, **{name: 1e308})), name


def test_a_new_coordinator_records_steps_of_an_epoch_that_it_does_not_know() -> None:
    """Its store has lost its last writes. The steps change nothing; later ones are refused."""
    done = replace(DONE, epoch=6)
    adopting = STATE.of(updated_at=10.0, adopted_until=12.0)
    assert check_message(adopting, "node0", done) is None
    after, _, _ = record_event(adopting, done, 10.1)
    assert (after.record, after.logged_step) == (STATE.record, STATE.logged_step)
    late = check_message(adopting.of(updated_at=12.0), "node0", done)
    assert late is not None and late.reason == FORGED
    other = check_message(adopting, "node7", done)
    assert other is not None and other.reason == FORGED
