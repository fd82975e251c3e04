"""`elastic run` with agents on the machines of a cluster: the supervisor of `local`, with other hands.

The coordinator runs here, beside the launcher: RUN_DIR lies where the user is, and there is one end to the job. Which
machines hold agents is decided by `elastic.core.job.fleet`; the cluster that carries it out is given (`ray` has one).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from elastic.config import JobConfig
from elastic.core.job import fleet
from elastic.domain import codec
from elastic.domain.errors import FieldError
from elastic.launcher.flags.guarding import PRIVATE
from elastic.launcher.flags.request import Request
from elastic.launcher.ray.remote_agent import CONSOLE, Order
from elastic.launcher.run.processes import Child
from elastic.launcher.run.progress import Bar
from elastic.launcher.run.rundir import RunDir
from elastic.launcher.run.supervisor import Supervisor
from elastic.metrics import FOLDER, discovery, write_discovery
from elastic.rpc.security.tls import CA, CERT, KEY, TOKEN_FILE

LOOK_S = 0.25
"""How often the cluster is asked for its machines."""
PATIENCE_S = 10.0
"""After which it is said what is waited for; again after twice as long."""
CARRIED = ("PYTHONPATH", "OMP_NUM_THREADS")
"""Variables that agents get from the launcher; more of them is what the cluster's own job environment is for."""


class Host(Child):
    """An agent on another machine; looks like a child. Nothing here raises when its machine is lost."""

    def __init__(self, name: str) -> None:
        self.name, self.started = name, time.monotonic()
        self.returncode: int | None = None
        self.lost = False
        """Nothing more was heard of it."""
        self.problem = ""
        """Why it could not start, or what was heard last."""
        self.offsets: dict[str, int] = {}
        """How much of each log file is here, by path relative to the directory of logs."""

    @property
    def pid(self) -> int:
        return 0  # it is not ours

    def fetch(self) -> list[tuple[str, int, bytes]]:
        """(path, offset, bytes) of logs that have come since the last call; never waits."""
        raise NotImplementedError


class Cluster(Protocol):
    """What the supervisor needs of a cluster."""

    def look(self) -> fleet.ClusterObserved:
        """Its machines at this moment."""

    def start(self, machine: fleet.Machine, node: str, order: str, secrets: Mapping[str, bytes]) -> Host:
        """Start an agent there, without waiting for it."""

    def ask(self, nodes: int) -> str:
        """Ask for room for so many agents in all (0: withdraw); return what was wrong, or ""."""


