"""Durable checkpoints: whole or not there, and read back bit for bit."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from elastic.domain import codec
from elastic.domain.errors import FieldError, VaultError
from elastic.domain.state_layout import plan_layout, read_header
from elastic.domain.types import JobSpec, LayerSpec
from elastic.store import checkpoint_directory, checkpoint_format, safetensors_stream
from tests.agent.vault.checkpoints import (
    N_LAYERS,
    layer_run,
    verified,
    whole,
    write_all,
    write_and_die,
    write_layer,
)
from tests.patience import LONG_S


@pytest.mark.parametrize("tp", [1, 2])
def test_every_run_comes_back_bit_for_bit(tmp_path: Path, tp: int) -> None:
    path = whole(tmp_path, 12, tp)
    assert path.name == "step-00000012"
    manifest = verified(path)
    assert (manifest.step, manifest.n_layers, manifest.tp) == (12, N_LAYERS, tp)
    for layer in range(N_LAYERS):
        for shard in range(tp):
            assert bytes(checkpoint_directory.read_run(path, manifest, layer, shard)) == layer_run(
                layer, 12, shard, tp
            )


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    path = whole(tmp_path, 3)
    with safe_open(_file(path, 1), "pt") as file:
        assert file.metadata()["version"] == "3"
        assert file.get_tensor("param/weight").tolist() == [
            [103, 104, 105, 106],
            [113, 114, 115, 116],
        ]
        assert file.get_tensor("param/bias").dtype == torch.bfloat16
        assert file.get_tensor("optim/weight/step").item() == 3
        assert len(file.keys()) == 5


def _file(path: Path, layer: int) -> Path:
    (file,) = path.glob(f"layer-{layer:04d}-tp-0*.safetensors")
    return file


def portions_of(layer: int, step: int, number: int) -> list[bytes]:
    """A layer's state in parts, cut at grains: the first holder has all 8 elements of the
    weight."""
    header, data = read_header(memoryview(layer_run(layer, step))), layer_run(layer, step)
    rows = [(e.name, e.dtype, e.shape, e.shard_dim) for e in header.tensors]
    runs = []
    for index in range(number):
        text, part, nbytes = plan_layout(step, rows, header.extra, (index, number))
        run = bytearray(nbytes)
        run[: len(text)] = text
        for whole_entry, entry in zip(header.tensors, part.tensors, strict=True):
            size = entry.nbytes
            run[entry.offset : entry.offset + size] = data[
                whole_entry.offset : whole_entry.offset + size
            ]
        runs.append(bytes(run))
    return runs


def test_portions_are_put_together(tmp_path: Path) -> None:
    """Holders of two plans wrote theirs: of those that are whole the coarsest is taken."""
    for layer in range(N_LAYERS):
        for number, left in ((2, 0), (3, 1)):
            for run in portions_of(layer, 9, number)[left:]:
                checkpoint_directory.write_part(tmp_path, 9, layer, 0, N_LAYERS, 1, memoryview(run))
    path = checkpoint_directory.commit(tmp_path, 9)
    manifest = verified(path)
    assert [part.portion for part in manifest.parts] == [(0, 2), (1, 2)] * N_LAYERS
    for layer in range(N_LAYERS):
        assert bytes(checkpoint_directory.read_run(path, manifest, layer, 0)) == layer_run(layer, 9)
    (path / manifest.parts[-1].name).unlink()
    assert checkpoint_directory.latest(tmp_path) is None


def test_a_missing_portion_is_no_checkpoint(tmp_path: Path) -> None:
    write_all(tmp_path, 5, skip=(2,))
    checkpoint_directory.write_part(
        tmp_path, 5, 2, 0, N_LAYERS, 1, memoryview(portions_of(2, 5, 2)[0])
    )
    with pytest.raises(FieldError, match=r"\(2, 0\)"):
        checkpoint_directory.commit(tmp_path, 5)


def test_nothing_is_a_checkpoint_before_the_commit(tmp_path: Path) -> None:
    write_all(tmp_path, 5)
    assert checkpoint_directory.latest(tmp_path) is None
    checkpoint_directory.commit(tmp_path, 5)
    assert checkpoint_directory.latest(tmp_path) == tmp_path / "step-00000005"
    assert checkpoint_directory.commit(tmp_path, 5) == tmp_path / "step-00000005", (
        "a repeated order changes nothing"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


def test_everything_is_durable_before_it_gets_its_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash of the machine leaves a final name with files that are torn, or empty."""
    synced: set[int] = set()

    def inode(path: str | Path) -> int:
        return os.stat(path).st_ino

    def sync(descriptor: int, real: Callable[[int], None] = os.fsync) -> None:
        real(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def checked(real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Path, target: Path) -> None:
            inside = source.iterdir() if source.is_dir() else ()
            for path in (source, *inside):
                assert inode(path) in synced, f"{path.name} is not synced before {target.name}"
            synced.difference_update({inode(source.parent), inode(target.parent)})
            real(source, target)

        return rename

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", checked(os.rename))
    monkeypatch.setattr(os, "replace", checked(os.replace))
    whole(tmp_path, 4)
    assert inode(tmp_path) in synced, "the final name is not durable"


def test_incomplete_parts_are_not_committed(tmp_path: Path) -> None:
    write_all(tmp_path, 5, skip=(1,))
    with pytest.raises(FieldError, match=r"\(1, 0\)"):
        checkpoint_directory.commit(tmp_path, 5)
    with pytest.raises(FieldError, match="before the commit"):
        checkpoint_directory.commit(tmp_path, 6)
    assert checkpoint_directory.latest(tmp_path) is None
    checkpoint_directory.discard_incomplete(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_parts_of_another_shape_are_passed_over(tmp_path: Path) -> None:
    write_all(tmp_path, 5, tp=2, skip=(0,))
    write_all(tmp_path, 5, tp=1)
    with pytest.raises(FieldError, match="files of one job"):
        checkpoint_directory.commit(tmp_path, 5)
    layer = LayerSpec(1, 1, 1, 1.0, 1.0)
    path = checkpoint_directory.commit(tmp_path, 5, JobSpec((layer,) * N_LAYERS, 1, 9))
    assert verified(path).tp == 1


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    old = whole(tmp_path, 5)
    (old / "marker").touch()
    assert whole(tmp_path, 5) == old and not (old / "marker").exists()
    verified(old)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


def test_a_commit_that_ends_between_its_renames_loses_nothing(tmp_path: Path) -> None:
    path = whole(tmp_path, 5)
    write_all(tmp_path, 5)
    path.rename(tmp_path / "step-00000005.replaced")
    checkpoint_directory.finish_commits(tmp_path)
    assert checkpoint_directory.latest(tmp_path) == path
    checkpoint_directory.discard_incomplete(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    checkpoint_directory.finish_commits(tmp_path / "absent")
    checkpoint_directory.discard_incomplete(tmp_path / "absent")


def test_a_failed_sync_of_the_directory_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renamed directory outlives a power failure only after this sync."""
    sync, synced, failures = checkpoint_directory._sync, list[Path](), [1]

    def failing(directory: Path) -> None:
        if directory == tmp_path and failures:
            failures.pop()
            raise OSError(errno.EIO, "Input/output error")
        sync(directory)
        synced.append(directory)

    monkeypatch.setattr(checkpoint_directory, "_sync", failing)
    write_all(tmp_path, 5)
    path = checkpoint_directory.retry(
        lambda: checkpoint_directory.commit(tmp_path, 5), lambda pause_s: None
    )
    assert not failures and synced[-1] == tmp_path
    verified(path)


def test_a_lock_that_stays_held_is_an_error_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator was stopped inside a commit, and holds the lock until it goes on or ends."""
    monkeypatch.setattr(checkpoint_directory, "LOCK_S", 0.02)
    write_all(tmp_path, 5)
    stopped, waits = os.open(tmp_path, os.O_RDONLY), list[float]()
    fcntl.flock(stopped, fcntl.LOCK_EX)
    for blocked in (
        lambda: checkpoint_directory.commit(tmp_path, 5),
        lambda: checkpoint_directory.finish_commits(tmp_path),
        lambda: checkpoint_directory.discard_incomplete(tmp_path),
        lambda: checkpoint_directory.discard_step(tmp_path, 5, before=2),
        lambda: checkpoint_directory.discard_step(tmp_path, 6, before=2, committed=True),
    ):
        with pytest.raises(FieldError, match="lock") as caught:
            blocked()
        assert isinstance(caught.value.__cause__, OSError)
    checkpoint_directory.discard_step(tmp_path, 6, before=2)  # has no files, so needs no lock

    def wait(pause_s: float) -> None:
        waits.append(pause_s)
        if len(waits) == 2:
            os.close(stopped)

    path = checkpoint_directory.retry(lambda: checkpoint_directory.commit(tmp_path, 5), wait)
    assert len(waits) == 2
    verified(path)


@pytest.mark.parametrize("step", ["_write_json", "_remove_others"])
def test_two_writers_of_a_state_do_not_tear_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Two nodes rescue a state, and their replicas differ in the last bits. The second one writes
    before the record of the first, or during the commit."""
    write_all(tmp_path, 5, skip=(1,))
    original = getattr(checkpoint_directory, step)

    def second_writer(*args: Any) -> None:
        monkeypatch.setattr(checkpoint_directory, step, original)
        write_layer(tmp_path, 5, 1, other=True)
        original(*args)

    monkeypatch.setattr(checkpoint_directory, step, second_writer)
    write_layer(tmp_path, 5, 1)
    verified(checkpoint_directory.commit(tmp_path, 5))


def test_a_commit_that_is_tried_again_tears_no_file_that_is_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node has written a file, and adds its record while the disk has no room for the commit."""
    write_all(tmp_path, 5)
    write, manifests = checkpoint_directory._write_json, list[str]()

    def full_once(path: Path, text: str) -> None:
        if path.name != checkpoint_format.MANIFEST:  # the record of the second file
            with pytest.raises(FieldError, match="No space left"):
                checkpoint_directory.commit(tmp_path, 5)
        elif not manifests:
            manifests.append(text)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, text)

    monkeypatch.setattr(checkpoint_directory, "_write_json", full_once)
    state = memoryview(layer_run(1, 5))
    checkpoint_directory.write_part(tmp_path, 5, 1, 0, N_LAYERS, 1, state, epoch=2)
    path = checkpoint_directory.commit(tmp_path, 5)
    assert [part.epoch for part in verified(path).parts].count(2) == 1, "the newest file counts"
    assert len(list(path.glob("layer-*"))) == 2 * N_LAYERS, "the others are removed"


def test_a_record_without_its_file_does_not_count(tmp_path: Path) -> None:
    write_all(tmp_path, 5)
    state = memoryview(layer_run(1, 5))
    part = checkpoint_directory.write_part(tmp_path, 5, 1, 0, N_LAYERS, 1, state, epoch=2)
    (tmp_path / "step-00000005.tmp" / part.name).unlink()
    assert {part.epoch for part in verified(checkpoint_directory.commit(tmp_path, 5)).parts} == {0}


def test_several_nodes_commit_at_once(tmp_path: Path) -> None:
    write_all(tmp_path, 5)
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(checkpoint_directory.commit(tmp_path, 5)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert paths == [tmp_path / "step-00000005"] * 4
    verified(paths[0])


def test_a_file_written_after_the_commit_does_not_hide_the_checkpoint(tmp_path: Path) -> None:
    """The next coordinator repeats the commit, after another holder has written its part again."""
    spec = JobSpec((LayerSpec(1, 1, 1, 1.0, 1.0),) * N_LAYERS, 1, 9, contents=("a",) * N_LAYERS)
    write_all(tmp_path, 5)
    path = checkpoint_directory.commit(tmp_path, 5, spec)
    checkpoint_directory.write_part(tmp_path, 5, 0, 0, N_LAYERS, 1, memoryview(layer_run(0, 5)), 3)
    other = dataclasses.replace(spec, contents=("b",) * N_LAYERS)
    with pytest.raises(FieldError, match="are missing"):
        checkpoint_directory.commit(tmp_path, 5, other)
    assert checkpoint_directory.commit(tmp_path, 5, spec) == path
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    checkpoint_directory.write_part(tmp_path, 5, 0, 0, N_LAYERS, 1, memoryview(layer_run(0, 5)), 3)
    (path / "manifest.json").unlink()
    with pytest.raises(FieldError, match="are missing"):
        checkpoint_directory.commit(tmp_path, 5, spec)


# ---- several runs in one directory ----


def _write_run(
    directory: Path, run: str, skip: tuple[int, ...] = (), epoch: int = 1, other: bool = False
) -> None:
    """Write the layers of step 6."""
    for layer in range(N_LAYERS):
        if layer not in skip:
            write_layer(directory, 6, layer, epoch, run, other)


def _content(path: Path, layer: int) -> bytes:
    return bytes(checkpoint_directory.read_run(path, verified(path), layer, 0))


def _commit(directory: Path, run: str, counts: Callable[[int], bool] = lambda epoch: True) -> Path:
    return checkpoint_directory.commit(directory, 6, None, counts, run)


def test_a_late_file_of_a_former_run_is_no_part(tmp_path: Path) -> None:
    """Its agent was in epoch 5, and wrote its queue after the next run began."""
    checkpoint_directory.discard_incomplete(tmp_path)
    _write_run(tmp_path, "new")
    write_layer(tmp_path, 6, 1, 5, "old", other=True)
    path = _commit(tmp_path, "new")
    assert _content(path, 1) == layer_run(1, 6) and verified(path).run == "new"
    assert len(list(path.glob("layer-*.safetensors"))) == N_LAYERS


@pytest.mark.parametrize("writers", [("old",), ("old", "new")])
def test_files_of_former_runs_are_discarded_until_the_new_run_writes(
    tmp_path: Path, writers: tuple[str, ...]
) -> None:
    """The removal may come late: the coordinator was stopped before it, and another one leads."""
    for run in writers:
        _write_run(tmp_path, run)
    staging = checkpoint_directory.staging_path(tmp_path, 6)
    (staging / "layer-0000-tp-0-old.json").write_text("damaged")
    checkpoint_directory.discard_incomplete(tmp_path, "new")
    assert staging.exists() is ("new" in writers)


def test_equal_files_of_two_runs_are_different_files(tmp_path: Path) -> None:
    """Both runs resumed the same checkpoint, so their states have the same bytes."""
    _write_run(tmp_path, "new")
    write_layer(tmp_path, 6, 1, 1, "old")
    verified(_commit(tmp_path, "new"))


@pytest.mark.parametrize("written", [(), (0, 2)], ids=["nothing", "a part"])
def test_a_checkpoint_of_a_former_run_does_not_stand_for_an_incomplete_one(
    tmp_path: Path, written: tuple[int, ...]
) -> None:
    """The new run resumed step 4, and lost files of step 6."""
    _write_run(tmp_path, "old", other=True)
    former = _commit(tmp_path, "old")
    checkpoint_directory.discard_incomplete(tmp_path)
    for layer in written:
        write_layer(tmp_path, 6, layer, 1, "new")
    with pytest.raises(FieldError):
        _commit(tmp_path, "new")
    assert not checkpoint_directory.is_committed(tmp_path, 6, "new")
    assert checkpoint_directory.is_committed(tmp_path, 6, "old")
    assert _content(former, 0) == layer_run(50, 6), "it stays"
    _write_run(tmp_path, "new", skip=written)
    assert _content(_commit(tmp_path, "new"), 0) == layer_run(0, 6)
    assert checkpoint_directory.is_committed(tmp_path, 6, "new")


def test_a_checkpoint_of_an_undone_epoch_does_not_stand_for_an_incomplete_one(
    tmp_path: Path,
) -> None:
    """Its removal after a divergence was lost, and the present epoch has written one part."""
    _write_run(tmp_path, "run", epoch=1)
    _commit(tmp_path, "run")
    write_layer(tmp_path, 6, 0, 2, "run")
    with pytest.raises(FieldError, match=r"\(1, 0\)"):
        _commit(tmp_path, "run", lambda epoch: epoch >= 2)


def test_a_removal_leaves_the_checkpoint_of_a_former_run(tmp_path: Path) -> None:
    _write_run(tmp_path, "old")
    former = _commit(tmp_path, "old")
    _write_run(tmp_path, "new", epoch=1)
    checkpoint_directory.discard_step(tmp_path, 6, 2, "new", committed=True)
    assert verified(former).run == "old"
    with pytest.raises(FieldError):
        _commit(tmp_path, "new")


def test_files_of_the_former_version_name_no_run(tmp_path: Path) -> None:
    """Its agents take part in this run, and its run goes on under this version."""
    _write_run(tmp_path, "run", skip=(1,))
    write_layer(tmp_path, 6, 1)
    assert _commit(tmp_path, "run") == _commit(tmp_path, "run")
    _write_run(tmp_path, "")
    assert verified(_commit(tmp_path, "")).run == ""


@pytest.mark.parametrize("committed", [False, True])
def test_files_of_earlier_epochs_are_discarded(tmp_path: Path, committed: bool) -> None:
    """A commit may have taken a file of the new epoch together with those that are wrong."""
    write_all(tmp_path, 5)
    again = memoryview(layer_run(0, 5))
    checkpoint_directory.write_part(tmp_path, 5, 0, 0, N_LAYERS, 1, again, 2)
    if committed:
        checkpoint_directory.commit(tmp_path, 5)
    checkpoint_directory.discard_step(tmp_path, 5, before=2, committed=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005.tmp"]
    with pytest.raises(FieldError, match=r"\(1, 0\)"):
        checkpoint_directory.commit(tmp_path, 5)
    for layer in range(1, N_LAYERS):
        run = memoryview(layer_run(layer, 5))
        checkpoint_directory.write_part(tmp_path, 5, layer, 0, N_LAYERS, 1, run, 2)
    manifest = verified(checkpoint_directory.commit(tmp_path, 5))
    assert {part.epoch for part in manifest.parts} == {2}
    checkpoint_directory.discard_step(tmp_path, 5, before=2, committed=True)
    checkpoint_directory.discard_step(tmp_path / "absent", 5, before=2, committed=True)
    assert checkpoint_directory.latest(tmp_path) is not None


def test_the_removal_of_a_lost_checkpoint_leaves_a_committed_one(tmp_path: Path) -> None:
    path = whole(tmp_path, 5)
    write_layer(tmp_path, 5, 0, 1)
    (checkpoint_directory.staging_path(tmp_path, 5) / checkpoint_format.MANIFEST).touch()
    checkpoint_directory.discard_step(tmp_path, 5, before=2)
    verified(path)
    assert checkpoint_directory.staged_steps(tmp_path) == (), "nothing is left of the other one"


@pytest.mark.parametrize("where", ["before a part is renamed", "before the commit"])
def test_a_crash_leaves_the_last_whole_one(tmp_path: Path, where: str) -> None:
    before = whole(tmp_path, 6)
    context = multiprocessing.get_context("spawn")
    reached = context.Event()
    writer = context.Process(target=write_and_die, args=(str(tmp_path), where, reached))
    writer.start()
    assert reached.wait(LONG_S)
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join(LONG_S)
    assert checkpoint_directory.latest(tmp_path) == before
    after = whole(tmp_path, 7)
    verified(after)
    assert checkpoint_directory.latest(tmp_path) == after


def _truncate(path: Path) -> None:
    file = _file(path, 1)
    file.write_bytes(file.read_bytes()[:-1])


def _remove(path: Path) -> None:
    _file(path, 2).unlink()


def _no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def _torn_manifest(path: Path) -> None:
    file = path / "manifest.json"
    file.write_bytes(file.read_bytes()[:50])


def _change(path: Path, **changes: Any) -> None:
    manifest = checkpoint_directory.read_manifest(path)
    (path / "manifest.json").write_text(codec.dumps(dataclasses.replace(manifest, **changes)))


def _foreign(path: Path) -> None:
    _change(path, format="somebody-else")


def _escaping(path: Path) -> None:
    manifest = checkpoint_directory.read_manifest(path)
    part = dataclasses.replace(manifest.parts[0], name="../elsewhere")
    _change(path, parts=(part, *manifest.parts[1:]))


def _short(path: Path) -> None:
    _change(path, n_layers=9)


@pytest.mark.parametrize(
    "damage", [_truncate, _remove, _no_manifest, _torn_manifest, _foreign, _escaping, _short]
)
def test_damaged_directories_are_refused_and_passed_over(tmp_path: Path, damage: object) -> None:
    older, newer = whole(tmp_path, 4), whole(tmp_path, 8)
    damage(newer)  # type: ignore[operator]
    with pytest.raises(FieldError) as caught:
        verified(newer)
    assert str(newer) in str(caught.value)
    assert checkpoint_directory.latest(tmp_path) == older


def test_a_flipped_byte_is_found_when_read(tmp_path: Path) -> None:
    path = whole(tmp_path, 4)
    file = _file(path, 1)
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    manifest = checkpoint_directory.read_manifest(path)
    for read in (
        lambda: verified(path),
        lambda: checkpoint_directory.read_run(path, manifest, 1, 0),
    ):
        with pytest.raises(FieldError, match=r"layer-0001.*corrupt"):
            read()
    checkpoint_directory.read_run(path, manifest, 0, 0)
    with pytest.raises(FieldError, match="layers 0 to 2"):
        checkpoint_directory.read_run(path, manifest, 7, 0)


def test_a_checkpoint_describes_its_model_and_older_ones_load(tmp_path: Path) -> None:
    write_all(tmp_path, 4)
    layer = LayerSpec(1, 1, 1, 1.0, 1.0)
    spec = JobSpec((layer,) * N_LAYERS, 1, 9, contents=("a", "b", "c"), optimizer="AdamW (x)")
    path = checkpoint_directory.commit(tmp_path, 4, spec)
    saved = checkpoint_format.saved_model(path, verified(path))
    assert (saved.n_layers, saved.contents, saved.optimizer) == (3, ("a", "b", "c"), "AdamW (x)")
    old = json.loads((path / "manifest.json").read_text())
    del old["contents"], old["optimizer"]
    del old["run"]
    for part in old["parts"]:
        del part["epoch"], part["run"]
    (path / "manifest.json").write_text(json.dumps(old))
    saved = checkpoint_format.saved_model(path, verified(path))
    assert (saved.n_layers, saved.contents, saved.optimizer) == (3, (), "")


def test_newer_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        whole(tmp_path, step)
    for step in (2, 6, 8):
        _truncate(tmp_path / f"step-{step:08d}")
    found, problems = checkpoint_directory.complete(tmp_path)
    assert [manifest.step for _, manifest in found] == [4]
    assert [Path(str(one.value)).name for one in problems] == ["step-00000008", "step-00000006"]


def test_files_of_the_newest_epoch_make_the_checkpoint(tmp_path: Path) -> None:
    """The states of epoch 1 were undone; a late node has written one of them whole."""
    for layer in range(N_LAYERS):
        run = memoryview(layer_run(layer, 9))
        checkpoint_directory.write_part(tmp_path, 9, layer, 0, N_LAYERS, 1, run, 1)
        for part in portions_of(layer, 9, 2):
            run = memoryview(part)
            checkpoint_directory.write_part(tmp_path, 9, layer, 0, N_LAYERS, 1, run, 2)
    path = checkpoint_directory.commit(tmp_path, 9)
    assert {part.epoch for part in verified(path).parts} == {2}
    assert not list(path.glob("*epoch-1*")), "other files are removed"


def test_latest_takes_a_checkpoint_itself(tmp_path: Path) -> None:
    path = whole(tmp_path, 4)
    assert checkpoint_directory.latest(path) == path == checkpoint_directory.latest(str(path))
    _truncate(path)
    with pytest.raises(FieldError):
        checkpoint_directory.latest(path)
    assert checkpoint_directory.latest(tmp_path / "absent") is None


def test_wrong_versions_and_unwritable_places(tmp_path: Path) -> None:
    run = memoryview(layer_run(0, 5))
    with pytest.raises(FieldError, match="has version 5"):
        checkpoint_directory.write_part(tmp_path, 6, 0, 0, 1, 1, run)
    with pytest.raises(VaultError):
        checkpoint_directory.write_part(tmp_path, 5, 0, 0, 1, 1, memoryview(bytes(100)))
    (tmp_path / "file").touch()
    with pytest.raises(FieldError, match="cannot be written"):
        checkpoint_directory.write_part(tmp_path / "file", 5, 0, 0, 1, 1, run)


@pytest.mark.parametrize(
    "data", [b"", b"\x00" * 8, b"\x08" + bytes(7) + b"{}      "[:4], bytes(7) + b"\x01x"]
)
def test_torn_tensor_files(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(FieldError):
        safetensors_stream.read(tmp_path / "f")


def test_tensors_outside_of_their_file(tmp_path: Path) -> None:
    for entry in (
        '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}',
        '{"dtype":"F33","shape":[1],"data_offsets":[0,4]}',
        '{"dtype":"U8","shape":[3],"data_offsets":[0,4]}',
        "[]",
    ):
        text = f'{{"x":{entry}}}'.encode()
        (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        with pytest.raises(FieldError, match="whole safetensors file"):
            safetensors_stream.read(tmp_path / "f")


def test_uncommitted_steps_are_listed(tmp_path: Path) -> None:
    whole(tmp_path, 3)
    write_all(tmp_path, 12)
    write_all(tmp_path, 6)
    (tmp_path / "step-x.tmp").mkdir()
    assert checkpoint_directory.staged_steps(tmp_path) == (6, 12)
    assert checkpoint_directory.staged_steps(tmp_path / "absent") == ()


def test_files_of_an_undone_epoch_do_not_count(tmp_path: Path) -> None:
    """Training computes their states again, with other last bits."""
    write_all(tmp_path, 5)
    with pytest.raises(FieldError, match="files of one job are needed, not of 0"):
        checkpoint_directory.commit(tmp_path, 5, counts=lambda epoch: epoch > 0)
    assert checkpoint_directory.commit(tmp_path, 5, counts=lambda epoch: epoch == 0).is_dir()
