"""Wire format of control messages: an envelope around one protocol message.

Envelopes and messages are MessagePack, written and read by msgspec. MessagePack was chosen over
JSON because it carries NaN, infinities and bytes as they are: a training that diverges reports such
losses. An envelope is an array of its fields; a message is a map from field names to values. The
class of a message is not in the body but in the envelope's `kind`, and only the classes in `KINDS`
are ever made. Fields of the next version are ignored (`elastic.core.protocol.version`). Questions
of the command line and their answers are free JSON objects, and travel as JSON text.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from elastic.core.protocol import health_report, messages
from elastic.core.protocol.messages import NodeReport
from elastic.core.protocol.version import this_version
from elastic.domain import codec
from elastic.domain.errors import FieldError
from elastic.domain.types import JobSpec
from elastic.rpc.frames import dataclasses_of

MAX_BODY_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
"""Largest body of one envelope that a node sends. The coordinator reads no more than this from a
sender that it has not authenticated yet."""
PIECE = "Piece"
"""Kind of all envelopes of a long body except the last, which has the message's kind."""
PING, PONG = "Ping", "Pong"
"""Kinds of empty envelopes on a session: the server answers a ping at once with a pong. The thread
of the coordinator takes no part, so the time between them is that of the network."""
MAX_CALL_BYTES = 64 << 10
"""Largest question of the command line."""
MAX_CALLER_CHARS = 80
"""Maximum length of the name of a caller."""
CHALLENGE = "challenge"
"""The call that returns a nonce (`elastic.rpc.security.token_proof`); the only one that needs no
proof."""
SERVICE = "elastic.Coordinator"
SESSION, CALL = f"/{SERVICE}/Session", f"/{SERVICE}/Call"
"""gRPC methods: one stream per node for as long as the node lives; one question with one answer."""

Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Rejected:
    """Answer on a session to a message that could not be read; the session goes on."""

    kind: str
    text: str


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """One control message on the wire."""

    term: Count
    """Highest coordinator term that the sender knows."""
    epoch: Count
    """Epoch that the body belongs to."""
    kind: str
    """Class name of the body, or the name of a call."""
    body: bytes
    """MessagePack; JSON for a call."""
    sender: str = ""
    """Node id; empty from the coordinator."""
    sequence: Count = 0
    """Number of the message in its session and direction, from 1: a repeated message is refused. 0:
    not numbered."""
    common: bytes = b""
    """An `Install` without recipes, as deflated MessagePack (RFC 1950), which the coordinator
    encodes once for all nodes; `body` then is the list of the receiver's own recipes. Empty: `body`
    is the whole message."""


_ENCODER = msgspec.msgpack.Encoder()
_ENVELOPES = msgspec.msgpack.Decoder(Envelope)
_VALUES = msgspec.msgpack.Decoder()
_PARTS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
NIL = _ENCODER.encode(None)
_newest_spec: tuple[bytes, JobSpec | None] = (b"", None)
"""JobSpec of the newest NodeReport, raw and decoded: all nodes send the same one, so it is decoded
once."""


KINDS = dataclasses_of(messages, health_report) | {"Rejected": Rejected}
"""Every message that a session carries, by class name."""
SESSION_VERSION = this_version(tuple(sorted(KINDS)))
"""Announcement of this process when a session opens."""


def pack(message: Any, *, term: int, epoch: int, sender: str = "") -> Envelope:
    """Return an envelope with a message.

    Raises FieldError if it is no known message, is too large or has an integer over 64 bits.
    """
    kind = type(message).__name__
    if KINDS.get(kind) is not type(message):
        raise FieldError(
            "message", kind, "a class of elastic.core.protocol.messages or health_report is needed"
        )
    return Envelope(term, max(epoch, 0), kind, encode_body(kind, message), sender)


def unpack(envelope: Envelope) -> Any:
    """Return the message inside. Raises FieldError naming the kind or the field that is wrong."""
    kind = KINDS.get(envelope.kind)
    if kind is None:
        raise FieldError(
            "kind", envelope.kind, "unknown message; do all machines run the same version?"
        )
    if envelope.common:
        return codec.decode(kind, _joined(envelope), newer=True)
    try:
        if kind is NodeReport:
            return _decode_report(envelope.body)
        return codec.msgpack_decoder(kind).decode(envelope.body)
    except (ValueError, RecursionError):  # the slower way names the field
        return codec.decode(kind, _value(envelope.kind, envelope.body), newer=True)


