"""NCCL between processes that share one GPU: a rank is killed, stopped or absent."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from tests.worker.transport.nccl_rank import VICTIM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ENDS_S = 60.0


@pytest.mark.parametrize("fault", ["none", "kill", "stop", "absent"])
@pytest.mark.parametrize("size", [3, 4])
def test_survivors_leave_their_communicators(size: int, fault: str) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=ENDS_S), False)
    command = [sys.executable, "-m", "tests.worker.transport.nccl_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(store.port), fault],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank, process in enumerate(ranks):
            if fault != "none" and rank == VICTIM:
                continue
            output, _ = process.communicate(timeout=ENDS_S)
            assert process.returncode == 0, output
            took_s = json.loads(output.splitlines()[-1])
            print(f"{size} ranks, {fault}, rank {rank}: {took_s}")
            assert took_s["abort"] < 10.0, output
    finally:
        for process in ranks:
            process.kill()
            process.wait()
