"""Jobs that run in the background while a test follows their events and injects faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from elastic.rpc.control.client import call
from elastic.rpc.security.tls import load
from tests.patience import LONG_S
from tests.scenarios.checkpoints import with_checkpoints
from tests.scenarios.harness import DEADLINE_S, LEASE_S, ROOT, Run, assert_checkpoints

WAIT_S = LONG_S


class Job:
    """`elastic WORDS... --run-dir RUN_DIR` in the background. `kill` ends it in any state."""

    def __init__(
        self,
        run_dir: Path,
        words: Sequence[str],
        script: Sequence[str],
        prefix: Sequence[str] = (),
        path: Sequence[Path] = (ROOT,),
    ) -> None:
        """`prefix`: command that runs the command, such as `ip netns exec NAME`; `path`: folders of
        PYTHONPATH."""
        self.run_dir, self._log = run_dir, run_dir.with_suffix(".out")
        self._words, script = list(words), with_checkpoints(script)
        self._script = script
        command = [*prefix, sys.executable, "-m", "elastic", *words, "--run-dir", str(run_dir)]
        command += [*(() if "--lease" in words else ("--lease", LEASE_S)), *script]
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as out:
            env = {**os.environ, "PYTHONPATH": ":".join(map(str, path))}
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def events(self) -> list[dict[str, Any]]:
        try:
            lines = (self.run_dir / "events.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def wait(self, what: str, condition: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
        """Wait until `condition` is true and return its value. Fails if the job ends before."""
        end = time.monotonic() + timeout_s
        while True:
            found = condition()
            if found:
                return found
            assert self.process.poll() is None, f"the job ended before {what}\n{self.output}"
            assert time.monotonic() < end, f"no {what} within {timeout_s:g} s\n{self.output}"
            time.sleep(0.05)

    def steps(self, after: int = -1) -> list[int]:
        """Steps of the event log that are later than `after`, in the order of the log."""
        return [event["step"] for event in self.of("step") if event["step"] > after]

    def await_steps(self, count: int) -> int:
        """Wait for this many further steps in the event log; return the last one."""
        here = max(self.steps(), default=-1)
        found = self.wait(f"{count} steps after {here}", lambda: self._beyond(here + count))
        return int(found[0])

    def _beyond(self, step: int) -> list[int]:
        last = max(self.steps(), default=-1)
        return [last] if last >= step else []

    def leader(self) -> dict[str, Any]:
        """Address, process ID and term of the leading coordinator."""
        return dict(json.loads((self.run_dir / "coordinator.json").read_text()))

    def ask(self, kind: str, **body: Any) -> dict[str, Any]:
        """Send a request to the leader with the credentials of the run directory; return its
        answer."""
        return call(
            self.leader()["address"], kind, body, timeout_s=LONG_S, secure=load(self.run_dir, "")
        )

    def agent(self, node: str) -> psutil.Process:
        """The agent of a node."""
        for child in psutil.Process(self.process.pid).children():
            words = child.cmdline()
            if "--node" in words and words[words.index("--node") + 1] == node:
                return child
        raise AssertionError(f"no agent of {node}")

    def finish(self, timeout_s: float = DEADLINE_S) -> Run:
        """Wait for the end. If the job succeeded, every due checkpoint must be whole."""
        run = Run(self.process.wait(timeout_s), self.output, self.run_dir)
        if run.code == 0 and self._words[0] != "agent":
            assert_checkpoints(run, self._words, self._script)
        return run

    def kill(self) -> None:
        """Kill the launcher and all its children, including stopped ones."""
        for child in (
            psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        ):
            child.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
