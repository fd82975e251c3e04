"""etcd of the rendered job: three members that require mutual TLS of clients and of members."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.launcher import cli
from tests.kubernetes.cluster import wait_for
from tests.kubernetes.jobs import job_cluster
from tests.kubernetes.pods import Pod

pytestmark = pytest.mark.usefixtures("namespaces")
CERTS = "/elastic/certs"
READ_KEYS = ("--dial-timeout=5s", "get", "--prefix", "elastic/", "--keys-only")


def etcdctl(pod: Pod, *flags: str, wait_s: int = 30) -> tuple[int, str]:
    """Exit code and output of etcdctl in a pod."""
    done = pod.run(["etcdctl", f"--command-timeout={wait_s}s", *flags, *READ_KEYS], timeout_s=60)
    return done.returncode, (done.stdout + done.stderr).decode()


def certificate_of_another_job(authority: Path, pod: Pod) -> tuple[str, str]:
    """Flags that show a certificate which the same authority made for another job."""
    assert cli.main(["certs", "--out", str(authority), "--hosts", "other"]) == 0
    place = pod.volume("/elastic/run")
    for name in ("tls.crt", "tls.key"):
        (place / name).write_bytes((authority / "other" / name).read_bytes())
        (place / name).chmod(0o644)
    return ("--cert=/elastic/run/tls.crt", "--key=/elastic/run/tls.key")


def test_nobody_without_a_certificate_of_the_job_reads_or_writes(tmp_path: Path) -> None:
    with job_cluster(tmp_path, "job", 2, "--overlay", "spot-pool") as cluster:
        members = cluster.start("etcd")
        assert len(members) == 3
        wait_for("etcd", lambda: all(pod.ready() for pod in members), cluster)
        (inside,) = cluster.start("coordinator", 1)
        leads = inside.volume("/elastic/run") / "runs" / "latest" / "coordinator.json"
        wait_for("a leader, whose state is stored", leads.exists, cluster)
        trusting = (f"--cacert={CERTS}/ca.crt",)
        shown = (f"--cert={CERTS}/tls.crt", f"--key={CERTS}/tls.key")
        for place in ("demo-etcd", *(f"{pod.hostname}.demo-etcd" for pod in members)):
            code, output = etcdctl(inside, f"--endpoints=https://{place}:2379", *trusting, *shown)
            assert code == 0 and "elastic/demo/k/job/state" in output, output
        other = certificate_of_another_job(tmp_path / "certs", inside)
        for endpoint, flags in (
            ("http://demo-etcd:2379", ()),
            ("https://demo-etcd:2379", trusting),
            ("https://demo-etcd:2379", (*trusting, *other)),
        ):
            code, output = etcdctl(inside, f"--endpoints={endpoint}", *flags, wait_s=5)
            assert code != 0 and "elastic/demo" not in output, (endpoint, flags, output)
        speak = f"exec 3<>/dev/tcp/{members[0].address}/2380; echo 'GET /version' >&3; cat <&3"
        assert b"etcdserver" not in inside.run(["bash", "-c", speak]).stdout, (
            "members speak plain text"
        )
