"""Checkpoints are written from announced states, by one node per layer, in the background."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.vault import checkpoints
from elastic.agent.vault.checkpoints import CheckpointWriter
from elastic.agent.vault.replicator import Replicator
from elastic.agent.vault.vault import Vault
from elastic.core.protocol.messages import CheckpointPart, Published
from elastic.domain.state_layout import plan_layout, read_header
from elastic.domain.types import Assignment, Pipeline, Plan, Stage, Unit
from elastic.store import checkpoint_directory
from tests.agent.agents import Slow
from tests.agent.vault.checkpoints import N_LAYERS, layer_run, verified
from tests.agent.vault.copies import LocalWriter, gradient, make, put
from tests.patience import LONG_S

ROOT = Path(__file__).resolve().parents[3]


def wait_for(event: threading.Event) -> None:
    assert event.wait(LONG_S)


def plan(first: str = "a", second: str = "b") -> Plan:
    """Two pipelines: layers 0 and 1 on node a and layer 2 on b; all layers on c."""
    stages = (Stage(Unit(first), 0, 2), Stage(Unit(second), 2, N_LAYERS))
    other = (Stage(Unit("c"), 0, N_LAYERS),)
    return Plan(1, N_LAYERS, 4, 1, (Pipeline(stages, (0, 1)), Pipeline(other, (2, 3))))


class Node:
    """A node's vault and checkpoint writer; `parts` has the messages for the agent."""

    def __init__(self, name: str, directory: Path) -> None:
        self.vault, self.workers = (
            Vault(name, directory / name),
            LocalWriter(directory / f"{name}-worker"),
        )
        self.directory = directory / "checkpoints"
        self.parts: queue.Queue[CheckpointPart] = queue.Queue()
        self.writer = CheckpointWriter(self.directory, self.vault, self.parts.put)
        self.writer.every, self.writer.steps = 2, 5
        self.enter(1)

    def enter(self, epoch: int, step: int = 0, checkpointed: int = -1, *holders: str) -> None:
        present = replace(plan(*holders), epoch=epoch)
        self.epoch = epoch
        self.writer.enter(Assignment(present, step, checkpointed=checkpointed))

    def announce(self, step: int, *layers: int, epoch: int = 0) -> Published:
        locals_ = []
        for layer in layers:
            run, made_in = layer_run(layer, step), epoch or self.epoch
            copy = make(run, layer=layer, step=step, epoch=made_in)
            locals_.append(self.workers.write(2 * layer + step % 2, copy, run))
            self.vault.publish(locals_[-1])
        published = Published(step, tuple(locals_), "")
        self.writer.offer(published)
        return published

    def written(self) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
        """All parts so far, after the queue is empty."""
        done = threading.Event()
        self.writer.then(done.set)
        assert done.wait(LONG_S)
        parts = [self.parts.get() for _ in range(self.parts.qsize())]
        assert all(part.node == self.vault.node for part in parts)
        return [(part.step, part.layers) for part in parts if not part.error]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node("a", tmp_path)
    yield node
    node.writer.close()


def test_the_first_holders_write_a_checkpoint_together(node: Node, tmp_path: Path) -> None:
    others = [Node(name, tmp_path) for name in ("b", "c")]
    for each, layers in zip((node, *others), ((0, 1), (2,), (0, 1, 2)), strict=True):
        for step in range(6):
            each.announce(step, *layers)
    assert node.written() == [(step, ((0, 0), (1, 0))) for step in (2, 4, 5)]
    assert others[0].written() == [(step, ((2, 0),)) for step in (2, 4, 5)]
    assert others[1].written() == [] and not others[1].writer.final
    path = checkpoint_directory.commit(node.directory, 4)
    manifest = verified(path)
    for layer in range(N_LAYERS):
        assert bytes(checkpoint_directory.read_run(path, manifest, layer, 0)) == layer_run(layer, 4)
    for each in others:
        each.writer.close()


