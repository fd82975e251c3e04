"""The coordinator's own network fails while its nodes train: nobody is lost.

The nodes and the coordinator are separate commands, as on several machines. In one test each has a
network namespace, and the coordinator's cable is pulled. The others connect through a proxy that
delays, stalls and resets the connections to the coordinator.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kubernetes.network import Network, missing
from tests.scenarios.jobs import Job
from tests.scenarios.network.proxy import Proxy
from tests.scenarios.paced import paced, paced_reference
from tests.store.etcds import free_ports

NODES, LEASE = 3, ("--lease", "3")
"""The default lease. The tests are about what happens when it runs out."""
Begin = Callable[..., Job]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """begin(NAME, words..., inside=NAMESPACE) runs `elastic` for a job of three nodes."""
    token, jobs = tmp_path / "token", list[Job]()
    token.write_text("of all machines of this job\n")
    common = ["--nnodes", str(NODES), "--rdzv-id", "cut", "--join-token-file", str(token), *LEASE]
    common += ["--accumulate", "exact", "--pipelines", "1", "--backup", "stream+snapshot"]
    common += ["--checkpoint-dir", str(tmp_path / "checkpoints")]

    def start(name: str, *words: str, inside: str = "") -> Job:
        prefix = ("ip", "netns", "exec", inside) if inside else ()
        words = (*words, *(("--insecure",) if inside else ()))
        script = paced(tmp_path / "hurry")
        jobs.append(Job(tmp_path / name, [*words, *common], script, prefix=prefix))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


def check_undisturbed(head: Job, nodes: list[Job], folder: Path) -> None:
    """Let the job end; nobody was lost, nothing was repeated, and the parameters are the same."""
    head.await_steps(2)
    (folder / "hurry").touch()
    run = head.finish()
    assert run.code == 0, run.output
    assert [node.finish().code for node in nodes] == [0] * NODES, [node.output for node in nodes]
    assert not head.of("lost") and [event["epoch"] for event in head.of("plan")] == [1]
    assert run.summary["recoveries"] == []
    assert run.summary["params_sha256"] == paced_reference(folder).summary["params_sha256"]


def test_the_cable_of_the_coordinator_is_pulled(begin: Begin, tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    with contextlib.closing(Network()) as network:
        place, address = network.add("head")
        head = begin("head", "coordinator", "--address", f"{address}:29400", inside=place)
        nodes = [
            begin(
                f"machine{number}", "agent", "--coordinator", f"{address}:29400",
                inside=network.add(f"node{number}")[0],
            )
            for number in range(NODES)
        ]  # fmt: skip
        head.await_steps(2)
        network.cut(place)
        head.wait("doubt", lambda: head.of("doubt"))
        network.heal(place)
        head.wait("the nodes", lambda: head.of("doubt-over"))
        check_undisturbed(head, nodes, tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("rtt_s", [0.0, 0.08, 0.2])
def test_cuts_and_resets_of_the_network_of_the_coordinator(
    begin: Begin, tmp_path: Path, rtt_s: float
) -> None:
    """Cuts of 1 to 20 s, with resets before, during and after them, in random order."""
    rng, target = random.Random(int(rtt_s * 1000)), f"127.0.0.1:{free_ports(1)[0]}"
    with contextlib.closing(Proxy(target, rtt_s)) as proxy:
        head = begin("head", "coordinator", "--address", target)
        nodes = [
            begin(f"machine{number}", "agent", "--coordinator", proxy.address)
            for number in range(NODES)
        ]
        head.await_steps(2)
        if rtt_s:
            head.wait("a measurement", lambda: measured_rtt_s(head) >= rtt_s)
        for away_s in rng.sample((0.0, 1.0, 2.5, 3.5, 6.0, 11.0, 20.0), 7):
            if rng.random() < 0.5:
                proxy.reset()
            proxy.stall()
            time.sleep(away_s)  # the fault itself
            if rng.random() < 0.5:
                proxy.reset()
            proxy.resume()
            head.await_steps(1)
            assert not head.of("lost"), head.of("lost")
        check_undisturbed(head, nodes, tmp_path)


def measured_rtt_s(head: Job) -> float:
    return max((float(event["measured"]["rtt_s"]) for event in head.of("timeouts")), default=0.0)
