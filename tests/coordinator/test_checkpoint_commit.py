"""Commits of checkpoints by the coordinators of a run, in a directory that other runs have used."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from elastic.config import JobConfig, WorkerCommand
from elastic.coordinator.leadership import RunMembership
from elastic.coordinator.metrics import CoordinatorMetrics
from elastic.coordinator.records.checkpoint_commit import CheckpointCommits
from elastic.coordinator.service import Coordinator
from elastic.core.job.state import CheckpointFailed, JobState
from elastic.store import checkpoint_directory
from tests.agent.vault.checkpoints import N_LAYERS, write_layer
from tests.patience import LONG_S
from tests.store.memory import MemoryStore


@contextmanager
def committing(directory: Path, run: str = "") -> Iterator[tuple[CheckpointCommits, Any]]:
    """Yield the commits of a run, and a function that waits for the event of the next one."""
    done: queue.Queue[Any] = queue.Queue()
    commits = CheckpointCommits(directory, done.put, run=run)
    with closing(commits):
        yield commits, lambda: commits.take(done.get(timeout=LONG_S))


def _coordinator(folder: Path, store: MemoryStore, job_id: str) -> JobState:
    """Start a coordinator and end it; return its state."""
    config = JobConfig(
        job_id=job_id,
        run_dir=str(folder),
        memory_dir=str(folder / "memory"),
        command=WorkerCommand(script="x"),
        checkpoint_dir=str(folder / "checkpoints"),
        min_nodes=3,
        max_nodes=3,
    )
    lease = store.acquire("a", 60.0, 0.0)
    run, metrics = RunMembership(store, folder), CoordinatorMetrics("j", lambda: 0.0)
    made = Coordinator(config, "127.0.0.1:0", store, lease, run, metrics)
    made._keeper.close()
    made._server.close()
    store.release(lease)
    return made._state


def test_all_coordinators_of_a_run_use_its_name(tmp_path: Path) -> None:
    store = MemoryStore()
    first = _coordinator(tmp_path, store, "host1")
    assert first.run == RunMembership(store, tmp_path).name == "host1.1"
    assert _coordinator(tmp_path, store, "host2").run == first.run, "on another machine"
    assert _coordinator(tmp_path, MemoryStore(), "host3").run == "host3.1", "a new run"


def test_a_checkpoint_of_a_former_run_hides_no_lost_one(tmp_path: Path) -> None:
    """The run resumed step 4, and no part of step 6 reached the disk."""
    for step in (6, 8):
        for layer in range(N_LAYERS):
            write_layer(tmp_path, step, layer, 1, "old")
        checkpoint_directory.commit(tmp_path, step, run="old")
    for layer in range(N_LAYERS):
        write_layer(tmp_path, 8, layer, 1, "new")
    with committing(tmp_path, "new") as (commits, ended):
        for step in (6, 8):
            commits.begin(step, None)
        assert isinstance(ended(), CheckpointFailed)
        assert not isinstance(ended(), CheckpointFailed)
        (lost,) = commits.left_over((6, 8))
        assert lost.step == 6
