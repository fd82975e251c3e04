"""A small form of `make simulate`, and tests that the simulation itself can be trusted."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.service import NodeAgent
from elastic.coordinator.records.run_records import RunRecords
from elastic.core.coordinator import transitions
from elastic.core.job import absent_nodes, epoch_change, liveness, scope
from elastic.core.job.state import JobState, LossKind
from elastic.core.policy import progress_watchdog
from elastic.core.protocol.messages import Promise, StepDone, Stop
from elastic.domain.errors import EXIT_UNRECOVERABLE, Unrecoverable, VaultError
from elastic.store import checkpoint_directory, checkpoint_format
from elastic.worker.epoch_session import EpochSession
from elastic.worker.transport.cancellation import LinkFailed
from tests.simulation.control import SimServerSession
from tests.simulation.kept import kept
from tests.simulation.model import ModelReplica
from tests.simulation.network import Endpoint, Network, connect
from tests.simulation.oracles import Injected
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.worker import ModelLinks, ModelSteps
from tests.simulation.world import (
    LONG_S,
    PATHS,
    PROGRESS_S,
    TRAINING_S,
    WRITER,
    Fault,
    Outcome,
    Scenario,
    World,
    run,
    scenario_of,
)

FRESH_S = 4.0
"""Time for fresh seeds."""
QUIET = Scenario(
    seed=1,
    nodes=3,
    coordinators=1,
    steps=4,
    microbatches=4,
    checkpoint_every=2,
    backup="stream+snapshot",
    latency_s=0.0002,
    rate=1e6,
    microbatch_s=0.2,
    faults=(),
)


def check(outcome: Outcome) -> None:
    seed = outcome.scenario.seed
    again = f"repeat it with: python -m tests.simulation --seed {seed} --trail"
    assert not outcome.problems, f"{outcome.text()}\n{again}"


@pytest.mark.parametrize("scenario", [one for _, one in kept()], ids=[why for why, _ in kept()])
def test_failures_of_the_past(scenario: Scenario) -> None:
    check(run(scenario))


def test_fresh_seeds() -> None:
    end = time.monotonic() + FRESH_S
    while time.monotonic() < end:
        check(run(scenario_of(secrets.randbits(32))))


def test_a_seed_decides_everything() -> None:
    faults = (Fault("cut-path", 4.0, 0, 1, 6.0), Fault("kill", 4.5, 1, 0, 0.0))
    scenario = dataclasses.replace(QUIET, faults=faults)
    first, second = run(scenario), run(scenario)
    assert first.trail == second.trail and first.switches == second.switches
    other = run(dataclasses.replace(scenario, seed=scenario.seed + 1))
    assert other.trail != first.trail


OTHER_PROCESS = """
import os, sys, threading
from elastic import background
from elastic.launcher.run import supervisor
from elastic.rpc.security import tls
from tests.simulation import world

def remain():
    while not over.is_set():
        background.time.sleep(0.001)
        background.threading.Thread(target=background.time.monotonic).start()
        background.log.warning("an earlier test left this thread")

