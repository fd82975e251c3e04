"""Checkpoints in a directory and in an object store keep the same promises."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.domain.errors import CorruptCheckpoint, FieldError, MissingCheckpoint
from elastic.domain.types import JobSpec, LayerSpec
from elastic.store import checkpoint_directory
from elastic.store.checkpoint_format import step_name
from elastic.store.checkpoint_objects import ObjectCheckpoints
from elastic.store.checkpoints import (
    Checkpoints,
    SavedCheckpoint,
    latest,
    open_checkpoints,
    probe,
)
from tests.agent.vault.checkpoints import N_LAYERS, layer_run
from tests.store.objects import BUCKET, s3_server, server_away

SPEC = JobSpec(
    (LayerSpec(1, 1, 1, 1.0, 1.0),) * N_LAYERS, 1, 9, contents=("a",) * N_LAYERS, optimizer="o"
)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as (url, _):
        yield url


@pytest.fixture(params=["directory", "s3", "file"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty location of checkpoints."""
    if request.param == "s3":
        return f"{request.getfixturevalue('server')}/{uuid.uuid4().hex}"
    return str(tmp_path) if request.param == "directory" else f"file://{tmp_path}"


@pytest.fixture
def kept(location: str) -> Checkpoints:
    return open_checkpoints(location)


def write(
    kept: Checkpoints,
    step: int,
    epoch: int = 1,
    run: str = "run",
    layers: range = range(N_LAYERS),
    other: bool = False,
) -> None:
    """`other`: with other values, as another run, or a replica with other last bits, has them."""
    for layer in layers:
        state = memoryview(layer_run(layer + 50 * other, step))
        kept.write_part(step, layer, 0, N_LAYERS, 1, state, epoch, run)


def whole(kept: Checkpoints, step: int, run: str = "run") -> str:
    write(kept, step, run=run)
    return kept.commit(step, SPEC, run=run)


def content(path: str, layer: int) -> bytes:
    return bytes(SavedCheckpoint(path).state(layer, 0))


def steps(kept: Checkpoints) -> list[int]:
    return [manifest.step for _, manifest in kept.complete()[0]]


def newest(kept: Checkpoints) -> list[tuple[str, int]]:
    return [(path, manifest.step) for path, manifest in kept.complete(newest=True)[0]]


def test_every_state_comes_back_bit_for_bit(location: str, kept: Checkpoints) -> None:
    path = whole(kept, 12)
    assert path == f"{location}/step-00000012" == latest(location) == latest(path)
    for layer in range(N_LAYERS):
        assert content(path, layer) == layer_run(layer, 12)
    manifest = SavedCheckpoint(path).manifest
    assert (manifest.step, manifest.run, manifest.contents) == (12, "run", SPEC.contents)
    with pytest.raises(FieldError, match="layers 0 to 2"):
        SavedCheckpoint(path).state(N_LAYERS, 0)


def test_nothing_is_a_checkpoint_before_the_commit(location: str, kept: Checkpoints) -> None:
    assert kept.complete() == ([], []) and kept.staged_steps() == ()
    write(kept, 5)
    write(kept, 7, layers=range(1))
    assert latest(location) is None and kept.staged_steps() == (5, 7)
    assert not kept.is_committed(5, "run")
    with pytest.raises(MissingCheckpoint):
        SavedCheckpoint(f"{location}/{step_name(5)}")
    path = kept.commit(5, SPEC, run="run")
    assert kept.commit(5, SPEC, run="run") == path, "a repeated order changes nothing"
    assert kept.is_committed(5, "run") and not kept.is_committed(5, "other")
    assert kept.staged_steps() == (7,)
    with pytest.raises(FieldError, match=r"\(1, 0\), \(2, 0\).* are missing"):
        kept.commit(7, SPEC, run="run")
    with pytest.raises(FieldError, match="before the commit"):
        kept.commit(8, SPEC, run="run")
    assert steps(kept) == [5]


def test_states_of_the_newest_epoch_that_counts_are_taken(kept: Checkpoints) -> None:
    write(kept, 6, epoch=1)
    write(kept, 6, epoch=2, other=True)
    path = kept.commit(6, SPEC, lambda epoch: epoch < 2, "run")
    assert content(path, 1) == layer_run(1, 6)
    write(kept, 8, epoch=1)
    write(kept, 8, epoch=2, other=True)
    assert content(kept.commit(8, SPEC, run="run"), 1) == layer_run(51, 8)


