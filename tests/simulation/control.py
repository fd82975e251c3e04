"""The control streams between agents and coordinators, over simulated connections.

They stand in for gRPC and for `elastic.rpc.control.{client,server}`, whose rules they follow: the
session of the highest term is followed, a coordinator of an older term ends the session, pings
that get no answer close a connection, and nothing is queued while there is no session. Messages
pass through the real codec. Callbacks of the server run on the thread `rpc-loop` of its process,
those of a session on a dispatcher of its own, as in the product.
"""

from __future__ import annotations

import heapq
import itertools
import queue
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from elastic.core.job.state import PortRefused
from elastic.core.protocol import messages as m
from elastic.core.protocol.election import accepts_term
from elastic.domain.errors import (
    EXIT_DRAINED,
    ElasticError,
    FieldError,
    StaleError,
    UsageError,
)
from elastic.rpc.control.broadcast import BroadcastEncoder
from elastic.rpc.control.channel_options import (
    CONNECT_TIMEOUT_S,
    addresses_of,
)
from elastic.rpc.control.client import Unreachable
from elastic.rpc.control.envelope import Envelope, from_wire, pack, to_wire, unpack
from elastic.rpc.control.event_loop import Dispatcher, run_callback
from elastic.rpc.control.reconnect_pauses import ReconnectPauses
from elastic.rpc.control.round_trips import PING_S, SAMPLES, RoundTrips
from tests.simulation.losses import LossWatch
from tests.simulation.network import Endpoint, Listener, connect
from tests.simulation.primitives import Executor, SimFuture, SimpleQueue, SimThread, process_of
from tests.simulation.scheduler import Process, Scheduler

Address = tuple[str, int]
KNOWN_S = 0.5
"""A coordinator that ends may not know of a stream that was opened less than this before."""


def split(address: str) -> Address:
    host, _, port = address.rpartition(":")
    return host, int(port)


