"""A job whose nodes each have a shared memory and a TMPDIR of their own, which can be full."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from elastic.store.shared_memory import fallback_of
from tests.disks import fill
from tests.scenarios.harness import Run
from tests.scenarios.jobs import Job
from tests.scenarios.paced import paced
from tests.scenarios.shared import exact
from tests.store.etcds import free_ports

MOUNTS = """
set -e
for folder in /dev/shm "$1"; do mount -t tmpfs -o "size=$2" tmpfs "$folder"; done
export TMPDIR="$1"
shift 2
exec "$@"
"""
"""Mounts file systems of one size for this process and its children, and runs a command."""
ROOMY, NO_PAGE = "32m", "4k"
"""Size of the file systems: enough for the small job, and too small for any copy."""


def missing() -> str:
    """Reason why this machine cannot have such mounts; "" if it can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "mount namespaces need root and unshare"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNTS, "sh", "/mnt", NO_PAGE, "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"file systems cannot be mounted: {done.stderr}" if done.returncode else ""


class Machines:
    """A coordinator and agents, node0 and so on, until the end of the `with` block."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *flags: str,
        script: Sequence[str] = (),
        tiny: Sequence[str] = (),
        late: Sequence[str] = (),
    ) -> None:
        """`script`: the paced training if it is empty; `tiny`: nodes whose memory and TMPDIR have
        no room for any copy; `late`: nodes that `start` starts."""
        self.names = [f"node{i}" for i in range(nodes)]
        self._folder, self._tiny, self._late = folder, tiny, late
        self.hurry = folder / "hurry"
        self._script = list(script) or paced(self.hurry)
        self._common = exact("--nnodes", f"{nodes}:{nodes}", "--rdzv-id", "full", *flags)
        self._common += ["--checkpoint-dir", str(folder / "checkpoints")]
        token = folder / "token"
        token.write_text("of all machines of this job\n")
        self._common += ["--join-token-file", str(token)]
        self._place = f"127.0.0.1:{free_ports(1)[0]}"
        self.nodes: dict[str, Job] = {}

    def __enter__(self) -> Machines:
        words = ["coordinator", "--address", self._place, *self._common]
        self.head = Job(self._folder / "head", words, self._script)
        for name in self.names:
            if name not in self._late:
                self.start(name)
        return self

    def start(self, name: str) -> None:
        """Start the agent of a node."""
        disk, size = self._folder / f"{name}.tmp", NO_PAGE if name in self._tiny else ROOMY
        disk.mkdir()
        prefix = ["unshare", "--mount", "sh", "-c", MOUNTS, "sh", str(disk), size]
        words = ["agent", "--coordinator", self._place, "--node", name, *self._common]
        self.nodes[name] = Job(self._folder / name, words, self._script, prefix=prefix)

    def __exit__(self, *error: object) -> None:
        for job in (self.head, *self.nodes.values()):
            job.kill()

    def _folders(self, name: str) -> list[Path]:
        """Shared memory and TMPDIR of a node, as this process sees them."""
        root = Path(f"/proc/{self.nodes[name].process.pid}/root")
        return [root / "dev/shm", root / str(self._folder / f"{name}.tmp").lstrip("/")]

    def fill(self, name: str) -> None:
        """Take all room of a node's memory and TMPDIR."""
        for folder in self._folders(name):
            fill(folder)

    def refuse_slots(self, name: str) -> None:
        """Let a node's vault create no files, neither in memory nor on disk (chattr +i)."""
        memory, disk = self._folders(name)
        (vault,) = memory.glob(f"elastic-*/{name}/vault")
        inside = Path("/", *vault.parts[4:])  # without /proc/PID/root
        spill = disk / fallback_of(inside).name
        spill.mkdir(exist_ok=True)
        for folder in (vault, spill):
            subprocess.run(["chattr", "+i", str(folder)], check=True)

    def lose(self, name: str) -> None:
        """Kill all processes of a node."""
        self.nodes[name].kill()

    def finish(self) -> Run:
        """Let the job run to its end at full speed."""
        self.hurry.touch()
        return self.head.finish()
