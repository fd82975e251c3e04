"""Runs `elastic run` as a process and reads the files that the run leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.scenarios import checkpoints

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = "30"
"""Seconds of silence after which a node is lost."""
DEADLINE_S = 560.0


@dataclass(frozen=True)
class Run:
    """One finished run."""

    code: int
    output: str
    run_dir: Path

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "summary.json").read_text()))

    @property
    def events(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()
        ]

    @property
    def final_sha256(self) -> str:
        """Hash of the final parameters, in the last event."""
        return str([e for e in self.events if e["kind"] == "end"][-1]["params_sha256"])


def proved(summary: dict[str, Any]) -> dict[str, int]:
    """The ledger of a summary if the commit of each step proved the ledgers of all layers."""
    return {"double": 0, "missing": 0, "proved": summary["steps"]}


def elastic_run(
    run_dir: Path,
    flags: Sequence[str],
    script: Sequence[str],
    deadline_s: float = DEADLINE_S,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Run `elastic run --standalone FLAGS --run-dir RUN_DIR SCRIPT...` to its end.

    The silence limit is long, because a busy machine must not make a node lost. Tests that cut a
    node off set a short limit. The example script also writes checkpoints, unless `script` has
    `--checkpoint-every`. If the run succeeds, every due checkpoint must be whole. `environment`:
    variables that are added.
    """
    script = checkpoints.with_checkpoints(script)
    silent = "--lease" in flags or any("partition" in flag for flag in flags)
    command = [
        sys.executable,
        "-m",
        "elastic",
        "run",
        "--standalone",
        "--run-dir",
        str(run_dir),
        *([] if silent else ["--lease", LEASE_S]),
        *flags,
        *script,
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=deadline_s,
        check=False,
    )
    run = Run(done.returncode, done.stdout.decode(errors="replace"), run_dir)
    if run.code == 0:
        assert_checkpoints(run, flags, script)
    return run


def assert_checkpoints(run: Run, flags: Sequence[str], script: Sequence[str]) -> None:
    """Assert that a run which succeeded has every due checkpoint."""
    due = checkpoints.kept(checkpoints.due(script, checkpoints.resumed_step(flags)), flags)
    if not due:
        return
    lost = [event for event in run.events if event["kind"] == "checkpoint-lost"]
    checkpoints.assert_written(
        checkpoints.location_of(run.run_dir, flags),
        due,
        run.final_sha256,
        f"{lost}\n{run.output}",
    )
