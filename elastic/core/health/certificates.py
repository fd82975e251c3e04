"""Warnings about certificates that end soon: 30, 7 and 1 days before the end, and after it."""

from __future__ import annotations

from elastic.core.protocol.health_report import CertificateEnd

DAY_S = 86400.0
WARN_DAYS = (30, 7, 1, 0)
"""Days before the end at which the user is warned; 0: the certificate has expired."""
REMEDY = "`elastic certs --out DIR --force` renews it, and running jobs read the new files"


def warning_level(end: CertificateEnd, now: float) -> int:
    """Return how many of WARN_DAYS have passed; 0: no warning is due."""
    return sum(end.ends_at - now <= days * DAY_S for days in WARN_DAYS)


def is_expired(end: CertificateEnd, now: float) -> bool:
    """Return whether the certificate is no longer valid."""
    return end.ends_at <= now


def warning(holder: str, end: CertificateEnd, now: float) -> str:
    """Return the warning about a certificate of the process `holder`."""
    what = f"{end.file} of {holder} ({end.subject})"
    if is_expired(end, now):
        text = f"{what} expired at {end.ends}; new connections fail"
    else:
        text = f"{what} expires in {(end.ends_at - now) / DAY_S:.1f} days, at {end.ends}"
    return f"{text}: {REMEDY}"
