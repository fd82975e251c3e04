"""Supervisor of `elastic run` with agents on the machines of a cluster.

The coordinator runs beside the launcher, so RUN_DIR is on the user's machine.
`elastic.core.job.fleet` decides which machines have agents, and an `AgentCluster` starts them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from elastic.config import JobConfig
from elastic.core.job import fleet
from elastic.domain import codec
from elastic.domain.errors import FieldError
from elastic.launcher.flags.request import Request
from elastic.launcher.flags.validators import PRIVATE_CERTS
from elastic.launcher.ray.remote_agent import CONSOLE, AgentSpec
from elastic.launcher.run.processes import Child
from elastic.launcher.run.rundir import RunDir
from elastic.launcher.run.supervisor import Supervisor
from elastic.metrics import FOLDER, discovery, write_discovery
from elastic.rpc.security.tls import CA, CERT, KEY, TOKEN_FILE

WAKE_S = 0.25
"""Interval between looks at the agents, because actors send no signals."""
FIRST_QUERY_S, LONGEST_QUERY_S = 0.5, 8.0
"""Interval between two queries of all machines of the cluster. It doubles while nothing changes."""
FIRST_NOTICE_S = 10.0
"""Time without enough nodes after which the user is informed; then twice as long each time."""
CARRIED = ("PYTHONPATH", "OMP_NUM_THREADS")
"""Environment variables that agents get from the launcher. Set others in the cluster."""


class RemoteAgent(Child):
    """An agent on another machine, handled like a child process. Losing it raises nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.returncode: int | None = None
        self.lost = False
        """Whether the machine or the connection to it was lost."""
        self.problem = ""
        """Reason why the agent did not start, or ended; "": none."""
        self.offsets: dict[str, int] = {}
        """Bytes that were fetched of each log file, by path below the log directory."""

    def fetch(self) -> list[tuple[str, int, bytes]]:
        """Return (path, offset, bytes) of logs that came since the last call. Does not wait."""
        raise NotImplementedError


class AgentCluster(Protocol):
    """A cluster on whose machines the supervisor starts agents."""

    def observe(self, missing: int) -> fleet.ClusterObserved:
        """Return the machines of the cluster now. `missing`: number of further agents to start."""

    def start(
        self, machine: fleet.Machine, node: str, spec: str, secrets: Mapping[str, bytes]
    ) -> RemoteAgent:
        """Start an agent on a machine, without waiting for it."""

    def request_nodes(self, nodes: int) -> str:
        """Request capacity for `nodes` agents in total (0: none); return a problem, or ""."""


