"""Compressed copies between vaults: the same bytes arrive; bad ones are rejected."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import blosc
import pytest

from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.domain import codec
from elastic.domain.errors import ChannelClosed, FieldError, VaultError
from elastic.domain.types import Copy
from elastic.rpc.bulk import blocks
from elastic.rpc.bulk.blocks import BLOCK_BYTES, BLOSC, pack, read_copy, unpack
from elastic.rpc.bulk.compression import (
    LEAST_SENDS,
    OVERHEAD_S,
    SAMPLE_EVERY,
    SENDS,
    CompressionPolicy,
)
from elastic.rpc.bulk.transfer import Put, Reply, VaultClient, split_address
from elastic.rpc.frames import FrameStream
from tests.agent.vault.copies import gradient, make, put
from tests.patience import LONG_S

MIB = 1 << 20


def sums(seed: int, nbytes: int) -> bytes:
    """Bytes like those of accumulated gradients: small numbers of 64 bits."""
    draw = random.Random(seed)
    words = struct.pack(f"<{4096}q", *(draw.randrange(-(1 << 34), 1 << 34) for _ in range(4096)))
    return (words * (nbytes // len(words) + 1))[:nbytes]


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault("a", tmp_path / "vault")


@pytest.fixture
def server(vault: Vault) -> Iterator[VaultServer]:
    server = VaultServer(vault, timeout_s=LONG_S, compressing=CompressionPolicy("on")).start()
    yield server
    server.close()


@pytest.fixture
def client(server: VaultServer) -> Iterator[VaultClient]:
    client = VaultClient(
        server.address, node="b", timeout_s=LONG_S, compressing=CompressionPolicy("on")
    )
    yield client
    client.close()


@pytest.fixture
def raw(server: VaultServer) -> Iterator[FrameStream]:
    """A connection for hand-made requests."""
    stream = FrameStream(socket.create_connection(split_address(server.address)), LONG_S)
    yield stream
    stream.close()


@pytest.mark.parametrize(
    "nbytes", [1, 7, 8, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * MIB + 12345]
)
def test_the_same_bytes_arrive_both_ways(vault: Vault, client: VaultClient, nbytes: int) -> None:
    bundle = [(make(d, layer=n), memoryview(d)) for n in range(3) for d in [sums(n, nbytes)]]
    client.put(bundle)
    assert vault.check_integrity() == () and len(vault.inventory()) == 3
    for copy, data in bundle:
        assert vault.read(copy.key) == data
        assert client.get(copy) == data


def test_random_bytes_cost_a_header_each() -> None:
    data = random.Random(1).randbytes(BLOCK_BYTES)
    block, out = pack(memoryview(data)), bytearray(BLOCK_BYTES)
    assert len(block) <= BLOCK_BYTES + 16
    unpack(block, memoryview(out))
    assert out == data


def test_blocks_of_several_threads_do_not_mix() -> None:
    data = [sums(n, BLOCK_BYTES) for n in range(4)]

    def there_and_back(number: int) -> bool:
        out = bytearray(BLOCK_BYTES)
        unpack(pack(memoryview(data[number % 4])), memoryview(out))
        return out == data[number % 4]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(there_and_back, range(100)))


def send(
    stream: FrameStream,
    bundle: list[tuple[Copy, list[bytes]]],
    lengths: dict[int, int] | None = None,
) -> Reply:
    """Send copies in the given blocks; `lengths` has false lengths of blocks."""
    request = Put(tuple(copy for copy, _ in bundle), (BLOSC,) * len(bundle))
    body = {"kind": "Put", "body": codec.encode(request)}
    stream.begin(body, sum(copy.nbytes for copy, _ in bundle))
    for _, given in bundle:
        for number, block in enumerate(given):
            length = (lengths or {}).get(number, len(block))
            stream.write(memoryview(struct.pack("<I", length) + block))
    return codec.decode(Reply, stream.receive()[0])


def cut(data: bytes) -> list[bytes]:
    return [pack(memoryview(data)[n : n + BLOCK_BYTES]) for n in range(0, len(data), BLOCK_BYTES)]


def harmed(block: bytes, at: int, value: int) -> bytes:
    return block[:at] + bytes([value]) + block[at + 1 :]


BOMB = blosc.compress(bytes(64 * MIB), typesize=8, shuffle=blosc.BITSHUFFLE, cname="lz4")
SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "a flipped byte": lambda block: harmed(block, len(block) // 2, block[len(block) // 2] ^ 0x55),
    "noise behind the header": lambda block: (
        block[:16] + random.Random(2).randbytes(len(block) - 16)
    ),
    "no header": lambda block: block[:7],
    "nothing": lambda block: b"",
    "cut short": lambda block: block[:-1],
    "a bomb": lambda block: BOMB,
    "a smaller block": lambda block: pack(memoryview(bytes(100))),
    "another block": lambda block: pack(memoryview(bytes(BLOCK_BYTES))),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_block_is_refused_and_the_connection_goes_on(
    vault: Vault, raw: FrameStream, how: str
) -> None:
    """No copy of its bundle is kept. The next bundle is kept."""
    before, data, after = sums(1, 1000), sums(2, 2 * MIB + 5), sums(3, 1000)
    good = cut(data)
    assert len(BOMB) < BLOCK_BYTES
    copies = [make(before, layer=1), make(data, layer=2), make(after, layer=3)]
    blocks_ = [cut(before), [good[0], SPOILT[how](good[1]), good[2]], cut(after)]
    refusal = send(raw, list(zip(copies, blocks_, strict=True)))
    assert "compressed block" in refusal.error or "arrived corrupt" in refusal.error
    assert vault.inventory() == ()
    assert send(raw, [(copies[1], good)]).error == ""
    assert vault.read(copies[1].key) == data and vault.check_integrity() == ()


def test_a_refused_bundle_is_read_to_its_end(vault: Vault, raw: FrameStream) -> None:
    vault.fence(3)
    data = sums(1, 2 * MIB)
    assert send(raw, [(make(data, epoch=2), cut(data)), (make(data, epoch=3), cut(data))]).stale
    assert send(raw, [(make(data, epoch=3), cut(data))]).error == ""


def test_an_impossible_length_ends_the_connection(
    vault: Vault, raw: FrameStream, client: VaultClient
) -> None:
    data = sums(1, MIB)
    with pytest.raises(ChannelClosed):
        send(raw, [(make(data), cut(data))], lengths={0: MIB + 17})
    assert client.inventory() == () == vault.inventory()


@pytest.mark.parametrize("codecs", [("zip",), (BLOSC, BLOSC)])
def test_unknown_codecs_end_the_connection(
    vault: Vault, raw: FrameStream, codecs: tuple[str, ...]
) -> None:
    header: dict[str, Any] = {"kind": "Put", "body": codec.encode(Put((make(b"x" * 9),), codecs))}
    with pytest.raises(ChannelClosed):
        raw.send(header, (memoryview(b"x" * 9),))
        raw.receive()
    assert vault.inventory() == ()


def test_noise_never_crashes_nor_writes_beyond() -> None:
    data, draw = sums(1, 1 << 16), random.Random(3)
    good = pack(memoryview(data))
    room = bytearray(b"#" * 64 + bytes(len(data)) + b"#" * 64)
    for _ in range(2000):
        block = bytearray(good)
        for _ in range(draw.choice((1, 2, 40))):
            block[draw.randrange(draw.choice((16, len(block))))] = draw.randrange(256)
        try:
            unpack(block, memoryview(room)[64:-64])
        except VaultError:
            continue
    assert room[:64] == room[-64:] == b"#" * 64


def test_what_comes_spoilt_out_of_a_vault_is_no_copy(
    vault: Vault, client: VaultClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sums(1, MIB)
    copy = put(vault, make(data), data)
    monkeypatch.setattr(blocks, "pack", lambda piece: harmed(pack(piece), 5000, 7)[:-9] + bytes(9))
    with pytest.raises(VaultError, match="does not match its checksum"):
        client.get(copy)
    monkeypatch.undo()
    assert client.get(copy) == data, "the vault and the connection are intact"


def test_a_reply_with_an_unknown_codec_is_an_error() -> None:
    here, there = socket.socketpair()
    with here, there, pytest.raises(FieldError, match="codec"):
        read_copy(FrameStream(here, 5), memoryview(bytearray(9)), "zip", lambda piece: None)


# ---- when copies are compressed ----


class Clock:
    """Each call takes a millisecond."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.looks * 1e-3