def test_a_late_file_of_a_former_run_is_no_part(kept: Checkpoints) -> None:
    write(kept, 6, run="new")
    write(kept, 6, epoch=5, run="old", layers=range(1, 2), other=True)
    path = kept.commit(6, SPEC, run="new")
    assert content(path, 1) == layer_run(1, 6)


def test_a_step_saved_again_replaces_the_old_one(kept: Checkpoints) -> None:
    whole(kept, 5, run="old")
    write(kept, 5, run="new", other=True)
    path = kept.commit(5, SPEC, run="new")
    assert content(path, 0) == layer_run(50, 5)
    assert kept.is_committed(5, "new") and not kept.is_committed(5, "old")


def test_a_file_written_after_the_commit_does_not_hide_the_checkpoint(kept: Checkpoints) -> None:
    path = whole(kept, 5)
    write(kept, 5, epoch=3, layers=range(1))
    assert kept.commit(5, SPEC, run="run") == path and steps(kept) == [5]
    other = dataclasses.replace(SPEC, contents=("b",) * N_LAYERS)
    write(kept, 6, layers=range(1))
    with pytest.raises(FieldError, match="are missing"):
        kept.commit(6, other, run="run")


@pytest.mark.parametrize("writers", [("old",), ("old", "new")])
def test_files_of_former_runs_are_discarded_until_the_new_run_writes(
    kept: Checkpoints, writers: tuple[str, ...]
) -> None:
    path = whole(kept, 3, run="old")
    for run in writers:
        write(kept, 6, run=run)
    kept.discard_incomplete("new")
    assert kept.staged_steps() == ((6,) if "new" in writers else ())
    assert latest(path) == path and content(path, 1) == layer_run(1, 3)


def test_files_of_undone_epochs_are_removed(kept: Checkpoints) -> None:
    """Those of a committed checkpoint only if it is to be written again."""
    write(kept, 5, epoch=1)
    kept.discard_step(5, before=2, run="run")
    assert kept.staged_steps() == ()
    write(kept, 5, epoch=1, layers=range(1))
    write(kept, 5, epoch=2, layers=range(1, N_LAYERS))
    path = kept.commit(5, SPEC, run="run")
    kept.discard_step(5, before=2, run="run")
    assert latest(path) == path and content(path, 0) == layer_run(0, 5)
    kept.discard_step(5, before=2, run="other", committed=True)
    assert steps(kept) == [5]
    kept.discard_step(5, before=2, run="run", committed=True)
    assert steps(kept) == [] and kept.staged_steps() == (5,)
    write(kept, 5, epoch=3, layers=range(1), other=True)
    path = kept.commit(5, SPEC, run="run")
    assert content(path, 0) == layer_run(50, 5) and content(path, 1) == layer_run(1, 5)
    write(kept, 9)
    kept.discard_step(9)
    assert kept.staged_steps() == ()


def test_a_removed_checkpoint_leaves_nothing(kept: Checkpoints) -> None:
    for step in (2, 4):
        whole(kept, step)
    assert [step for _, step in newest(kept)] == [4]
    kept.remove(4, "another")
    kept.remove(2, "run")
    kept.remove(3, "run")
    assert steps(kept) == [4] and kept.staged_steps() == ()
    kept.finish_commits()


