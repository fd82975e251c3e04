"""Makes a real etcd full, and makes room in it again, as an operator does."""

from __future__ import annotations

import json
import subprocess
import time

from tests.patience import LONG_S
from tests.store.etcds import CTL, Etcd

QUOTA = ("--quota-backend-bytes=1000000",)
"""Flags of an etcd that is soon full."""
CHUNK = "x" * 50_000


def etcdctl(cluster: Etcd, *words: str) -> subprocess.CompletedProcess[str]:
    places = ",".join(member.endpoint for member in cluster.members)
    command = [str(CTL), f"--endpoints={places}", "--command-timeout=60s", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def fill(cluster: Etcd) -> None:
    """Write keys of another program until the alarm NOSPACE is on."""
    end, number = time.monotonic() + LONG_S, 0
    while "NOSPACE" not in etcdctl(cluster, "alarm", "list").stdout:
        assert time.monotonic() < end
        etcdctl(cluster, "put", f"filling/{number}", CHUNK)
        number += 1


def make_room(cluster: Etcd) -> None:
    """Delete these keys, compact, defragment, and end the alarm."""
    done = etcdctl(cluster, "get", "any", "--write-out=json")
    revision = json.loads(done.stdout)["header"]["revision"]
    for words in (
        ("del", "--prefix", "filling/"),
        ("compact", str(revision)),
        ("defrag",),
        ("alarm", "disarm"),
    ):
        done = etcdctl(cluster, *words)
        assert done.returncode == 0, (words, done.stderr)