over = threading.Event()
left = threading.Thread(target=remain)
left.start()
tls.use(tls.SecuritySettings(token="left by an earlier test"))
world.BASE = os.getcwd()
trail = world.run(world.scenario_of(int(sys.argv[1]))).trail
over.set()
left.join()
print("BEGIN", *trail, sep="\\n")
"""


def test_a_seed_decides_everything_in_any_process() -> None:
    """Here, and in a process with other hashes, environment, folder, modules, threads and security
    settings, whose two streams of output are one pipe."""
    environ = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7", "TMPDIR": "/tmp"}
    command = [sys.executable, "-c", OTHER_PROCESS, "1551285366"]
    with tempfile.TemporaryDirectory(prefix="a-longer-name") as folder:
        done = subprocess.run(
            command, check=True, text=True, cwd=folder, env=environ,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    trail = run(scenario_of(1551285366)).trail
    assert done.stdout.partition("BEGIN\n")[2].splitlines() == "\n".join(trail).splitlines()


# ---- faults ----


def test_logs_that_an_earlier_test_did_not_want_are_in_the_trail() -> None:
    """Loggers remember whether a level was enabled."""
    before = run(QUIET).trail
    level = logging.root.level
    try:
        logging.root.setLevel(logging.WARNING)
        for name in list(logging.root.manager.loggerDict):
            logging.getLogger(name).isEnabledFor(logging.INFO)
        assert run(QUIET).trail == before
    finally:
        logging.root.setLevel(level)


def test_faults_of_the_training_count_from_the_first_step() -> None:
    pause = Fault("lead-pause", 0.5, 0, 0, 0.3)
    outcome = run(dataclasses.replace(QUIET, faults=(pause,), in_training=True))
    check(outcome)
    first = next(number for number, line in enumerate(outcome.trail) if "step 0 is done" in line)
    (at,) = [number for number, line in enumerate(outcome.trail) if "FAULT" in line]
    assert at > first
    times = [float(outcome.trail[number].split()[0]) for number in (first, at)]
    assert times[1] - times[0] == pytest.approx(0.5, abs=0.001)


def test_most_faults_come_during_the_training() -> None:
    """Also one in ten bad paths lasts for minutes, and the job outlasts it."""
    scenarios = [scenario_of(seed) for seed in range(1000)]
    assert all(one.training_s >= TRAINING_S for one in scenarios)
    faults = [(fault, one) for one in scenarios for fault in one.faults]
    assert sum(one.in_training for _, one in faults) > 0.7 * len(faults)
    paths = [(fault, one) for fault, one in faults if fault.kind in PATHS]
    long = [(fault, one) for fault, one in paths if fault.seconds >= 200.0]
    assert 0.05 * len(paths) < len(long) < 0.25 * len(paths)
    for fault, one in long:
        assert one.training_s > fault.at + fault.seconds


@pytest.mark.parametrize(("every", "counts"), [(0, 0), (1, 1)])
def test_a_full_disk_counts_if_something_is_written(every: int, counts: int) -> None:
    """The agents of a job without checkpoints do not write."""
    full = Fault("disk-full", 3.5, 0 if not every else WRITER, 0, 15.0)
    outcome = run(dataclasses.replace(QUIET, steps=8, checkpoint_every=every, faults=(full,)))
    assert outcome.injected["disk-full"] == counts


def test_a_fault_without_a_victim_does_not_count() -> None:
    """Workers start later."""
    outcome = run(dataclasses.replace(QUIET, faults=(Fault("worker-stop", 1.0, 0, 0, 0.0),)))
    assert not outcome.injected
    assert any("no victim" in line for line in outcome.trail)


def test_the_next_worker_of_the_same_node_is_mute() -> None:
    """A worker of another node starts before it."""
    faults = (Fault("worker-kill", 3.0, 0, 0, 0.0), Fault("worker-mute", 3.001, 1, 0, 0.0))
    worlds: list[World] = []
    outcome = run(dataclasses.replace(QUIET, faults=faults), worlds.append)
    check(outcome)
    workers = worlds[0].workers.values()
    assert [one.host.name for one in workers if "mute" in one.local] == ["node1"]
    assert outcome.injected == {"worker-kill": 1, "worker-mute": 1}


def test_a_store_that_forgets_counts_if_a_write_is_lost() -> None:
    """At a random time the newest write is often too old."""

    def counts(after_write: bool, at: float) -> bool:
        amnesia = Fault("lead-amnesia", at, 0, 0, 1.0, after_write)
        outcome = run(dataclasses.replace(QUIET, steps=40, checkpoint_every=0, faults=(amnesia,)))
        check(outcome)
        (line,) = (line for line in outcome.trail if "the store has lost" in line)
        lost = "lost 0 writes" not in line
        assert outcome.injected["lead-amnesia"] == lost
        return lost

    assert counts(True, 2.2)
    assert not all(counts(False, 5.0 + 0.7 * i) for i in range(12))


# ---- the oracles find what they should ----


def test_a_micro_batch_that_counts_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = ModelReplica.collect

    def twice(self: ModelReplica, index: int) -> None:
        collect(self, index)
        if (self.version, self.index, index) == (1, 2, 0):
            self.gradient[index] *= 2

    monkeypatch.setattr(ModelReplica, "collect", twice)
    assert "exactly once" in run(QUIET).problems[0]


def test_a_missing_checkpoint_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint_directory.write_part
    commit = checkpoint_directory.commit

    def forgetful(directory: object, step: int, *rest: object) -> object:
        path = commit(directory, step, *rest)  # type: ignore[arg-type]
        if step == 2:
            (path / checkpoint_format.MANIFEST).unlink()
        return path

    monkeypatch.setattr(checkpoint_directory, "commit", forgetful)
    assert write is checkpoint_directory.write_part
    assert "checkpoint of step 2 is missing" in run(QUIET).problems[0]


def test_a_checkpoint_with_the_state_of_another_layer_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its names and sizes are right."""
    write = checkpoint_directory.write_part
    states: dict[int, memoryview] = {}

    def mixed(
        directory: object, step: int, layer: int, shard: int, n_layers: int, tp: int,
        run: memoryview, *rest: object, **named: object,
    ) -> object:  # fmt: skip
        state = states.setdefault(step, memoryview(bytes(run)))
        return write(directory, step, layer, shard, n_layers, tp, state, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint_directory, "write_part", mixed)
    problems = run(QUIET).problems
    assert len(problems) == 6 and all("has a wrong state" in text for text in problems)


