"""Warns of certificates of nodes and of the coordinator before they end.

Nodes report their certificates in `HealthReport`. Each certificate is reported once per level, also
if several processes have it, as on one machine.
"""

from __future__ import annotations

from elastic.core.health.certificates import is_expired, warning, warning_level
from elastic.core.job.quarantine import record_of
from elastic.core.job.state import CertificatesRead, JobState, JobTransition, LogEntry
from elastic.core.protocol.health_report import CertificateEnd

COORDINATOR = "the coordinator"
MAX_EXPIRING = 4096
"""Number of certificates whose warning levels are kept."""


def certificates_read(state: JobState, event: CertificatesRead, now: float) -> JobTransition:
    """Record the coordinator's own certificates."""
    state = state.of(certificates=event.certificates)
    state, actions = warn(state, COORDINATOR, event.certificates, now)
    return state, actions, "; ".join(str(entry.data["reason"]) for entry in actions)


def warn(
    state: JobState, holder: str, certificates: tuple[CertificateEnd, ...], now: float
) -> tuple[JobState, tuple[LogEntry, ...]]:
    """Return a log entry for each certificate that has reached its next warning level."""
    entries: list[LogEntry] = []
    for end in certificates:
        key, level = f"{end.file} {end.subject} {end.ends_at:.0f}", warning_level(end, now)
        if level <= state.expiring.get(key, 0):
            continue
        kept = dict(list(state.expiring.items())[1 - MAX_EXPIRING :])
        state = state.of(expiring={**kept, key: level})
        data = {
            "holder": holder,
            "file": end.file,
            "subject": end.subject,
            "ends": end.ends,
            "left_s": round(end.ends_at - now, 1),
            "reason": warning(holder, end, now),
        }
        entries.append(LogEntry("certificate", data))
    return state, tuple(entries)


def expired_of(state: JobState, node: str, now: float) -> str:
    """Return the expired certificates of a node as a part of a cause; "": none."""
    report = record_of(state, node).report
    ends = [end for end in report.certificates if is_expired(end, now)] if report else []
    return "".join(f"; its {end.file} expired at {end.ends}" for end in ends)
