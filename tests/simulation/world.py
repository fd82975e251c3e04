"""A simulated cluster that runs one job with the real shells, under faults, and judges the run.

`run(seed)` makes every choice from the seed: size and schemes of the job, the network, the faults
and the order of all threads. `Outcome` has what was wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.chaos.verdict import layers_lost
from elastic.agent import service as agent_service
from elastic.config import JobConfig, WorkerCommand
from elastic.coordinator import service as coordinator_service
from elastic.core.job.checkpoints import MAX_PENDING
from elastic.core.node.node import ProcessSample
from elastic.core.protocol.messages import Promise
from elastic.core.protocol.store_spec import StoreSpec
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain.errors import (
    EXIT_DRAINED,
    EXIT_TERMINATED,
    EXIT_UNRECOVERABLE,
    ElasticError,
    FieldError,
)
from elastic.domain.types import Accumulate, JobSpec, LayerSpec
from elastic.store import checkpoint_directory
from elastic.telemetry import read_events
from tests.simulation import oracles, worker
from tests.simulation.losses import Life, LossWatch, healthy_lost
from tests.simulation.machine import installed
from tests.simulation.model import expected_run, expected_sha256
from tests.simulation.network import Host, Listener, Network, Trouble
from tests.simulation.primitives import WALL_S, process_of
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.store import SimStore, StoreMachine

PORT = 7000
BASE = "/dev/shm" if Path("/dev/shm").is_dir() else ""
"""Folder of the directories of the runs; "": that of temporary files."""
PATH_CHARS, RANDOM_CHARS = 120, 8
"""Length of the path of a run's directory, and of the part that `tempfile` chooses."""
WATCH_S = oracles.NOTICED_S
PROGRESS_S, LONG_S = 25.0, 100.0
"""After the last fault, a step or the end of the job comes within this time. The second limit
holds after a worker hung, because it may be silent for `Timeouts.stuck_s` before its first step
(and spin for `Timeouts.progress_s`, five times a step, afterwards),
and after two nodes were lost silently, because the coordinator blames itself for `Timeouts.doubt_s`
if it hears a minority."""
EARLIER_S = 10.0
"""A fault whose effect comes after a step was at most this long before the step."""
UNRECOVERABLE_S = DEFAULT_TIMEOUTS.return_s + LONG_S
"""A job whose copies were lost ends within this time, in which their nodes may return."""
LEAVE_S = 90.0
"""All processes end within this time after the job."""
SETTLED_S = 6.0
"""After all faults, agents and coordinators agree this much later whether they are connected."""
ORPHAN_S = DEFAULT_TIMEOUTS.orphan_s + 30.0
"""The same for an agent that is cut off, and cannot read that the job is over."""
SCHEMES = (
    "auto", "stream+snapshot", "stream+replica", "stream:2+replay:2", "recompute+replay:3",
    "log+snapshot", "log+replica", "recompute+snapshot",
)  # fmt: skip
VAULT_LOST = ("power", "kill", "back")
HANGS = ("worker-stop", "worker-spin", "worker-mute")
WORKER_KINDS = ("worker-kill", *HANGS)
DAMAGES = ("kill", "kill", "power", "back", "worker-kill", "worker-kill", "worker-stop")
"""Faults that damage one pipeline only."""
SCOPES = 0.5
"""Share of the scenarios with several pipelines and such a fault."""
DISK = ("disk-full", "disk-error")
PATIENT = ("disk-slow", "disk-hang")
PATHS = ("cut-path", "cut-pair", "slow-path")
STORAGE = {
    "memory-full": ("memory_error", errno.ENOSPC),
    "no-slots": ("memory_error", errno.EMFILE),
    "disk-full": ("disk_error", errno.ENOSPC),
    "disk-error": ("disk_error", errno.EIO),
    "disk-slow": ("disk_slow", 0),
    "disk-hang": ("disk_hangs", 0),
    "lead-disk": ("disk_error", errno.ENOSPC),
    "lead-hang": ("disk_hangs", 0),
}
"""Per fault: (attribute of the host, number of the error)."""
LENGTHS_S, LASTING_S, LONG_PATH_S = (0.3, 1.0, 2.5, 6.0, 15.0), (2.5, 6.0, 15.0, 30.0), (200, 250)
"""Lengths of most faults, of those that need a victim's operation, and of a long bad path."""
SHARE, MESSAGES = 0.4, 4
"""For the expected length of a step: share of its micro-batches on one node, and messages."""
TRAINING_S, LONG_JOB_S = 4.0, 300.0
"""Least expected lengths of the training: of a job, and of one that outlasts a long bad path."""
EVALUATION_MICROBATCHES = 3
WRITER = -1
"""In the place of a node's number: one that has written to its disk."""
WRITTEN_S = 0.1
"""A fault after a write comes at most this long after it."""


@dataclass(frozen=True)
class Fault:
    """A fault of a node, or of a coordinator, at a time.

    power: the host is gone, silently. kill: its agent and workers die. back: the same, and the
    agent starts again after `seconds`. pause: no process of the host runs. worker-kill,
    worker-stop, worker-spin, worker-mute: one worker; the last is killed, and the next one of its
    node hangs before it attaches. cut-out, cut-in: packets from (to) the host are lost. cut-path,
    cut-pair: those to one other host, one way or both. slow-path: one path has little bandwidth.
    reset: all connections of the host to others are reset, although the network is well.
    memory-full, no-slots, disk-full, disk-error, disk-slow, disk-hang: of the host. join, drain:
    planned changes. lead-kill, lead-pause, lead-cut, lead-reset, lead-disk, lead-hang: the same for
    the host of the coordinator. lead-amnesia: killed, and the store loses its last writes.
    store-away: the store is out of reach.
    """

    kind: str
    at: float
    node: int
    other: int
    seconds: float
    after_write: bool = False
    """Whether the fault comes soon after the next write of the coordinator's state."""