def test_a_checkpoint_that_is_given_up_without_a_fault_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = checkpoint_directory.write_part

    def broken(directory: object, step: int, *rest: object) -> object:
        if step == 2:
            raise VaultError("broken")
        return write(directory, step, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint_directory, "write_part", broken)
    assert any("checkpoint of step 2 was given up" in text for text in run(QUIET).problems)


@pytest.mark.parametrize(
    "faults",
    [
        (),
        (Fault("store-away", 2.5, 0, 0, 6.0),),
        (Fault("cut-pair", 2.5, 1, 0, 6.0),),
        (Fault("lead-cut", 2.5, 1, 0, 0.3),),
        (Fault("back", 2.5, 1, 0, 0.3),),
    ],
    ids=lambda faults: "-".join(fault.kind for fault in faults) or "none",
)
def test_the_loss_of_a_healthy_node_is_found(
    monkeypatch: pytest.MonkeyPatch, faults: tuple[Fault, ...]
) -> None:
    """The coordinator is blind for node1 in the second step, or soon after its return."""
    survey, seen = liveness.survey, list[str]()
    returns = any(fault.kind == "back" for fault in faults)

    def blind(state: JobState, now: float) -> liveness.Survey:
        found = survey(state, now)
        if "node1" not in state.members:
            return found
        incarnation = state.members["node1"].report.info.incarnation
        seen.extend([incarnation] if incarnation not in seen else [])
        is_blind = len(seen) == 2 if returns else len(seen) == 1 and state.newest_step >= 1
        loss = liveness.Loss("node1", LossKind.SILENT, "blind", proven=False)
        return dataclasses.replace(found, losses=(loss,)) if is_blind else found

    monkeypatch.setattr(liveness, "survey", blind)
    problems = run(dataclasses.replace(QUIET, faults=faults)).problems
    assert any("node1 was lost" in text for text in problems)


def test_epochs_without_a_pause_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = ModelLinks.all_gather

    def broken(self: ModelLinks, tag: tuple[str, int], *rest: object) -> object:
        if self.epoch < 12 and tag[1] > 0:
            raise LinkFailed((), "broken")
        return gather(self, tag, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelLinks, "all_gather", broken)
    assert not any("without a step" in text for text in run(QUIET).problems), "it pauses"
    monkeypatch.setattr(progress_watchdog, "PAUSES_S", (0.0,))
    monkeypatch.setattr(progress_watchdog, "MOST_FAILED", 100)
    monkeypatch.setattr(transitions, "CONTACT_FACTOR", 1.0)
    assert any("epochs in 60 s without a step" in text for text in run(QUIET).problems)


def test_an_evaluation_that_a_recovery_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = (Fault("worker-kill", 0.5, 0, 0, 0.0),)
    job = dataclasses.replace(QUIET, evaluate_every=1, faults=faults, in_training=True)
    outcome = run(job)
    assert not outcome.problems
    assert [e["step"] for e in outcome.events if e["kind"] == "evaluation"] == [1, 2, 3, 4]
    evaluate = EpochSession._evaluate

    def forgetful(self: EpochSession, steps: Any, version: int) -> object:
        first = self._order.epoch == 1
        return evaluate(self, steps, version) if first else None

    monkeypatch.setattr(EpochSession, "_evaluate", forgetful)
    assert any("the evaluation after step 4 is reported 0" in text for text in run(job).problems)


def test_a_wrong_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ends with code 3 after a worker was lost, whose copies all exist."""
    choose = epoch_change._choose

    def broken(state: JobState, now: float) -> object:
        if state.epoch > 1:
            raise Unrecoverable("broken")
        return choose(state, now)

    monkeypatch.setattr(epoch_change, "_choose", broken)
    monkeypatch.setattr(scope, "outside_nodes", lambda *_: ())  # it needs no choice
    crash = dataclasses.replace(QUIET, faults=(Fault("worker-kill", 3.0, 0, 0, 0.0),))
    assert "the job ended with 3" in run(crash).problems[0]


def test_a_job_without_an_exit_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunRecords, "_write_exit", lambda *_: None)
    assert any("the job has no exit code" in text for text in run(QUIET).problems)


def test_a_job_that_waits_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(self: ModelSteps, *_: object) -> None:
        self._world.scheduler.pause(None)

    monkeypatch.setattr(ModelSteps, "run", hang)
    assert any("no step for" in text for text in run(QUIET).problems)


def test_a_job_without_copies_that_waits_for_ever_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a node without layers is left."""
    kills = tuple(Fault("kill", at, 0, 0, 0.0) for at in (1.0, 1.02, 1.04, 1.06))
    job = dataclasses.replace(QUIET, nodes=5, steps=20, microbatches=3, backup="stream+replica")
    lost = dataclasses.replace(job, checkpoint_every=0, faults=kills, in_training=True)
    outcome = run(lost)
    assert outcome.code == EXIT_UNRECOVERABLE and not outcome.problems
    monkeypatch.setattr(absent_nodes, "end_if_hopeless", lambda *_: None)
    assert any("no end for" in text for text in run(lost).problems)


