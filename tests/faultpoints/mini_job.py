"""A job of two nodes in four small processes, driven to its end after one injected fault.

The driver takes the place of coordinator, links and launcher. Each node has an agent and a worker,
which are forked from the driver, so that a job takes a fraction of a second. Faults are real: a
process is killed or stopped by a signal, or a call raises OSError.

After a fault the driver begins an epoch as the coordinator does: it fences the vaults, halts the
workers, collects the inventories, and lets `elastic.core.recovery` solve for the next assignment.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from elastic.core.protocol.messages import CheckpointPart
from elastic.core.recovery.recovery import solve
from elastic.domain.errors import ElasticError, Unrecoverable
from elastic.domain.types import (
    STATE,
    WHOLE,
    Assignment,
    Copy,
    JobSpec,
    LayerSpec,
    Pipeline,
    Plan,
    Slot,
    Stage,
    StepRecord,
    Unit,
    whole_slots,
)
from elastic.planning.plan.schemes import schemes_of, streamed
from elastic.store import checkpoint_directory
from elastic.worker.replica.export import checkpoint_runs, params_sha256
from tests.faultpoints import mini_agent, mini_worker
from tests.faultpoints.injection import Injector, Point, install

NODES = ("a", "b")
SCHEMES = (
    ("stream+snapshot", 1),
    ("stream:2+replay:2", 1),
    ("log+snapshot", 1),
    ("log+replay:2", 1),
    ("recompute+snapshot", 1),
    ("recompute+replay:2", 1),
    ("stream+replica", 2),
    ("log+replica", 2),
    ("recompute+replica", 2),
    ("reduce+snapshot", 2),
    ("reduce+replica", 2),
    ("reduce+replay:2", 2),
    ("stream+snapshot/sharded", 2),
    ("reduce+replay:2/sharded", 2),
)
"""(backup scheme, pipelines)."""
NO_NODE = "no node is left"
N_STEPS, N_MICROBATCHES, EVERY = 3, 4, 2
DUE = tuple(s for s in range(1, N_STEPS + 1) if s % EVERY == 0 or s == N_STEPS)
LAYERS = tuple(LayerSpec(200, 200, 400, 1.0, 2.0) for _ in range(3))
SPEC = JobSpec(LAYERS, N_MICROBATCHES, N_STEPS, checkpoint_every=EVERY)
LONG_S, SHORT_S = 60.0, 0.25
"""Time limits of transfers: in general, and in runs in which a process is stopped."""
STOP_S = 0.6
DEADLINE_S = 60.0
MAX_EPOCHS = 12
EPOCHAL = ("report", "entered", "protected", "finished", "held")
"""Messages that begin with their epoch, and are dropped if it is over."""


class Failed(Exception):
    """The job did not end as it must."""


@dataclass(frozen=True)
class Fault:
    """One fault at one point."""

    point: Point
    how: str


@dataclass
class Result:
    """How a job ended."""

    sha: str
    epochs: int
    points: list[str]
    reached: set[str]
    """Texts of the points at which a fault was injected."""
    lost: dict[int, str] = field(default_factory=dict)
    """Step of a checkpoint that was given up -> reason."""
    refusal: str = ""
    """Reason for which the job cannot continue."""


@dataclass
class _Process:
    role: str
    node: str
    pid: int
    pipe: Connection


class MiniJob:
    """Runs one job. `root` is an empty folder for all its files."""

    def __init__(
        self,
        root: Path,
        scheme: str,
        pipelines: int,
        faults: tuple[Fault, ...] = (),
        *,
        record: bool = False,
    ) -> None:
        self._root, self._scheme, self._pipelines = root, scheme, pipelines
        self._faults, self._log = faults, root / "points" if record else None
        stops = any(fault.how == "stop" for fault in faults)
        self._timeout_s = SHORT_S if stops else LONG_S
        self._stops, self._stop_here = os.pipe()
        self._agents: dict[str, _Process] = {}
        self._workers: dict[str, _Process] = {}
        self._born: dict[str, int] = {}
        self._addresses: dict[str, str] = {}
        self._expected: set[int] = set()
        """Process ids of the workers that their agents accept."""
        self._epoch = self._begun = self._start = 0
        """The newest epoch; the newest one that has begun, and the step at which it did."""
        self._plan = self._plan_for(NODES, 0)
        self._records: dict[int, StepRecord] = {}
        self._parts: dict[int, set[Slot]] = {}
        self._saved: dict[int, Path] = {}
        self._lost: dict[int, str] = {}
        self._sums: dict[str, dict[int, Any]] = {}
        self._protected: set[str] = set()
        self._finished: dict[str, str] = {}
        self._due_epoch = ""
        """Reason to begin another epoch; "": none."""
        self._reports: dict[str, tuple[Copy, ...]] = {}
        self._live: dict[str, int] = {}
        self._entered: set[str] = set()
        self._until = time.monotonic() + DEADLINE_S

    def run(self) -> Result:
        """Run the job to its end. Raises Failed."""
        refusal = ""
        try:
            for node in NODES:
                self._begin_agent(node)
            self._await("addresses", lambda: all(n in self._addresses for n in self._agents))
            try:
                self._train()
                self._end_agents()
            except Unrecoverable as error:
                refusal = str(error)
            sha = next(filter(None, self._finished.values()), "")
            if not refusal:
                self._check_checkpoints()
        finally:
            self._kill_all()
            os.close(self._stops)
            os.close(self._stop_here)
        points = self._log.read_text().split("\n")[:-1] if self._log else []
        reached = {path.read_text() for path in self._root.glob("reached-*")}
        return Result(sha, self._epoch, points, reached, self._lost, refusal)

    def _train(self) -> None:
        self._due_epoch = "start"
        while True:
            while self._due_epoch:
                self._change_epoch()
            if self._finished.keys() >= set(self._plan.nodes()):
                if N_STEPS in self._saved:
                    return
                if N_STEPS in self._lost:
                    self._due_epoch = self._lost.pop(N_STEPS)
                    continue
            self._turn()

    # ---- epochs ----

    def _change_epoch(self) -> None:
        """Halt the workers, solve, and begin the next epoch. Leaves `_due_epoch` set after another
        fault."""
        self._epoch += 1
        if self._epoch > MAX_EPOCHS:
            raise Unrecoverable(f"{MAX_EPOCHS} epochs, the last one because: {self._due_epoch}")
        self._due_epoch = ""
        self._reports, self._live, self._finished, self._sums = {}, {}, {}, {}
        self._protected, self._entered = set(), set()
        for node in list(self._agents):
            self._order(self._agents, node, "fence", self._epoch)
            if node in self._workers:
                self._order(self._workers, node, "halt", self._epoch)
            else:
                self._order(self._agents, node, "report", self._epoch)
        self._await("halted", lambda: self._reports.keys() >= self._agents.keys())
        if not self._agents:
            raise Unrecoverable(NO_NODE)
        for node in [node for node in self._agents if node not in self._workers]:
            self._begin_worker(node)
        if self._due_epoch:
            return
        assignment = self._solve()
        self._begun, self._start = self._epoch, assignment.step
        self._parts = {s: slots for s, slots in self._parts.items() if s <= self._start}
        for node in list(self._agents):
            self._order(self._agents, node, "enter", assignment)
        self._await("entered", lambda: bool(self._due_epoch) or self._entered >= set(self._agents))
        for node in list(self._workers):
            if not self._due_epoch:
                self._order(self._workers, node, "train", assignment)

    def _solve(self) -> Assignment:
        nodes = tuple(self._agents)
        before, self._plan = self._plan, self._plan_for(nodes, self._epoch)
        inventory = tuple(copy for copies in self._reports.values() for copy in copies)
        newest = max(self._saved, default=-1)
        assignment = solve(
            plan=self._plan,
            spec=SPEC,
            inventory=inventory,
            records=tuple(self._records.values()),
            vaults=tuple((node, self._addresses[node]) for node in nodes),
            checkpoint=(str(self._saved[newest]), newest) if self._saved else None,
            initial_allowed=not self._records,
            live=self._live,
        )
        whole = [step for step, slots in self._parts.items() if self._is_complete(slots)]
        return replace(
            assignment,
            rescued=self._rescued(before, assignment.step, inventory),
            checkpointed=max([newest, *whole]),
        )

    def _rescued(self, before: Plan, step: int, inventory: tuple[Copy, ...]) -> tuple[Copy, ...]:
        """As `elastic.core.job.checkpoints.copies_to_rescue`."""
        due = (step - 1) // EVERY * EVERY
        if due <= max(self._saved, default=-1) or due in self._lost:
            return ()
        written, copies = whole_slots(self._parts.get(due, set())), dict[Slot, Copy]()
        for copy in inventory:
            if (copy.kind, copy.step, copy.portion) == (STATE, due, WHOLE):
                copies.setdefault(copy.slot, copy)
        return tuple(
            copy
            for slot, copy in sorted(copies.items())
            if slot not in written and before.holders(copy.layer)[0].node not in self._agents
        )

    def _plan_for(self, nodes: tuple[str, ...], epoch: int) -> Plan:
        gradients, state = self._scheme.split("+")
        schemes_of(self._scheme)
        n, m = len(LAYERS), N_MICROBATCHES
        if len(nodes) == 1 or self._pipelines == 1:
            cut = (0, 2, n) if len(nodes) == 2 else (0, n)
            stages = tuple(Stage(Unit(x), cut[i], cut[i + 1]) for i, x in enumerate(nodes))
            pipelines: tuple[Pipeline, ...] = (Pipeline(stages, tuple(range(m))),)
        else:
            pipelines = tuple(
                Pipeline((Stage(Unit(x), 0, n),), tuple(range(i, m, 2)))
                for i, x in enumerate(nodes)
            )
        if len(pipelines) == 1 and self._pipelines == 2:
            gradients, state = streamed(gradients), "snapshot"
        peers = ((nodes[0], nodes[1]), (nodes[1], nodes[0])) if len(nodes) == 2 else ()
        return Plan(epoch, n, m, 1, pipelines, peers=peers, gradients=gradients, state=state)

    # ---- messages ----

    def _turn(self) -> None:
        """Handle one message, or the end of a process."""
        pipes = {p.pipe: p for p in (*self._agents.values(), *self._workers.values())}
        left = self._until - time.monotonic()
        if left <= 0:
            raise Failed(f"the job is stuck in epoch {self._epoch}")
        if not pipes:
            raise Unrecoverable(NO_NODE)
        ready = wait([*pipes, self._stops], left)
        if self._stops in ready:
            self._continue_stopped()
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            process = pipes[pipe]
            try:
                words = pipe.recv()
            except (EOFError, OSError):
                self._handle_end(process)
                return
            self._handle(process, *words)
            return

    def _await(self, what: str, condition: Callable[[], bool]) -> None:
        while not condition():
            self._turn()
            if not self._agents:
                raise Unrecoverable(NO_NODE)

    def _continue_stopped(self) -> None:
        pid = int.from_bytes(os.read(self._stops, 4), "little")
        select.select([], [], [], STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _handle_end(self, process: _Process) -> None:
        os.waitpid(process.pid, 0)
        process.pipe.close()
        self._due_epoch = self._due_epoch or f"{process.role} ended"
        if process.node in self._workers and process is self._workers[process.node]:
            del self._workers[process.node]
            self._order(self._agents, process.node, "gone", process.pid)
            if process.node not in self._reports:
                self._order(self._agents, process.node, "report", self._epoch)
            return
        del self._agents[process.node]
        self._reports.pop(process.node, None)
        self._live.pop(process.node, None)
        worker = self._workers.pop(process.node, None)
        if worker is not None:
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
            worker.pipe.close()
        shutil.rmtree(self._root / process.node, ignore_errors=True)

    def _handle(self, process: _Process, kind: str, *words: Any) -> None:
        node = process.node
        if kind == "crashed" and node in self._workers:
            os.kill(self._workers[node].pid, signal.SIGKILL)
        elif kind in ("exchange", "address", "expects", "step", "part"):
            self._handle_fact(node, kind, *words)
        elif kind in EPOCHAL and words[0] == self._epoch:
            self._handle_of_epoch(node, kind, *words[1:])

    def _handle_fact(self, node: str, kind: str, *words: Any) -> None:
        match kind:
            case "address":
                self._addresses[node] = words[0]
            case "expects":
                self._expected.add(words[0])
            case "exchange":
                self._exchange(*words)
            case "step":
                self._records[words[1].step] = words[1]
            case "part":
                self._take_part(words[0])

    def _handle_of_epoch(self, node: str, kind: str, *words: Any) -> None:
        match kind:
            case "report":
                self._reports[node], halted = words
                if halted is not None:
                    self._live[node] = halted.step
                if halted is not None and halted.record is not None:
                    self._records[halted.record.step] = halted.record
            case "entered":
                self._entered.add(node)
            case "protected":
                self._protected.add(node)
                if self._protected >= set(self._agents):
                    for each in list(self._agents):
                        self._order(self._agents, each, "trim", self._epoch, self._start)
            case "finished":
                self._finished[node] = words[0]
            case "held":
                self._due_epoch = self._due_epoch or words[1]

    def _exchange(self, name: str, rank: int, ranks: tuple[int, ...], value: Any) -> None:
        """Answer a collective when all of its workers have come; check the commits."""
        epoch, what, _ = name.split("/")
        if int(epoch) != self._epoch:
            return
        came = self._sums.setdefault(name, {})
        came[rank] = value
        if len(came) < len(ranks):
            return
        if what.startswith("commit"):
            self._check_ledgers(name, what.endswith("True"), came)
        answers = [came[r] for r in ranks]
        for r in ranks:
            node = self._plan.units()[r].node
            self._order(self._workers, node, "answer", name, answers)

    def _check_ledgers(
        self, name: str, common: bool, sums: dict[int, dict[int, list[int]]]
    ) -> None:
        for layer in range(len(LAYERS)):
            ledgers = [ledger[layer] for ledger in sums.values() if layer in ledger]
            counted = [index for ledger in ledgers[: 1 if common else None] for index in ledger]
            same = not common or all(ledger == ledgers[0] for ledger in ledgers)
            if sorted(counted) != list(range(N_MICROBATCHES)) or not same:
                raise Failed(f"{name}: layer {layer} has the micro-batches {ledgers}")

    # ---- checkpoints ----

    def _is_complete(self, slots: set[Slot]) -> bool:
        return len(whole_slots(slots)) == len(LAYERS)

    def _take_part(self, part: CheckpointPart) -> None:
        if part.undone_by(self._begun, self._start):
            return
        if part.error:
            self._lost[part.step] = part.error
            return
        slots = self._parts.setdefault(part.step, set())
        slots |= set(part.layers)
        if self._is_complete(slots):
            directory = self._root / mini_agent.CHECKPOINTS
            self._saved[part.step] = checkpoint_directory.commit(directory, part.step, SPEC)
            del self._parts[part.step]
            self._lost.pop(part.step, None)

    def _try_unreported(self) -> None:
        """Complete checkpoints of which a report is missing, as the coordinator does at the end: a
        node may have been lost after it had written its files."""
        directory = self._root / mini_agent.CHECKPOINTS
        for step in DUE:
            if step not in self._saved and step not in self._lost:
                with contextlib.suppress(ElasticError, OSError):
                    self._saved[step] = checkpoint_directory.commit(directory, step, SPEC)

    def _check_checkpoints(self) -> None:
        self._try_unreported()
        missing = [step for step in DUE if step not in self._saved and step not in self._lost]
        if missing:
            raise Failed(f"checkpoints {missing} are missing, and nothing was reported")
        for step, path in self._saved.items():
            manifest = checkpoint_directory.read_manifest(path)
            if manifest.step != step:
                raise Failed(f"{path} has step {manifest.step}")
            sha = params_sha256(checkpoint_runs(path))
            if step == N_STEPS and sha != next(filter(None, self._finished.values())):
                raise Failed("the last checkpoint has other parameters than the job")

    # ---- processes ----

    def _begin_agent(self, node: str) -> None:
        arguments = (self._root, self._timeout_s, EVERY)

        def entry(pipe: Connection) -> None:
            root, timeout_s, every = arguments
            mini_agent.main(node, root, pipe, timeout_s, every)

        self._agents[node] = self._fork(f"agent-{node}", node, entry)

    def _begin_worker(self, node: str) -> None:
        number = self._born[node] = self._born.get(node, 0) + 1
        role = f"worker-{node}" if number == 1 else f"worker-{node}.{number}"

        def entry(pipe: Connection) -> None:
            mini_worker.main(node, self._root, pipe, SPEC, self._timeout_s)

        worker = self._workers[node] = self._fork(role, node, entry)
        self._order(self._agents, node, "worker", worker.pid, N_STEPS)
        while worker.pid not in self._expected and self._workers.get(node) is worker:
            self._turn()  # the agent refuses a process that it does not expect
        self._order(self._workers, node, "go")

    def _fork(self, role: str, node: str, entry: Callable[[Connection], None]) -> _Process:
        mine, theirs = Pipe()
        sys.stderr.flush()
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            theirs.close()
            return _Process(role, node, pid, mine)
        code = 1
        try:
            mine.close()
            with (self._root / f"{role}.log").open("ab") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            checkpoint_directory.RETRY_S = (0.001, 0.003, 0.009)
            tempfile.tempdir = str(self._root / "tmp")
            self._inject(role)
            entry(theirs)
            code = 0
        except BaseException:  # noqa: BLE001 - the process ends in any case
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _inject(self, role: str) -> None:
        mine = [fault for fault in self._faults if fault.point.role == role]
        fault = mine[0] if mine else None

        def claim(point: Point) -> bool:
            (self._root / f"reached-{role}").write_text(point.text)
            return True

        def stopping() -> None:
            os.write(self._stop_here, os.getpid().to_bytes(4, "little"))

        injector = Injector(
            role,
            record=str(self._log) if self._log else "",
            target=fault.point if fault else None,
            fault=fault.how if fault else "",
            claim=claim,
            stopping=stopping,
        )
        install(injector, (str(self._root),))

    def _order(self, group: dict[str, _Process], node: str, *words: Any) -> None:
        """Send an order. A process that is gone is noticed by the end of its pipe."""
        if node in group:
            with contextlib.suppress(OSError):
                group[node].pipe.send(words)

    def _end_agents(self) -> None:
        for node in list(self._workers):
            worker = self._workers.pop(node)
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
            worker.pipe.close()
        for process in self._agents.values():
            with contextlib.suppress(OSError):
                process.pipe.send(("end",))
        for process in self._agents.values():
            self._await_ended(process)

    def _await_ended(self, process: _Process) -> None:
        """Wait for the last message of an agent; a fault may still kill or stop it."""
        while (left := self._until - time.monotonic()) > 0:
            if self._stops in wait([process.pipe, self._stops], left):
                self._continue_stopped()
                continue
            try:
                words = process.pipe.recv()
            except EOFError:
                return
            if words[0] == "ended":
                if words[1]:
                    raise Failed(f"corrupt copies in the vault of {process.node}: {words[1]}")
                return
            self._handle(process, *words)  # a part may have been written meanwhile
        raise Failed(f"{process.role} does not end")

    def _kill_all(self) -> None:
        for process in (*self._workers.values(), *self._agents.values()):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(process.pid, signal.SIGKILL)
                os.waitpid(process.pid, 0)
            process.pipe.close()


def run_job(
    root: Path, scheme: str, pipelines: int, faults: tuple[Fault, ...] = (), *, record: bool = False
) -> Result:
    """Run one job in the new folder `root`. Raises Failed."""
    (root / "tmp").mkdir(parents=True)
    try:
        return MiniJob(root, scheme, pipelines, faults, record=record).run()
    except Failed:
        raise
    except Exception as error:  # the driver stands for the coordinator, which must not fail
        raise Failed(traceback.format_exc()) from error
