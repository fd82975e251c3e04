from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("term", "epoch", "kind", "body", "sender", "sequence", "common")
    TERM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COMMON_FIELD_NUMBER: _ClassVar[int]
    term: int
    epoch: int
    kind: str
    body: bytes
    sender: str
    sequence: int
    common: bytes
    def __init__(self, term: _Optional[int] = ..., epoch: _Optional[int] = ..., kind: _Optional[str] = ..., body: _Optional[bytes] = ..., sender: _Optional[str] = ..., sequence: _Optional[int] = ..., common: _Optional[bytes] = ...) -> None: ...
