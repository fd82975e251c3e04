"""A script that uses the Python interface wrongly: one line names the mistake, without a traceback.

`tests/worker` has every wrong object. Here real jobs show what the user sees, and how they end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.domain.errors import EXIT_FAILURE, EXIT_OK, EXIT_USAGE
from tests.scenarios.harness import DEADLINE_S, ROOT

SCRIPT = """
import sys, torch
from torch import nn
from elastic import ListStack, Microbatch, OptimizerSpec, Trainer

class Layer(nn.Linear):
    def forward(self, hidden, microbatch):
        x = microbatch.fields["x"] if hidden is None else hidden
        return super().forward(x).relu()

class Counting(Layer):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, hidden, microbatch):
        self.seen += 1
        return super().forward(hidden, microbatch)

class Loss(Layer):
    def forward(self, hidden, microbatch):
        return super().forward(hidden, microbatch).mean()

class Vector(Layer):
    def forward(self, hidden, microbatch):
        return super().forward(hidden, microbatch).mean(1)

def data(step, index):
    return Microbatch(step, index, {"x": torch.full((2, 4), 1.0 + index)})

def trainer(middle=lambda: Layer(4, 4), last=lambda: Loss(4, 4), **changed):
    stack = ListStack([lambda: Layer(4, 4), middle, last], seed=0)
    adam = OptimizerSpec(factory=torch.optim.Adam, lr=lambda step: 1e-2)
    given = dict(stack=stack, optimizer=adam, data=data, steps=2, microbatches=2)
    return Trainer(**{**given, **changed})

def twice():
    job = trainer()
    job.run()
    job.run()

def after():
    trainer().run()
    raise ValueError("cannot upload the result")

exec(sys.argv[1])
"""


def run(directory: Path, statement: str, *launcher: str) -> tuple[int, list[str]]:
    """Run the script with this last statement; return exit code and lines of output."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *launcher, str(script), statement],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.returncode, done.stdout.decode(errors="replace").splitlines()


def run_job(directory: Path, statement: str, nodes: int = 2) -> tuple[int, list[str]]:
    launcher = ("-m", "elastic", "run", "--standalone", "--nnodes", str(nodes), "--run-dir", "run")
    return run(directory, statement, *launcher)


def place(code: str) -> str:
    """Return the place of the line of SCRIPT that contains `code`, as errors name it."""
    lines = SCRIPT.splitlines()
    return f"script.py:{1 + next(i for i, line in enumerate(lines) if code in line)}: "


MISTAKES = {
    "trainer(stack=Loss(4, 4)).run()": (
        place("return Trainer(") + "stack: an object of type Loss is not usable: a LayerStack"
    ),
    "trainer(middle=Layer(4, 4))": (
        place("ListStack([") + "builders[1]: an object of type Layer is not usable: each entry"
    ),
    "OptimizerSpec(factory=torch.optim.SGD, lr=3e-3)": (
        "OptimizerSpec.lr: 0.003 is not usable: a function of the step"
    ),
    "trainer(data=lambda step, index: {}).run()": (
        "an object of type dict is not usable: data must return Microbatch(step, index"
    ),
    "trainer(last=lambda: Vector(4, 4)).run()": (
        "layer 2 (Vector): a tensor of shape (2,) and type float32 is not usable: forward of the"
    ),
    "trainer(middle=Counting).run()": (
        "layer 1 (Counting), buffer seen: a value that training changes is not usable"
    ),
}


SMALL = {"trainer(last=lambda: Vector(4, 4)).run()"}
"""A mistake that is found in the first step. `make chaos` has all."""


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param(statement, marks=[] if statement in SMALL else [pytest.mark.chaos])
        for statement in MISTAKES
    ],
)
def test_a_mistake_ends_the_job_with_one_line(tmp_path: Path, statement: str) -> None:
    code, lines = run_job(tmp_path, statement)
    text = "\n".join(lines)
    assert code == EXIT_USAGE, text
    assert "Traceback" not in text and text.count(MISTAKES[statement]) == 1
    assert MISTAKES[statement] in lines[-1] and "elastic/worker" not in text


def test_without_the_launcher_the_script_prints_the_line(tmp_path: Path) -> None:
    statement = "trainer(steps=0).run()"
    (code, (line,)) = run(tmp_path, statement)
    assert code == EXIT_USAGE and line.startswith(f"elastic: {place('return Trainer(')}steps: 0")


@pytest.mark.chaos  # tests/worker/test_script_exit.py has the warning
def test_a_script_that_never_trains_causes_a_warning(tmp_path: Path) -> None:
    code, lines = run_job(tmp_path, "trainer()", nodes=1)
    warnings = [line for line in lines if "ended without training" in line]
    assert code == EXIT_OK and len(warnings) == 1, lines


@pytest.mark.chaos
def test_the_cause_of_an_early_end_is_not_hidden_by_the_warning(tmp_path: Path) -> None:
    code, lines = run_job(tmp_path, "sys.exit('no data set at /data')", nodes=1)
    assert code == EXIT_FAILURE and "no data set at /data" in lines[-1], lines


def test_a_second_run_is_refused(tmp_path: Path) -> None:
    code, lines = run_job(tmp_path, "twice()", nodes=1)
    text = "\n".join(lines)
    assert code == EXIT_FAILURE and "Traceback" not in text, text
    assert "all 2 steps done" in text
    assert "a script trains once: this process has called Trainer.run() before" in lines[-1]


def test_an_error_after_the_training_is_not_lost(tmp_path: Path) -> None:
    code, lines = run_job(tmp_path, "after()")
    text = "\n".join(lines)
    assert code == EXIT_FAILURE and "all 2 steps done" in text, text
    assert "node1: the script failed after the training: worker 0: exit code 1: " in lines[-1]
    assert "ValueError: cannot upload the result" in lines[-1]
    end = json.loads((tmp_path / "run" / "launcher-exit.json").read_text())
    assert end["code"] == code and "ValueError: cannot upload the result" in end["reason"]
