"""One running job of a case, on this machine or in network namespaces.

Every service has a mount namespace with a /dev/shm of its own (on one machine: the whole job), so
that shared memory can be full without harm to others, and leftovers are seen. The temporary
directory, the run directory and the checkpoints are small disks where a fault fills them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.case import Case
from elastic.core.protocol.fault_spec import FaultKind
from elastic.launcher.run.event_tail import Follower
from tests.kubernetes.network import Network, ip

ROOT = Path(__file__).resolve().parents[2]
MARK = "ELASTIC_CHAOS_RUN"
"""Environment variable by which the processes of a run are found."""
SHARED_MEMORY = "/dev/shm"
MEMORY_SIZE, DISK_SIZE = "768m", "192m"
PORT = 29400
COORDINATOR = "coordinator"
NOWHERE = "02:00:00:00:00:01"
"""A MAC address that no port has."""
AGENTS_END_S = 60.0
LEAVING = (FaultKind.KILL, FaultKind.DRAIN, FaultKind.PARTITION)
"""Faults that make room for a node that joins, as `elastic run` counts them."""
_WRAPPER = (
    f"mount -t tmpfs -o size={MEMORY_SIZE} tmpfs {SHARED_MEMORY} || exit 70\n"
    'left=$1; shift; "$@"; code=$?\n'
    f'find {SHARED_MEMORY} -mindepth 1 -maxdepth 1 -name "*elastic*" >> "$left"\n'
    "exit $code"
)


def run_place(folder: Path) -> Path:
    """Return the folder of a run directory; it is a disk of its own if faults fill it."""
    return folder / "disk" / "run"


class Job:
    """A running job. `close` ends it in any state."""

    def __init__(self, case: Case, folder: Path) -> None:
        """`folder` is made; its path should be short."""
        self.case, self.folder = case, folder
        self.left = folder / "left.txt"
        """Names of files in shared memory that are left after the end; see `files_left`."""
        self.checkpoints = folder / "checkpoints"
        self.tmp = folder / "tmp"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._mounted: list[Path] = []
        folder.mkdir(parents=True)
        small = {"run": folder / "disk", "checkpoints": self.checkpoints}
        small["memory-and-tmp"] = self.tmp
        for name, path in small.items():
            path.mkdir()
            if name in case.disks:
                size = f"size={DISK_SIZE}"
                subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", path], check=True)
                self._mounted.append(path)
        self.run_dir = run_place(folder)
        self.progress = Follower(self.run_dir / "progress.jsonl")

    def start(self) -> None:
        raise NotImplementedError

    def memory(self, node: str) -> Path:
        """Shared memory of a node."""
        raise NotImplementedError

    def disk(self, name: str, node: str) -> list[Path]:
        """Folders that a fault fills."""
        if name in ("run", "checkpoints"):
            return [{"run": self.folder / "disk", "checkpoints": self.checkpoints}[name]]
        return [self.memory(node), *([self.tmp] if name == "memory-and-tmp" else [])]

    def agent(self, node: str) -> psutil.Process | None:
        """Return the agent of a node, or None if it does not run."""
        for process in self.everything():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "elastic.agent.service" in words and words[words.index("--node") + 1] == node:
                    return process
        return None

    def coordinator(self) -> psutil.Process | None:
        """Return the leading coordinator, or None if none runs."""
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            text = (self.run_dir / "coordinator.json").read_text()
            process = psutil.Process(int(json.loads(text)["pid"]))
            return process if process in self.everything() else None
        return None

    def everything(self) -> list[psutil.Process]:
        """All processes of this run, found by their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.folder):
                    found.append(process)
        return found

    def ended(self) -> bool:
        raise NotImplementedError

    def files_left(self) -> list[str]:
        """Files in shared memory and the temporary directory that are left after the end. All nodes
        have one temporary directory, so call this when all have ended."""
        memory = self.left.read_text().splitlines() if self.left.exists() else []
        return [*memory, *(str(path) for path in self.tmp.glob("*elastic*"))]

    def codes(self) -> dict[str, int | None]:
        return {name: process.poll() for name, process in self.processes.items()}

    def close(self) -> None:
        for process in self.everything():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for popen in self.processes.values():
            popen.wait()

    def keep_disks(self) -> None:
        """Replace the small disks by plain folders with the same files."""
        for path in self._mounted:
            copy = path.with_name(f"{path.name}.copy")
            subprocess.run(["cp", "-a", path, copy], check=True)
            subprocess.run(["umount", "-l", path], check=True)
            path.rmdir()
            copy.rename(path)
        self._mounted.clear()

    def spawn(self, name: str, prefix: Sequence[str], words: Sequence[str]) -> None:
        command = [*prefix, "sh", "-c", _WRAPPER, "sh", str(self.left), *words]
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'simulator'}", "OMP_NUM_THREADS": "1"}
        env |= {MARK: str(self.folder), "TMPDIR": str(self.tmp)}
        with (self.folder / f"{name}.out").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True
            )

    def flags(self) -> list[str]:
        """Flags that all services have."""
        case = self.case
        most = case.nodes + case.joins
        if case.place == "machine":  # `elastic run` starts `nodes` of them
            kinds = [spec.kind for spec in case.injected]
            leaving = sum(kinds.count(kind) for kind in LEAVING)
            most = case.nodes + max(0, case.joins - leaving)
        flags = ["--nnodes", f"{case.nodes}:{most}", "--accumulate", "exact", *case.flags]
        for spec in case.injected:
            flags += ["--fault", spec.text]
        return [*flags, "--checkpoint-dir", str(self.checkpoints)]


