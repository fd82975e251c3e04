"""Leaving an epoch: signals, dead peers, hung peers, peers that never arrive.

The transport's own timeout is ten times the tests' limit for a report. So a report shows that a
wait was ended early.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import closing

import pytest
import torch

from elastic.worker.transport.cancellation import (
    AbandonSignal,
    EpochAbandoned,
    LinkFailed,
    run_abandonable,
)
from elastic.worker.transport.links import Links
from tests.patience import LONG_S
from tests.worker.engine.rank_processes import Rank, Ranks


def test_the_first_reason_stays_and_callbacks_run_once() -> None:
    abandon, calls = AbandonSignal(), []
    abandon.subscribe(lambda: calls.append("early"))
    abandon.check()
    abandon.set("a fault")
    abandon.set("another")
    abandon.subscribe(lambda: calls.append("late"))
    assert (abandon.reason, calls, abandon.wait(0)) == ("a fault", ["early", "late"], True)
    with pytest.raises(EpochAbandoned, match="a fault"):
        abandon.check()


def test_a_gentle_signal_can_be_set_again() -> None:
    abandon, calls = AbandonSignal(), list[bool]()
    abandon.subscribe(lambda: calls.append(abandon.gentle))
    abandon.set("halt at the meeting point", gently=True)
    abandon.subscribe(lambda: calls.append(abandon.gentle))
    abandon.set("halt at the meeting point", gently=True)
    assert calls == [True, True] and abandon.is_set() and abandon.gentle
    abandon.set("halt now")
    abandon.set("halt now")
    assert calls == [True, True, False, False]
    assert (abandon.reason, abandon.gentle) == ("halt at the meeting point", False)
    abandon.set("too late", gently=True)
    assert not abandon.gentle
    with pytest.raises(EpochAbandoned, match="halt at the meeting point"):
        abandon.check()


def test_the_result_of_abandoned_work_is_discarded() -> None:
    abandon, release, discarded = AbandonSignal(), threading.Event(), threading.Event()

    def work() -> int:
        abandon.set("changed plans")
        release.wait()
        return 1

    with pytest.raises(EpochAbandoned):
        run_abandonable(work, abandon, "work", lambda result: discarded.set())
    assert not discarded.is_set()
    release.set()
    assert discarded.wait(LONG_S)


def test_work_returns_or_raises() -> None:
    assert run_abandonable(lambda: 3, AbandonSignal(), "work") == 3
    with pytest.raises(ZeroDivisionError):
        run_abandonable(lambda: 1 // 0, AbandonSignal(), "work")


def wait_recv(links: Links, rank: int) -> None:
    """Each rank waits for the rank before it. The last rank is the victim."""
    links.recv((rank - 1) % links.world_size).wait()


def wait_send(links: Links, rank: int) -> None:
    links.send(torch.zeros(4_000_000), (rank - 1) % links.world_size)
    links.flush()


def wait_gather(links: Links, rank: int) -> None:
    links.gather(torch.zeros(1))


def wait_reduce(links: Links, rank: int) -> None:
    links.all_reduce(torch.zeros(100_000), tuple(range(links.world_size)))()


WAITS: list[Callable[[Links, int], None]] = [wait_recv, wait_send, wait_gather, wait_reduce]


def wait_then_reopen(
    rank: Rank, wait: Callable[[Links, int], None]
) -> tuple[str, str, list[float]]:
    """Wait in epoch 1 until a link fails, then connect to the other survivors in epoch 2."""
    abandon = AbandonSignal()
    links = rank.open(abandon)
    rank.report("open")
    if rank.rank == rank.size - 1:
        rank.wait_for_parent()
    threading.Thread(target=lambda: abandon.set(rank.wait_for_parent()), daemon=True).start()
    try:
        wait(links, rank.rank)
        kind, detail = "done", ""
    except EpochAbandoned as reason:
        kind, detail = "abandoned", str(reason)
    except LinkFailed as failure:
        kind, detail = "failed", str(failure.ranks)
    again = rank.open(epoch=2, world_size=rank.size - 1)
    sums = torch.tensor([1.0 + rank.rank])
    again.all_reduce(sums, tuple(range(rank.size - 1)))()
    return kind, detail, sums.tolist()


@pytest.mark.parametrize("wait", WAITS)
def test_a_killed_rank_wakes_all_others(wait: Callable[[Links, int], None]) -> None:
    """Ranks that are not its neighbours wake too, and all suspect the right rank."""
    with Ranks(wait_then_reopen, 4, wait) as ranks:
        ranks.reports()
        ranks.signal(3, signal.SIGKILL)
        for kind, detail, sums in ranks.reports(0, 1, 2):
            assert (kind, detail) == ("failed", "(3,)")
            assert sums == [6.0]


@pytest.mark.parametrize("wait", WAITS)
def test_a_hung_rank_is_left_behind_after_abandoning(wait: Callable[[Links, int], None]) -> None:
    with Ranks(wait_then_reopen, 4, wait) as ranks:
        ranks.reports()
        ranks.signal(3, signal.SIGSTOP)
        ranks.send("node3 hangs", 0, 1, 2)
        for kind, detail, sums in ranks.reports(0, 1, 2):
            assert kind in ("abandoned", "failed")
            assert kind == "failed" or detail == "node3 hangs"
            assert sums == [6.0]


def open_without_rank_2(rank: Rank) -> list[float]:
    """Rank 2 never arrives in epoch 1. The others abandon it and connect in epoch 2."""
    if rank.rank == 2:
        rank.report("absent")
        rank.wait_for_parent()
    abandon = AbandonSignal()
    threading.Thread(target=lambda: abandon.set(rank.wait_for_parent()), daemon=True).start()
    rank.report("opening")
    with pytest.raises(EpochAbandoned):
        rank.open(abandon)
    links = rank.open(epoch=2, world_size=2)
    return [t.item() for t in links.gather(torch.tensor([float(rank.rank)]))]


def test_opening_can_be_abandoned() -> None:
    with Ranks(open_without_rank_2, 3) as ranks:
        ranks.reports()
        ranks.send("rank 2 is gone", 0, 1)
        assert ranks.reports(0, 1) == [[0.0, 1.0]] * 2


def reduce_without_rank_2(rank: Rank) -> str:
    """The group (0, 2) never opens, because rank 2 does not open it."""
    abandon = AbandonSignal()
    links = rank.open(abandon, holder_sets=((0, 2),) if rank.rank == 0 else ())
    rank.report("open")
    if rank.rank != 0:
        return "idle"
    threading.Thread(target=lambda: abandon.set(rank.wait_for_parent()), daemon=True).start()
    try:
        links.all_reduce(torch.zeros(3), (0, 2))()
    except EpochAbandoned as reason:
        return str(reason)
    return "reduced"


def test_a_group_that_never_opens_can_be_abandoned() -> None:
    with Ranks(reduce_without_rank_2, 3) as ranks:
        ranks.reports()
        ranks.send("over", 0)
        assert ranks.reports(0) == ["over"]


def many_epochs(rank: Rank) -> list[float]:
    """Nine epochs are abandoned during a message. The tenth must not receive their messages."""
    for epoch in range(1, 10):
        abandon = AbandonSignal()
        # The other rank may leave before this one has connected.
        left = pytest.raises((EpochAbandoned, LinkFailed))
        with left, closing(rank.open(abandon, epoch=epoch)) as links:
            links.send(torch.full((1000,), -1.0), 1 - rank.rank)
            expected = links.recv(1 - rank.rank)
            abandon.set(f"end of {epoch}")
            expected.wait()
    links = rank.open(epoch=10)
    links.send(torch.full((1000,), float(rank.rank)), 1 - rank.rank)
    got = links.recv(1 - rank.rank).wait()
    links.flush()
    return sorted(set(got.tolist()))


def test_epochs_do_not_mix() -> None:
    with Ranks(many_epochs, 2) as ranks:
        assert ranks.reports() == [[1.0], [0.0]]
