"""The worker's line to its agent: orders in, news out, heartbeats.

One thread reads; another sends a heartbeat with the main thread's progress. The main thread asks for its next
order with `next_order` and computes under an `Abandon` that a newer epoch sets at once.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastic.core.protocol import messages as m
from elastic.core.protocol.fault_spec import FaultSpec, load_faults
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS, SILENCE_S, Timeouts, budget
from elastic.domain import codec
from elastic.domain.errors import ChannelClosed, UsageError
from elastic.planning.cost.profile import Link
from elastic.rpc import security
from elastic.rpc.frames import Channel
from elastic.worker.transport.cancellation import Abandon

HEARTBEAT_S = 0.2


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings that the agent gives this worker at its start, through the environment."""

    agent: str
    """Path of the agent's Unix socket."""
    node: str
    local_rank: int
    local_world_size: int
    run_dir: str
    memory_dir: str
    """Directory for copies, in shared memory."""
    tp_store: str
    accumulate: str
    faults: tuple[FaultSpec, ...]
    host: str
    profile: str = ""
    """plan: the job is planned by the profile in RUN_DIR/config.json; emulate: workers also wait its times."""
    device: str = ""
    """Type of this node's devices, as the profile names it; "": its first."""
    link: Link = field(default_factory=Link)
    """How slow links to other nodes are made."""
    measure: str = ""
    """File for what `elastic profile` wants to know: nothing is trained, layers are measured."""
    timeouts: Timeouts = DEFAULT_TIMEOUTS
    """Limits on waiting for others."""

    @staticmethod
    def from_environment() -> WorkerSettings:
        """Read what `elastic run` put into the environment. Raises UsageError outside of it."""
        if "ELASTIC_AGENT" not in os.environ:
            raise UsageError(
                "this script trains under `elastic run`; try: elastic run --standalone --nnodes 2 SCRIPT"
            )
        env = os.environ
        security.use(
            security.load(
                env["ELASTIC_RUN_DIR"], env.get("ELASTIC_CERTS", ""), env.get("ELASTIC_CERTS_NAME", "")
            )
        )
        return WorkerSettings(
            agent=env["ELASTIC_AGENT"],
            node=env["ELASTIC_NODE"],
            local_rank=int(env["ELASTIC_LOCAL_RANK"]),
            local_world_size=int(env["LOCAL_WORLD_SIZE"]),
            run_dir=env["ELASTIC_RUN_DIR"],
            memory_dir=env["ELASTIC_MEMORY_DIR"],
            tp_store=env["ELASTIC_TP_STORE"],
            accumulate=env["ELASTIC_ACCUMULATE"],
            faults=load_faults(env.get("ELASTIC_FAULTS", "")),
            host=env.get("ELASTIC_HOST", "127.0.0.1"),
            profile=env.get("ELASTIC_PROFILE", ""),
            device=env.get("ELASTIC_DEVICE", ""),
            link=codec.loads(Link, env["ELASTIC_LINK"]) if "ELASTIC_LINK" in env else Link(),
            measure=env.get("ELASTIC_MEASURE", ""),
            timeouts=budget(float(env.get("ELASTIC_SILENCE", SILENCE_S))),
        )


class Position:
    """Where the main thread is; written there, read by the heartbeat."""

    def __init__(self) -> None:
        self.counter, self.activity, self.step, self.microbatch = 0, "idle", 0, 0
        self.measured: m.MicrobatchTiming | None = None
        """How long the newest step's computing took."""

    def at(self, activity: str, step: int | None = None, microbatch: int | None = None) -> None:
        self.counter += 1
        self.activity = activity
        self.step = self.step if step is None else step
        self.microbatch = self.microbatch if microbatch is None else microbatch


class Control:
    """Connection to the agent, at the Unix socket `path`."""

    def __init__(self, path: str) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(path)
        self._channel = Channel(sock)
        self._orders: queue.Queue[Any] = queue.Queue()
        self._lock = threading.Lock()
        self._abandon = Abandon()
        self._epoch = 0
        self._halt = threading.Condition(self._lock)
        self._newest = m.Halt(0)
        self._stopping = False
        self._closing = threading.Event()
        self.position = Position()

    def start(self, on_acked: Callable[[m.BundleAcknowledged], None]) -> None:
        """Begin to listen and to send heartbeats, after Attach was sent.

        The listening thread calls `on_acked` for every acknowledgement.
        """
        listen = partial(self._listen, on_acked)
        threading.Thread(target=listen, name="elastic-orders", daemon=True).start()
        threading.Thread(target=self._beat, name="elastic-heartbeat", daemon=True).start()

    def send(self, message: Any) -> None:
        self._channel.send(message)

    def next_order(self) -> m.Install | m.Stop | m.Halt:
        """Wait for the next order. A Halt is returned only when nothing runs."""
        order = self._orders.get()
        assert isinstance(order, (m.Install, m.Stop, m.Halt))
        return order

    def enter(self, epoch: int) -> Abandon:
        """Return the token under which `epoch` runs; it is set already if a newer epoch was announced."""
        with self._lock:
            self._epoch = epoch
            self._abandon = Abandon()
            if self._newest.epoch > epoch and not self._newest.boundary:
                self._abandon.set(f"epoch {self._newest.epoch}")
            return self._abandon

    def boundary_requested(self) -> int:
        """Epoch for which everybody shall stop after the running step, or 0."""
        with self._lock:
            return self._newest.epoch if self._newest.boundary and self._newest.epoch > self._epoch else 0

    def await_halt(self, epoch: int) -> int | None:
        """Wait until a newer epoch than `epoch` is announced and return it, or None when the job is over."""
        with self._halt:
            self._halt.wait_for(lambda: self._stopping or self._newest.epoch > epoch)
            return None if self._stopping else self._newest.epoch

    def _listen(self, on_acked: Callable[[m.BundleAcknowledged], None]) -> None:
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, m.BundleAcknowledged):
                    on_acked(message)
                else:
                    self._receive(message)
        except (ChannelClosed, OSError):
            os._exit(70)  # the agent is gone: a worker never outlives its node

    def _receive(self, message: Any) -> None:
        match message:
            case m.Halt():
                with self._halt:
                    self._newest = message
                    if not message.boundary and message.epoch > self._epoch:
                        self._abandon.set(f"epoch {message.epoch}")
                    self._halt.notify_all()
                self._orders.put(message)
            case m.Stop():
                with self._halt:
                    self._stopping = True
                    self._abandon.set(f"stop: {message.reason}")
                    self._halt.notify_all()
                self._orders.put(message)
            case _:
                self._orders.put(message)

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            p = self.position
            try:
                self.send(m.Progress(p.counter, p.activity, p.step, p.microbatch, p.measured))
            except (ChannelClosed, OSError):
                return

    def close(self) -> None:
        self._closing.set()
