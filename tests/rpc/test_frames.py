"""Frames and channels over real sockets."""

from __future__ import annotations

import errno
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.core.protocol import messages as m
from elastic.domain.errors import ChannelClosed, FieldError
from elastic.rpc.frames import (
    KINDS,
    MAX_HEADER_BYTES,
    PROGRESS_BYTES,
    Channel,
    FrameStream,
    connect_unix,
)
from tests.patience import LONG_S


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    yield a, b
    a.close()
    b.close()


def in_thread(work: object) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_payload_larger_than_any_buffer(pair: tuple[socket.socket, socket.socket]) -> None:
    data = bytes(range(256)) * 20000
    parts = (memoryview(data)[:7], memoryview(b""), memoryview(data)[7:])
    sender = in_thread(lambda: FrameStream(pair[0]).send({"n": 1}, parts))
    stream, seen = FrameStream(pair[1]), bytearray()
    header, nbytes = stream.receive()
    out = bytearray(nbytes)
    stream.read_into(memoryview(out), on_chunk=seen.extend)
    sender.join(LONG_S)
    assert (header, bytes(out), bytes(seen)) == ({"n": 1}, data, data)


def test_drain_keeps_frames_in_step(pair: tuple[socket.socket, socket.socket]) -> None:
    sender = in_thread(
        lambda: [
            FrameStream(pair[0]).send(i, (memoryview(bytes(1 << 20)),))  # type: ignore[func-returns-value]
            for i in range(3)
        ]
    )
    stream = FrameStream(pair[1])
    for i in range(3):
        header, nbytes = stream.receive()
        assert header == i
        stream.drain(nbytes)
    sender.join(LONG_S)


