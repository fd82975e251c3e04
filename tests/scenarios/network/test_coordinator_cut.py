"""The coordinator's own network fails while its nodes train: nobody is lost.

The nodes and the coordinator are separate commands, each in a network namespace of its own, and the
coordinator's cable is pulled.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.core.protocol.timeouts import budget
from tests.kubernetes.network import Network, missing
from tests.scenarios.jobs import Job
from tests.scenarios.network.proxy import Proxy
from tests.scenarios.paced import paced, paced_reference

NODES, LEASE = 3, ("--lease", "3")
"""The default lease. The tests are about what happens when it runs out."""
RTT_S = 0.2
Begin = Callable[..., Job]


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    """Skip the tests if this machine cannot have network namespaces."""
    if why := missing():
        pytest.skip(why)


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


def away(node: Job) -> int:
    """Return how often the agent lost the coordinator, by its log."""
    texts = [path.read_text() for path in (node.run_dir / "logs").glob("*.log")]
    return sum(text.count("the coordinator cannot be reached") for text in texts)


def test_the_cable_of_the_coordinator_is_pulled(begin: Begin, tmp_path: Path) -> None:
    """Round trips take 200 ms. All connections are reset, and then the cable is pulled until every
    agent has had no answer to a ping for `keepalive_s`, 5 s. They are reset again before it is
    back."""
    assert budget(float(LEASE[1])).keepalive_s >= 4.5
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(contextlib.closing(Network()))
        place, head, proxy = behind_proxy(begin, network, stack, RTT_S)
        nodes = start_nodes(begin, network, proxy.address)
        head.await_steps(2)
        head.wait("a measurement", lambda: measured_rtt_s(head) >= RTT_S)
        accepted = proxy.accepted
        proxy.reset()
        head.wait("the reconnects", lambda: proxy.accepted >= accepted + NODES)
        head.await_steps(1)
        before = [away(node) for node in nodes]
        network.cut(place)
        head.wait("doubt", lambda: head.of("doubt"))
        head.wait(
            "the agents' deadlines",
            lambda: all(away(node) > n for node, n in zip(nodes, before, strict=True)),
        )
        assert not head.of("doubt-over")
        proxy.reset()
        network.heal(place)
        head.wait("the nodes", lambda: head.of("doubt-over"))
        check_undisturbed(head, nodes, tmp_path)


def behind_proxy(
    begin: Begin, network: Network, stack: contextlib.ExitStack, rtt_s: float
) -> tuple[str, Job, Proxy]:
    """Start the coordinator, and a proxy on its machine that delays and resets the connections.
    Return their namespace and both."""
    place, address = network.add("head")
    local = "127.0.0.1:29401"
    head = begin("head", "coordinator", "--address", local, inside=place)
    proxy = Proxy(local, rtt_s, place=f"{address}:29400", space=place)
    stack.enter_context(contextlib.closing(proxy))
    return place, head, proxy


def start_nodes(begin: Begin, network: Network, coordinator: str) -> list[Job]:
    """Start the agents, each in a namespace of its own."""
    return [
        begin(
            f"machine{number}", "agent", "--coordinator", coordinator,
            inside=network.add(f"node{number}")[0],
        )
        for number in range(NODES)
    ]  # fmt: skip


@pytest.mark.chaos
@pytest.mark.parametrize("rtt_s", [0.0, 0.08, 0.2])
def test_random_cuts_and_resets_of_the_cable(begin: Begin, tmp_path: Path, rtt_s: float) -> None:
    """Five cuts of 1 to 20 s, with resets before, during and after them."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(contextlib.closing(Network()))
        place, head, proxy = behind_proxy(begin, network, stack, rtt_s)
        nodes = start_nodes(begin, network, proxy.address)
        head.await_steps(2)
        if rtt_s:
            head.wait("a measurement", lambda: measured_rtt_s(head) >= rtt_s)
        for away_s in [rng.uniform(1.0, 20.0) for _ in range(5)]:
            resets = [rng.random() < 0.5 for _ in range(3)]
            print(f"cut of {away_s:.1f} s, resets before, during and after it: {resets}")
            if resets[0]:
                proxy.reset()
            network.cut(place)
            time.sleep(away_s)  # the fault itself
            if resets[1]:
                proxy.reset()
            network.heal(place)
            if resets[2]:
                proxy.reset()
            head.await_steps(1)
            assert not head.of("lost"), head.of("lost")
        check_undisturbed(head, nodes, tmp_path)


def measured_rtt_s(head: Job) -> float:
    return max((float(event["measured"]["rtt_s"]) for event in head.of("timeouts")), default=0.0)