NODE_KINDS = (
    *VAULT_LOST, *WORKER_KINDS, "pause", "cut-out", "cut-in", "cut-path", "cut-path", "cut-pair",
    "slow-path", "reset", "reset", *oracles.MEMORY, *DISK, *PATIENT, "join", "drain",
)  # fmt: skip
LEAD_KINDS = (
    "lead-kill", "lead-pause", "lead-cut", "lead-reset", *oracles.LEAD_DISK, "lead-amnesia",
    "store-away",
)  # fmt: skip
PERMANENT = (*VAULT_LOST, *WORKER_KINDS, "join", "drain", "reset", "lead-reset")


@dataclass(frozen=True)
class Scenario:
    """All choices of a run besides the order of threads."""

    seed: int
    nodes: int
    coordinators: int
    steps: int
    microbatches: int
    checkpoint_every: int
    backup: str
    latency_s: float
    rate: float
    microbatch_s: float
    faults: tuple[Fault, ...]
    memory_rate: float = 64e6
    """Bytes per second of an allocation of memory."""
    disk_s: float = 0.001
    """Time of an operation that waits for a disk."""
    ask_bytes: int = 4 << 20
    """Bundles of this size ask for room before they are sent."""
    verify_every: int = 0
    """Holders of a layer compare their states after every so many steps; 0: never."""
    shared: bool = True
    """Whether all hosts see the files of the run: without it, an agent that is cut off when the
    job ends cannot know it."""
    preemption: float = 0.02
    """Share of the calls of a primitive at which another thread may run first."""
    grace_s: float = 0.0
    """Time that a node has to leave after a signal; with several coordinators it has none."""
    in_training: bool = False
    """Whether the times of the faults count from the first finished step."""
    evaluate_every: int = 0
    """The model is evaluated after every so many steps, and at the end; 0: never."""
    pipelines: str = "auto"
    """Requested pipelines of the plan."""

    @property
    def training_s(self) -> float:
        """Expected time of all steps."""
        return self.steps * _step_s(self.microbatches, self.microbatch_s, self.latency_s)


def _step_s(microbatches: int, microbatch_s: float, latency_s: float) -> float:
    """Return the expected length of a step."""
    return SHARE * microbatches * microbatch_s + MESSAGES * latency_s


def scenario_of(seed: int) -> Scenario:
    rng = random.Random(f"scenario {seed}")
    microbatches, microbatch_s = rng.choice((3, 4, 6)), rng.choice((0.1, 0.2, 0.4))
    latency_s = rng.choice((0.0002, 0.0002, 0.005, 0.04, 0.1))
    in_training, kinds = rng.random() < 0.75, _kinds(rng)
    long = rng.random() < 0.15 and any(kind in PATHS for kind in kinds)
    if long:
        microbatch_s = 0.8
    step_s = _step_s(microbatches, microbatch_s, latency_s)
    least_s = LONG_JOB_S if long else TRAINING_S
    steps = max(rng.choice((4, 6, 8, 12)), math.ceil(least_s / step_s))
    disk_s = rng.choice((0.001, 0.001, 0.05))
    every = rng.choice((1, 2, 3) if {*kinds} & {*DISK, *PATIENT} else (0, 1, 2, 3))
    every = _seldom(every, steps, disk_s)
    first_s = 0.0 if in_training else 1.0
    last_s = 0.8 * min(steps * step_s, 25.0) if in_training else 5.0 + MESSAGES * latency_s
    scenario = Scenario(
        seed=seed,
        nodes=rng.choice((2, 3, 3, 4, 5)),
        coordinators=rng.choice((1, 1, 2)),
        steps=steps,
        microbatches=microbatches,
        checkpoint_every=every,
        backup=rng.choice(SCHEMES),
        latency_s=latency_s,
        rate=rng.choice((3e4, 1e6, 5e6, 1e8)),
        microbatch_s=microbatch_s,
        faults=_faults(rng, kinds, first_s, last_s, long),
        memory_rate=rng.choice((64e6, 64e6, 1e5)),
        disk_s=disk_s,
        ask_bytes=rng.choice((4096, 4 << 20)),
        verify_every=rng.choice((0, 1, 3)),
        shared=rng.random() < 0.5,
        preemption=rng.choice((0.01, 0.05, 0.3)),
        grace_s=rng.choice((0.0, 5.0, 30.0)),
        in_training=in_training,
        evaluate_every=rng.choice((0, 0, 1, 3)),
    )
    return _with_scopes(rng, scenario) if rng.random() < SCOPES else scenario


def _seldom(every: int, steps: int, disk_s: float) -> int:
    """Return how often a job writes checkpoints, if a slow disk has time for few of them only."""
    slow = every and disk_s > 0.01
    return max(every, math.ceil(steps / MAX_PENDING)) if slow else every


def _with_scopes(rng: random.Random, scenario: Scenario) -> Scenario:
    """Return the job with several pipelines, one of which is damaged while all of them run. Its
    steps are longer, so that the others often compute meanwhile."""
    microbatches, nodes = rng.choice((4, 6, 12)), rng.choice((4, 5, 6, 6))
    step_s = _step_s(microbatches, scenario.microbatch_s, scenario.latency_s)
    least_s = LONG_JOB_S if scenario.training_s >= LONG_JOB_S else TRAINING_S
    steps = max(rng.choice((4, 6, 8)), math.ceil(least_s / step_s))
    seconds, victim = rng.choice(LENGTHS_S), rng.randrange(8)
    at = rng.uniform(0.0, 0.8 * min(steps * step_s, 25.0))
    if not scenario.in_training:
        at += 5.0 + MESSAGES * scenario.latency_s
    damage = Fault(rng.choice(DAMAGES), round(at, 3), victim, 0, seconds)
    faults = sorted((*scenario.faults, damage), key=lambda fault: fault.at)
    return dataclasses.replace(
        scenario,
        nodes=nodes,
        pipelines=rng.choice(("2", "2", "3")),
        microbatches=microbatches,
        steps=steps,
        checkpoint_every=_seldom(scenario.checkpoint_every, steps, scenario.disk_s),
        faults=tuple(faults),
    )


