"""Supervisor behind `elastic run`: starts and watches the services of one job on this machine.

    standalone      one or more coordinators, and one agent per local node
    several hosts   one agent; also a coordinator on the machine that owns the coordinator's address

A coordinator that dies is restarted. An agent that dies is not: an agent stands for a machine.
The supervisor ends when the coordinator has written exit.json, on a signal, or when no node is
left, and leaves no process behind. Its loop wakes when a child ends or a signal comes, and reads
the coordinator's files every --monitor-interval.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shlex
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from elastic.command_line import file_problem
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
from elastic.launcher.flags.addresses import AddressState, address_state, local_address
from elastic.launcher.flags.local_gpus import node_environment
from elastic.launcher.flags.request import LOOPBACK, Request
from elastic.launcher.run.console import (
    EVENT_LINES,
    Entry,
    NoteHandler,
    ProgressBar,
    ProgressLines,
    event_line,
    make_view,
    recorded_at,
)
from elastic.launcher.run.event_tail import Follower, read_object
from elastic.launcher.run.injected import LauncherFaults, missed_faults
from elastic.launcher.run.json_lines import json_view
from elastic.launcher.run.metrics_endpoint import check_free, first_agent, metrics_flag
from elastic.launcher.run.processes import Child, Coordinators
from elastic.launcher.run.rundir import LAUNCHER_EXIT, RunDir, free_port
from elastic.launcher.run.trackers import Trackers, check_targets
from elastic.launcher.run.wait_lines import WaitLines, sentence
from elastic.logs import source_of
from elastic.reminder import EVERY_S, Reminder
from elastic.rpc.control.connection_errors import explained
from elastic.rpc.security import tls
from elastic.store.interface import StoreUnavailable
from elastic.store.open_store import check_store
from elastic.telemetry import read_last_words

LONGEST_POLL_S = EVERY_S / 8
"""Longest interval between two looks at whether the user must be told what is awaited."""
REFUSAL_PAUSE_S = 30.0
"""Least time between two lines about refusals for the same reason."""
TRACKER_S = 5.0
"""Longest time from SIGTERM to SIGKILL of a tracker."""
FAULT_POLL_S = 0.02
"""Interval between reads of progress while `LauncherFaults` are pending."""


def launch(request: Request) -> int:
    """Run the job on this machine to its end; return the exit code.

    Raises UsageError before anything is started.
    """
    config = request.config
    given = tuple(config.coordinator.split(",")) if config.coordinator else ()
    addresses = given or tuple(f"{LOOPBACK}:{free_port()}" for _ in range(config.coordinators))
    flag = request.endpoint_flag
    hosted = addresses if config.standalone else _hosted(addresses, request.hosts, flag)
    if hosted:
        _ask_store(config)
        check_targets(request.trackers)
    host = LOOPBACK if config.standalone else config.local_addr or local_address(addresses[0], flag)
    check_free(config, len(hosted), len(request.nodes))
    with open_run_dir(request) as run_dir:
        try:
            return Supervisor(request, run_dir, ",".join(addresses), hosted, host).run()
        except OSError as error:
            if not (problem := file_problem(error)):
                raise
            raise ElasticError(f"the launcher cannot go on: {problem}") from error


@contextlib.contextmanager
def open_run_dir(request: Request) -> Iterator[RunDir]:
    """Open the run directory of a launcher, and set the security settings of this process."""
    run_dir = RunDir(request)
    try:
        tls.use(tls.load(run_dir.path, run_dir.config.certs, run_dir.config.certs_name))
        yield run_dir
    finally:
        run_dir.close()


def _ask_store(config: JobConfig) -> None:
    """Raise FieldError if the store refuses, or if a standalone job cannot reach it. Other
    coordinators wait for a store that does not answer, and say so."""
    try:
        check_store(config)
    except StoreUnavailable as error:
        if config.standalone:
            remedy = f"{explained(str(error))}; start it, or give another"
            raise FieldError("--store", config.store.url, remedy) from error


def _hosted(addresses: tuple[str, ...], hosts: bool | None, flag: str) -> tuple[str, ...]:
    """Return the addresses at which this machine runs coordinators.

    `hosts` False: none; True: one of `addresses`; None: one if it is this machine's and free.
    Raises FieldError, which names `flag`, if another program has the address.
    """
    if hosts is False:
        return ()
    if hosts and len(addresses) == 1:
        if _is_taken(addresses[0]):
            remedy = "another program of this machine listens there: end it, or give another port"
            raise FieldError(flag, addresses[0], remedy)
        return addresses
    free = tuple(a for a in addresses if address_state(a, flag) is AddressState.FREE)[:1]
    if hosts and not free:
        remedy = "none of the addresses belongs to this machine and is free"
        raise FieldError(flag, ",".join(addresses), remedy)
    return free


def _is_taken(address: str) -> bool:
    try:
        return address_state(address) is AddressState.TAKEN
    except FieldError:  # the coordinator says so itself
        return False


def _label(request: Request) -> str:
    """Return the name of the launcher in its JSON lines: that of its only node, or of its
    coordinator if it starts no node, or "launcher" if it starts several nodes."""
    if len(request.nodes) > 1:
        return "launcher"
    return request.nodes[0] if request.nodes else request.config.coordinator_name or "coordinator"


def agent_args(config: JobConfig, node: str, index: int, coordinator: str, host: str) -> list[str]:
    """Return the arguments of the agent of local node `index`."""
    args = ["--run-dir", config.run_dir, "--node", node, "--coordinator", coordinator]
    args += ["--host", host]
    per_node: dict[str, Sequence[str | float]] = {
        "--domain": config.domains,
        "--device": config.devices,
        "--memory": config.node_memories_bytes,
        "--lifetime": config.lifetimes_s,
        "--peak-tflops": config.peak_tflops,
    }
    for flag, values in per_node.items():
        if values and (value := values[index % len(values)]):
            args += [flag, str(value)]
    return args


class Supervisor:
    """Supervisor of one job on this machine: starts, watches and ends its processes."""

    def __init__(
        self,
        request: Request,
        run_dir: RunDir,
        coordinator: str,
        hosted: tuple[str, ...],
        host: str,
    ) -> None:
        """`coordinator`: addresses of all coordinators; `hosted`: of those that run here."""
        self._request, self._config, self._path = request, run_dir.config, run_dir.path
        self._address, self._hosting, self._host = coordinator, bool(hosted), host
        source = source_of(self._config, _label(request))
        self._view: ProgressBar | ProgressLines
        if source is None:
            self._view, outputs = make_view(), {}
        else:
            lines = json_view(source)
            own = self._config.coordinator_name
            self._view = lines
            outputs = {"output_of": lambda name: lines.output_of(own or name)}
        self._lifeline = os.pipe()
        self._faults = LauncherFaults(self._config)
        self._progress = Follower(self._path / "progress.jsonl")
        self._events = Follower(self._path / "events.jsonl")
        self._waits = WaitLines(self._path, hosted)
        self._coordinators = Coordinators(
            self._config,
            request.services[0],
            hosted,
            self._lifeline[0],
            self._view.note,
            **outputs,
        )
        self._trackers = Trackers(
            self._path,
            request.trackers if self._hosting else (),
            self._lifeline[0],
            self._view.note,
            self._view.output_of,
        )
        self._agents: list[Child] = []
        self._refusals: dict[tuple[Any, Any], float] = {}
        """Time of the newest line about refusals, by the node that refused and its reason."""
        self._reported: set[str] = set()
        """Names of agents whose end was reported."""
        self._no_agents_since = 0.0
        """Time at which the last agent ended; 0: an agent runs or is still to join."""
        self._signals: deque[int] = deque()
        self._drain_deadline = 0.0
        self._code: int | None = None
        self._reason = ""
        """Why the job is over, as the coordinator wrote it."""
        self._cause = ""
        """Why this launcher ends with another code than the coordinator wrote."""

    def run(self) -> int:
        """Run until the job ends here; return the exit code."""
        with self._signals_handled() as wake, self._warnings_noted():
            try:
                if self._request.guard.warning:
                    self._view.note(self._request.guard.warning)
                self._start()
                while self._code is None:
                    interval = FAULT_POLL_S if self._faults else self._config.monitor_interval_s
                    self._sleep(wake, min(interval, LONGEST_POLL_S))
                    self._poll()
                self._end(wake)
                self._record_end()
                self._end_trackers(wake)
            finally:
                self._kill_all()
                self._view.close()
                for end in self._lifeline:
                    os.close(end)
        return EXIT_FAILURE if self._code is None else self._code

    def _start(self) -> None:
        self._coordinators.start()
        for index, node in enumerate(self._request.nodes):
            self._start_agent(node, index)
        nodes = ", ".join(self._request.nodes)
        own = f"coordinator at {', '.join(self._coordinators.addresses)}" if self._hosting else ""
        shown = "" if self._config.standalone else own
        started = ", ".join(filter(None, (nodes, shown)))
        self._view.note(f"{started}; run directory {self._path}")

    def _start_agent(self, node: str, index: int) -> None:
        args = agent_args(self._config, node, index, self._address, self._host)
        args += metrics_flag(self._config, first_agent(self._config) + index)
        args += [] if self._hosting else ["--alone", "1"]
        module, config = self._request.services[1], self._config
        gpus = node_environment(index, config.nproc_per_node, os.environ)
        variables = gpus if config.standalone else {}
        with self._view.output_of(node) as output:
            child = Child(node, module, args, self._lifeline[0], output, variables)
        self._agents.append(child)

    # ---- watching ----

    def _poll(self) -> None:
        """React to signals, files and processes."""
        if self._signals:
            number = signal.Signals(self._signals.popleft())
            if number is signal.SIGTERM and self._drain_node():
                return
            own = "this coordinator" if self._hosting else "this agent"
            ends = f"{own} ends" if self._request.as_service else "ending the job"
            self._view.note(f"{number.name}: {ends}")
            self._code, self._cause = 128 + number, f"ended by {number.name}"
            return
        if self._drain_deadline and time.monotonic() >= self._drain_deadline:
            self._view.note("the grace period ended before the node was drained")
            self._code = 128 + signal.SIGTERM
            return
        self._read_files()
        result = read_object(self._path / "exit.json") if self._hosting else None
        if result is not None:
            code = int(result.get("code", EXIT_FAILURE))
            self._code = service_exit(code) if self._request.as_service else code
            self._reason = str(result.get("reason", "")) or "the job is over"
            return
        if problem := self._coordinators.check(self._lost_address):
            self._view.note(problem)
            self._code = EXIT_FAILURE
        self._check_agents()
        self._trackers.check()
        self._remind()

    def _remind(self) -> None:
        """Say what the job is doing if nothing was printed for a while."""
        if self._hosting and self._code is None and self._view.quiet.is_due(time.monotonic()):
            text = self._waits.line()
            if text:
                self._view.remind(text)

    def _drain_node(self) -> bool:
        """Drain this node at the first SIGTERM; return False if the job must end instead."""
        ended = all(agent.ended() for agent in self._agents)
        if not self._config.grace_s or self._drain_deadline or ended:
            return False
        self._drain_deadline = time.monotonic() + self._config.grace_s
        grace = f"{self._config.grace_s:g} s"
        self._view.note(f"SIGTERM: leaving within {grace}; a second SIGTERM ends the node at once")
        for agent in self._agents:
            agent.drain()
        return True

    def _read_files(self) -> None:
        """Show progress and events in the order in which they were recorded."""
        progress, events = self._progress.read(), self._events.read()
        for entry in sorted([*progress, *events], key=recorded_at):
            if entry.get("kind", "progress") == "progress":
                self._show_progress(entry)
            else:
                self._show_event(entry)

    def _show_progress(self, entry: Entry) -> None:
        self._view.update(entry)
        self._waits.observe(entry)
        for spec in self._faults.observe(entry):
            self._inject(spec)

    def _show_event(self, event: Entry) -> None:
        line = EVENT_LINES.get(str(event.get("kind")))
        text = line(event) if line is not None else ""
        if text and (event.get("kind") != "refused" or self._is_news(event)):
            self._view.note(text)
        elif self._request.console_events:
            self._view.note(event_line(event))

    def _is_news(self, refusal: Entry) -> bool:
        """Return whether no line about such a refusal was printed lately."""
        key, at = (refusal.get("node"), refusal.get("reason")), recorded_at(refusal)
        if at - self._refusals.get(key, -REFUSAL_PAUSE_S) < REFUSAL_PAUSE_S:
            return False
        self._refusals[key] = at
        return True

    def _lost_address(self) -> bool:
        """Return True if another launcher of this machine has taken the coordinator's address."""
        addresses = self._coordinators.addresses
        taken = AddressState.TAKEN
        if self._request.hosts is None and all(address_state(a) is taken for a in addresses):
            self._hosting = False
        return not self._hosting

    def _check_agents(self) -> None:
        for agent in self._agents:
            if agent.ended() and agent.name not in self._reported:
                self._reported.add(agent.name)
                if agent.returncode != EXIT_OK:
                    self._view.note(f"{agent.name} ended ({self._how(agent)})")
        if any(not agent.ended() for agent in self._agents) or self._faults.joins:
            self._no_agents_since = 0.0
            return
        # Agents end if no coordinator answers for long, as while the store is away from the start.
        useless = not self._config.standalone and not (self._path / "coordinator.json").exists()
        if not self._hosting or self._drain_deadline or (self._agents and useless):
            codes = [agent.returncode or EXIT_OK for agent in self._agents]
            code = next((code if code > 0 else 128 - code for code in codes if code), EXIT_OK)
            as_torchrun = code == EXIT_JOB_FAILED and not self._request.as_service
            self._code = EXIT_FAILURE if as_torchrun else code
        elif self._config.standalone:  # wait until the coordinator reports it
            self._no_agents_since = self._no_agents_since or time.monotonic()
            if time.monotonic() - self._no_agents_since > self._config.timeouts.alone_s:
                last = f"{self._agents[-1].name}: {self._how(self._agents[-1])}"
                logs = f"the last one was {last}; logs are in {self._path / 'logs'}"
                self._view.note(f"every node ended before the job did; {logs}")
                self._code = EXIT_FAILURE

    def _how(self, agent: Child) -> str:
        """Return how an agent ended: exit code or signal, and its error if it wrote one."""
        error = read_last_words(self._path, agent.name) if (agent.returncode or 0) > 0 else ""
        return f"{agent.how}: {error}" if error else agent.how

    # ---- injected faults ----

    def _inject(self, spec: FaultSpec) -> None:
        self._view.note(f"fault: {spec.text}")
        match spec.kind:
            case FaultKind.KILL_COORDINATOR if self._coordinators.kill_leader(spec.down_s):
                pass
            case FaultKind.JOIN:
                index = len(self._agents)
                self._start_agent(f"node{index}", index)
            case FaultKind.DRAIN:
                threading.Thread(
                    target=self._call_drain, args=(spec,), name="drain", daemon=True
                ).start()
            case _:
                self._view.note(f"{spec.kind} has no effect: this machine runs no coordinator")

    def _call_drain(self, spec: FaultSpec) -> None:
        from elastic.rpc.control.client import call

        try:
            call(self._address, "drain", {"node": spec.node, "deadline_s": spec.deadline_s})
        except ElasticError as error:
            self._view.note(f"drain of {spec.node}: {error}")

    # ---- ending ----

    def _end(self, wake: int) -> None:
        """End all children. Agents of a finished job end alone, others by SIGTERM, then SIGKILL.

        A second signal skips the waiting.
        """
        finished = self._hosting and (self._path / "exit.json").exists()
        self._read_files()
        if self._code == EXIT_OK:
            names = [agent.name for agent in self._agents]
            for spec in missed_faults(self._config, names, self._hosting):
                self._view.note(f"warning: the fault {spec.text!r} did not happen")
        if self._reason:  # below the progress that was written before it
            self._view.note(self._reason + self._results())
        timeout_s = self._config.shutdown_timeout_s
        if not (finished and self._await(wake, self._agents, timeout_s)):
            for agent in self._agents:
                agent.terminate()
            self._await(wake, self._agents, timeout_s)
        for agent in self._agents:
            agent.kill()
        if self._code == EXIT_OK:
            self._check_exits()
        leader = self._coordinators.leader() if finished else None
        for child in self._coordinators.children:
            if child is not leader:
                child.terminate()
        self._await(wake, self._coordinators.children, timeout_s)

    def _end_trackers(self, wake: int) -> None:
        """Let the trackers tell the rest of the record, for a limited time."""
        self._trackers.start_waiting()
        children, timeout_s = self._trackers.children, self._config.shutdown_timeout_s
        told = any((self._path / name).exists() for name in ("exit.json", LAUNCHER_EXIT))
        if not (told and self._await(wake, children, timeout_s)):
            for child in children:  # a tracker then ends after what the record has
                child.terminate()
            self._await(wake, children, min(timeout_s, TRACKER_S))
        self._trackers.check(ending=True)
        for target in self._trackers.unfinished():
            words = ["elastic", "track", "--run-dir", str(self._path), "--to", target]
            command = shlex.join(words)
            self._view.note(f"warning: {target} does not have all of the run yet; try {command}")

    def _check_exits(self) -> None:
        """After a job that succeeded: fail if the script failed after its training."""
        failed = [agent for agent in self._agents if agent.returncode == EXIT_JOB_FAILED]
        for agent in failed:
            self._cause = f"{agent.name}: {read_last_words(self._path, agent.name) or agent.how}"
            if agent.name not in self._reported:
                self._view.note(self._cause)
            self._code = EXIT_JOB_FAILED if self._request.as_service else EXIT_FAILURE

    def _record_end(self) -> None:
        """Write the end of this launcher for `elastic status`, if the coordinator did not write it:
        a signal, or an error of the script after its training."""
        if self._hosting and self._cause:
            text = json.dumps({"code": self._code, "reason": self._cause}) + "\n"
            with contextlib.suppress(OSError):  # the terminal has told it
                (self._path / LAUNCHER_EXIT).write_text(text)

    def _results(self) -> str:
        """Return where the results of a finished training are, as the end of a line; "": the job
        failed, or its script does not use elastic."""
        path = self._path / "summary.json"
        trained = self._code == EXIT_OK and self._waits.steps and path.exists()
        return f"; {path} has losses, recoveries and params_sha256" if trained else ""

    def _await(self, wake: int, children: Sequence[Child], timeout_s: float) -> bool:
        """Wait until the children have ended; return False after the timeout or another signal."""
        end = time.monotonic() + timeout_s
        began, reminder = time.monotonic(), Reminder(time.monotonic())
        while living := [child.name for child in children if not child.ended()]:
            if reminder.is_due(time.monotonic()):
                what, limit = f"{' '.join(living)} to end", f"at most {timeout_s:g} s"
                self._view.note(sentence(what, time.monotonic() - began, limit))
            self._sleep(wake, min(1.0, max(0.0, end - time.monotonic())))
            if self._signals or time.monotonic() >= end:
                return all(child.ended() for child in children)
        return True

    def _kill_all(self) -> None:
        for child in (*self._agents, *self._coordinators.children, *self._trackers.children):
            child.kill()

    @contextlib.contextmanager
    def _warnings_noted(self) -> Iterator[None]:
        handler = NoteHandler(self._view.note)
        logging.getLogger().addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)

    # ---- signals ----

    @contextlib.contextmanager
    def _signals_handled(self) -> Iterator[int]:
        """Queue signals; yield a descriptor that a signal or the end of a child makes readable."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

        def enqueue(number: int, _frame: Any) -> None:
            if number != signal.SIGCHLD:
                self._signals.append(number)

        handled = {*self._request.signals, signal.SIGCHLD}
        former = {number: signal.signal(number, enqueue) for number in handled}
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