def test_states_are_copied_aside_at_once(node: Node) -> None:
    """The worker overwrites the slots while the slow disk is written."""
    slow, order = threading.Event(), queue.Queue[bool]()
    node.writer.then(lambda: order.put(slow.wait(LONG_S)))
    node.announce(2, 0, 1)
    for slot in node.workers.slots.values():
        slot.begin()
        slot.view(200)[:] = b"!" * 200
    node.announce(3, 0, 1)
    node.announce(4, 0, 1)
    assert node.parts.empty()
    slow.set()
    assert order.get(timeout=LONG_S)
    assert [step for step, _ in node.written()] == [2, 4]
    for step in (2, 4):
        run = layer_run(2, step)
        checkpoint_directory.write_part(node.directory, step, 2, 0, N_LAYERS, 1, memoryview(run))
        path = checkpoint_directory.commit(node.directory, step)
        assert bytes(checkpoint_directory.read_run(path, verified(path), 1, 0)) == layer_run(
            1, step
        )


def test_what_is_announced_again_is_written_once(node: Node) -> None:
    node.announce(2, 0)
    node.announce(2, 0, 1)
    node.announce(2, 0, 1)
    assert node.written() == [(2, ((0, 0),)), (2, ((1, 0),))]
    node.announce(4, 0, 1)
    assert node.written() == [(4, ((0, 0), (1, 0)))]


def test_gradients_step_zero_and_steps_between_are_none_of_its_business(node: Node) -> None:
    data = layer_run(0, 2)
    local = node.workers.write(9, gradient(data, 2, {0}), data)
    node.vault.publish(local)
    node.writer.offer(Published(1, (local,), ""))
    node.announce(0, 0, 1)
    node.announce(3, 0, 1)
    node.writer.every = 0
    node.announce(4, 0, 1)
    assert node.written() == [] and not node.directory.exists()


def test_a_new_plan_says_who_writes(node: Node) -> None:
    node.announce(2, 0, 1)
    node.enter(2, 2, 2, "b", "a")
    node.announce(4, 0, 1, 2)
    assert node.written() == [(2, ((0, 0), (1, 0))), (4, ((2, 0),))]


def test_the_last_step_is_always_a_checkpoint_and_can_be_waited_for(node: Node) -> None:
    slow, order = threading.Event(), queue.Queue[str]()
    node.writer.then(lambda: order.put("slow" if slow.wait(LONG_S) else "late"))
    node.announce(4, 0, 1)
    assert not node.writer.final
    node.announce(5, 0, 1)
    assert node.writer.final
    node.writer.then(lambda: order.put(f"{node.parts.qsize()} on disk"))
    assert order.empty()
    slow.set()
    assert [order.get(timeout=LONG_S) for _ in range(2)] == ["slow", "2 on disk"]


