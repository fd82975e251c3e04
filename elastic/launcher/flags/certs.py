"""`elastic certs`: a certificate authority of one's own, and a certificate for every machine.

OUT/ca.crt  OUT/ca.key                     the authority; the key stays where it was made
OUT/HOST/ca.crt  tls.crt  tls.key          for --certs on that machine; also a Kubernetes secret's names
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from elastic.command_line import Command, ParsedType
from elastic.domain.errors import FieldError
from elastic.launcher.flags.values import FOLDER
from elastic.rpc.security.tls import CA, CERT, KEY

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CA_KEY = "ca.key"
LOCAL = ("localhost", "127.0.0.1", "::1")
"""Names that every certificate carries: of the machine that it lies on."""
CLOCKS_APART = datetime.timedelta(minutes=5)


def _hosts(flag: str, text: str) -> list[tuple[str, ...]]:
    hosts = [tuple(name.strip() for name in host.split("/")) for host in text.split(",")]
    for name in (name for names in hosts for name in names):
        try:
            ipaddress.ip_address(name)
        except ValueError:
            if not re.fullmatch(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,252})", name):
                remedy = "names or addresses separated by commas, as node1,node2/10.0.0.2"
                raise FieldError(flag, name, remedy) from None
    return hosts


DAYS = click.IntRange(1, 36_500)


@click.command(cls=Command)
@click.option("--out", type=FOLDER, required=True, help="directory of the authority and of a folder per host")
@click.option(
    "--hosts",
    type=ParsedType("HOST,...", _hosts),
    default="localhost",
    help="machines, comma-separated; several names of one are joined by /, as node1/10.0.0.1",
)
@click.option("--days", type=DAYS, default=365, help="days that the hosts' certificates are valid")
@click.option("--ca-days", type=DAYS, default=3650, help="days that a new authority is valid")
@click.option("--force", is_flag=True, help="renew certificates of hosts that have one")
def certs(out: Path, hosts: list[tuple[str, ...]], days: int, ca_days: int, force: bool) -> int:
    """Make a certificate authority and certificates for --certs; run again to add or renew hosts."""
    taken = [names[0] for names in hosts if (out / _folder(names[0]) / CERT).exists()]
    if taken and not force:
        raise FieldError("--hosts", taken[0], "it has a certificate; leave it out, or renew it with --force")
    make(out, hosts, days=days, ca_days=ca_days)
    for names in hosts:
        print(f"{out / _folder(names[0])}: {', '.join(dict.fromkeys((*names, *LOCAL)))}, {days} days")
    return 0


def make(out: Path, hosts: Sequence[Sequence[str]], *, days: float = 365, ca_days: float = 3650) -> None:
    """Write certificates for `hosts`, each a sequence of names and addresses; the authority first, if there is none.

    Negative `days` make certificates that have expired already. Raises FieldError when the authority cannot be used.
    """
    out.mkdir(parents=True, exist_ok=True)
    authority = _authority(out, ca_days)
    for names in hosts:
        _issue(out / _folder(names[0]), authority, names, days)


def make_private(target: Path, name: str, *, days: float = 365) -> None:
    """Write a certificate that carries `name` into `target`, of an authority whose key is forgotten at once: nobody
    else gets one of it."""
    _issue(target, _new_authority(days), (name,), days)


Authority = tuple["x509.Certificate", "EllipticCurvePrivateKey"]


def _authority(out: Path, days: float) -> Authority:
    """The authority in `out`, made if neither of its files is there."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    cert, key = out / CA, out / CA_KEY
    if cert.exists() or key.exists():
        try:
            loaded = load_pem_private_key(key.read_bytes(), None)
            found = x509.load_pem_x509_certificate(cert.read_bytes())
        except (OSError, ValueError) as error:
            raise FieldError(
                "--out", str(out), f"{CA} and {CA_KEY} of one authority are needed ({error})"
            ) from None
        if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.public_key() != found.public_key():
            raise FieldError("--out", str(out), f"{CA} and {CA_KEY} do not belong together")
        return found, loaded
    certificate, made = _new_authority(days)
    _write_key(key, made)
    _write(cert, _pem(certificate), 0o644)
    return certificate, made


def _new_authority(days: float) -> Authority:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    made = ec.generate_private_key(ec.SECP256R1())
    name = _name("elastic authority")
    built = (
        _draft(name, name, made, made, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
    )
    return _signed(built, made), made


def _issue(target: Path, authority: Authority, names: Sequence[str], days: float) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    root, root_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    subject = [_general(name) for name in dict.fromkeys((*names, *LOCAL))]
    built = (
        _draft(_name(names[0]), root.subject, key, root_key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName(subject), critical=False)
    )
    certificate = _signed(built, root_key)
    target.mkdir(parents=True, exist_ok=True)
    os.chmod(target, 0o700)
    _write(target / CA, _pem(root), 0o644)
    _write_key(target / KEY, key)
    _write(target / CERT, _pem(certificate), 0o644)


def _draft(
    subject: x509.Name,
    issuer: x509.Name,
    key: EllipticCurvePrivateKey,
    signer: EllipticCurvePrivateKey,
    days: float,
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    ends = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, ends) - CLOCKS_APART)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )


def _signed(built: x509.CertificateBuilder, key: EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return built.sign(key, hashes.SHA256())


def _usage(*, authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _general(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _write_key(path: Path, key: EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whole or not at all, with its mode from the first byte on."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
        file.write(data)
    os.replace(draft, path)


def _folder(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
