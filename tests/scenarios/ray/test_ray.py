"""Training on a real four-node Ray cluster with killed raylets equals a plain run bit for bit."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from elastic.rpc.security.tls import Certificates
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S
from tests.scenarios.harness import proved
from tests.scenarios.paced import paced, paced_reference
from tests.scenarios.ray.ray_cluster import Job, has_agent, ray_cluster, raylet
from tests.scenarios.shared import exact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not find_spec("ray"), reason="ray is optional: pip install 'elastic-runtime[ray]'"
    ),
]

FOUR_NEEDED = ("--node-memory", "14KiB")
"""Three nodes of 16 KB each have no room: the job waits for a fourth node, however long."""
TOLD_OFTEN = ("--heartbeat", "0.1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(4) as found:
        yield found


def start(cluster: Any, run_dir: Path, *flags: str) -> Job:
    words = ["--address", cluster.address, *exact("--pipelines", "1", *TOLD_OFTEN, *flags)]
    return Job(run_dir, words, paced(run_dir.with_suffix(".hurry")))


def mid_step(step: int) -> Any:
    """Return a condition that holds for progress well inside this step or a later one."""

    def holds(entry: dict[str, Any]) -> bool:
        running = entry.get("phase") == "running" and entry.get("loss") is None
        return (
            running
            and int(entry.get("step", 0)) >= step
            and 1 <= int(entry.get("microbatch", 0)) <= 3
        )

    return holds


@pytest.mark.chaos
def test_a_raylet_is_killed_in_a_step_and_a_node_added(cluster: Any, tmp_path: Path) -> None:
    job = start(cluster, tmp_path / "run", "--nnodes", "4", "--metrics-port", "0", *FOUR_NEEDED)
    told = tmp_path / "run" / "metrics"
    try:
        job.until(lambda entry: entry.get("phase") == "running" and entry.get("nodes") == 4)
        assert wait_until(lambda: len(list(told.glob("node?.json"))) == 4), (
            "every agent serves metrics"
        )
        assert "elastic_vault_bytes" in scraped(told / "node3.json", tmp_path / "run" / "job-certs")
        job.until(mid_step(3))
        victim = next(node for node in cluster.worker_nodes if has_agent(node))
        raylet(victim).send_signal(signal.SIGKILL)
        cluster.remove_node(victim, allow_graceful=False)
        job.until(lambda entry: entry.get("phase") == "paused")
        cluster.add_node(num_cpus=1, wait=False)
        job.until(lambda entry: entry.get("phase") == "running")
        (tmp_path / "run.hurry").touch()
        assert job.wait() == 0, job.output
    finally:
        job.close()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    lost = summary["recoveries"][0]
    assert (lost["nodes_before"], lost["nodes_after"]) == (4, 4) and not lost["planned"], lost
    assert summary["params_sha256"] == paced_reference(tmp_path).summary["params_sha256"]
    assert summary["ledger"] == proved(summary)
    assert "node4 starts on" in job.output
    logs = sorted(path.name for path in (tmp_path / "run" / "logs").glob("node*.log"))
    assert logs == [f"node{i}.log" for i in range(5)], "the logs of every node are here"
    assert wait_until(lambda: not job.processes()), job.processes()
    assert list(told.iterdir()) == [], "nobody is to be asked any more"


def scraped(discovery: Path, certs: Path) -> str:
    """Metrics that a process serves at the address in its discovery file."""
    ((found,),) = [one["targets"] for one in json.loads(discovery.read_text())]
    contexts = Certificates(certs)
    host, _, port = found.rpartition(":")
    context = contexts.client()
    context.check_hostname = False  # their one name is the job's
    with closing(
        http.client.HTTPSConnection(host, int(port), context=context, timeout=LONG_S)
    ) as connection:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()


def test_a_machine_that_others_use_gets_no_claim_before_it_is_free(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray does not tell the free resources of a machine, but grants no claim without them."""
    import ray

    from elastic.launcher.ray import ray as launcher

    monkeypatch.setattr(launcher, "CLAIM_S", 0.0)
    monkeypatch.setattr(launcher, "FULL_S", 0.0)
    ray.init(address=cluster.address, log_to_driver=False)
    claims = launcher.NodeClaims({"CPU": 1.0})
    try:
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        used = sorted(nodes)[0]
        other = launcher.NodeClaims({"CPU": 1.0})
        assert wait_until(lambda: other.granted({used: nodes[used]}, 1) == {used})
        assert wait_until(lambda: claims.granted(nodes, 4) == nodes.keys() - {used})
        assert all(used not in claims.granted(nodes, 4) for _ in range(20))
        other.close()
        assert wait_until(lambda: claims.granted(nodes, 4) == nodes.keys())
        assert len(claims.granted(nodes, 4)) == 4 and claims.granted(nodes, 0) == set()
        assert wait_until(lambda: ray.available_resources().get("CPU") == 4.0), "all are withdrawn"
    finally:
        claims.close()
        ray.shutdown()


def test_an_agent_is_replaced_and_nothing_outlives_the_driver(cluster: Any, tmp_path: Path) -> None:
    flags = ("--nnodes", "2:3", "--ray-spares", "0")
    job = start(cluster, tmp_path / "run", *flags)
    try:
        job.until(lambda entry: entry.get("phase") == "running" and entry.get("nodes") == 3)
        job.agent("node1").kill()
        for nodes in (2, 3):
            job.until(lambda entry, nodes=nodes: entry.get("nodes") == nodes)  # type: ignore[misc]
        assert "node3 starts on" in job.output
        assert wait_until(lambda: len(job.processes()) == 1 + 2 * 3), "coordinator, agents, workers"
        os.kill(job.process.pid, signal.SIGKILL)
        assert wait_until(lambda: not job.processes()), job.processes()
    finally:
        job.close()
