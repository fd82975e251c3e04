"""Opening and aborting NCCL's communicators, with stubs that wait where the real ones do.

What the stubs do was measured on a GPU (docs/design/gpu.md); `test_nccl_on_gpu` runs the real ones.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import cast

import pytest
import torch
from torch._C._distributed_c10d import Store, TCPStore

from elastic.worker.transport import nccl
from elastic.worker.transport.nccl import NcclGroup, NcclTransport, await_aborts
from tests.patience import LONG_S

DEVICE = torch.device("cuda", 0)
CHAIN = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]


class Device:
    """A device whose kernels belong to communicators, of which one rank has several."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running: set[StubGroup] = set()
        """The communicators with a kernel that waits for its peer."""
        self.someone_waits = threading.Event()
        """Set when a communicator is about to ask the store for what its peer writes there."""

    def free(self, group: StubGroup) -> None:
        """End the kernel of `group`, and wait for all others, as cudaFree does."""
        with self.changed:
            self.running.discard(group)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: not self.running, LONG_S), "device is held"


class StubGroup:
    """A communicator. It connects through the store, and its abort frees memory of the device."""

    def __init__(
        self, device: Device, store: Store, rank: int = 0, size: int = 1, number: int = 0
    ) -> None:
        self.device, self.store, self.rank, self.size = device, store, rank, size
        self.number = number
        self.aborted = threading.Event()

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == DEVICE
        if self.rank > 0:
            self.device.someone_waits.set()
            self.store.get("id")
        else:
            self.device.someone_waits.wait(0.2)
            time.sleep(0.02)  # so that the other thread is likely to be inside `get`
            self.store.set("id", "of this communicator")
        self.store.add("connected", 1)
        while self.store.add("connected", 0) < self.size:
            time.sleep(0.001)
        with self.device.changed:
            self.device.running.add(self)

    def abort(self) -> None:
        self.device.free(self)
        self.aborted.set()


class Rank:
    """A transport, its device, and the communicators that it made."""

    def __init__(self, port: int, rank: int = 0, kind: type[StubGroup] = StubGroup) -> None:
        self.device, self.groups = Device(), list[StubGroup]()
        within = timedelta(seconds=LONG_S)
        self.store = TCPStore("127.0.0.1", port, None, False, within)

        def new_group(store: Store, rank: int, size: int, timeout_s: float) -> NcclGroup:
            self.groups.append(kind(self.device, store, rank, size, len(self.groups)))
            return cast(NcclGroup, self.groups[-1])

        self.transport = NcclTransport(self.store, rank, DEVICE, LONG_S, new_group)


@pytest.fixture
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LONG_S), False)
    yield store.port


@pytest.fixture(autouse=True)
def no_former_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_aborts", nccl._Aborts())


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Run `work` in a thread; return it, and the list that will hold its error."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, errors


def test_all_pairs_open_at_once_over_one_store(port: int) -> None:
    ranks = [Rank(port, rank) for rank in range(4)]
    opening = [in_thread(partial(rank.transport.open, CHAIN, [(0, 1, 2, 3)])) for rank in ranks]
    for thread, errors in opening:
        thread.join(LONG_S)
        assert not thread.is_alive() and not errors
    assert [len(rank.groups) for rank in ranks] == [3, 5, 5, 3]


def open_sets(rank: Rank, count: int) -> None:
    for other in range(1, count + 1):
        rank.device.someone_waits.set()
        rank.store.add(f"set-0-{other}/connected", 1)
        rank.transport.open_group((0, other))


def test_all_communicators_are_aborted_together(port: int) -> None:
    """Each abort waits for the kernels of all others."""
    rank = Rank(port)
    open_sets(rank, 64)
    rank.transport.close()
    await_aborts()
    assert all(group.aborted.is_set() for group in rank.groups)


class HalfWedged(StubGroup):
    """A communicator that cannot be aborted if its number is odd, until `released` is set."""

    released: threading.Event

    def abort(self) -> None:
        if self.number % 2:
            self.released.wait()
        self.aborted.set()


class Failing(StubGroup):
    """A communicator whose abort fails."""

    def abort(self) -> None:
        raise RuntimeError("unhandled system error")


@pytest.mark.parametrize(("kind", "left"), [(HalfWedged, 32), (Failing, 64)])
def test_a_worker_that_cannot_abort_its_communicators_ends(
    kind: type[StubGroup], left: int, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its main thread is not about to open the next ones. The limit is so short that some
    of the others may not be aborted yet, on a busy machine."""
    ended: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(nccl, "end_worker", ended.put)
    monkeypatch.setattr(nccl, "ABORT_S", 0.2)
    HalfWedged.released = threading.Event()
    rank = Rank(port, kind=kind)
    open_sets(rank, 64)
    rank.transport.close()
    number, text = ended.get(timeout=LONG_S).split(" ", 1)
    assert left <= int(number) <= 64 and text == "communicators could not be aborted within 0.2 s"
    if kind is HalfWedged:
        assert all(group.aborted.wait(LONG_S) for group in rank.groups if not group.number % 2)
        assert not any(group.aborted.is_set() for group in rank.groups if group.number % 2)
    HalfWedged.released.set()


def test_a_worker_ends_as_by_a_crash() -> None:
    code = "from elastic.worker.transport.nccl import end_worker; end_worker('why')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert "why: this worker ends" in done.stderr


def test_a_transport_opens_when_the_former_one_is_aborted(port: int) -> None:
    first, second = Rank(port), Rank(port)
    open_sets(first, 1)
    held = StubGroup(first.device, first.store)
    first.device.running.add(held)
    first.transport.close()
    thread, errors = in_thread(lambda: second.transport.open((), ()))
    thread.join(0.2)
    assert thread.is_alive()
    first.device.free(held)
    thread.join(LONG_S)
    assert not thread.is_alive() and not errors


def test_close_ends_an_opening_whose_peer_is_absent(port: int) -> None:
    rank = Rank(port)
    thread, errors = in_thread(lambda: rank.transport.open([(0, 1), (1, 0)], []))
    end = time.monotonic() + LONG_S
    while len(rank.groups) < 2 and time.monotonic() < end:
        time.sleep(0.001)
    rank.transport.close()
    thread.join(LONG_S)
    assert not thread.is_alive() and "closed" in str(errors[0])
    peer = Rank(port, 1)
    peer.transport.open([(0, 1), (1, 0)], [])
    end = time.monotonic() + LONG_S
    while len(nccl._aborts._kept) < 2 and time.monotonic() < end:
        time.sleep(0.001)
    assert not any(group.aborted.is_set() for group in rank.groups)
    await_aborts()  # they connected after all, and must not hold the device of the next epoch
    assert all(group.aborted.is_set() for group in rank.groups)
    with pytest.raises(RuntimeError, match="closed"):
        rank.transport.open_group((0, 1))


def test_a_message_to_a_rank_that_was_not_announced_is_refused(port: int) -> None:
    rank = Rank(port)
    rank.transport.open([], [])
    with pytest.raises(RuntimeError, match="not announced"):
        rank.transport.send(torch.ones(1), 2, 0)
