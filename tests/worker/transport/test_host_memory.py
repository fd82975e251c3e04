"""Messages and collectives that pass through host memory."""

from __future__ import annotations

import signal

import pytest
import torch

from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned, LinkFailed
from elastic.worker.transport.host_memory import HostMemoryTransport, ranks_sharing_a_device
from elastic.worker.transport.links import Links
from tests.worker.engine.rank_processes import Rank, Ranks, run_ranks

BOTH = (0, 1)


def open_through_host(rank: Rank, abandon: AbandonSignal | None = None) -> Links:
    links = rank.open(abandon, holder_sets=(BOTH,))
    links.data = HostMemoryTransport(links.control)
    return links


def exchange(rank: Rank) -> list[list[float]]:
    links, other = open_through_host(rank), 1 - rank.rank
    ahead = [links.recv(other, tag) for tag in (0, 1, 0)]
    sent = torch.empty(2)
    for value, tag in ((0.0, 0), (1.0, 1), (2.0, 0)):
        sent.fill_(10.0 * rank.rank + value)
        links.send(sent, other, tag)  # copied at once, so the tensor may change
    got = [receive.wait().tolist() for receive in ahead]
    links.flush()
    return got


def test_messages_arrive_in_order() -> None:
    first, second = run_ranks(exchange, 2)
    assert first == [[10.0] * 2, [11.0] * 2, [12.0] * 2]
    assert second == [[0.0] * 2, [1.0] * 2, [2.0] * 2]


def reduce_and_gather(rank: Rank) -> tuple[list[int], list[list[float]], list[float]]:
    links = open_through_host(rank)
    summed = torch.tensor([1, 2 + rank.rank], dtype=torch.int64)
    own = torch.full((2,), float(rank.rank), dtype=torch.bfloat16)
    gathered = [torch.full_like(own, -1.0) for _ in BOTH]
    waits = [links.all_reduce(summed, BOTH), links.all_gather(gathered, own, BOTH)]
    for wait in waits:
        wait()
        assert wait.done()
    return summed.tolist(), [output.tolist() for output in gathered], own.tolist()


def test_collectives_fill_the_callers_tensors() -> None:
    for rank, (summed, gathered, own) in enumerate(run_ranks(reduce_and_gather, 2)):
        assert summed == [2, 5]
        assert gathered == [[0.0] * 2, [1.0] * 2]
        assert own == [float(rank)] * 2


def wait_for_nothing(rank: Rank) -> str:
    links = open_through_host(rank)
    rank.report("open")
    if rank.rank == 1:
        rank.wait_for_parent()
        return ""
    try:
        links.recv(1).wait()
    except LinkFailed as failed:
        return f"failed {failed.ranks}"
    return "nothing happened"


def test_a_killed_rank_is_noticed() -> None:
    with Ranks(wait_for_nothing, 2) as ranks:
        assert ranks.reports() == ["open", "open"]
        ranks.signal(1, signal.SIGKILL)
        assert ranks.reports(0) == ["failed (1,)"]


def abandon_a_wait(rank: Rank) -> str:
    abandon = AbandonSignal()
    links = open_through_host(rank, abandon)
    receive = links.recv(1 - rank.rank)
    rank.report("waiting")
    abandon.set(rank.wait_for_parent())
    with pytest.raises(EpochAbandoned):
        receive.wait()
    return abandon.reason


def test_a_wait_can_be_abandoned() -> None:
    with Ranks(abandon_a_wait, 2) as ranks:
        assert ranks.reports() == ["waiting"] * 2
        ranks.send("another epoch")
        assert ranks.reports() == ["another epoch"] * 2


DEVICES = ("GPU-0" * 12, "GPU-1", "GPU-0" * 12)


def name_devices(rank: Rank) -> tuple[int, ...]:
    links = rank.open()
    return ranks_sharing_a_device(links.control, rank.size, DEVICES[rank.rank])


def test_ranks_that_share_a_device_are_found() -> None:
    assert run_ranks(name_devices, 3) == [(0, 2)] * 3
    assert run_ranks(name_devices, 2) == [()] * 2
