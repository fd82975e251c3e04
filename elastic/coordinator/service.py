"""The coordinator process: a thin shell around `elastic.core.coordinator.transition`.

One thread takes events from a queue (messages of agents, ticks, requests of the command line), asks the pure
transition what to do, saves the new state, and then acts. State is saved before anything is sent, under the fencing
token of the coordinator's lease, so that a former coordinator can neither save nor, by its older term, be heard.

Events that are there together are learned one by one, and then decided on, saved and acted on once: in a job of
thousands of nodes an epoch change brings thousands of reports at a time. Heartbeats wait for the next tick.
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
from pathlib import Path
from typing import Any

from elastic import lifeline
from elastic.config import JobConfig, load_config
from elastic.coordinator.gauges import JobCollector, Standing
from elastic.coordinator.metrics import CoordinatorMetrics
from elastic.coordinator.queries import Query, lately, policy_of, reply
from elastic.coordinator.records import Records
from elastic.coordinator.saving import StateText
from elastic.core import codec, job
from elastic.core import messages as m
from elastic.core.coordinator import learn, settle
from elastic.errors import EXIT_FAILURE, ElasticError, StaleError
from elastic.metrics import Exposition, Where, new_registry, serve
from elastic.planning.matching import FEW
from elastic.rpc.server import Server, Session
from elastic.store import durable
from elastic.store.base import Lease
from elastic.store.sqlite import SqliteStore
from elastic.telemetry import configure_logging

log = logging.getLogger("elastic.coordinator")
STATE_KEY, LEASE_NAME = "job/state", "coordinator"
TICK_S = 0.05
PASSING = ("Beat", "Tick", "rules")
"""After these alone nothing needs to be saved, unless something follows."""
TOGETHER = 512
"""Events that are taken at once at most."""
LEASE_S = 10.0
LINGER_S = 5.0
"""How long a finished coordinator waits for its agents to leave."""


class Clock:
    """Wall time that never jumps back while the process lives."""

    def __init__(self) -> None:
        self._base = time.time() - time.monotonic()

    def now(self) -> float:
        return self._base + time.monotonic()


class Coordinator:
    """Owns the job's state. Everything happens on the thread that calls `run`."""

    def __init__(self, config: JobConfig, address: str) -> None:
        self._config, self._clock = config, Clock()
        self._run_dir = Path(config.run_dir)
        self._records = Records(self._run_dir)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sessions: dict[str, Session] = {}
        self._fresh: set[Session] = set()
        self._disk = ThreadPoolExecutor(1, "checkpoint")
        self._commits: list[Future[job.CheckpointCommitted | None]] = []
        self._ending = 0.0
        self._todo: list[job.Action] = []
        """What follows from events that were learned and not yet decided on."""
        self._unsettled = self._to_save = False
        self._text = StateText()
        self._exposition: Exposition | None = None
        self._meter = CoordinatorMetrics(new_registry(), self._clock.now())
        self._open_store()
        self._server = Server(
            address,
            on_open=self._fresh.add,
            on_message=lambda session, message, envelope: self._queue.put((session, message)),
            on_close=lambda session: self._queue.put((session, None)),
            on_call=self._call,
            term=lambda: self._lease.token,
            prompt=True,
        )
        collector = JobCollector(
            config.job_id, lambda: self._state, self._standing, self._meter, self._clock.now
        )
        self._meter.registry.register(collector)

    def serve_metrics(self, port: int) -> None:
        """From now on; -1: not at all."""
        where = Where(
            self._config.metrics_host,
            port,
            str(self._run_dir),
            self._config.job_id,
            "coordinator",
            "coordinator",
        )
        self._exposition = serve(self._meter.registry, where)

    def _standing(self) -> Standing:
        return Standing(True, self._lease.token, self._queue.qsize(), len(self._saved))

    def _open_store(self) -> None:
        now = self._clock.now()
        self._store = SqliteStore(self._run_dir / "coordinator.db")
        holder = f"{self._config.job_id}"
        self._lease: Lease = self._store.acquire(LEASE_NAME, holder, LEASE_S, now)
        entry = self._store.get(STATE_KEY)
        self._revision = entry.revision if entry else None
        if entry is None:
            durable.discard_incomplete(Path(self._config.checkpoint_dir))
            checkpoint = _checkpoint(Path(self._config.resume)) if self._config.resume else None
            self._state = job.JobState(policy=policy_of(self._config))
            if checkpoint is not None:
                self._state = self._state.of(checkpoint=(str(checkpoint), step_of(checkpoint)))
        else:
            self._state = codec.loads(job.JobState, entry.value)
            self._queue.put(job.Adopted())
        self._saved = entry.value if entry else b""

    def run(self) -> int:
        """Serve until the job is over; return its exit code."""
        self._announce()
        if (
            self._state.policy.max_nodes > FEW
        ):  # the planner needs it after the first change; it is slow to import
            threading.Thread(target=importlib.import_module, args=("scipy.optimize",), daemon=True).start()
        next_tick = self._clock.now()
        while True:
            with contextlib.suppress(queue.Empty):
                self._take(self._queue.get(timeout=max(0.001, next_tick - self._clock.now())))
                for _ in range(TOGETHER):
                    self._take(self._queue.get_nowait())
            now = self._clock.now()
            if now >= next_tick:
                self._meter.ticked(now - next_tick)
                next_tick = now + TICK_S
                self._apply(job.Tick())
                self._renew()
            self._decide()
            if self._ending and (not self._sessions or self._clock.now() > self._ending):
                self._server.close()
                self._store.close()
                if self._exposition is not None:
                    self._exposition.close()
                return self._code

    def _announce(self) -> None:
        text = {"address": self._server.address, "pid": os.getpid(), "term": self._lease.token}
        draft = self._run_dir / f"coordinator.{os.getpid()}.tmp"
        draft.write_text(json.dumps(text) + "\n")
        os.replace(draft, self._run_dir / "coordinator.json")
        self._records.event("coordinator", text)

    def _renew(self) -> None:
        now = self._clock.now()
        if self._lease.expires_at - now < LEASE_S / 2:
            self._lease = self._store.renew(self._lease, now)

    # ---- events in ----

    def _take(self, item: Any) -> None:
        if isinstance(item, Query):
            self._answer(item)
        elif isinstance(item, Future):
            self._committed(item)
        elif isinstance(item, tuple):
            self._message(*item)
        else:
            self._apply(item)

    def _message(self, session: Session, message: Any) -> None:
        match message:
            case None:
                self._left(session)
            case m.NodeReport():
                node = message.info.node
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
                self._records.beat((message.step, message.microbatch), self._state)
            case m.StepDone():
                self._records.step(message, self._state)
                self._meter.stepped(message, self._state)
                self._apply(job.Stepped(message.record))
            case m.BackupNote() if message.kind in m.BACKUP_NOTES:
                self._apply(job.BackupNoted(message.kind, message.owner, message.keeper, message.detail))
            case m.CheckpointPart():
                self._apply(job.PartWritten(message.step, message.layers))
            case _:
                log.warning("unexpected %s from %s", type(message).__name__, session.peer)

    def _left(self, session: Session) -> None:
        self._fresh.discard(session)
        for node in [n for n, s in self._sessions.items() if s is session]:
            del self._sessions[node]
            member = self._state.members.get(node)
            if member is not None:
                self._apply(job.Closed(node, member.report.info.incarnation))

    def _apply(self, event: Any) -> None:
        """Learn of an event; `_decide` follows."""
        before, began, now = self._state, time.perf_counter(), self._clock.now()
        result = learn(before, event, now)
        self._meter.took(event, time.perf_counter() - began)
        self._unsettled = self._unsettled or not isinstance(event, job.Beat)
        self._follow(type(event).__name__, before, result, now)

    def _decide(self) -> None:
        """One transition for all that was learned: decide, save, act."""
        while self._unsettled or self._todo:
            if self._unsettled:
                self._unsettled = False
                before, began, now = self._state, time.perf_counter(), self._clock.now()
                result = settle(before, now)
                self._meter.took(None, time.perf_counter() - began)
                self._follow("rules", before, result, now)
            actions, self._todo = self._todo, []
            if actions or self._to_save:
                self._save()
            for action in actions:
                self._act(action)

    def _follow(self, what: str, before: job.JobState, result: job.Result, now: float) -> None:
        """Take over what was decided; actions wait until it is saved."""
        self._state, actions, reason = result
        self._meter.decided(before, self._state, actions, now)
        if before.spec is None and self._state.spec is not None:
            self._records.job(self._state.spec)
        self._to_save = self._to_save or what not in PASSING
        if reason and (actions or self._state.phase is not before.phase):
            log.info("%s: %s", what, reason)
            told = {"phase": self._state.phase.value, "epoch": self._state.epoch, "reason": reason}
            self._todo.append(job.Note("decision", told))
        self._todo += actions

    def _save(self) -> None:
        began, self._to_save = time.perf_counter(), False
        value = self._text.dumps(self._state).encode()
        if value != self._saved:
            entry = self._store.put_if(STATE_KEY, value, self._revision, self._lease.token)
            self._revision, self._saved = entry.revision, value
            self._meter.saved(time.perf_counter() - began, len(value))

    # ---- actions out ----

    def _act(self, action: job.Action) -> None:
        match action:
            case job.Send(node, message):
                self._send(node, message)
            case job.Note("plan", data):
                if self._state.plan is not None:
                    self._records.plan(self._state.plan, data)
            case job.Note(kind, data):
                self._records.event(kind, data)
                if kind == "phase":
                    self._records.progress(self._state)
            case job.Recovered():
                if action.change.cause != "start":
                    self._meter.recovered(action, self._records.recovered(action))
                self._records.progress(self._state)
            case job.CommitCheckpoint(step):
                self._commit(step)
            case job.Finish():
                self._finish(action)

    def _send(self, node: str, message: Any) -> None:
        session = self._sessions.get(node)
        if session is not None:
            session.send(message, self._state.epoch)
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
        self._decide()
        self._code = action.code
        self._records.end(action.code, action.reason, action.params_sha256)
        self._ending = self._clock.now() + LINGER_S

    # ---- requests of the command line ----

    def _call(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """Called from a server thread; answered by the coordinator's own."""
        query = Query(kind, body, Future())
        self._queue.put(query)
        return query.answer.result(timeout=10.0)

    def _answer(self, query: Query) -> None:
        try:
            answer, event = reply(self._state, query.kind, query.body)
            if query.kind == "status":
                answer |= lately(self._meter, self._lease.token)
            if event is not None:
                self._apply(event)
                self._decide()
                answer["phase"] = self._state.phase.value
            query.answer.set_result(answer)
        except ElasticError as error:
            query.answer.set_exception(error)


def _checkpoint(path: Path) -> Path | None:
    """`path` itself if it is one checkpoint, else the newest one in it."""
    return path if (path / durable.MANIFEST).is_file() else durable.latest(path)


def step_of(checkpoint: Path) -> int:
    """Step of a checkpoint directory step-XXXXXXXX."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="elastic.coordinator.service")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--address", default="127.0.0.1:0")
    parser.add_argument("--metrics-port", type=int, default=-1)
    parser.add_argument("--parent-pipe", type=int, default=-1)
    args = parser.parse_args(argv)
    config = load_config(args.run_dir)
    configure_logging("coordinator", Path(config.run_dir) / "logs" / "coordinator.log")
    if args.parent_pipe >= 0:
        lifeline.watch(args.parent_pipe)
    try:
        coordinator = Coordinator(config, args.address)
        coordinator.serve_metrics(args.metrics_port)
        return coordinator.run()
    except StaleError as error:
        log.error("another coordinator took over: %s", error)
        return EXIT_FAILURE
    except ElasticError as error:
        print(f"elastic coordinator: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
