"""Commits of checkpoints by the coordinators of a run, in a directory that other runs have used."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.leadership import RunMembership
from elastic.coordinator.metrics import CoordinatorMetrics
from elastic.coordinator.records.checkpoint_commit import CheckpointCommits, Commit
from elastic.coordinator.service import Coordinator
from elastic.core.job import checkpoints
from elastic.core.job import state as job
from elastic.core.job.state import CheckpointCommitted, CheckpointFailed, JobPhase, JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.store import checkpoint_directory
from tests.agent.agents import Slow
from tests.agent.vault.checkpoints import N_LAYERS, layer_run, write_layer
from tests.coordinator.helpers import three_nodes
from tests.core.coordinator.test_transitions import send_report
from tests.core.job.test_checkpoints import HALVES, after_a_loss, apply, part, saving
from tests.core.state_access import assignment_of, spec_of
from tests.patience import LONG_S
from tests.store.memory import MemoryStore


@contextmanager
def committing(directory: Path, run: str = "") -> Iterator[tuple[CheckpointCommits, Any]]:
    """Yield the commits of a run, and a function that waits for the event of the next one."""
    done: queue.Queue[Any] = queue.Queue()
    commits = CheckpointCommits(directory, done.put, run=run)
    with closing(commits):
        yield commits, lambda: commits.take(done.get(timeout=LONG_S))


@contextmanager
def _leading(folder: Path, store: MemoryStore, job_id: str = "j") -> Iterator[Coordinator]:
    """Yield a coordinator that holds the lease."""
    config = three_nodes(folder, job_id=job_id)
    lease = store.acquire("a", 60.0, 0.0)
    run, metrics = RunMembership(store, folder), CoordinatorMetrics("j", lambda: 0.0)
    made = Coordinator(config, "127.0.0.1:0", store, lease, run, metrics)
    with closing(made._commits), closing(made._server), closing(made._keeper):
        yield made
    store.release(lease)


def _coordinator(folder: Path, store: MemoryStore, job_id: str) -> JobState:
    """Start a coordinator and end it; return its state."""
    with _leading(folder, store, job_id) as made:
        return made._state


def _unsettled(step: int) -> bool:
    return False


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
        (lost,) = commits.left_over((6, 8), _unsettled, LONG_S)
        assert lost.step == 6


@pytest.mark.parametrize("refused", [False, True])
def test_the_newest_checkpoints_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Those of other runs stay, and a removal that fails costs no checkpoint."""
    mine, theirs = "123456.1", "abcdef.1"
    for step, run in ((1, theirs), (3, mine), (4, mine), (9, mine)):
        for layer in range(N_LAYERS):
            write_layer(tmp_path, step, layer, 1, run)
        checkpoint_directory.commit(tmp_path, step, run=run)

    def refuse(path: Path, run: str) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    if refused:
        monkeypatch.setattr(checkpoint_directory, "remove", refuse)
    done: queue.SimpleQueue[Commit] = queue.SimpleQueue()
    with closing(CheckpointCommits(tmp_path, done.put, run=mine, keep=2)) as commits:
        for step in (6, 8):
            for layer in range(N_LAYERS):
                write_layer(tmp_path, step, layer, 1, mine)
            commits.begin(step, None)
            event = commits.take(done.get(timeout=LONG_S), LONG_S)
            assert isinstance(event, CheckpointCommitted)
        commits.flush(LONG_S)
    steps = sorted(manifest.step for _, manifest in checkpoint_directory.complete(tmp_path)[0])
    assert steps == ([1, 3, 4, 6, 8, 9] if refused else [1, 6, 8, 9])


def test_the_end_of_the_job_waits_for_removals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(checkpoint_directory.discard_step)
    monkeypatch.setattr(checkpoint_directory, "discard_step", slow)
    for layer in range(N_LAYERS):
        write_layer(tmp_path, 6, layer, 1)
    path = checkpoint_directory.commit(tmp_path, 6)
    with committing(tmp_path) as (commits, _):
        commits.drop(job.DropCheckpoint(6, before=2, committed=True))
        assert slow.begun.wait(LONG_S)
        threading.Timer(0.05, slow.go).start()
        (lost,) = commits.left_over((6,), _unsettled, LONG_S)
    assert lost.step == 6 and not path.exists()


