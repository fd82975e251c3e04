"""Measures how long a job has no leader after its coordinator fails.

    python -m benchmarks.control_plane.failover [--rounds N]

A small training run has three coordinators on a real etcd. In each round the leader is killed
(SIGKILL), or paused (SIGSTOP) until another coordinator leads. Two times are measured: until the
successor's `adopted` event, after which it decides, and until a node reports a step to it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results import Row, save
from tests.store.etcds import etcd

SCRIPT = [
    "-m",
    "examples.train_gpt",
    "--layers",
    "4",
    "--hidden",
    "64",
    "--heads",
    "4",
    "--seq-len",
    "64",
]
STEPS = 100_000
TARGET_S = 3.0
WAIT_S = 120.0


class Run:
    """A training run, watched through its event log."""

    def __init__(self, run_dir: Path, store: str) -> None:
        self._dir = run_dir
        command = [
            sys.executable,
            "-m",
            "elastic",
            "run",
            "--standalone",
            "--nnodes",
            "2",
            "--lease",
            "30",
        ]
        command += ["--coordinators", "3", "--store", store, "--run-dir", str(run_dir)]
        command += [
            "--backup",
            "log+snapshot",
        ]  # `auto` would choose again once steps are measured, which changes the plan
        with (run_dir.parent / "out").open("wb") as out:
            words = [*command, *SCRIPT, "--steps", str(STEPS)]
            self.process = subprocess.Popen(words, stdout=out, stderr=out)

    def events(self) -> list[dict[str, Any]]:
        try:
            text = (self._dir / "events.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def first(self, after: float, *kinds: str) -> dict[str, Any]:
        """Wait for the first event of these kinds after a time, and return it."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end and self.process.poll() is None:
            for event in self.events():
                if event["kind"] in kinds and event["at"] > after:
                    return event
            time.sleep(0.01)
        raise SystemExit(f"no {' or '.join(kinds)}: the run has ended or hangs")


def takeover(run: Run, number: signal.Signals) -> tuple[float, float]:
    """Return seconds from the signal until a successor leads, and until its first step."""
    pid = json.loads((run._dir / "coordinator.json").read_text())["pid"]
    begun = time.time()
    os.kill(pid, number)
    adopted = run.first(begun, "adopted")["at"]
    step = run.first(adopted, "step")["at"]
    if number is signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    run.first(step, "step")
    time.sleep(2.0)  # by then a killed coordinator runs again and stands by
    return adopted - begun, step - begun


def rows(name: str, pairs: list[tuple[float, float]]) -> list[Row]:
    adopted, told = ([pair[i] for pair in pairs] for i in (0, 1))
    described: list[tuple[str, list[float], Callable[[list[float]], float], float | None]] = [
        ("to decisions, median", adopted, statistics.median, None),
        ("to decisions, longest", adopted, max, TARGET_S),
        ("to the first reported step, median", told, statistics.median, None),
    ]
    return [
        Row(f"leader {name}: {text}", pick(values), "s", target, "lower")
        for text, values, pick, target in described
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, etcd(Path(folder) / "etcd") as cluster:
        run = Run(Path(folder) / "run", cluster.url)
        try:
            run.first(0.0, "step")
            killed = [takeover(run, signal.SIGKILL) for _ in range(rounds)]
            paused = [takeover(run, signal.SIGSTOP) for _ in range(rounds)]
            lost = [event for event in run.events() if event["kind"] == "lost"]
            changes = [event for event in run.events() if event["kind"] == "halt"]
        finally:
            run.process.terminate()
            run.process.wait()
    save("failover", [
        *rows("killed", killed),
        *rows("paused", paused),
        Row("nodes wrongly declared lost", float(len(lost)), "", 0.0, "lower"),
        Row("epoch changes after the start", float(len(changes) - 1), "", 0.0, "lower"),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
