"""The agent process: supervises a node's workers, owns its vault and talks to the coordinator.

The rules of a node are in `elastic.core.node.node.transition`; this module carries out the actions
that it returns. One thread owns the node's state and runs calls from a queue. Other threads only
put calls into the queue: for orders of the coordinator, for messages and exits of workers, and for
results of their own work.

The agent's thread sends the heartbeats and obeys the orders. So it never waits for a worker, a
disk, another node, or an operation whose time grows with bytes: other threads do these
(docs/design/threads.md).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elastic import lifeline
from elastic.agent.absence import Absence
from elastic.agent.exit_record import ExitRecord
from elastic.agent.health.monitor import Monitor
from elastic.agent.health.paths import PathProber
from elastic.agent.health.preflight import local_checks, network_checks, score_class
from elastic.agent.health.preflight_gate import PreflightGate
from elastic.agent.heap import limit_heaps
from elastic.agent.metrics import AgentMetrics
from elastic.agent.network_cut import NetworkCut
from elastic.agent.notices.controller import NoticeController
from elastic.agent.outbox import Outbox
from elastic.agent.vault.checkpoints import CheckpointWriter
from elastic.agent.vault.prefetch import prefetch
from elastic.agent.vault.replicator import Replicator
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.agent.wait_record import WaitRecord
from elastic.agent.workers.channels import WorkerChannels
from elastic.agent.workers.processes import KILL_S, WorkerExit, WorkerGroup, agent_socket
from elastic.background import ends_within
from elastic.command_line import Command, flag, read_flags
from elastic.config import STDOUT, JobConfig, is_url, load_config
from elastic.console import STALL_S, Console
from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.core.protocol.fault_spec import FaultKind, FaultSpec, parse_fault
from elastic.core.protocol.health_report import HealthReport, JoinRefused, Preflight, PreflightCheck
from elastic.core.protocol.messages import NodePhase
from elastic.core.protocol.version import PROTOCOL
from elastic.domain.errors import (
    EXIT_DRAINED,
    EXIT_FAILURE,
    EXIT_INCOMPATIBLE,
    EXIT_INTERRUPTED,
    EXIT_JOB_FAILED,
    EXIT_TERMINATED,
    ElasticError,
    VaultError,
    describe,
)
from elastic.domain.types import Copy, NodeInfo
from elastic.domain.version import VERSION
from elastic.logs import configure_logging, source_of
from elastic.metrics import Exposition, new_registry, serve
from elastic.open_files import raise_limit
from elastic.planning.cost.catalogue import known_peak
from elastic.reminder import Reminder
from elastic.rpc.bulk.compression import CompressionPolicy
from elastic.rpc.control.client import CoordinatorSession
from elastic.rpc.control.event_loop import Dispatcher, run_callback
from elastic.rpc.link_shaping import pace_of
from elastic.rpc.security import tls
from elastic.rpc.security.expiry import certificate_ends
from elastic.rpc.security.rejections import REJECTIONS, RejectionNotice
from elastic.telemetry import write_last_words

log = logging.getLogger("elastic.agent")
CLOSE_S = 5.0
"""Longest wait for the end of a part of the agent, in addition to its own limits."""
OUTPUT_S = 10.0
"""Longest wait at the end of the agent for log files of workers on a slow disk, and for a slow
reader of the console, each."""
PING_BEATS = 2
"""Intervals between heartbeats per ping at least, so that pings of large jobs are no burden."""
POLL_S = 0.1
"""Interval between two polls of the worker processes."""
RESENT = 64
"""Heartbeats come before each so many messages that are sent again to a coordinator. Else a busy
one, which reads thousands of them, takes the nodes for silent."""
RANKS = 1 << 16
"""Factor in a worker's number, which is generation * RANKS + local rank: an acknowledgement reaches
only the launch that published the bundle."""
EXIT_GRACE_S = 10.0
"""Time that workers get to end by themselves when the job is over."""
FREE_GIB_S = 16.0
"""Upper bound of the time in which the kernel frees 1 GiB of memory, also in a virtual machine."""
AT_WORK = (NodePhase.INSTALLING, NodePhase.RUNNING, NodePhase.HALTING)
"""Phases in which the next report comes soon, and writing is normal."""
REPORTING_NO_COPIES = (
    NodePhase.RUNNING,
    NodePhase.INSTALLING,
    NodePhase.HALTING,
    NodePhase.FINISHED,
)
FLAGS = [
    flag("--run-dir", required=True),
    flag("--node", required=True),
    flag("--coordinator", required=True),
    flag("--domain", default=""),
    flag("--host", default="127.0.0.1"),
    flag("--device", default=""),
    flag("--lifetime", default=0.0),
    flag("--peak-tflops", default=0.0),
    flag("--memory", default=0),
    flag("--alone", default=0),
    flag("--metrics-port", default=-1),
    flag("--parent-pipe", default=-1),
]


class NodeAgent:
    """Supervises the workers of one node and owns its vault. The thread that calls `run` does
    everything except transfers and work on sockets."""

    def __init__(
        self, config: JobConfig, coordinator: str, info: NodeInfo, console: Console | None = None
    ) -> None:
        """`console`: for lines for the user and output of workers; None: that of this process."""
        self._console = console or Console()
        self._config, self._info, self._node, self._host = config, info, info.node, info.host
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        """Calls for the agent's thread. Signal handlers also put calls here."""
        self._directory = Path(config.memory_dir) / self._node
        self._outbox = Outbox()
        self._spare_step: m.StepDone | None = None
        """The newest step that other nodes report."""
        self._rejoined = False
        """Whether the coordinator may have refused the outbox, because this node was no member."""
        self._former_writers: list[CheckpointWriter] = []
        """Writers of former incarnations that are not done."""
        self._told_of_writing = False
        """Whether the newest report said that parts wait for the disk."""
        self._group: WorkerGroup | None = None
        self._starter = Dispatcher("starter")
        """Starts and kills workers. The kernel kills the workers that a thread started when it
        ends, so the thread ends after them."""
        self._memory = Dispatcher("memory")
        """Frees memory, and closes the vaults of former incarnations."""
        self._killed_generation = -1
        """Newest launch whose workers were killed."""
        self._generation, self._partitioned_until = 0, 0.0
        self._cut, self._exit_record = NetworkCut(info.host), ExitRecord(config.run_dir)
        self._exit_code: int | None = None
        self.alone = False
        """Whether no coordinator runs beside this agent whose launcher says what the job awaits."""
        self.left: list[str] = []
        """Parts that did not end, because a disk hangs. They must not delay the process."""
        self._absence = Absence(time.monotonic())
        self._wait_record = WaitRecord(config.run_dir, self._node)
        self._idle_since, self._idle = time.monotonic(), Reminder(time.monotonic())
        """Time since which this node waits for its first order, and when the user hears of it."""
        self._received_at = -math.inf
        """Time at which a peer last sent copies."""
        self._connected = False
        """Whether a coordinator has ever accepted this agent."""
        self._refused = ""
        """Newest reason for which the node may not join."""
        self._last_words = ""
        """Reason for which this agent ends, for the launcher."""
        self._coordinator, later = coordinator, self._later
        self._gate = PreflightGate(config.preflight, self._check_node, later(self._take_preflight))
        health = later(self._send_health)
        mine = tls.current().certificates
        ends = partial(certificate_ends, mine)
        self._monitor = Monitor(
            self._node,
            config.directories,
            health,
            certificates=ends if mine else None,
            checkpoints=config.checkpoint_dir,
        ).start()
        self._paths = PathProber(self._node, config.timeouts, self._monitor.unreachable)
        self._notices = NoticeController(config, self._node, later, self._send, self._report)
        self._metrics = AgentMetrics(
            new_registry(), str(self._directory), config.checkpoint_dir, ends
        )
        self._exposition: Exposition | None = None
        self._open_vault()
        self._begin_incarnation()
        REJECTIONS.subscribe(later(self._send_rejection))
        self._workers = WorkerChannels(
            agent_socket(config, self._node), later(self._handle_worker), self._launched
        )
        self._session = self._new_session()

    def _new_session(self) -> CoordinatorSession:
        later = self._later
        return CoordinatorSession(
            self._coordinator,
            on_message=later(self._handle_order),
            sender=self._node,
            on_up=later(self._handle_connected),
            on_down=later(self._handle_disconnected),
            on_refused=later(self._handle_refused),
            keepalive_s=self._config.timeouts.keepalive_s,
            ping_s=PING_BEATS * self._config.heartbeat_s,
            nodes=self._config.max_nodes,
        )

    def _later(self, handler: Callable[..., object]) -> Callable[..., None]:
        """Return a function for any thread. It queues a call of `handler` for the agent's
        thread."""
        return lambda *args: self._queue.put(partial(handler, *args))

    def serve_metrics(self, port: int) -> None:
        """Serve metrics at `port`; 0: any free port, -1: do nothing."""
        self._metrics.read = self._gauges
        self._exposition = serve(self._metrics.registry, self._config, self._node, "agent", port)

    def _gauges(self) -> dict[str, float]:
        return {
            "vault_bytes": self._vault.nbytes,
            "vault_allocated_bytes": self._vault.allocated_bytes,
            "vault_limit_bytes": self._config.vault_memory_bytes,
            "workers": self._config.nproc_per_node,
            "workers_up": len(self._group.alive()) if self._group is not None else 0,
            "coordinator_connected": self._session.up,
            "backup_pending_bundles": self._replicator.pending,
            "backup_exposure_seconds": self._replicator.exposed_s,
            "link_bytes_per_second": self._compression.link_bytes_per_s,
            "node_epoch": self._state.epoch,
        }

    def _open_vault(self) -> None:
        """Create an empty vault and serve it."""
        config = self._config
        self._vault = Vault(
            self._node,
            self._directory / "vault",
            limit=config.vault_memory_bytes,
            on_corrupt=self._later(self._note_corrupt),
            background=self._memory.post,
        )
        self._compression = CompressionPolicy(config.compress)
        self._server = VaultServer(
            self._vault,
            self._host,
            timeout_s=config.timeouts.serve_s,
            pace=pace_of(self._directory, config.link),
            compressing=self._compression,
            received=self._count_received,
        ).start()

    def _begin_incarnation(self) -> None:
        """Start a new incarnation of the node, without workers, on the present vault."""
        config, limits = self._config, self._config.timeouts
        self._checkpoints = CheckpointWriter(
            config.checkpoint_dir,
            self._vault,
            self._later(self._send_part),
            self._monitor.checkpoint_failed,
            limits.disk_s,
        )
        self._replicator = Replicator(
            self._vault,
            self._bundle_done,
            self._later(self._bundle_held),
            timeout_s=limits.bulk_s,
            prepare=self._checkpoints.offer,
            pace=pace_of(self._directory, config.link),
            no_room=self._later(partial(self._note_refused, m.BACKUP_SHORT)),
            broken=self._later(partial(self._note_refused, m.KEEPER_FAILED)),
            compressing=self._compression,
            sent=self._monitor.sent,
            delivered=self._metrics.sent,
        )
        self._notices.incarnation = incarnation = uuid.uuid4().hex[:12]
        info = replace(self._info, incarnation=incarnation, vault=self._server.address)
        self._state = core.NodeState(info, limits=limits)
        self._gate.shut()
        self._paths.watch({})
        self._monitor.enter(incarnation, 0)

    def run(self) -> int:
        """Serve until the job is over for this node; return the exit code."""
        next_poll = next_heartbeat = time.monotonic()
        while self._exit_code is None:
            wait_s = max(0.001, min(next_poll, next_heartbeat) - time.monotonic())
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=wait_s)()
            now = time.monotonic()
            if now >= next_poll:
                next_poll = now + POLL_S
                self._poll()
            if now >= next_heartbeat:
                next_heartbeat = now + self._config.heartbeat_s
                self._heartbeat()
        self._close()
        if self._last_words:
            self._write_last_words(self._last_words)
        return self._exit_code

    def failed(self, error: Exception) -> None:
        """Tell the coordinator and the launcher why this agent ends, then end the workers."""
        text = describe(error)
        self._send(m.AgentFailed(self._node, self._state.info.incarnation, text))
        self._exit_code = EXIT_FAILURE
        try:
            self._close()
        finally:
            self._write_last_words(text)

    # ---- events in ----

    def _handle_order(self, order: Any, envelope: object) -> None:
        """Carry out an order of the coordinator, or apply it to the node's state."""
        match order:
            case m.Released():
                if self._notices.parked or self._partitioned:
                    self._apply_order(order)
                else:
                    self._notices.released(lambda: self._apply(order))
            case m.Trim(epoch, step):
                self._vault.trim(epoch, step)
            case m.Prefetch():
                self._prefetch(order)
            case JoinRefused(reason, retry_s):
                log.error("refused; next try in %g s: %s", retry_s, reason)
                if reason != self._refused:
                    why = f"{self._node} may not join yet: {reason}"
                    self._tell(f"{why}; next try in {retry_s:g} s")
                self._refused = reason
                self._gate.refused(retry_s)
            case _:
                self._apply_order(order)

    def _apply_order(self, event: Any) -> None:
        if not self._partitioned:
            self._apply(event)

    def _handle_disconnected(self, why: str) -> None:
        log.info("the coordinator cannot be reached: %s", why)
        self._absence.begin(time.monotonic())

    def _handle_refused(self, why: str) -> None:
        """End this agent if a coordinator of another version refuses it from the start. A member
        trains on, and waits for a coordinator of its version."""
        log.error("%s", why)
        if not self._connected:
            self._console.say(why)
            self._last_words, self._exit_code = why, EXIT_INCOMPATIBLE

    def _handle_connected(self) -> None:
        self._connected = True
        if self._session.up:
            away_s = time.monotonic() - self._absence.since
            if self._absence.end():
                self._tell(f"a coordinator answers {self._node} at last, after {away_s:.0f} s")
        self._resend()  # first, because the report may end the job
        if self._state.epoch > 0:  # a short sign of life, before a report of any size
            self._heartbeat()
        self._report()
        self._notices.resend()
        self._monitor.connected()

    def _resend(self) -> None:
        """Send the messages of the outbox, and heartbeats between them."""
        for count, message in enumerate(self._outbox):
            if count % RESENT == 0 and self._state.epoch > 0:
                self._heartbeat()
            self._send(message)

    def _send_reliably(self, message: m.StepDone | m.BackupNote | m.CheckpointPart) -> None:
        self._outbox.add(message)
        self._send(message)

    def _send_part(self, part: m.CheckpointPart) -> None:
        """Send a part of a checkpoint, unless its step was repeated since then."""
        if not self._checkpoints.is_undone(part):
            self._send_reliably(part)

    def _note_corrupt(self, copy: Copy) -> None:
        """Report that the vault dropped `copy`, whose checksum did not match."""
        why = f"{copy.key} does not match its checksum and was dropped"
        self._send_reliably(m.BackupNote(m.COPY_CORRUPT, copy.owner, self._node, why))

    def _note_refused(self, kind: str, peer: str, why: str) -> None:
        """Report that the vault of `peer` cannot keep this node's copies."""
        vault = self._replicator.vaults.get(peer, "")
        self._send_reliably(m.BackupNote(kind, self._node, peer, why, vault))

    def _send_rejection(self, notice: RejectionNotice) -> None:
        self._send(m.RefusalNote(self._node, *astuple(notice)))

    def _send_health(self, report: HealthReport) -> None:
        if report.incarnation == self._state.info.incarnation and self._gate.open:
            self._send(report)

    def _take_preflight(self, result: Preflight) -> None:
        self._gate.finished(result)
        info = replace(self._state.info, standing=score_class(result.score))
        self._state = replace(self._state, info=info)
        self._report()
        self._notices.resend()

    def _prefetch(self, order: m.Prefetch) -> None:
        def work() -> None:
            run_callback(partial(prefetch, vault, order))
            done(core.PrefetchDone(order.epoch))

        done, vault = self._later(self._apply_order), self._vault
        if not self._partitioned:
            self._paths.watch(dict(order.vaults))
            threading.Thread(target=work, name="prefetch", daemon=True).start()

    def _handle_worker(self, generation: int, rank: int, message: Any) -> None:
        """Handle a message or the exit of a worker. `generation`: number of the worker's launch."""
        if generation != self._generation:
            self._handle_former_worker(message)
            return
        match message:
            case m.Published():
                self._publish(rank, message)
            case m.StepDone(spare=True):
                self._spare_step = message
            case m.StepDone():
                self._send_reliably(message)
            case m.FaultReached():
                self._inject(parse_fault(message.fault))
            case WorkerExit():
                self._metrics.exits.inc()
                self._workers.remove(rank)
                self._vault.worker_gone(message.pid, self._directory)
                self._apply(core.WorkerExited(rank, message.returncode, message.error))
            case _:
                if isinstance(message, m.Attach | m.Halted | m.Failed | m.Finished):
                    log.info("worker %d: %s", rank, type(message).__name__)
                if isinstance(message, m.Attach):
                    self._checkpoints.every = message.spec.checkpoint_every
                    self._checkpoints.steps = message.spec.n_steps
                self._apply(core.WorkerMessage(rank, message))

    def _handle_former_worker(self, message: Any) -> None:
        """Handle a message or the exit of a replaced worker, whose copies are still useful."""
        if isinstance(message, m.Published):
            with contextlib.suppress(VaultError):
                for local in message.copies:
                    self._vault.publish(local)
        elif isinstance(message, WorkerExit):
            self._vault.worker_gone(message.pid, self._directory)

    def _publish(self, rank: int, message: m.Published) -> None:
        try:
            for local in message.copies:
                self._vault.publish(local)
        except VaultError as error:
            text = f"it announced a copy that does not exist: {describe(error)}"
            self._apply(core.WorkerMessage(rank, m.Crashed(text, rank)))
            self._kill_workers(f"worker {rank}: {text}")
            return
        self._replicator.submit(self._generation * RANKS + rank, message)

    def _bundle_held(self, epoch: int, bundle: int, peer: str, error: ElasticError) -> None:
        text = f"copies for {peer} (bundle {bundle}): {describe(error)}"
        failed = m.CommFailed(epoch, (peer,), text)
        self._apply(core.WorkerMessage(0, failed))

    def _inject(self, fault: FaultSpec) -> None:
        """Carry out an injected fault: corrupt copies, drop packets to a peer, or lose all messages
        between this node and the coordinator."""
        if fault.kind is FaultKind.CORRUPT:
            log.warning("injected fault: one byte flipped in %d copies", self._vault.flip_bytes())
            return
        if fault.kind is FaultKind.CUT:
            vault = self._replicator.vaults.get(fault.peer, "")
            self._cut.begin(fault.peer, vault, fault.duration_s)
            return
        log.warning("injected fault: cut off from the coordinator for %g s", fault.duration_s)
        until = time.monotonic() + fault.duration_s
        self._partitioned_until = max(self._partitioned_until, until)

    def _poll(self) -> None:
        self._cut.heal()
        self._notices.poll()
        if self._told_of_writing and not self._is_writing():
            self._report()
        if self._group is not None:
            self._apply(core.WorkersPolled(self._group.samples()))

    def _count_received(self, copies: Sequence[Copy]) -> None:
        """Called on the threads of the vault's server."""
        self._received_at = time.monotonic()
        self._metrics.received(copies)

    def _is_writing(self) -> bool:
        """Whether parts of checkpoints wait for the disk, also from before a rejoin."""
        self._former_writers = [writer for writer in self._former_writers if writer.busy]
        return self._checkpoints.busy or bool(self._former_writers)

    def _consider_the_end(self) -> None:
        """While no coordinator can be reached: end if the job is over, or if nothing runs here."""
        now, since, limit_s = time.monotonic(), self._absence.since, self._state.limits.orphan_s
        if self._connected:  # else the record may be of an earlier job
            self._exit_record.look(self._later(partial(self._job_over, since)))
        active = max(since, self._received_at)  # peers that send copies still train
        reason = self._apply(core.CoordinatorAway(now - active))
        why = self._session.problem or "no connection yet"
        if self._exit_code is not None:
            self._last_words = f"{reason}: {why}"
        elif self._absence.is_due(now):
            absent = f"no coordinator has answered {self._node} at {self._coordinator} for"
            then = f"without work, {self._node} ends after {limit_s:g} s unless one answers"
            self._tell(f"{absent} {now - since:.0f} s: {why}; {then}")
            awaited = f"a coordinator at {self._coordinator} to answer {self._node}: {why}"
            self._wait_record.begin(awaited, time.time() - (now - since), then)

    def _job_over(self, away_since: float, order: m.Stop) -> None:
        """End, unless a coordinator was reached since the record of the job's end was sought."""
        if away_since == self._absence.since:
            self._apply(order)

    def _heartbeat(self) -> None:
        self._metrics.heartbeats.inc()
        if self._absence.since and self._exit_code is None:
            self._consider_the_end()
        elif not self._absence.since:
            self._wait_record.end()
        self._mention_idleness()
        if self._gate.open and not self._notices.parked:
            beat = core.heartbeat(self._state)
            signs = beat.signs + self._checkpoints.final_files
            self._send(replace(beat, signs=signs, rtt_s=self._session.rtt_s))

    def _mention_idleness(self) -> None:
        """Tell the user that this node has joined, and waits for the coordinator to use it."""
        now = time.monotonic()
        if self._state.phase is not NodePhase.EMPTY or self._absence.since:
            self._idle_since = now
            self._idle.begin(now)
        elif self._idle.is_due(now) and self.alone:
            here = f"{self._node} waits for work from the coordinator at {self._coordinator} for"
            self._tell(f"{here} {now - self._idle_since:.0f} s; {self._end_of_idleness()}")

    def _end_of_idleness(self) -> str:
        """Return why this node has no work, or when it gets some."""
        if self._notices.parked:
            return "it was drained, and joins again if it need not leave"
        if self._gate.pending:
            refused = f"it may not join yet: {self._refused}"
            return refused if self._refused else "its pre-flight runs"
        status = f"`elastic status --rdzv-endpoint {self._coordinator}` says what the job awaits"
        return f"its workers start when the job has enough nodes, or needs this one; {status}"

    def _tell(self, text: str) -> None:
        """Print a line about the coordinator, which the launcher of a standalone job reports."""
        if not self._config.standalone:
            self._console.say(text)

    def _apply(self, event: Any) -> str:
        """Apply an event to the node's state, and act; return the reason of the decision."""
        before = self._state
        self._state, actions, reason = core.transition(before, event, time.monotonic())
        after = self._state
        if after.phase is not before.phase:
            log.info("%s -> %s (epoch %d): %s", before.phase, after.phase, after.epoch, reason)
        for action in actions:
            self._act(action)
        return reason

    # ---- actions out ----

    def _act(self, action: core.NodeAction) -> None:
        match action:
            case core.SendToWorkers(message):
                self._workers.send(message)
            case core.SpawnWorkers(launch):
                self._spawn(launch)
            case core.KillWorkers(reason):
                self._kill_workers(reason)
            case core.FenceVault(epoch, outside, publishing, discard):
                if discard:
                    self._replicator.reset(epoch)
                self._vault.fence(epoch, outside, publishing)
            case core.StopHolding(peers):
                self._replicator.stop_holding(peers)
            case core.EnterEpoch(install):
                self._enter(install)
            case core.SendReport():
                self._report()
            case core.EndAgent(code):
                self._exit_code = code
            case core.Rejoin(keep_vault):
                self._rejoin(keep_vault)

    def _enter(self, install: m.Install) -> None:
        epoch, assignment = install.epoch, install.assignment
        self._outbox.enter(install)
        # The coordinator may have dropped the parts in between.
        if self._rejoined:
            self._resend()
        else:
            for part in self._outbox.parts:
                self._send(part)
        self._rejoined = False
        self._vault.enter(epoch, assignment.step)
        self._replicator.enter(epoch, assignment)
        self._checkpoints.enter(assignment)
        self._monitor.enter(self._state.info.incarnation, epoch)
        self._paths.watch(dict(assignment.vaults), assignment.plan)

    def _send(self, message: Any) -> None:
        if not self._partitioned:
            self._session.send(message, self._state.epoch)

    @property
    def epoch(self) -> int:
        """The newest epoch that this node knows."""
        return self._state.epoch

    @property
    def _partitioned(self) -> bool:
        """Whether an injected fault cuts this node off. After its end the agent reports again."""
        if self._partitioned_until and time.monotonic() >= self._partitioned_until:
            self._partitioned_until = 0.0
            self._queue.put(self._handle_connected)
        return self._partitioned_until > 0

    def _report(self) -> None:
        if self._notices.parked:
            return
        report = core.report(self._state)
        if self._spare_step is not None and report.phase is not NodePhase.RUNNING:
            self._send_reliably(replace(self._spare_step, spare=False))
            self._spare_step = None
        if report.phase is NodePhase.EMPTY:
            self._gate.start()
            if not self._gate.open:
                return  # the result of the pre-flight causes another report
            report = replace(report, preflight=self._gate.result)
        self._told_of_writing = report.phase not in AT_WORK and self._is_writing()
        report = replace(report, writing=self._told_of_writing)
        workers = len(self._state.workers)
        promised = report.phase is NodePhase.HALTING and len(report.promises) == workers
        if promised or report.phase not in REPORTING_NO_COPIES:
            report = replace(report, inventory=self._vault.inventory())
        self._send(report)
        if report.phase is NodePhase.EMPTY:
            for part in self._outbox.parts:  # they are accepted of members only
                self._send(part)

    def _spawn(self, launch: m.Launch) -> None:
        self._generation += 1
        generation = self._generation
        if self.alone and generation == 1:
            self._tell(f"{self._node} has joined the job at {self._coordinator}; workers start")
        handle = self._later(self._handle_worker)

        def ended(exit: WorkerExit) -> None:
            self._workers.drain(generation, exit.local_rank)
            handle(generation, exit.local_rank, exit)

        def start() -> None:
            try:
                group.start()
            except Exception as error:
                log.exception("workers cannot be started")
                text = f"it cannot be started: {describe(error)}"
                for rank in range(self._config.nproc_per_node):
                    handle(generation, rank, WorkerExit(rank, 0, 127, text))

        group = self._group = WorkerGroup(self._config, launch, self._info, ended, self._console)
        self._starter.post(start)

    def _kill_workers(self, reason: str) -> None:
        """Kill the workers, unless they are being killed. Their last messages and exits arrive
        through the queue as usual."""
        if self._group is not None and self._killed_generation != self._generation:
            log.warning("killing the workers: %s", reason)
            self._killed_generation = self._generation
            self._starter.post(self._group.kill)

    def _rejoin(self, keep_vault: bool) -> None:
        self._metrics.rejoins.inc()
        self._generation += 1
        self._group = None
        self._checkpoints.close(wait=False)
        self._former_writers.append(self._checkpoints)
        self._memory.post(self._replicator.close)
        if not keep_vault:
            self._memory.post(self._server.close)
            self._memory.post(self._vault.close)
            self._open_vault()
        self._workers.clear()
        self._rejoined = True
        self._begin_incarnation()
        self._report()
        self._notices.resend()

    def stop(self) -> None:
        """Kill the workers and end; signal handlers call this. The exit of a worker that received
        the same signal does not count as a crash."""
        self._generation, self._partitioned_until = self._generation + 1, 0.0
        self._later(self._apply)(m.Stop(EXIT_INTERRUPTED, "the agent was told to stop"))

    def leave(self) -> None:
        """Drain the node within --grace seconds, then end; signal handlers call this."""
        self._queue.put(self._drain)

    def _drain(self) -> None:
        parked = self._notices.parked
        if parked or not self._state.elastic:
            code = EXIT_DRAINED if parked else EXIT_TERMINATED
            self._apply(m.Stop(code, "the agent was signalled; there is nothing to move"))
        else:
            self._notices.signalled()

    # ---- callbacks of other threads ----

    def _check_node(self) -> tuple[list[PreflightCheck], float]:
        """Make the checks of the pre-flight; return them and the node's score (`local_checks`)."""
        config, trial = self._config, self._config.preflight == "strict"
        limits, pace = config.timeouts, pace_of(self._directory, config.link)
        memory_bytes = self._info.memory_bytes
        checks, score = local_checks(
            config.directories,
            memory_bytes,
            checkpoint_url=config.checkpoint_dir if is_url(config.checkpoint_dir) else "",
            trial=trial,
            limits=limits,
            tell=lambda text: self._console.say(f"{self._node}: {text}"),
        )
        found = network_checks(self._coordinator, self._node, pace, limits=limits)
        return [*checks, *found], score

    def _launched(self) -> tuple[int, Mapping[int, int]]:
        """Return the generation of the running launch, and the process id per local rank."""
        return self._generation, self._group.pids if self._group is not None else {}

    def _bundle_done(self, worker: int, bundle: int, kept: bool) -> None:
        acknowledge = partial(self._acknowledge, worker, m.BundleAcknowledged(bundle, kept))
        if self._checkpoints.final:  # acknowledged after the last checkpoint is on disk
            self._checkpoints.then(acknowledge)
        else:
            acknowledge()

    def _acknowledge(self, worker: int, acked: m.BundleAcknowledged) -> None:
        if worker // RANKS == self._generation:
            self._workers.send(acked, worker % RANKS)

    def _close(self) -> None:
        self._wait_record.end()
        if self._group is not None:
            self._starter.post(partial(self._end_workers, self._group))
        limit_s = self._config.shutdown_timeout_s + EXIT_GRACE_S + KILL_S + CLOSE_S
        limit_s += _output_s(self._config)
        self._finish("starter", self._starter.close, limit_s)
        self._finish("notices", self._notices.close)
        self._finish("session", self._session.close)
        self._finish("paths", self._paths.close)
        self._finish("monitor", self._monitor.close)
        if not self._checkpoints.close():
            self.left.append("checkpoints")
        self._finish("replicator", self._replicator.close, self._config.timeouts.bulk_s + CLOSE_S)
        self._finish("server", self._server.close, self._config.timeouts.serve_s + CLOSE_S)
        memory_gib = (self._vault.nbytes + self._vault.allocated_bytes) / (1 << 30)
        limit_s = CLOSE_S + FREE_GIB_S * memory_gib
        self._finish("vault", self._vault.close, limit_s)
        self._finish("memory", self._memory.close, limit_s)
        self._cut.heal(all_cuts=True)
        if self._exposition is not None:
            self._finish("metrics", self._exposition.close)
        remove = partial(shutil.rmtree, self._directory, ignore_errors=True)
        self._finish("directory", remove, limit_s)

    def _finish(self, name: str, close: Callable[[], object], limit_s: float = CLOSE_S) -> None:
        """Close a part of the agent, which may wait for a disk. Leave it behind after `limit_s`."""
        if not ends_within(limit_s, f"end of {name}", close):
            self.left.append(name)

    def _write_last_words(self, text: str) -> None:
        if not write_last_words(self._config.run_dir, self._node, text):
            self.left.append("last words")

    def _end_workers(self, group: WorkerGroup) -> None:
        if self._exit_code == 0:
            if not group.wait(EXIT_GRACE_S):
                log.warning("workers did not end within %g s", EXIT_GRACE_S)
            self._check_exits(group.failures())
        group.terminate(self._config.shutdown_timeout_s)
        group.save_output(_output_s(self._config))

    def _check_exits(self, failed: Sequence[WorkerExit]) -> None:
        """After a job that succeeded: end with an error if the script failed after its training.
        Workers that had not trained may fail because this agent ends."""
        if not failed or self._state.finished is None:
            return
        rank, error = failed[0].local_rank, failed[0].error
        ended = f"worker {rank}: exit code {failed[0].returncode}{f': {error}' if error else ''}"
        self._last_words = f"the script failed after the training: {ended}"
        self._exit_code = EXIT_JOB_FAILED
        log.error("%s", self._last_words)


