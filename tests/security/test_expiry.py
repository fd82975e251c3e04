"""Certificates that end while they are in use: real TLS, the named cause, renewal, the metric."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from elastic.agent.metrics import GAUGES, AgentMetrics
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.coordinator.certificate_watch import CertificateWatch
from elastic.coordinator.metrics import CoordinatorMetrics
from elastic.core.job.state import CertificatesRead
from elastic.core.protocol.store_spec import StoreSpec
from elastic.domain.errors import UsageError, VaultUnreachable
from elastic.launcher.flags.certs import make_certificates
from elastic.metrics import new_registry
from elastic.rpc.bulk.transfer import VaultClient
from elastic.rpc.control.client import call
from elastic.rpc.control.server import Server
from elastic.rpc.security.expiry import certificate_ends, store_certificate_ends, with_expiry
from elastic.rpc.security.rejections import Reason
from elastic.rpc.security.tls import CA, Certificates
from tests.patience import LONG_S
from tests.security.parts import Authority, refused, secure

DAY_S = 86400.0
SHORT_S = 3.0


def issue(root: Path, days: float) -> Path:
    """A certificate of the authority in `root`, for this long from now."""
    make_certificates(root, [["localhost"]], days=days)
    return root / "localhost"


def connect(server: VaultServer, certs: Path) -> VaultClient:
    return VaultClient(
        server.address, node="b", timeout_s=LONG_S, secure=secure(certs), peer="node7"
    )


def test_the_ends_of_both_certificates_are_read(authority: Authority, tmp_path: Path) -> None:
    own, issuer = certificate_ends(Certificates(issue(tmp_path, 20)))
    assert (own.file, issuer.file) == ("tls.crt", "ca.crt")
    assert own.subject == "CN=localhost" and issuer.subject == "CN=elastic authority"
    assert own.ends_at == pytest.approx(time.time() + 20 * DAY_S, abs=LONG_S)
    assert own.ends.endswith(" UTC") and issuer.ends_at > own.ends_at
    assert certificate_ends(None) == ()


def test_the_authority_that_issued_the_certificate_counts(
    authority: Authority, tmp_path: Path
) -> None:
    """While the authority is replaced, ca.crt has two of them."""
    mine = issue(tmp_path / "new", 20)
    make_certificates(tmp_path / "old", [["localhost"]], ca_days=-1)
    both = (mine / CA).read_bytes() + (tmp_path / "old" / CA).read_bytes()
    (mine / CA).write_bytes(both)
    assert min(end.ends_at for end in certificate_ends(Certificates(mine))) > time.time()


def test_the_certificates_for_etcd_are_read(authority: Authority, tmp_path: Path) -> None:
    """They give the same metric, alerts, events and rows of `elastic status` as the others."""
    mine = issue(tmp_path, 20)
    files = {"ca": str(mine / CA), "cert": str(mine / "tls.crt"), "key": str(mine / "tls.key")}
    store = StoreSpec(url="etcd://h:1", **files)
    own, issuer = certificate_ends(Certificates(mine))
    wanted = (replace(own, file="etcd tls.crt"), replace(issuer, file="etcd ca.crt"))
    assert store_certificate_ends(store) == wanted
    assert store_certificate_ends(StoreSpec(url="etcd://h:1", ca=files["ca"])) == wanted[1:]
    assert store_certificate_ends(StoreSpec(url="etcd://h:1")) == ()
    events = queue.SimpleQueue[CertificatesRead]()
    watch = CertificateWatch(None, store, events.put)
    assert events.get(timeout=LONG_S).certificates == wanted
    watch.close()
    metrics = CoordinatorMetrics("j", time.time, store).registry
    left = metrics.get_sample_value("elastic_certificate_left_seconds", {"file": "etcd tls.crt"})
    assert left is not None and 19 * DAY_S < left < 20 * DAY_S
    (mine / "tls.crt").write_text("no certificate")
    assert store_certificate_ends(store) == ()
    (mine / "tls.crt").unlink()
    assert store_certificate_ends(store) == ()


def test_an_error_names_only_expired_certificates(authority: Authority) -> None:
    good, gone = Certificates(authority.good), Certificates(authority.expired)
    assert with_expiry("reset", good) == with_expiry("reset", None) == "reset"
    text = with_expiry("reset", gone)
    assert text.startswith("reset; this side's tls.crt (CN=expired) expired at ")
    assert "elastic certs --out DIR --force" in text


def test_a_certificate_ends_between_two_connections(vault: Vault, tmp_path: Path) -> None:
    """The open connection goes on, the next one fails with the cause, and renewal heals it."""
    certs = issue(tmp_path, SHORT_S / DAY_S)
    server = VaultServer(vault, timeout_s=LONG_S, secure=secure(certs)).start()
    open_one = connect(server, certs)
    assert open_one.inventory() == ()
    ends_at = certificate_ends(Certificates(certs))[0].ends_at
    while time.time() <= ends_at:
        threading.Event().wait(0.1)
    assert open_one.inventory() == ()
    with pytest.raises(VaultUnreachable) as caught:
        connect(server, certs).inventory()
    text = str(caught.value)
    assert text.startswith(f"vault of node7 at {server.address}: TLS handshake failed: ")
    assert "certificate has expired" in text and "this side's tls.crt (CN=localhost)" in text
    issue(tmp_path, 1.0)
    assert connect(server, certs).inventory() == ()
    server.close()


def test_a_client_with_an_expired_certificate_knows_why(
    tls: VaultServer, authority: Authority, tmp_path: Path
) -> None:
    """TLS 1.3 tells it only an alert, or nothing but a closed connection."""
    mine = tmp_path / "mine"
    shutil.copytree(authority.expired, mine)
    with refused(Reason.EXPIRED, "vault"), pytest.raises(VaultUnreachable) as caught:
        connect(tls, mine).inventory()
    assert "vault of node7" in str(caught.value)
    assert "this side's tls.crt (CN=expired) expired at" in str(caught.value)


def test_the_command_line_names_an_expired_certificate(authority: Authority) -> None:
    server = Server(
        "127.0.0.1:0",
        on_open=print,
        on_message=print,
        on_close=print,
        on_call=lambda kind, body: body,
        term=lambda: 1,
        secure=secure(authority.good),
    )
    with pytest.raises(UsageError, match=r"this side's tls\.crt \(CN=expired\) expired at"):
        call(server.address, "status", {}, timeout_s=LONG_S, secure=secure(authority.expired))
    server.close()


@pytest.mark.parametrize("days", [20.0, -1.0])
def test_the_metric(authority: Authority, tmp_path: Path, days: float) -> None:
    ends = certificate_ends(Certificates(issue(tmp_path, days)))
    metrics = AgentMetrics(new_registry(), certificates=lambda: ends)
    metrics.read = lambda: dict.fromkeys(GAUGES, 0.0)
    lines = generate_latest(metrics.registry).decode().splitlines()
    found = [line for line in lines if line.startswith("elastic_certificate_left_seconds{")]
    left = {line.partition('"')[2].partition('"')[0]: float(line.split()[-1]) for line in found}
    assert set(left) == {"tls.crt", "ca.crt"}
    assert left["tls.crt"] == pytest.approx(days * DAY_S, abs=LONG_S)
