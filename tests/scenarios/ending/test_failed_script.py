"""A script that fails on several machines ends all commands with the exit codes of torchrun.

A job runner learns the end from `elastic coordinator` and `elastic agent`, and a user from `elastic
run`.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic.domain.errors import EXIT_FAILURE, EXIT_JOB_FAILED
from elastic.launcher.run.rundir import free_port
from tests.scenarios.membership.test_notices import DEADLINE_S, running

PLAIN = "raise SystemExit(7)"
TRAINS = """
import torch
from torch import nn
from elastic import ListStack, Microbatch, OptimizerSpec, Trainer

class Layer(nn.Linear):
    def forward(self, hidden, microbatch):
        return super().forward(torch.ones(2, 4)).mean()

def data(step, index):
    if step == 1:
        raise ValueError("no such shard")
    return Microbatch(step, index, {})

adam = OptimizerSpec(factory=torch.optim.Adam, lr=lambda step: 1e-2)
stack = ListStack([lambda: Layer(4, 4)], seed=0)
Trainer(stack=stack, optimizer=adam, data=data, steps=4, microbatches=2).run()
"""


def codes(tmp_path: Path, source: str, *commands: list[str]) -> list[int]:
    """Exit codes of these commands, run at the same time with the same script."""
    script = tmp_path / "script.py"
    script.write_text(source)
    with ExitStack() as stack:
        jobs = []
        for number, command in enumerate(commands):
            place = tmp_path / str(number)
            words = [
                *command,
                "--nnodes",
                "2",
                "--notice",
                "none",
                "--run-dir",
                str(place),
                str(script),
            ]
            jobs.append(stack.enter_context(running(place, words, {})))
        return [job.process.wait(DEADLINE_S) for job in jobs]


@pytest.mark.parametrize("source", [PLAIN, TRAINS], ids=["plain", "trains"])
def test_no_service_of_a_failed_job_looks_as_if_it_had_crashed(tmp_path: Path, source: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    agents = (["agent", "--coordinator", address, "--node", name] for name in "ab")
    assert (
        codes(tmp_path, source, ["coordinator", "--address", address], *agents)
        == [EXIT_JOB_FAILED] * 3
    )


def test_elastic_run_ends_on_all_machines_as_torchrun(tmp_path: Path) -> None:
    where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    found = codes(tmp_path, PLAIN, *(["run", "--node-rank", rank, *where] for rank in "01"))
    assert found == [EXIT_FAILURE] * 2