class MachineJob(Job):
    """`elastic run --standalone`."""

    def start(self) -> None:
        words = [sys.executable, "-m", "elastic", "run", "--standalone", "--run-dir"]
        words += [str(self.run_dir), *self.flags(), *self.case.paced_script]
        self.spawn("run", ["unshare", "--mount"], words)

    def memory(self, node: str) -> Path:
        return Path(f"/proc/{self.processes['run'].pid}/root{SHARED_MEMORY}")

    def ended(self) -> bool:
        return self.processes["run"].poll() is not None


class NetworkJob(Job):
    """A coordinator and agents, each in a network namespace."""

    def __init__(self, case: Case, folder: Path) -> None:
        super().__init__(case, folder)
        self._network = Network()
        self._spaces: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._coordinator_ended = 0.0

    def start(self) -> None:
        nodes = [f"node{i}" for i in range(self.case.nodes)]
        for name in (COORDINATOR, *nodes):
            self._spaces[name], self._addresses[name] = self._network.add(name)
        command = ["coordinator", "--address", self._place]
        self._elastic(COORDINATOR, command, self.run_dir)
        for name in nodes:
            self._start_agent(name)

    @property
    def _place(self) -> str:
        return f"{self._addresses[COORDINATOR]}:{PORT}"

    def join(self) -> None:
        name = f"node{len(self._spaces) - 1}"
        self._spaces[name], self._addresses[name] = self._network.add(name)
        self._start_agent(name)

    def drain(self, node: str) -> None:
        words = ["elastic", "drain", node, "--rdzv-endpoint", self._place, "--deadline", "30"]
        command = ["ip", "netns", "exec", self._spaces[COORDINATOR], sys.executable, "-m", *words]
        env = {**os.environ, "PYTHONPATH": str(ROOT), MARK: str(self.folder)}
        with (self.folder / "drain.out").open("ab") as out:
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)

    def partition(self, name: str, healed: bool = False) -> None:
        (self._network.heal if healed else self._network.cut)(self._spaces[name])

    def cut(self, node: str, peer: str, silent: bool, healed: bool = False) -> None:
        """Drop the packets from `node` to `peer`, or end that. Errors are ignored: a namespace
        may be gone."""
        space, address = self._spaces[node], self._addresses[peer]
        if silent:
            words = ["neigh", "del" if healed else "replace", address]
            words += [] if healed else ["lladdr", NOWHERE]
            words += ["dev", "eth0", *([] if healed else ["nud", "permanent"])]
        else:
            words = ["route", "del" if healed else "add", "blackhole", address]
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("-n", space, *words)

    def memory(self, node: str) -> Path:
        return Path(f"/proc/{self.processes[node].pid}/root{SHARED_MEMORY}")

    def ended(self) -> bool:
        """The coordinator has ended, and so have the agents, or they had their time."""
        if self.processes[COORDINATOR].poll() is None:
            return False
        if not self._coordinator_ended:
            self._coordinator_ended = time.monotonic()
            self._end_strangers()
        late = time.monotonic() - self._coordinator_ended > AGENTS_END_S
        return late or all(process.poll() is not None for process in self.processes.values())

    def _end_strangers(self) -> None:
        """Tell the agents to end that began too late to join. They know of no end of the job, and
        would wait for a coordinator; a scheduler ends them with the job."""
        joined = {event["node"] for event in events_of(self.run_dir) if event["kind"] == "joined"}
        strangers = self.processes.keys() - {COORDINATOR} - joined
        for process in self.everything():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                launches = words[1:4] == ["-m", "elastic", "agent"]
                if launches and words[words.index("--node") + 1] in strangers:
                    process.terminate()

    def close(self) -> None:
        super().close()
        self._network.close()

    def _start_agent(self, name: str) -> None:
        words = ["agent", "--coordinator", self._place, "--node", name]
        self._elastic(name, words, self.folder / name)

    def _elastic(self, name: str, command: Sequence[str], run_dir: Path) -> None:
        words = [sys.executable, "-m", "elastic", *command, "--run-dir", str(run_dir)]
        words += ["--insecure", *self.flags(), *self.case.paced_script]
        self.spawn(name, ["ip", "netns", "exec", self._spaces[name]], words)


def begin(case: Case, folder: Path) -> Job:
    """Start the job of a case."""
    kind: Callable[[Case, Path], Job] = NetworkJob if case.place == "network" else MachineJob
    job = kind(case, folder)
    try:
        job.start()
    except BaseException:
        job.close()
        raise
    return job


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of a run; an incomplete last line is left out."""
    return Follower(run_dir / "events.jsonl").read()
