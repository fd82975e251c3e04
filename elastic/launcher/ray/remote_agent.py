"""One agent for a launcher on another machine, run by an actor. Imports no cluster's library.

The actor gets the specification and the secrets as arguments, so that no secret is on a command
line. It makes its own run directory, which it removes at the end. The launcher fetches the logs
from there piece by piece.

No process is orphaned: the agent watches a pipe of the actor's process, and that process watches
its parent. So agent and workers end with the actor, and the actor with the cluster's daemon.
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
from elastic.launcher.flags.request import Request, memory_root
from elastic.launcher.flags.validators import PRIVATE_CERTS, is_loopback
from elastic.launcher.run.metrics_endpoint import remote_agent_flag
from elastic.launcher.run.processes import Child
from elastic.launcher.run.rundir import RunDir, remove_stale
from elastic.launcher.run.supervisor import agent_args
from elastic.metrics import FOLDER

AGENT = "elastic.agent.service"
CONSOLE = "{node}.out"
"""Log file with the output of the agent, and of its workers unless that goes to files only."""
CONNECT_TIMEOUT_S = 10.0
"""Time for the first connection to the coordinator."""
MAX_LOG_BYTES = 1 << 20
"""Most bytes of logs in one answer."""
NEW_LOCK_S = 60.0
"""Age of a lock file up to which its process may not have locked it yet."""
EXIT_PARENT_LOST = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """Specification of a remote agent."""

    version: str = VERSION
    config: JobConfig
    """The launcher's configuration; local directories replace its own, except for checkpoints."""
    node: str
    coordinator: str
    host: str
    domain: str = ""
    working_dir: str = ""
    """Working directory of the workers, if it exists on this machine; "": the actor's."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables to set besides the actor's own."""


class AgentHost:
    """Actor that runs one agent on its machine. While `serve` blocks, other methods are called."""

    def __init__(self, spec: str, secrets: Mapping[str, bytes] | None = None) -> None:
        """`spec`: an encoded AgentSpec. `secrets`: contents by path below the run directory."""
        self._text, self._secrets = spec, dict(secrets or {})
        self._child: Child | None = None
        self._dir: RunDir | None = None
        self._stopped = False

    def serve(self) -> tuple[int, str]:
        """Run the agent to its end; return (exit code or -signal, why it did not start or "")."""
        try:
            spec = codec.loads(AgentSpec, self._text)
            _check(spec)
            child = self._start(spec)
        except (ElasticError, OSError) as error:
            return getattr(error, "exit_code", EXIT_FAILURE), str(error)
        while not child.ended():
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        return child.returncode or 0, ""

    def logs(self, offsets: Mapping[str, int]) -> list[tuple[str, int, bytes]]:
        """Return (relative path, offset, bytes) of log files beyond `offsets`, up to MAX_LOG_BYTES.

        If the agent serves metrics, metrics/NODE.json comes first.
        """
        left, found, run_dir = MAX_LOG_BYTES, [], self._dir
        if run_dir is None:
            return []
        logs = Path(run_dir.config.log_dir)
        metrics, others = sorted((run_dir.path / FOLDER).glob("*.json")), sorted(logs.rglob("*"))
        files = {f"{FOLDER}/{path.name}": path for path in metrics}
        files |= {str(path.relative_to(logs)): path for path in others}
        for name, path in files.items():
            offset = offsets.get(name, 0)
            if path.suffix[1:].isdigit():  # a full file, which was sent under its former name
                continue
            with contextlib.suppress(OSError):  # a directory, or just removed
                if path.stat().st_size < offset:  # a new file was begun
                    offset = 0
                if path.stat().st_size > offset and left > 0 and path.is_file():
                    with path.open("rb") as file:
                        file.seek(offset)
                        data = file.read(left)
                    left -= len(data)
                    found.append((name, offset, data))
        return found

    def stop(self, kill: bool = False) -> None:
        """End the agent: by SIGTERM, or with `kill` by SIGKILL."""
        self._stopped = True
        if self._child is not None:
            if kill:
                self._child.kill()
            else:
                self._child.terminate()

    def close(self) -> None:
        """Kill the agent and remove its directories."""
        self.stop(kill=True)
        run_dir, self._dir = self._dir, None
        if run_dir is not None:
            run_dir.close()
            shutil.rmtree(run_dir.path, ignore_errors=True)

    def _start(self, spec: AgentSpec) -> Child:
        end_with(os.getppid())
        os.environ.update(spec.environment)
        if spec.working_dir and os.path.isdir(spec.working_dir):
            os.chdir(spec.working_dir)
        self._dir = run_dir = RunDir(_request(spec))
        config = run_dir.config
        for name, data in self._secrets.items():
            write_secret(run_dir.path, name, data)
        args = agent_args(config, spec.node, 0, spec.coordinator, spec.host)
        args += remote_agent_flag(config)
        with Path(config.log_dir, CONSOLE.format(node=spec.node)).open("ab") as out:
            child = Child(spec.node, AGENT, args, os.pipe()[0], out)
        self._child = child
        if self._stopped:
            child.terminate()
        return child