def test_limits_and_garbage_are_field_errors(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(struct.pack("<I", MAX_HEADER_BYTES + 1))
    with pytest.raises(FieldError, match="header bytes"):
        FrameStream(pair[1]).receive()
    pair[0].sendall(struct.pack("<I", 3) + b"{{{" + struct.pack("<Q", 0))
    with pytest.raises(FieldError, match="not JSON"):
        FrameStream(pair[1]).receive()
    pair[0].sendall(struct.pack("<I", 2) + b"{}" + struct.pack("<Q", 1 << 60))
    with pytest.raises(FieldError, match="payload bytes"):
        FrameStream(pair[1]).receive()


@pytest.mark.parametrize("sent", [b"", b"\x05", struct.pack("<I", 4) + b"{}"])
def test_end_of_file_anywhere_is_channel_closed(
    pair: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    pair[0].sendall(sent)
    pair[0].close()
    with pytest.raises(ChannelClosed):
        FrameStream(pair[1]).receive()


def test_timeout_without_progress(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        FrameStream(pair[1], timeout_s=0.05).receive()
    with pytest.raises(TimeoutError):
        FrameStream(pair[0], timeout_s=0.05).send({}, (memoryview(bytes(64 << 20)),))


class FailingOnce(socket.socket):
    """A socket whose first `send` fails for a lack of memory, although the connection is well."""

    def __init__(self, sock: socket.socket) -> None:
        socket.socket.__init__(self, fileno=sock.detach())
        self._failed = False

    def send(self, data: Any, flags: int = 0) -> int:
        if not self._failed:
            self._failed = True
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return super().send(data, flags)


def test_nothing_follows_a_frame_that_was_not_sent(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """The rest of a frame would be read as another one. The answer can still be read."""
    mine, theirs = FrameStream(FailingOnce(pair[0])), FrameStream(pair[1])
    with pytest.raises(ChannelClosed, match="No buffer space"):
        mine.begin({"kind": "Put"}, 4)
    with pytest.raises(ChannelClosed):
        mine.write(memoryview(b"data"))
    with pytest.raises(ChannelClosed, match="the other side closed"):
        theirs.receive()
    theirs.send({"kind": "Reply"})
    assert mine.receive() == ({"kind": "Reply"}, 0)
    mine.close()


class SlowLink(socket.socket):
    """A link at a fixed rate. As sockets do, `send` sends what has room, and `sendall` applies the
    time limit to all data."""

    room = 100_000

    def __init__(self, bytes_per_s: int) -> None:
        socket.socket.__init__(self)
        self._rate, self._limit_s = bytes_per_s, 0.0
        self.sent = bytearray()

    def settimeout(self, value: float | None) -> None:
        self._limit_s = value or 0.0

    def send(self, data: Any, flags: int = 0) -> int:
        part = data[: self.room]
        self.sendall(part)
        return len(part)

    def sendall(self, data: Any, flags: int = 0) -> None:
        if len(data) > self._limit_s * self._rate:
            raise TimeoutError("timed out")
        self.sent += data


class SlowTlsLink(SlowLink, ssl.SSLSocket):
    """With TLS, `send` sends all data, too."""

    room = 1 << 30


@pytest.mark.parametrize("kind", [SlowLink, SlowTlsLink])
def test_a_link_that_is_slow_makes_progress(kind: type[SlowLink]) -> None:
    """The time limit is for a lack of progress, not for all the data of a call."""
    data = bytes(range(256)) * 20000
    with kind(50_000) as link:
        FrameStream(link, timeout_s=10.0).send({}, (memoryview(data),))
        assert link.sent.endswith(data)
    with kind(1) as link, pytest.raises(TimeoutError):
        FrameStream(link, timeout_s=10.0).send({}, (memoryview(data),))


TRICKLE_S = 0.05
"""Seconds from one byte of a trickle to the next."""
TRICKLE = int(LONG_S / TRICKLE_S)
"""Number of bytes that a trickle moves, one by one."""
TRICKLE_LIMIT_S = 0.3


class TricklingLink(SlowLink):
    """A link with room for one byte at a time."""

    def send(self, data: Any, flags: int = 0) -> int:
        if self._limit_s < TRICKLE_S:
            raise TimeoutError("timed out")
        time.sleep(TRICKLE_S)
        self.sent += data[:1]
        return 1


def test_a_trickle_is_no_progress_of_a_sender() -> None:
    with TricklingLink(1) as link, pytest.raises(TimeoutError):
        FrameStream(link, timeout_s=TRICKLE_LIMIT_S).write(memoryview(bytes(TRICKLE)))


def test_a_trickle_is_no_progress_of_a_reader(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Each byte comes within the time limit, but a large copy would take years."""
    given_up = threading.Event()

    def trickle() -> None:
        for _ in range(TRICKLE):
            pair[0].sendall(b"x")
            if given_up.wait(TRICKLE_S):
                return
        pair[0].shutdown(socket.SHUT_WR)  # which the reader would report as another error

    sender, seen = in_thread(trickle), bytearray()
    with pytest.raises(TimeoutError):
        FrameStream(pair[1], TRICKLE_LIMIT_S).read_into(memoryview(bytearray(1 << 20)), seen.extend)
    given_up.set()
    sender.join(LONG_S)


def test_a_slow_sender_makes_progress(pair: tuple[socket.socket, socket.socket]) -> None:
    """All data take longer than the time limit, and enough of them come within each limit."""
    pieces, limit_s = 25, 2.0

    def send() -> None:
        for _ in range(pieces):
            pair[0].sendall(bytes(PROGRESS_BYTES))
            time.sleep(0.1)

    sender = in_thread(send)
    assert len(FrameStream(pair[1], limit_s).read(pieces * PROGRESS_BYTES)) > 0
    sender.join(LONG_S)


class ReadyLink(SlowLink):
    """A link whose data are there, in small pieces."""

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        return min(len(buffer), 1000)


def test_the_time_that_a_reader_needs_itself_does_not_count() -> None:
    """A busy machine may be slow to use the data; the sender is well."""
    limit_s, chunks = 0.2, list[int]()

    def use(chunk: memoryview) -> None:
        chunks.append(len(chunk))
        time.sleep(limit_s / 2)

    with ReadyLink(1) as link:
        FrameStream(link, limit_s).read_into(memoryview(bytearray(5000)), use)
    assert chunks == [1000] * 5


def test_close_wakes_a_blocked_reader(pair: tuple[socket.socket, socket.socket]) -> None:
    channel, started, errors = Channel(pair[1]), threading.Event(), []

    def read() -> None:
        started.set()
        try:
            channel.receive()
        except ChannelClosed as error:
            errors.append(error)

    reader = in_thread(read)
    started.wait(LONG_S)
    channel.close()
    reader.join(LONG_S)
    assert len(errors) == 1
    with pytest.raises(ChannelClosed):
        channel.send(m.BundleAcknowledged(1))


def test_messages_travel_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    a, b = Channel(pair[0]), Channel(pair[1])
    sent = [
        m.BundleAcknowledged(3),
        m.Halted(2, 5, frozenset({1, 2})),
        m.CommFailed(1, ("n1",), "gone"),
    ]
    for message in sent:
        a.send(message)
    assert [b.receive() for _ in sent] == sent


def test_every_message_is_known_and_nothing_else() -> None:
    assert {"Attach", "Published", "Install", "BundleAcknowledged", "Stop"} <= KINDS.keys()
    assert "Copy" not in KINDS and "Assignment" not in KINDS


def test_bad_messages_leave_the_channel_usable(pair: tuple[socket.socket, socket.socket]) -> None:
    stream, channel = FrameStream(pair[0]), Channel(pair[1])
    malformed: tuple[Any, ...] = (
        {"kind": "Evil", "body": {}},
        [],
        {"kind": "BundleAcknowledged", "body": {"bundle": "x"}},
        {"kind": "BundleAcknowledged"},
    )
    for bad in malformed:
        stream.send(bad)
        with pytest.raises(FieldError):
            channel.receive()
    stream.send({"kind": "BundleAcknowledged", "body": {"bundle": 1}})
    assert channel.receive() == m.BundleAcknowledged(1)
    with pytest.raises(FieldError):
        channel.send("a string")


def test_many_threads_send_whole_frames(pair: tuple[socket.socket, socket.socket]) -> None:
    a, b = Channel(pair[0]), Channel(pair[1])

    def send(first: int) -> None:
        for i in range(50):
            a.send(m.Progress(first + i, "compute", 0, 0))

    threads = [in_thread(lambda first=first: send(first)) for first in (0, 1000, 2000)]
    got = [b.receive().counter for _ in range(150)]
    for thread in threads:
        thread.join(LONG_S)
    for first in (0, 1000, 2000):
        assert [c for c in got if first <= c < first + 50] == list(range(first, first + 50))


def test_connecting_to_nobody(tmp_path: Path) -> None:
    with pytest.raises(ChannelClosed, match="no agent"):
        connect_unix(str(tmp_path / "none.sock"))