class Loop:
    """The event loop thread of one process: callbacks in order, now or after a delay."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue = SimpleQueue(scheduler)
        self._later: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        SimThread(scheduler, self._run, "rpc-loop").start()

    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> None:
        self._queue.put(partial(function, *args))

    def wake_with(self, function: Callable[[], object]) -> None:
        """Queue a call from outside of all threads."""
        self._queue.items.append(function)
        if self._queue.waiters:
            self._scheduler.wake(self._queue.waiters.popleft())

    def call_later(self, delay_s: float, function: Callable[..., object], *args: Any) -> None:
        entry = (self._scheduler.now + delay_s, next(self._order), partial(function, *args))
        heapq.heappush(self._later, entry)
        self._queue.put(lambda: None)

    def _run(self) -> None:
        while True:
            left = self._later[0][0] - self._scheduler.now if self._later else None
            try:
                action = self._queue.get(timeout=None if left is None else max(left, 0.0))
                run_callback(action)
            except queue.Empty:
                pass
            while self._later and self._later[0][0] <= self._scheduler.now:
                run_callback(heapq.heappop(self._later)[2])


def loop_of(scheduler: Scheduler) -> Loop:
    """Return the event loop of the running process."""
    local = process_of(scheduler).local
    if "loop" not in local:
        local["loop"] = None  # the thread of the loop may ask for it
        local["loop"] = Loop(scheduler)
    found: Loop = local["loop"]
    return found


class _Wire:
    """One side of a connection whose messages are handled on an event loop."""

    def __init__(
        self,
        loop: Loop,
        end: Endpoint,
        keepalive_s: float,
        on_item: Callable[[Any], object],
        on_end: Callable[[str], object],
    ) -> None:
        self.loop, self.end, self.open = loop, end, True
        self._on_item, self._on_end, self._keepalive_s = on_item, on_end, keepalive_s
        self._heard = end.scheduler.now
        end.on_arrival = lambda: loop.wake_with(self._read)
        self._keep_alive()
        loop.wake_with(self._read)

    def put(self, item: Any, nbytes: int = 100) -> None:
        if self.open:
            self.end.transmit(item, nbytes)

    def close(self, reason: str) -> None:
        """End the connection; on the loop."""
        if self.open:
            self.open = False
            self.end.on_arrival = None
            self.end.close()
            self._on_end(reason)

    def _read(self) -> None:
        while self.open and self.end.inbox:
            self._heard = self.end.scheduler.now
            item = self.end.inbox.popleft()
            if item == ("alive?",):
                self.put(("alive",))
            elif item != ("alive",):
                self._on_item(item)
        if self.open and self.end.ended:
            self.close("the other side closed the connection")

    def _keep_alive(self) -> None:
        if not self.open:
            return
        if self.end.scheduler.now - self._heard > 2 * self._keepalive_s:
            self.close("keepalive timeout")
            return
        self.put(("alive?",))
        self.loop.call_later(self._keepalive_s / 2, self._keep_alive)


class SimServerSession:
    """Interface of `elastic.rpc.control.server.ClientSession`."""

    def __init__(self, server: SimServer, sender: str, peer: str) -> None:
        self._server, self.sender, self.peer = server, sender, peer
        self.wire: _Wire | None = None
        self.open = True
        self.opened_at, self.told = server.scheduler.now, False
        """When the stream was opened, and whether the end of the job was told on it."""
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        return f"Session({self.sender} at {self.peer})"

    def send(self, message: Any, epoch: int) -> bool:
        if not self.open:
            return False
        server = self._server
        if isinstance(message, m.Stop) and message.code != EXIT_DRAINED:
            self.told = server.ends_job = True
        envelope = server.encoder.pack(message, term=server.term(), epoch=epoch, node=self.sender)
        server.loop.call_soon_threadsafe(self._write, envelope)
        return True

    def _write(self, envelope: Envelope) -> None:
        if self.wire is not None:
            data = to_wire(replace(envelope, sequence=next(self._numbers)))
            self.wire.put(("message", data), len(data))


class SimServer:
    """Interface of `elastic.rpc.control.server.Server`."""

    def __init__(
        self,
        scheduler: Scheduler,
        losses: LossWatch,
        address: str,
        *,
        on_open: Callable[[Any], object],
        on_message: Callable[[Any, Any, Any], object],
        on_close: Callable[[Any], object],
        on_call: Callable[[str, dict[str, Any]], dict[str, Any]],
        term: Callable[[], int],
        keepalive_s: float = 5.0,
        **_: Any,
    ) -> None:
        self.scheduler, self.loop, self.term = scheduler, loop_of(scheduler), term
        self.encoder, self._losses = BroadcastEncoder(), losses
        self._on_open, self._on_message, self._on_close = on_open, on_message, on_close
        self._on_call, self._keepalive_s = on_call, keepalive_s
        self._pool = Executor(scheduler, 4, "rpc-call")
        process = self._process = process_of(scheduler)
        port = split(address)[1]
        if port in process.host.ports:
            raise FieldError("address", address, "a free port of this machine is needed")
        self.address = address
        self._wires: dict[_Wire, SimServerSession] = {}
        self.ends_job = False
        self._listener = Listener(process.host, process, port)
        self._listener.on_connect = lambda: self.loop.wake_with(self._accept)

    def close(self) -> None:
        self._listener.on_connect = None
        self._listener.close()
        done = SimFuture(self.scheduler)

        def end() -> None:
            for wire, session in list(self._wires.items()):
                known = session.told or session.opened_at > self.scheduler.now - KNOWN_S
                if self.ends_job and session.sender and session.open and not known:
                    self._process.local.setdefault("untold", []).append(session.sender)
                wire.close("the server ends")
            done.set_result(None)

        self.loop.call_soon_threadsafe(end)
        done.result()
        self._pool.shutdown()

    def _accept(self) -> None:
        while self._listener.backlog:
            end, where = self._listener.backlog.popleft()
            session = SimServerSession(self, "", f"{where[0]}:{where[1]}")
            item, ended = partial(self._item, session), partial(self._ended, session)
            session.wire = _Wire(self.loop, end, self._keepalive_s, item, ended)
            self._wires[session.wire] = session

    def _ended(self, session: SimServerSession, reason: str) -> None:
        if session.wire is not None:
            self._wires.pop(session.wire, None)
        if session.sender and session.open:
            session.open = False
            run_callback(partial(self._on_close, session))

    def _item(self, session: SimServerSession, item: Any) -> None:
        assert session.wire is not None
        match item:
            case ("open", sender):
                session.sender = sender
                session.wire.put(("opened", self.term()))
                run_callback(partial(self._on_open, session))
            case ("ping", number):
                session.wire.put(("pong", number))
            case ("call", kind, body):
                self._pool.submit(self._answer, session.wire, kind, body)
            case ("message", data):
                envelope = from_wire(data)
                if envelope.term > self.term():
                    session.wire.close(str(StaleError(f"{session} knows term {envelope.term}")))
                    return
                message = unpack(envelope)
                self._losses.heard(self._process.pid, message, self.scheduler.now)
                run_callback(partial(self._on_message, session, message, envelope))

    def _answer(self, wire: _Wire, kind: str, body: dict[str, Any]) -> None:
        try:
            reply: Any = ("answer", self._on_call(kind, body))
        except (ElasticError, TimeoutError) as error:
            reply = ("refused", str(error))
        self.loop.call_soon_threadsafe(wire.put, reply)


class SimCoordinatorSession:
    """Interface of `elastic.rpc.control.client.CoordinatorSession`."""

    def __init__(
        self,
        scheduler: Scheduler,
        address: str,
        *,
        on_message: Callable[[Any, Any], object],
        on_up: Callable[[], object],
        on_down: Callable[[str], object],
        sender: str,
        keepalive_s: float = 5.0,
        **_: Any,
    ) -> None:
        self._scheduler, self.address, self.sender, self.term = scheduler, address, sender, 0
        self._on_message, self._on_up, self._on_down = on_message, on_up, on_down
        self._keepalive_s, self._closed = keepalive_s, False
        self._process: Process = process_of(scheduler)
        self._active: _Wire | None = None
        self._active_term = 0
        self._wires: dict[_Wire, None] = {}
        self._numbers, self._pings = itertools.count(1), itertools.count(1)
        self._round_trips = RoundTrips()
        self._dispatcher = Dispatcher(f"rpc-{sender}")
        self._loop = loop_of(scheduler)
        for one in addresses_of(address):
            self._loop.call_soon_threadsafe(self._attempt, one, ReconnectPauses())

    @property
    def up(self) -> bool:
        return self._active is not None

    @property
    def problem(self) -> str:
        return "no connection"

    @property
    def rtt_s(self) -> float:
        return self._round_trips.least_s

    def send(self, message: Any, epoch: int) -> bool:
        active = self._active
        if active is None:
            return False
        envelope = pack(message, term=self.term, epoch=epoch, sender=self.sender)
        self._loop.call_soon_threadsafe(self._write, active, envelope)
        return True

    def _write(self, wire: _Wire, envelope: Envelope) -> None:
        data = to_wire(replace(envelope, sequence=next(self._numbers)))
        wire.put(("message", data), len(data))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._dispatcher.abandon()
        done = SimFuture(self._scheduler)

        def end() -> None:
            self._active = None
            for wire in list(self._wires):
                wire.close("closed")
            done.set_result(None)

        self._loop.call_soon_threadsafe(end)
        done.result()
        self._dispatcher.close()

    # ---- on the loop ----

    def _attempt(self, address: str, pauses: ReconnectPauses) -> None:
        if self._closed:
            return
        began, tried = self._scheduler.now, {"over": False}

        def again(followed: bool = False) -> None:
            if tried["over"]:
                return
            tried["over"] = True
            pause_s = pauses.after(self._scheduler.now - began, followed=followed)
            wait_s = self._scheduler.uniform(pause_s / 2, pause_s)
            self._loop.call_later(wait_s, self._attempt, address, pauses)

        def done(found: Any) -> None:
            self._loop.wake_with(lambda: self._connected(address, found, tried, again))

        connect(self._process.host, self._process, *split(address), done)
        self._loop.call_later(CONNECT_TIMEOUT_S, lambda: None if "wire" in tried else again())

    def _connected(
        self, address: str, found: Any, tried: dict[str, Any], again: Callable[[bool], None]
    ) -> None:
        if not isinstance(found, Endpoint):
            again(False)
            return
        if tried["over"] or self._closed:
            found.close()
            return
        tried["wire"] = True
        wire: Any = None

        def ended(reason: str) -> None:
            self._wires.pop(wire, None)
            followed = wire is self._active
            if followed:
                self._unfollow(reason)
            again(followed)

        wire = _Wire(
            self._loop, found, self._keepalive_s, lambda item: self._item(wire, item), ended
        )
        self._wires[wire] = None
        wire.put(("open", self.sender))

    def _item(self, wire: _Wire, item: Any) -> None:
        match item:
            case ("opened", term):
                if self._follow(wire, term):
                    self._dispatcher.post(self._on_up)
                    self._ping(wire)
                else:
                    wire.close("another coordinator is followed")
            case ("pong", (number, began)):
                self._round_trips.record(self._scheduler.now - began)
                if number < SAMPLES:
                    self._ping(wire)
                else:
                    self._loop.call_later(PING_S, self._ping, wire)
            case ("message", data) if wire is self._active:
                envelope = from_wire(data)
                if envelope.term >= self.term:
                    self.term = envelope.term
                    self._dispatcher.post(partial(self._on_message, unpack(envelope), envelope))

    def _ping(self, wire: _Wire) -> None:
        wire.put(("ping", (next(self._pings), self._scheduler.now)))

    def _follow(self, wire: _Wire, term: int) -> bool:
        active_term = self._active_term if self._active is not None else None
        if not accepts_term(term, self.term, active_term):
            return False
        if self._active is not None:
            former, self._active = self._active, None
            self._dispatcher.post(partial(self._on_down, f"term {term} took over"))
            former.close("a newer coordinator took over")
        self._active, self._active_term, self.term = wire, term, term
        return True

    def _unfollow(self, reason: str) -> None:
        self._active = None
        self._dispatcher.post(partial(self._on_down, reason))


def call(
    scheduler: Scheduler,
    address: str,
    kind: str,
    body: dict[str, Any],
    timeout_s: float = 5.0,
    secure: Any = None,
) -> dict[str, Any]:
    """Interface of `elastic.rpc.control.client.call`."""
    process = process_of(scheduler)
    for one in addresses_of(address):
        answer = SimpleQueue(scheduler)

        def done(found: Any, answer: SimpleQueue = answer) -> None:
            answer.items.append(found)
            if answer.waiters:
                scheduler.wake(answer.waiters.popleft())

        connect(process.host, process, *split(one), done)
        try:
            end = answer.get(timeout=timeout_s)
            if not isinstance(end, Endpoint):
                continue
            deadline = scheduler.now + timeout_s
            end.transmit(("call", kind, body), 200)
            while True:
                while not end.inbox:
                    if end.ended:
                        raise TimeoutError
                    end.wait(deadline)
                reply = end.inbox.popleft()
                if reply == ("alive?",):
                    end.transmit(("alive",), 10)
                elif reply[0] == "answer":
                    end.close()
                    return dict(reply[1])
                elif reply[0] == "refused":
                    end.close()
                    raise UsageError(reply[1])
        except (queue.Empty, TimeoutError):
            continue
    raise Unreachable(f"no coordinator answers at {address}")


class SimPortWatch:
    """Interface of `elastic.coordinator.port_watch.PortWatch`."""

    def __init__(
        self,
        scheduler: Scheduler,
        put: Callable[[PortRefused], object],
        is_away: Callable[[str, str], bool],
    ) -> None:
        self._scheduler, self._put, self._is_away = scheduler, put, is_away
        self._closed, self._loop = False, loop_of(scheduler)
        self._process = process_of(scheduler)
        self._reached = set[str]()

    def check(self, node: str, incarnation: str, vault: str) -> None:
        if vault in self._reached:
            return

        def done(found: Any) -> None:
            if isinstance(found, Endpoint):
                self._loop.wake_with(found.close)
                self._reached.add(vault)

        connect(self._process.host, self._process, *split(vault), done)

    def watch(self, node: str, incarnation: str, vault: str) -> None:
        self._loop.call_soon_threadsafe(self._try, node, incarnation, vault, 0.01)

    def close(self) -> None:
        self._closed = True

    def _try(self, node: str, incarnation: str, vault: str, pause_s: float) -> None:
        if self._closed or not self._is_away(node, incarnation):
            return
        later, over = min(2 * pause_s, 0.5), {"over": False}

        def done(found: Any) -> None:
            self._loop.wake_with(lambda: answered(found))

        def answered(found: Any) -> None:
            if isinstance(found, Endpoint):
                found.close()
                self._reached.add(vault)
            if over["over"]:
                return
            over["over"] = True
            if isinstance(found, ConnectionRefusedError) and vault in self._reached:
                self._put(PortRefused(node, incarnation))
            else:
                self._loop.call_later(pause_s, self._try, node, incarnation, vault, later)

        connect(self._process.host, self._process, *split(vault), done)
        self._loop.call_later(2.0, lambda: answered(None))
