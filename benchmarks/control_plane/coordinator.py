"""Load of one coordinator on one core with up to 2,000 agents, and its time to handle a loss.

    python -m benchmarks.control_plane.coordinator [--agents 100,250,500,1000,2000] [--quick]
        [--modes plain,secure]

In the mode `secure`, agents and coordinator use mutual TLS and the join token, and the state is in
three etcd servers with TLS, which sync their disk; in the mode `plain`, it is in an SQLite file.

The coordinator is the real process, pinned to a core. The agents
(`benchmarks.control_plane.agents`) share the other cores. They join, get a plan for a model of 96
layers, and send heartbeats like the agents of `elastic run`. Then three measurements follow:

- Idle: the coordinator's share of its core, and the delay of its timer.
- A connection ends. Detection is the time until the decision to halt, which allows 0.15 s for the
  agent to reconnect. Decision is the time from there to the new plan; it includes the reports of
  all vaults.
- An agent falls silent but stays connected: one just after that change, and one after an idle
  period. Detection starts at its last message, so it includes the lease.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import psutil

from benchmarks.results import Row, save
from elastic.config import JobConfig, WorkerCommand
from elastic.core.protocol.store_spec import StoreSpec
from elastic.core.protocol.timeouts import budget
from elastic.launcher.flags.certs import make_certificates
from elastic.launcher.run.rundir import free_port
from elastic.rpc.security.tls import CA, CERT, KEY, TOKEN_FILE, Certificates, write_token
from elastic.telemetry import read_events
from tests.store.etcds import Etcd

ROOT = Path(__file__).parents[2]
AGENTS = (100, 250, 500, 1000, 2000)
LEASE_S = 3.0
"""Default lease of `elastic run`."""
DEADLINE_S = 600.0
T = TypeVar("T")


@dataclass(frozen=True)
class Size:
    """Extent of a measurement: numbers of agents, layers, length of idle periods, lease."""

    agents: tuple[int, ...] = AGENTS
    layers: int = 96
    steady_s: float = 10.0
    lease_s: float = LEASE_S


QUICK = Size((8,), layers=8, steady_s=1.0, lease_s=10.0)
"""Short measurement. The lease is long: agents that share a busy core are silent for seconds."""


@dataclass(frozen=True)
class Security:
    """Certificates, join token and store of a job."""

    certs: Path
    token: str
    store: StoreSpec


@dataclass(frozen=True)
class Found:
    """Results for one number of agents."""

    mode: str
    agents: int
    start_s: float
    """Time from the first connection until all nodes run the first plan."""
    cpu: float
    """Fraction of one core that the idle coordinator uses."""
    memory_bytes: int
    late_s: float
    """Mean delay of the coordinator's timer while idle."""
    closed_s: float
    """Time from the end of a connection to the decision to halt."""
    silent_s: float
    """Time from the last message of an agent to the decision to halt, after an idle period."""
    busy_s: float
    """`silent_s` of an agent that falls silent just after a change of plan."""
    decide_s: float
    """Time from the decision to halt to the new plan; it includes every agent's vault report."""
    told_s: float
    """Time from the decision to halt until the last agent has installed the new plan."""
    agents_late_s: float
    """Longest delay of a heartbeat, which depends on the cores of the agents."""
    wrongly_lost: int
    """Number of live agents that the coordinator declared lost."""


def heartbeat_s(agents: int, lease_s: float) -> float:
    """Return the heartbeat interval: 0.5 s, longer in the largest jobs."""
    return budget(lease_s, nodes=agents).heartbeat_s


