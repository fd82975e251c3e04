"""Every message travels; nothing unreadable gets past; the generated code is what the .proto says."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.protocol import messages
from elastic.domain.errors import FieldError
from elastic.rpc import elastic_pb2
from elastic.rpc.envelope import KINDS, Envelope, Rejected, from_proto, pack, to_proto, unpack

ROOT = Path(__file__).parents[2]


def sample(kind: Any, inside: tuple[Any, ...] = ()) -> Any:
    """Some value of an annotation, every field filled; `inside`: the classes around it, each at most twice."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return (sample(args[0], inside),) if inside.count(args[0]) < 2 else ()
        return tuple(sample(arg, inside) for arg in args)
    if origin is frozenset:
        return frozenset({sample(args[0], inside)})
    if origin is not None:
        return sample(next(arg for arg in args if arg is not type(None)), inside)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{f.name: sample(hints[f.name], (*inside, kind)) for f in dataclasses.fields(kind)})
    if issubclass(kind, Enum):
        return list(kind)[-1]
    return {int: 3, float: 0.1, str: "ä", bool: True}[kind]


def test_all_messages_are_known() -> None:
    assert {"NodeReport", "Install", "Published", "Rejected"} <= set(KINDS)
    assert "NodePhase" not in KINDS and "Copy" not in KINDS


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_message_travels(kind: str) -> None:
    message = sample(KINDS[kind])
    envelope = pack(message, term=3, epoch=4, sender="node1")
    assert (envelope.term, envelope.epoch, envelope.kind, envelope.sender) == (3, 4, kind, "node1")
    wire = to_proto(envelope).SerializeToString()
    assert unpack(from_proto(elastic_pb2.Envelope.FromString(wire))) == message


def test_no_epoch_yet() -> None:
    assert pack(messages.Trim(0), term=0, epoch=-1).epoch == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["step", "epoch", "layer", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), data=st.data())
def test_damaged_messages_are_refused_or_read(kind: str, data: st.DataObject) -> None:
    """Replace one field of a good message by anything: a FieldError or a value, never another error."""
    body = json.loads(pack(sample(KINDS[kind]), term=0, epoch=0).body)
    field = data.draw(st.sampled_from([*sorted(body), "unknown"]))
    body[field] = data.draw(json_values)
    try:
        unpack(Envelope(0, 0, kind, json.dumps(body).encode()))
    except FieldError as error:
        assert kind in error.field


@given(st.binary(max_size=40))
def test_any_bytes(body: bytes) -> None:
    with pytest.raises(FieldError):
        unpack(Envelope(0, 0, "Trim", body + b"!"))


def test_unknown_kind() -> None:
    with pytest.raises(FieldError, match=r"'os\.system'.*same version"):
        unpack(Envelope(0, 0, "os.system", b"{}"))


def test_namesake_is_no_message() -> None:
    @dataclasses.dataclass(frozen=True)
    class Trim:
        epoch: int

    with pytest.raises(FieldError):
        pack(Trim(1), term=0, epoch=0)
    assert pack(Rejected("a", "b"), term=0, epoch=0).kind == "Rejected"


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    target = tmp_path / "descriptors"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"-o{target}", "elastic/rpc/elastic.proto"],
        cwd=ROOT,
        check=True,
    )
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto.FromString(elastic_pb2.DESCRIPTOR.serialized_pb)
    for field in (field for message in fresh.message_type for field in message.field):
        field.ClearField("json_name")
    assert fresh == committed
