"""The coordinator process. The rules are in `elastic.core.coordinator.transitions`.

Of several coordinators one leads; the others stand by (`elastic.coordinator.leadership`). One
thread takes events from a queue (messages of agents, ticks, requests of the command line), applies
the rules, saves the new state, and then acts. A decision is saved before it is sent or written,
under the fencing token of the lease: a former coordinator can save nothing, and agents ignore its
older term. `elastic.coordinator.records.state_saver` describes the case that the store is away.

Waiting events are recorded one by one, with their times of arrival. Then the rules are applied, the
state is saved and the actions are carried out once for all these events, because in a job of
thousands of nodes a new epoch causes thousands of reports. Heartbeats wait for the next tick.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from elastic import lifeline
from elastic.background import BackgroundReading
from elastic.command_line import Command, flag, read_flags
from elastic.config import STDOUT, JobConfig, load_config
from elastic.console import Console
from elastic.coordinator.certificate_watch import CertificateWatch
from elastic.coordinator.event_queue import SWITCH_S, EventQueue, WallClock
from elastic.coordinator.leadership import (
    LEASE_S,
    SHARED_LEASE_S,
    STATE_KEY,
    LeadGivenUp,
    LeaseKeeper,
    RunMembership,
    pause_after_giving_up,
    stand_by,
)
from elastic.coordinator.metrics import CoordinatorMetrics, CoordinatorStatus
from elastic.coordinator.port_watch import PortWatch
from elastic.coordinator.queries import Query, recent, reply
from elastic.coordinator.records import run_directory
from elastic.coordinator.records.checkpoint_commit import CheckpointCommits, Commit
from elastic.coordinator.records.run_records import RunRecords, write_waiting
from elastic.coordinator.records.run_summary import job_entry, plan_entry
from elastic.coordinator.records.saved_state import read_state
from elastic.coordinator.records.state_saver import StateSaver
from elastic.coordinator.records.utilisation import peak_of
from elastic.coordinator.session_filter import SessionFilter
from elastic.coordinator.waiting import (
    STORE_FULL,
    Stall,
    StallWatch,
    Waiting,
    standby_wait,
    store_wait,
    waiting,
)
from elastic.core.coordinator.transitions import apply_rules, record_event
from elastic.core.job import checkpoints
from elastic.core.job import state as job
from elastic.core.job.membership import end_job, is_for_former_member
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import HealthReport
from elastic.domain import codec
from elastic.domain.errors import (
    EXIT_FAILURE,
    ElasticError,
    IncompatibleVersion,
    StaleError,
    describe,
)
from elastic.domain.types import NodeInfo
from elastic.logs import LogSource, configure_logging, source_of
from elastic.metrics import serve
from elastic.open_files import raise_limit
from elastic.planning.placement.assignment import FEW
from elastic.rpc.control.event_loop import Dispatcher
from elastic.rpc.control.server import ClientSession, Server, Superseded
from elastic.rpc.security import tls
from elastic.rpc.security.rejections import REJECTIONS, RejectionNotice
from elastic.store.interface import Lease, Store, StoreError, StoreUnavailable
from elastic.store.open_store import open_store
from elastic.telemetry import event_line, write_last_words

log = logging.getLogger("elastic.coordinator")
TICK_S, MAX_TICK_S = 0.05, 0.25
"""Least and longest interval between two ticks. The interval is ten times the duration of the
rules, within these limits."""
ANSWER_S = 10.0
"""Limit on the time to answer a request of the command line; the command itself waits less."""
NEEDS_NO_SAVE = (job.Heartbeats, job.Tick, job.CertificatesRead, HealthReport, type(None))
"""Events that need a save only if actions follow; type(None) stands for the rules."""
BAD_NEWS = ("lost", "paused", "doubt")
"""Kinds of entries whose decision is logged as a warning."""
COLLECTIONS = 20_000, 20, 50
"""Thresholds of the garbage collector. States are large and have no reference cycles; with Python's
defaults the collector looked at them so often that it took a seventh of the time."""
MAX_BATCH = 512
"""Maximum number of events that are taken from the queue at once."""
RECORD_FIRST_S = 1.0
"""Longest time for which the records of the end are waited for before nodes are told about it."""
LINGER_S = 5.0
"""Longest wait for agents to disconnect, or to reconnect first, after the end of the job."""
RECORDS_S = 600.0
"""Longest further wait for a disk that hangs and must take the records of the end."""
WAITING_S = 0.5
"""Least interval between two looks at what the job waits for."""
SEEK_S = 1.0
"""Least interval between two searches on the disk for checkpoints that a leaving node waits for."""
OUTPUT_S = 10.0
"""Longest wait for a slow disk that takes the error of this process, which the launcher keeps in
coordinator.out."""
FLAGS = [
    flag("--run-dir", required=True),
    flag("--address", default="127.0.0.1:0"),
    flag("--slot", default=0),
    flag("--metrics-port", default=-1),
    flag("--parent-pipe", default=-1),
]


@dataclass(frozen=True)
class StreamOpened:
    """An agent has connected."""

    session: ClientSession


class Coordinator:
    """Decides about the job for one term. All state changes are made by the thread in `run`."""

    def __init__(
        self,
        config: JobConfig,
        address: str,
        store: Store,
        lease: Lease,
        run: RunMembership,
        metrics: CoordinatorMetrics,
        recorded_end: dict[str, Any] | None = None,
        name: str = "coordinator",
    ) -> None:
        """`recorded_end`: content of exit.json, if a former coordinator has written it. `name`: of
        this coordinator, for people."""
        self._name = name
        self._config, self._clock, self._run_dir = config, WallClock(), Path(config.run_dir)
        self._store, self._lease, self._run = store, lease, run
        self._now, self._rules_s = self._clock.now(), 0.0
        self._recorded_end = recorded_end or {}
        self._told_by = 0.0
        """Latest time at which nodes are told the end of the job; 0: it goes on."""
        self._ending = 0.0
        """Latest time at which this process ends; 0: nodes are not told the end yet."""
        self._events = EventQueue(self._clock.now, self._tick_interval_s)
        self._opened = itertools.count(1)
        self._streams: dict[ClientSession, int] = {}
        """Open connections, numbered in the order of their opening; also of nodes that have not
        sent anything on them yet."""
        self._sessions: dict[str, ClientSession] = {}
        self._unaware: set[str] = set()
        """Members that could not be told the end of the job; they may still reconnect."""
        self._rules_due = self._to_save = self._adopted = self._yields = False
        self._warned = False
        self._await_at = self._seek_at = 0.0
        """Time of the next look at what the job waits for."""
        self._awaited: tuple[str, bool] | None = None
        """What this coordinator has written to waiting.json."""
        self._stalls = StallWatch()
        self._stall: Stall | None = None
        """The present stall, for the metrics."""
        self._resumed: tuple[job.LogEntry, ...] = ()
        """Events about the checkpoints that a new run found."""
        self._former_log: tuple[str, ...] = ()
        """Events that the former coordinator may not have written."""
        self._filter = SessionFilter(self._dismiss)
        self._heartbeats = dict[str, m.Heartbeat]()  # not recorded yet, by node
        # The first state takes long if there are many checkpoints, or if their disk is slow.
        ready_s = config.timeouts.preflight_disk_s
        put = self._events.put
        self._keeper = LeaseKeeper(store, lease, self._clock.now, put, ready_s)
        try:
            self._load()
        except BaseException:
            self._keeper.close()
            raise
        self._keeper.ready.set()
        self._commits = CheckpointCommits(
            config.checkpoint_dir, put, put, self._state.run, config.checkpoint_keep
        )
        self._records = RunRecords(
            self._run_dir,
            injected=bool(config.faults),
            former=self._former_log,
            over=self._adopted and self._state.ending is not None,
        )
        self._metrics = metrics
        self._saver.report, self._saver.measured = self._log_event, self._metrics.saved
        self._ports = PortWatch(put, self._is_away)
        self._certificates = CertificateWatch(tls.current().certificates, config.store, put)
        REJECTIONS.subscribe(put)
        self._server = Server(
            address,
            on_open=lambda session: self._events.put(StreamOpened(session)),
            on_message=self._events.receive,
            on_close=self._events.receive,
            on_call=self._call,
            term=lambda: self._lease.token,
            keepalive_s=config.timeouts.keepalive_s,
            nodes=config.max_nodes,
        )
        metrics.lead(self._status)

    def _tick_interval_s(self) -> float:
        return max(TICK_S, min(MAX_TICK_S, 10 * self._rules_s))

    def _status(self) -> CoordinatorStatus:
        return CoordinatorStatus(
            state=self._state,
            leads=self._keeper.certain,
            term=self._lease.token,
            queued=len(self._events),
            state_bytes=self._saver.nbytes,
            stall=self._stall,
            store_away_s=max(self._saver.away_s, self._keeper.away_s),
            records_unwritten=self._records.unwritten,
            records_late_s=self._records.late_s,
            records_dropped=self._records.dropped,
        )

    def _load(self) -> None:
        """Take over the state in the store, or begin a new run. Raises StoreUnavailable, StaleError
        or IncompatibleVersion."""
        entry = self._store.get(STATE_KEY)
        if entry is not None and self._run.adopt():
            saved = read_state(entry.value)
            self._state, self._former_log = saved.of(log=()), saved.log
            self._adopted = True
            if self._recorded_end and self._state.ending is None:  # the store has lost the end
                code = int(self._recorded_end.get("code", EXIT_FAILURE))
                phase = job.JobPhase.FAILED if code else job.JobPhase.FINISHED
                reason = str(self._recorded_end.get("reason", ""))
                self._state, _ = end_job(self._state, phase, code, reason)
        else:
            run = f"{self._config.job_id}.{self._lease.token}"
            self._state, self._resumed = run_directory.initial_state(self._config, run)
            value, before = codec.dumps(self._state).encode(), entry.revision if entry else None
            entry = self._store.put_if(STATE_KEY, value, before, self._lease.token)
            self._run.begin(run, self._lease.token)
        if not self._state.launched_at:
            # From here on a coordinator that takes over has the same run, so that a late removal
            # does not concern the files of its agents.
            run_directory.discard_former(self._config.checkpoint_dir, self._state.run)
        self._saver = StateSaver(self._store, self._lease, STATE_KEY, entry)

    def run(self) -> int:
        """Serve until the job is over; return its exit code. Raises StaleError if another
        coordinator leads, LeadGivenUp if this one hears no node."""
        try:
            self._events.start()
            self._announce()
            return self._serve()
        finally:
            self._metrics.stand_by()
            self._events.close()
            self._keeper.close()
            self._ports.close()
            self._certificates.close()
            REJECTIONS.unsubscribe(self._events.put)
            self._server.close()
            self._records.close()
            self._commits.close()

    def _serve(self) -> int:
        if self._adopted:
            self._now = self._clock.now()  # the agents' time to reconnect begins now
            self._apply(job.CoordinatorFailover())
            for member in self._state.members.values():
                self._watch_port(member)
        while True:
            self._turn()
            if self._yields and self._state.doubt_reported:
                self._keeper.close()
                with contextlib.suppress(StoreUnavailable, StoreError):
                    self._store.release(self._lease)
                raise LeadGivenUp
            self._yields = False
            if self._told_by and not self._ending:
                self._tell_everybody()
            if self._ending and self._may_leave():
                with contextlib.suppress(StoreUnavailable, StoreError):
                    self._store.release(self._lease)
                return self._code

    def _may_leave(self) -> bool:
        """Return whether the nodes know that the job is over, and its records are written. Both are
        waited for, up to a limit."""
        now, waits = self._clock.now(), self._streams or self._unaware
        if waits and now <= self._ending:
            return False
        if self._records.ended.is_set() or now > self._ending + RECORDS_S:
            return True
        if not self._warned:
            self._warned = True
            text = "the end waits for the disk of %s, which does not answer, for up to %g s"
            log.error(text, self._run_dir, RECORDS_S)
        return False

    def _turn(self) -> None:
        """Wait for events, record them, decide and act."""
        for came_at, item in self._events.take(MAX_BATCH):
            self._now = max(self._now, came_at)
            self._handle(item)
        self._decide()
        if self._saver.due():
            self._saver.retry()
        if self._now >= self._await_at:
            self._await_at = self._now + WAITING_S
            self._note_waiting()
        if self._adopted and self._now >= self._seek_at:
            self._seek_at = self._now + SEEK_S
            self._seek_checkpoints()

    def _seek_checkpoints(self) -> None:
        """Search the disk for checkpoints from before this epoch, if a leaving node waits for them.

        They may be complete: a store that was restored from a snapshot has forgotten that, and
        nobody reports their parts again.
        """
        state = self._state
        leaving = any(member.draining for member in state.members.values())
        if not leaving or state.ending is not None or state.assignment is None:
            return
        for step, slots in state.checkpoint_parts:
            if step <= state.assignment.step and not checkpoints.is_complete(state, slots):
                counts = partial(checkpoints.file_counts, state, step)
                self._commits.find(step, state.spec, counts, checkpoints.newest_step(state))

    def _waiting(self) -> Waiting | None:
        """Return what the job waits for; None: it trains, or it is over."""
        if not self._saver.away:
            return waiting(self._state)
        store = self._config.store.url or f"{self._run_dir}/coordinator.db"
        since = self._clock.now() - self._saver.away_s
        return store_wait(store, self._saver.full, since)

    def _note_waiting(self) -> None:
        """Record what the job waits for, if that has changed."""
        found = self._waiting()
        store = found if self._saver.away else None
        self._stall = self._stalls.look(self._state, self._clock.now(), store)
        told = (found.what, found.lasting) if found is not None else ("", False)
        if told != self._awaited:
            self._awaited = told
            self._records.waiting(found)

    def _announce(self) -> None:
        text = {"address": self._server.address, "pid": os.getpid(), "term": self._lease.token}
        self._records.announce(text)
        self._log_event("coordinator", text)
        for entry in self._resumed:
            self._log_event(entry.kind, entry.data)
        if self._config.certs and self._config.nproc_per_node * self._config.max_nodes > 1:
            self._log_event("unencrypted", {"what": "workers", "why": tls.WORKERS})
            log.warning("%s", tls.WORKERS)

    def _log_event(self, kind: str, data: dict[str, Any]) -> None:
        self._records.event(kind, data)
        self._metrics.logged(kind)

    # ---- events in ----

    def _handle(self, item: Any) -> None:
        if isinstance(item, ElasticError):
            raise item
        if isinstance(item, Query):
            self._answer(item)
        elif isinstance(item, Future):
            self._committed(item)
        elif isinstance(item, job.LogEntry):
            self._log_event(item.kind, item.data)
        elif isinstance(item, RejectionNotice):
            self._rejected(m.RefusalNote("coordinator", *astuple(item)))
        elif isinstance(item, StreamOpened):
            self._connected(item.session)
        elif isinstance(item, tuple):
            self._handle_message(*item)
        elif isinstance(item, job.Tick):
            limits = self._state.limits
            warn_s, limit_s = limits.disk_s, limits.return_s
            for failed in self._commits.check(self._now, item.late_s, warn_s, limit_s):
                self._apply(failed)
            self._apply(replace(item, held=self._saver.away))
        else:
            self._apply(item)

    def _handle_message(self, session: ClientSession, message: Any) -> None:
        """Handle a message of an agent; None: the session has ended."""
        if message is None:
            self._disconnected(session)
            return
        if not self._filter.admit(self._state, session, message):
            return
        match message:
            case m.NodeReport():
                info = message.info
                self._use_newest(info, session)
                self._apply(message)
                self._ports.check(info.node, info.incarnation, info.vault)
            case m.Heartbeat():
                self._sessions.setdefault(message.node, session)
                if message.node in self._heartbeats:
                    self._apply_heartbeats()
                self._heartbeats[message.node] = message
            case m.StepDone():
                record = partial(self._records.step, message, self._state, time.time())
                self._saver.hold(None, record)
                self._saver.hold(None, partial(self._metrics.stepped, message, self._state))
                if session.sender in self._state.members:  # a former member's step is only logged
                    self._apply(message)
            case m.Notice():
                self._sessions.setdefault(message.node, session)
                self._apply(message)
            case m.RefusalNote():
                self._rejected(message)
            case _:
                self._apply(message)

    def _use_newest(self, info: NodeInfo, session: ClientSession) -> None:
        """Send orders for a node on `session`, unless its agent has a newer stream: an old stream's
        last message may be read after the first ones of the new stream."""
        present, member = self._sessions.get(info.node, session), self._state.members.get(info.node)
        same = member is not None and member.report.info.incarnation == info.incarnation
        if not same or self._streams.get(session, 0) >= self._streams.get(present, 0):
            self._sessions[info.node] = session

    def _dismiss(self, session: ClientSession, answer: Any, epoch: int) -> None:
        """Send an answer of the session filter once the state is saved. A node that repeats its
        message meanwhile gets one answer."""
        self._saver.hold((session, type(answer)), partial(session.send, answer, epoch))

    def _rejected(self, note: m.RefusalNote) -> None:
        """Hold a record of a rejection, which is written after the next decision."""
        self._saver.hold(None, partial(self._records.event, "refused", asdict(note)))

    def _connected(self, session: ClientSession) -> None:
        self._streams[session] = next(self._opened)
        if self._ending:
            self._tell_the_end(session)

    def _tell_the_end(self, session: ClientSession) -> None:
        if self._state.ending is not None:
            code, reason = self._state.ending.code, self._state.ending.reason
            session.send(m.Stop(code, reason), self._state.epoch)

    def _disconnected(self, session: ClientSession) -> None:
        self._streams.pop(session, None)
        for node in [n for n, s in self._sessions.items() if s is session]:
            del self._sessions[node]
            member = self._state.members.get(node)
            if member is not None:
                self._apply(job.ConnectionClosed(node, member.report.info.incarnation))
                self._watch_port(member)

    def _watch_port(self, member: job.Member) -> None:
        info = member.report.info
        self._ports.watch(info.node, info.incarnation, info.vault)

    def _is_away(self, node: str, incarnation: str) -> bool:
        """Return whether this member is disconnected. Called on the network thread."""
        member = self._state.members.get(node)
        same = member is not None and member.report.info.incarnation == incarnation
        return member is not None and same and not member.connected

    def _apply_heartbeats(self) -> None:
        """Apply all heartbeats that have arrived."""
        if self._heartbeats:
            heartbeats, self._heartbeats = tuple(self._heartbeats.values()), {}
            self._apply(job.Heartbeats(heartbeats))
            if self._keeper.certain:
                newest = max((beat.step, beat.microbatch) for beat in heartbeats)
                self._records.heartbeat(newest, self._state)

    def _apply(self, event: Any) -> None:
        """Record an event in the state. Call `_decide` afterwards."""
        # A report of another node does not depend on the heartbeats before it. They are recorded
        # together, because thousands of reports may follow each other.
        reports = isinstance(event, m.NodeReport)
        if not reports or event.info.node in self._heartbeats:
            self._apply_heartbeats()
        self._follow(event, partial(record_event, event=event))
        self._rules_due = self._rules_due or not isinstance(event, job.Heartbeats)

    def _decide(self) -> None:
        """Apply the rules to all recorded events; save the state and act."""
        self._apply_heartbeats()
        while self._rules_due or self._to_save:
            if self._rules_due:
                self._rules_due = False
                self._rules_s = self._follow(None, apply_rules)
            if self._to_save:
                self._to_save = False
                self._saver.save(self._state)
        self._saver.flush()

    def _follow(self, event: Any, decide: Callable[..., job.JobTransition]) -> float:
        """Make a transition; return its duration in seconds. `event` is None for the rules. Its
        actions and records are held back until the state is saved."""
        before, now, began = self._state, self._now, time.perf_counter()
        self._state, actions, reason = decide(before, now=now)
        seconds = time.perf_counter() - began
        self._metrics.handled(event, seconds)
        hold = self._saver.hold
        new_phase = self._state.phase is not before.phase
        if isinstance(event, m.NodeReport) and not actions:
            self._saver.save_later(self._state)
        elif actions or not isinstance(event, NEEDS_NO_SAVE):
            self._to_save = True
        if actions or new_phase or not self._saver.away:  # else ticks would pile up here
            hold(None, partial(self._metrics.decided, before, self._state, actions, now))
        if before.spec is None and self._state.spec is not None:
            self._record("job", job_entry(self._state.spec))
        if reason and (actions or new_phase):
            worse = any(isinstance(a, job.LogEntry) and a.kind in BAD_NEWS for a in actions)
            level = logging.WARNING if worse else logging.INFO
            log.log(level, "%s: %s", "rules" if event is None else type(event).__name__, reason)
            phase, epoch = self._state.phase.value, self._state.epoch
            self._record("decision", {"phase": phase, "epoch": epoch, "reason": reason})
        for action in actions:
            self._record_action(action)
            key = action if isinstance(action, job.Send) and self._saver.away else None
            hold(key, partial(self._act, action, self._state))
        return seconds

    def _record(self, kind: str, data: dict[str, Any]) -> None:
        """Hold an event that follows from a decision. It is saved with the decision."""
        self._saver.record(event_line(kind, data), self._records.line)

    def _record_action(self, action: job.JobAction) -> None:
        match action:
            case job.LogEntry("plan", data):
                if self._state.plan is not None:
                    peak = peak_of(self._state.plan, self._state.members)
                    entry = plan_entry(self._state.plan, data, self._config.pipelines, peak)
                    self._record("plan", entry)
            case job.LogEntry(kind, data):
                self._record(kind, data)
            case job.ChangeCompleted() if not action.change.starts_job:
                entry = self._records.recovery(action)
                self._record("recovery", entry)
                self._saver.hold(None, partial(self._metrics.recovered, action, entry))

    # ---- actions out ----

    def _act(self, action: job.JobAction, state: job.JobState) -> None:
        """Carry out an action. `state`: the state after the transition that returned it."""
        match action:
            case job.Send(node, message) if not is_for_former_member(node, state, self._state):
                self._send(node, message, state.epoch)
            case job.LogEntry("phase") | job.ChangeCompleted():
                self._records.progress(state)
            case job.CommitCheckpoint(step):
                counts = partial(checkpoints.file_counts, self._state, step)
                self._commits.begin(step, self._state.spec, self._state.limits.disk_s, counts)
            case job.DropCheckpoint():
                self._commits.drop(action, self._state.limits.disk_s)
            case job.JobFinished():
                self._finish(action)
            case job.YieldLead():
                self._yields = True

    def _send(self, node: str, message: Any, epoch: int) -> None:
        session = self._sessions.get(node)
        if isinstance(message, m.Stop) and self._state.ending is not None and not self._ending:
            return  # `_tell_everybody` follows
        if session is not None:
            session.send(message, epoch)
            if isinstance(message, m.Stop):
                self._unaware.discard(node)
        if isinstance(message, m.Fenced) and session is not None:
            del self._sessions[node]

    def _committed(self, future: Commit) -> None:
        """Wait for a commit, for a limited time, and apply it once."""
        event = self._commits.take(future, self._state.limits.bulk_s)
        if event is not None:
            self._apply(event)

    def _finish(self, action: job.JobFinished) -> None:
        for future in self._commits.pending():
            self._committed(future)
        due = () if action.code else checkpoints.due_steps(self._state)
        # A job that resumed its last step has the checkpoint of another run.
        settled, bulk_s = partial(checkpoints.is_decided, self._state), self._state.limits.bulk_s
        again = checkpoints.rewritten_steps(self._state)
        left_over = self._commits.left_over(
            due,
            settled,
            bulk_s,
            spec=self._state.spec,
            counts=partial(checkpoints.file_counts, self._state),
            recorded=lambda: self._records.checkpoints() - again,
        )
        for event in left_over:
            self._apply(event)
        self._decide()
        if left_over:
            self._commits.flush(bulk_s)
        self._code = action.code
        if self._recorded_end:
            self._records.ended.set()
        else:
            self._records.end(action.code, action.reason, action.params_sha256)
        self._told_by = self._clock.now() + RECORD_FIRST_S

    def _tell_everybody(self) -> None:
        """Tell all nodes that the job is over, after its records are written: a node that was told
        ends. If this coordinator dies meanwhile, and the store has lost its last writes, the next
        one learns the end from the records. A disk that hangs is not waited for."""
        if not self._records.ended.is_set() and self._clock.now() <= self._told_by:
            return
        # Also nodes that were released, or dropped and have not joined again yet. Some of them have
        # not sent anything on their new connection.
        for session in self._streams | dict.fromkeys(self._sessions.values()):
            self._tell_the_end(session)
        self._unaware = self._state.members.keys() - self._sessions.keys()
        self._ending = self._clock.now() + LINGER_S
        with contextlib.suppress(StoreUnavailable, StoreError):
            self._run.end(self._lease.token)

    # ---- requests of the command line ----

    def _call(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """Let the coordinator's thread answer a request. Called on a thread of the server."""
        query = Query(kind, body, Future())
        self._events.put(query)
        return query.answer.result(timeout=ANSWER_S)

    def _answer(self, query: Query) -> None:
        try:
            if self._config.standbys and not self._keeper.certain and not self._sessions:
                raise Superseded("it cannot renew its lease in the store, and no node is connected")
            answer, event = reply(self._state, query.kind, query.body)
            if query.kind == "status":
                found = self._waiting()
                answer["waiting"] = found.answer(self._clock.now()) if found is not None else {}
                answer["coordinator"] = {"name": self._name, "address": self._server.address}
                answer |= recent(self._metrics, self._state, self._lease.token)
            if event is not None:
                self._apply(event)
                self._decide()
                answer["phase"] = self._state.phase.value
            if self._saver.full or self._keeper.full:
                answer["store"] = STORE_FULL
            elif self._saver.away:
                answer["store"] = "out of reach: decisions wait"
            query.answer.set_result(answer)
        except Exception as error:  # no request may end the process
            query.fail(error)
            if isinstance(error, StaleError):
                raise


