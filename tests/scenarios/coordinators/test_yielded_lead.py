"""Two coordinators on two machines, with etcd on a third one: the leader's network fails.

Each process has a network namespace of its own.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.network import Network, ip, missing
from tests.patience import LONG_S
from tests.scenarios.jobs import Job
from tests.scenarios.paced import STEPS, paced, paced_reference
from tests.store.etcds import BINARY, CTL

NODES, PORT, STORE_PORT = 2, 29400, 2379


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    """Skip the tests if this machine cannot have network namespaces."""
    if why := missing():
        pytest.skip(why)


@contextlib.contextmanager
def etcd_inside(space: str, address: str, folder: Path) -> Iterator[str]:
    """An etcd server in a network namespace; yields its URL."""
    client, inside = f"http://{address}:{STORE_PORT}", ["ip", "netns", "exec", space]
    command = [str(BINARY), "--data-dir", str(folder), "--log-level", "error"]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client]
    process = subprocess.Popen([*inside, *command, "--unsafe-no-fsync"])
    try:
        health = [*inside, str(CTL), "--endpoints", client, "endpoint", "health"]
        end = time.monotonic() + LONG_S
        while subprocess.run(health, capture_output=True, check=False).returncode:
            assert time.monotonic() < end, "etcd does not answer"
        yield f"etcd://{address}:{STORE_PORT}"
    finally:
        process.kill()
        process.wait()


class Machines:
    """Two coordinators, two nodes and etcd. `close` ends everything."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, contextlib.ExitStack()
        self.network = self._stack.enter_context(contextlib.closing(Network()))
        token = folder / "token"
        token.write_text("of all machines of this job\n")
        names = ["store", *(f"head{i}" for i in range(2)), *(f"node{i}" for i in range(NODES))]
        self.places = {name: self.network.add(name) for name in names}
        url = self._stack.enter_context(etcd_inside(*self.places["store"], folder / "etcd"))
        self._common = ["--nnodes", str(NODES), "--rdzv-id", "yield", "--store", url]
        self._common += ["--join-token-file", str(token), "--insecure", "--lease", "3"]
        self._common += ["--accumulate", "exact", "--pipelines", "1"]
        self._common += ["--backup", "stream+snapshot"]
        self._common += ["--checkpoint-dir", str(folder / "checkpoints")]
        heads = [f"{self.places[f'head{i}'][1]}:{PORT}" for i in range(2)]
        self.heads = [
            self._begin(f"head{i}", "coordinator", "--address", place)
            for i, place in enumerate(heads)
        ]
        words = ["agent", "--coordinator", ",".join(heads)]
        self.nodes = [self._begin(f"node{i}", *words, "--node", f"node{i}") for i in range(NODES)]

    def _begin(self, name: str, *words: str) -> Job:
        prefix = ("ip", "netns", "exec", self.places[name][0])
        script = paced(self._folder / "hurry")
        job = Job(self._folder / name, [*words, *self._common], script, prefix=prefix)
        self._stack.callback(job.kill)
        return job

    def leader(self) -> int:
        """Wait until the job trains; return the number of the leader."""
        self.heads[0].wait("training", lambda: [h for h in self.heads if len(h.steps()) > 2])
        return next(number for number, head in enumerate(self.heads) if head.steps())

    def cut(self, head: int, *, everything: bool) -> None:
        """Pull the cable of a coordinator, or only drop its packets to the nodes."""
        space = self.places[f"head{head}"][0]
        if everything:
            self.network.cut(space)
            return
        self._blackholes(space, "add")

    def heal(self, head: int, *, everything: bool) -> None:
        space = self.places[f"head{head}"][0]
        if everything:
            self.network.heal(space)
            return
        self._blackholes(space, "del")

    def _blackholes(self, space: str, verb: str) -> None:
        for number in range(NODES):
            ip("-n", space, "route", verb, "blackhole", self.places[f"node{number}"][1])

    def close(self) -> None:
        self._stack.close()


@pytest.mark.parametrize(
    "everything",
    [
        pytest.param(False, id="nodes"),
        pytest.param(True, id="nodes-and-etcd", marks=pytest.mark.chaos),
    ],
)
def test_another_coordinator_takes_over(everything: bool, tmp_path: Path) -> None:
    """A leader that still reaches etcd releases its lease, because it hears no node. One that
    reaches nothing loses it. No node is lost, and no step is disturbed."""
    with contextlib.closing(Machines(tmp_path)) as job:
        led = job.leader()
        before, after = job.heads[led], job.heads[1 - led]
        job.cut(led, everything=everything)
        if not everything:
            before.wait("the yield", lambda: before.of("yield"))
        after.wait("the takeover", lambda: after.of("adopted"))
        after.await_steps(2)
        job.heal(led, everything=everything)
        after.await_steps(1)
        (tmp_path / "hurry").touch()
        run = after.finish()
        assert run.code == 0, run.output
        assert [node.finish().code for node in job.nodes] == [0] * NODES
        assert before.process.wait(LONG_S) == 0, before.output
    assert run.final_sha256 == paced_reference(tmp_path).final_sha256
    assert max(after.steps()) == STEPS - 1
    for head in job.heads:
        assert not head.of("lost") and not head.of("recovery")
    assert [event["epoch"] for event in before.of("plan")] == [1] and not after.of("plan")