def _kinds(rng: random.Random) -> list[str]:
    """Return the kinds of a scenario's faults. Few scenarios lose the memory of two nodes."""
    kinds: list[str] = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
        kind = rng.choice(rng.choices((VAULT_LOST, NODE_KINDS, LEAD_KINDS), (2, 5, 2))[0])
        if kind in VAULT_LOST and {*kinds} & {*VAULT_LOST} and rng.random() < 0.7:
            kind = "cut-path"
        kinds.append(kind)
    return kinds


def _faults(
    rng: random.Random, kinds: Sequence[str], first_s: float, last_s: float, long: bool
) -> tuple[Fault, ...]:
    """Return faults between these times. `long`: the first bad path stays bad for minutes."""
    faults: list[Fault] = []
    start_s, together = rng.uniform(first_s, last_s), rng.random() < 0.5
    for kind in kinds:
        lasting = kind in (*oracles.MEMORY, *DISK, "disk-hang", *oracles.LEAD_DISK)
        seconds = rng.choice(LASTING_S if lasting else LENGTHS_S)
        if long and kind in PATHS:
            seconds, long = round(rng.uniform(*LONG_PATH_S)), False
        at = start_s + rng.uniform(0.0, 2.0) if together else rng.uniform(first_s, last_s)
        written = kind == "lead-amnesia" or (kind in LEAD_KINDS and rng.random() < 0.3)
        node, other = rng.randrange(8), rng.randrange(8)
        if kind in (*DISK, *PATIENT) and rng.random() < 0.8:
            node = WRITER
        faults.append(Fault(kind, round(at, 3), node, other, seconds, after_write=written))
        if kind in oracles.MEMORY and rng.random() < 0.7:
            at += rng.uniform(0.1, 1.0)
            kind = rng.choice(("worker-kill", "back", "join"))  # memory is needed
            faults.append(Fault(kind, round(at, 3), rng.randrange(8), 0, 1.0))
    return tuple(sorted(faults, key=lambda fault: fault.at))


@dataclass
class Outcome:
    scenario: Scenario
    problems: list[str]
    trail: list[str]
    code: int | None
    simulated_s: float
    real_s: float
    switches: int
    injected: Counter[str] = field(default_factory=Counter)
    events: list[dict[str, Any]] = field(default_factory=list)
    """The job's event log, in simulated time."""
    slowest_s: float = 0.0
    """Longest time without a step, after the last fault."""
    left_s: float = 0.0
    """Time from the end of the job to that of the last process."""

    @property
    def scopes(self) -> Counter[str]:
        """Epoch changes that left nodes outside, by the result."""
        return oracles.scopes(self.events)

    def text(self) -> str:
        return "\n".join([f"seed {self.scenario.seed}: {self.scenario}", *self.problems])


def _config_of(scenario: Scenario, directory: Path) -> JobConfig:
    """Make the folders of a job; return its configuration."""
    run_dir = directory / "run"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "checkpoints").mkdir()
    count = scenario.coordinators
    grace_s = scenario.grace_s if count == 1 else 0.0
    return JobConfig(
        job_id="sim",
        run_dir=str(run_dir),
        memory_dir=str(directory / "memory"),
        checkpoint_dir=str(run_dir / "checkpoints"),
        command=WorkerCommand(script="train.py"),
        min_nodes=scenario.nodes,
        max_nodes=9,
        max_restarts=3,
        local_nodes=scenario.nodes,
        standalone=not grace_s,
        coordinators=count,
        store=StoreSpec(url="etcd://store:2379") if count > 1 else StoreSpec(),
        backup=scenario.backup,
        pipelines=scenario.pipelines,
        accumulate=Accumulate.EXACT,
        verify_every=scenario.verify_every,
        grace_s=grace_s,
    )


