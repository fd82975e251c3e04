"""The supervisor of agents elsewhere, over a cluster that is played: what it starts, writes and says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from elastic.core.job import fleet
from elastic.domain import codec
from elastic.launcher.ray.remote_agent import Order
from elastic.launcher.ray.supervisor import ClusterSupervisor, Host
from elastic.launcher.run.rundir import RunDir
from tests.launcher.helpers import read


class PlayedHost(Host):
    """An agent that ends when it is told to, with logs that are given."""

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


class PlayedCluster:
    """Machines by name, all in the gang."""

    def __init__(self, *names: str) -> None:
        self.names, self.hosts, self.asked = names, list[PlayedHost](), list[int]()
        self.orders: list[Order] = []

    def look(self) -> fleet.ClusterObserved:
        found = (fleet.Machine(id=n, host=n, domain="zone", reserved=i) for i, n in enumerate(self.names))
        return fleet.ClusterObserved(tuple(found))

    def start(self, machine: fleet.Machine, node: str, order: str, secrets: Mapping[str, bytes]) -> Host:
        self.orders.append(codec.loads(Order, order))
        self.hosts.append(PlayedHost(node))
        return self.hosts[-1]

    def ask(self, nodes: int) -> str:
        self.asked.append(nodes)
        return "no autoscaler" if nodes else ""


@pytest.fixture
def cluster() -> PlayedCluster:
    return PlayedCluster("a", "b")


@pytest.fixture
def notes() -> list[str]:
    """What the user is told."""
    return []


@pytest.fixture
def supervisor(
    cluster: PlayedCluster, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ClusterSupervisor]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    Path("script.py").touch()
    words = ["--backend", "ray", "--nnodes", "1:3", "--run-dir", "run", "script.py"]
    wanted = read(*words)
    run_dir = RunDir(wanted)
    made = ClusterSupervisor(wanted, run_dir, "10.0.0.1:29400", cluster, spares=0)
    monkeypatch.setattr(made._view, "note", notes.append)
    yield made
    run_dir.close()


def look(supervisor: ClusterSupervisor) -> None:
    supervisor._next_look = 0.0
    supervisor._look_at_agents()


def test_agents_are_ordered_and_nodes_asked_for(
    supervisor: ClusterSupervisor, cluster: PlayedCluster, notes: list[str], tmp_path: Path
) -> None:
    look(supervisor)
    assert [host.name for host in cluster.hosts] == ["node0", "node1"] and cluster.asked == [3]
    order = cluster.orders[0]
    assert (order.node, order.host, order.domain, order.coordinator) == (
        "node0",
        "a",
        "zone",
        "10.0.0.1:29400",
    )
    assert order.folder == str(tmp_path) and ("OMP_NUM_THREADS", "3") in order.environment
    assert order.config.max_nodes == 3 and order.config.command.script == "script.py"
    assert notes == [
        "node0 starts on a; node1 starts on b; 1 of 3 nodes are missing",
        "the cluster cannot be asked for nodes: no autoscaler",
    ]


def test_where_agents_serve_metrics_is_told_here(
    supervisor: ClusterSupervisor, cluster: PlayedCluster, tmp_path: Path
) -> None:
    """For Prometheus, which reads it beside the coordinator's, until the agent is gone."""
    look(supervisor)
    told = tmp_path / "run" / "metrics" / "node0.json"
    cluster.hosts[0].pieces = [("metrics/node0.json", 0, b"[1]"), ("metrics/node1.json", 0, b"not its own")]
    supervisor._keep(cluster.hosts[0])
    assert told.read_bytes() == b"[1]" and [path.name for path in told.parent.iterdir()] == ["node0.json"]
    cluster.hosts[0].kill()
    look(supervisor)
    assert not told.exists()


def test_logs_come_here_and_printed_lines_to_the_console(
    supervisor: ClusterSupervisor,
    cluster: PlayedCluster,
    notes: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    look(supervisor)
    host = cluster.hosts[0]
    host.pieces = [("node0.out", 0, b"said\n"), ("node0/0/0/stdout.log", 0, b"one"), ("../../x", 0, b"no")]
    supervisor._keep(host)
    host.pieces = [("node0/0/0/stdout.log", 3, b" two")]
    host.returncode, host.problem = 2, "no room"
    supervisor._look_at_agents()
    logs = tmp_path / "run" / "logs"
    assert (logs / "node0" / "0" / "0" / "stdout.log").read_text() == "one two"
    assert not (tmp_path / "x").exists() and not (tmp_path / "run" / "x").exists()
    assert capfd.readouterr().out == "said\n"
    assert notes[-2:] == ["node0: no room", "node0 has ended; its machine may get another agent in 1 s"]


def test_a_lost_machine_takes_its_agent_along(supervisor: ClusterSupervisor, cluster: PlayedCluster) -> None:
    look(supervisor)
    cluster.names = ("a",)
    look(supervisor)
    assert [host.returncode for host in cluster.hosts] == [None, -9]


def test_waiting_is_told_but_not_all_the_time(
    supervisor: ClusterSupervisor, cluster: PlayedCluster, notes: list[str]
) -> None:
    cluster.names = ()
    start = supervisor._told_at
    for seconds, told in ((1, 0), (11, 1), (12, 1), (30, 1), (32, 2)):
        supervisor._tell_what_is_missing(start + seconds)
        assert notes == ["waiting for nodes: 0 of at least 1 are there"] * told, seconds
