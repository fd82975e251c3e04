"""Every message travels; nothing unreadable gets past."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import replace
from enum import Enum
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.protocol import messages
from elastic.domain.errors import FieldError
from elastic.domain.types import StepRecord
from elastic.rpc.control.envelope import KINDS, Envelope, Rejected, from_wire, pack, to_wire, unpack


def encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def sample(kind: Any, inside: tuple[Any, ...] = ()) -> Any:
    """A value of an annotation with every field filled; `inside` (outer classes) limits nesting."""
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
        return kind(  # type: ignore[operator]
            **{f.name: sample(hints[f.name], (*inside, kind)) for f in dataclasses.fields(kind)}
        )
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
    assert unpack(from_wire(to_wire(envelope))) == message


def with_new_fields(value: Any) -> Any:
    """The same data from a version with one more field in each object."""
    if isinstance(value, dict):
        return {**{k: with_new_fields(v) for k, v in value.items()}, "field_of_tomorrow": [1]}
    return [with_new_fields(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_newer_version_may_have_more_fields(kind: str) -> None:
    message = sample(KINDS[kind])
    body = with_new_fields(msgspec.msgpack.decode(pack(message, term=0, epoch=0).body))
    assert unpack(Envelope(0, 0, kind, encoded(body))) == message


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_older_version_may_lack_fields_with_defaults(kind: str) -> None:
    message = sample(KINDS[kind])
    for field in dataclasses.fields(message):
        body = msgspec.msgpack.decode(pack(message, term=0, epoch=0).body)
        del body[field.name]
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            continue
        expected = replace(message, **{field.name: default})
        assert unpack(Envelope(0, 0, kind, encoded(body))) == expected


def test_an_envelope_of_a_newer_version_may_be_longer() -> None:
    envelope = pack(messages.Trim(3), term=1, epoch=2, sender="a")
    values = [*msgspec.msgpack.decode(to_wire(envelope)), "new"]
    assert from_wire(encoded(values)) == envelope


def test_no_epoch_yet() -> None:
    assert pack(messages.Trim(0), term=0, epoch=-1).epoch == 0


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["step", "epoch", "layer", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), data=st.data())
def test_damaged_messages_are_refused_or_read(kind: str, data: st.DataObject) -> None:
    """Any value in one field of a good message gives a FieldError or a value, no other error."""
    body = msgspec.msgpack.decode(pack(sample(KINDS[kind]), term=0, epoch=0).body)
    field = data.draw(st.sampled_from([*sorted(body), "unknown"]))
    body[field] = data.draw(json_values)
    try:
        unpack(Envelope(0, 0, kind, encoded(body)))
    except FieldError as error:
        assert kind in error.field


@given(st.binary(max_size=60))
def test_any_bytes_are_an_envelope_or_a_clear_error(data: bytes) -> None:
    try:
        envelope = from_wire(data)
    except FieldError as error:
        assert error.field == "envelope"
    else:
        assert min(envelope.term, envelope.epoch, envelope.sequence) >= 0


@pytest.mark.parametrize("field", ["term", "epoch", "sequence"])
def test_negative_counts_are_refused(field: str) -> None:
    with pytest.raises(FieldError, match="envelope"):
        from_wire(to_wire(msgspec.structs.replace(Envelope(0, 0, "Trim", b""), **{field: -1})))


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_losses_of_a_training_that_diverges_travel(loss: float) -> None:
    message = messages.StepDone(1, StepRecord(0, 1.0, loss, loss), 0.1, 0.1)
    got = unpack(from_wire(to_wire(pack(message, term=0, epoch=0))))
    assert got.record.loss == loss or (math.isnan(got.record.loss) and math.isnan(loss))


def test_an_integer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(FieldError, match="64 bits"):
        pack(messages.Trim(1 << 70), term=0, epoch=0)


def test_text_that_is_no_unicode_is_replaced() -> None:
    got = unpack(pack(messages.Stop(1, "a\udc80\u20ac"), term=0, epoch=0))
    assert got == messages.Stop(1, "a?\u20ac")


def test_nodes_share_the_job_that_they_report() -> None:
    report = sample(messages.NodeReport)
    one, two = (unpack(pack(replace(report, step=step), term=0, epoch=0)) for step in (1, 2))
    assert one.spec is two.spec and (one.step, two.step) == (1, 2)
    other = replace(report, spec=replace(report.spec, seed=99))
    assert unpack(pack(other, term=0, epoch=0)) == other


@pytest.mark.parametrize(
    "body",
    [
        b"\x81\x80\x01",
        b"\x81\x90\x01",
        b"\x81\x01\x01",
        b"\xd6\xff\0\0\0\0",
        b"\xd4\x05\0",
        b"\xc4\x01a",
    ],
)
def test_other_kinds_of_keys_and_values_are_refused(body: bytes) -> None:
    with pytest.raises(FieldError, match="Trim"):
        unpack(Envelope(0, 0, "Trim", body))
    unfit = msgspec.msgpack.encode({"epoch": 1})[:-1] + body
    with pytest.raises(FieldError, match="Trim"):
        unpack(Envelope(0, 0, "Trim", unfit))


@given(st.binary(max_size=40))
def test_any_bytes(body: bytes) -> None:
    with pytest.raises(FieldError):
        unpack(Envelope(0, 0, "Trim", body + b"\xc1"))


def test_unknown_kind() -> None:
    with pytest.raises(FieldError, match=r"'os\.system'.*same version"):
        unpack(Envelope(0, 0, "os.system", b"\x80"))


def test_namesake_is_no_message() -> None:
    @dataclasses.dataclass(frozen=True)
    class Trim:
        epoch: int

    with pytest.raises(FieldError):
        pack(Trim(1), term=0, epoch=0)
    assert pack(Rejected("a", "b"), term=0, epoch=0).kind == "Rejected"
