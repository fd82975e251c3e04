"""Expiry of this process's certificates, and its mention in the error of a failed handshake."""

from __future__ import annotations

import time

from elastic.core.protocol.health_report import MAX_TEXT_LENGTH, CertificateEnd
from elastic.rpc.security.tls import CA, CERT, Certificates

RENEW = "`elastic certs --out DIR --force` renews certificates, and running jobs read the new files"


def certificate_ends(certificates: Certificates | None) -> tuple[CertificateEnd, ...]:
    """Return the end of validity of the own certificate and of the authority that issued it.

    Of a file with several certificates, the first own one counts, and the authority that lasts
    longest among those with the issuer's name. () without certificates, or if they are unreadable.
    """
    if certificates is None:
        return ()
    from cryptography import x509  # slow to import

    ca, chain, _ = certificates.pem()
    try:
        own = x509.load_pem_x509_certificates(chain)[0]
        authorities = x509.load_pem_x509_certificates(ca)
    except (ValueError, IndexError):
        return ()
    issuers = [one for one in authorities if one.subject == own.issuer] or authorities
    issuer = max(issuers, key=lambda one: one.not_valid_after_utc)
    return tuple(
        CertificateEnd(
            file,
            one.subject.rfc4514_string()[:MAX_TEXT_LENGTH],
            one.not_valid_after_utc.timestamp(),
            f"{one.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC",
        )
        for file, one in ((CERT, own), (CA, issuer))
    )


def with_expiry(text: str, certificates: Certificates | None) -> str:
    """Return the text of a failed connection. If a certificate of this side has expired, the text
    also names the certificate and the remedy."""
    now = time.time()
    expired = [end for end in certificate_ends(certificates) if end.ends_at <= now]
    if not expired:
        return text
    names = ", ".join(f"{end.file} ({end.subject}) expired at {end.ends}" for end in expired)
    return f"{text}; this side's {names}: {RENEW}"
