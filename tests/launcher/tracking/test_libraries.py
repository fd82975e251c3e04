"""What the libraries read back is what the run has recorded."""

from __future__ import annotations

import json
import resource
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.domain.errors import FieldError
from elastic.launcher.tracking.callback import Callback, RunInfo, StepMetrics
from elastic.launcher.tracking.follower import Tracker
from elastic.launcher.tracking.record import Record
from elastic.launcher.tracking.targets import Target, make_callback
from tests.launcher.tracking.records import END, JOB, config, plan, recovery, step, write

BLOCK_BYTES = 32 << 10
WHOLE, LAST = 1, 4
LOSSES = [5.0, 4.0, 3.0]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with a recovery, of which a tracker reads the first part, then the whole."""
    made = tmp_path / "run"
    made.mkdir()
    write(made, JOB, plan(0), step(0, loss=5.0, at=12.0), step(1, loss=4.0, at=13.0))
    return made


def track(run_dir: Path, target: Target) -> None:
    for more in ((), (recovery(2), plan(1, epoch=2), step(1, epoch=2), step(2, loss=3.0), END)):
        write(run_dir, *more)
        made = make_callback(target, "--to")
        tracker = Tracker(config(str(run_dir)), run_dir, target, made, print, once=True)
        assert tracker.run() == 0


def test_tensorboard(run_dir: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track(run_dir, Target("tensorboard", str(tmp_path / "board")))
    found = EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == list(enumerate(LOSSES))
    assert found.Scalars("loss")[0].wall_time == 12.0
    assert {"grad_norm", "lr", "step_s", "tokens_per_s", "goodput"} <= set(found.Tags()["scalars"])
    assert [(e.step, e.value) for e in found.Scalars("recovery/total_s")] == [(2, 0.5)]
    (text,) = found.Tensors("recovery/text_summary")
    assert text.tensor_proto.string_val == [b"node1 lost"]


def scalars(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return [event.step for event in found.Scalars("loss")]


def begun(folder: Path) -> Callback:
    made = make_callback(Target("tensorboard", str(folder)), "--to")
    (begin,) = Record(config()).observe(JOB)
    assert isinstance(begin.argument, RunInfo)
    made.on_start(begin.argument, "")
    return made


def tell(callback: Callback, numbers: range) -> None:
    record = Record(config())
    for number in numbers:
        call = record.observe(step(number))[-1]
        assert isinstance(call.argument, StepMetrics)
        callback.on_step(call.argument)


def test_what_tensorboard_has_flushed_is_in_the_file(tmp_path: Path) -> None:
    made = begun(tmp_path)
    tell(made, range(300))
    made.flush()
    assert scalars(tmp_path) == list(range(300))  # it was not closed


def test_tensorboard_writes_later_what_a_full_disk_refuses(tmp_path: Path) -> None:
    made = begun(tmp_path)
    tell(made, range(10))
    made.flush()
    tell(made, range(10, 300))
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, room[1]))
        with pytest.raises(OSError, match="File too large"):
            made.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
        signal.signal(signal.SIGXFSZ, former)
    made.flush()
    assert sorted(set(scalars(tmp_path))) == list(range(300))


def test_a_repeated_start_makes_one_run_of_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.exceptions import MlflowException

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    made: Any = make_callback(Target("mlflow", "mine"), "--to")
    answers: list[Exception | None] = [MlflowException("away"), None]
    runs: list[str] = []

    class Client:
        def get_experiment_by_name(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(experiment_id="1")

        def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
            runs.append(run_name)
            return SimpleNamespace(info=SimpleNamespace(run_id=f"run{len(runs)}"))

        def log_batch(self, run: str, params: object) -> None:
            if error := answers.pop(0):
                raise error

    monkeypatch.setattr(made, "_client", Client())
    (begin,) = Record(config()).observe(JOB)
    with pytest.raises(OSError, match="away"):
        made.on_start(begin.argument, "")
    assert made.on_start(begin.argument, "") == "run1" and runs == ["mine"]


def test_an_address_that_mlflow_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "foo://x")
    with pytest.raises(FieldError, match=r"MLFLOW_TRACKING_URI: 'foo://x' .*address of a server"):
        make_callback(Target("mlflow", "mine"), "--to")


def stored(data: bytes) -> Iterator[bytes]:
    """Yield the records of an offline run: after 7 bytes, LevelDB's log format (blocks of 32 KiB;
    a part of a record is a checksum, a length, a type and the bytes)."""
    at, rest = 7, b""
    while at + 7 <= len(data):
        if (left := BLOCK_BYTES - at % BLOCK_BYTES) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        rest += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (WHOLE, LAST):
            yield rest
            rest = b""


def test_weights_and_biases(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    track(run_dir, Target("wandb", "mine"))
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # the files belong to the library's process until it has ended

    formats: Any = wandb_internal_pb2
    rows, ids = [], set()
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    for path in files:
        for data in stored(path.read_bytes()):
            record = formats.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                names = {
                    item.key or "/".join(item.nested_key): item for item in record.history.item
                }
                rows.append({name: json.loads(item.value_json) for name, item in names.items()})
    found = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert found == list(enumerate(LOSSES)), (rows, [(f.name, f.stat().st_size) for f in files])
    assert [row["step"] for row in rows if "recovery/total_s" in row] == [2]
    assert len(files) == 2 and len(ids) == 1, "the second start goes on with the same run"


def test_mlflow(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    track(run_dir, Target("mlflow", "mine"))
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == list(enumerate(LOSSES))
    assert run.info.status == "FINISHED" and run.data.tags["reason"] == "all 8 steps done"
    assert run.data.params["script"] == "-m train --lr 0.1"
    assert run.data.metrics["recovery/total_s"] == 0.5