def lead(
    config: JobConfig,
    address: str,
    slot: int,
    metrics_port: int,
    source: LogSource | None = None,
) -> int:
    """Stand by and lead, in turn, until the job is over; return its exit code. `source`: of the
    JSON lines of this process, which get the epoch of the job."""
    # A single coordinator always has the same name, so it can take its own lease again at once. If
    # there are several, every process has another name: a restarted process cannot take its own
    # lease again, so one that fails whenever it leads does not keep the others from leading.
    holder = f"{config.job_id}/{slot}.{os.getpid()}" if config.standbys else config.job_id
    run_dir, clock, store = Path(config.run_dir), WallClock(), open_store(config)
    run, name = RunMembership(store, run_dir), run_directory.coordinator_name(slot)
    metrics = CoordinatorMetrics(config.job_id, clock.now, config.store)
    if source is not None:
        source.epoch = lambda: metrics.epoch
    read_end = partial(run_directory.read_json, run_dir / "exit.json")
    ended: BackgroundReading[dict[str, Any]] = BackgroundReading("end of the job", read_end, {})
    served = serve(metrics.registry, config, name, "coordinator", metrics_port)
    ttl_s = SHARED_LEASE_S if config.store.shared else LEASE_S
    given_up, disk = 0, Dispatcher("standby")
    note = partial(write_waiting, run_dir / f"standby-{slot}.json")

    def standing_by(error: ElasticError) -> None:
        metrics.standing_by(error)
        disk.post(partial(note, standby_wait(error, clock.now())))

    try:
        if config.max_nodes > FEW:  # the planner needs scipy later, which is slow to import
            threading.Thread(
                target=importlib.import_module, args=("scipy.optimize",), daemon=True
            ).start()
        run_directory.write_pid(run_dir, slot)
        while True:
            lease = stand_by(store, run, holder, ttl_s, clock.now, standing_by)
            disk.post(partial(note, None))
            result, began = ended.read(), time.monotonic()
            try:
                if result and run.is_over():  # another coordinator has ended the job
                    return int(result.get("code", EXIT_FAILURE))
                label = config.coordinator_name or name
                return Coordinator(config, address, store, lease, run, metrics, result, label).run()
            except LeadGivenUp:
                given_up, pause_s = pause_after_giving_up(given_up, time.monotonic() - began)
                log.warning("the lead is given up: too few nodes are heard; waiting %g s", pause_s)
                time.sleep(pause_s)
            except StaleError as error:
                log.error("another coordinator took over: %s", error)
                if not config.store.shared:
                    return EXIT_FAILURE
            except StoreUnavailable as error:
                log.warning("the store went away during the takeover: %s", error)
            except IncompatibleVersion:
                with contextlib.suppress(StoreUnavailable, StoreError):
                    store.release(lease)  # for a coordinator that can read the state
                raise
    finally:
        if served is not None:
            served.close()
        disk.end()
        store.close()


