"""etcd of the rendered job: three members that require mutual TLS of clients and of members.

One member after the other is cut off from the other members, while clients still reach it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.launcher import cli
from tests.kubernetes.cluster import Cluster, wait_for
from tests.kubernetes.jobs import job_cluster
from tests.kubernetes.pods import Pod

pytestmark = pytest.mark.usefixtures("namespaces")
CERTS = "/elastic/etcd-certs"
FLAGS = (f"--cacert={CERTS}/ca.crt", f"--cert={CERTS}/tls.crt", f"--key={CERTS}/tls.key")
HELD_S = 5.0
"""Longest time for which a decision may wait because one member is isolated."""
CALM_S = 0.2
"""Longest time of a save on a machine that is not overloaded. If saves took longer just before, the
limit is higher in the same proportion."""
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
        trusting, shown = FLAGS[:1], FLAGS[1:]
        for place in ("demo-etcd", *(f"{pod.hostname}.demo-etcd" for pod in members)):
            code, output = etcdctl(inside, f"--endpoints=https://{place}:2379", *trusting, *shown)
            assert code == 0 and "elastic/demo/k/job/state" in output, output
        other = certificate_of_another_job(tmp_path / "certs" / "etcd", inside)
        agents = [
            f"--{kind}=/elastic/certs/tls.{end}" for kind, end in (("cert", "crt"), ("key", "key"))
        ]
        for endpoint, flags in (
            ("https://demo-etcd:2379", (*trusting, *agents)),
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


def test_members_with_empty_volumes_found_no_second_etcd(tmp_path: Path) -> None:
    """Two of three volumes are lost. The member that is left is asked at once, although it may know
    the names of the new pods with their former addresses."""
    with job_cluster(tmp_path, "job", 2, "--overlay", "spot-pool") as cluster:
        members = cluster.start("etcd")
        wait_for("etcd", lambda: all(pod.ready() for pod in members), cluster)
        lost = members[::2]
        for pod in lost:
            cluster.kill(pod)
            shutil.rmtree(pod.volume("/elastic/etcd"))
        empty = [cluster.replace(pod) for pod in lost]
        wait_for("their end", lambda: not any(pod.running for pod in empty), cluster)
        for pod in empty:
            assert "has already been bootstrapped" in pod.log, pod.log
            assert "elected leader" not in pod.log


class Members:
    """The members of etcd, asked from a pod that reaches them all."""

    def __init__(self, cluster: Cluster, pods: list[Pod], inside: Pod) -> None:
        self._cluster, self.pods, self._inside = cluster, pods, inside
        self.places = [f"{pod.hostname}.demo-etcd:2379" for pod in pods]

    def _status(self, *indices: int) -> list[dict[str, Any]]:
        places = ",".join(f"https://{self.places[index]}" for index in indices)
        words = ("endpoint", "status", "--write-out=json", "--command-timeout=10s")
        done = self._inside.run(["etcdctl", f"--endpoints={places}", *FLAGS, *words])
        return [entry["Status"] for entry in json.loads(done.stdout)] if not done.returncode else []

    def isolated(self, index: int) -> bool:
        """Whether a member answers and knows no leader."""
        return any(not entry.get("leader") for entry in self._status(index))

    def whole(self) -> bool:
        """Whether all members have the same leader."""
        found = self._status(0, 1, 2)
        return len(found) == 3 and len({entry.get("leader", 0) for entry in found} - {0}) == 1

    def lead(self, index: int) -> None:
        """Make a member the leader."""
        places = ",".join(f"https://{place}" for place in self.places)

        def leads() -> bool:
            (status,) = self._status(index) or [{}]
            name = status.get("header", {}).get("member_id", 0)
            if status.get("leader") == name:
                return True
            words = ["etcdctl", f"--endpoints={places}", *FLAGS, "move-leader", f"{name:x}"]
            self._inside.run(words)
            return False

        wait_for(f"{self.places[index]} as leader of etcd", leads, self._cluster)

    @contextlib.contextmanager
    def isolation(self, index: int) -> Iterator[None]:
        """Cut a member off from the others until the block ends; then wait until it is back."""
        others = [pod for pod in self.pods if pod is not self.pods[index]]
        self._cluster.part(self.pods[index], *others)
        try:
            wait_for("isolation", lambda: self.isolated(index), self._cluster)
            yield
        finally:
            self._cluster.unite(self.pods[index], *others)
        wait_for("its return", self.whole, self._cluster)


def lines(writer: Pod) -> list[dict[str, Any]]:
    """The lines of `tests.kubernetes.writer`."""
    whole = writer.log.split("\n")[:-1]
    return [json.loads(line) for line in whole if line.startswith("{")]


def longest_s(found: list[dict[str, Any]]) -> float:
    """Seconds for which a decision was held at most."""
    return max(float(line["held_s"]) for line in found)


def test_an_isolated_member_holds_no_decision(tmp_path: Path) -> None:
    """Each member in turn, while it is the one in use, as etcd's leader or as a follower."""
    with job_cluster(tmp_path, "job", 2, "--overlay", "spot-pool") as cluster:
        job = cluster.workload("coordinator")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        container |= {"command": ["python", "-m", "tests.kubernetes.writer"], "args": []}
        pods = cluster.start("etcd")
        (writer,) = cluster.start("coordinator", 1)
        wait_for("writes", lambda: len(lines(writer)) > 20, cluster)
        etcd = Members(cluster, pods, writer)
        for leader in (True, False, True):
            isolate_the_one_in_use(cluster, etcd, writer, leader)


def isolate_the_one_in_use(cluster: Cluster, etcd: Members, writer: Pod, leader: bool) -> None:
    """Isolate the member that takes the writes. A decision must not be held for long."""
    index = etcd.places.index(lines(writer)[-1]["endpoint"])
    etcd.lead(index if leader else (index + 1) % 3)
    before = lines(writer)
    with etcd.isolation(index):
        reached = len(lines(writer))
        wait_for("writes", lambda: len(lines(writer)) >= reached + 20, cluster)
        assert lines(writer)[-1]["endpoint"] != etcd.places[index]
        during = lines(writer)[len(before) :]
    calm_s, held_s = longest_s(before[-20:]), longest_s(during)
    role = "leader" if leader else "follower"
    print(f"{etcd.places[index]}, {role}, isolated: held for {held_s:.2f} s, before {calm_s:.2f} s")
    assert held_s <= HELD_S * max(1.0, calm_s / CALM_S), writer.log
