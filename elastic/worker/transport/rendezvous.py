"""Rendezvous of an epoch's ranks at a TCP store.

Every worker hosts a store from its start, so the plan of any epoch can name any of them. Keys of
different epochs have different prefixes. The store also serves to agree on the rank that failed.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from elastic.domain.errors import FieldError
from elastic.worker.transport import threads
from elastic.worker.transport.cancellation import AbandonSignal

_AGREE_TIMEOUT_S = 0.2
_MISSING_TIMEOUT_S = 1.0
HERE = "here-"
"""Beginning of the key of a rank that has loaded its layers."""
NEAR, ALL = "near-", "open-"
"""Beginning of the key of a rank that is connected to the others of its pipeline, or to all."""
AWAIT_POLL_S = 1.0
"""Time after which a wait for other ranks asks whether the epoch has ended."""
STORE_RANK = 0
"""Rank whose node hosts the epoch's store."""
_FAILED_RANKS = "failed-ranks"
"""Key of the ranks that the first rank to notice a failure suspects."""
_NOBODY = "-"
"""Value of that key if ranks cannot reach each other, and none of them is suspected."""


def host_store(host: str = "127.0.0.1") -> tuple[TCPStore, str]:
    """Host a store on `host`. Returns the store and its "host:port".

    The store ends when the returned object is garbage-collected.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, f"{host}:{port}"


def connect_store(address: str, epoch: int, timeout_s: float) -> PrefixStore:
    """Open a connection to the epoch's keys of the store at `address`.

    Raises FieldError if `address` is malformed and RuntimeError if no store answers.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise FieldError("store", address, "host:port of a rendezvous store")
    timeout = timedelta(seconds=timeout_s)
    return PrefixStore(f"epoch{epoch}", TCPStore(host, int(port), is_master=False, timeout=timeout))


def await_ranks(
    store: Store,
    rank: int,
    ranks: Collection[int],
    timeout_s: float,
    abandon: AbandonSignal,
    closing: threading.Event,
) -> None:
    """Tell the other ranks that `rank` is about to connect, and wait for all of `ranks`.

    Raises EpochAbandoned, and RuntimeError after `timeout_s`, if `closing` is set, or if the store
    does not answer.
    """
    store.set(f"{HERE}{rank}", "")
    keys = [f"{HERE}{other}" for other in ranks]
    end = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, end - time.monotonic())
        try:
            return store.wait(keys, timedelta(seconds=min(left_s, AWAIT_POLL_S)))
        except DistStoreError:
            abandon.check()
            if left_s <= AWAIT_POLL_S or closing.is_set():
                raise


def tell_connected(store: Store, rank: int, circle: str) -> None:
    """Tell the other ranks that `rank` is connected to all ranks of the circle: NEAR or ALL."""
    store.set(f"{circle}{rank}", "")


def missing_ranks(
    store: PrefixStore | None,
    rank: int,
    ranks: Collection[int],
    circles: Sequence[str],
    abandon: AbandonSignal,
) -> tuple[int, ...]:
    """Return those of `ranks` because of which `rank` probably could not connect.

    These are the ranks that are missing in the first of the `circles` (HERE, NEAR, ALL) in which
    some are. () if all others are missing in a circle after HERE: then the cause is unknown. If the
    store gives no answer for 1 s, the answers before count; without any, it is the store's host.
    `store`: None if it could not be reached.
    """
    others = [other for other in ranks if other != rank]
    found: dict[str, dict[int, bool]] = {circle: {} for circle in circles}
    answered, ended = threading.Event(), threading.Event()

    def ask(store: PrefixStore) -> None:
        try:
            for circle, answers in found.items():
                for other in others:
                    answers[other] = store.check([f"{circle}{other}"])
                    answered.set()
        except RuntimeError:
            pass
        ended.set()
        answered.set()

    if store is not None:
        threads.start("missing-ranks", lambda: ask(store))
        abandon.subscribe(answered.set)
        while answered.wait(_MISSING_TIMEOUT_S):
            answered.clear()
            if ended.is_set() or abandon.is_set():
                break
        abandon.unsubscribe(answered.set)
    for circle, answers in found.items():
        absent = _negative(answers)
        if absent and (circle == HERE or len(absent) < len(answers)):
            return absent
    if all(len(answers) == len(others) for answers in found.values()):
        return ()
    return (STORE_RANK,) if rank != STORE_RANK else ()


def _negative(answers: dict[int, bool]) -> tuple[int, ...]:
    """Return the ranks with a negative answer. Another thread may still add answers."""
    return tuple(rank for rank, answer in list(answers.items()) if not answer)


def agree_on_failed_ranks(
    store: PrefixStore | None,
    suspects: tuple[int, ...],
    abandon: AbandonSignal,
    *,
    nobody: bool = False,
) -> tuple[int, ...]:
    """Return the ranks whose connection broke first, as all ranks agree at the epoch's store.

    The first rank that writes its suspects to the store decides. Call this before closing any
    connection, because a closed connection misleads the other ranks.

    Args:
        store: the connection that was opened with the epoch. If its host died, a request fails at
            once; if its host hangs, this call takes at most 0.2 s. None: no connection.
        suspects: ranks that this rank suspects; returned if the store does not answer.
        nobody: whether () is an answer, too: ranks cannot reach each other, and this rank will
            close its connections, for which it is not to be blamed.
    """
    name = ",".join(map(str, suspects)) or (_NOBODY if nobody else "")
    answers: list[str] = []
    answered = threading.Event()

    def ask(store: PrefixStore) -> None:
        try:
            if name:
                answers.append(store.compare_set(_FAILED_RANKS, "", name).decode())
            elif store.check([_FAILED_RANKS]):
                answers.append(store.get(_FAILED_RANKS).decode())
        except RuntimeError:
            answers.append(name)
        answered.set()

    if store is not None:
        threads.start("failed-ranks", lambda: ask(store))
        abandon.subscribe(answered.set)
        answered.wait(_AGREE_TIMEOUT_S)
        abandon.unsubscribe(answered.set)
    answer = answers[0] if answers else name
    return tuple(int(rank) for rank in answer.split(",") if rank.isdigit())
