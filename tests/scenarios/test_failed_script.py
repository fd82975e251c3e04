"""A script that fails, under `elastic coordinator` and `elastic agent`: a job runner learns that all is over."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic.errors import EXIT_JOB_FAILED
from elastic.launcher.rundir import free_port
from tests.notices.test_notice_jobs import DEADLINE_S, running

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
Trainer(stack=ListStack([lambda: Layer(4, 4)], seed=0), optimizer=adam, data=data, steps=4, microbatches=2).run()
"""


@pytest.mark.parametrize("source", [PLAIN, TRAINS], ids=["plain", "trains"])
def test_no_service_of_a_failed_job_looks_as_if_it_had_crashed(tmp_path: Path, source: str) -> None:
    script, address = tmp_path / "script.py", f"127.0.0.1:{free_port()}"
    script.write_text(source)
    common = ["--nnodes", "2", "--notice", "none"]
    with ExitStack() as stack:
        services = []
        for name, flags in (
            ("main", ["coordinator", "--address", address]),
            ("a", ["agent", "--coordinator", address, "--node", "a"]),
            ("b", ["agent", "--coordinator", address, "--node", "b"]),
        ):
            place = tmp_path / name
            words = [*flags, *common, "--run-dir", str(place), str(script)]
            services.append(stack.enter_context(running(place, words, {})))
        assert [service.process.wait(DEADLINE_S) for service in services] == [EXIT_JOB_FAILED] * 3