class World:
    def __init__(self, scenario: Scenario, directory: Path) -> None:
        self.scenario, self.directory = scenario, directory
        self.scheduler = Scheduler(scenario.seed, scenario.preemption)
        self.network = Network(self.scheduler, scenario.latency_s, scenario.rate)
        self.network.memory_rate, self.network.disk_s = scenario.memory_rate, scenario.disk_s
        self.store = StoreMachine(self.scheduler)
        self.microbatch_s = scenario.microbatch_s
        layers = tuple(LayerSpec(3000, 6000, 50, 1.0 + i % 2, 2.0) for i in range(4))
        self.spec = JobSpec(
            layers=layers,
            n_microbatches=scenario.microbatches,
            n_steps=scenario.steps,
            checkpoint_every=scenario.checkpoint_every,
            evaluate_every=scenario.evaluate_every,
            evaluation_microbatches=EVALUATION_MICROBATCHES if scenario.evaluate_every else 0,
        )
        self.meetings: dict[int, dict[int, worker.ModelLinks]] = {}
        self._entered: defaultdict[int, dict[str, float]] = defaultdict(dict)
        """Epoch -> node -> time at which its worker was connected to those of its pipeline."""
        self.problems: list[str] = []
        self._injected: Counter[str] = Counter()
        self.faults: list[oracles.Injected] = []
        """What was carried out."""
        self.losses = LossWatch()
        self._cuts: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        """Per node: (begin, end) of the times in which its own cable was out."""
        self._hangs: defaultdict[str, list[float]] = defaultdict(list)
        """Per node: times at which a worker hung."""
        self.left_s = 0.0
        """Time from the end of the job to that of the last process."""
        self.slowest_s = 0.0
        """Longest time without a step, after the last fault."""
        self._values: dict[tuple[int, str], list[tuple[object, Any]]] = {}
        """(fault, value) of each attribute that faults have changed; the first is the value without
        a fault."""
        self._cut_leads: list[tuple[Host, float]] = []
        """Hosts of coordinators whose cables are out, and until when."""
        self.mute_starts: dict[str, list[Trouble]] = defaultdict(list)
        """Per node: one entry for each of its next workers that hangs before it attaches."""
        self._hung_at: list[float] = []
        """Times at which workers began to spin, or hung before they attached."""
        self._troubles: list[tuple[str, Trouble]] = []
        """(kind of fault, trouble) of faults that count when something has met them."""
        self.well_at = 0.0
        """Time at which all faults so far are over."""
        self.moved_at = 0.0
        """Time of the newest step."""
        self.ended_at: float | None = None
        self._within_reach: set[str] = set()
        """Nodes whose agents were connected to a coordinator when the job ended."""
        self.first_ended_at: float | None = None
        """Time at which the first agent ended by itself; None: none did."""
        self.stalled = False
        """Whether the run was ended because no step came."""
        self.lead_code: int | None = None
        self.agents: dict[str, Process] = {}
        self.reports: defaultdict[int, list[oracles.Reported]] = defaultdict(list)
        self.workers: dict[int, Process] = {}
        self.leads: dict[int, Process] = {}
        self._cpu: Counter[int] = Counter()
        self.config, count = _config_of(scenario, directory), scenario.coordinators
        self.lead_hosts = [self.network.add_host(f"lead{i}", f"10.0.1.{i}") for i in range(count)]
        self.addresses = ",".join(f"{host.address}:{PORT}" for host in self.lead_hosts)
        for slot in range(count):
            self._start_lead(slot)
        for _ in range(scenario.nodes):
            self._join()
        if not scenario.in_training:
            self._plan_faults()
        self.scheduler.at(WATCH_S, self._watch)

    # ---- what the stand-ins need ----

    def open_store(self, config: JobConfig) -> SimStore:
        return SimStore(self.store)

    @property
    def links(self) -> _Links:
        return _Links(self)

    def steps(self, **parts: Any) -> worker.ModelSteps:
        return worker.ModelSteps(self, **parts)

    def evaluations(self, **parts: Any) -> worker.ModelEvaluations:
        return worker.ModelEvaluations(self, **parts)

    def start_worker(self, parent: Process, env: dict[str, str]) -> Process:
        process = self._process(f"worker-of-{env['ELASTIC_NODE']}", parent.host)
        self.workers[process.pid] = process
        process.may_fail = (ElasticError, OSError)
        parent.at_exit.append(lambda: self._orphan(process))
        return process.start(lambda: worker.main(self, process, env))

    def _orphan(self, process: Process) -> None:
        """A worker notices the end of its agent (`elastic.lifeline`)."""
        self.scheduler.at(self.scheduler.uniform(0.001, 0.05), lambda: process.end(-9))

    def sample(self, rank: int, pid: int) -> ProcessSample | None:
        process = self.workers[pid]
        if not process.alive:
            return None
        agent, mute = process.local.get("agent"), "mute" in process.local
        busy = agent is None or agent.position.activity in ("compute", "evaluate")
        if busy and not process.stopped and not mute:
            self._cpu[pid] += 1
        return ProcessSample(rank, process.stopped, self._cpu[pid] / 10)

    def entered(self, links: worker.ModelLinks) -> None:
        """A worker is connected to those of its pipeline."""
        self._entered[links.epoch][links.process.host.name] = self.scheduler.now

    def promised(self, node: str, promise: Promise) -> None:
        process_of(self.scheduler).local["promise"] = promise
        self.scheduler.log(f"{node} promises: {promise}")

    def step_done(self, step: int, links: worker.ModelLinks) -> None:
        promise: Promise | None = links.process.local.get("promise")
        if promise is not None and links.epoch < promise.epoch:
            self.violation(f"{links.process.name} takes part in step {step}, in spite of {promise}")
        if not self.moved_at and self.scenario.in_training:
            self._plan_faults()
        self.moved_at = self.scheduler.now
        links.process.local["epoch"] = links.epoch
        self.scheduler.log(f"step {step} is done on {links.process.name} (epoch {links.epoch})")

    def violation(self, text: str) -> None:
        self.problems.append(f"{self.scheduler.now:.3f}: {text}")

    # ---- processes ----

    def _process(self, name: str, host: Host) -> Process:
        process = Process(self.scheduler, name, host)
        process.at_exit.append(lambda: host.process_ended(process))
        return process

    def _start_lead(self, slot: int) -> None:
        if self.ended_at is not None:
            return
        host = self.lead_hosts[slot]
        process = self.leads[slot] = self._process(f"lead{slot}", host)

        def main() -> int:
            code = coordinator_service.lead(self.config, f"{host.address}:{PORT}", slot, -1)
            self.lead_code = code
            return code

        process.start(main)
        process.at_exit.append(lambda: self._lead_ended(slot, process))

    def _lead_ended(self, slot: int, process: Process) -> None:
        """The launcher starts a coordinator that crashed again."""
        now = self.scheduler.now
        for fault in [one for one in self.faults if one.kind in oracles.LEAD_DISK]:
            if fault.at <= now <= fault.until + WATCH_S:
                self.faults.append(dataclasses.replace(fault, kind="unrecorded"))
        if process.code == 1 and not self._exit_written():
            pause_s = self.scheduler.uniform(0.5, 5.0)
            self.scheduler.at(pause_s, lambda: self._start_lead(slot))

    def _join(self) -> None:
        number = len(self.agents)
        host = self.network.add_host(f"node{number}", f"10.0.0.{number}")
        self._cut_from_leads(host)
        process = self.agents[host.name] = self._process(host.name, host)
        self.scheduler.at(self.scheduler.uniform(0.0, 0.3), lambda: self._start_agent(process))

    def _cut_from_leads(self, host: Host) -> None:
        """Cut a node off from the hosts of coordinators whose cables are out."""
        for lead, until in self._cut_leads:
            if until > self.scheduler.now:
                self.network.cut(lead, host, until - self.scheduler.now)
                self.network.cut(host, lead, until - self.scheduler.now)

    def _start_agent(self, process: Process) -> None:
        host: Host = process.host
        if not process.alive:
            return  # a fault came first
        if self.ended_at is not None or self._exit_written():
            process.end(-9)  # its launcher starts no agent after the job
            return
        args = SimpleNamespace(
            node=host.name,
            domain="",
            host=host.address,
            device="",
            peak_tflops=0.0,
            lifetime=0.0,
            memory=0,
        )
        info = agent_service._node_info(args, self.config)

        config = self.config
        if not self.scenario.shared:
            config = dataclasses.replace(config, run_dir=str(self.directory / host.name))
            Path(config.run_dir, "logs").mkdir(parents=True, exist_ok=True)

        def main() -> int:
            agent = _Agent(self, config, self.addresses, info)
            process.local["service"] = agent
            return agent.run()

        process.start(main)
        process.at_exit.append(lambda: self._agent_ended(process))

    def _agent_ended(self, process: Process) -> None:
        """An agent that must leave before its workers have attached ends at once."""
        drained = any(f.kind == "drain" and f.node == process.host.name for f in self.faults)
        left = drained and process.code in (EXIT_DRAINED, EXIT_TERMINATED)
        self._life_ended(process, process.code == -9 or left or self.losses.job_ends)
        if self._ended_alone(process) and self.first_ended_at is None:
            self.first_ended_at = self.scheduler.now
        if process.code == EXIT_TERMINATED:
            life: Life = process.local["life"]
            self.faults.append(oracles.Injected("left", life.ended, math.inf, life.node))

    def incarnation_began(self, agent: agent_service.NodeAgent) -> None:
        """The agent of the running process began to be another incarnation of its node."""
        process, info = process_of(self.scheduler), agent._state.info
        self._life_ended(process, by_fault=False)
        life = Life(info.node, process.stops, self._cuts[info.node], self._hangs[info.node])
        self.losses.lives[info.incarnation] = process.local["life"] = life
        process.local["vault"] = process.host.ports[int(info.vault.rpartition(":")[2])]

    def _life_ended(self, process: Process, by_fault: bool) -> None:
        """The vault of an agent that ends may be closed a moment before."""
        life: Life | None = process.local.get("life")
        if life is not None:
            vault: Listener = process.local["vault"]
            life.ended, life.by_fault = min(self.scheduler.now, vault.closed_at), by_fault

    # ---- faults ----

    def _plan_faults(self) -> None:
        for fault in self.scenario.faults:
            self.scheduler.at(fault.at, lambda fault=fault: self.inject(fault))  # type: ignore[misc]

    @property
    def injected(self) -> Counter[str]:
        """Faults with an effect, by kind: the victim was there, and something met the fault."""
        return self._injected + Counter(kind for kind, one in self._troubles if one.hits)

    def inject(self, fault: Fault) -> None:
        """Carry out a fault now, or after the next write of the coordinator's state."""
        if not fault.after_write:
            self._carry_out(fault)
            return

        def wrote() -> None:
            pause_s = self.scheduler.uniform(0.0, WRITTEN_S)
            self.scheduler.at(pause_s, lambda: self._carry_out(fault))

        self.store.after_write.append(wrote)

    def _carry_out(self, fault: Fault) -> None:
        if self.ended_at is not None:
            return
        kind, now = fault.kind, self.scheduler.now
        of_lead = kind in LEAD_KINDS
        victim = self._living_lead(fault) if of_lead else self._living_node(fault)
        if victim is None and kind != "store-away":
            self.scheduler.log(f"no victim of {fault}")
            return
        self.scheduler.log(f"FAULT {fault}")
        over = now + (0.0 if kind in PERMANENT and kind != "back" else fault.seconds)
        self.well_at = max(self.well_at, over)
        host = "" if of_lead or victim is None else victim.host.name
        until = math.inf if kind in ("power", "kill") else over
        self.faults.append(oracles.Injected(kind, now, until, host))
        if of_lead:
            self._hurt_lead(fault, victim)
        else:
            assert victim is not None
            self._hurt_node(fault, victim)

    def _living_lead(self, fault: Fault) -> Process | None:
        chosen = self.leads[fault.node % len(self.lead_hosts)]
        return next((one for one in (chosen, *self.leads.values()) if one.alive), None)

    def _living_node(self, fault: Fault) -> Process | None:
        """Return the agent of the node that the fault names, or one that can have the fault."""
        living = [one for one in self.agents.values() if one.alive]
        if not living:
            return None
        first = fault.node % len(living)
        return next(
            (one for one in living[first:] + living[:first] if self._fits(fault, one)), None
        )

    def _fits(self, fault: Fault, agent: Process) -> bool:
        """Whether the agent can have the fault."""
        if fault.kind in WORKER_KINDS:
            return bool(self._workers(agent))
        if fault.kind == "drain":
            drained = any(f.kind == "drain" and f.node == agent.host.name for f in self.faults)
            return "service" in agent.local and not drained
        if fault.node == WRITER:
            return bool(agent.host.disk_waits)
        if fault.kind in PATHS:
            return any(one.alive and one is not agent for one in self.agents.values())
        return True

    def _workers(self, agent: Process) -> list[Process]:
        """Return the living workers on the host of the agent."""
        return [one for one in self.workers.values() if one.alive and one.host is agent.host]

    def _trouble(self, fault: Fault, number: int = 0) -> Trouble:
        """Return a trouble. The fault counts if something meets it."""
        trouble = Trouble(number)
        self._troubles.append((fault.kind, trouble))
        return trouble

    def hang(self, trouble: Trouble) -> None:
        """A worker meets a fault and hangs."""
        if not trouble.hits:
            self._hung_at.append(self.scheduler.now)
        trouble.hit()

    def _hurt_node(self, fault: Fault, process: Process) -> None:
        kind, seconds = fault.kind, fault.seconds
        host: Host = process.host
        if kind in (*oracles.MEMORY, *DISK, *PATIENT):
            self._hurt_storage(fault, host)
            return
        if kind in WORKER_KINDS:
            self._hurt_worker(fault, self._workers(process)[0])
            return
        self._injected[kind] += 1
        if kind.startswith("cut") or kind == "slow-path":
            living = [one for one in self.agents.values() if one.alive and one is not process]
            others: list[Host] = [one.host for one in living] or [host]
            self._hurt_links(fault, host, others[fault.other % len(others)])
        elif kind == "reset":
            self.network.reset(host)
        elif kind in VAULT_LOST:
            self._lose(process, silent=kind == "power", back_s=seconds if kind == "back" else 0)
        elif kind == "pause":
            self._pause([process, *self._workers(process)], seconds)
        elif kind == "join":
            self._join()
        elif kind == "drain":
            process.local["service"].leave()
            if not self.config.grace_s:
                left = oracles.Injected("unwritten", self.scheduler.now, math.inf, host.name)
                self.faults.append(left)

    def _hurt_worker(self, fault: Fault, process: Process) -> None:
        if fault.kind in HANGS:
            self._hangs[process.host.name].append(self.scheduler.now)
        match fault.kind:
            case "worker-kill":
                self._injected[fault.kind] += 1
                process.end(-9)
            case "worker-stop":
                self._injected[fault.kind] += 1
                process.stop()
            case "worker-spin":
                process.local["spins"] = self._trouble(fault)
            case "worker-mute":
                self.mute_starts[process.host.name].append(self._trouble(fault))
                process.end(-9)

    def _hurt_links(self, fault: Fault, host: Host, other: Host) -> None:
        if fault.kind in ("cut-out", "cut-in"):
            self._cuts[host.name].append((self.scheduler.now, self.scheduler.now + fault.seconds))
        network, seconds = self.network, fault.seconds
        everybody = [*self.lead_hosts, *(one.host for one in self.agents.values())]
        match fault.kind:
            case "cut-out":
                for far in everybody:
                    network.cut(host, far, seconds)
            case "cut-in":
                for far in everybody:
                    network.cut(far, host, seconds)
            case "cut-path":
                network.cut(host, other, seconds)
            case "cut-pair":
                network.cut(host, other, seconds)
                network.cut(other, host, seconds)
            case "slow-path":
                link = network.link(host, other)
                self._for_a_while(link, "rate", link.rate / 100, seconds)

    def _hurt_storage(self, fault: Fault, host: Host) -> None:
        name, number = STORAGE[fault.kind]
        self._for_a_while(host, name, self._trouble(fault, number), fault.seconds)

    def _hurt_lead(self, fault: Fault, process: Process | None) -> None:
        kind, seconds = fault.kind, fault.seconds
        if process is None or kind == "store-away":
            self._for_a_while(self.store, "away", self._trouble(fault), seconds)
            return
        slot, host = next((n, one.host) for n, one in self.leads.items() if one is process)
        if kind in oracles.LEAD_DISK:
            self._hurt_storage(fault, host)
            return
        self._injected[kind] += kind != "lead-amnesia"
        match kind:
            case "lead-kill" | "lead-amnesia":
                process.code = -9
                process.end(-9)
                if kind == "lead-amnesia":
                    lost = self.store.forget(self.scheduler.uniform(0.1, 0.5))
                    self.scheduler.log(f"the store has lost {lost} writes")
                    self._injected[kind] += lost > 0
                self.scheduler.at(seconds, lambda: self._start_lead(slot))
            case "lead-pause":
                self._pause([process], seconds)
            case "lead-cut":
                self._cut_leads.append((host, self.scheduler.now + seconds))
                for one in self.agents.values():
                    self._cut_from_leads(one.host)
            case "lead-reset":
                self.network.reset(host)

    def _lose(self, process: Process, silent: bool, back_s: float) -> None:
        host: Host = process.host
        if silent:
            host.power_off()
        process.end(-9)
        if silent:
            for one in [w for w in self.workers.values() if w.host is host]:
                one.end(-9)
        if back_s:
            returned = self.agents[host.name] = self._process(host.name, host)
            self.scheduler.at(back_s, lambda: self._start_agent(returned))

    def _pause(self, processes: list[Process], seconds: float) -> None:
        for one in processes:
            one.stop()
            self.scheduler.at(seconds, one.resume)

    def _for_a_while(self, target: Any, name: str, value: Any, seconds: float) -> None:
        """Change an attribute. Of several faults at the same time the newest counts."""
        values = self._values.setdefault((id(target), name), [(None, getattr(target, name))])
        fault = object(), value
        values.append(fault)

        def end() -> None:
            values.remove(fault)
            setattr(target, name, values[-1][1])

        setattr(target, name, value)
        self.scheduler.at(seconds, end)

    # ---- oracles ----

    def _exit_written(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((Path(self.config.run_dir) / "exit.json").read_text()))
        return {}

    def _watch(self) -> None:
        """Look for the end of the job, or for a job that makes no progress."""
        now = self.scheduler.now
        if self.ended_at is None:
            self.slowest_s = max(self.slowest_s, self._waits_s(now))
            self.ended_at = now if self._exit_written() else None
            if self.ended_at is not None:
                self._within_reach = {name for name in self.agents if self._is_connected(name)}
        if self.ended_at is not None:
            left = self._left()
            if not left:
                self.scheduler.over = True
                return
            self.left_s = now - max(self.ended_at, self.well_at)
            late = [name for name in left if self.left_s > self._leave_s(name)]
            if late:
                self.violation(f"still there {self.left_s:g} s after the end: {late}")
                self.scheduler.over = True
                return
        elif self._is_stalled(now):
            self.stalled = True
            self._no_progress()
            self.scheduler.over = True
            return
        self.scheduler.at(WATCH_S, self._watch)

    def _is_connected(self, name: str) -> bool:
        service = self.agents[name].local.get("service")
        return service is not None and not service._absence.since

    def _left(self) -> list[str]:
        everything = [*self.agents.values(), *self.workers.values(), *self.leads.values()]
        return [one.name for one in everything if one.alive]

    def _leave_s(self, name: str) -> float:
        """Return how long the process may be there after the end. An agent that could not hear of
        it waits for a coordinator. One that was connected in a network that was well heard of it,
        although it has no connection afterwards."""
        node = name.removeprefix("worker-of-")
        agent = self.agents.get(node)
        service = agent.local.get("service") if agent is not None else None
        was_well = not self.faults or self.well_at + SETTLED_S < (self.ended_at or 0.0)
        told = was_well and node in self._within_reach
        if service is None or told or not service._absence.since:
            return LEAVE_S
        # One that was never connected does not trust the record of the job's end.
        reads_the_end = self.scenario.shared and service._connected
        return LEAVE_S if reads_the_end else ORPHAN_S

    def _is_stalled(self, now: float) -> bool:
        """Whether the job has waited too long for a step, or for its end if copies were lost."""
        waits_s = self._waits_s(now)
        if waits_s <= PROGRESS_S or waits_s <= self._progress_s():
            return False
        return waits_s > UNRECOVERABLE_S or not self._must_end()

    def _must_end(self) -> bool:
        """Whether copies were lost, so that the coordinator ends the job after a wait. It waits
        without limit for a majority of nodes that may live."""
        coordinator = any(one.alive for one in self.leads.values())
        silent = {one.node for one in self.faults if one.kind in self._silent_kinds()}
        few = 2 * len(silent) < len(self.agents)
        return bool(coordinator and few and self._well_agents() and layers_lost(self))

    def _well_agents(self) -> list[str]:
        """Return the nodes that are there and stay, if they are enough for the job."""
        leaving = {one.node for one in self.faults if one.kind == "drain"}
        here = [name for name, one in self.agents.items() if one.alive]
        agents = [name for name in here if name not in leaving]
        too_few = not self.moved_at and len(agents) < self.config.min_nodes
        return [] if too_few else agents

    def _no_progress(self) -> None:
        if agents := self._well_agents():
            waits = f"{self._waits_s(self.scheduler.now):g} s although {agents} are well"
            if self._must_end():
                self.violation(f"no end for {waits}: {layers_lost(self)}")
            elif not layers_lost(self):
                self.violation(f"no step for {waits}")

    def _waits_s(self, now: float) -> float:
        return now - max(self.moved_at, self.well_at)

    def _progress_s(self) -> float:
        """Return the longest wait for a step. The job may pause before another attempt. What
        happened before the newest step is over."""
        since = self.moved_at - EARLIER_S
        faults = [fault for fault in self.faults if fault.at > since]
        hung = any(one.kind in HANGS for one in faults) or any(at > since for at in self._hung_at)
        silent = sum(one.kind in self._silent_kinds() for one in faults)
        bound_s = LONG_S if hung or silent > 1 else PROGRESS_S
        retries = [one for one in oracles.of(self.events, "retry") if one["at"] > since]
        return bound_s + float(retries[-1]["pause_s"] if retries else 0.0)

    def _silent_kinds(self) -> tuple[str, ...]:
        """Return the faults after which a node is only silent. A coordinator that took the job over
        may not have reached the port of an agent before, and takes no refusal for a proof then."""
        return VAULT_LOST if oracles.of(self.events, "adopted") else ("power",)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The event log, in simulated time."""
        path = Path(self.config.run_dir) / "events.jsonl"
        found = read_events(path) if path.exists() else []
        return [{**event, "at": event["at"] - WALL_S} for event in found]

    @property
    def destroyed(self) -> list[tuple[float, str]]:
        """(time, node) of each loss of a node's memory."""
        return [(one.at, one.node) for one in self.faults if one.kind in oracles.DESTROYS]

    @property
    def corrupted(self) -> list[float]:
        return []

    def judge(self) -> None:
        end, events = self._exit_written(), self.events
        for text in healthy_lost(self.losses.losses, self.losses.lives):
            self.violation(text)
        for text in oracles.too_many_epochs(events):
            self.violation(text)
        for event in oracles.of(events, "divergence"):
            self.violation(f"no bit was wrong: {event['reason']}")
        for lead in self.leads.values():
            for node in lead.local.get("untold", ()):
                self.violation(f"{lead.name} did not tell {node}, which was connected, the end")
        if not end:
            alone = sorted(name for name, one in self.agents.items() if self._ended_alone(one))
            if alone or not self.stalled:
                self.violation(
                    f"the job has no exit code; agents that ended by themselves: {alone}"
                )
            return
        if end["code"]:
            self._judge_error(end["code"], end["reason"])
        else:
            self._judge_success(events)

    def _judge_error(self, code: int, reason: str) -> None:
        """Copies were lost, the disk of the last checkpoint failed, or nodes had no memory for
        their own copies until the attempts were used up."""
        last_s = self.moved_at - oracles.WRITING_S
        bad_disk = any(
            one.kind in (*DISK, "disk-hang", *oracles.LEAD_DISK) and one.until > last_s
            for one in self.faults
        )
        unwritten = bad_disk and "checkpoint" in reason
        events = self.events  # a disk may have taken exit.json long after the end, and no event
        times = [e["at"] for e in oracles.of(events, "end")]
        ended = min([self.ended_at or 0.0, self.first_ended_at or math.inf, *times])
        no_room = oracles.out_of_memory(events, self.faults, ended, reason)
        lost = code == EXIT_UNRECOVERABLE and layers_lost(self)
        if not (lost or unwritten or no_room):
            self.violation(f"the job ended with {code}: {reason}")

    def _judge_success(self, events: list[dict[str, Any]]) -> None:
        last = oracles.of(events, "end")
        if not last:
            if not any(one.kind == "unrecorded" for one in self.faults):
                self.violation("there is no event of the end")
        elif last[-1]["params_sha256"] != expected_sha256(self.spec):
            self.violation("the final state is not that of a run without failures")
        unknown = oracles.steps_unreported(events, self.faults, self.spec.n_steps, self.reports)
        if unknown:
            self.violation(f"steps {unknown} were not reported")
        for text in oracles.evaluations_wrong(events, self.spec):
            self.violation(text)
        for text in oracles.scopes_unfinished(events, self._entered, self.faults):
            self.violation(text)
        every, steps = self.spec.checkpoint_every, self.spec.n_steps
        due = sorted({*range(every, steps + 1, every), steps}) if every else []
        complete = frozenset(step for step in due if self._readable(step))
        members = self.losses.last_members
        for text in oracles.checkpoints_missing(
            events, self.faults, due, complete, self.reports, members
        ):
            self.violation(text)
        left = [p.name for p in Path(self.config.memory_dir).glob("*") if self._clean(p.name)]
        if left:
            self.violation(f"memory is left: {left}")

    @staticmethod
    def _ended_alone(agent: Process) -> bool:
        """Whether the agent ended, and no fault has ended it."""
        return not agent.alive and agent.code not in (-9, EXIT_DRAINED, EXIT_TERMINATED)

    def _readable(self, step: int) -> bool:
        """Whether the checkpoint is complete. Its layers must have the state after this step."""
        path = Path(self.config.checkpoint_dir) / f"step-{step:08d}"
        try:
            manifest = checkpoint_directory.read_manifest(path)
        except (FieldError, ElasticError) as error:
            self.scheduler.log(f"checkpoint of step {step}: {error}")
            return False
        for layer in range(self.spec.n_layers):
            try:
                found = checkpoint_directory.read_run(path, manifest, layer, 0)
            except (FieldError, ElasticError) as error:
                self.violation(f"layer {layer} in the checkpoint of step {step}: {error}")
                continue
            if found != expected_run(self.spec, step, layer):
                self.violation(f"layer {layer} in the checkpoint of step {step} has a wrong state")
        return True

    def _clean(self, node: str) -> bool:
        """Whether the agent of `node` ended by itself, so that it had to clean up."""
        process = self.agents.get(node)
        return process is not None and process.code == 0