def pack_call(kind: str, body: dict[str, Any], term: int = 0) -> Envelope:
    """Return an envelope with a question or answer of the command line, a JSON object. Raises
    FieldError if it is too large."""
    return Envelope(term, 0, kind, _checked(kind, codec.dumps(body).encode()))


def unpack_call(envelope: Envelope) -> dict[str, Any]:
    """Return the object of a question or an answer. Raises FieldError."""
    field = f"{envelope.kind}.body"
    try:
        data = json.loads(envelope.body or b"{}")
    except (ValueError, RecursionError) as error:
        raise FieldError(field, envelope.body[:80], f"not JSON: {error}") from error
    if not isinstance(data, dict):
        raise FieldError(field, data, "an object is needed")
    return data


def encode_body(kind: str, value: Any) -> bytes:
    """Return `value` as MessagePack. Raises FieldError if it is too large or has an integer over
    64 bits."""
    try:
        try:
            return _checked(kind, _ENCODER.encode(value))
        except UnicodeEncodeError:  # as in a file name that is no UTF-8
            text = json.dumps(codec.encode(value), ensure_ascii=False).encode(errors="replace")
            return _checked(kind, _ENCODER.encode(json.loads(text)))
    except OverflowError as error:
        raise FieldError(
            f"{kind}.body", "an integer", f"it must fit into 64 bits: {error}"
        ) from error


def _checked(kind: str, body: bytes) -> bytes:
    """Return `body`. Raises FieldError if it is too large."""
    if len(body) > MAX_BODY_BYTES:
        raise FieldError(
            f"{kind}.body", f"{len(body)} bytes", f"at most {MAX_BODY_BYTES} bytes can be sent"
        )
    return body


def to_wire(envelope: Envelope) -> bytes:
    """Return an envelope as bytes for gRPC."""
    return _ENCODER.encode(envelope)


def from_wire(data: bytes) -> Envelope:
    """Return the envelope in bytes from gRPC. Raises FieldError if there is none."""
    try:
        return _ENVELOPES.decode(data)
    except (ValueError, RecursionError) as error:
        raise FieldError("envelope", data[:80], f"cannot be read: {error}") from error


def pieces(envelope: Envelope) -> Iterator[Envelope]:
    """Yield an envelope in parts with bodies of at most PIECE_BYTES (see PIECE)."""
    body = envelope.body
    last = max(0, (len(body) - 1) // PIECE_BYTES * PIECE_BYTES)
    for start in range(0, last, PIECE_BYTES):
        yield replace(envelope, kind=PIECE, body=body[start : start + PIECE_BYTES])
    yield replace(envelope, body=body[last:]) if last else envelope


def _value(field: str, body: bytes) -> Any:
    """Return MessagePack as plain values. Raises FieldError naming `field`."""
    try:
        return _VALUES.decode(body)
    except (ValueError, RecursionError) as error:
        raise FieldError(field, body[:80], f"not MessagePack: {error}") from error


def _joined(envelope: Envelope) -> Any:
    """Return the common part of an `Install` with the receiver's recipes. Raises FieldError."""
    field = f"{envelope.kind}.common"
    if envelope.kind != "Install":
        raise FieldError(field, envelope.common[:80], "only an Install has a common part")
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(envelope.common, MAX_BODY_BYTES)
    except zlib.error as error:
        raise FieldError(field, envelope.common[:80], f"not deflated: {error}") from error
    if not inflater.eof:
        raise FieldError(
            field, envelope.common[:80], f"at most {MAX_BODY_BYTES} bytes, all of them, are needed"
        )
    data = _value(field, text)
    try:
        data["assignment"]["recipes"] = _value(envelope.kind, envelope.body)
    except (LookupError, TypeError) as error:
        raise FieldError(field, text[:80], "an Install with an assignment is needed") from error
    return data


def _decode_report(body: bytes) -> NodeReport:
    """Decode a NodeReport. Reports with equal JobSpecs share one object."""
    global _newest_spec
    parts = _PARTS.decode(body)
    raw, (newest, spec) = bytes(parts.pop("spec", NIL)), _newest_spec
    decoder: msgspec.msgpack.Decoder[NodeReport] = codec.msgpack_decoder(NodeReport)
    report = decoder.decode(_ENCODER.encode(parts))
    if raw == NIL:
        return report
    if raw != newest:
        spec = codec.msgpack_decoder(JobSpec).decode(raw)
        _newest_spec = (raw, spec)
    return dataclasses.replace(report, spec=spec)
