"""A coordinator begins a run, or takes one over."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.leadership import RunMembership
from elastic.coordinator.metrics import CoordinatorMetrics
from elastic.coordinator.records import run_directory
from elastic.coordinator.service import Coordinator
from elastic.domain.errors import FieldError
from elastic.store.interface import Lease
from tests.coordinator.helpers import three_nodes
from tests.patience import LONG_S
from tests.store.memory import MemoryStore


def started(folder: Path, store: MemoryStore, lease: Lease) -> Coordinator:
    """A coordinator with a run directory of its own, and a checkpoint directory beside it."""
    folder.mkdir(exist_ok=True)
    config = three_nodes(folder, checkpoint_dir=str(folder.parent / "checkpoints"))
    run, metrics = RunMembership(store, folder), CoordinatorMetrics("j", time.time)
    return Coordinator(config, "127.0.0.1:0", store, lease, run, metrics)


def close(coordinator: Coordinator) -> None:
    coordinator._keeper.close()
    coordinator._server.close()


class RenewedStore(MemoryStore):
    """A store that tells when the lease is renewed."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed = threading.Event()

    def renew(self, lease: Lease, now: float) -> None:
        super().renew(lease, now)
        self.renewed.set()


def test_the_lease_is_kept_while_the_first_state_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look through the checkpoints takes longer than a lease."""
    store, real, renewed = RenewedStore(), run_directory.initial_state, list[bool]()

    def slow(*args: Any) -> Any:
        store.renewed.clear()
        renewed.append(store.renewed.wait(LONG_S))
        return real(*args)

    monkeypatch.setattr(run_directory, "initial_state", slow)
    close(started(tmp_path / "a", store, store.acquire("a", 0.2, time.time())))
    assert renewed == [True]


def test_a_start_that_fails_does_not_keep_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, former = MemoryStore(), set(threading.enumerate())

    def fail(*_: Any) -> Any:
        raise FieldError("checkpoint directory", "x", "cannot be opened")

    monkeypatch.setattr(run_directory, "initial_state", fail)
    with pytest.raises(FieldError):
        started(tmp_path / "a", store, store.acquire("a", 0.2, time.time()))
    for thread in set(threading.enumerate()) - former:
        if thread.name == "lease":
            thread.join(LONG_S)
            assert not thread.is_alive()
