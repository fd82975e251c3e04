"""`elastic certs`: an own certificate authority, and one certificate per machine.

OUT/ca.crt  OUT/ca.key                the authority; keep its key where it was made
OUT/HOST/ca.crt  tls.crt  tls.key     for --certs on that machine; the names of a Kubernetes secret
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

import click
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elastic.command_line import Command, ParsedType, file_errors, make_folder
from elastic.domain.errors import FieldError
from elastic.launcher.flags.validators import FOLDER
from elastic.rpc.security.tls import CA, CERT, KEY

CA_KEY = "ca.key"
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names that every certificate carries in addition to those of its machine."""
CLOCK_SKEW = datetime.timedelta(minutes=5)
"""Time by which a certificate's validity begins before its creation, because clocks differ."""
Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def _hosts(flag: str, text: str) -> list[tuple[str, ...]]:
    hosts = [tuple(name.strip() for name in host.split("/")) for host in text.split(",")]
    for name in (name for names in hosts for name in names):
        try:
            ipaddress.ip_address(name)
        except ValueError:
            if not re.fullmatch(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,252})", name):
                remedy = "give names or addresses separated by commas, as node1,node2/10.0.0.2"
                raise FieldError(flag, name, remedy) from None
    return hosts


DAYS = click.IntRange(1, 36_500)


@click.command(cls=Command)
@click.option("--out", type=FOLDER, required=True,
              help="directory of the authority and of a folder per host")  # fmt: skip
@click.option("--hosts", type=ParsedType("HOST,...", _hosts), default="localhost",
              help="machines, comma-separated; several names of one machine are joined by /, "
                   "as node1/10.0.0.1")  # fmt: skip
@click.option("--days", type=DAYS, default=365, help="days that certificates of hosts are valid")
@click.option("--ca-days", type=DAYS, default=3650, help="days that a new authority is valid")
@click.option("--force", is_flag=True,
              help="renew the certificates of hosts that have one, with their names; without "
                   "--hosts: all in --out")  # fmt: skip
def certs(out: Path, hosts: list[tuple[str, ...]], days: int, ca_days: int, force: bool) -> int:
    """Make an authority and certificates for --certs; run again to add or renew hosts."""
    existing = [names[0] for names in hosts if (out / _folder(names[0]) / CERT).exists()]
    if existing and not force:
        remedy = "it has a certificate; leave it out, or renew it with --force"
        raise FieldError("--hosts", existing[0], remedy)
    if force:
        hosts = _all_hosts(out) if _is_default("hosts") else _with_former_names(out, hosts)
    _check_validity(out, days, ca_days)
    make_folder("--out", out)
    with file_errors("--out", out):
        make_certificates(out, hosts, days=days, ca_days=ca_days)
    for names in hosts:
        carried = ", ".join(dict.fromkeys((*names, *LOCAL_NAMES)))
        print(f"{out / _folder(names[0])}: {carried}, {days} days")
    return 0


def _is_default(option: str) -> bool:
    """Return whether the user did not give `option` of the running command."""
    given = click.get_current_context().get_parameter_source(option)
    return given is click.core.ParameterSource.DEFAULT


def _all_hosts(out: Path) -> list[tuple[str, ...]]:
    """Return the names of each certificate in a folder of `out`. Raises FieldError without any."""
    with file_errors("--out", out, "read"):
        found = [_names(path) for path in sorted(out.glob(f"*/{CERT}"))]
    if not found:
        remedy = "no folder in it has a certificate to renew: give another, or --hosts"
        raise FieldError("--out", str(out), remedy)
    return found


