"""A shaped link is never faster than asked, is shared by all of a node, and lets training pass."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

from elastic.planning.cost.profile import LinkProfile
from elastic.rpc.frames import FrameStream
from elastic.rpc.link_shaping import LinkShaper, pace_of, shaper_of
from tests.patience import LONG_S


def test_no_limit_no_shaper(tmp_path: Path) -> None:
    assert shaper_of(tmp_path, LinkProfile()) is None and pace_of(tmp_path, LinkProfile()) is None
    assert shaper_of(tmp_path, LinkProfile(latency_s=0.1)) is not None


def test_places_follow_one_another_over_processes_ends(tmp_path: Path) -> None:
    """Two ends of one file are one link."""
    first, second = (LinkShaper(tmp_path / "link", LinkProfile(1000.0)) for _ in range(2))
    began = time.monotonic()
    one, two, three = first.reserve(500_000), second.reserve(250_000), first.reserve(1000)
    assert one >= began + 500
    assert abs(two - one - 250) < 1e-6 and abs(three - two - 1) < 1e-6


def test_training_passes_copies(tmp_path: Path) -> None:
    shaper = LinkShaper(tmp_path / "link", LinkProfile(1000.0))
    copy = shaper.reserve(60_000)
    began = time.monotonic()
    message = shaper.reserve(100, training=True)
    assert message < copy and message >= began + 0.1
    later = shaper.reserve(1000)
    assert abs(later - copy - 1.1) < 1e-6, "the copies behind it wait as long as it took"


def test_latency_alone_takes_no_place(tmp_path: Path) -> None:
    shaper = LinkShaper(tmp_path / "link", LinkProfile(0.0, 0.5))
    before = time.monotonic()
    assert before <= shaper.reserve(1 << 30) <= time.monotonic()


def test_a_payload_takes_its_time(tmp_path: Path) -> None:
    """1 MB at 4 MB/s over a real socket: a quarter of a second or more; the bytes are the same."""
    left, right = socket.socketpair()
    sender, receiver = FrameStream(left, LONG_S), FrameStream(right, LONG_S)
    sender.pace = pace_of(tmp_path, LinkProfile(4e6))
    data = bytes(range(256)) * 4000
    began = time.monotonic()
    thread = threading.Thread(target=lambda: sender.send({"kind": "x"}, (memoryview(data),)))
    thread.start()
    header, nbytes = receiver.receive()
    out = bytearray(nbytes)
    receiver.read_into(memoryview(out))
    thread.join(LONG_S)
    assert time.monotonic() - began >= len(data) / 4e6
    assert header == {"kind": "x"} and bytes(out) == data
    sender.close()
    receiver.close()


def test_a_link_can_be_made_slower_while_it_is_used(tmp_path: Path) -> None:
    """For all ends of it, and for good: what was reserved before stays."""
    first, second = (LinkShaper(tmp_path / "link", LinkProfile(1000.0)) for _ in range(2))
    one = first.reserve(100_000)
    second.slow_down(10.0)
    two = first.reserve(100_000)
    three = second.reserve(10_000, training=True)
    assert abs(two - one - 1000) < 1e-6
    assert first.reserve(100_000) - two > 900 and three < two