def test_a_removal_that_failed_is_finished_by_the_next(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ObjectCheckpoints(f"{server}/{uuid.uuid4().hex}")
    for step in (2, 4, 6, 8):
        whole(kept, step)
    real = kept._remove

    def failing(name: str, files: set[str]) -> None:
        if "manifest.json" not in files and name == step_name(2):
            raise OSError("the store is away")
        real(name, files)

    monkeypatch.setattr(kept, "_remove", failing)
    for step, left in ((2, [8, 6, 4]), (4, [8, 6])):
        with pytest.raises(OSError, match="away"):
            kept.remove(step, "run")
        assert steps(kept) == left and kept.staged_steps() == (2,)
    monkeypatch.undo()
    kept.remove(6, "run")
    assert steps(kept) == [8] and kept.staged_steps() == ()
    assert [step for _, step in newest(kept)] == [8]


def test_a_removal_spares_what_another_run_writes(kept: Checkpoints) -> None:
    whole(kept, 2)
    write(kept, 2, run="other", layers=range(2))
    kept.remove(2, "run")
    write(kept, 2, run="other", layers=range(2, N_LAYERS))
    assert content(kept.commit(2, SPEC, run="other"), 0) == layer_run(0, 2)


def test_a_commit_of_files_that_were_removed_meanwhile_fails(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator was paused inside a commit, while the next one removed them."""
    kept = ObjectCheckpoints(f"{server}/{uuid.uuid4().hex}")
    write(kept, 2)
    real = kept._write

    def late(name: str, pieces: list[bytes]) -> None:
        open_checkpoints(kept.url).discard_step(2, before=9, run="run")
        real(name, pieces)

    monkeypatch.setattr(kept, "_write", late)
    with pytest.raises(FieldError, match="bytes are expected"):
        kept.commit(2, SPEC, run="run")
    monkeypatch.undo()
    assert not kept.is_committed(2, "run") and steps(kept) == []


def test_an_upload_that_breaks_leaves_no_object(server: str) -> None:
    kept = ObjectCheckpoints(f"{server}/{uuid.uuid4().hex}")
    pieces = [b"whole", object()]
    with pytest.raises(OSError):
        kept._write("x", pieces)  # type: ignore[arg-type]
    assert kept._sizes("") == {}


def spoil(location: str, step: int, change: Callable[[bytes], bytes | None]) -> None:
    """Change a file of layer 1; None removes it."""
    files = open_checkpoints(location)
    manifest = SavedCheckpoint(f"{location}/{step_name(step)}").manifest
    (part,) = manifest.of(1, 0)
    if isinstance(files, ObjectCheckpoints):
        data = change(files._read(f"{step_name(step)}/{part.name}"))
        if data is None:
            files._remove(step_name(step), {part.name})
        else:
            files._write(f"{step_name(step)}/{part.name}", [data])
        return
    path = Path(location) / step_name(step) / part.name
    data = change(path.read_bytes())
    path.unlink()
    if data is not None:
        path.write_bytes(data)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: None])
def test_damaged_checkpoints_are_passed_over(
    location: str, kept: Checkpoints, change: Callable[[bytes], bytes | None]
) -> None:
    older, newer = whole(kept, 4), whole(kept, 8)
    spoil(location, 8, change)
    with pytest.raises(CorruptCheckpoint) as caught:
        SavedCheckpoint(newer)
    assert newer in str(caught.value)
    found, problems = kept.complete()
    assert [path for path, _ in found] == [older] == [latest(location)]
    assert [problem.value for problem in problems] == [newer]


def test_a_flipped_byte_is_found_when_read(location: str, kept: Checkpoints) -> None:
    path = whole(kept, 4)
    spoil(location, 4, lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    with pytest.raises(CorruptCheckpoint, match=r"layer-0001.*corrupt"):
        content(path, 1)
    assert content(path, 0) == layer_run(0, 4)


def test_a_store_that_is_away_is_asked_again(server: str) -> None:
    """Its errors may pass, as those of a disk."""
    url, waits = f"{server}/{uuid.uuid4().hex}", list[float]()
    with server_away():
        away = ObjectCheckpoints(url)
        with pytest.raises(OSError):
            away.probe()
        assert not away.is_committed(5)
    there, state = ObjectCheckpoints(url), memoryview(layer_run(0, 5))

    def action() -> None:
        (there if waits else away).write_part(5, 0, 0, N_LAYERS, 1, state)

    with pytest.raises(FieldError, match="cannot be written") as caught:
        action()
    assert isinstance(caught.value.__cause__, OSError)
    checkpoint_directory.retry(action, waits.append)
    assert len(waits) == 1 and there.staged_steps() == (5,)


def test_places_that_cannot_be_used_are_named(server: str, tmp_path: Path) -> None:
    for url, text in (
        ("s4://bucket/x", "s4; give a path, or the URL of an object store"),
        ("gs://bucket/x", "gcsfs"),
        ("s3://", "give a bucket"),
        ("memory://x", "give another store"),
    ):
        with pytest.raises(FieldError, match=text):
            open_checkpoints(url)
    with pytest.raises(OSError, match="bucket"):
        probe("s3://nobody-has-this/x")
    probe(f"s3://{BUCKET}/new")
    assert open_checkpoints(f"s3://{BUCKET}/new").staged_steps() == ()
