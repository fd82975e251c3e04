"""The supervisor of remote agents with a fake cluster: agents, files and messages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from elastic.core.job import fleet
from elastic.domain import codec
from elastic.launcher.ray.remote_agent import AgentSpec
from elastic.launcher.ray.supervisor import (
    LONGEST_QUERY_S,
    WAKE_S,
    ClusterSupervisor,
    RemoteAgent,
)
from elastic.launcher.run.rundir import RunDir
from tests.launcher.helpers import read


class FakeAgent(RemoteAgent):
    """An agent with given logs, which ends when it is killed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.pieces: list[tuple[str, int, bytes]] = []

    def ended(self) -> bool:
        return self.returncode is not None

    def fetch(self) -> list[tuple[str, int, bytes]]:
        found, self.pieces = self.pieces, []
        return found

    def kill(self) -> None:
        self.returncode = -9


class FakeCluster:
    """Machines by name, all with a reserved place."""

    def __init__(self, *names: str) -> None:
        self.names, self.agents, self.requested = names, list[FakeAgent](), list[int]()
        self.specs: list[AgentSpec] = []
        self.missing: list[int] = []
        """Number of missing agents at each look at the machines."""

    def observe(self, missing: int) -> fleet.ClusterObserved:
        self.missing.append(missing)
        found = (
            fleet.Machine(id=n, host=n, domain="zone", reserved=i) for i, n in enumerate(self.names)
        )
        return fleet.ClusterObserved(tuple(found))

    def start(
        self, machine: fleet.Machine, node: str, spec: str, secrets: Mapping[str, bytes]
    ) -> RemoteAgent:
        self.specs.append(codec.loads(AgentSpec, spec))
        self.agents.append(FakeAgent(node))
        return self.agents[-1]

    def request_nodes(self, nodes: int) -> str:
        self.requested.append(nodes)
        return "no autoscaler" if nodes else ""


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster("a", "b")


@pytest.fixture
def notes() -> list[str]:
    """Messages to the user."""
    return []


@pytest.fixture
def supervisor(
    cluster: FakeCluster, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ClusterSupervisor]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    Path("script.py").touch()
    words = ["--backend", "ray", "--nnodes", "1:3", "--run-dir", "run", "script.py"]
    wanted = read(*words)
    run_dir = RunDir(wanted)
    made = ClusterSupervisor(wanted, run_dir, "10.0.0.1:29400", cluster, spares=0)
    monkeypatch.setattr(made._view, "note", notes.append)
    (run_dir.path / "coordinator.json").touch()
    yield made
    run_dir.close()


def test_no_agent_starts_before_the_coordinator_serves(
    supervisor: ClusterSupervisor, cluster: FakeCluster
) -> None:
    """On a busy machine it takes longer than an agent waits for it."""
    announcement = supervisor._path / "coordinator.json"
    announcement.unlink()
    check(supervisor)
    assert not cluster.agents
    announcement.touch()
    check(supervisor)
    assert len(cluster.agents) == 2


def check(supervisor: ClusterSupervisor) -> None:
    supervisor._query_at = 0.0
    supervisor._check_agents()


def test_agents_are_started_and_nodes_requested(
    supervisor: ClusterSupervisor, cluster: FakeCluster, notes: list[str], tmp_path: Path
) -> None:
    check(supervisor)
    assert [host.name for host in cluster.agents] == ["node0", "node1"] and cluster.requested == [3]
    spec = cluster.specs[0]
    assert (spec.node, spec.host, spec.domain, spec.coordinator) == (
        "node0",
        "a",
        "zone",
        "10.0.0.1:29400",
    )
    assert spec.working_dir == str(tmp_path) and ("OMP_NUM_THREADS", "3") in spec.environment
    assert spec.config.max_nodes == 3 and spec.config.command.script == "script.py"
    assert notes == [
        "node0 starts on a; node1 starts on b; 1 of 3 nodes are missing",
        "the request for 3 nodes failed: no autoscaler",
    ]


def test_metrics_addresses_are_copied_here(
    supervisor: ClusterSupervisor, cluster: FakeCluster, tmp_path: Path
) -> None:
    """Prometheus reads them until the agent ends."""
    check(supervisor)
    copied = tmp_path / "run" / "metrics" / "node0.json"
    cluster.agents[0].pieces = [
        ("metrics/node0.json", 0, b"[1]"),
        ("metrics/node1.json", 0, b"not its own"),
    ]
    supervisor._save_logs(cluster.agents[0])
    assert copied.read_bytes() == b"[1]" and [path.name for path in copied.parent.iterdir()] == [
        "node0.json"
    ]
    cluster.agents[0].kill()
    check(supervisor)
    assert not copied.exists()


def test_logs_come_here_and_printed_lines_to_the_console(
    supervisor: ClusterSupervisor,
    cluster: FakeCluster,
    notes: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    check(supervisor)
    host = cluster.agents[0]
    host.pieces = [
        ("node0.out", 0, b"said\n"),
        ("node0/0/0/stdout.log", 0, b"one"),
        ("../../x", 0, b"no"),
    ]
    supervisor._save_logs(host)
    host.pieces = [("node0/0/0/stdout.log", 3, b" two")]
    host.returncode, host.problem = 2, "no room"
    supervisor._check_agents()
    logs = tmp_path / "run" / "logs"
    assert (logs / "node0" / "0" / "0" / "stdout.log").read_text() == "one two"
    assert not (tmp_path / "x").exists() and not (tmp_path / "run" / "x").exists()
    assert supervisor._view._console.flush(60.0), "lines are printed by a thread"
    assert capfd.readouterr().out == "said\n"
    assert notes[-2:] == [
        "node0: no room",
        "node0 has ended; its machine may get another agent in 1 s",
    ]


def test_the_agent_of_a_lost_machine_is_lost(
    supervisor: ClusterSupervisor, cluster: FakeCluster
) -> None:
    check(supervisor)
    cluster.names = ("a",)
    check(supervisor)
    assert [host.returncode for host in cluster.agents] == [None, -9]


def test_a_cluster_that_does_not_change_is_queried_ever_less_often(
    supervisor: ClusterSupervisor, cluster: FakeCluster
) -> None:
    """A table of thousands of machines is not read several times per second."""

    def queries(seconds: float) -> int:
        before, now = len(cluster.missing), supervisor._query_at
        for _ in range(round(seconds / WAKE_S)):
            now += WAKE_S
            if now >= supervisor._query_at:
                supervisor._query(now)
        return len(cluster.missing) - before

    assert queries(60.0) <= 12 and cluster.missing[:2] == [3, 1]
    assert queries(60.0) <= 8
    cluster.names = ("a", "b", "c")
    assert queries(2 * LONGEST_QUERY_S) >= 4, "changes follow each other"
    assert cluster.missing[-1] == 0
    cluster.agents[0].returncode, before = 1, len(cluster.missing)
    supervisor._query_at = math.inf
    supervisor._check_agents()
    assert len(cluster.missing) == before + 1 and cluster.missing[-1] == 1, "at once"


def test_waiting_is_reported_ever_less_often(
    supervisor: ClusterSupervisor, cluster: FakeCluster, notes: list[str]
) -> None:
    cluster.names = ()
    start = supervisor._waiting_since
    for seconds, count in ((1, 0), (11, 1), (12, 1), (30, 1), (32, 2)):
        supervisor._report_missing_nodes(start + seconds)
        assert notes == ["waiting for nodes: 0 of at least 1 are running"] * count, seconds
