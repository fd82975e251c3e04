"""The supervisor behind `elastic run`: starts coordinator and agents, looks after them, and leaves
nothing behind.

    standalone      embedded coordinator (or several, one of which leads), and one agent for every local "node"
    several hosts   one agent; a coordinator too, on the machine that owns its address, or one of them

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
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic.config import JobConfig
from elastic.core.protocol.fault_spec import FaultKind, FaultSpec
from elastic.domain.errors import (
    EXIT_FAILURE,
    EXIT_JOB_FAILED,
    EXIT_OK,
    ElasticError,
    FieldError,
    service_exit,
)
from elastic.launcher.flags.addresses import Owner, local_address, owner
from elastic.launcher.flags.request import LOOPBACK, Request
from elastic.launcher.run.coordinators import Coordinators
from elastic.launcher.run.event_tail import Follower, read_object
from elastic.launcher.run.injected import LauncherFaults
from elastic.launcher.run.metrics_endpoint import check_free, first_agent, metrics_flag
from elastic.launcher.run.processes import Child, Lifeline
from elastic.launcher.run.progress import Bar, View, make_view
from elastic.launcher.run.reports import LINES, event_line
from elastic.launcher.run.rundir import RunDir, free_port
from elastic.rpc.security import tls
from elastic.store.open_store import check_store

FAULT_LOOK_S = 0.02
"""How often progress is read while a fault of the launcher is to come."""


def launch(request: Request) -> int:
    """Run the job on this machine to its end; return the exit code. Raises UsageError before anything is
    started."""
    config = request.config
    address = config.coordinator or ",".join(f"{LOOPBACK}:{free_port()}" for _ in range(config.coordinators))
    places = tuple(address.split(","))
    mine = places if config.standalone else _mine(places, request.hosts)
    if mine:
        check_store(config)
    host = LOOPBACK if config.standalone else config.local_addr or local_address(places[0])
    check_free(config, len(mine), len(request.nodes))
    if request.guard.warning:
        print(f"elastic: {request.guard.warning}", file=sys.stderr)
    run_dir = RunDir(request)
    config = run_dir.config
    tls.use(tls.load(run_dir.path, config.certs, config.certs_name))
    try:
        return Supervisor(request, run_dir, address, mine, host).run()
    finally:
        run_dir.close()


def _mine(places: tuple[str, ...], hosts: bool | None) -> tuple[str, ...]:
    """The address at which this machine runs a coordinator, if it is to; `hosts` None: if it owns a free one."""
    if hosts is False or (hosts and len(places) == 1):
        return places if hosts else ()
    free = tuple(place for place in places if owner(place) is Owner.FREE)[:1]
    if hosts and not free:
        raise FieldError("--rdzv-endpoint", ",".join(places), "none of them is this machine's and free")
    return free


def agent_args(
    config: JobConfig, run_dir: Path, node: str, index: int, coordinator: str, host: str
) -> list[str]:
    """Command line of the agent of local node `index`, without the program."""
    domain, device = config.domain(index), config.device(index)
    args = ["--run-dir", str(run_dir), "--node", node, "--coordinator", coordinator]
    args += ["--host", host, *(["--domain", domain] if domain else [])]
    args += ["--device", device] if device else []
    memory = config.node_memory_bytes(index)
    args += ["--memory", str(memory)] if memory else []
    lifetime_s = config.lifetime_s(index)
    args += ["--lifetime", f"{lifetime_s:g}"] if lifetime_s else []
    return args


class Supervisor:
    """Owns the processes of one job on this machine."""

    def __init__(
        self, request: Request, run_dir: RunDir, address: str, mine: tuple[str, ...], host: str
    ) -> None:
        self._request, self._config, self._path = request, run_dir.config, run_dir.path
        self._address, self._hosting, self._host = address, bool(mine), host
        self._view: View = make_view()
        self._lifeline = Lifeline()
        self._faults = LauncherFaults(self._config)
        self._progress, self._events = (
            Follower(self._path / "progress.jsonl"),
            Follower(self._path / "events.jsonl"),
        )
        self._coordinators = Coordinators(
            self._config, request.services[0], mine, self._lifeline, lambda line: self._view.note(line)
        )
        self._agents: list[Child] = []
        self._noted: set[str] = set()
        self._alone_since: float | None = None
        self._signals: deque[int] = deque()
        self._leave_until = 0.0
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
        self._coordinators.start()
        for index, node in enumerate(self._request.nodes):
            self._start_agent(node, index)
        self._view.note(f"{', '.join(self._request.nodes)}; run directory {self._path}")

    def _start_agent(self, node: str, index: int) -> None:
        args = agent_args(self._config, self._path, node, index, self._address, self._host)
        args += metrics_flag(self._config, first_agent(self._config) + index)
        console = self._view.output if isinstance(self._view, Bar) else None
        self._agents.append(Child.start(node, self._request.services[1], args, self._lifeline, console))

    # ---- looking after ----

    def _look(self) -> None:
        """Everything that may have happened since the last look."""
        if self._signals:
            number = signal.Signals(self._signals.popleft())
            if number is signal.SIGTERM and self._leave():
                return
            self._view.note(f"{number.name}: ending the job")
            self._code = 128 + number
            return
        if self._leave_until and time.monotonic() >= self._leave_until:
            self._view.note("the notice ran out before the node was drained")
            self._code = 128 + signal.SIGTERM
            return
        self._read_files()
        verdict = read_object(self._path / "exit.json") if self._hosting else None
        if verdict is not None:
            code = int(verdict.get("code", EXIT_FAILURE))
            self._code = service_exit(code) if self._request.as_service else code
            self._view.note(str(verdict.get("reason", "")) or "the job is over")
            return
        self._look_at_coordinators()
        self._look_at_agents()

    def _leave(self) -> bool:
        """SIGTERM as a notice: this machine's node moves its state out and ends; the others go on. Once."""
        if not self._config.grace_s or self._leave_until or all(agent.ended() for agent in self._agents):
            return False
        self._leave_until = time.monotonic() + self._config.grace_s
        self._view.note(f"SIGTERM: leaving within {self._config.grace_s:g} s; again: at once")
        for agent in self._agents:
            agent.notify()
        return True

    def _read_files(self) -> None:
        for entry in self._progress.read():
            self._view.update(entry)
            for spec in self._faults.observe(entry):
                self._carry_out(spec)
        for event in self._events.read():
            line = LINES.get(str(event.get("kind")))
            text = line(event) if line is not None else ""
            if text:
                self._view.note(text)
            elif self._request.console_events:
                self._view.note(event_line(event))

    def _look_at_coordinators(self) -> None:
        why = self._coordinators.look(self._lost_place)
        if why:
            self._view.note(why)
            self._code = EXIT_FAILURE

    def _lost_place(self) -> bool:
        """Another launcher on this machine was faster to take the address."""
        mine = self._coordinators.addresses
        if self._request.hosts is None and all(owner(address) is Owner.TAKEN for address in mine):
            self._hosting = False
        return not self._hosting

    def _look_at_agents(self) -> None:
        for agent in self._agents:
            if agent.ended() and agent.name not in self._noted:
                self._noted.add(agent.name)
                if agent.returncode != EXIT_OK:
                    self._view.note(f"{agent.name} ended ({agent.how})")
        if any(not agent.ended() for agent in self._agents) or self._faults.joins:
            self._alone_since = None
            return
        if not self._hosting or self._leave_until:
            codes = [agent.returncode or EXIT_OK for agent in self._agents]
            code = next((code if code > 0 else 128 - code for code in codes if code), EXIT_OK)
            as_torchrun = code == EXIT_JOB_FAILED and not self._request.as_service
            self._code = EXIT_FAILURE if as_torchrun else code
        elif self._config.standalone:
            self._wait_alone()

    def _wait_alone(self) -> None:
        """No node is left and none will come: give the coordinator the time to say so itself."""
        now = time.monotonic()
        self._alone_since = now if self._alone_since is None else self._alone_since
        if now - self._alone_since > self._config.timeouts.alone_s:
            self._view.note(f"every node ended before the job did; logs are in {self._path / 'logs'}")
            self._code = EXIT_FAILURE

    # ---- injected faults ----

    def _carry_out(self, spec: FaultSpec) -> None:
        self._view.note(f"fault: {spec.text}")
        match spec.kind:
            case FaultKind.KILL_COORDINATOR if self._coordinators.kill_leader(spec.down_s):
                pass
            case FaultKind.JOIN:
                index = len(self._agents)
                self._start_agent(f"node{index}", index)
            case FaultKind.DRAIN:
                threading.Thread(target=self._drain, args=(spec,), name="drain", daemon=True).start()
            case _:
                self._view.note(f"{spec.kind} does nothing here: this machine does not run the coordinator")

    def _drain(self, spec: FaultSpec) -> None:
        from elastic.rpc.control.client import call

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
        leading = self._coordinators.leader() if finished else []
        others = [child for child in self._coordinators.children if child not in leading]
        for child in others:
            child.terminate()
        self._await(wake, leading + others, patience)

    def _await(self, wake: int, children: list[Child], timeout_s: float) -> bool:
        """Wait for children to end; False when time is up or another signal came."""
        end = time.monotonic() + timeout_s
        while not all(child.ended() for child in children):
            self._sleep(wake, min(1.0, max(0.0, end - time.monotonic())))
            if self._signals or time.monotonic() >= end:
                return all(child.ended() for child in children)
        return True

    def _kill_all(self) -> None:
        for child in (*self._agents, *self._coordinators.children):
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