def test_each_file_of_the_last_checkpoint_is_progress(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk needs long for a part of many layers."""
    write, seen = checkpoint_directory.write_part, list[int]()

    def watched(*args: Any) -> Any:
        seen.append(node.writer.final_files)
        return write(*args)

    monkeypatch.setattr(checkpoint_directory, "write_part", watched)
    node.announce(4, 0, 1)
    node.announce(5, 0, 1)
    assert len(node.written()) == 2 and seen == [0, 0, 0, 1] and node.writer.final_files == 2


def test_a_disk_that_refuses_costs_that_checkpoint(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.directory.write_text("not a directory")
    node.announce(2, 0, 1)
    assert node.written() == [] and "checkpoint of step 2" in caplog.text
    node.directory.unlink()
    node.announce(4, 0, 1)
    assert node.written() == [(4, ((0, 0), (1, 0)))]


def test_close_finishes_what_is_queued(tmp_path: Path) -> None:
    node = Node("a", tmp_path)
    node.announce(2, 0, 1)
    node.announce(4, 0, 1)
    node.writer.close()
    assert [node.parts.get_nowait().step for _ in range(2)] == [2, 4]


def test_after_a_change_of_plan_the_state_is_written_in_its_new_division(node: Node) -> None:
    """One of two holders wrote its portion; the other is lost. Now the first has all of it."""
    run = memoryview(layer_run(0, 2))
    header = read_header(run)
    rows = [(e.name, e.dtype, e.shape, e.shard_dim) for e in header.tensors]
    text, _, nbytes = plan_layout(2, rows, header.extra, (1, 2))
    part = bytearray(nbytes)
    part[: len(text)] = text
    local = node.workers.write(90, make(bytes(part), layer=0, step=2, portion=(1, 2)), bytes(part))
    node.vault.publish(local)
    node.writer.offer(Published(1, (local,), ""))
    assert node.written() == [(2, ((0, 0, 1, 2),))]
    node.enter(2, 2)
    node.announce(2, 0)
    assert node.written() == [(2, ((0, 0),))]


def test_an_unexpected_error_is_reported_and_the_next_checkpoint_is_written(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    node.writer._failed = told.append
    write = checkpoint_directory.write_part
    errors = iter([MemoryError("too large")])

    def fail_once(*args: Any) -> Any:
        for error in errors:
            raise error
        return write(*args)

    monkeypatch.setattr(checkpoint_directory, "write_part", fail_once)
    node.announce(2, 0)
    node.announce(4, 0)
    assert node.written() == [(4, ((0, 0),))]
    assert told == ["unexpected MemoryError: too large"]


def test_acknowledgements_do_not_wait_for_a_slow_disk(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except those of the last step, for which the job waits."""
    slow = Slow(os.fsync)
    monkeypatch.setattr(os, "fsync", slow)
    acked: queue.Queue[int] = queue.Queue()
    replicator = Replicator(
        node.vault,
        lambda worker, bundle, kept: acked.put(bundle),
        lambda *failure: None,
        prepare=node.writer.offer,
    )
    for step in (2, 3, 4):
        run = layer_run(0, step)
        local = node.workers.write(step, make(run, layer=0, step=step), run)
        node.vault.publish(local)
        replicator.submit(0, Published(step, (local,), ""))
        assert acked.get(timeout=LONG_S) == step
    assert slow.begun.wait(LONG_S) and node.parts.empty()
    slow.go()
    assert node.written() == [(2, ((0, 0),)), (4, ((0, 0),))]
    replicator.close()


def test_states_of_a_repeated_step_are_written_again(node: Node) -> None:
    """Epoch 1 wrote the state after the last step, but a loss leads back to the step before."""
    node.announce(5, 0, 1)
    assert node.written() == [(5, ((0, 0), (1, 0)))]
    node.enter(2, 4)
    node.announce(5, 0, 1)
    assert node.written() == [(5, ((0, 0), (1, 0)))]


def test_states_of_a_step_that_stays_done_are_not_written_again(node: Node) -> None:
    node.announce(4, 0, 1)
    node.enter(2, 4)
    node.announce(4, 0, 1)
    assert node.written() == [(4, ((0, 0), (1, 0)))]
    node.enter(3, 4, 4, "b", "a")
    node.announce(4, 0, 1, 2)
    assert node.written() == [], "the checkpoint is whole"


def test_states_of_a_diverged_step_are_written_again(node: Node) -> None:
    """Epoch 2 begins at step 4, but its states of epoch 1 may be wrong."""
    node.announce(4, 0, 1)
    assert node.written() == [(4, ((0, 0), (1, 0)))]
    present = replace(plan(), epoch=2)
    node.writer.enter(Assignment(present, 4, starts=((1, 0), (2, 4), (2, 3))))
    node.epoch = 2
    node.announce(4, 0, 1)
    assert node.written() == [(4, ((0, 0), (1, 0)))]


def test_states_of_an_abandoned_epoch_are_not_written(node: Node) -> None:
    slow, order = threading.Event(), queue.Queue[bool]()
    node.writer.then(lambda: order.put(slow.wait(LONG_S)))
    node.announce(5, 0, 1)
    node.enter(2, 4)
    node.announce(5, 0, 1, epoch=1)  # a bundle that was announced before the change of plan
    assert not node.writer.final
    slow.set()
    assert order.get(timeout=LONG_S) and node.written() == []
    node.announce(5, 0, 1)
    assert node.written() == [(5, ((0, 0), (1, 0)))]
    names = [
        path.name for path in checkpoint_directory.staging_path(node.directory, 5).glob("*.s*")
    ]
    assert all("epoch-2" in name for name in names) and len(names) == 2


def test_files_name_the_run_of_the_assignment(node: Node) -> None:
    node.writer.enter(Assignment(plan(), 0, run="job.1"))
    node.announce(2, 0)
    assert node.written() == [(2, ((0, 0),))]
    staging = checkpoint_directory.staging_path(node.directory, 2)
    (record,) = (json.loads(file.read_text()) for file in staging.glob("*.json"))
    assert record["run"] == "job.1"


def test_states_that_an_epoch_before_the_last_abandoned_are_written_again(node: Node) -> None:
    """This node took no part in epoch 2, which began before the state that it has written."""
    node.announce(4, 0, 1)
    late = CheckpointPart(4, ((0, 0), (1, 0)), 1, "a")
    node.enter(2, 4)
    assert not node.writer.is_undone(late) and node.written() == [(4, late.layers)]
    present = replace(plan(), epoch=3)
    node.writer.enter(Assignment(present, 4, starts=((1, 0), (2, 3), (3, 4))))
    node.epoch = 3
    assert node.writer.is_undone(late), "its part is not sent any more"
    node.announce(4, 0, 1)
    assert node.written() == [(4, ((0, 0), (1, 0)))]


def test_layers_of_two_versions_are_parts_of_two_checkpoints(node: Node) -> None:
    """A worker that was halted during an update announces them in one bundle."""
    copies = []
    for layer, step in ((0, 5), (1, 4)):
        run = layer_run(layer, step)
        copies.append(node.workers.write(layer, make(run, layer=layer, step=step), run))
        node.vault.publish(copies[-1])
    node.writer.offer(Published(1, tuple(copies), ""))
    assert node.written() == [(4, ((1, 0),)), (5, ((0, 0),))]


def test_a_transient_failure_of_the_disk_costs_a_retry(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems, sync = [OSError(5, "Input/output error")], os.fsync

    def fails_once(descriptor: int) -> None:
        if problems:
            raise problems.pop()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fails_once)
    node.announce(2, 0, 1)
    assert node.written() == [(2, ((0, 0), (1, 0)))] and not problems


def test_a_lasting_failure_is_reported_and_the_next_epoch_tries_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_directory, "RETRY_S", (0.001, 0.001))
    node.directory.write_text("not a directory")
    done = threading.Event()
    node.announce(5, 0, 1)
    node.writer.then(done.set)
    assert done.wait(LONG_S)
    part = node.parts.get_nowait()
    assert (part.step, part.layers, part.epoch, part.node) == (5, ((0, 0), (1, 0)), 1, "a")
    assert "File exists" in part.error or "Not a directory" in part.error
    node.directory.unlink()
    node.enter(2, 5)
    node.announce(5, 0, 1)
    assert node.written() == [(5, ((0, 0), (1, 0)))]