class ClusterSupervisor(Supervisor):
    """Owns the coordinator here and the agents out there."""

    def __init__(
        self, request: Request, run_dir: RunDir, address: str, cluster: Cluster, spares: int
    ) -> None:
        super().__init__(
            request, run_dir, address, mine=(address,), host=address.rpartition(":")[0].strip("[]")
        )
        self._cluster = cluster
        self._fleet = fleet.Fleet(wanted=self._config.max_nodes, spares=spares)
        self._next_look = 0.0
        self._known: Mapping[str, bytes] = {}
        self._told_at, self._patience_s = time.monotonic(), PATIENCE_S
        self._logs = Path(self._config.log_dir or self._path / "logs")

    def run(self) -> int:
        try:
            return super().run()
        finally:
            for agent in self._agents:
                discovery(self._path, agent.name).unlink(missing_ok=True)

    def _start(self) -> None:
        self._coordinators.start()
        self._view.note(f"coordinator at {self._address}; run directory {self._path}")

    def _sleep(self, wake: int, seconds: float) -> None:
        super()._sleep(wake, min(seconds, LOOK_S))  # no signal tells of an agent elsewhere
        for agent in self._agents:
            if isinstance(agent, Host):
                self._keep(agent)

    def _look_at_agents(self) -> None:
        for agent in self._agents:
            if agent.ended() and agent.name not in self._noted and isinstance(agent, Host):
                self._noted.add(agent.name)
                self._gone(agent)
        now = time.monotonic()
        if now >= self._next_look and self._code is None:
            self._next_look = now + LOOK_S
            self._take(self._cluster.look())
            self._tell_what_is_missing(now)

    def _gone(self, agent: Host) -> None:
        self._keep(agent)
        discovery(self._path, agent.name).unlink(missing_ok=True)
        if agent.problem:
            self._view.note(f"{agent.name}: {agent.problem}")
        self._take(fleet.AgentEnded(agent.name, None if agent.lost else agent.returncode))

    def _take(self, event: fleet.FleetEvent) -> None:
        self._fleet, actions, reason = fleet.transition(self._fleet, event, time.monotonic())
        if reason:
            self._view.note(reason)
        for action in actions:
            self._act(action)

    def _act(self, action: fleet.FleetAction) -> None:
        match action:
            case fleet.StartAgent(node, machine):
                text = codec.dumps(order(self._config, machine, node, self._address))
                self._agents.append(self._cluster.start(machine, node, text, self._secrets()))
            case fleet.ForgetAgent(node):
                for agent in self._agents:
                    if agent.name == node:
                        self._noted.add(node)
                        agent.kill()
            case fleet.RequestNodes(nodes):
                if problem := self._cluster.ask(nodes):
                    self._view.note(f"the cluster cannot be asked for nodes: {problem}")
            case fleet.GiveUp(reason):
                self._view.note(f"{reason}; logs are in {self._logs}")
                self._code = 1

    def _secrets(self) -> Mapping[str, bytes]:
        """As they are now, since certificates are renewed; as they were, while they cannot be read."""
        try:
            self._known = secrets(self._config, self._path)
        except OSError as error:
            if not self._known:
                raise FieldError("--certs", self._config.certs, f"it cannot be read ({error})") from error
            self._view.note(f"new agents get the certificates that were read before: {error}")
        return self._known

    def _tell_what_is_missing(self, now: float) -> None:
        """Say it now and then, while the job cannot run for want of nodes."""
        if self._fleet.running >= self._config.min_nodes:
            self._told_at, self._patience_s = now, PATIENCE_S
        elif now - self._told_at > self._patience_s:
            self._told_at, self._patience_s = now, 2 * self._patience_s
            least = self._config.min_nodes
            self._view.note(f"waiting for nodes: {self._fleet.running} of at least {least} are there")

    def _keep(self, agent: Host) -> None:
        """Write what came of its logs under the same names here; what it printed goes to the console too."""
        for name, offset, data in agent.fetch():
            path = self._logs / name
            if Path(name).is_absolute() or ".." in Path(name).parts:
                continue
            if name == f"{FOLDER}/{agent.name}.json":
                write_discovery(discovery(self._path, agent.name), data)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if path.exists() else "wb") as file:
                file.seek(offset)
                file.write(data)
            if name == CONSOLE.format(node=agent.name):
                console = self._view.output if isinstance(self._view, Bar) else sys.stdout.fileno()
                with contextlib.suppress(OSError):  # nobody looks; the run goes on
                    os.write(console, data)


def order(config: JobConfig, machine: fleet.Machine, node: str, coordinator: str) -> Order:
    """What the agent of this machine shall be."""
    return Order(
        config=config,
        node=node,
        coordinator=coordinator,
        host=machine.host,
        domain=machine.domain,
        folder=os.getcwd(),
        environment=tuple((name, os.environ[name]) for name in CARRIED if name in os.environ),
    )


def secrets(config: JobConfig, run_dir: Path) -> Mapping[str, bytes]:
    """What an agent needs to be let in: the join token and the certificates, by their path below a run directory. They
    are read here, carried as an argument, and written on the agent's machine where only its user reads them."""
    files = {TOKEN_FILE: run_dir / TOKEN_FILE}
    if config.certs:
        files |= {f"{PRIVATE}/{name}": Path(config.certs, name) for name in (CA, CERT, KEY)}
    return {name: path.read_bytes() for name, path in files.items()}
