"""One agent on another machine, for a launcher elsewhere: what an actor of a cluster runs. Knows no cluster.

The actor gets everything as text: the job's configuration, the coordinator's address, and secrets, which travel as
arguments and never stand on a command line. It makes a run directory of its own, which agent and workers use as they
would use the launcher's; the launcher fetches the logs piece by piece, and the directory is removed at the end.

No orphans: the agent watches a pipe that only this process holds, and this process watches the one that started it. So
the agent and its workers end with the actor, and the actor with its machine's part of the cluster.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic.config import JobConfig
from elastic.domain import codec
from elastic.domain.errors import EXIT_FAILURE, ElasticError, UsageError
from elastic.domain.version import VERSION
from elastic.launcher.flags.guarding import PRIVATE, is_loopback
from elastic.launcher.flags.request import Request, memory_root
from elastic.launcher.run.metrics_endpoint import hosted_flag
from elastic.launcher.run.processes import Child, Lifeline
from elastic.launcher.run.rundir import RunDir, locked
from elastic.launcher.run.supervisor import agent_args
from elastic.metrics import FOLDER

AGENT = "elastic.agent.service"
CONSOLE = "{node}.out"
"""What the agent and, where they do not go to files alone, its workers print."""
REACH_S = 10.0
"""How long the coordinator is tried for before its address is taken to be out of reach."""
MOST_BYTES = 1 << 20
"""Of logs in one answer."""
FRESH_S = 60.0
"""A lock file so young may be about to be locked by the one who made it."""
LOST_PARENT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the agent shall be."""

    version: str = VERSION
    config: JobConfig
    """As of the launcher; directories are replaced by ones of this machine, but for checkpoints."""
    node: str
    coordinator: str
    host: str
    domain: str = ""
    folder: str = ""
    """Working directory of the workers, if this machine has it; "": the actor's own."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that differ from the actor's own."""


class AgentHost:
    """Runs one agent. `serve` blocks; the others are called meanwhile, from other threads."""

    def __init__(self, order: str, secrets: Mapping[str, bytes] | None = None) -> None:
        """Only remembers. `secrets`: contents by path relative to the run directory; only this user reads them."""
        self._text, self._secrets = order, dict(secrets or {})
        self._child: Child | None = None
        self._dir: RunDir | None = None
        self._logs: Path | None = None
        self._discovery: Path | None = None
        self._stopped = False

    def serve(self) -> tuple[int, str]:
        """Run the agent to its end: (exit code or minus a signal, what was wrong before it started)."""
        try:
            order = codec.loads(Order, self._text)
            _check(order)
            self._start(order)
        except (ElasticError, OSError) as error:
            return getattr(error, "exit_code", EXIT_FAILURE), str(error)
        assert self._child is not None
        return self._wait(self._child), ""

    def logs(self, offsets: Mapping[str, int]) -> list[tuple[str, int, bytes]]:
        """(path, offset, bytes) of what was written behind these offsets, by relative path; a bounded part of it.
        Where the agent serves its metrics comes first, as metrics/NODE.json, whole."""
        left, found = MOST_BYTES, []
        for name, path in (*_below(self._discovery, "*.json", f"{FOLDER}/"), *_below(self._logs, "*")):
            offset = offsets.get(name, 0)
            with contextlib.suppress(OSError):  # a directory, or removed meanwhile
                if path.stat().st_size > offset and left > 0 and path.is_file():
                    with path.open("rb") as file:
                        file.seek(offset)
                        data = file.read(left)
                    left -= len(data)
                    found.append((name, offset, data))
        return found

    def stop(self, kill: bool = False) -> None:
        """End the agent in order, or at once."""
        self._stopped = True
        if self._child is not None:
            if kill:
                self._child.kill()
            else:
                self._child.terminate()

    def close(self) -> None:
        """Remove what lies on this machine."""
        self.stop(kill=True)
        if self._dir is not None:
            self._dir.close()
            shutil.rmtree(self._dir.path, ignore_errors=True)
            self._dir = self._logs = self._discovery = None

    def _start(self, order: Order) -> None:
        end_with(os.getppid())
        os.environ.update(order.environment)
        if order.folder and os.path.isdir(order.folder):
            os.chdir(order.folder)
        self._dir = RunDir(_request(order))
        config, path = self._dir.config, self._dir.path
        self._logs = Path(config.log_dir)
        for name, data in self._secrets.items():
            write_secret(path, name, data)
        self._discovery = path / FOLDER
        args = agent_args(config, path, order.node, 0, order.coordinator, order.host) + hosted_flag(config)
        with (self._logs / CONSOLE.format(node=order.node)).open("ab") as out:
            child = Child.start(order.node, AGENT, args, Lifeline(), out)
        self._child = child
        if self._stopped:
            child.terminate()

    def _wait(self, child: Child) -> int:
        while not child.ended():
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        return child.returncode or 0


