"""A job whose coordinator and agents each have a network namespace of their own."""

from __future__ import annotations

import contextlib
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

from tests.kubernetes.network import Network, ip
from tests.patience import LONG_S
from tests.scenarios import checkpoints
from tests.scenarios.harness import ROOT
from tests.scenarios.paced import TRAIN, paced

PORT = 29400
COORDINATOR = "coordinator"
NOWHERE = "02:00:00:00:00:01"
"""A MAC address that no port has: the switch drops packets to it."""


class NetworkJob:
    """A job of `nodes` agents, node0 and so on, which ends with the `with` block."""

    def __init__(
        self, folder: Path, nodes: int, *flags: str, fewest: int = 0, late: Sequence[str] = ()
    ) -> None:
        """`fewest`: number of nodes with which the training begins (0: all); `late`: nodes that
        `start` starts."""
        self._fewest, self._late = fewest or nodes, late
        self.names = [f"node{i}" for i in range(nodes)]
        self._folder, self._flags, self._hurry = folder, flags, folder / "hurry"
        self._checkpoints = folder / "checkpoints"
        self._network = Network()
        self._spaces: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in (COORDINATOR, *self.names):
            self._spaces[name], self._addresses[name] = self._network.add(name)

    def __enter__(self) -> NetworkJob:
        place = f"{self._addresses[COORDINATOR]}:{PORT}"
        try:
            self._start(COORDINATOR, ["coordinator", "--address", place])
            for name in self.names:
                if name not in self._late:
                    self.start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for space in self._spaces.values():
            for pid in ip("netns", "pids", space).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._network.close()

    def start(self, name: str) -> None:
        """Start the agent of a node."""
        place = f"{self._addresses[COORDINATOR]}:{PORT}"
        self._start(name, ["agent", "--coordinator", place, "--node", name])

    def _start(self, name: str, command: Sequence[str]) -> None:
        nodes = f"{self._fewest}:{len(self.names)}"
        common = ["--nnodes", nodes, "--accumulate", "exact", "--insecure", "--pipelines", "1"]
        common += ["--checkpoint-dir", str(self._checkpoints)]
        words = [sys.executable, "-m", "elastic", *command, "--run-dir", str(self._folder / name)]
        words += [*common, *self._flags, *paced(self._hurry)]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                ["ip", "netns", "exec", self._spaces[name], *words],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    # ---- processes ----

    def agent(self, name: str) -> psutil.Process:
        """The agent of a node; its children are the workers."""
        service = "elastic.agent.service"
        processes = psutil.Process(self._processes[name].pid).children(recursive=True)
        return next(one for one in processes if service in one.cmdline())

    def fault_reached(self, name: str, number: int) -> bool:
        """Return whether a worker of this node has carried out an injected fault."""
        folder = self._folder / name / "faults"
        return (folder / f"{number}.fired").exists()

    # ---- the network ----

    def cut(self, node: str, peer: str, *, silently: bool = False) -> None:
        """Drop the packets from `node` to `peer`: its kernel refuses to send them, or `silently`
        the switch drops them."""
        if silently:
            neighbour = ["neigh", "replace", self._addresses[peer], "lladdr", NOWHERE]
            ip("-n", self._spaces[node], *neighbour, "dev", "eth0", "nud", "permanent")
        else:
            ip("-n", self._spaces[node], "route", "add", "blackhole", self._addresses[peer])

    def heal(self, node: str, peer: str, *, silently: bool = False) -> None:
        if silently:
            ip("-n", self._spaces[node], "neigh", "del", self._addresses[peer], "dev", "eth0")
        else:
            ip("-n", self._spaces[node], "route", "del", "blackhole", self._addresses[peer])

    # ---- progress and events ----

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self._lines("events.jsonl") if event["kind"] == kind]

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return max((int(event["step"]) + 1 for event in self.events("step")), default=0)

    @property
    def phase(self) -> str:
        """Newest phase of the job."""
        found = self.events("phase")
        return str(found[-1]["phase"]) if found else ""

    def path_events(self, pair: Sequence[str]) -> list[dict[str, Any]]:
        """Events about the path between two nodes."""
        return [
            event
            for event in self.events("health")
            if event["class"] == "path" and {event["node"], event["evidence"]["peer"]} == set(pair)
        ]

    def planned(self) -> set[str]:
        """Nodes with layers in the newest plan."""
        plans = self.events("plan")
        return {name for name in self.names if plans and f"{name}[" in plans[-1]["text"]}

    def status(self) -> dict[str, Any]:
        """Answer of `elastic status`, asked on the coordinator's machine."""
        place = f"{self._addresses[COORDINATOR]}:{PORT}"
        words = [sys.executable, "-m", "elastic", "status", "--rdzv-endpoint", place, "--json"]
        command = ["ip", "netns", "exec", self._spaces[COORDINATOR], *words]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True)
        return dict(json.loads(done.stdout))

    def wait_for(self, what: str, condition: Callable[[], Any], within_s: float = LONG_S) -> Any:
        """Wait until `condition` returns a true value; after the limit, fail with all output."""
        end = time.monotonic() + within_s
        while not (value := condition()):
            text = f"{what} did not happen within {within_s:g} s\n{self.output()}"
            assert time.monotonic() < end, text
            time.sleep(0.05)
        return value

    def finish(self) -> dict[str, Any]:
        """Let the training run to its end at full speed; return its summary. Every due checkpoint
        must be whole."""
        self._hurry.touch()
        running = self._processes.values()
        self.wait_for("the end", lambda: all(one.poll() is not None for one in running))
        codes = {name: process.returncode for name, process in self._processes.items()}
        assert not any(codes.values()), f"{codes}\n{self.output()}"
        summary = dict(json.loads((self._folder / COORDINATOR / "summary.json").read_text()))
        checkpoints.assert_written(
            self._checkpoints, checkpoints.due(TRAIN), summary["params_sha256"], self.output()
        )
        return summary

    def output(self) -> str:
        """The last output of each process."""
        found = []
        for name in self._processes:
            lines = (self._folder / f"{name}.log").read_text(errors="replace").splitlines()
            found += [f"---- {name}", *lines[-40:]]
        return "\n".join(found)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / COORDINATOR / name
        text = path.read_text() if path.exists() else ""
        whole, _, _ = text.rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]