def _output_s(config: JobConfig) -> float:
    """Return OUTPUT_S, or less: the launcher kills an agent after the timeout for a shutdown."""
    return max(STALL_S, min(OUTPUT_S, config.shutdown_timeout_s / 3))


def _node_info(args: SimpleNamespace, config: JobConfig) -> NodeInfo:
    """Return the node's description, without incarnation and address of the vault."""
    return NodeInfo(
        node=args.node,
        incarnation="",
        vault="",
        domain=args.domain,
        workers=config.nproc_per_node,
        memory_bytes=args.memory,
        host=args.host,
        device=args.device,
        lifetime_s=args.lifetime,
        protocol=PROTOCOL,
        release=VERSION,
        peak_tflops=args.peak_tflops or known_peak(args.device),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = read_flags(Command("elastic.agent.service", params=FLAGS), argv)
    early: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: early.append(number))
    limit_heaps()
    config = load_config(args.run_dir)
    source = source_of(config, args.node)
    console, path = Console(source=source), Path(config.run_dir) / "logs" / f"{args.node}.log"
    logs = configure_logging(path, source, partial(console.put, STDOUT))
    raise_limit(config.max_nodes)
    write_last_words(config.run_dir, args.node, "")
    if args.parent_pipe >= 0:
        lifeline.watch(args.parent_pipe)
    try:
        tls.use(tls.load(config.run_dir, config.certs, config.certs_name))
        agent = NodeAgent(config, args.coordinator, _node_info(args, config), console)
        agent.alone = bool(args.alone)
        if source is not None:
            source.epoch = lambda: agent.epoch
        agent.serve_metrics(args.metrics_port)
    except ElasticError as error:
        console.say(str(error))
        write_last_words(config.run_dir, args.node, str(error))
        logs.end_json()
        console.finish(_output_s(config))
        return error.exit_code
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    signal.signal(signal.SIGUSR1, lambda *_: agent.leave())
    if early:
        agent.leave()
    try:
        code = agent.run()
    except Exception as error:
        log.exception("%s ends", args.node)
        console.say(f"{args.node}: {describe(error)}")
        agent.failed(error)
        code = EXIT_FAILURE
    if agent.left:
        log.error("%s ends without its %s", args.node, ", ".join(agent.left))
    logs.end_json()
    console.finish(_output_s(config))
    if agent.left:
        logs.end()
        os._exit(code)  # nothing may wait for the threads that are left
    return code


if __name__ == "__main__":
    sys.exit(main())
