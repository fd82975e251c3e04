"""The agent process: supervises a node's workers, keeps its vault, and speaks for it to the coordinator.

A thin shell around `elastic.core.node.node.transition`. One thread owns the node's state and takes events from a queue:
orders of the coordinator, words of workers (in the order in which they were said), exits, and a periodic look.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from elastic import lifeline
from elastic.agent.health.readiness import Fitness
from elastic.agent.injected import carry_out
from elastic.agent.metrics import AgentMetrics, condition
from elastic.agent.notes import Notes
from elastic.agent.notices.controller import Found, Leaving, Read
from elastic.agent.outbox import News
from elastic.agent.starting import who, words
from elastic.agent.vault.checkpoints import CheckpointWriter
from elastic.agent.vault.prefetch import prefetch
from elastic.agent.vault.replicator import Replicator
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.agent.workers.channels import Workers
from elastic.agent.workers.processes import Place, WorkerExit, WorkerGroup
from elastic.config import JobConfig, load_config
from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.core.protocol.fault_spec import parse_fault
from elastic.core.protocol.health_report import HealthReport, Preflight, Refused
from elastic.core.protocol.messages import NodePhase
from elastic.domain.errors import EXIT_DRAINED, EXIT_INTERRUPTED, EXIT_TERMINATED, ElasticError, VaultError
from elastic.domain.types import NodeInfo
from elastic.metrics import Exposition, Where, new_registry, serve
from elastic.rpc.bulk.compression import CompressionPolicy
from elastic.rpc.control.client import CoordinatorSession
from elastic.rpc.link_shaping import pace_of
from elastic.rpc.security import tls
from elastic.rpc.security.rejections import REJECTIONS, RejectionNotice
from elastic.telemetry import configure_logging

log = logging.getLogger("elastic.agent")
LOOK_S = 0.1
RANKS = 1 << 16
"""A worker is generation * RANKS + local rank: an acknowledgement is for one launch alone."""
GRACE_S = 10.0
"""How long workers may take to end by themselves when the job is over."""
RUNNING = (NodePhase.RUNNING, NodePhase.INSTALLING, NodePhase.HALTING, NodePhase.FINISHED)


class Agent:
    """Owns a node. Everything happens on the thread that calls `run`, but for transfers and sockets."""

    def __init__(self, config: JobConfig, coordinator: str, who: NodeInfo) -> None:
        self._config, self._who, self._node, self._host = config, who, who.node, who.host
        self._queue: queue.Queue[Any] = queue.Queue()
        self._directory = Path(config.memory_dir) / self._node
        self._news = News()
        self._group: WorkerGroup | None = None
        self._generation, self._partitioned_until = 0, 0.0
        self._exit_code: int | None = None
        self._fitness = Fitness(config, coordinator, who, self._queue.put)
        self._leaving = Leaving(config, self._node, self._queue.put, self._say, self._report)
        self._meter = AgentMetrics(new_registry())
        self._exposition: Exposition | None = None
        self._begin()
        REJECTIONS.subscribe(self._queue.put)
        self._workers = Workers(self._directory / "agent.sock", self._queue.put, self._launched)
        self._session = CoordinatorSession(
            coordinator, on_message=lambda message, envelope: self._queue.put(message), sender=self._node,
            on_up=lambda: self._queue.put("up"), on_down=lambda why: log.info("coordinator away: %s", why),
            keepalive_s=config.timeouts.keepalive_s,
        )  # fmt: skip

    def serve_metrics(self, port: int) -> None:
        """From now on; -1: not at all."""
        config = self._config
        self._meter.condition = lambda: condition(
            config, self._directory, self._vault, self._replicator, self._group, self._session, self._state.epoch
        )  # fmt: skip
        place = (config.metrics_host, port, config.run_dir, config.job_id, self._node, "agent", config.certs)
        self._exposition = serve(self._meter.registry, Where(*place))

    def _begin(self) -> None:
        """A new incarnation: empty vault, no workers."""
        tell, limit = Notes(self._node, self._queue.put), self._config.vault_memory_bytes
        self._vault = Vault(self._node, self._directory / "vault", limit=limit, on_corrupt=tell.corrupt)
        pace = pace_of(self._directory, self._config.link)
        packs = CompressionPolicy(self._config.compress)
        meter, limits = self._meter, self._config.timeouts
        self._server = VaultServer(
            self._vault, self._host, timeout_s=limits.serve_s, pace=pace, compressing=packs, received=meter.received
        ).start()  # fmt: skip
        where = Path(self._config.checkpoint_dir)
        self._checkpoints = CheckpointWriter(where, self._vault, self._queue.put, self._fitness.unwritten)
        prepare, short = self._checkpoints.offer, tell.short
        self._replicator = Replicator(
            self._vault, self._acked, self._held, timeout_s=limits.bulk_s, prepare=prepare, pace=pace, short=short,
            compressing=packs, sent=self._fitness.sent, delivered=meter.sent,
        )  # fmt: skip
        self._leaving.incarnation = incarnation = uuid.uuid4().hex[:12]
        who = replace(self._who, incarnation=incarnation, vault=self._server.address)
        self._state = core.NodeState(who, limits=limits)
        self._fitness.begin(incarnation)

    def run(self) -> int:
        """Serve until the job is over for this node; return the exit code."""
        next_look = next_beat = time.monotonic()
        while self._exit_code is None:
            with contextlib.suppress(queue.Empty):
                self._take(self._queue.get(timeout=max(0.001, min(next_look, next_beat) - time.monotonic())))
            now = time.monotonic()
            if now >= next_look:
                next_look = now + LOOK_S
                self._look()
            if now >= next_beat:
                next_beat = now + self._config.heartbeat_s
                self._beat()
        self._close()
        return self._exit_code

    # ---- events in ----

    def _take(self, item: Any) -> None:
        match item:
            case "up":
                for news in self._news:  # before a report that may end the job
                    self._say(news)
                self._report()
                self._leaving.again()
            case Read(source="signal") if self._leaving.parked or not self._state.elastic:
                code = EXIT_DRAINED if self._leaving.parked else EXIT_TERMINATED
                self._apply(m.Stop(code, "told to end; there is nothing to move"))
            case Read() | Found():
                self._leaving.take(item)
            case m.Released() if not self._partitioned and not self._leaving.parked:
                self._leaving.released(lambda: self._apply(item))
            case (int() as generation, int() as rank, message):
                if generation == self._generation:
                    self._from_worker(rank, message)
                else:
                    self._from_former_worker(message)
            case ("acked", int() as worker, m.Acked() as acked):
                self._tell_acked(worker, acked)
            case m.CommFailed():  # copies do not get to the peer
                self._apply(core.Said(0, item))
            case m.BackupNote() | m.CheckpointPart():
                self._news.add(item)
                self._say(item)
            case HealthReport() | Preflight() | Refused():
                self._state, told, joins = self._fitness.take(item, self._state)
                if told is not None:
                    self._say(told)
                if joins:
                    self._report()
                    self._leaving.again()
            case RejectionNotice():
                self._say(m.RefusalNote(self._node, *astuple(item)))
            case m.Trim():
                self._vault.trim(item.epoch, item.step)
            case m.Prefetch() if not self._partitioned:
                self._start_prefetch(item)
            case _ if not self._partitioned:
                self._apply(item)

    def _from_worker(self, rank: int, message: Any) -> None:
        match message:
            case m.Published():
                self._published(rank, message)
            case m.StepDone():
                self._news.add(message)
                self._say(message)
            case m.FaultReached():
                until = carry_out(parse_fault(message.fault), self._vault)
                self._partitioned_until = max(self._partitioned_until, until)
            case WorkerExit():
                self._meter.worker_ended()
                self._workers.gone(rank)
                self._vault.worker_gone(message.pid, self._directory)
                self._apply(core.Exited(rank, message.returncode))
            case m.Attach() | m.Halted() | m.Failed() | m.Finished():
                log.info("worker %d: %s", rank, type(message).__name__)
                if isinstance(message, m.Attach):
                    self._checkpoints.every = message.spec.checkpoint_every
                    self._checkpoints.steps = message.spec.n_steps
                self._apply(core.Said(rank, message))
            case _:
                self._apply(core.Said(rank, message))

    def _from_former_worker(self, message: Any) -> None:
        """Last words of workers that have been replaced: their copies still count."""
        if isinstance(message, m.Published):
            with contextlib.suppress(VaultError):
                for local in message.copies:
                    self._vault.publish(local)
        elif isinstance(message, WorkerExit):
            self._vault.worker_gone(message.pid, self._directory)

    def _published(self, rank: int, message: m.Published) -> None:
        try:
            for local in message.copies:
                self._vault.publish(local)
        except VaultError as error:
            log.error("worker %d announced a copy that is not there: %s", rank, error)
            self._kill()
            return
        self._replicator.submit(self._generation * RANKS + rank, message)

    def _look(self) -> None:
        self._leaving.look()
        if self._group is None:
            return
        found = self._group.states().items()
        seen = (core.Evidence(r, s.stopped, s.main_cpu_s, s.on_disk, s.family_cpu_s) for r, s in found)
        self._apply(core.Looked(tuple(seen)))

    def _beat(self) -> None:
        self._meter.beat()
        if self._fitness.known and not self._leaving.parked:
            self._say(core.heartbeat(self._state))

    def _apply(self, event: Any) -> None:
        before = self._state
        self._state, actions, reason = core.transition(before, event, time.monotonic())
        if self._state.phase is not before.phase:
            log.info("%s -> %s (epoch %d): %s", before.phase, self._state.phase, self._state.epoch, reason)
        for action in actions:
            self._act(action)

    # ---- actions out ----

    def _act(self, action: core.Action) -> None:
        match action:
            case core.Tell(message, rank):
                self._workers.tell(message, rank)
            case core.Spawn(launch):
                self._spawn(launch)
            case core.KillWorkers(reason):
                log.warning("workers are killed: %s", reason)
                self._kill()
            case core.Fence(epoch):
                self._replicator.reset(epoch)
                self._vault.fence(epoch)
            case core.Enter(install):
                self._news.enter(install)
                self._vault.enter(install.epoch, install.assignment.step)
                self._replicator.enter(install.epoch, install.assignment)
                self._checkpoints.enter(self._node, install.assignment.plan)
                self._fitness.enter(self._state.info.incarnation, install.epoch)
            case core.Report():
                self._report()
            case core.Leave(code):
                self._exit_code = code
            case core.Rejoin():
                self._rejoin()

    def _say(self, message: Any) -> None:
        if not self._partitioned:
            self._session.send(message, self._state.epoch)

    @property
    def _partitioned(self) -> bool:
        if self._partitioned_until and time.monotonic() >= self._partitioned_until:
            self._partitioned_until = 0.0
            self._queue.put("up")
        return self._partitioned_until > 0

    def _report(self) -> None:
        if self._leaving.parked:
            return
        report = self._fitness.report(core.report(self._state))
        if report is None:
            return
        if report.phase not in RUNNING:
            report = replace(report, inventory=self._vault.inventory())
        self._say(report)

    def _spawn(self, launch: m.Launch) -> None:
        self._generation += 1
        generation = self._generation
        place = Place(self._node, str(self._directory / "agent.sock"), self._host, self._who.device)

        def ended(exit: WorkerExit) -> None:
            self._workers.last_words(generation, exit.local_rank)
            self._queue.put((generation, exit.local_rank, exit))

        self._group = WorkerGroup(self._config, launch, place, ended)
        try:
            self._group.start()
        except OSError as error:
            log.error("workers cannot be started: %s", error)
            for rank in range(self._config.nproc_per_node):
                self._queue.put((generation, rank, WorkerExit(rank, 0, 127, time.time())))

    def _kill(self) -> None:
        """Kill the workers; their exits, and whatever they said before, arrive through the queue as usual."""
        if self._group is not None:
            self._group.kill()

    def _rejoin(self) -> None:
        self._meter.rejoined()
        self._generation += 1
        self._group = None
        for part in (self._replicator, self._server, self._vault):
            part.close()
        self._workers.forget()
        self._begin()
        self._report()
        self._leaving.again()

    def _start_prefetch(self, order: m.Prefetch) -> None:
        def work() -> None:
            try:
                prefetch(self._vault, order)
            except ElasticError as error:
                log.warning("prefetch: %s", error)
            self._queue.put(core.PrefetchDone(order.epoch))

        threading.Thread(target=work, name="prefetch", daemon=True).start()

    def stop(self) -> None:
        """For signal handlers: kill the workers and end. The signal may have ended them already: no crash."""
        self._generation, self._partitioned_until = self._generation + 1, 0.0
        self._queue.put(m.Stop(EXIT_INTERRUPTED, "told to stop"))

    def leave(self) -> None:
        """The node shall leave within --grace seconds and the agent end; for signal handlers."""
        self._leaving.signalled()

    # ---- callbacks of other threads ----

    def _launched(self) -> tuple[int, Mapping[int, int]]:
        """The running launch: its generation and the process of each local rank."""
        return self._generation, self._group.pids if self._group is not None else {}

    def _acked(self, worker: int, bundle: int, kept: bool) -> None:
        acked = m.Acked(bundle, kept)
        if self._checkpoints.final:  # behind the news that it is on disk
            self._checkpoints.then(lambda: self._queue.put(("acked", worker, acked)))
        else:
            self._tell_acked(worker, acked)

    def _tell_acked(self, worker: int, acked: m.Acked) -> None:
        if worker // RANKS == self._generation:
            self._workers.tell(acked, worker % RANKS)

    def _held(self, epoch: int, bundle: int, peer: str, error: ElasticError) -> None:
        self._queue.put(m.CommFailed(epoch, (peer,), f"backup of bundle {bundle}: {error}"))

    def _close(self) -> None:
        if self._group is not None:
            if self._exit_code == 0 and not self._group.wait(GRACE_S):
                log.warning("workers did not end within %g s", GRACE_S)
            self._group.terminate(self._config.shutdown_timeout_s)
        self._leaving.close()
        self._session.close()
        self._fitness.close()
        for part in (self._checkpoints, self._replicator, self._server, self._vault, self._exposition):
            if part is not None:
                part.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    args = words(argv)
    early: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: early.append(number))
    config = load_config(args.run_dir)
    configure_logging(args.node, Path(config.run_dir) / "logs" / f"{args.node}.log")
    if args.parent_pipe >= 0:
        lifeline.watch(args.parent_pipe)
    try:
        tls.use(tls.load(config.run_dir, config.certs, config.certs_name))
        agent = Agent(config, args.coordinator, who(args, config))
        agent.serve_metrics(args.metrics_port)
    except ElasticError as error:
        print(f"elastic agent: {error}", file=sys.stderr)
        return error.exit_code
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    signal.signal(signal.SIGUSR1, lambda *_: agent.leave())
    if early:
        agent.leave()
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
