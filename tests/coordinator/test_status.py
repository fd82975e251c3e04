"""The answer to `elastic status` says why the job does not train, and which certificates end."""

from __future__ import annotations

from elastic.coordinator.queries import nodes, status
from elastic.core.coordinator.transitions import transition
from elastic.core.job import state as job
from elastic.core.job.state import (
    Cause,
    CauseKind,
    EpochChange,
    JobFinished,
    JobPhase,
    JobState,
    Member,
    Policy,
)
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import CertificateEnd, HealthReport
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import NodeInfo

CAUSE = Cause(CauseKind.CONTACT, "node1: VaultError: vault of node0: reset")
CHANGE = EpochChange(2, (CAUSE,), False, (), 2, 1.0, None, 3, 0)
DAY_S = 86400.0


def member(node: str, **changes: object) -> Member:
    info = NodeInfo(node, f"{node}.1", f"{node}:1")
    return Member(m.NodeReport(info, NodePhase.RUNNING, 1, **changes), seen=1.0)  # type: ignore[arg-type]


def state(**changes: object) -> JobState:
    members = {node: member(node) for node in ("node0", "node1")}
    return JobState(policy=Policy(), members=members, updated_at=1.0).of(**changes)


def test_a_running_job_needs_no_explanation() -> None:
    answer = status(state(phase=JobPhase.RUNNING))
    assert answer["cause"] == "" and answer["certificates"] == []
    assert all(row["error"] == "" for row in answer["nodes"])


def test_the_cause_of_a_change_a_pause_and_the_end() -> None:
    halting = state(phase=JobPhase.HALTING, change=CHANGE)
    assert status(halting)["cause"] == CAUSE.text
    why = EpochChange(2, (CAUSE,), False, (), 2, 1.0, None, 3, 0, reason="2 nodes are needed")
    paused = state(phase=JobPhase.PAUSED, change=why)
    assert status(paused)["cause"] == f"{CAUSE.text}; paused: 2 nodes are needed"
    ended = state(phase=JobPhase.FAILED, ending=JobFinished(1, "node0: ValueError: bad"))
    assert status(ended)["cause"] == "node0: ValueError: bad"


def test_errors_of_nodes() -> None:
    failing = {"node0": member("node0", failures=("VaultError: gone",), cause="worker 0: signal 9")}
    (row,) = nodes(state(members=failing))
    assert row["error"] == "worker 0: signal 9; VaultError: gone"


def test_certificates_that_end_first() -> None:
    """One row per certificate, from nodes and the coordinator."""
    now = 1.0
    own = CertificateEnd("tls.crt", "CN=node0", now + 5 * DAY_S, "in 5 days")
    shared = CertificateEnd("ca.crt", "CN=authority", now + 90 * DAY_S, "in 90 days")
    told, _, _ = transition(
        state(phase=JobPhase.WAITING, policy=Policy(min_nodes=9, max_nodes=9)),
        HealthReport("node0", "node0.1", now, certificates=(own, shared)),
        now,
    )
    told, _, _ = transition(told, job.CertificatesRead((shared,)), now)
    rows = status(told)["certificates"]
    assert [(row["certificate"], row["left_days"]) for row in rows] == [
        ("tls.crt", 5.0),
        ("ca.crt", 90.0),
    ]
    assert rows[0]["holder"] == "node0" and rows[0]["ends"] == "in 5 days"
