"""Certificates: warned of at each level once, and part of the cause of a loss."""

from __future__ import annotations

import pytest

from elastic.core.coordinator.transitions import transition
from elastic.core.health.certificates import DAY_S, warning, warning_level
from elastic.core.job import state as job
from elastic.core.job.state import JobState, LogEntry, Policy
from elastic.core.policy.certificate_warnings import COORDINATOR
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import CertificateEnd, HealthReport
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import NodeInfo

END_S = 100 * DAY_S
END = CertificateEnd("tls.crt", "CN=node0", END_S, "2001-02-03 04:05:06 UTC")


def reported(state: JobState, now: float, node: str = "node0") -> tuple[JobState, list[str]]:
    """The state after a health report with END, and the reasons of the warnings."""
    report = HealthReport(node, f"{node}.1", now, certificates=(END,))
    after, actions, _ = transition(state, report, now)
    return after, warnings(actions)


def warnings(actions: tuple[job.JobAction, ...]) -> list[str]:
    entries = [a for a in actions if isinstance(a, LogEntry) and a.kind == "certificate"]
    return [str(entry.data["reason"]) for entry in entries]


@pytest.fixture
def state() -> JobState:
    found = JobState(policy=Policy(min_nodes=3, max_nodes=3, lease_s=1e9))
    for node in ("node0", "node1"):
        info = NodeInfo(node, f"{node}.1", f"{node}:1")
        found, _, _ = transition(found, m.NodeReport(info, NodePhase.EMPTY, 0), 1.0)
    return found


@pytest.mark.parametrize(
    ("left_days", "level"),
    [(90, 0), (30.1, 0), (30, 1), (7.1, 1), (7, 2), (1.5, 2), (1, 3), (0.1, 3), (0, 4), (-3, 4)],
)
def test_levels(left_days: float, level: int) -> None:
    now = END_S - left_days * DAY_S
    assert warning_level(END, now) == level
    text = warning("node0", END, now)
    assert "tls.crt of node0 (CN=node0)" in text and END.ends in text
    assert "`elastic certs --out DIR --force`" in text
    assert ("expired at" in text) == (left_days <= 0)


def test_each_level_is_reported_once(state: JobState) -> None:
    counts = []
    for left_days in (60, 31, 29, 28, 8, 6, 5, 1, 0.5, 0, -1, -2):
        state, found = reported(state, END_S - left_days * DAY_S)
        counts.append(len(found))
    assert counts == [0, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0]


def test_a_shared_certificate_is_reported_once(state: JobState) -> None:
    state, first = reported(state, END_S - 2 * DAY_S)
    assert len(first) == 1
    state, other = reported(state, END_S - 2 * DAY_S, "node1")
    assert other == []
    event = job.CertificatesRead((END,))
    state, actions, _ = transition(state, event, END_S - 2 * DAY_S)
    assert warnings(actions) == []
    _, actions, reason = transition(state, event, END_S)
    assert warnings(actions) == [reason] and COORDINATOR in reason and "expired" in reason


def test_a_loss_names_an_expired_certificate(state: JobState) -> None:
    state, _ = reported(state, END_S)
    state, _, _ = transition(state, job.ConnectionClosed("node0", "node0.1"), END_S)
    _, actions, _ = transition(state, job.PortRefused("node0", "node0.1"), END_S + 0.1)
    (lost,) = [a.data for a in actions if isinstance(a, LogEntry) and a.kind == "lost"]
    assert lost["why"] == (
        f"connection closed and its port refuses connections; its tls.crt expired at {END.ends}"
    )
