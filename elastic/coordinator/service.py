"""The coordinator process: a thin shell around `elastic.core.coordinator.transition`.

Of several coordinators one leads; the others stand by (`elastic.coordinator.leading`). One thread takes events from
a queue (messages of agents, ticks, requests of the command line), asks the pure transition what to do, saves the new
state, and then acts. State is saved before anything is sent or written, under the fencing token of the coordinator's
lease, so that a former coordinator can neither save nor, by its older term, be heard.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import queue
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from elastic import lifeline
from elastic.config import JobConfig, load_config
from elastic.coordinator.leading import (
    LEASE_S,
    SHARED_LEASE_S,
    STATE_KEY,
    Keeper,
    Part,
    stand_by,
)
from elastic.coordinator.queries import Query, policy_of, reply
from elastic.coordinator.records import Records
from elastic.coordinator.saving import Saver
from elastic.coordinator.speakers import Speakers
from elastic.core import codec, job, speech
from elastic.core import messages as m
from elastic.core.coordinator import transition
from elastic.core.vitals import HealthReport
from elastic.errors import EXIT_FAILURE, ElasticError, StaleError
from elastic.planning.matching import FEW
from elastic.rpc import security
from elastic.rpc.refusals import REFUSALS, Refusal
from elastic.rpc.server import Server, Session
from elastic.store import durable
from elastic.store.base import Lease, Store, StoreUnavailable
from elastic.store.opening import open_store
from elastic.telemetry import configure_logging

log = logging.getLogger("elastic.coordinator")
TICK_S = 0.05
ANSWER_S = 10.0
"""After this long a question of the command line is given up; it waits less itself."""
LINGER_S = 5.0
"""How long a finished coordinator waits for its agents to leave."""


class Clock:
    """Wall time that never jumps back while the process lives."""

    def __init__(self) -> None:
        self._base = time.time() - time.monotonic()

    def now(self) -> float:
        return self._base + time.monotonic()


class Coordinator:
    """Owns the job's state for one term. Everything happens on the thread that calls `run`."""

    def __init__(self, config: JobConfig, address: str, store: Store, lease: Lease, part: Part) -> None:
        self._config, self._clock = config, Clock()
        self._run_dir = Path(config.run_dir)
        self._store, self._lease = store, lease
        self._queue: queue.Queue[Any] = queue.Queue()
        self._sessions: dict[str, Session] = {}
        self._fresh: set[Session] = set()
        self._disk = ThreadPoolExecutor(1, "checkpoint")
        self._commits: list[Future[job.CheckpointCommitted | None]] = []
        self._ending = 0.0
        self._part, self._speakers = part, Speakers()
        self._load()
        self._records = Records(self._run_dir)
        self._saver.tell = self._records.event
        self._keeper = Keeper(store, lease, self._clock.now, self._queue.put)
        REFUSALS.subscribe(self._queue.put)
        self._server = Server(
            address,
            on_open=self._fresh.add,
            on_message=lambda session, message, envelope: self._queue.put((session, message)),
            on_close=lambda session: self._queue.put((session, None)),
            on_call=self._call,
            term=lambda: self._lease.token,
            keepalive_s=config.timeouts.keepalive_s,
        )

    def _load(self) -> None:
        """Take the state over from the store, or begin a new run. Raises StoreUnavailable, StaleError."""
        entry = self._store.get(STATE_KEY)
        if entry is not None and self._part.adopt():
            self._state = codec.loads(job.JobState, entry.value)
            self._queue.put(job.Adopted())
        else:
            durable.discard_incomplete(Path(self._config.checkpoint_dir))
            checkpoint = _checkpoint(Path(self._config.resume)) if self._config.resume else None
            self._state = job.JobState(policy=policy_of(self._config))
            if checkpoint is not None:
                self._state = self._state.of(checkpoint=(str(checkpoint), step_of(checkpoint)))
            value, before = codec.dumps(self._state).encode(), entry.revision if entry else None
            entry = self._store.put_if(STATE_KEY, value, before, self._lease.token)
            self._part.begin(f"{self._config.job_id}.{self._lease.token}", self._lease.token)
        self._saver = Saver(self._store, self._lease, STATE_KEY, entry)

    def run(self) -> int:
        """Serve until the job is over; return its exit code. Raises StaleError once another one leads."""
        try:
            self._announce()
            return self._serve()
        finally:
            self._keeper.close()
            REFUSALS.unsubscribe(self._queue.put)
            self._server.close()
            self._records.close()
            self._disk.shutdown(wait=False)

    def _serve(self) -> int:
        next_tick = self._clock.now()
        while True:
            try:
                item = self._queue.get(timeout=max(0.001, next_tick - self._clock.now()))
                self._take(item)
            except queue.Empty:
                next_tick = self._clock.now() + TICK_S
                self._apply(job.Tick())
                if self._saver.due():
                    self._saver.retry()
            if self._ending and (not self._sessions or self._clock.now() > self._ending):
                with contextlib.suppress(StoreUnavailable):
                    self._store.release(self._lease)
                return self._code

    def _announce(self) -> None:
        text = {"address": self._server.address, "pid": os.getpid(), "term": self._lease.token}
        path = self._run_dir / "coordinator.json"
        if (_told(path).get("term") or 0) <= self._lease.token:
            draft = self._run_dir / f"coordinator.{os.getpid()}.tmp"
            draft.write_text(json.dumps(text) + "\n")
            os.replace(draft, path)
        self._records.event("coordinator", text)
        if self._config.certs and self._config.nproc_per_node * self._config.max_nodes > 1:
            self._records.event("unencrypted", {"what": "workers", "why": security.WORKERS})
            log.warning("%s", security.WORKERS)

    # ---- events in ----

    def _take(self, item: Any) -> None:
        if isinstance(item, ElasticError):
            raise item
        if isinstance(item, Query):
            self._answer(item)
        elif isinstance(item, Future):
            self._committed(item)
        elif isinstance(item, Refusal):
            self._refused("coordinator", *astuple(item))
        elif isinstance(item, tuple):
            self._message(*item)
        else:
            self._apply(item)

    def _message(self, session: Session, message: Any) -> None:
        if message is not None and not self._speakers.admit(self._state, session, message):
            return
        match message:
            case None:
                self._left(session)
            case m.NodeReport():
                node = message.info.node
                self._speakers.note(self._state, message)
                connected = self._sessions.get(node) is not session
                self._sessions[node] = session
                self._apply(job.Reported(message, connected))
            case m.Heartbeat():
                self._sessions.setdefault(message.node, session)
                self._apply(
                    job.Beat(
                        message.node, message.incarnation, message.step, message.microbatch, message.measured
                    )
                )
                if self._keeper.sure:
                    self._records.beat(self._state)
            case m.StepDone():
                self._saver.hold(None, partial(self._records.step, message, self._state))
                if speech.current(self._state, session.sender):
                    self._apply(job.Stepped(message.record, message.seconds))
            case m.Notice():
                self._sessions.setdefault(message.node, session)
                self._apply(message)
            case m.BackupNote() if message.kind in m.BACKUP_NOTES:
                self._apply(job.BackupNoted(message.kind, message.owner, message.keeper, message.detail))
            case HealthReport():
                self._apply(job.HealthSeen(message))
            case m.CheckpointPart():
                self._apply(job.PartWritten(message.step, message.layers))
            case m.RefusalNote():
                self._refused(*astuple(message))

    def _refused(self, *told: Any) -> None:
        """`told`: the fields of `elastic.core.messages.RefusalNote`."""
        self._saver.hold(None, partial(self._records.refused, *told))  # the next tick writes it

    def _left(self, session: Session) -> None:
        self._fresh.discard(session)
        for node in [n for n, s in self._sessions.items() if s is session]:
            del self._sessions[node]
            member = self._state.members.get(node)
            if member is not None:
                self._apply(job.Closed(node, member.report.info.incarnation))

    def _apply(self, event: Any) -> None:
        """One transition: decide, save, act."""
        before = self._state
        self._state, actions, reason = transition(before, event, self._clock.now())
        hold = self._saver.hold
        if before.spec is None and self._state.spec is not None:
            hold(None, partial(self._records.job, self._state.spec))
        if reason and (actions or self._state.phase is not before.phase):
            log.info("%s: %s", type(event).__name__, reason)
            hold(None, partial(self._records.decision, self._state, reason))
        for action in actions:
            once = action if isinstance(action, job.Send) and self._saver.away else None
            hold(once, partial(self._act, action, self._state))
        if not isinstance(event, (job.Beat, job.Tick, job.HealthSeen)) or actions:
            self._saver.save(self._state)
        else:
            self._saver.flush()

    # ---- actions out ----

    def _act(self, action: job.Action, state: job.JobState) -> None:
        """`state`: the one that the action was decided with."""
        match action:
            case job.Send(node, message):
                self._send(node, message, state.epoch)
            case job.Note("plan", data):
                if state.plan is not None:
                    self._records.plan(state.plan, data)
            case job.Note(kind, data):
                self._records.event(kind, data)
                if kind == "phase":
                    self._records.progress(state)
            case job.Recovered():
                if action.change.cause != "start":
                    self._records.recovered(action)
                self._records.progress(state)
            case job.CommitCheckpoint(step):
                self._commit(step)
            case job.Finish():
                self._finish(action)

    def _send(self, node: str, message: Any, epoch: int) -> None:
        session = self._sessions.get(node)
        if session is not None:
            session.send(message, epoch)
        if isinstance(message, m.Fenced) and session is not None:
            del self._sessions[node]

    def _commit(self, step: int) -> None:
        """Make the checkpoint the newest one; the disk is waited for by a thread."""
        spec = self._state.spec

        def work() -> job.CheckpointCommitted | None:
            try:
                path = durable.commit(Path(self._config.checkpoint_dir), step, spec)
            except ElasticError as error:
                log.error("checkpoint of step %d is not whole: %s", step, error)
                return None
            return job.CheckpointCommitted(str(path), step)

        future = self._disk.submit(work)
        self._commits.append(future)
        future.add_done_callback(self._queue.put)

    def _committed(self, future: Future[job.CheckpointCommitted | None]) -> None:
        """Wait for a commit and tell, once, that it was made."""
        if future in self._commits:
            self._commits.remove(future)
            event = future.result()
            if event is not None:
                self._apply(event)

    def _finish(self, action: job.Finish) -> None:
        for future in tuple(self._commits):
            self._committed(future)
        self._code = action.code
        self._records.end(action.code, action.reason, action.params_sha256)
        with contextlib.suppress(StoreUnavailable):
            self._part.end(self._lease.token)
        for node in [node for node in self._sessions if node not in self._state.members]:
            stop = m.Stop(action.code, action.reason)  # released, and waiting to come back
            self._send(node, stop, self._state.epoch)
        self._ending = self._clock.now() + LINGER_S

    # ---- requests of the command line ----

    def _call(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """Called from a server thread; answered by the coordinator's own."""
        query = Query(kind, body, Future())
        self._queue.put(query)
        return query.answer.result(timeout=ANSWER_S)

    def _answer(self, query: Query) -> None:
        try:
            answer, event = reply(self._state, query.kind, query.body)
            if event is not None:
                self._apply(event)
                answer["phase"] = self._state.phase.value
            if self._saver.away:
                answer["store"] = "out of reach: decisions wait"
            query.answer.set_result(answer)
        except ElasticError as error:
            query.answer.set_exception(error)
            if isinstance(error, StaleError):
                raise


def _checkpoint(path: Path) -> Path | None:
    """`path` itself if it is one checkpoint, else the newest one in it."""
    return path if (path / durable.MANIFEST).is_file() else durable.latest(path)


def step_of(checkpoint: Path) -> int:
    """Step of a checkpoint directory step-XXXXXXXX."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def _told(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def lead(config: JobConfig, address: str, slot: int) -> int:
    """Stand by and lead, in turn, until the job is over; return its exit code."""
    # One that is alone takes its own lease again at once. Among several a new process is a new candidate: else one
    # that dies whenever it leads would keep the others from trying.
    alone = not config.store.shared or (config.standalone and config.coordinators == 1)
    holder = config.job_id if alone else f"{config.job_id}/{slot}.{os.getpid()}"
    run_dir, clock, store = Path(config.run_dir), Clock(), open_store(config)
    part = Part(store, run_dir)
    try:
        if config.max_nodes > FEW:  # the planner needs it after the first change; it is slow to import
            threading.Thread(target=importlib.import_module, args=("scipy.optimize",), daemon=True).start()
        (run_dir / f"coordinator-{slot}.pid").write_text(f"{os.getpid()}\n")
        while True:
            lease = stand_by(
                store, part, holder, SHARED_LEASE_S if config.store.shared else LEASE_S, clock.now
            )
            verdict = _told(run_dir / "exit.json")
            if config.store.shared and verdict:  # another one of this machine has told everything
                return int(verdict.get("code", EXIT_FAILURE))
            try:
                return Coordinator(config, address, store, lease, part).run()
            except StaleError as error:
                log.error("another coordinator took over: %s", error)
                if not config.store.shared:
                    return EXIT_FAILURE
            except StoreUnavailable as error:
                log.warning("the store went away while the job was taken over: %s", error)
    finally:
        store.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="elastic.coordinator.service")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--address", default="127.0.0.1:0")
    parser.add_argument("--slot", type=int, default=0)
    parser.add_argument("--parent-pipe", type=int, default=-1)
    args = parser.parse_args(argv)
    config = load_config(args.run_dir)
    log_name = f"coordinator-{args.slot}" if args.slot else "coordinator"
    configure_logging("coordinator", Path(config.run_dir) / "logs" / f"{log_name}.log")
    if args.parent_pipe >= 0:
        lifeline.watch(args.parent_pipe)
    try:
        security.use(security.load(config.run_dir, config.certs, config.certs_name))
        return lead(config, args.address, args.slot)
    except ElasticError as error:
        print(f"elastic coordinator: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
