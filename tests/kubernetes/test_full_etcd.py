"""A real etcd without room, and etcd restored from a snapshot, with the manifest's own commands."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path

from elastic.core.protocol.store_spec import StoreSpec
from elastic.store.etcd import EtcdStore
from tests.kubernetes.jobs import render
from tests.kubernetes.test_render import BASIC, SCRIPT, etcd_of, one
from tests.store.etcds import CTL, PATIENT, Etcd, etcd
from tests.store.full import QUOTA, fill

SNAPSHOT = "demo-snapshot-29402897-x7k2p"


def run(words: list[str], endpoint: str) -> None:
    """Run etcdctl of a manifest, whose environment names the endpoint."""
    assert words[0] == "etcdctl"
    environment = {**os.environ, "ETCDCTL_ENDPOINTS": endpoint}
    subprocess.run([str(CTL), *words[1:]], env=environment, check=True, capture_output=True)


def test_probes_of_a_full_member_succeed_and_liveness_needs_no_quorum(tmp_path: Path) -> None:
    (container,) = etcd_of("spot-pool")["spec"]["template"]["spec"]["containers"]
    alive = container["livenessProbe"]["httpGet"]["path"]
    cluster = Etcd(tmp_path / "etcd", 3, QUOTA)
    try:
        cluster.start()
        cluster.await_ready()
        fill(cluster)
        for member in cluster.members:
            run(container["readinessProbe"]["exec"]["command"], member.endpoint)
        left, *lost = cluster.members
        for member in lost:
            member.kill()
        with urllib.request.urlopen(f"http://{left.endpoint}{alive}") as answer:
            assert answer.status == 200
    finally:
        cluster.kill()


def test_etcd_is_restored_from_a_snapshot(tmp_path: Path) -> None:
    """The commands of the CronJob and of `--restore-etcd`, with folders and addresses of here."""
    flags = ("--overlay", "spot-pool", "--restore-etcd", f"{SNAPSHOT}.db")
    objects = render(*BASIC, *flags, *SCRIPT)
    cron = one(objects, "CronJob", "demo-snapshot")["spec"]["jobTemplate"]["spec"]["template"]
    (save,) = cron["spec"]["initContainers"]
    template = one(objects, "StatefulSet", "demo-etcd")["spec"]["template"]["spec"]
    (restore,) = template["initContainers"]
    assert restore["image"] == template["containers"][0]["image"]
    assert {"name": "snapshots", "mountPath": "/elastic/snapshots"} in save["volumeMounts"]
    folder = str(tmp_path)
    with etcd(tmp_path / "etcd", size=3) as cluster:
        store = EtcdStore(StoreSpec(url=cluster.url), "elastic/demo", **PATIENT)
        lease = store.acquire("a", 60.0, 0.0)
        entry = store.put_if("job/state", b"kept", None, lease.token)
        place = {"$(POD_NAME)": SNAPSHOT, "/elastic/snapshots": folder}
        run([replaced(word, place) for word in save["command"]], cluster.members[0].endpoint)
        store.put_if("job/state", b"lost", entry.revision, lease.token)
        store.close()
        cluster.kill()
        for member in cluster.members:
            data = tmp_path / "etcd" / member.name
            data.rename(data.with_suffix(".lost"))
            here = {
                "--name": member.name,
                "--data-dir": str(data),
                "--initial-cluster": member.cluster,
                "--initial-advertise-peer-urls": f"http://{member.peer}",
                "--initial-cluster-token": "etcd-cluster",
            }
            words = [replaced(word, {"/elastic/snapshots": folder}) for word in restore["command"]]
            found = dict(word.split("=", 1) for word in words if word.startswith("--"))
            assert found.keys() == here.keys() and found["--data-dir"] == "/elastic/etcd/data"
            run([*words[:4], *(f"{flag}={value}" for flag, value in here.items())], "")
            member.start()
        cluster.await_ready()
        store = EtcdStore(StoreSpec(url=cluster.url), "elastic/demo", **PATIENT)
        back = store.get("job/state")
        assert back is not None and back.value == b"kept"
        lease = store.acquire("a", 60.0, 0.0)
        store.put_if("job/state", b"new", back.revision, lease.token)
        store.close()


def replaced(word: str, texts: dict[str, str]) -> str:
    for text, other in texts.items():
        word = word.replace(text, other)
    return word


def test_a_restore_changes_nothing_but_etcd() -> None:
    plain = render(*BASIC, *SCRIPT)
    other = render(*BASIC, "--restore-etcd", "x.db", *SCRIPT)
    changed = [
        a["kind"] for a, b in zip(plain, other, strict=True) if json.dumps(a) != json.dumps(b)
    ]
    assert changed == ["StatefulSet"]
