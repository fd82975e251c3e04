"""What every scenario asserts about checkpoints, on the files of a run and on damaged ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from elastic.domain.errors import ElasticError
from tests.scenarios import checkpoints
from tests.scenarios.harness import ROOT, Run, assert_checkpoints
from tests.scenarios.paced import TRAIN, paced
from tests.scenarios.shared import GPT, SCRIPT, reference

RUN = checkpoints.with_checkpoints(SCRIPT)


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        (SCRIPT, [2, 4, 6]),
        (GPT, [2, 4, 6]),
        ([*SCRIPT, "--checkpoint-every", "4"], [4, 6]),
        ([*SCRIPT, "--checkpoint-every", "0"], []),
        ([str(ROOT / "tests/scenarios/faults/small_job.py"), "--nan", "3", "2"], [3, 6]),
        (TRAIN, [20, 40, 60]),
        (paced(Path("hurry")), [20, 40, 60]),
    ],
)
def test_due_steps_of_the_usual_jobs(script: Sequence[str], steps: list[int]) -> None:
    words = checkpoints.with_checkpoints(script)
    assert checkpoints.due(words) == steps
    assert checkpoints.due(words, 4) == [step for step in steps if step > 4]


def lose(newest: Path) -> None:
    newest.rename(newest.with_suffix(".tmp"))


def flip(newest: Path) -> None:
    file = max(newest.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def replace_by_older(newest: Path) -> None:
    shutil.rmtree(newest)
    shutil.copytree(newest.with_name("step-00000004"), newest)


@pytest.mark.parametrize("damage", [lose, flip, replace_by_older])
def test_a_damaged_checkpoint_is_found(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    run = reference(tmp_path)
    shutil.copytree(run.run_dir, tmp_path / "run")
    copied = Run(0, run.output, tmp_path / "run")
    assert_checkpoints(copied, (), RUN)
    damage(tmp_path / "run/checkpoints/step-00000006")
    with pytest.raises((AssertionError, ElasticError)):
        assert_checkpoints(copied, (), RUN)


def test_a_last_checkpoint_with_other_parameters_is_found(tmp_path: Path) -> None:
    run = reference(tmp_path)
    with pytest.raises(AssertionError, match="other parameters"):
        checkpoints.assert_written(run.run_dir / "checkpoints", [2, 4, 6], "0" * 64)