def _below(folder: Path | None, pattern: str, prefix: str = "") -> list[tuple[str, Path]]:
    """(relative path, path) of what lies there; nothing where there is no such folder."""
    if folder is None:
        return []
    return [(f"{prefix}{path.relative_to(folder)}", path) for path in sorted(folder.rglob(pattern))]


def _check(order: Order) -> None:
    """Raises UsageError where this machine cannot hold the agent."""
    if order.version != VERSION:
        raise UsageError(
            f"{order.host} has elastic {VERSION}, the launcher {order.version}: install one of them"
        )
    host, _, port = order.coordinator.rpartition(":")
    end = time.monotonic() + REACH_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
            return
        except OSError as error:
            if time.monotonic() < end:
                time.sleep(0.1)
                continue
            raise UsageError(
                f"{order.host} cannot reach the coordinator at {order.coordinator} ({error.strerror or error}): "
                f"give its address as --rdzv-endpoint HOST:PORT, or run the launcher inside the cluster"
            ) from error


def _request(order: Order) -> Request:
    """The request of a launcher that runs this agent alone, with directories of this machine."""
    root = Path(tempfile.gettempdir(), f"elastic-hosted-{os.getuid()}")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(f"{root} is not this user's alone: remove it, or give another TMPDIR")
    sweep(root)
    name = f"{order.config.job_id}-{order.node}"
    path, shown = root / name, order.config.metrics_host
    config = order.config.of(
        run_dir=str(path),
        log_dir=str(path / "logs"),
        memory_dir=str(memory_root() / f"elastic-{name}"),
        certs=str(path / PRIVATE) if order.config.certs else "",
        domains=(order.domain,) if order.domain else order.config.domains[:1],
        metrics_host=shown if is_loopback(shown) else order.host,
    )
    return Request(config=config, nodes=(order.node,), hosts=False, signals=())


def sweep(root: Path) -> None:
    """Remove directories whose process was killed: nobody holds their lock any more."""
    for folder in root.glob("*/"):
        with contextlib.suppress(OSError):  # somebody else's, or being removed right now
            lock = folder / "launcher.lock"
            fresh = time.time() - lock.stat().st_mtime < FRESH_S
            if not fresh and (held := locked(lock, make=False)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(held)


def write_secret(run_dir: Path, name: str, data: bytes) -> None:
    """Write a file below the run directory that only this user can read, as join.token or certs/tls.key. Raises
    UsageError for a name that leads elsewhere, or to a file that is there."""
    if not re.fullmatch(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", name) or (run_dir / name).exists():
        raise UsageError(f"{name!r} is no name of a secret: give a new file name, or FOLDER/NAME")
    (run_dir / name).parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(run_dir / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def end_with(pid: int) -> None:
    """End this process, at once, when process `pid` ends; where the kernel cannot tell, nothing is done."""
    opened = getattr(os, "pidfd_open", None)
    if opened is None or pid <= 1:
        return
    try:
        descriptor = opened(pid)
    except OSError:
        os._exit(LOST_PARENT)

    def wait() -> None:
        select.select([descriptor], [], [])
        os._exit(LOST_PARENT)

    threading.Thread(target=wait, name="parent", daemon=True).start()
