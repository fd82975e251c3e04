"""The coordinator process: a thin shell around `elastic.core.coordinator.transitions`.

Of several coordinators one leads; the others stand by (`elastic.coordinator.leadership`). One thread takes events from
a queue (messages of agents, ticks, requests of the command line), asks the pure core what to do, saves the new
state, and then acts. Decisions are saved before they are sent or written, under the fencing token of the coordinator's
lease, so that a former coordinator can neither save nor, by its older term, be heard.

Events that are there together are learned one by one, each as of when it came, and then decided on, saved and acted on
once: in a job of thousands of nodes a new epoch brings thousands of reports. Heartbeats wait for the next tick.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import resource
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from elastic import lifeline
from elastic.command_line import Command, flag, read_flags
from elastic.config import JobConfig, load_config
from elastic.coordinator.clock import Clock
from elastic.coordinator.inbox import SWITCH_S, Inbox
from elastic.coordinator.leadership import LEASE_S, SHARED_LEASE_S, STATE_KEY, Keeper, Part, stand_by
from elastic.coordinator.metrics.endpoint import Exposed
from elastic.coordinator.metrics.gauges import Standing
from elastic.coordinator.queries import Query, lately, reply
from elastic.coordinator.records.checkpoint_commit import Commit, Commits
from elastic.coordinator.records.run_directory import announce, first_state, name_of, note_pid, read_told
from elastic.coordinator.records.run_records import Records
from elastic.coordinator.records.state_saver import Saver
from elastic.coordinator.session_filter import Speakers
from elastic.core.coordinator import authorization as speech
from elastic.core.coordinator.transitions import learn, settle
from elastic.core.job import state as job
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import HealthReport
from elastic.domain import codec
from elastic.domain.errors import EXIT_FAILURE, ElasticError, StaleError
from elastic.planning.placement.assignment import FEW
from elastic.rpc.control.server import Server, ClientSession
from elastic.rpc.security import tls
from elastic.rpc.security.rejections import REJECTIONS, RejectionNotice
from elastic.store.interface import Lease, Store, StoreError, StoreUnavailable
from elastic.store.open_store import open_store
from elastic.telemetry import configure_logging

log = logging.getLogger("elastic.coordinator")
TICK_S, SLOWEST_TICK_S = 0.05, 0.25
"""Rules are applied so often, but in a large job not so often that they take more than a tenth of a core."""
ANSWER_S = 10.0
"""After this long a question of the command line is given up; it waits less itself."""
PASSING, SAID_AGAIN = ("Beats", "Tick", "HealthSeen", "rules"), "Reported"
"""After these alone nothing needs to be saved, or not at once, unless something follows."""
TOGETHER = 512
"""Events that are taken at once at most."""
LINGER_S = 5.0
"""How long a finished coordinator waits for its agents to leave."""
FLAGS = [
    flag("--run-dir", required=True),
    flag("--address", default="127.0.0.1:0"),
    flag("--slot", default=0),
]
FLAGS += [flag("--metrics-port", default=-1), flag("--parent-pipe", default=-1)]


class Coordinator:
    """Owns the job's state for one term. Everything happens on the thread that calls `run`."""

    def __init__(
        self, config: JobConfig, address: str, store: Store, lease: Lease, part: Part, exposed: Exposed
    ) -> None:
        self._config, self._clock, self._run_dir = config, Clock(), Path(config.run_dir)
        self._store, self._lease = store, lease
        self._now, self._ending, self._settle_s = self._clock.now(), 0.0, 0.0
        self._inbox = Inbox(self._clock.now, lambda: max(TICK_S, min(SLOWEST_TICK_S, 10 * self._settle_s)))
        self._sessions: dict[str, ClientSession] = {}
        self._commits = Commits(Path(config.checkpoint_dir), self._inbox.put)
        self._unsettled = self._to_save = self._adopted = False
        self._beats, self._part, self._speakers = list[m.Heartbeat](), part, Speakers()
        self._load()
        self._records = Records(self._run_dir)
        self._exposed, self._meter = exposed, exposed.meter
        self._saver.tell, self._saver.measured = self._tell, self._meter.saved
        self._keeper = Keeper(store, lease, self._clock.now, self._inbox.put)
        REJECTIONS.subscribe(self._inbox.put)
        self._server = Server(
            address,
            on_open=lambda session: None,
            on_message=self._inbox.say,
            on_close=self._inbox.say,
            on_call=self._call,
            term=lambda: self._lease.token,
            keepalive_s=config.timeouts.keepalive_s,
            prompt=True,
        )
        exposed.lead(lambda: (self._state, self._standing()))

    def _standing(self) -> Standing:
        return Standing(self._keeper.sure, self._lease.token, len(self._inbox), self._saver.nbytes)

    def _load(self) -> None:
        """Take the state over from the store, or begin a new run. Raises StoreUnavailable, StaleError."""
        entry = self._store.get(STATE_KEY)
        if entry is not None and self._part.adopt():
            self._state = codec.loads(job.JobState, entry.value)
            self._adopted = True
        else:
            self._state = first_state(self._config)
            value, before = codec.dumps(self._state).encode(), entry.revision if entry else None
            entry = self._store.put_if(STATE_KEY, value, before, self._lease.token)
            self._part.begin(f"{self._config.job_id}.{self._lease.token}", self._lease.token)
        self._saver = Saver(self._store, self._lease, STATE_KEY, entry)

    def run(self) -> int:
        """Serve until the job is over; return its exit code. Raises StaleError once another one leads."""
        try:
            self._inbox.start()
            self._announce()
            return self._serve()
        finally:
            self._exposed.stand_by()
            self._inbox.close()
            self._keeper.close()
            REJECTIONS.unsubscribe(self._inbox.put)
            self._server.close()
            self._records.close()
            self._commits.close()

    def _serve(self) -> int:
        if self._adopted:
            self._now = self._clock.now()  # from now on they can come back
            self._apply(job.Adopted())
        while True:
            self._turn()
            if self._ending and (not self._sessions or self._clock.now() > self._ending):
                with contextlib.suppress(StoreUnavailable, StoreError):
                    self._store.release(self._lease)
                return self._code

    def _turn(self) -> None:
        """Wait for something, and do all that follows from it and from what else is there."""
        for came_at, item in self._inbox.take(TOGETHER):
            self._now = max(self._now, came_at)
            self._take(item)
        self._decide()
        if self._saver.due():
            self._saver.retry()

    def _announce(self) -> None:
        text = {"address": self._server.address, "pid": os.getpid(), "term": self._lease.token}
        announce(self._run_dir, text)
        self._tell("coordinator", text)
        if self._config.certs and self._config.nproc_per_node * self._config.max_nodes > 1:
            self._tell("unencrypted", {"what": "workers", "why": tls.WORKERS})
            log.warning("%s", tls.WORKERS)

    def _tell(self, kind: str, data: dict[str, Any]) -> None:
        self._records.event(kind, data)
        self._meter.told(kind)

    # ---- events in ----

    def _take(self, item: Any) -> None:
        if isinstance(item, ElasticError):
            raise item
        if isinstance(item, Query):
            self._answer(item)
        elif isinstance(item, Future):
            self._committed(item)
        elif isinstance(item, RejectionNotice):
            self._refused("coordinator", *astuple(item))
        elif isinstance(item, tuple):
            self._message(*item)
        else:
            self._apply(item)

    def _message(self, session: ClientSession, message: Any) -> None:
        if message is not None and not self._speakers.admit(self._state, session, message):
            return
        match message:
            case None:
                self._left(session)
            case m.NodeReport():
                node = message.info.node
                self._speakers.note(self._state, message)
                connected, self._sessions[node] = self._sessions.get(node) is not session, session
                self._apply(job.Reported(message, connected))
            case m.Heartbeat():
                self._sessions.setdefault(message.node, session)
                self._beats.append(message)
            case m.StepDone():
                self._saver.hold(None, partial(self._records.step, message, self._state))
                self._saver.hold(None, partial(self._meter.stepped, message, self._state))
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

    def _refused(self, *told: Any) -> None:  # the fields of elastic.core.protocol.messages.RefusalNote
        self._saver.hold(None, partial(self._records.refused, *told))  # the next tick writes it

    def _left(self, session: ClientSession) -> None:
        for node in [n for n, s in self._sessions.items() if s is session]:
            del self._sessions[node]
            member = self._state.members.get(node)
            if member is not None:
                self._apply(job.Closed(node, member.report.info.incarnation))

    def _hear(self) -> None:
        """Learn of all heartbeats that have come since the last event."""
        if self._beats:
            beats, self._beats = tuple(self._beats), []
            self._apply(job.Beats(beats))
            if self._keeper.sure:
                self._records.beat(max((beat.step, beat.microbatch) for beat in beats), self._state)

    def _apply(self, event: Any) -> None:
        """Learn of an event; `_decide` follows."""
        self._hear()
        before, began, now = self._state, time.perf_counter(), self._now
        result = learn(before, event, now)
        self._meter.took(event, time.perf_counter() - began)
        self._unsettled = self._unsettled or not isinstance(event, job.Beats)
        self._follow(type(event).__name__, before, result, now)

    def _decide(self) -> None:
        """One transition for all that was learned: decide, save, act."""
        self._hear()
        while self._unsettled or self._to_save:
            if self._unsettled:
                self._unsettled = False
                before, began, now = self._state, time.perf_counter(), self._now
                result = settle(before, now)
                self._settle_s = self._meter.took(None, time.perf_counter() - began)
                self._follow("rules", before, result, now)
            if self._to_save:
                self._to_save = False
                self._saver.save(self._state)
        self._saver.flush()

    def _follow(self, what: str, before: job.JobState, result: job.Result, now: float) -> None:
        """Take over what was decided; all that follows from it is held back until it is saved."""
        self._state, actions, reason = result
        hold = self._saver.hold
        turned = self._state.phase is not before.phase
        if what == SAID_AGAIN and not actions:
            self._saver.wait(self._state)
        elif actions or what not in PASSING:
            self._to_save = True
        if actions or turned or not self._saver.away:  # what only tells that time passes would pile up
            hold(None, partial(self._meter.decided, before, self._state, actions, now))
        if before.spec is None and self._state.spec is not None:
            hold(None, partial(self._records.job, self._state.spec))
        if reason and (actions or turned):
            log.info("%s: %s", what, reason)
            hold(None, partial(self._records.decision, self._state, reason))
        for action in actions:
            once = action if isinstance(action, job.Send) and self._saver.away else None
            hold(once, partial(self._act, action, self._state))

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
                if not action.change.starts_job:
                    self._meter.recovered(action, self._records.recovered(action))
                self._records.progress(state)
            case job.CommitCheckpoint(step):
                self._commits.begin(step, self._state.spec)
            case job.Finish():
                self._finish(action)

    def _send(self, node: str, message: Any, epoch: int) -> None:
        session = self._sessions.get(node)
        if session is not None:
            session.send(message, epoch)
        if isinstance(message, m.Fenced) and session is not None:
            del self._sessions[node]

    def _committed(self, future: Commit) -> None:
        """Wait for a commit and tell, once, that it was made."""
        event = self._commits.take(future)
        if event is not None:
            self._apply(event)

    def _finish(self, action: job.Finish) -> None:
        for future in self._commits.left():
            self._committed(future)
        self._decide()
        self._code = action.code
        self._records.end(action.code, action.reason, action.params_sha256)
        with contextlib.suppress(StoreUnavailable, StoreError):
            self._part.end(self._lease.token)
        for node in [node for node in self._sessions if node not in self._state.members]:
            stop = m.Stop(action.code, action.reason)  # released, and waiting to come back
            self._send(node, stop, self._state.epoch)
        self._ending = self._clock.now() + LINGER_S

    # ---- requests of the command line ----

    def _call(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """Called from a server thread; answered by the coordinator's own."""
        query = Query(kind, body, Future())
        self._inbox.put(query)
        return query.answer.result(timeout=ANSWER_S)

    def _answer(self, query: Query) -> None:
        try:
            answer, event = reply(self._state, query.kind, query.body)
            if query.kind == "status":
                answer |= lately(self._meter, self._lease.token)
            if event is not None:
                self._apply(event)
                self._decide()
                answer["phase"] = self._state.phase.value
            if self._saver.away:
                answer["store"] = "out of reach: decisions wait"
            query.answer.set_result(answer)
        except Exception as error:  # whatever is asked must not end the process
            query.fail(error)
            if isinstance(error, StaleError):
                raise


def lead(config: JobConfig, address: str, slot: int, metrics_port: int) -> int:
    """Stand by and lead, in turn, until the job is over; return its exit code."""
    # One that is alone takes its own lease again at once. Among several a new process is a new candidate: else one
    # that dies whenever it leads would keep the others from trying.
    alone = not config.store.shared or (config.standalone and config.coordinators == 1)
    holder = config.job_id if alone else f"{config.job_id}/{slot}.{os.getpid()}"
    run_dir, clock, store = Path(config.run_dir), Clock(), open_store(config)
    part, exposed = Part(store, run_dir), Exposed(config, name_of(slot), metrics_port, clock.now)
    try:
        if config.max_nodes > FEW:  # the planner needs it after the first change; it is slow to import
            threading.Thread(target=importlib.import_module, args=("scipy.optimize",), daemon=True).start()
        note_pid(run_dir, slot)
        while True:
            lease = stand_by(
                store, part, holder, SHARED_LEASE_S if config.store.shared else LEASE_S, clock.now
            )
            verdict = read_told(run_dir / "exit.json")
            if config.store.shared and verdict:  # another one of this machine has told everything
                return int(verdict.get("code", EXIT_FAILURE))
            try:
                return Coordinator(config, address, store, lease, part, exposed).run()
            except StaleError as error:
                log.error("another coordinator took over: %s", error)
                if not config.store.shared:
                    return EXIT_FAILURE
            except StoreUnavailable as error:
                log.warning("the store went away while the job was taken over: %s", error)
    finally:
        exposed.close()
        store.close()


def main(argv: list[str] | None = None) -> int:
    args = read_flags(Command("elastic.coordinator.service", params=FLAGS), argv)
    config = load_config(args.run_dir)
    sys.setswitchinterval(SWITCH_S)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one descriptor per agent
    configure_logging("coordinator", Path(config.run_dir) / "logs" / f"{name_of(args.slot)}.log")
    if args.parent_pipe >= 0:
        lifeline.watch(args.parent_pipe)
    try:
        tls.use(tls.load(config.run_dir, config.certs, config.certs_name))
        return lead(config, args.address, args.slot, args.metrics_port)
    except ElasticError as error:
        print(f"elastic coordinator: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
