"""Leaving an epoch in the middle of a message: gloo does not tell those who wait for it that it will not end.

The peer was killed, or it hangs and the epoch is left. Either way who waits goes on, and what is left behind holds up
nobody: neither the next epoch nor the collection of what the old one used.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

from elastic.worker.transport import gloo as transport
from elastic.worker.transport import threads
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned, LinkFailed
from elastic.worker.transport.gloo import Operation
from elastic.worker.transport.links import Links, data_tag, header_tag
from elastic.worker.transport.tensor_header import MAX_DIMS
from tests.patience import LONG_S
from tests.worker.engine.rank_processes import Rank, Ranks

LONG = 16 * 2**20
"""Elements of a message that no socket's buffers hold."""
VICTIM = 2
HANGS = "node2 hangs"
Survivor = Callable[[Rank, Links, threading.Event], None]
Victim = Callable[[Rank, Links], None]


def survive(rank: Rank, kind: str) -> tuple[str, float]:
    """Rank 0 is in the middle of a message with the victim; then it meets rank 1 in epoch 2."""
    abandon = AbandonSignal()
    links = rank.open(abandon, holder_sets=((0, VICTIM),))
    if rank.rank == VICTIM:
        KINDS[kind][1](rank, links)
        threading.Event().wait()
    told, word = "", threading.Event()

    def listen() -> None:
        while (order := rank.await_word()) != HANGS:
            assert order == "go"
            word.set()
        abandon.set(order)

    threading.Thread(target=listen, daemon=True).start()
    try:
        if rank.rank == 0:
            KINDS[kind][0](rank, links, word)
        else:
            links.gather(torch.zeros(1))
    except (EpochAbandoned, LinkFailed) as reason:
        told = type(reason).__name__
    links.close()
    threads.wait(0.5)  # what closes is over, unless it looks after what is not
    del links
    gc.collect()
    again = rank.open(epoch=2, world_size=2)
    sums = torch.tensor([1.0 + rank.rank])
    again.all_reduce(sums, (0, 1))()
    return told, sums.item()


def send_victim(rank: Rank, links: Links) -> None:
    """Its receive is posted, and the sender knows of it: what comes is written at once."""
    links.recv(0).wait()
    links.recv(0)
    links.send(torch.zeros(1), 0, 1)
    links.flush()
    rank.report("ready")


def send_survivor(rank: Rank, links: Links, word: threading.Event) -> None:
    links.send(torch.ones(LONG), VICTIM)
    links.recv(VICTIM, 1).wait()
    links.flush()
    rank.report("ready")
    assert word.wait(LONG_S)
    links.send(torch.ones(LONG), VICTIM)
    rank.report("in the middle")
    links.flush()


def receive_victim(rank: Rank, links: Links) -> None:
    links.send(torch.ones(LONG), 0)
    links.recv(0, 1).wait()
    links.flush()
    rank.report("ready")
    assert rank.await_word() == "go"
    links.send(torch.ones(LONG), 0)
    rank.report("in the middle")


def receive_survivor(rank: Rank, links: Links, word: threading.Event) -> None:
    links.recv(VICTIM).wait()
    message = links.recv(VICTIM)
    links.send(torch.zeros(1), VICTIM, 1)
    links.flush()
    rank.report("ready")
    message.wait()


def give(links: Links) -> Operation:
    """Rank 0's tensor for the victim too. Of the collectives this one ends with a send, so that it can hang in one."""
    group, ranks = links.control, (0, VICTIM)
    return group.collective(lambda gloo: gloo.broadcast(torch.ones(LONG), 0), ranks)


def collective_victim(rank: Rank, links: Links) -> None:
    links.all_reduce(torch.ones(1), (0, VICTIM))()
    give(links)
    links.send(torch.zeros(1), 0)
    links.flush()
    rank.report("ready")


def collective_survivor(rank: Rank, links: Links, word: threading.Event, wait: bool = True) -> None:
    links.all_reduce(torch.ones(1), (0, VICTIM))()
    links.recv(VICTIM).wait()
    rank.report("ready")
    assert word.wait(LONG_S)
    given = give(links)
    rank.report("in the middle")
    if wait:
        with links.guard(VICTIM):
            links.control.wait(given)
    else:
        links.gather(torch.zeros(1))


KINDS: dict[str, tuple[Survivor, Victim]] = {
    "send": (send_survivor, send_victim),
    "receive": (receive_survivor, receive_victim),
    "collective": (collective_survivor, collective_victim),
    "collective that nobody waits for": (partial(collective_survivor, wait=False), collective_victim),
}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("kind", KINDS)
def test_who_is_in_the_middle_of_a_message_goes_on(kind: str, end: signal.Signals) -> None:
    stopped, writes = (0, VICTIM) if kind == "receive" else (VICTIM, 0)
    with Ranks(survive, 3, kind) as ranks:
        assert ranks.reports(0, VICTIM) == ["ready"] * 2
        ranks.signal(stopped, signal.SIGSTOP)
        ranks.tell("go", writes)
        assert ranks.reports(writes) == ["in the middle"]
        ranks.signal(VICTIM, end)
        if stopped == 0:
            ranks.signal(0, signal.SIGCONT)
        if end is signal.SIGSTOP:
            ranks.tell(HANGS, 0, 1)
        for told, total in ranks.reports(0, 1):
            assert (told, total) in [("LinkFailed", 3.0), ("EpochAbandoned", 3.0)]


def outlast(rank: Rank) -> str:
    """Rank 2 has done its part and closes, while rank 0 still lacks what comes from rank 1."""
    links, everybody = rank.open(), (0, 1, 2)
    links.gather(torch.zeros(1))
    if rank.rank == 2:
        links.close()
        threads.wait(LONG_S)
        return "closed"
    if rank.rank == 1:
        rank.await_word()
        links.send(torch.ones(1), 0)
        links.flush()
        return "sent"
    transport.DISCONNECT_GRACE_S, probe = LONG_S, transport._probe

    def told(group: transport.BackendGroup, peer: int) -> None:
        try:
            probe(group, peer)
        except RuntimeError:
            transport._probe = probe
            rank.report("gone")
            raise

    transport._probe = told
    rank.await_word()
    header, tensor = torch.zeros(2 + MAX_DIMS, dtype=torch.int64), torch.zeros(1)
    for into, tag in ((header, header_tag(0)), (tensor, data_tag(0))):
        expected = links.control.collective(lambda group, t=into, n=tag: group.recv([t], 1, n), everybody)  # type: ignore[misc]
        links.control.wait(expected)
    return "received"


def test_who_is_through_may_close_before_the_others_are() -> None:
    with Ranks(outlast, 3) as ranks:
        assert ranks.reports(2) == ["closed"]
        ranks.tell("wait", 0)
        assert ranks.reports(0) == ["gone"]
        ranks.tell("send", 1)
        assert ranks.reports(0, 1) == ["received", "sent"]
