"""The supervisor behind `elastic run`: starts coordinator and agents, looks after them, and leaves
nothing behind.

    standalone      embedded coordinator, and one agent for every local "node"
    several hosts   one agent; the coordinator too, on the machine that owns its address

A coordinator that dies is started again; an agent that dies stays dead, for it stands for a machine.
Everything ends when the coordinator writes exit.json, when a signal comes, or when no node is left. One
thread; it sleeps until a child ends or a signal comes, and looks at the coordinator's files every
--monitor-interval.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from elastic.core.faults import FaultKind, FaultSpec
from elastic.errors import EXIT_FAILURE, EXIT_OK, ElasticError
from elastic.launcher.addresses import Owner, local_address, owner
from elastic.launcher.children import Child, Lifeline, tail_of
from elastic.launcher.exposing import check_free, metrics_flag
from elastic.launcher.follow import Follower, read_object
from elastic.launcher.injected import LauncherFaults
from elastic.launcher.options import LOOPBACK, Request
from elastic.launcher.progress import Bar, View, make_view
from elastic.launcher.reports import LINES, event_line
from elastic.launcher.rundir import RunDir, free_port

MAX_FAILED_STARTS = 3
"""A coordinator that dies this many times in a row before it serves is given up."""
FAULT_LOOK_S = 0.02
"""How often progress is read while a fault of the launcher is to come."""


def launch(request: Request) -> int:
    """Run the job on this machine to its end; return the exit code. Raises UsageError before anything is
    started."""
    address = request.config.coordinator or f"{LOOPBACK}:{free_port()}"
    hosting = request.hosts if request.hosts is not None else owner(address) is Owner.FREE
    host = LOOPBACK if request.config.standalone else request.config.local_addr or local_address(address)
    check_free(request.config, hosting, len(request.nodes))
    run_dir = RunDir(request)
    try:
        return Supervisor(request, run_dir, address, hosting, host).run()
    finally:
        run_dir.close()


class Supervisor:
    """Owns the processes of one job on this machine."""

    def __init__(self, request: Request, run_dir: RunDir, address: str, hosting: bool, host: str) -> None:
        self._request, self._config, self._path = request, run_dir.config, run_dir.path
        self._address, self._hosting, self._host = address, hosting, host
        self._view: View = make_view()
        self._lifeline = Lifeline()
        self._faults = LauncherFaults(self._config)
        self._progress, self._events = (
            Follower(self._path / "progress.jsonl"),
            Follower(self._path / "events.jsonl"),
        )
        self._coordinator: Child | None = None
        self._restart_at: float | None = None
        self._failed_starts = 0
        self._agents: list[Child] = []
        self._noted: set[str] = set()
        self._alone_since: float | None = None
        self._signals: deque[int] = deque()
        self._code: int | None = None

    def run(self) -> int:
        with self._listening() as wake:
            try:
                self._start()
                while self._code is None:
                    self._sleep(wake, FAULT_LOOK_S if self._faults else self._config.monitor_interval_s)
                    self._look()
                self._end(wake)
            finally:
                self._kill_all()
                self._view.close()
                self._lifeline.close()
        return EXIT_FAILURE if self._code is None else self._code

    # ---- starting ----

    def _start(self) -> None:
        if self._hosting:
            self._start_coordinator()
        for index, node in enumerate(self._request.nodes):
            self._start_agent(node, index)
        self._view.note(f"{', '.join(self._request.nodes)}; run directory {self._path}")

    def _start_coordinator(self) -> None:
        self._restart_at = None
        with (self._path / "logs" / "coordinator.out").open("ab") as out:
            args = ["--run-dir", str(self._path), "--address", self._address, *metrics_flag(self._config, 0)]
            self._coordinator = Child.start(
                "coordinator", self._request.services[0], args, self._lifeline, out
            )

    def _start_agent(self, node: str, index: int) -> None:
        domain, device = self._config.domain(index), self._config.device(index)
        args = ["--run-dir", str(self._path), "--node", node, "--coordinator", self._address]
        args += ["--host", self._host, *(["--domain", domain] if domain else [])]
        args += ["--device", device] if device else []
        memory = self._config.node_memory_bytes(index)
        args += ["--memory", str(memory)] if memory else []
        lifetime_s = self._config.lifetime_s(index)
        args += ["--lifetime", f"{lifetime_s:g}"] if lifetime_s else []
        args += metrics_flag(self._config, index + 1)
        console = self._view.output if isinstance(self._view, Bar) else None
        self._agents.append(Child.start(node, self._request.services[1], args, self._lifeline, console))

    # ---- looking after ----

    def _look(self) -> None:
        """Everything that may have happened since the last look."""
        if self._signals:
            number = signal.Signals(self._signals.popleft())
            self._view.note(f"{number.name}: ending the job")
            self._code = 128 + number
            return
        self._read_files()
        verdict = read_object(self._path / "exit.json") if self._hosting else None
        if verdict is not None:
            self._code = int(verdict.get("code", EXIT_FAILURE))
            self._view.note(str(verdict.get("reason", "")) or "the job is over")
            return
        self._look_at_coordinator()
        self._look_at_agents()

    def _read_files(self) -> None:
        for entry in self._progress.read():
            self._view.update(entry)
            for spec in self._faults.observe(entry):
                self._carry_out(spec)
        for event in self._events.read():
            line = LINES.get(str(event.get("kind")))
            if line is not None:
                self._view.note(line(event))
            elif self._request.console_events:
                self._view.note(event_line(event))

    def _look_at_coordinator(self) -> None:
        child = self._coordinator
        if self._restart_at is not None:
            if time.monotonic() >= self._restart_at:
                self._start_coordinator()
        elif child is not None and child.ended():
            self._coordinator_died(child)

    def _coordinator_died(self, child: Child) -> None:
        if self._request.hosts is None and owner(self._address) is Owner.TAKEN:
            self._hosting, self._coordinator = False, None  # another launcher here was faster
            return
        announced = read_object(self._path / "coordinator.json") or {}
        self._failed_starts = 0 if announced.get("pid") == child.pid else self._failed_starts + 1
        self._view.note(f"the coordinator ended ({_named(child.returncode)}); starting it again")
        if self._failed_starts >= MAX_FAILED_STARTS:
            log = self._path / "logs" / "coordinator.out"
            self._view.note(f"the coordinator cannot run; the end of {log}:\n{tail_of(log)}")
            self._code = EXIT_FAILURE
            return
        self._restart_at = time.monotonic() + 0.2 * self._failed_starts

    def _look_at_agents(self) -> None:
        for agent in self._agents:
            if agent.ended() and agent.name not in self._noted:
                self._noted.add(agent.name)
                if agent.returncode != EXIT_OK:
                    self._view.note(f"{agent.name} ended ({_named(agent.returncode)})")
        if any(not agent.ended() for agent in self._agents) or self._faults.joins:
            self._alone_since = None
            return
        if not self._hosting:
            codes = [agent.returncode or EXIT_OK for agent in self._agents]
            self._code = next((code if code > 0 else 128 - code for code in codes if code), EXIT_OK)
        elif self._config.standalone:
            self._wait_alone()

    def _wait_alone(self) -> None:
        """No node is left and none will come: give the coordinator the time to say so itself."""
        now = time.monotonic()
        self._alone_since = now if self._alone_since is None else self._alone_since
        if now - self._alone_since > 2 * self._config.lease_s:
            self._view.note(f"every node ended before the job did; logs are in {self._path / 'logs'}")
            self._code = EXIT_FAILURE

    # ---- injected faults ----

    def _carry_out(self, spec: FaultSpec) -> None:
        self._view.note(f"fault: {spec.text}")
        match spec.kind:
            case FaultKind.KILL_COORDINATOR if self._coordinator is not None:
                self._coordinator.kill()
                self._restart_at = time.monotonic() + spec.down_s
            case FaultKind.JOIN:
                index = len(self._agents)
                self._start_agent(f"node{index}", index)
            case FaultKind.DRAIN:
                threading.Thread(target=self._drain, args=(spec,), name="drain", daemon=True).start()
            case _:
                self._view.note(f"{spec.kind} does nothing here: this machine does not run the coordinator")

    def _drain(self, spec: FaultSpec) -> None:
        from elastic.rpc.client import call

        try:
            call(self._address, "drain", {"node": spec.node, "deadline_s": spec.deadline_s})
        except ElasticError as error:
            self._view.note(f"drain of {spec.node}: {error}")

    # ---- ending ----

    def _end(self, wake: int) -> None:
        """Let agents end by themselves after a finished job, else ask them; kill what is left. Second
        signal: now."""
        finished = self._hosting and (self._path / "exit.json").exists()
        self._read_files()
        patience = self._config.shutdown_timeout_s
        if not (finished and self._await(wake, self._agents, patience)):
            for agent in self._agents:
                agent.terminate()
            self._await(wake, self._agents, patience)
        for agent in self._agents:
            agent.kill()
        if self._coordinator is not None:
            if not finished:
                self._coordinator.terminate()
            self._await(wake, [self._coordinator], patience)

    def _await(self, wake: int, children: list[Child], timeout_s: float) -> bool:
        """Wait for children to end; False when time is up or another signal came."""
        end = time.monotonic() + timeout_s
        while not all(child.ended() for child in children):
            self._sleep(wake, min(1.0, max(0.0, end - time.monotonic())))
            if self._signals or time.monotonic() >= end:
                return all(child.ended() for child in children)
        return True

    def _kill_all(self) -> None:
        for child in (*self._agents, *([self._coordinator] if self._coordinator else [])):
            child.kill()

    # ---- signals ----

    @contextlib.contextmanager
    def _listening(self) -> Iterator[int]:
        """Take the signals over for a while; yields a descriptor that can be read when one came or a
        child ended."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

        def heard(number: int, _frame: Any) -> None:
            if number != signal.SIGCHLD:
                self._signals.append(number)

        handled = {*self._request.signals, signal.SIGCHLD}
        former = {number: signal.signal(number, heard) for number in handled}
        former_wake = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        try:
            yield read
        finally:
            signal.set_wakeup_fd(former_wake)
            for number, handler in former.items():
                signal.signal(number, handler)
            os.close(read)
            os.close(write)

    def _sleep(self, wake: int, seconds: float) -> None:
        ready, _, _ = select.select([wake], [], [], seconds)
        if ready:
            os.read(wake, 4096)


def _named(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return signal.Signals(-returncode).name
    return f"exit code {returncode}"
