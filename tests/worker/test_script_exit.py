"""The end of a script that never trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from elastic.domain import codec
from elastic.domain.errors import FieldError
from elastic.worker.script_exit import without_own_calls


@pytest.mark.parametrize(
    ("statement", "warnings"),
    [("os.fork() and os.wait()", 1), ("raise ValueError", 0)],
)
def test_the_script_alone_warns_that_it_has_not_trained(statement: str, warnings: int) -> None:
    """Its forks do not train; an error that ends the script says more than the warning."""
    code = f"import os; from elastic import Trainer; {statement}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ELASTIC_AGENT": "socket", "RANK": "0"},
        capture_output=True,
        check=False,
    )
    assert done.stdout.count(b"ended without training") == warnings


@pytest.mark.parametrize("imports", ["OptimizerSpec", "OptimizerSpec, Trainer"])
def test_a_wrong_argument_is_one_line_with_its_place(imports: str, tmp_path: Path) -> None:
    """The line is that of the script, and not of the method that makes the object."""
    script = tmp_path / "mine.py"
    script.write_text(f"from elastic import {imports}\n\nOptimizerSpec(factory=print, lr=0.003)\n")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("elastic: mine.py:3: OptimizerSpec.lr: 0.003 is not usable")
    assert done.stderr.count("\n") == 1


FAILS = """
from elastic import Microbatch, OptimizerSpec, ListStack, Trainer
import torch

class Layer(torch.nn.Linear):
    def forward(self, hidden, microbatch):
        return super().forward(microbatch.fields["x"]).mean()

def data(step, index):
    raise FileNotFoundError("no shard")

adam = OptimizerSpec(factory=torch.optim.Adam, lr=lambda step: 0.01)
stack = ListStack([lambda: Layer(4, 4)], seed=0)
Trainer(stack=stack, optimizer=adam, data=data, steps=1, microbatches=1).run()
"""


def test_the_traceback_of_the_users_function_has_only_the_users_frames(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(FAILS)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    files = re.findall(r'  File "(.*?)"', done.stderr)
    assert done.returncode == 1 and files == [str(script)] * 2, done.stderr
    assert done.stderr.endswith("FileNotFoundError: no shard\n")


def test_the_traceback_of_an_error_of_this_package_is_whole() -> None:
    def fails() -> None:
        codec.loads(int, "{")

    with pytest.raises(FieldError) as caught:
        fails()
    trace = caught.value.__traceback__
    shown = traceback.extract_tb(without_own_calls(trace))
    assert list(map(str, shown)) == list(map(str, traceback.extract_tb(trace)))
