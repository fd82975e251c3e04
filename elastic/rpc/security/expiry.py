"""Expiry of the certificates of this process, and its mention in errors of failed handshakes."""

from __future__ import annotations

import time
from pathlib import Path

from elastic.core.protocol.health_report import MAX_TEXT_LENGTH, CertificateEnd
from elastic.core.protocol.store_spec import StoreSpec
from elastic.rpc.security.tls import CA, CERT, Certificates

RENEW = "`elastic certs --out DIR --force` renews certificates, and running jobs read the new files"


def certificate_ends(certificates: Certificates | None) -> tuple[CertificateEnd, ...]:
    """Return the end of validity of the own certificate and of the authority that issued it.

    () without certificates, or if they are unreadable.
    """
    if certificates is None:
        return ()
    ca, chain, _ = certificates.pem()
    return _ends(chain, ca, CERT, CA)


def store_certificate_ends(store: StoreSpec) -> tuple[CertificateEnd, ...]:
    """Return the same of the client certificate for etcd, or of etcd's authority alone if there is
    no such certificate. () without TLS, or if a file is unreadable."""
    if not store.ca:
        return ()
    try:
        ca, chain = (Path(name).read_bytes() if name else b"" for name in (store.ca, store.cert))
    except OSError:
        return ()
    return _ends(chain, ca, f"etcd {CERT}", f"etcd {CA}")


def _ends(chain: bytes, ca: bytes, chain_name: str, ca_name: str) -> tuple[CertificateEnd, ...]:
    """Return the ends of an own certificate, if `chain` is not empty, and of its authority.

    The first certificate of `chain` counts, and the authority that lasts longest among those with
    the issuer's name.
    """
    from cryptography import x509  # slow to import

    try:
        own = x509.load_pem_x509_certificates(chain)[:1] if chain else []
        authorities = x509.load_pem_x509_certificates(ca)
        issuers = [one for one in authorities if own and one.subject == own[0].issuer]
        issuer = max(issuers or authorities, key=lambda one: one.not_valid_after_utc)
        return tuple(
            CertificateEnd(
                file,
                one.subject.rfc4514_string()[:MAX_TEXT_LENGTH],
                one.not_valid_after_utc.timestamp(),
                f"{one.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC",
            )
            for file, one in [*((chain_name, one) for one in own), (ca_name, issuer)]
        )
    except ValueError:
        return ()


def with_expiry(text: str, certificates: Certificates | None) -> str:
    """Return the text of a failed connection. If a certificate of this side has expired, the text
    also names the certificate and the remedy."""
    now = time.time()
    expired = [end for end in certificate_ends(certificates) if end.ends_at <= now]
    if not expired:
        return text
    names = ", ".join(f"{end.file} ({end.subject}) expired at {end.ends}" for end in expired)
    return f"{text}; this side's {names}: {RENEW}"