def _with_former_names(out: Path, hosts: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the names of each host, and those that its present certificate carries.

    A certificate that lost a name would be refused by those who use the name.
    """
    found = []
    with file_errors("--out", out, "read"):
        for names in hosts:
            path = out / _folder(names[0]) / CERT
            former = _names(path) if path.exists() else ()
            found.append(tuple(dict.fromkeys((names[0], *former, *names))))
    return found


def _names(path: Path) -> tuple[str, ...]:
    """Return the names and addresses of a certificate; the first one is its host.

    Raises FieldError if they cannot be read, or if the folder is that of another host.
    """
    try:
        (certificate, *_) = x509.load_pem_x509_certificates(path.read_bytes())
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (ValueError, x509.ExtensionNotFound) as error:
        remedy = f"its names cannot be read ({error}): give --hosts after you have removed it"
        raise FieldError("--force", str(path), remedy) from None
    names = tuple(str(name.value) for name in extension.value)
    if not names or _folder(names[0]) != path.parent.name:
        remedy = f"it is not the certificate of the host {path.parent.name}: move it elsewhere"
        raise FieldError("--force", str(path), remedy)
    return names


def _check_validity(out: Path, days: int, ca_days: int) -> None:
    """Raise FieldError if certificates would outlive their authority, or --ca-days has no effect.

    A certificate is accepted only while its authority is valid too.
    """
    if not (out / CA).exists():
        if days > ca_days:
            remedy = f"the new authority is valid for {ca_days} days: at most that, or --ca-days"
            raise FieldError("--days", days, remedy)
        return
    if not _is_default("ca_days"):
        remedy = (
            f"it is for a new authority, and {out} has one: leave it out, or give another --out"
        )
        raise FieldError("--ca-days", ca_days, remedy)
    with file_errors("--out", out, "read"):
        authority, _ = _authority(out, ca_days)
    left = (authority.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    if left < 1:
        remedy = "its authority has expired: make a new one in another directory"
        raise FieldError("--out", str(out), remedy)
    if days > left:
        remedy = f"the authority in {out} is valid for {left} more days: at most that"
        raise FieldError("--days", days, f"{remedy}, or make a new one in another directory")


def make_certificates(
    out: Path, hosts: Sequence[Sequence[str]], *, days: float = 365, ca_days: float = 3650
) -> None:
    """Write a certificate per host into `out`, and a new authority if `out` has none.

    Each of `hosts` is a sequence of names and addresses. Negative `days` make expired certificates.
    Raises FieldError if the authority cannot be used.
    """
    out.mkdir(parents=True, exist_ok=True)
    authority = _authority(out, ca_days)
    for names in hosts:
        _issue(out / _folder(names[0]), authority, names, days)


def make_private(target: Path, name: str) -> None:
    """Write a certificate for `name` into `target`, and discard the key of its authority.

    Nobody can issue another certificate of that authority.
    """
    _issue(target, _new_authority(365), (name,), 365)


def _authority(out: Path, days: float) -> Authority:
    """Return the authority in `out`; a new one if neither of its files exists."""
    cert, key = out / CA, out / CA_KEY
    if cert.exists() or key.exists():
        try:
            loaded = load_pem_private_key(key.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(cert.read_bytes())
        except (OSError, ValueError) as error:
            remedy = f"{CA} and {CA_KEY} of one authority are needed ({error})"
            raise FieldError("--out", str(out), remedy) from None
        own = certificate.public_key()
        if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.public_key() != own:
            raise FieldError("--out", str(out), f"{CA} and {CA_KEY} do not belong together")
        return certificate, loaded
    certificate, made = _new_authority(days)
    _write_key(key, made)
    _write(cert, certificate.public_bytes(Encoding.PEM), 0o644)
    return certificate, made


def _new_authority(days: float) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("elastic authority")
    return _draft(name, name, key, key, _after(days)).sign(key, hashes.SHA256()), key


def _issue(target: Path, authority: Authority, names: Sequence[str], days: float) -> None:
    root, root_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    ends = min(_after(days), root.not_valid_after_utc)
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    alternatives = [_general_name(name) for name in dict.fromkeys((*names, *LOCAL_NAMES))]
    builder = (
        _draft(_name(names[0]), root.subject, key, root_key, ends)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    )
    certificate = builder.sign(root_key, hashes.SHA256())
    target.mkdir(parents=True, exist_ok=True)
    os.chmod(target, 0o700)
    _write(target / CA, root.public_bytes(Encoding.PEM), 0o644)
    _write_key(target / KEY, key)
    _write(target / CERT, certificate.public_bytes(Encoding.PEM), 0o644)


def _draft(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    ends: datetime.datetime,
) -> x509.CertificateBuilder:
    """Return an unsigned certificate of `subject`: an authority's if `key` is `signer`."""
    authority = key is signer
    now = datetime.datetime.now(datetime.UTC)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issuers = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    usage = x509.KeyUsage(
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
    constraints = x509.BasicConstraints(ca=authority, path_length=0 if authority else None)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, ends) - CLOCK_SKEW)
        .not_valid_after(ends)
        .add_extension(own, critical=False)
        .add_extension(issuers, critical=False)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
    )


def _after(days: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write(path, pem, 0o600)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Write the file atomically, with `mode` set before the first byte is written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _folder(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