def test_a_checkpoint_that_nobody_reported_is_completed_at_the_end(tmp_path: Path) -> None:
    """The coordinator was away for longer than agents keep their reports."""
    for step, layers in ((6, N_LAYERS), (8, N_LAYERS - 1), (10, N_LAYERS)):
        for layer in range(layers):
            write_layer(tmp_path, step, layer, 1)
    with committing(tmp_path) as (commits, _):
        found = commits.left_over(
            (6, 8, 10), _unsettled, LONG_S, counts=lambda step, epoch: step != 10
        )
    whole, incomplete, undone = found
    assert isinstance(whole, CheckpointCommitted) and Path(whole.path).exists()
    assert isinstance(incomplete, CheckpointFailed) and "layer" in incomplete.error
    assert isinstance(undone, CheckpointFailed), "its files are of an undone history"


def test_a_checkpoint_that_the_user_has_removed_is_not_missing(tmp_path: Path) -> None:
    with committing(tmp_path) as (commits, _):
        (lost,) = commits.left_over((6, 8), _unsettled, LONG_S, recorded=lambda: {6})
    assert lost.step == 8


def _write(directory: Path, state: JobState, step: int, layers: Iterable[int], epoch: int) -> None:
    n_layers = spec_of(state).n_layers
    for layer in layers:
        run = memoryview(layer_run(layer, step))
        checkpoint_directory.write_part(
            directory, step, layer, 0, n_layers, 1, run, epoch, state.run
        )


def test_a_late_removal_spares_files_of_the_next_epoch(tmp_path: Path) -> None:
    """A checkpoint is given up while the disk is busy; the next epoch writes it again before the
    removal begins."""
    state = saving(4)
    late, busy = state.newest_step + 5, threading.Event()
    with committing(tmp_path) as (commits, ended):
        commits._disk.post(lambda: busy.wait(LONG_S))
        _write(tmp_path, state, late, (0, 1), 1)
        state, _, _ = apply(state, part(late, HALVES[0]))
        state, actions, _ = apply(state, part(late, (), node="node1", error="I/O error"))
        (drop,) = (action for action in actions if isinstance(action, job.DropCheckpoint))
        commits.drop(drop)
        state = after_a_loss(state)
        assert assignment_of(state).step < late and not state.lost_checkpoints
        _write(tmp_path, state, late, range(spec_of(state).n_layers), 2)
        state, actions, _ = apply(state, part(late, epoch=2))
        assert actions == (job.CommitCheckpoint(late),)
        commits.begin(late, state.spec, 0.0, partial(checkpoints.file_counts, state, late))
        busy.set()
        event = ended()
    assert isinstance(event, job.CheckpointCommitted), event


def test_the_end_of_the_job_removes_files_of_lost_checkpoints(tmp_path: Path) -> None:
    """One was lost during the job; the other one lacks files at its end."""
    with _leading(tmp_path, MemoryStore()) as made:
        directory, state = Path(made._config.checkpoint_dir), saving(4).of(run=made._state.run)
        for step in (4, 8):
            _write(directory, state, step, (0, 1), 1)
        end = job.JobFinished(1, "error")
        made._state = state.of(lost_checkpoints=(4,), ending=end)
        made._finish(end)
        assert checkpoint_directory.staged_steps(directory) == ()
        assert made._state.lost_checkpoints == (4, 8)


def test_a_checkpoint_that_is_older_than_all_that_are_remembered_is_reported(
    tmp_path: Path,
) -> None:
    """Its writer was lost, no part of it was reported, and nine newer ones became durable."""
    with _leading(tmp_path, MemoryStore()) as made:
        state = saving(4)
        state = state.of(spec=replace(spec_of(state), n_steps=40))
        for step in range(8, 41, 4):
            state, _, _ = apply(state, job.CheckpointCommitted(f"/c/{step}", step))
        end = job.JobFinished(0, "all steps done")
        made._state = state.of(ending=end)
        made._finish(end)
        assert made._state.lost_checkpoints == (4,)


# ---- a disk that hangs ----


def _hanging(monkeypatch: pytest.MonkeyPatch) -> Slow:
    """Let commits hang without an error, as on a network disk whose server does not answer."""
    hanging = Slow(checkpoint_directory.commit)
    monkeypatch.setattr(checkpoint_directory, "commit", hanging)
    return hanging


