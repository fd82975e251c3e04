"""Micro-batches that other processes read in advance."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from elastic import Microbatch, from_stream, prefetch
from elastic.domain.errors import FieldError
from elastic.worker.datasets.data_source import DataSource
from elastic.worker.datasets.prefetch import Prefetch
from tests.patience import LONG_S


def data(step: int, index: int) -> Microbatch:
    """A micro-batch that tells who read it."""
    return Microbatch(step, index, {"x": torch.tensor([step, index, os.getpid()])})


def reading(function: Any, **given: int) -> Prefetch:
    """Return `prefetch(function)` whose processes may give different micro-batches."""
    source = prefetch(function, **given)
    source._compared = True
    return source


def test_micro_batches_of_the_last_step_are_expected_in_its_order() -> None:
    source = reading(data, processes=1, ahead=3)
    for index in (4, 1, 7):
        source(0, index)
    source(1, 4)
    assert source.expected(1, 4) == [(1, 1), (1, 7), (2, 4)]
    assert source.expected(1, 7) == [(2, 4), (2, 1), (2, 7)]
    assert source.expected(1, 9) == [(1, 10), (1, 11), (1, 12)]


def test_they_are_read_by_other_processes() -> None:
    source = reading(data, processes=2, ahead=2)
    keys = [(step, index) for step in range(3) for index in range(3)]
    read = {key: source(*key).fields["x"].tolist() for key in keys}
    assert [(step, index) for step, index, _ in read.values()] == keys
    here = {key for key, (_, _, pid) in read.items() if pid == os.getpid()}
    assert here == {(0, 0), (1, 0)}  # how long a step is shows at the end of the first


def test_little_is_kept() -> None:
    source = reading(data, processes=2, ahead=2)
    for step in range(10):
        for index in range(4):
            source(step, index)
            assert len(source._asked) + len(source._results) <= 2 + 1


def test_descriptors_do_not_grow() -> None:
    source = reading(data, processes=1, ahead=8)
    before = len(os.listdir("/proc/self/fd"))
    for index in range(100):
        source(0, index)
    assert len(os.listdir("/proc/self/fd")) <= before


def broken(step: int, index: int) -> Microbatch:
    if index == 1:
        raise FieldError("sample", "broken", "mend it")
    return data(step, index)


def test_an_error_is_raised_where_the_micro_batch_is_asked_for() -> None:
    source = reading(broken, processes=1)
    source(0, 0)
    with pytest.raises(FieldError, match="mend it"):
        source(0, 1)
    _, _, pid = source(0, 2).fields["x"].tolist()
    assert pid != os.getpid()


def test_lost_processes_cost_only_speed(caplog: pytest.LogCaptureFixture) -> None:
    here = os.getpid()

    def dying(step: int, index: int) -> Microbatch:
        if os.getpid() != here and index in (2, 4):
            os.kill(os.getpid(), signal.SIGKILL)
        return data(step, index)

    source = reading(dying, processes=2, ahead=8)
    read = [source(step, index).fields["x"].tolist()[:2] for step in (0, 1) for index in range(6)]
    assert read == [[step, index] for step in (0, 1) for index in range(6)]
    assert "exit code -9); 1 are left" in caplog.text and "; 0 are left" in caplog.text


def test_a_process_that_hangs_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elastic.worker.datasets.prefetch.ANSWER_S", 0.1)
    here = os.getpid()

    def hanging(step: int, index: int) -> Microbatch:
        if os.getpid() != here and index == 1:
            signal.pause()
        return data(step, index)

    source = reading(hanging, processes=1)
    assert [source(0, index).fields["x"][1].item() for index in range(3)] == [0, 1, 2]
    assert "not read in advance within 0.1 s" in caplog.text


def test_a_function_with_hidden_state_is_still_refused() -> None:
    calls = iter(range(100))
    source = prefetch(lambda step, index: Microbatch(step, index, {"x": torch.tensor(next(calls))}))
    with pytest.raises(FieldError, match="another micro-batch at the second call"):
        DataSource(source)(0, 0)


def test_data_that_differs_between_processes_is_refused() -> None:
    with pytest.raises(FieldError, match="another micro-batch in another process"):
        prefetch(data)(0, 0)


def test_readers_end_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "reads.py"
    script.write_text(
        "import os, signal, torch\n"
        "from elastic import Microbatch, prefetch\n"
        "source = prefetch(lambda s, i: Microbatch(s, i, {'x': torch.zeros(1)}), processes=2)\n"
        "source(0, 0)\n"
        "print(*(r.process.pid for r in source._readers), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    end = time.monotonic() + LONG_S
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("source", "given", "text"),
    [
        (data, {"processes": 0}, "processes"),
        (data, {"ahead": 0}, "ahead"),
        (from_stream(lambda: [1], rows=1, microbatches=1), {}, "without prefetch"),
        (prefetch(data, processes=1), {}, "read in advance already"),
        (7, {}, "data"),
    ],
)
def test_wrong_use_is_refused(source: Any, given: dict[str, int], text: str) -> None:
    with pytest.raises(FieldError, match=text):
        prefetch(source, **given)