class _Agent(agent_service.NodeAgent):
    """Tells the world about its incarnations."""

    def __init__(self, world: World, *rest: Any) -> None:
        self._world = world
        super().__init__(*rest)

    def _begin_incarnation(self) -> None:
        super()._begin_incarnation()
        self._world.incarnation_began(self)


class _Links:
    def __init__(self, world: World) -> None:
        self._world = world

    def open(self, **given: Any) -> worker.ModelLinks:
        return worker.ModelLinks.open(self._world, **given)


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    """Make a directory. Its path has always the same length: messages have paths, and their size
    decides when they arrive."""
    base = os.path.abspath(BASE or tempfile.gettempdir())
    fixed = PATH_CHARS - len(f"{base}/") - RANDOM_CHARS
    path = Path(tempfile.mkdtemp(prefix="elastic-simulation-".ljust(fixed, "_"), dir=base))
    assert len(str(path)) == PATH_CHARS, f"the path is too long: {path}"
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run(scenario: Scenario, observe: Callable[[World], object] = lambda world: None) -> Outcome:
    """Run a job to its end; return what was wrong."""
    began = time.perf_counter()
    with _directory() as directory:
        world = World(scenario, directory)
        observe(world)
        with installed(world) as trail:
            world.scheduler.run(until_s=2000.0)
            simulated_s = world.scheduler.now
            if not world.scheduler.over:
                world.violation("nothing can happen any more")
            world.judge()
            world.scheduler.close()
        events = world.events
    problems = [*world.problems, *world.scheduler.crashes, *trail.errors]
    return Outcome(
        scenario=scenario,
        problems=problems,
        trail=[line.replace(str(directory), "") for line in world.scheduler.trail],
        code=world.lead_code,
        simulated_s=simulated_s,
        real_s=time.perf_counter() - began,
        switches=world.scheduler.switches,
        injected=world.injected,
        events=events,
        slowest_s=world.slowest_s,
        left_s=world.left_s,
    )
