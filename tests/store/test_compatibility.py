"""etcd3 works beside the installed protobuf, and nothing else in the process notices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.store.etcd.compatibility import load_etcd3
from tests.store.etcds import Etcd, etcd

ROOT = Path(__file__).parents[2]

OTHER_CLIENT = """
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from elastic.store.etcd.compatibility import load_etcd3
LOAD_BEFORE
pool = descriptor_pool.Default()
file = descriptor_pb2.FileDescriptorProto(name="rpc.proto", package="etcdserverpb", syntax="proto3")
file.message_type.add(name="RangeRequest").field.add(name="other", number=1, type=9, label=1)
pool.AddSerializedFile(file.SerializeToString())
message = message_factory.GetMessageClass(pool.FindMessageTypeByName("etcdserverpb.RangeRequest"))
etcdrpc = load_etcd3().etcdrpc
assert message(other="x").SerializeToString() == b"\\n\\x01x"
assert etcdrpc.RangeRequest(key=b"x").SerializeToString() == b"\\n\\x01x"
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Etcd]:
    with etcd(tmp_path / "etcd") as cluster:
        yield cluster


def test_etcd3_talks_to_etcd_with_all_its_services(server: Etcd) -> None:
    host, port = server.members[0].endpoint.split(":")
    client = load_etcd3().client(host=host, port=int(port))
    lease = client.lease(60)
    client.put("a/1", "x", lease=lease)
    assert client.get("a/1")[0] == b"x"
    assert list(client.get_lease_info(lease.id).keys) == [b"a/1"]
    moved, _ = client.transaction(
        compare=[client.transactions.value("a/1") == "x"],
        success=[client.transactions.put("a/2", "y")],
        failure=[],
    )
    assert moved
    assert [value for value, _ in client.get_prefix("a/")] == [b"x", b"y"]
    assert [member.name for member in client.members] == ["m0"]
    assert client.status().leader.name == "m0"
    assert list(client.list_alarms()) == []
    assert client.delete("a/2")
    client.close()


@pytest.mark.parametrize("load_before", ["", "load_etcd3()"])
def test_another_etcd_client_can_register_its_own_messages(load_before: str) -> None:
    code = OTHER_CLIENT.replace("LOAD_BEFORE", load_before)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_missing_package_is_named_with_the_extra() -> None:
    code = """
import sys
sys.modules["etcd3"] = None
from types import SimpleNamespace
from elastic.core.protocol.store_spec import StoreSpec
from elastic.store.open_store import open_store
open_store(SimpleNamespace(store=StoreSpec(url="etcd://127.0.0.1:1"), name="job"))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    error = done.stderr.splitlines()[-1]
    assert "MissingExtra: A store on etcd needs" in error
    assert "etcd3" in error and "pip install 'elastic-runtime[etcd]'" in error