@pytest.mark.parametrize("until", [1.0, 40.0])
def test_a_step_may_be_unreported_if_the_coordinator_ends_with_a_bad_disk(
    monkeypatch: pytest.MonkeyPatch, until: float
) -> None:
    """A log that forgets a step is found although the disk was bad for a while."""
    step = RunRecords.step

    def forgets(self: RunRecords, done: StepDone, *rest: object) -> None:
        if done.record.step != 2:
            step(self, done, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(RunRecords, "step", forgets)
    full = Fault("lead-disk", 3.0, 0, 0, until)
    problems = run(dataclasses.replace(QUIET, checkpoint_every=0, faults=(full,))).problems
    assert any("steps [2] were not reported" in text for text in problems) is (until < 40.0)


@pytest.mark.parametrize(("last_step", "bound_s"), [(3.5, LONG_S + 30.0), (60.0, PROGRESS_S)])
def test_a_fault_prolongs_only_the_wait_for_the_next_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last_step: float, bound_s: float
) -> None:
    """So does the pause before another attempt."""
    retry = {"kind": "retry", "at": 8.0, "pause_s": 30.0}
    monkeypatch.setattr(World, "events", [retry])
    world = World(QUIET, tmp_path)
    world.faults.append(Injected("worker-stop", 4.0, math.inf, "node0"))
    world.moved_at = last_step
    assert world._progress_s() == bound_s


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.chaos)])
def test_an_agent_that_never_ends_is_found(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """Its network is cut until the job and the coordinator have ended."""
    ways = tuple(Fault(kind, 3.0, 0, 0, 15.0) for kind in ("cut-out", "cut-in"))
    cut = dataclasses.replace(QUIET, shared=shared, faults=ways)
    assert not run(cut).problems
    monkeypatch.setattr(NodeAgent, "_consider_the_end", lambda self: None)
    assert any("still there" in text for text in run(cut).problems)


@pytest.mark.parametrize("shared", [True, False])
def test_an_agent_that_is_not_told_of_the_end_is_found(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """It is connected, and waits for a coordinator. It may read the record of the end."""
    send = SimServerSession.send

    def forgets(self: SimServerSession, message: object, epoch: int) -> bool:
        told = isinstance(message, Stop) and self.sender == "node1"
        return told or send(self, message, epoch)

    monkeypatch.setattr(SimServerSession, "send", forgets)
    problems = run(dataclasses.replace(QUIET, shared=shared)).problems
    assert any("still there" in text for text in problems) is not shared
    assert any("did not tell node1, which was connected, the end" in text for text in problems)


@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize("kind", ["kill", "power"])
def test_silent_nodes_prolong_the_wait_if_a_coordinator_took_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adopted: bool, kind: str
) -> None:
    """A new coordinator takes no refused port for a proof, whatever happened to the former one."""
    events = [{"kind": "adopted", "at": 3.0}] if adopted else []
    monkeypatch.setattr(World, "events", events)
    world = World(QUIET, tmp_path)
    world.faults += [Injected(kind, 4.0, math.inf, f"node{n}") for n in range(2)]
    assert (world._progress_s() == LONG_S) is (adopted or kind == "power")


def test_a_wrong_final_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    update = ModelReplica.update

    def wrong(self: ModelReplica, reduced: object, clip: float, lr: float) -> None:
        update(self, reduced, clip, lr)  # type: ignore[arg-type]
        if (self.version, self.index) == (2, 0):
            self.value = bytes(len(self.value))

    monkeypatch.setattr(ModelReplica, "update", wrong)
    assert "final state" in run(QUIET).problems[0]


def test_holders_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit in one replica: the real comparison finds it, and the state is repaired."""
    update = ModelReplica.update

    def wrong(self: ModelReplica, reduced: object, clip: float, lr: float) -> None:
        update(self, reduced, clip, lr)  # type: ignore[arg-type]
        if (self.version, self.index, self.owner) == (2, 0, "node0"):
            self.value = bytes(len(self.value))

    monkeypatch.setattr(ModelReplica, "update", wrong)
    problems = run(dataclasses.replace(QUIET, nodes=4, verify_every=1)).problems
    assert len(problems) == 1 and "no bit was wrong: layer 0" in problems[0]


# ---- changes with a scope ----

SCOPED = dataclasses.replace(
    QUIET,
    nodes=4,
    pipelines="2",
    microbatches=12,
    faults=(Fault("worker-kill", 0.6, 0, 0, 0.0),),
    in_training=True,
)
"""The worker of a node is killed in the second of four steps, in one of two pipelines."""


@pytest.mark.parametrize("kind", ["worker-kill", "kill", "power", "worker-stop"])
def test_a_pipeline_that_lost_nothing_goes_on(kind: str) -> None:
    outcome = run(dataclasses.replace(SCOPED, faults=(Fault(kind, 0.6, 0, 0, 0.0),)))
    check(outcome)
    assert outcome.scopes == {"begun": 1, "complete": 1}, outcome.text()
    assert [e["step"] for e in outcome.events if e["kind"] == "step"] == [0, 1, 2, 3]


def test_a_commit_in_spite_of_a_promise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    done = World.step_done

    def late(self: World, step: int, links: ModelLinks) -> None:
        if step == 1:
            promise = Promise(links.epoch + 1, links.epoch, step)
            links.process.local["promise"] = promise
        done(self, step, links)

    monkeypatch.setattr(World, "step_done", late)
    problems = run(dataclasses.replace(SCOPED, faults=())).problems
    assert any("in spite of Promise" in text for text in problems)


def test_sums_that_are_not_as_promised_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker reports it as a failed installation, and the next epoch has no scope."""
    kept = EpochSession._kept_layers

    def forgets(self: EpochSession, after_layer: Callable[[], None]) -> object:
        if self._assignment.promised:
            for replica in self._context.replicas.values():
                replica.clear()
        return kept(self, after_layer)

    monkeypatch.setattr(EpochSession, "_kept_layers", forgets)
    outcome = run(SCOPED)
    check(outcome)
    assert outcome.scopes == {"begun": 1, "complete": 0}, outcome.text()
    halts = [event for event in outcome.events if event["kind"] == "halt"]
    assert [bool(event.get("outside")) for event in halts] == [False, True, False]


# ---- the network ----


def _pair(latency_s: float, rate: float) -> tuple[Scheduler, Network, list[Process]]:
    scheduler = Scheduler(1)
    network = Network(scheduler, latency_s, rate)
    hosts = [network.add_host(name, name) for name in ("a", "b")]
    return scheduler, network, [Process(scheduler, host.name, host) for host in hosts]


def test_a_lost_direction_delays_a_stream_and_size_takes_time() -> None:
    scheduler, network, (a, b) = _pair(0.01, 1000.0)
    one, other = Endpoint(a.host, a), Endpoint(b.host, b)
    one.other, other.other = other, one
    network.cut(a.host, b.host, 3.0)
    one.transmit(b"late", 4)
    other.transmit(b"long", 2000)
    times: dict[str, float] = {}
    one.on_arrival = lambda: times.setdefault("a", scheduler.now)
    other.on_arrival = lambda: times.setdefault("b", scheduler.now)
    scheduler.run(20.0)
    assert list(other.inbox) == [b"late"] and times["b"] > 3.0
    assert list(one.inbox) == [b"long"] and 2.0 < times["a"] < 3.0


def test_a_reset_ends_both_sides_and_loses_what_is_on_the_way() -> None:
    scheduler, network, (a, b) = _pair(0.01, 1e6)
    one, other = Endpoint(a.host, a), Endpoint(b.host, b)
    one.other, other.other = other, one
    one.transmit(b"lost", 4)
    scheduler.at(0.001, lambda: network.reset(b.host))
    scheduler.run(5.0)
    assert (one.ended, other.ended) == ("reset", "reset") and not other.inbox


def test_a_closed_port_refuses_and_a_dead_host_says_nothing() -> None:
    scheduler, network, (a, b) = _pair(0.01, 1e6)
    found: list[object] = []
    connect(a.host, a, "b", 1, found.append)
    scheduler.run(5.0)
    assert isinstance(found.pop(), ConnectionRefusedError)
    b.host.power_off()
    connect(a.host, a, "b", 1, found.append)
    scheduler.run(60.0)
    assert not found and network.losses == 0
