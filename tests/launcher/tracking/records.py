"""Lines of a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elastic.config import JobConfig, WorkerCommand
from elastic.domain.types import Accumulate

JOB: dict[str, Any] = {
    "at": 10.0, "kind": "job", "steps": 8, "microbatches": 6, "tokens_per_microbatch": 32, "tp": 1,
    "ledgers": 6, "tied": [], "checkpoint_every": 3,
}  # fmt: skip
END: dict[str, Any] = {"at": 30.0, "kind": "end", "code": 0, "reason": "all 8 steps done"}


def config(run_dir: str = "/runs/a") -> JobConfig:
    return JobConfig(
        job_id="mine-1a2b3c",
        run_id="mine",
        run_dir=run_dir,
        memory_dir="/dev/shm/elastic-mine",
        checkpoint_dir="/c",
        command=WorkerCommand(script="train", args=("--lr", "0.1"), module=True),
        accumulate=Accumulate.EXACT,
    )


def step(number: int, *, at: float = 12.0, epoch: int = 1, **fields: Any) -> dict[str, Any]:
    values = {"loss": 5.0, "grad_norm": 0.5, "clip": 1.0, "lr": 0.01, "seconds": 1.0, "tokens": 192}
    return {"at": at, "kind": "step", "epoch": epoch, "step": number, **values, **fields}


def plan(step: int, stages: str = "a[0:4]", *, epoch: int = 1) -> dict[str, Any]:
    text = f"plan epoch={epoch} layers=4 microbatches=6 tp=1 backup=stream+snapshot\n"
    text += f"pipeline 0 microbatches=0-5: {stages}\n"
    return {"at": 11.0, "kind": "plan", "epoch": epoch, "step": step, "text": text}


def recovery(step: int) -> dict[str, Any]:
    return {"at": 20.0, "kind": "recovery", "step": step, "cause": "node1 lost", "total_s": 0.5}


def write(run_dir: Path, *events: dict[str, Any], mode: str = "a") -> None:
    with (run_dir / "events.jsonl").open(mode) as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
