"""A real Ray cluster of several nodes on this machine, and jobs on it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from elastic.launcher.run.event_tail import Follower
from tests.patience import LONG_S
from tests.scenarios.checkpoints import with_checkpoints
from tests.scenarios.harness import LEASE_S, ROOT, Run, assert_checkpoints

FAST = {
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "health_check_initial_delay_ms": 0,
}
"""Ray notices a lost node in seconds instead of a quarter of a minute."""
EQUAL = {"worker_niceness": 0}
"""Ray's workers have the least priority otherwise, and hardly run beside other work."""
SERVICES = ("elastic.agent.service", "elastic.coordinator.service")
ATTEMPTS = 5
T = TypeVar("T")


@contextmanager
def ray_cluster(nodes: int, **head: Any) -> Iterator[Any]:
    """`nodes` Ray nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    args = {"num_cpus": 1, "include_dashboard": False, "_system_config": FAST, **head}
    args["_system_config"] = {**EQUAL, **args["_system_config"]}
    cluster = _started(lambda: Cluster(initialize_head=True, head_node_args=args))
    try:
        for _ in range(nodes - 1):
            _started(lambda: cluster.add_node(num_cpus=1))
        yield cluster
    finally:
        cluster.shutdown()


def _started(start: Callable[[], T]) -> T:
    """Start a node, and return the result of `start`.

    Ray waits 30 s for a node, and a busy machine may need longer to load its programs. Then the
    processes that were started are killed, and it is tried again, ATTEMPTS times in all."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    for _ in range(ATTEMPTS - 1):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
        new = psutil.Process().children(recursive=True)
        for child in (child for child in new if child.pid not in before):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    return start()


def raylet(node: Any) -> psutil.Process:
    """The raylet process of a node of the cluster."""
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def has_agent(node: Any) -> bool:
    """Return whether the raylet has an agent of ours among its descendants."""
    return any(SERVICES[0] in words(child) for child in raylet(node).children(recursive=True))


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class Job:
    """A running `elastic run --backend ray`."""

    def __init__(self, run_dir: Path, flags: Sequence[str], script: Sequence[str]) -> None:
        script = with_checkpoints(script)
        self.run_dir, self._flags, self._script = run_dir, flags, script
        command = [
            sys.executable,
            "-m",
            "elastic",
            "run",
            "--backend",
            "ray",
            "--run-dir",
            str(run_dir),
        ]
        self.log = run_dir.with_suffix(".out")
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--lease", LEASE_S, *flags, *script],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._progress = Follower(run_dir / "progress.jsonl")
        self.last: dict[str, Any] = {}

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def job_id(self) -> str:
        return str(json.loads((self.run_dir / "config.json").read_text())["job_id"])

    def until(
        self, condition: Callable[[dict[str, Any]], bool], deadline_s: float = 3 * LONG_S
    ) -> dict[str, Any]:
        """Follow the job's progress until an entry meets `condition`; return that entry."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            for entry in self._progress.read():
                self.last = entry
                if condition(entry):
                    return entry
            if self.process.poll() is not None:
                break
            time.sleep(0.005)
        raise AssertionError(f"not reached; last: {self.last}\n{self.output}")

    def wait(self, deadline_s: float = 3 * LONG_S) -> int:
        """Wait for the end; return the exit code. If the job succeeded, every due checkpoint must
        be whole."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end; last: {self.last}\n{self.output}") from None
        if code == 0:
            assert_checkpoints(Run(code, self.output, self.run_dir), self._flags, self._script)
        return code

    def processes(self) -> list[psutil.Process]:
        """All processes of this job: coordinator, agents and workers."""
        return [process for process in psutil.process_iter() if self._mine(process)]

    def agent(self, node: str) -> psutil.Process:
        return next(
            process
            for process in self.processes()
            if SERVICES[0] in (line := words(process)) and line[line.index("--node") + 1] == node
        )

    def _mine(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            line = words(process)
            if any(service in line for service in SERVICES):
                return any(self.job_id in word or str(self.run_dir) in word for word in line)
            return self.job_id in process.environ().get("ELASTIC_MEMORY_DIR", "")
        except psutil.Error:
            return False

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
