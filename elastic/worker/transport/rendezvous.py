"""Where the ranks of an epoch meet: a TCP store that one worker hosts and the plan names.

Every worker hosts one from its start, so that a plan can name any of them. Keys of different epochs have
different prefixes.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from elastic.domain.errors import FieldError
from elastic.worker.transport import threads
from elastic.worker.transport.cancellation import AbandonSignal

_BLAME_S = 0.2
_BLAME = "blame"


def host_store(host: str = "127.0.0.1") -> tuple[TCPStore, str]:
    """Host a store on `host`. Return it and its "host:port"; it lives as long as the object is kept."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"{host}:{port}"


def connect_store(address: str, epoch: int, timeout_s: float) -> PrefixStore:
    """A connection of its own to the epoch's part of the store. RuntimeError if nobody answers."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise FieldError("store", address, "host:port of a rendezvous store")
    timeout = timedelta(seconds=timeout_s)
    return PrefixStore(f"epoch{epoch}", TCPStore(host, int(port), is_master=False, timeout=timeout))


def agree_on_failed_ranks(store: PrefixStore | None, suspects: tuple[int, ...], abandon: AbandonSignal) -> tuple[int, ...]:
    """Agree with the other ranks on whose connection broke first: who sees it first says so at the epoch's store.

    To be called before closing one's own connections, which would mislead the rest. `store` is the connection that
    was made when the epoch began: if its host died, asking fails at once. When it hangs this takes 0.2 s, or until
    the epoch is abandoned. Without an answer `suspects` stands.
    """
    name = ",".join(map(str, suspects))
    answers: list[str] = []
    answered = threading.Event()

    def ask(store: PrefixStore) -> None:
        try:
            if suspects:
                answers.append(store.compare_set(_BLAME, "", name).decode())
            elif store.check([_BLAME]):
                answers.append(store.get(_BLAME).decode())
        except RuntimeError:
            answers.append(name)
        answered.set()

    if store is not None:
        threads.start("blame", lambda: ask(store))
        abandon.subscribe(answered.set)
        answered.wait(_BLAME_S)
        abandon.unsubscribe(answered.set)
    answer = answers[0] if answers else name
    return tuple(int(rank) for rank in answer.split(",") if rank.isdigit())