def main(argv: list[str] | None = None) -> int:
    args = read_flags(Command("elastic.coordinator.service", params=FLAGS), argv)
    config = load_config(args.run_dir)
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()  # modules and settings stay until the end
    gc.set_threshold(*COLLECTIONS)
    name = run_directory.coordinator_name(args.slot)
    source = source_of(config, config.coordinator_name or name)
    console = Console(program="elastic coordinator", source=source)
    path = Path(config.run_dir) / "logs" / f"{name}.log"
    logs = configure_logging(path, source, partial(console.put, STDOUT))
    raise_limit(config.max_nodes)
    write_last_words(config.run_dir, name, "")
    if args.parent_pipe >= 0:
        lifeline.watch(args.parent_pipe)
    try:
        tls.use(tls.load(config.run_dir, config.certs, config.certs_name))
        code = lead(config, args.address, args.slot, args.metrics_port, source)
    except ElasticError as error:
        write_last_words(config.run_dir, name, str(error))
        console.say(str(error))
        code = error.exit_code
    except Exception as error:
        log.exception("the coordinator ends")
        write_last_words(config.run_dir, name, describe(error))
        console.say(traceback.format_exc().rstrip())
        code = EXIT_FAILURE
    logs.end_json()
    console.finish(OUTPUT_S)
    return code


if __name__ == "__main__":
    sys.exit(main())
