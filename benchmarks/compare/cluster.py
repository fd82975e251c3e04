"""Local nodes: process trees that are killed with SIGKILL, and replaced after a pause."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

POLL_S = 0.01
LAST_S = 10.0
"""Seconds that the other nodes have to end after the first one has."""

Record = dict[str, Any]
"""One line of a worker's records, with its node."""


@dataclass(frozen=True)
class Kill:
    """Kills a node as soon as it has computed `computed` micro-batches of a step from `step` on, if
    all nodes took part in the step before."""

    node: int
    step: int
    computed: int = 2

    def is_due(self, computed: Mapping[tuple[int, int], int], nodes: int) -> bool:
        """`computed`: (node, step): number of micro-batches."""
        return any(
            node == self.node
            and step >= self.step
            and number >= self.computed
            and all((other, step - 1) in computed for other in range(nodes))
            for (node, step), number in computed.items()
        )


@dataclass
class RecordReader:
    """Reads the records of all workers as they are written."""

    folder: Path
    records: list[Record] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def poll(self) -> list[Record]:
        """Return the new records."""
        fresh = []
        for path in self.folder.glob("node*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.read()
            whole = lines[: lines.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            node = int(path.name.removeprefix("node").split("-")[0])
            fresh += [{**json.loads(line), "node": node} for line in whole.splitlines()]
        self.records += fresh
        return fresh


def start(command: Sequence[str], env: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; its output is added to a file."""
    with output.open("ab") as file:
        return subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all of its descendants, the parents first, so that none is restarted."""
    tree = []
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        tree = [parent, *parent.children(recursive=True)]
    for one in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGKILL)
    process.wait()


class Nodes:
    """The nodes of one run. Use as a context manager, which ends all processes."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        envs: Sequence[Mapping[str, str]],
        services: Sequence[Sequence[str]],
        env: Mapping[str, str],
        folder: Path,
    ) -> None:
        """`command(node)` is called for each start of a node. `envs`: one per node. `services` are
        started first, with `env`."""
        self._command, self._envs, self._folder = command, envs, folder
        self._services = [
            start(words, env, folder / f"service{i}.log") for i, words in enumerate(services)
        ]
        self._nodes = [self._launch(node) for node in range(len(envs))]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._nodes, *self._services):
            kill_tree(process)

    def _launch(self, node: int) -> subprocess.Popen[bytes]:
        return start(self._command(node), self._envs[node], self._folder / f"node{node}.log")

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self._nodes)

    def carry_out(
        self, kills: Sequence[Kill], replace_s: float, limit_s: float, reader: RecordReader
    ) -> list[float]:
        """Kill nodes when they are due, and start each again after `replace_s`. Return the times of
        the kills, when the job has ended: when all nodes have, or `LAST_S` after the first one.

        Raises TimeoutError after `limit_s`, and RuntimeError if a kill was not due.
        """
        waiting, killed, back = list(kills), list[float](), list[tuple[float, int]]()
        computed: dict[tuple[int, int], int] = {}
        end, ended = time.monotonic() + limit_s, math.inf
        while self.running and time.monotonic() < ended:
            if any(process.poll() == 0 for process in self._nodes):
                ended = min(ended, time.monotonic() + LAST_S)
            if time.monotonic() > end:
                raise TimeoutError(f"the job has not ended after {limit_s:.0f} s")
            for record in reader.poll():
                if record["kind"] == "microbatch":
                    at = record["node"], record["step"]
                    computed[at] = computed.get(at, 0) + 1
            if waiting and not back and waiting[0].is_due(computed, len(self._nodes)):
                due = waiting.pop(0)
                kill_tree(self._nodes[due.node])
                killed.append(time.time())
                back.append((time.monotonic() + replace_s, due.node))
            if back and time.monotonic() >= back[0][0]:
                _, node = back.pop(0)
                self._nodes[node] = self._launch(node)
                computed = {}
            time.sleep(POLL_S)
        reader.poll()
        if waiting:
            raise RuntimeError(f"not reached: {waiting}")
        return killed
