"""One rank of a test of `NcclTransport` on a real GPU, which all ranks share.

    python -m tests.worker.transport.nccl_rank RANK WORLD_SIZE STORE_PORT FAULT

Each rank gets an `NCCL_HOSTID` of its own, so NCCL takes the ranks for ranks of different machines
and accepts one device for all. Messages pass through sockets. Rank `VICTIM` suffers `FAULT`:
`none`, `kill` or `stop` while operations with it are pending, or `absent`: it never opens its
communicators. The other ranks close, then communicate among themselves in a second epoch. The last
line of a rank that got there is a JSON object of the seconds that each phase took.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from elastic.agent.workers.processes import NCCL_VARIABLES
from elastic.worker.transport.nccl import NcclTransport, await_aborts

VICTIM = 1
ELEMENTS = 1 << 20
WAIT_S = 30.0


class Rank:
    """This process."""

    def __init__(self, rank: int, world_size: int, store: Store) -> None:
        self.rank, self.world_size, self.store = rank, world_size, store
        self.device = torch.device("cuda", 0)
        self.took_s: dict[str, float] = {}

    def timed(self, phase: str, began: float) -> None:
        self.took_s[phase] = round(time.monotonic() - began, 3)

    def meet(self, name: str, ranks: int) -> None:
        """Wait until `ranks` ranks have come."""
        self.store.add(name, 1)
        end = time.monotonic() + WAIT_S
        while self.store.add(name, 0) < ranks:
            assert time.monotonic() < end, f"the other ranks did not come to {name}"
            time.sleep(0.005)

    def transport(self, epoch: str, rank: int) -> NcclTransport:
        return NcclTransport(PrefixStore(epoch, self.store), rank, self.device, WAIT_S)

    def use(self, transport: NcclTransport, ranks: Sequence[int]) -> None:
        """Send along the chain of `ranks`, and sum over all of them; check the values."""
        own = ranks.index(self.rank)
        sent = torch.full((ELEMENTS,), float(self.rank), device=self.device)
        if own + 1 < len(ranks):
            transport.wait(transport.send(sent, own + 1, 0))
        if own > 0:
            got = torch.empty_like(sent)
            transport.wait(transport.recv(got, own - 1, 0))
            assert bool(got.eq(float(ranks[own - 1])).all()), "a message arrived changed"
        one = torch.ones(ELEMENTS, device=self.device)
        transport.wait(transport.all_reduce(one, tuple(range(len(ranks)))))
        assert bool(one.eq(float(len(ranks))).all()), "a sum is wrong"

    def wait_for_victim(self, transport: NcclTransport) -> None:
        """Wait for an operation that the victim takes part in; it must fail."""
        values = torch.ones(ELEMENTS, device=self.device)
        try:
            if abs(self.rank - VICTIM) == 1:
                transport.wait(transport.recv(torch.empty_like(values), VICTIM, 0))
            else:
                everybody = tuple(range(self.world_size))
                transport.wait(transport.all_reduce(values, everybody))
        except RuntimeError:
            return
        raise AssertionError("an operation with the lost rank ended well")


def chain(size: int) -> list[tuple[int, int]]:
    """Return the pairs of neighbours, in both directions."""
    forward = [(rank, rank + 1) for rank in range(size - 1)]
    return [*forward, *((b, a) for a, b in forward)]


def lose(rank: Rank, transport: NcclTransport, fault: str) -> None:
    """Lose the victim while all other ranks wait for it, then close."""
    if fault == "absent":
        waiting = threading.Thread(
            target=lambda: open_and_fail(transport, rank.world_size), daemon=True
        )
    else:
        waiting = threading.Thread(target=lambda: rank.wait_for_victim(transport), daemon=True)
    waiting.start()
    time.sleep(1.0)  # the operations begin on the device; nothing tells when they have
    began = time.monotonic()
    transport.close()
    await_aborts()
    rank.timed("abort", began)
    waiting.join(WAIT_S)
    assert not waiting.is_alive(), "a wait goes on after the communicators were aborted"
    rank.timed("wait", began)


def open_and_fail(transport: NcclTransport, size: int) -> None:
    try:
        transport.open(chain(size), [])
    except RuntimeError:
        return
    raise AssertionError("communicators with an absent rank were opened")


def main() -> None:
    number, size, port, fault = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.cuda.set_device(0)
    torch.ones(1, device="cuda").item()
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=WAIT_S))
    rank = Rank(number, size, store)
    rank.meet("devices", size)
    if fault == "absent" and number == VICTIM:
        signal.pause()
    transport, everybody = rank.transport("first", number), list(range(size))
    if fault != "absent":
        began = time.monotonic()
        transport.open(chain(size), [tuple(everybody)])
        rank.timed("open", began)
        rank.use(transport, everybody)
        rank.meet("first epoch", size)
        if fault != "none" and number == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if fault == "none":
        began = time.monotonic()
        transport.close()
        await_aborts()
        rank.timed("abort", began)
    else:
        lose(rank, transport, fault)
    ranks = [other for other in everybody if fault == "none" or other != VICTIM]
    rank.meet("closed", len(ranks))
    began = time.monotonic()
    second = rank.transport("second", ranks.index(number))
    second.open(chain(len(ranks)), [tuple(range(len(ranks)))])
    rank.use(second, ranks)
    rank.timed("second epoch", began)
    rank.meet("end", len(ranks))
    second.close()
    await_aborts()
    print(json.dumps(rank.took_s), flush=True)
    os._exit(0)  # a thread that waits for an absent rank is left behind


if __name__ == "__main__":
    os.environ.update(NCCL_VARIABLES)
    os.environ["NCCL_HOSTID"] = f"rank-{sys.argv[1]}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    main()
