"""Leaving an epoch in the middle of a message, which gloo does not fail by itself.

The peer was killed, or it hangs and the epoch is abandoned. In both cases the wait ends, and the
abandoned operation blocks neither the next epoch nor the release of the old epoch's objects.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch._C._distributed_c10d import Work

from elastic.worker.transport import gloo, threads
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned, LinkFailed
from elastic.worker.transport.interface import BackendGroup, Operation
from elastic.worker.transport.links import Links, data_tag, header_tag
from elastic.worker.transport.value_header import empty_header
from tests.patience import LONG_S
from tests.worker.engine.rank_processes import Rank, Ranks

LONG = 16 * 2**20
"""Elements of a message that exceeds the sockets' buffers."""
VICTIM = 2
HANGS = "node2 hangs"
Survivor = Callable[[Rank, Links, threading.Event], None]
Victim = Callable[[Rank, Links], None]


def survive(rank: Rank, kind: str) -> tuple[str, float]:
    """Rank 0 is interrupted in a message with the victim, then connects to rank 1 in epoch 2."""
    abandon = AbandonSignal()
    links = rank.open(abandon, holder_sets=((0, VICTIM),))
    if rank.rank == VICTIM:
        KINDS[kind][1](rank, links)
        threading.Event().wait()
    outcome, go = "", threading.Event()

    def listen() -> None:
        while (order := rank.wait_for_parent()) != HANGS:
            assert order == "go"
            go.set()
        abandon.set(order)

    threading.Thread(target=listen, daemon=True).start()
    try:
        if rank.rank == 0:
            KINDS[kind][0](rank, links, go)
        else:
            links.gather(torch.zeros(1))
    except (EpochAbandoned, LinkFailed) as reason:
        outcome = type(reason).__name__
    links.close()
    threads.wait(0.5)  # closing is done, unless it waits for an operation that hangs
    del links
    gc.collect()
    again = rank.open(epoch=2, world_size=2)
    sums = torch.tensor([1.0 + rank.rank])
    again.all_reduce(sums, (0, 1))()
    return outcome, sums.item()


def send_victim(rank: Rank, links: Links) -> None:
    """Post a receive and tell the sender, so that the message is written directly."""
    links.recv(0).wait()
    links.recv(0)
    links.send(torch.zeros(1), 0, 1)
    links.flush()
    rank.report("ready")


def send_survivor(rank: Rank, links: Links, go: threading.Event) -> None:
    links.send(torch.ones(LONG), VICTIM)
    links.recv(VICTIM, 1).wait()
    links.flush()
    rank.report("ready")
    assert go.wait(LONG_S)
    links.send(torch.ones(LONG), VICTIM)
    rank.report("in the middle")
    links.flush()


def receive_victim(rank: Rank, links: Links) -> None:
    links.send(torch.ones(LONG), 0)
    links.recv(0, 1).wait()
    links.flush()
    rank.report("ready")
    assert rank.wait_for_parent() == "go"
    links.send(torch.ones(LONG), 0)
    rank.report("in the middle")


def receive_survivor(rank: Rank, links: Links, go: threading.Event) -> None:
    links.recv(VICTIM).wait()
    message = links.recv(VICTIM)
    links.send(torch.zeros(1), VICTIM, 1)
    links.flush()
    rank.report("ready")
    message.wait()


def broadcast(links: Links) -> Operation:
    """Broadcast rank 0's tensor to the victim. This collective ends with a send, which can hang."""
    group, ranks = links.control, (0, VICTIM)
    return group.collective(lambda backend: backend.broadcast(torch.ones(LONG), 0), ranks)


def collective_victim(rank: Rank, links: Links) -> None:
    links.all_reduce(torch.ones(1), (0, VICTIM))()
    broadcast(links)
    links.send(torch.zeros(1), 0)
    links.flush()
    rank.report("ready")


def collective_survivor(rank: Rank, links: Links, go: threading.Event, wait: bool = True) -> None:
    links.all_reduce(torch.ones(1), (0, VICTIM))()
    links.recv(VICTIM).wait()
    rank.report("ready")
    assert go.wait(LONG_S)
    operation = broadcast(links)
    rank.report("in the middle")
    if wait:
        with links.translate_errors(VICTIM):
            links.control.wait(operation)
    else:
        links.gather(torch.zeros(1))


KINDS: dict[str, tuple[Survivor, Victim]] = {
    "send": (send_survivor, send_victim),
    "receive": (receive_survivor, receive_victim),
    "collective": (collective_survivor, collective_victim),
    "collective without a wait": (partial(collective_survivor, wait=False), collective_victim),
}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_message_does_not_block_the_survivors(
    kind: str, end: signal.Signals
) -> None:
    stopped, writes = (0, VICTIM) if kind == "receive" else (VICTIM, 0)
    with Ranks(survive, 3, kind) as ranks:
        assert ranks.reports(0, VICTIM) == ["ready"] * 2
        ranks.signal(stopped, signal.SIGSTOP)
        ranks.send("go", writes)
        assert ranks.reports(writes) == ["in the middle"]
        ranks.signal(VICTIM, end)
        if stopped == 0:
            ranks.signal(0, signal.SIGCONT)
        if end is signal.SIGSTOP:
            ranks.send(HANGS, 0, 1)
        for outcome, total in ranks.reports(0, 1):
            assert (outcome, total) in [("LinkFailed", 3.0), ("EpochAbandoned", 3.0)]


def wait_after_a_peer_closed(rank: Rank) -> str:
    """Rank 2 has finished and closes, while rank 0 still waits for a message of rank 1."""
    links, all_ranks = rank.open(), (0, 1, 2)
    links.gather(torch.zeros(1))
    if rank.rank == 2:
        links.close()
        threads.wait(LONG_S)
        return "closed"
    if rank.rank == 1:
        rank.wait_for_parent()
        links.send(torch.ones(1, requires_grad=True), 0)  # its header has no text
        links.flush()
        return "sent"
    gloo.DISCONNECT_GRACE_S, probe = LONG_S, gloo._probe

    def report_disconnect(group: BackendGroup, peer: int) -> None:
        try:
            probe(group, peer)
        except RuntimeError:
            gloo._probe = probe
            rank.report("gone")
            raise

    gloo._probe = report_disconnect
    rank.wait_for_parent()
    header, tensor = empty_header(), torch.zeros(1)
    for into, tag in ((header, header_tag(0)), (tensor, data_tag(0))):

        def receive(group: BackendGroup, into: torch.Tensor = into, tag: int = tag) -> Work:
            return group.recv([into], 1, tag)

        expected = links.control.collective(receive, all_ranks)
        links.control.wait(expected)
    return "received"


def test_a_rank_that_has_finished_may_close_before_the_others() -> None:
    with Ranks(wait_after_a_peer_closed, 3) as ranks:
        assert ranks.reports(2) == ["closed"]
        ranks.send("wait", 0)
        assert ranks.reports(0) == ["gone"]
        ranks.send("send", 1)
        assert ranks.reports(0, 1) == ["received", "sent"]