def _check(spec: AgentSpec) -> None:
    """Raise UsageError if this machine has another version or does not reach the coordinator."""
    if spec.version != VERSION:
        versions = f"{spec.host} has elastic {VERSION}, the launcher {spec.version}"
        raise UsageError(f"{versions}: install the same version on both")
    host, _, port = spec.coordinator.rpartition(":")
    place = host.strip("[]"), int(port)
    end = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            socket.create_connection(place, timeout=CONNECT_TIMEOUT_S).close()
            return
        except OSError as error:
            if time.monotonic() < end:
                time.sleep(0.1)
                continue
            raise UsageError(
                f"{spec.host} cannot reach the coordinator at {spec.coordinator} "
                f"({error.strerror or error}): give an address that it reaches as "
                "--rdzv-endpoint HOST:PORT, or run the launcher inside the cluster"
            ) from error


def _request(spec: AgentSpec) -> Request:
    """Return the request of a launcher of only this agent, with directories of this machine."""
    root = Path(tempfile.gettempdir(), f"elastic-hosted-{os.getuid()}")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(f"{root} is open to other users: remove it, or set another TMPDIR")
    remove_stale(root.glob("*/"), "launcher.lock", NEW_LOCK_S)
    name = f"{spec.config.job_id}-{spec.node}"
    path, metrics_host = root / name, spec.config.metrics_host
    config = spec.config.of(
        run_dir=str(path),
        log_dir=str(path / "logs"),
        memory_dir=str(memory_root() / f"elastic-{name}"),
        certs=str(path / PRIVATE_CERTS) if spec.config.certs else "",
        domains=(spec.domain,) if spec.domain else spec.config.domains[:1],
        metrics_host=metrics_host if is_loopback(metrics_host) else spec.host,
    )
    return Request(config=config, nodes=(spec.node,), hosts=False, signals=())


def write_secret(run_dir: Path, name: str, data: bytes) -> None:
    """Write a secret, as join.token or job-certs/tls.key, readable for this user only.

    Raises UsageError if `name` exists or leads outside the run directory.
    """
    part = r"[A-Za-z0-9][\w.-]*"
    if not re.fullmatch(rf"(?:{part}/)?{part}", name) or (run_dir / name).exists():
        raise UsageError(f"{name!r} is no name of a secret: give a new file name, or FOLDER/NAME")
    (run_dir / name).parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(run_dir / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def end_with(pid: int) -> None:
    """End this process when process `pid` ends. No effect on systems without pidfd_open."""
    pidfd_open = getattr(os, "pidfd_open", None)
    if pidfd_open is None or pid <= 1:
        return
    try:
        descriptor = pidfd_open(pid)
    except OSError:
        os._exit(EXIT_PARENT_LOST)

    def wait() -> None:
        select.select([descriptor], [], [])
        os._exit(EXIT_PARENT_LOST)

    threading.Thread(target=wait, name="parent", daemon=True).start()