class AgentCrowd:
    """Processes of simulated agents."""

    def __init__(
        self, address: str, agents: int, size: Size, cores: Sequence[int], secrets: Sequence[str]
    ) -> None:
        """`secrets`: flags of the agents' process that name certificates and token."""
        self.fenced: list[float] = []
        """Seconds since the last message of each live agent that was declared lost."""
        self._said: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._parts: list[tuple[range, subprocess.Popen[bytes]]] = []
        share = -(-agents // len(cores))
        for first, core in zip(range(0, agents, share), cores, strict=False):
            count = min(share, agents - first)
            words = [
                "--address",
                address,
                "--first",
                first,
                "--count",
                count,
                "--layers",
                size.layers,
            ]
            words += ["--nodes", agents, "--heartbeat", heartbeat_s(agents, size.lease_s)]
            words += ["--microbatches", 1024 if agents >= 100 else 32, *secrets]
            process = start(
                "benchmarks.control_plane.agents",
                [str(word) for word in words],
                core,
                stdin=subprocess.PIPE,
            )
            self._parts.append((range(first, first + count), process))
            threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            if "fenced" in told:
                self.fenced.append(told["since_s"])
            else:
                self._said.put(told)

    def running(self, epoch: int) -> dict[str, Any]:
        """Wait until all agents run in `epoch` or later; return the latest of their times."""
        found: list[dict[str, Any]] = []
        end = time.monotonic() + DEADLINE_S
        while len(found) < len(self._parts):
            try:
                told = self._said.get(timeout=max(0.1, end - time.monotonic()))
            except Empty:
                raise RuntimeError(
                    f"not every agent runs in epoch {epoch} after {DEADLINE_S:g} s"
                ) from None
            if "failed" in told:
                raise RuntimeError(told["failed"])
            found = [*found, told] if told["epoch"] >= epoch else found
        return {key: max(told[key] for told in found) for key in found[0]}

    def order(self, word: str, node: int) -> float:
        """Send a command to an agent; return the time of sending."""
        (process,) = [process for numbers, process in self._parts if node in numbers]
        assert process.stdin is not None
        at = time.time()
        process.stdin.write(f"{word} node{node}\n".encode())
        process.stdin.flush()
        return at

    def all_there(self) -> None:
        """Raise RuntimeError if live agents were declared lost: this starts another plan change."""
        if self.fenced:
            words = f"{len(self.fenced)} live agents were declared lost"
            raise RuntimeError(f"{words}, the latest {self.fenced[-1]:g} s after its last word")

    def close(self) -> None:
        for _, process in self._parts:
            process.kill()
            process.wait()


def start(module: str, words: Sequence[str], core: int, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process on one core."""
    command = [sys.executable, "-m", module, *words]
    pin = (
        f"import os, sys; os.sched_setaffinity(0, [{core}]); os.execv(sys.executable, sys.argv[1:])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", pin, *command], cwd=ROOT, env=env, stdout=subprocess.PIPE, **options
    )


@contextmanager
def serving(
    run_dir: Path, agents: int, lease_s: float, core: int, secure: Security | None
) -> Iterator[tuple[str, psutil.Process]]:
    """Run the coordinator of a job of `agents` nodes; yield its address and process."""
    run_dir.mkdir()
    if secure is not None:
        write_token(run_dir / TOKEN_FILE, secure.token)
    JobConfig(
        job_id="benchmark", run_id="benchmark", run_dir=str(run_dir),
        memory_dir=str(run_dir / "memory"),
        checkpoint_dir=str(run_dir / "checkpoints"), command=WorkerCommand(script="x"),
        min_nodes=agents, max_nodes=agents, heartbeat_s=heartbeat_s(agents, lease_s),
        lease_s=lease_s,
        backup="stream+snapshot", certs=str(secure.certs) if secure is not None else "",
        store=secure.store if secure is not None else StoreSpec(),
    ).save()  # fmt: skip
    address = f"127.0.0.1:{free_port()}"
    words = ["--run-dir", str(run_dir), "--address", address, "--metrics-port", "0"]
    process = start("elastic.coordinator.service", words, core)
    try:
        until(lambda: (run_dir / "coordinator.json").exists(), "the coordinator serves")
        yield address, psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def until(found: Callable[[], T], what: str) -> T:
    """Call `found` until it returns a true value; return that. Raises RuntimeError on timeout."""
    end = time.monotonic() + DEADLINE_S
    while not (value := found()):
        if time.monotonic() > end:
            raise RuntimeError(f"not within {DEADLINE_S:g} s: {what}")
        time.sleep(0.05)
    return value


@contextmanager
def secured(folder: Path, cores: Sequence[int]) -> Iterator[Security]:
    """Make certificates and a token, and run three etcd servers on `cores`."""
    make_certificates(folder / "pki", [["localhost"]])
    certs = folder / "pki" / "localhost"
    ca, cert, key = (str(certs / name) for name in (CA, CERT, KEY))
    words = {"cert-file": cert, "key-file": key, "trusted-ca-file": ca, "client-cert-auth": "true"}
    flags = [f"--{name}={value}" for name, value in words.items()]
    cluster = Etcd(folder / "etcd", 3, [*flags, "--unsafe-no-fsync=false"])
    store = StoreSpec(url=cluster.url, ca=ca, cert=cert, key=key)
    try:
        cluster.start()
        for member in cluster.members:
            assert member.process is not None
            psutil.Process(member.process.pid).cpu_affinity(list(cores))
        cluster.await_ready(store)
        yield Security(certs, secrets.token_hex(32), store)
    finally:
        cluster.kill()


def delays(run_dir: Path, secure: Security | None) -> tuple[float, float]:
    """Return (seconds of delay, number of calls) of the coordinator's timer so far."""
    (target,) = json.loads((run_dir / "metrics" / "coordinator.json").read_text())
    context = Certificates(secure.certs).client() if secure is not None else None
    url = f"{'https' if context else 'http'}://{target['targets'][0]}/metrics"
    with urllib.request.urlopen(url, timeout=60, context=context) as answer:
        text = answer.read().decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return (
        float(lines["elastic_tick_delay_seconds_sum"]),
        float(lines["elastic_tick_delay_seconds_count"]),
    )


def at(run_dir: Path, kind: str, epoch: int) -> float:
    """Return the time of the newest entry of this kind and epoch."""
    found = [
        e
        for e in read_events(run_dir / "events.jsonl")
        if e["kind"] == kind and e["epoch"] == epoch
    ]
    return float(found[-1]["at"]) if found else 0.0


def measure(mode: str, agents: int, size: Size, folder: Path) -> Found:
    """Return all figures for one number of agents."""
    if mode == "plain":
        return _measure(mode, agents, size, folder, None)
    cores = sorted(os.sched_getaffinity(0))
    with secured(folder / f"secure-{agents}", cores[1:] or cores) as secure:
        return _measure(mode, agents, size, folder, secure)


def _measure(mode: str, agents: int, size: Size, folder: Path, secure: Security | None) -> Found:
    cores = sorted(os.sched_getaffinity(0))
    run_dir = folder / f"run-{mode}-{agents}"
    words = () if secure is None else ("--run-dir", str(run_dir), "--certs", str(secure.certs))
    with serving(run_dir, agents, size.lease_s, cores[0], secure) as (address, process):
        began = time.time()
        crowd = AgentCrowd(address, agents, size, cores[1:] or cores, words)
        try:
            started = crowd.running(1)
            until(lambda: at(run_dir, "protected", 1), "the first plan is protected")
            time.sleep(size.steady_s / 2)  # messages of the start may wait in the queue
            late, looks = delays(run_dir, secure)
            before = process.cpu_times()
            steady = time.time()
            time.sleep(size.steady_s)
            after, spent = process.cpu_times(), time.time() - steady
            late_then, looks_then = delays(run_dir, secure)
            memory = process.memory_info().rss
            crowd.all_there()
            closed_at = crowd.order("close", agents // 3)
            closed = crowd.running(2)
            until(lambda: at(run_dir, "protected", 2), "the second plan is protected")
            crowd.all_there()
            busy_at = crowd.order("mute", agents // 2)
            crowd.running(3)
            until(lambda: at(run_dir, "protected", 3), "the third plan is protected")
            time.sleep(size.steady_s)
            crowd.all_there()
            silent_at = crowd.order("mute", agents // 5)
            crowd.running(4)
            plan_at, halt_at = at(run_dir, "plan", 2), at(run_dir, "halt", 2)
            return Found(
                mode=mode,
                agents=agents,
                start_s=started["last_install"] - began,
                cpu=(after.user + after.system - before.user - before.system) / spent,
                memory_bytes=memory,
                late_s=(late_then - late) / max(1.0, looks_then - looks),
                closed_s=halt_at - closed_at,
                silent_s=at(run_dir, "halt", 4) - silent_at,
                busy_s=at(run_dir, "halt", 3) - busy_at,
                decide_s=plan_at - halt_at,
                told_s=closed["last_install"] - halt_at,
                agents_late_s=closed["late_s"],
                wrongly_lost=len(crowd.fenced),
            )
        finally:
            crowd.close()


def rows(found: Sequence[Found], lease_s: float) -> list[Row]:
    """Return the result rows. The targets apply to the largest number of agents."""
    most = max(found, key=lambda one: one.agents)
    made: list[Row] = []
    for one in found:
        name, largest = f"{one.agents} agents", one is most
        name += ", mutual TLS and etcd" if one.mode == "secure" else ""
        made += [
            Row(f"{name}: share of a core", one.cpu, "", 1.0 if largest else None, "lower"),
            Row(f"{name}: memory", one.memory_bytes / 2**20, "MiB", None, "lower"),
            Row(
                f"{name}: looks at the time late by, mean",
                one.late_s,
                "s",
                0.1 if largest else None,
                "lower",
            ),
            Row(
                f"{name}: closed connection to the halt",
                one.closed_s,
                "s",
                0.5 if largest else None,
                "lower",
            ),
            Row(
                f"{name}: silence to the halt",
                one.silent_s,
                "s",
                lease_s + 1 if largest else None,
                "lower",
            ),
            Row(
                f"{name}: silence to the halt, just after a change", one.busy_s, "s", None, "lower"
            ),
            Row(f"{name}: halt to the new plan", one.decide_s, "s", None, "lower"),
            Row(f"{name}: halt until all have the plan", one.told_s, "s", None, "lower"),
            Row(f"{name}: start until all run", one.start_s, "s", None, "lower"),
            Row(
                f"{name}: agents' own heartbeats late by, max",
                one.agents_late_s,
                "s",
                None,
                "lower",
            ),
            Row(
                f"{name}: living agents told that they are lost", one.wrongly_lost, "", 0.0, "lower"
            ),
        ]
    least = min(found, key=lambda one: one.agents)
    if least is not most:
        growth = (most.cpu / most.agents) / (least.cpu / least.agents)
        name = f"CPU an agent, {most.agents} over {least.agents}, {most.mode}"
        made.append(Row(name, growth, "", None, "lower"))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane.coordinator")
    parser.add_argument(
        "--agents", default=",".join(map(str, AGENTS)), help="numbers, comma-separated"
    )
    parser.add_argument("--quick", action="store_true", help="8 agents; nothing is written")
    parser.add_argument("--modes", default="plain,secure", help="of both, comma-separated")
    args = parser.parse_args()
    size = QUICK if args.quick else Size(tuple(int(word) for word in args.agents.split(",")))
    with tempfile.TemporaryDirectory() as scratch:
        made = []
        for mode in args.modes.split(","):
            found = []
            for agents in size.agents:
                found.append(measure(mode, agents, size, Path(scratch)))
                print(found[-1], flush=True)
            made += rows(found, size.lease_s)
    if args.quick:
        for row in made:
            print(row)
    else:
        save("coordinator", made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