def _answered(commits: CheckpointCommits, ended: Any) -> None:
    """Wait for the commit that did not count any more."""
    assert ended() is None
    commits.flush(LONG_S)


def test_a_commit_that_hangs_fails_after_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, state = _hanging(monkeypatch), saving(4)
    _write(tmp_path, state, 8, range(spec_of(state).n_layers), 1)
    done, late = queue.Queue[Any](), list[job.LogEntry]()
    with closing(CheckpointCommits(tmp_path, done.put, late.append)) as commits:
        assert commits.check(1000.0, 0.0, 30.0, 600.0) == ()
        commits.begin(8, state.spec)
        commits.begin(12, state.spec)
        for now, warned in ((1029.0, []), (1031.0, [8, 12]), (1599.0, [8, 12])):
            assert commits.check(now, 0.0, 30.0, 600.0) == ()
            assert sorted(entry.data["step"] for entry in late) == warned
        assert commits.check(1601.0, 5.0, 30.0, 600.0) == (), "the coordinator did not run for 5 s"
        assert late[0].data["why"] == "the disk does not answer"
        why = "the disk did not answer for 600 s"
        failed = tuple(CheckpointFailed(step, why) for step in (8, 12))
        assert commits.check(1606.0, 0.0, 30.0, 600.0) == failed and not commits.pending()
        hanging.go()
        _answered(commits, lambda: commits.take(done.get(timeout=LONG_S)))
        assert commits.check(1607.0, 0.0, 30.0, 600.0) == ()
    assert checkpoint_directory.is_committed(tmp_path, 8), "the disk came back"


def test_a_disk_that_fails_again_and_again_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error is an answer; the tries have a limit of their own."""
    tried = threading.Semaphore(0)
    monkeypatch.setattr(checkpoint_directory, "RETRY_S", (0.001,) * 100_000)

    def commit(*_: Any) -> None:
        tried.release()
        raise OSError(5, "I/O error")

    monkeypatch.setattr(checkpoint_directory, "commit", commit)
    with committing(tmp_path) as (commits, _):
        commits.begin(8, None)
        for now in range(1000, 5000, 500):
            while tried.acquire(blocking=False):  # tries from before the last check
                continue
            for _ in range(2):  # the first one has failed when the second one begins
                assert tried.acquire(timeout=LONG_S)
            assert commits.check(now, 0.0, 30.0, 600.0) == ()


def test_a_commit_that_hangs_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes have finished. So has the job, with exit code 1 and the reason."""
    hanging = _hanging(monkeypatch)
    with _leading(tmp_path, MemoryStore()) as made:
        state, _, _ = apply(saving(), part(400))
        limits = replace(state.limits, bulk_s=0.01)
        made._state, made._now = state.of(timeouts=limits, run=made._state.run), state.updated_at
        made._commits.begin(400, state.spec)
        assert hanging.begun.wait(LONG_S)
        for node in sorted(state.members, reverse=True):
            done = m.Finished(400, "sha" if node == "node0" else "")
            report = replace(state.members[node].report, phase=NodePhase.FINISHED, finished=done)
            made._apply(report)
        made._decide()
        for _ in range(2):
            assert made._state.ending is None
            made._handle(job.Tick())
            made._decide()
            made._now += limits.return_s + 1.0
        end = made._state.ending
        assert end is not None and end.code == 1
        assert "the disk did not answer for 600 s" in end.reason
        hanging.go()


