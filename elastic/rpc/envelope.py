"""What travels: an envelope with term, epoch and sender around one dataclass of `elastic.core.protocol.messages` as
JSON.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elastic.core.protocol import health_report as vitals
from elastic.core.protocol import messages
from elastic.domain import codec
from elastic.domain.errors import FieldError
from elastic.rpc import elastic_pb2

MAX_BODY_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
"""Of a body that a node sends, at a time: more is not read of who has not shown yet who it is."""
PIECE = "Piece"
"""Kind of an envelope whose body is the beginning of the next one's."""
MAX_CALL_BYTES = 64 << 10
"""Of a question of the command line."""
CHALLENGE = "challenge"
"""The call that gives a nonce (`elastic.rpc.proofs`); the only one that needs no proof."""


HOLE = b'"recipes":[]'
"""Stands once in an assignment without recipes: within a text its quotes would be escaped."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """Answer on a session to a message that could not be read; the session goes on."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Envelope:
    """Header of a message. `body` is a JSON object in UTF-8."""

    term: int
    epoch: int
    kind: str
    body: bytes
    sender: str = ""
    sequence: int = 0
    """Number in its session and direction, from 1: what comes twice is refused. 0: not numbered."""
    common: bytes = b""
    """What many nodes are told alike, deflated (RFC 1950): a JSON object in which HOLE stands for `body`, which is then
    the receiver's own list. b"": the body is all there is."""


def _kinds() -> dict[str, type]:
    found = {
        name: kind
        for module in (messages, vitals)
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    }
    return found | {Rejected.__name__: Rejected}


KINDS: dict[str, type] = _kinds()
"""Every message that a session carries, by class name."""


def pack(message: Any, *, term: int, epoch: int, sender: str = "") -> Envelope:
    """Wrap a message. Raises FieldError if it is no known message or too large."""
    kind = type(message).__name__
    if KINDS.get(kind) is not type(message):
        raise FieldError(
            "message", kind, "a dataclass of elastic.core.protocol.messages (or vitals) is needed"
        )
    body = codec.dumps(message).encode()
    check_size(kind, body)
    return Envelope(term, max(epoch, 0), kind, body, sender)


def unpack(envelope: Envelope) -> Any:
    """Return the message inside. Raises FieldError naming the kind or the field that is wrong."""
    kind = KINDS.get(envelope.kind)
    if kind is None:
        raise FieldError("kind", envelope.kind, "unknown message; do all machines run the same version?")
    try:
        return codec.loads(kind, whole(envelope))
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise FieldError(envelope.kind, envelope.body[:80], f"cannot be read: {error}") from error


def whole(envelope: Envelope) -> bytes:
    """The JSON of the message, put together of what is common and what is the receiver's own. Raises FieldError."""
    if not envelope.common:
        return envelope.body
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(envelope.common, MAX_BODY_BYTES)
    except zlib.error as error:
        raise FieldError(f"{envelope.kind}.common", envelope.common[:80], f"not deflated: {error}") from error
    if not inflating.eof or text.count(HOLE) != 1:
        raise FieldError(
            f"{envelope.kind}.common",
            envelope.common[:80],
            f"at most {MAX_BODY_BYTES} bytes with one hole are needed",
        )
    return text.replace(HOLE, HOLE[:-2] + envelope.body)


def pack_call(kind: str, body: dict[str, Any], term: int = 0) -> Envelope:
    """Wrap a question or an answer of `Call`: free JSON, no dataclass."""
    data = json.dumps(codec.encode(body), separators=(",", ":")).encode()
    check_size(kind, data)
    return Envelope(term, 0, kind, data)


def unpack_call(envelope: Envelope) -> dict[str, Any]:
    """Return the JSON object of a question or an answer. Raises FieldError."""
    try:
        data = json.loads(envelope.body or b"{}")
    except (ValueError, RecursionError) as error:
        raise FieldError(f"{envelope.kind}.body", envelope.body[:80], f"not JSON: {error}") from error
    if not isinstance(data, dict):
        raise FieldError(f"{envelope.kind}.body", data, "an object is needed")
    return data


def pieces(envelope: Envelope) -> Iterator[Envelope]:
    """As a node sends it: a long body in several envelopes, the last of which has the message's own kind."""
    body = envelope.body
    last = max(0, (len(body) - 1) // PIECE_BYTES * PIECE_BYTES)
    for start in range(0, last, PIECE_BYTES):
        yield dataclasses.replace(envelope, kind=PIECE, body=body[start : start + PIECE_BYTES])
    yield dataclasses.replace(envelope, body=body[last:]) if last else envelope


def to_proto(envelope: Envelope, sequence: int = 0) -> elastic_pb2.Envelope:
    """As it travels, numbered `sequence`."""
    return elastic_pb2.Envelope(
        term=envelope.term,
        epoch=envelope.epoch,
        kind=envelope.kind,
        body=envelope.body,
        sender=envelope.sender,
        sequence=sequence or envelope.sequence,
        common=envelope.common,
    )


def from_proto(proto: elastic_pb2.Envelope) -> Envelope:
    return Envelope(
        proto.term, proto.epoch, proto.kind, proto.body, proto.sender, proto.sequence, proto.common
    )


def check_size(kind: str, body: bytes) -> None:
    if len(body) > MAX_BODY_BYTES:
        raise FieldError(f"{kind}.body", f"{len(body)} bytes", f"at most {MAX_BODY_BYTES} bytes can be sent")