def ask(compressing: CompressionPolicy, data: bytes, times: int = 1) -> list[str]:
    return [compressing.codec(gradient(data, 1, {0}), memoryview(data)) for _ in range(times)]


def slow(compressing: CompressionPolicy) -> None:
    """Sends over a link of 10 MiB/s."""
    for _ in range(SENDS):
        compressing.sent(10 * MIB, 1.0)


def test_slow_links_switch_it_on_and_fast_ones_off(caplog: pytest.LogCaptureFixture) -> None:
    compressing, data = CompressionPolicy("auto", Clock()), sums(1, 4 * MIB)
    with caplog.at_level("INFO"):
        assert ask(compressing, data) == [""], "the bandwidth of the link is unknown"
        for _ in range(LEAST_SENDS):
            assert ask(compressing, data) == [""], "a single send is not enough"
            compressing.sent(10 * MIB, 1.0)
        assert ask(compressing, data, 3) == [BLOSC] * 3
        assert ask(compressing, b"x" * 1000) == [""], "too small"
        compressing.sent(1000, 1.0)
        compressing.sent(4000 * MIB, 1.0)
        assert ask(compressing, data) == [""], "the fastest send counts"
        slow(compressing)
        assert ask(compressing, data) == [BLOSC]
    told = [record.getMessage() for record in caplog.records]
    assert ["uncompressed" not in text for text in told] == [True, False, True]
    assert all("MB/s" in text for text in told)