def test_the_end_of_the_job_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether the last checkpoint is there."""
    hanging = Slow(checkpoint_directory.staged_steps)
    monkeypatch.setattr(checkpoint_directory, "staged_steps", hanging)
    with committing(tmp_path) as (commits, _):
        (lost,) = commits.left_over((6, 8), lambda step: step == 6, 0.01)
        assert lost == CheckpointFailed(8, "the disk did not answer for 0.01 s")
        assert hanging.begun.wait(LONG_S)
        hanging.go()


def _written_before_a_loss(directory: Path) -> tuple[JobState, int]:
    """Epoch 1 has written a whole checkpoint; a loss leads back to a step before it. Nobody writes
    it again. Return the state and the step."""
    state = saving(4)
    step = state.newest_step + 5
    _write(directory, state, step, range(spec_of(state).n_layers), 1)
    state, actions, _ = apply(state, part(step))
    assert actions == (job.CommitCheckpoint(step),)
    state = after_a_loss(state)
    assert assignment_of(state).step < step == assignment_of(state).checkpointed
    return state, step


def _committed(directory: Path, state: JobState, step: int) -> JobState:
    """Return the state after the commit is carried out."""
    with committing(directory) as (commits, ended):
        commits.begin(step, state.spec, 0.0, partial(checkpoints.file_counts, state, step))
        event = ended()
    assert isinstance(event, job.CheckpointCommitted), event
    state, _, _ = apply(state, event)
    return state


def test_a_repeated_commit_takes_the_files_that_made_the_checkpoint_whole(tmp_path: Path) -> None:
    """The coordinator ended before the commit did."""
    state, step = _written_before_a_loss(tmp_path)
    state, actions, _ = apply(state, job.CoordinatorFailover())
    assert job.CommitCheckpoint(step) in actions
    state = _committed(tmp_path, state, step)
    assert state.checkpoint is not None and state.checkpoint[1] == step


def test_a_former_coordinator_takes_no_files_of_later_epochs(tmp_path: Path) -> None:
    """Its commit is late. Another one has failed to commit, and epoch 3 writes the step again."""
    state, step = _written_before_a_loss(tmp_path)
    _write(tmp_path, state, step, (0,), 3)
    state = _committed(tmp_path, state, step)
    assert state.checkpoint is not None
    manifest = checkpoint_directory.read_manifest(Path(state.checkpoint[0]))
    assert {file.epoch for file in manifest.parts} == {1}


def test_a_former_coordinator_does_not_try_to_commit_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, tried = list[int](), threading.Event()

    def commit(*_: Any) -> None:
        tries.append(1)
        tried.set()
        raise OSError(5, "I/O error")

    monkeypatch.setattr(checkpoint_directory, "RETRY_S", (LONG_S,))
    monkeypatch.setattr(checkpoint_directory, "commit", commit)
    with committing(tmp_path) as (commits, ended):
        commits.begin(8, None)
        assert tried.wait(LONG_S)
        commits.close()
        failed = ended()
        assert isinstance(failed, CheckpointFailed) and len(tries) == 1


def test_a_paused_job_continues_from_a_checkpoint_that_is_committed_late(tmp_path: Path) -> None:
    """The order was held back while the store was away, and all copies were lost meanwhile."""
    state, step = _written_before_a_loss(tmp_path)
    state, _, _ = send_report(state, "node0", phase=NodePhase.STARTING, cause="oops")
    for node in state.members:
        halted = (m.Halted(state.epoch, step),)
        state, _, _ = send_report(
            state, node, phase=NodePhase.HALTED, epoch=state.epoch, inventory=(), halted=halted
        )
    assert state.phase is JobPhase.PAUSED
    state = _committed(tmp_path, state, step)
    assert state.phase is JobPhase.HALTING
    for node in state.members:
        state, _, _ = send_report(state, node, phase=NodePhase.HALTED, epoch=state.epoch)
    assert state.phase is JobPhase.INSTALLING and assignment_of(state).step == step


def test_a_checkpoint_that_the_store_has_forgotten_is_found(tmp_path: Path) -> None:
    """Files that are still written stay, and those of another run or of an undone epoch do not
    count. One without files was removed as an old one, if a newer one is there."""
    done: queue.Queue[Any] = queue.Queue()
    for step, run in ((2, "a"), (4, "b"), (6, "a")):
        for layer in range(N_LAYERS):
            write_layer(tmp_path, step, layer, epoch=3, run=run)
        checkpoint_directory.commit(tmp_path, step, run=run)
    write_layer(tmp_path, 5, 0, run="a")

    def found(step: int, newest: int = 6, *, undone: bool = False) -> Any:
        commits.find(step, None, lambda epoch: not undone, newest)
        commits.flush(LONG_S)
        return None if done.empty() else done.get()

    with closing(CheckpointCommits(tmp_path, done.put, run="a")) as commits:
        assert found(2) == CheckpointCommitted(str(tmp_path / "step-00000002"), 2)
        assert found(5) is None
        for gone in (found(3), found(4)):
            assert isinstance(gone, CheckpointFailed) and "not there any more" in gone.error
        assert found(3, newest=2) is None and found(3, newest=4) is None
        assert found(7) is None and found(6, undone=True) is None