def test_a_keeper_writes_the_states_of_a_lost_node(node: Node) -> None:
    run = layer_run(1, 2)
    copy = put(node.vault, make(run, layer=1, step=2, owner="b", epoch=1), run)
    present = replace(plan(), epoch=2)
    elsewhere = replace(copy, node="c")
    node.writer.enter(Assignment(present, 3, rescued=(copy, elsewhere)))
    node.vault.trim(2)
    assert node.written() == [(2, ((1, 0),))], "also if the vault drops the copy meanwhile"
    node.writer.enter(Assignment(present, 3, rescued=(copy,)))
    assert node.written() == [], "it is on disk"
    gone = replace(copy, layer=2, sequence=copy.sequence + 1)
    node.writer.enter(Assignment(present, 3, rescued=(gone,)))
    failed = node.parts.get(timeout=LONG_S)
    assert failed.error and failed.layers == ((2, 0),), "another node may have it"
    run = layer_run(2, 2)
    copy = put(node.vault, make(run, layer=2, step=2, owner="b", epoch=3), run)
    node.writer.enter(Assignment(present, 3, rescued=(copy,)))
    assert node.written() == [(2, ((2, 0),))], "the next epoch tries again"


def test_a_state_in_the_queue_is_not_rescued(node: Node) -> None:
    """The disk is slow, and the states of the next checkpoint are in the queue, too."""
    slow = threading.Event()
    node.writer.then(lambda: wait_for(slow))
    held = [node.announce(2, 0).copies[0].copy, node.announce(4, 0).copies[0].copy]
    rescued = tuple(replace(copy, node="a") for copy in held[:1])
    node.writer.enter(Assignment(replace(plan(), epoch=2), 4, rescued=rescued))
    slow.set()
    assert node.written() == [(2, ((0, 0),)), (4, ((0, 0),))]