def test_what_does_not_shrink_is_not_compressed() -> None:
    compressing, noise = CompressionPolicy("auto", Clock()), random.Random(1).randbytes(4 * MIB)
    slow(compressing)
    assert ask(compressing, noise) == [""]
    state = make(sums(1, 4 * MIB))
    assert compressing.codec(state, memoryview(sums(1, 4 * MIB))) == BLOSC, "each kind has samples"


def test_samples_are_taken_now_and_then() -> None:
    clock = Clock()
    compressing, data = CompressionPolicy("auto", clock), sums(1, 2 * MIB)
    slow(compressing)
    assert set(ask(compressing, data, SAMPLE_EVERY)) == {BLOSC}
    assert clock.looks == 2
    noise = random.Random(1).randbytes(2 * MIB)
    assert ask(compressing, noise) == [""] and clock.looks == 4


def test_turning_round_is_not_the_link() -> None:
    compressing = CompressionPolicy("auto", Clock())
    for _ in range(LEAST_SENDS):
        compressing.sent(MIB, OVERHEAD_S + 1e-3)
    assert compressing.link_bytes_per_s == pytest.approx(MIB / 1e-3)
    compressing.sent(MIB, 0.5 * OVERHEAD_S)
    assert compressing.link_bytes_per_s == pytest.approx(20 * MIB / OVERHEAD_S)


@pytest.mark.parametrize("mode", ["on", "off"])
def test_on_and_off_measure_nothing(mode: str) -> None:
    clock = Clock()
    compressing = CompressionPolicy(mode, clock)
    slow(compressing)
    assert ask(compressing, sums(1, MIB)) == [BLOSC if mode == "on" else ""]
    assert clock.looks == 0


def test_puts_tell_how_fast_the_link_is(vault: Vault) -> None:
    """On a link of 5 MB/s the first bundles are sent uncompressed and the next compressed."""
    waited = threading.Event()

    def pace(nbytes: int) -> None:
        waited.wait(nbytes / 5e6)

    server = VaultServer(vault, timeout_s=LONG_S).start()
    compressing = CompressionPolicy("auto")
    client = VaultClient(
        server.address,
        timeout_s=LONG_S,
        pace=pace,
        compressing=compressing,
    )
    data = sums(1, MIB)
    sent: list[int] = []
    compressing.sent, seen = lambda n, s: (sent.append(n), seen(n, s))[0], compressing.sent  # type: ignore
    for _ in range(LEAST_SENDS + 2):
        client.put([(gradient(data, 1, {0}), memoryview(data))])
    assert set(sent[:LEAST_SENDS]) == {len(data)} and max(sent[LEAST_SENDS:]) < 0.7 * len(data)
    assert 0 < compressing.link_bytes_per_s < 5.1e6
    client.close()
    server.close()
