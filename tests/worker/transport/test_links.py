"""Links between healthy ranks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.domain.errors import FieldError
from elastic.planning.cost.profile import LinkProfile
from elastic.rpc.link_shaping import LinkShaper
from elastic.worker.transport import links as links_module
from elastic.worker.transport import threads
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned, LinkFailed
from elastic.worker.transport.links import MAX_UNRECEIVED, Links
from elastic.worker.transport.rendezvous import (
    ALL,
    HERE,
    NEAR,
    await_ranks,
    connect_store,
    host_store,
    missing_ranks,
    tell_connected,
)
from tests.worker.engine.rank_processes import DEADLINE_S, Rank, Ranks, run_ranks


def single_rank_links() -> Links:
    abandon = AbandonSignal()
    return Links.open(
        epoch=1,
        rank=0,
        world_size=1,
        store_address="",
        device=torch.device("cpu"),
        timeout_s=1.0,
        abandon=abandon,
    )


def exchange(rank: Rank) -> list[list[float]]:
    links, other = rank.open(), 1 - rank.rank
    ahead = [links.recv(other, tag) for tag in (0, 1, 0)]
    for i, tag in enumerate((0, 0, 1)):
        links.send(torch.full((2, i // 2 + 1), 10.0 * rank.rank + i), other, tag)
    got = [receive.wait().flatten().tolist() for receive in ahead]
    links.flush()
    return got


def test_flows_keep_their_order_and_shape() -> None:
    first, second = run_ranks(exchange, 2)
    assert first == [[10.0] * 2, [12.0] * 4, [11.0] * 2]
    assert second == [[0.0] * 2, [2.0] * 4, [1.0] * 2]


def send_many(rank: Rank) -> list[float]:
    links = rank.open()
    n = 3 * MAX_UNRECEIVED
    if rank.rank == 0:
        for i in range(n):
            links.send(torch.full((40_000,), float(i)), 1)
        links.flush()
        return []
    return [float(links.recv(0).wait()[-1]) for _ in range(n)]


def test_many_messages_without_receives_posted_ahead() -> None:
    assert run_ranks(send_many, 2)[1] == [float(i) for i in range(3 * MAX_UNRECEIVED)]


def change_shape(rank: Rank) -> str:
    links = rank.open()
    if rank.rank == 1:
        return str(links.recv(0).wait().dtype)
    links.send(torch.zeros(3, dtype=torch.bfloat16), 1)
    with pytest.raises(FieldError) as caught:
        links.send(torch.zeros(4, dtype=torch.bfloat16), 1)
    links.flush()
    return str(caught.value)


def test_a_flow_has_one_shape() -> None:
    error, dtype = run_ranks(change_shape, 2)
    assert "bfloat16 [4] after one of bfloat16 [3]" in error and "varying=True" in error
    assert dtype == "torch.bfloat16"


SETS = ((0, 1), (0, 1, 2), (1, 2))


def reduce_and_gather(rank: Rank) -> list[torch.Tensor]:
    links = rank.open(holder_sets=SETS)
    found = []
    for dtype in (torch.int64, torch.float32):
        for ranks in SETS:
            if rank.rank in ranks:
                generator = torch.Generator().manual_seed(rank.rank)
                tensor = (torch.rand(1001, generator=generator) * 2**20).to(dtype)
                links.all_reduce(tensor, ranks)()
                found.append(tensor)
    found += links.gather(torch.tensor([rank.rank, 5]))
    return found


def test_all_ranks_of_a_group_get_the_same_bits() -> None:
    first, second, third = run_ranks(reduce_and_gather, 3)
    for offset in (0, 1):
        assert torch.equal(first[0 + 2 * offset], second[0 + 3 * offset])
        assert torch.equal(first[1 + 2 * offset], second[1 + 3 * offset])
        assert torch.equal(first[1 + 2 * offset], third[0 + 2 * offset])
        assert torch.equal(second[2 + 3 * offset], third[1 + 2 * offset])
    terms = [
        (torch.rand(1001, generator=torch.Generator().manual_seed(r)) * 2**20).to(torch.int64)
        for r in range(3)
    ]
    assert torch.equal(first[1], terms[0] + terms[1] + terms[2])
    assert [t.tolist() for t in first[-3:]] == [[0, 5], [1, 5], [2, 5]]


def test_one_rank_needs_no_store() -> None:
    links = single_rank_links()
    tensor = torch.ones(2)
    links.all_reduce(tensor, (0,))()
    assert links.gather(tensor)[0].tolist() == [1.0, 1.0]
    links.flush()
    links.abandon.set("a newer epoch")
    with pytest.raises(EpochAbandoned, match="a newer epoch"):
        links.gather(tensor)


def open_without_store(address: str) -> None:
    """Open the links of one of two ranks; no store serves at the address."""
    Links.open(
        epoch=1,
        rank=0,
        world_size=2,
        store_address=address,
        device=torch.device("cpu"),
        timeout_s=0.5,
        abandon=AbandonSignal(),
    )


def test_a_store_that_cannot_be_reached() -> None:
    with pytest.raises(LinkFailed, match="could not be opened"):
        open_without_store("127.0.0.1:1")
    with pytest.raises(FieldError, match="host:port"):
        open_without_store("nonsense")


def test_a_fault_of_this_node_is_no_cause_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of causes without an end would be followed for ever."""

    def broken(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(links_module, "connect_store", broken)
    with pytest.raises(torch.AcceleratorError) as caught:
        open_without_store("127.0.0.1:1")
    assert caught.value.__cause__ is not caught.value


def test_a_node_without_threads_opens_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other rank is at fault, so this is no failed link."""

    def no_thread(name: str, body: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "start", no_thread)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        open_without_store("127.0.0.1:1")


def test_the_host_of_a_store_that_does_not_answer_is_suspected() -> None:
    for rank, suspects in ((0, ()), (1, (0,))):
        with pytest.raises(LinkFailed) as caught:
            Links.open(
                epoch=1,
                rank=rank,
                world_size=2,
                store_address="127.0.0.1:1",
                device=torch.device("cpu"),
                timeout_s=0.5,
                abandon=AbandonSignal(),
            )
        assert caught.value.ranks == suspects


def test_the_ranks_that_are_missing_are_suspected() -> None:
    store, address = host_store()
    ranks = connect_store(address, 1, DEADLINE_S)
    for rank in (0, 1, 3):
        ranks.set(f"here-{rank}", "")
    assert missing_ranks(ranks, 0, range(4), (HERE, NEAR), AbandonSignal()) == (2,), (
        "it has not come to the store"
    )
    ranks.set("here-2", "")
    assert missing_ranks(ranks, 0, range(4), (HERE, NEAR), AbandonSignal()) == (), (
        "nobody is connected"
    )
    for rank in (1, 2):
        tell_connected(ranks, rank, NEAR)
    assert missing_ranks(ranks, 0, range(4), (HERE, NEAR), AbandonSignal()) == (3,)
    four = ranks, 0, range(4), (HERE, NEAR, ALL), AbandonSignal()
    assert missing_ranks(*four) == (3,), "its pipeline is not connected"
    tell_connected(ranks, 3, NEAR)
    assert missing_ranks(*four) == (), "nobody is connected to all"
    tell_connected(ranks, 1, ALL)
    assert missing_ranks(*four) == (2, 3)
    assert missing_ranks(None, 2, range(4), (HERE, NEAR), AbandonSignal()) == (0,)
    del store


class SlowStore:
    """A store that needs `answer_s` per question. Rank 2 is not connected. It answers at most
    `answers` questions."""

    def __init__(self, answer_s: float, answers: int = 1000) -> None:
        self._answer_s, self._answers, self._never = answer_s, answers, threading.Event()

    def check(self, keys: list[str]) -> bool:
        if not self._answers:
            self._never.wait(DEADLINE_S)
            raise RuntimeError("no answer")
        self._answers -= 1
        time.sleep(self._answer_s)
        return keys != ["open-2"]


@pytest.mark.parametrize(("ranks", "answer_s"), [(6, 0.2), (40, 0.02)])
def test_a_slow_store_is_not_blamed(ranks: int, answer_s: float) -> None:
    store: Any = SlowStore(answer_s)
    assert missing_ranks(store, 1, range(ranks), (HERE, ALL), AbandonSignal()) == (2,)


@pytest.mark.parametrize(("answers", "missing"), [(0, 0), (5, 0), (8, 2)])
def test_the_answers_of_a_store_that_dies_count(answers: int, missing: int) -> None:
    """Of 5 other ranks, it tells which are there, then which are connected."""
    store: Any = SlowStore(0.0, answers)
    assert missing_ranks(store, 1, range(6), (HERE, ALL), AbandonSignal()) == (missing,)


def open_beside_a_rank_that_never_connects(rank: Rank) -> str:
    """Rank 1 says that it is there, and answers no connection: the path to it is bad."""
    if rank.rank == 1:
        store = connect_store(rank.store, 1, DEADLINE_S)
        await_ranks(store, 1, (0, 1), DEADLINE_S, AbandonSignal(), threading.Event())
        return ""
    try:
        rank.open(open_s=3.0)  # also the limit for reaching the store, on a busy machine
    except LinkFailed as error:
        return str(error)
    return "opened"


def test_ranks_that_are_there_must_connect_soon() -> None:
    with Ranks(open_beside_a_rank_that_never_connects, 2) as ranks:
        assert "epoch 1 could not be opened" in ranks.reports(0)[0]


PIPELINES = ((0, 1), (2, 3))


def train_before_the_others_come(rank: Rank) -> tuple[list[float], list[float]]:
    """The second pipeline opens its links when the first one has exchanged messages."""
    pipeline = PIPELINES[rank.rank // 2]
    if rank.rank >= 2:
        rank.wait_for_parent()
    links = rank.open(pipeline=pipeline, holder_sets=((0, 2), (1, 3)))
    other = pipeline[1 - pipeline.index(rank.rank)]
    links.send(torch.full((2,), float(rank.rank)), other)
    got = links.recv(other).wait().tolist()
    links.flush()
    rank.report(got)
    total = torch.ones(1) * rank.rank
    links.all_reduce(total, (rank.rank % 2, rank.rank % 2 + 2))()
    return total.tolist(), [row.item() for row in links.gather(torch.tensor([float(rank.rank)]))]


def test_a_pipeline_exchanges_messages_while_others_load() -> None:
    with Ranks(train_before_the_others_come, 4) as ranks:
        assert ranks.reports(0, 1) == [[1.0] * 2, [0.0] * 2]
        ranks.send("open", 2, 3)
        assert ranks.reports(2, 3) == [[3.0] * 2, [2.0] * 2]
        everybody = [0.0, 1.0, 2.0, 3.0]
        assert ranks.reports() == [([total], everybody) for total in (2.0, 4.0, 2.0, 4.0)]


def fail_to_reach_another_pipeline(rank: Rank) -> tuple[int, ...]:
    """Rank 2 says that it is there, and answers no connection."""
    if rank.rank == 2:
        store = connect_store(rank.store, 1, DEADLINE_S)
        await_ranks(store, 2, (0, 1, 2), DEADLINE_S, AbandonSignal(), threading.Event())
        return ()
    links = rank.open(pipeline=(0, 1), open_s=5.0)
    try:
        if rank.rank == 0:
            links.recv(1).wait()
        else:  # as between micro-batches
            end = time.monotonic() + DEADLINE_S
            while time.monotonic() < end:
                links.check()
                time.sleep(0.01)
    except LinkFailed as error:
        links.close()  # as the session of this rank does: the other rank waits for a message
        return error.ranks
    raise AssertionError("the links are open")


def test_a_rank_of_another_pipeline_that_cannot_be_reached_ends_the_epoch() -> None:
    """Both ends of the pipeline leave, and neither is blamed for it."""
    assert run_ranks(fail_to_reach_another_pipeline, 3) == [(2,), (2,), ()]


def abandon_before_the_others_come(rank: Rank) -> str:
    """Rank 1 never comes. The epoch ends while rank 0 has no collective under way."""
    if rank.rank == 1:
        return ""
    abandon = AbandonSignal()
    links = rank.open(abandon, pipeline=(0,), holder_sets=((0, 1),))
    abandon.set("a newer epoch")
    assert links._all_open.wait(DEADLINE_S)
    try:
        links.all_reduce(torch.ones(1), (0, 1))()
    except EpochAbandoned as error:
        return str(error)
    return "reduced"


def test_a_collective_after_the_epoch_was_abandoned() -> None:
    assert run_ranks(abandon_before_the_others_come, 2)[0] == "a newer epoch"


def close_while_others_load(rank: Rank) -> bool:
    """Rank 1 never comes. Rank 0 leaves the epoch because of an error of its own."""
    if rank.rank == 1:
        return True
    links = rank.open(pipeline=(0,), holder_sets=((0, 1),))
    links.close()
    return threads.wait(DEADLINE_S)


def test_no_thread_stays_behind_when_links_are_closed_while_others_load() -> None:
    assert run_ranks(close_while_others_load, 2) == [True, True]


OPEN_S, LONGER_S = 4.0, 4.5
"""A busy machine needs seconds to connect two processes."""


def open_after_long_loading(rank: Rank) -> float:
    """Rank 1 loads its layers, and later computes, for longer than connecting may take."""
    if rank.rank == 1:
        time.sleep(LONGER_S)
    links = rank.open(open_s=OPEN_S, holder_sets=((0, 1),))
    tensor = torch.ones(3)
    if rank.rank == 1:
        time.sleep(LONGER_S)
        links.send(tensor, 0)
    else:
        links.recv(1).wait()
    links.flush()
    if rank.rank == 0:
        time.sleep(LONGER_S)
    links.all_reduce(tensor, (0, 1))()
    return float(links.gather(tensor)[1].sum())


def test_slow_ranks_need_not_connect_soon() -> None:
    assert run_ranks(open_after_long_loading, 2) == [6.0, 6.0]


def exchange_slowly(rank: Rank, path: str) -> tuple[float, float, torch.Tensor]:
    """A message and an all-reduce of 100 kB each, at 1 MB/s. Rank 2 is on rank 0's node.

    Returns (seconds of the message, seconds of the all-reduce, sum).
    """
    remote = {0: (1,), 1: (0, 2), 2: (1,)}[rank.rank]
    shaper = LinkShaper(Path(path) / str(rank.rank % 2), LinkProfile(1e6))
    links = rank.open(holder_sets=((0, 1),), shaper=shaper, remote=remote)
    links.gather(torch.zeros(1))
    began = time.monotonic()
    tensor = torch.full((25_000,), float(rank.rank + 1))
    if rank.rank == 0:
        links.send(tensor, 2)
        links.send(tensor, 1)
    else:
        assert torch.equal(links.recv(0).wait(), torch.full((25_000,), 1.0))
    links.flush()
    sent = time.monotonic() - began
    if rank.rank < 2:
        links.all_reduce(tensor, (0, 1))()
    return sent, time.monotonic() - began - sent, tensor


def test_shaped_links_delay_messages_and_keep_their_contents(tmp_path: Path) -> None:
    first, second, _ = run_ranks(exchange_slowly, 3, str(tmp_path))
    assert first[0] >= 0.1, "100 kB at 1 MB/s"
    assert first[1] >= 0.1 and second[1] >= 0.1, "each rank of a ring of two sends the whole tensor"
    assert first[2].tolist() == second[2].tolist() == [3.0] * 25_000


def leave_while_sending(rank: Rank, path: str) -> str:
    """Messages that wait for a slow link do not block an abandoned epoch."""
    abandon = AbandonSignal()
    shaper = LinkShaper(Path(path) / str(rank.rank), LinkProfile(1e3))
    links = rank.open(abandon, shaper=shaper, remote=(1 - rank.rank,))
    if rank.rank == 0:
        links.send(torch.zeros(250_000), 1)
    threading.Timer(0.2, abandon.set, ("a newer epoch",)).start()
    try:
        if rank.rank == 0:
            links.flush()
        else:
            links.recv(0).wait()
    except (EpochAbandoned, LinkFailed) as error:
        return type(error).__name__
    return "finished"


def test_a_wait_for_a_slow_link_can_be_abandoned(tmp_path: Path) -> None:
    """The message would take 1000 s."""
    for outcome in run_ranks(leave_while_sending, 2, str(tmp_path)):
        assert outcome in ("EpochAbandoned", "LinkFailed")
