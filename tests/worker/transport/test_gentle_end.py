"""A worker leaves a collective, and its pipeline goes on: a gentle signal, or a failed collective.

Ranks 0 and 1 are a pipeline, ranks 2 and 3 another one. Rank 1 has sent its last message to rank 0,
which has not received it yet.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elastic.planning.cost.profile import LinkProfile
from elastic.rpc.link_shaping import LinkShaper
from elastic.worker.transport import threads
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned, LinkFailed
from elastic.worker.transport.links import Links
from tests.patience import LONG_S
from tests.worker.engine.rank_processes import Rank, Ranks

HOLDERS = (1, 3)
PIPELINES = ((0, 1), (2, 3))
GENTLY, NOW = "gently", "now"


def gather(links: Links) -> None:
    links.gather(torch.zeros(1))


def reduce(links: Links) -> None:
    links.all_reduce(torch.zeros(1000), HOLDERS)()


def gather_portions(links: Links) -> None:
    links.all_gather([torch.zeros(9), torch.zeros(9)], torch.zeros(9), HOLDERS)()


def receive(links: Links) -> None:
    """As for tied tensors, whose sum other stages send."""
    links.recv(0, 7).wait()


COLLECTIVES: list[Callable[[Links], None]] = [gather, reduce, gather_portions]


def first_stage(rank: Rank, links: Links) -> list[object]:
    """Return what rank 0 finds: the last message, lost connections, how a later wait ends."""
    first, message, later = links.recv(1), links.recv(1), links.recv(1, 1)
    first.wait()  # its header lets the second message be received during the computation
    rank.report("computes")
    rank.wait_for_parent()  # computes, until rank 1 has left
    got = message.wait().tolist()
    lost = [r for r in links.control.disconnected() if r == 1]
    rank.report([got, lost])
    try:
        later.wait()
    except LinkFailed as error:
        return [type(error).__name__]
    return ["received"]


def last_stage(rank: Rank, links: Links, wait: Callable[[Links], None]) -> str:
    """Send the last message, and return how the wait for other pipelines ends."""
    for value in (0.0, 1.0):
        links.send(torch.full((2,), value), 0)
    links.flush()
    rank.report("waits")
    try:
        wait(links)
    except (EpochAbandoned, LinkFailed) as error:
        return type(error).__name__
    return "done"


def leave_gently(rank: Rank, wait: Callable[[Links], None], absent: bool, path: str) -> object:
    """If `absent`, the second pipeline does not open its links."""
    if absent and rank.rank >= 2:
        rank.report("absent")
        return "absent"
    abandon = AbandonSignal()
    shaper = LinkShaper(Path(path) / str(rank.rank), LinkProfile(1e9)) if path else None
    links = rank.open(
        abandon,
        pipeline=PIPELINES[rank.rank // 2],
        holder_sets=(HOLDERS,),
        shaper=shaper,
        remote=[other for other in range(4) if other != rank.rank],
    )
    if rank.rank == 0:
        return first_stage(rank, links)
    if rank.rank >= 2:
        rank.report("open")
        rank.wait_for_parent()
        return "open"

    def listen() -> None:
        while True:
            abandon.set("an order", gently=rank.wait_for_parent() == GENTLY)

    threading.Thread(target=listen, daemon=True).start()
    ended = last_stage(rank, links, wait)
    assert abandon.gentle and not links._closing.is_set()
    rank.report(ended)
    while abandon.gentle:
        threads.wait(0.1)
    return "closed"


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("wait", [*COLLECTIVES, receive])
def test_a_gentle_signal_ends_waits_and_leaves_the_pipeline_open(
    wait: Callable[[Links], None], absent: bool, shaped: bool, tmp_path: Path
) -> None:
    """Then another order closes the links."""
    with Ranks(leave_gently, 4, wait, absent, str(tmp_path) if shaped else "") as ranks:
        assert ranks.reports(0, 1) == ["computes", "waits"]
        ranks.reports(2, 3)
        ranks.send(GENTLY, 1)
        assert ranks.reports(1) == ["EpochAbandoned"]
        ranks.send("go on", 0)
        assert ranks.reports(0) == [[[1.0, 1.0], []]]
        ranks.send(NOW, 1)
        assert ranks.reports(1) == ["closed"]
        assert ranks.reports(0) == [["LinkFailed"]]


def fail(rank: Rank, wait: Callable[[Links], None]) -> object:
    """Rank 3 is killed. Rank 1 closes its links when it is told to."""
    abandon = AbandonSignal()
    links = rank.open(abandon, pipeline=PIPELINES[rank.rank // 2], holder_sets=(HOLDERS,))
    if rank.rank == 0:
        return first_stage(rank, links)
    if rank.rank >= 2:
        links._all_open.wait(LONG_S)
        rank.report("open")
        rank.wait_for_parent()
    links._all_open.wait(LONG_S)
    rank.report(last_stage(rank, links, wait))
    rank.wait_for_parent()
    links.close()
    return "closed"


@pytest.mark.parametrize("wait", COLLECTIVES)
def test_a_failed_collective_leaves_the_pipeline_open(wait: Callable[[Links], None]) -> None:
    with Ranks(fail, 4, wait) as ranks:
        assert ranks.reports() == ["computes", "waits", "open", "open"]
        ranks.signal(3, signal.SIGKILL)
        assert ranks.reports(1) == ["LinkFailed"]
        ranks.send("go on", 0)
        assert ranks.reports(0) == [[[1.0, 1.0], []]]
        ranks.send("close", 1)
        assert ranks.reports(1) == ["closed"]
        assert ranks.reports(0) == [["LinkFailed"]]
