"""Behaviour of the etcd store alone: outages, members, compaction, passwords, TLS, lost answers."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from elastic.core.protocol.store_spec import StoreSpec
from elastic.domain.errors import StaleError
from elastic.store.etcd import EtcdStore
from elastic.store.etcd.connection import etcdrpc
from elastic.store.interface import Conflict, StoreError, StoreFull, StoreUnavailable
from tests.patience import LONG_S
from tests.store.etcds import CTL, PATIENT, Etcd, etcd
from tests.store.full import QUOTA, fill, make_room

NOW = 1000.0
LogCapture = pytest.LogCaptureFixture


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Etcd]:
    with etcd(tmp_path / "etcd") as cluster:
        yield cluster


def opened(cluster: Etcd) -> EtcdStore:
    return EtcdStore(StoreSpec(url=cluster.url), "test", **PATIENT)


def test_out_of_reach_is_one_error_in_bounded_time(server: Etcd) -> None:
    patient, store = (
        opened(server),
        EtcdStore(StoreSpec(url=server.url), "test", call_s=0.3, patience_s=0.8),
    )
    lease = patient.acquire("a", 60.0, NOW)
    entry = patient.put_if("k", b"1", None, lease.token)
    calls = (
        lambda: store.get("k"),
        lambda: store.put_if("k", b"2", entry.revision, lease.token),
        lambda: store.acquire("a", 60.0, NOW),
        lambda: store.renew(lease, NOW),
        lambda: store.release(lease),
    )
    (member,) = server.members
    for stop, back in ((lambda: member.signal(signal.SIGSTOP), None), (server.kill, server.start)):
        stop()  # type: ignore[no-untyped-call]
        for call in calls[: 2 if back is None else None]:
            begun = time.monotonic()
            with pytest.raises(StoreUnavailable, match="no etcd answers at etcd://"):
                call()
            assert time.monotonic() - begun < LONG_S, "a call came back, however busy the machine"
        if back is None:
            member.signal(signal.SIGCONT)
        else:
            back()
        server.await_ready()
    assert patient.get("k") == entry
    store.close()
    patient.close()


def test_time_without_etcd_does_not_count_against_the_holder(server: Etcd) -> None:
    holder, other = opened(server), opened(server)
    lease = holder.acquire("a", 1.0, NOW)
    with pytest.raises(Exception, match=r"held by a for another 1\.0 s"):
        other.acquire("b", 1.0, NOW)
    server.kill()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        with pytest.raises(StoreUnavailable):
            other.acquire("b", 1.0, NOW)
    server.start()
    server.await_ready()
    with pytest.raises(Exception, match=r"held by a for another (1\.0|0\.9) s"):
        other.acquire("b", 1.0, NOW)
    holder.renew(lease, NOW)
    holder.close()
    other.close()


def test_another_member_is_used_when_one_is_gone(tmp_path: Path) -> None:
    with etcd(tmp_path / "etcd", size=3) as cluster:
        store = opened(cluster)
        lease = store.acquire("a", 60.0, NOW)
        entry = store.put_if("k", b"0", None, lease.token)
        used = next(
            member for member in cluster.members if member.endpoint == store._connection.endpoint
        )
        used.kill()
        end = time.monotonic() + LONG_S
        while True:
            try:
                entry = store.put_if("k", b"1", entry.revision, lease.token)
                break
            except StoreUnavailable:  # the members that are left elect a leader
                assert time.monotonic() < end
        assert store._connection.endpoint != used.endpoint
        assert store.get("k") == entry
        store.close()


class _Losing:
    """A stub whose first write is carried out, and its answer lost."""

    def __init__(self, stub: Any) -> None:
        self._stub, self.lost = stub, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    def Txn(self, request: Any, **how: Any) -> Any:
        answer = self._stub.Txn(request, **how)
        if not self.lost and request.success and answer.succeeded:
            self.lost += 1
            raise _Lost()
        return answer


class _Lost(grpc.RpcError):  # type: ignore[misc]
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "connection reset"


def test_a_write_whose_answer_was_lost_is_made_once(server: Etcd) -> None:
    store = opened(server)
    token = store.acquire("a", 60.0, NOW).token
    client = store._connection.client()
    client.kvstub = losing = _Losing(client.kvstub)
    entry = store.put_if("k", b"1", None, token)
    assert losing.lost == 1
    assert store.get("k") == entry
    client = store._connection.client()
    client.kvstub = losing = _Losing(client.kvstub)
    newer = store.acquire("a", 60.0, NOW)
    assert losing.lost == 1 and newer.token > token
    with pytest.raises(StaleError):
        store.put_if("k", b"2", entry.revision, token)
    store.put_if("k", b"2", entry.revision, newer.token)
    store.close()


def test_history_is_compacted(server: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.store.etcd.store.HISTORY", 20)
    store = opened(server)
    token = store.acquire("a", 60.0, NOW).token
    revision = None
    for number in range(60):
        revision = store.put_if("k", str(number).encode(), revision, token).revision
    request = etcdrpc.RangeRequest(key=b"test/k/k", revision=(revision or 0) - 50)
    with pytest.raises(StoreError, match="compacted"):
        try:
            store._connection.call("Range", request)
        except StoreUnavailable as error:
            raise StoreError(str(error)) from error
    entry = store.get("k")
    assert entry is not None and entry.value == b"59"
    store.close()


def test_a_value_too_large_for_etcd_is_refused_in_words(server: Etcd) -> None:
    store = opened(server)
    token = store.acquire("a", 60.0, NOW).token
    store.put_if("text", b"x" * (4 << 20), None, token)  # compressed
    noise = random.Random(0).randbytes(3 << 20)
    with pytest.raises(StoreError, match="max-request-bytes"):
        store.put_if("noise", noise, None, token)
    store.close()


def test_a_full_etcd_is_named_and_used_again_when_it_has_room(tmp_path: Path) -> None:
    """The holder keeps its lease, although it could not renew it."""
    cluster = Etcd(tmp_path / "etcd", flags=QUOTA)
    try:
        cluster.start()
        cluster.await_ready()
        holder, other = opened(cluster), opened(cluster)
        lease = holder.acquire("a", 0.5, NOW)
        entry = holder.put_if("k", b"1", None, lease.token)
        fill(cluster)
        for write in (
            lambda: holder.put_if("k", b"2", entry.revision, lease.token),
            lambda: holder.renew(lease, NOW),
        ):
            with pytest.raises(StoreFull, match=r"full \(NOSPACE\).*alarm disarm"):
                write()
        assert holder.get("k") == entry
        end = time.monotonic() + LONG_S
        while True:  # the lease looks expired, and the other one tries to take it
            with contextlib.suppress(Conflict):
                with pytest.raises(StoreFull):
                    other.acquire("b", 0.5, NOW)
                break
            assert time.monotonic() < end
        make_room(cluster)
        with pytest.raises(Conflict, match=r"held by a for another 0\.5 s"):
            other.acquire("b", 0.5, NOW)
        holder.renew(lease, NOW)
        newer = holder.put_if("k", b"2", entry.revision, lease.token)
        assert other.get("k") == newer
        holder.close()
        other.close()
    finally:
        cluster.kill()


def refusal(store: EtcdStore) -> str:
    with pytest.raises(StoreUnavailable) as caught:
        store.get("k")
    return str(caught.value)


def test_an_isolated_member_is_left_at_once(tmp_path: Path, caplog: LogCapture) -> None:
    """It accepts connections, knows no leader, and would let requests wait for seconds."""
    with etcd(tmp_path / "etcd", size=3) as cluster:
        isolated, *others = cluster.members
        for member in others:
            member.kill()
        url = f"etcd://{isolated.endpoint}"
        alone = EtcdStore(StoreSpec(url=url), "test", call_s=5.0, patience_s=10.0)
        end, texts = time.monotonic() + 60, [refusal(alone)]
        while "no leader" not in texts[-1] and time.monotonic() < end:  # it notices it late
            texts.append(refusal(alone))
        late = r"no leader|request timed out|no answer in time"
        assert "no leader" in texts[-1] and all(re.search(late, text) for text in texts), texts
        alone.close()
        with etcd(tmp_path / "whole") as whole:
            store = EtcdStore(
                StoreSpec(url=f"{url},{whole.members[0].endpoint}"), "test", **PATIENT
            )
            with caplog.at_level("WARNING"):
                assert store.get("k") is None
            assert store._connection.endpoint == whole.members[0].endpoint
            assert f"is used instead of {isolated.endpoint}: etcdserver: no leader" in caplog.text
            store.close()


def test_user_and_password(server: Etcd, tmp_path: Path) -> None:
    for words in ("user add root:secret", "user grant-role root root", "auth enable"):
        subprocess.run(
            [str(CTL), "--endpoints", server.members[0].endpoint, *words.split()], check=True
        )
    password = tmp_path / "password"
    password.write_text("secret\n")
    good = StoreSpec(url=server.url, user="root", password_file=str(password))
    store = EtcdStore(good, "test", **PATIENT)
    lease = store.acquire("a", 60.0, NOW)
    entry = store.put_if("k", b"1", None, lease.token)
    (member,) = server.members
    member.kill()  # it forgets who is logged in
    member.start()
    server.await_ready(good)
    assert store.get("k") == entry
    store.close()
    password.write_text("wrong\n")
    with pytest.raises(StoreError, match="authentication failed"):
        EtcdStore(good, "test", **PATIENT).get("k")
    with pytest.raises(StoreError, match="refuses"):
        opened(server).get("k")


def test_certificates(tmp_path: Path) -> None:
    files = certificates(tmp_path)
    flags = ["--cert-file", files["server.pem"], "--key-file", files["server.key"]]
    flags += ["--client-cert-auth", "--trusted-ca-file", files["ca.pem"]]
    cluster = Etcd(tmp_path / "etcd", flags=flags)
    spec = StoreSpec(
        url=cluster.url, ca=files["ca.pem"], cert=files["client.pem"], key=files["client.key"]
    )
    try:
        cluster.start()
        cluster.await_ready(spec)
        store = EtcdStore(spec, "test", **PATIENT)
        lease = store.acquire("a", 60.0, NOW)
        entry = store.put_if("k", b"1", None, lease.token)
        assert store.get("k") == entry
        store.close()
        for bad in (
            StoreSpec(url=cluster.url),
            StoreSpec(url=cluster.url, ca=files["ca.pem"]),
            StoreSpec(
                url=cluster.url,
                ca=files["other.pem"],
                cert=files["client.pem"],
                key=files["client.key"],
            ),
        ):
            with pytest.raises(StoreUnavailable):
                EtcdStore(bad, "test").get("k")
    finally:
        cluster.kill()


def certificates(folder: Path) -> dict[str, str]:
    """Files of an authority, of its server and client certificates, and of another authority."""
    made: dict[str, str] = {}

    def write(name: str, key: ec.EllipticCurvePrivateKey, cert: x509.Certificate) -> None:
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        for suffix, content in (
            (".pem", cert.public_bytes(serialization.Encoding.PEM)),
            (".key", secret),
        ):
            (folder / f"{name}{suffix}").write_bytes(content)
            made[name + suffix] = str(folder / f"{name}{suffix}")

    ca_key, ca = _certificate("ca")
    write("ca", ca_key, ca)
    write("other", *_certificate("other"))
    for name in ("server", "client"):
        write(name, *_certificate(name, (ca_key, ca)))
    return made


def _certificate(
    name: str, by: tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None = None
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        issuer_name=by[1].subject if by else subject,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(days=1),
        not_valid_after=now + datetime.timedelta(days=1),
    ).add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
    local = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    return key, builder.add_extension(local, critical=False).sign(
        by[0] if by else key, hashes.SHA256()
    )