class ClusterSupervisor(Supervisor):
    """Supervisor of a job with its coordinator on this machine and its agents on a cluster."""

    def __init__(
        self, request: Request, run_dir: RunDir, address: str, cluster: AgentCluster, spares: int
    ) -> None:
        host = address.rpartition(":")[0].strip("[]")
        super().__init__(request, run_dir, address, hosted=(address,), host=host)
        self._cluster = cluster
        self._fleet = fleet.Fleet(wanted=self._config.max_nodes, spares=spares)
        self._query_at, self._query_s = 0.0, FIRST_QUERY_S
        self._observed: fleet.ClusterObserved | None = None
        self._served = False
        self._secrets_read: Mapping[str, bytes] = {}
        self._waiting_since, self._notice_after_s = time.monotonic(), FIRST_NOTICE_S
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
        super()._sleep(wake, min(seconds, WAKE_S))
        for agent in self._agents:
            if isinstance(agent, RemoteAgent):
                self._save_logs(agent)

    def _check_agents(self) -> None:
        for agent in self._agents:
            if (
                agent.ended()
                and agent.name not in self._reported
                and isinstance(agent, RemoteAgent)
            ):
                self._reported.add(agent.name)
                self._agent_ended(agent)
        now = time.monotonic()
        if now >= self._query_at and self._code is None and self._coordinator_serves():
            self._query(now)
            self._report_missing_nodes(now)

    def _coordinator_serves(self) -> bool:
        """Return whether the coordinator has announced itself. An agent that starts before gives
        up after some seconds, because it may be on a machine that cannot reach it."""
        self._served = self._served or (self._path / "coordinator.json").exists()
        return self._served

    def _query(self, now: float) -> None:
        """Look at the machines of the cluster. Of a large cluster this is much data."""
        before, self._observed = self._observed, self._cluster.observe(self._fleet.missing)
        changed = before != self._observed
        self._query_s = FIRST_QUERY_S if changed else min(LONGEST_QUERY_S, 2 * self._query_s)
        self._query_at = now + self._query_s
        self._apply(self._observed)

    def _agent_ended(self, agent: RemoteAgent) -> None:
        self._save_logs(agent)
        self._query_at, self._query_s = 0.0, FIRST_QUERY_S
        discovery(self._path, agent.name).unlink(missing_ok=True)
        if agent.problem:
            self._view.note(f"{agent.name}: {agent.problem}")
        self._apply(fleet.AgentEnded(agent.name, None if agent.lost else agent.returncode))

    def _apply(self, event: fleet.FleetEvent) -> None:
        """Pass an event to `elastic.core.job.fleet` and carry out the actions that it returns."""
        self._fleet, actions, reason = fleet.transition(self._fleet, event, time.monotonic())
        if reason:
            self._view.note(reason)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: fleet.FleetAction) -> None:
        match action:
            case fleet.StartAgent(node, machine):
                text = codec.dumps(agent_spec(self._config, machine, node, self._address))
                self._agents.append(self._cluster.start(machine, node, text, self._secrets()))
            case fleet.ForgetAgent(node):
                for agent in self._agents:
                    if agent.name == node:
                        self._reported.add(node)
                        agent.kill()
            case fleet.RequestNodes(nodes):
                if problem := self._cluster.request_nodes(nodes):
                    self._view.note(f"the request for {nodes} nodes failed: {problem}")
            case fleet.GiveUp(reason):
                self._view.note(f"{reason}; logs are in {self._logs}")
                self._code = 1

    def _secrets(self) -> Mapping[str, bytes]:
        """Return the secrets; certificates are renewed, so each call reads them again if it can."""
        try:
            self._secrets_read = secrets(self._config, self._path)
        except OSError as error:
            if not self._secrets_read:
                problem = f"it cannot be read ({error})"
                raise FieldError("--certs", self._config.certs, problem) from error
            self._view.note(f"certificates cannot be read; new agents get earlier ones: {error}")
        return self._secrets_read

    def _report_missing_nodes(self, now: float) -> None:
        """Inform the user from time to time while fewer nodes run than training needs."""
        running, needed = self._fleet.running, self._config.min_nodes
        if running >= needed:
            self._waiting_since, self._notice_after_s = now, FIRST_NOTICE_S
        elif now - self._waiting_since > self._notice_after_s:
            self._waiting_since, self._notice_after_s = now, 2 * self._notice_after_s
            self._view.note(f"waiting for nodes: {running} of at least {needed} are running")

    def _save_logs(self, agent: RemoteAgent) -> None:
        """Write fetched logs to the log directory here, and print the agent's output."""
        for name, offset, data in agent.fetch():
            path = self._logs / name
            if Path(name).is_absolute() or ".." in Path(name).parts:
                continue
            if name == f"{FOLDER}/{agent.name}.json":
                write_discovery(discovery(self._path, agent.name), data)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if path.exists() else "wb") as file:
                file.truncate(offset)  # 0 for a new file, after the former one was full
                file.seek(offset)
                file.write(data)
            if name == CONSOLE.format(node=agent.name):
                self._view.put(agent.name, data)


def agent_spec(config: JobConfig, machine: fleet.Machine, node: str, coordinator: str) -> AgentSpec:
    """Return the specification of the agent of node `node` on `machine`."""
    environment = tuple((name, os.environ[name]) for name in CARRIED if name in os.environ)
    return AgentSpec(
        config=config,
        node=node,
        coordinator=coordinator,
        host=machine.host,
        domain=machine.domain,
        working_dir=os.getcwd(),
        environment=environment,
    )


def secrets(config: JobConfig, run_dir: Path) -> Mapping[str, bytes]:
    """Return join token and certificates for an agent, by path below its run directory.

    They travel as an argument, never on a command line. Only the agent's user can read the files.
    """
    files = {TOKEN_FILE: run_dir / TOKEN_FILE}
    if config.certs:
        names = (CA, CERT, KEY)
        files |= {f"{PRIVATE_CERTS}/{name}": Path(config.certs, name) for name in names}
    return {name: path.read_bytes() for name, path in files.items()}