def test_a_rescued_copy_of_a_living_worker_outlives_the_trim(node: Node) -> None:
    slow = threading.Event()
    node.writer.then(lambda: wait_for(slow))
    run = layer_run(2, 2)
    copy = make(run, layer=2, step=2)
    node.vault.publish(node.workers.write(0, copy, run))
    copy = replace(copy, node="a")
    node.writer.enter(Assignment(replace(plan(), epoch=2), 3, rescued=(copy,)))
    node.vault.trim(2)
    if not node.workers.slots[0].sequence:  # the worker has it back and writes to it
        node.workers.slots[0].view(len(run))[:] = bytes(len(run))
    slow.set()
    assert node.written() == [(2, ((2, 0),))]


def test_a_slow_disk_costs_checkpoints_and_not_the_memory(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two checkpoints wait for the disk. The next one is given up, but never the last one."""
    monkeypatch.setattr(checkpoints, "SMALL_BYTES", 0)
    told: list[str] = []
    node.writer._failed = told.append
    node.writer.every, node.writer.steps = 1, 6
    slow = threading.Event()
    node.writer.then(lambda: wait_for(slow))
    for step in (1, 2):
        node.announce(step, 0)
        node.announce(step, 1)
    assert node.parts.empty() and not told
    node.announce(3, 0, 1)
    given_up = node.parts.get_nowait()
    assert (given_up.step, given_up.layers) == (3, ((0, 0), (1, 0)))
    assert told == [given_up.error] == ["the disk is 2 checkpoints behind"]
    node.announce(6, 0, 1)
    slow.set()
    whole = [(1, ((0, 0),)), (1, ((1, 0),)), (2, ((0, 0),)), (2, ((1, 0),))]
    assert node.written() == [*whole, (6, ((0, 0), (1, 0)))]
    node.announce(3, 0, 1)
    assert node.written() == [(3, ((0, 0), (1, 0)))], "the disk has caught up"
    assert node.writer._queued == []


def test_small_copies_may_wait_for_the_disk(node: Node) -> None:
    node.writer.every = 1
    slow = threading.Event()
    node.writer.then(lambda: wait_for(slow))
    for step in (1, 2, 3, 4):
        node.announce(step, 0)
    slow.set()
    assert [step for step, _ in node.written()] == [1, 2, 3, 4]


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "Cannot allocate memory")])
def test_a_copy_for_which_there_is_no_memory_is_reported_and_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(data: memoryview) -> memoryview:
        raise error

    told: list[str] = []
    node.writer._failed = told.append
    run = layer_run(1, 2)
    copy = put(node.vault, make(run, layer=1, step=2, owner="b", epoch=1), run)
    rescue = Assignment(replace(plan(), epoch=2), 3, rescued=(copy,))
    with monkeypatch.context() as patch:
        patch.setattr("elastic.agent.vault.vault.private_copy", fail)
        patch.setattr("elastic.agent.vault.checkpoints.private_copy", fail)
        node.announce(5, 0)
        assert node.writer.final
        node.writer.enter(rescue)
        assert [node.parts.get(timeout=LONG_S).step for _ in range(2)] == [5, 2]
        assert len(told) == 2 and all(why.startswith("no memory: ") for why in told)
    node.writer.enter(rescue)
    node.announce(5, 0, epoch=2)
    assert node.written() == [(2, ((1, 0),)), (5, ((0, 0),))]
    assert node.writer._queued == []


LIMITED = """
import resource, sys
from pathlib import Path
from tests.agent.vault.test_checkpoints import Node

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
node = Node("a", Path(sys.argv[1]))
refused = []
node.writer._failed = refused.append
node.announce(0, 0, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
node.announce(2, 0, 1)
assert node.written() == [], "no part is reported"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
node.announce(4, 0, 1)
assert node.written() == [(4, ((0, 0), (1, 0)))], "the next checkpoint is written"
print(refused)
"""


def test_a_disk_that_refuses_is_told_of_and_the_next_checkpoint_is_written(tmp_path: Path) -> None:
    """The system refuses files above a limit, which needs no right to mount a small disk."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LONG_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("File too large") == 1 and "Traceback" not in done.stderr
