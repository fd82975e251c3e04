"""The worker's connection to its agent: orders, reports and heartbeats.

One thread reads the agent's messages; another sends heartbeats with the main thread's position.
The main thread takes its next order with `next_order`. It trains under an `AbandonSignal`, which
is set as soon as a newer epoch is announced, except by a boundary halt. A worker outside the scope
of the change may promise instead to halt at the `MeetingPoint`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastic.core.protocol import messages as m
from elastic.core.protocol.fault_spec import FaultSpec, load_faults
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS, SILENCE_S, Timeouts, budget
from elastic.core.protocol.version import ProtocolVersion
from elastic.domain import codec
from elastic.domain.errors import (
    EXIT_FAILURE,
    ChannelClosed,
    FieldError,
    UnknownMessage,
    UsageError,
    describe,
)
from elastic.domain.types import VERIFY_EVERY, OnNonfinite
from elastic.planning.cost.profile import LinkProfile
from elastic.rpc.frames import CHANNEL_VERSION, Channel, connect_unix, version_in
from elastic.rpc.security import tls
from elastic.worker.control.meeting_point import MeetingPoint
from elastic.worker.transport.cancellation import AbandonSignal

HEARTBEAT_S = 0.2
"""Interval between heartbeats."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings that the agent passes to this worker through the environment."""

    agent: str
    """Path of the agent's Unix socket."""
    node: str
    """Name of this worker's node."""
    local_rank: int
    """Index of this worker on its node, from 0."""
    local_world_size: int
    """Number of workers on the node."""
    run_dir: str
    memory_dir: str
    """Directory for backup copies, in shared memory."""
    tp_store: str
    """Path of the rendezvous file of the node's tensor-parallel ranks."""
    accumulate: str
    """exact | fast."""
    faults: tuple[FaultSpec, ...]
    """Faults to inject, for all nodes."""
    host: str
    """Address of this node that the other nodes can reach."""
    profile: str = ""
    """plan: the job is planned by the profile in RUN_DIR/config.json; emulate: the workers also
    wait for the profile's times instead of computing; "": there is no profile."""
    device: str = ""
    """Device type of this node, as the profile names it; "": the profile's first."""
    link: LinkProfile = field(default_factory=LinkProfile)
    """Emulated limits of the links to other nodes."""
    measure: str = ""
    """File with the request of `elastic profile` to measure layers; "": train instead."""
    timeouts: Timeouts = DEFAULT_TIMEOUTS
    """Limits on waiting for others."""
    verify_every: int = VERIFY_EVERY
    """Steps between two comparisons of the holders' parameters; 0: none."""
    on_nonfinite: OnNonfinite = OnNonfinite.STOP
    agent_version: ProtocolVersion = field(default_factory=ProtocolVersion)
    """Version of the agent; the agent refuses this worker if the versions do not fit."""

    @staticmethod
    def if_in_job() -> WorkerSettings | None:
        """Return the settings; None: this process was not started by `elastic run`. Raises
        UsageError if torchrun started it: each of its processes would train alone."""
        if "ELASTIC_AGENT" not in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
            raise UsageError("torchrun has started this script: use `elastic run`, with its flags")
        return WorkerSettings.from_environment() if "ELASTIC_AGENT" in os.environ else None

    @staticmethod
    def from_environment() -> WorkerSettings:
        """Read the settings from the environment. Raises UsageError outside `elastic run`."""
        if "ELASTIC_AGENT" not in os.environ:
            raise UsageError(
                "this script trains under `elastic run`; "
                "try: elastic run --standalone --nnodes 2 SCRIPT"
            )
        env = os.environ
        certificates = env.get("ELASTIC_CERTS", "")
        name = env.get("ELASTIC_CERTS_NAME", "")
        tls.use(tls.load(env["ELASTIC_RUN_DIR"], certificates, name))
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
            link=codec.loads(LinkProfile, env.get("ELASTIC_LINK", "{}")),
            measure=env.get("ELASTIC_MEASURE", ""),
            timeouts=budget(float(env.get("ELASTIC_SILENCE", SILENCE_S))),
            verify_every=int(env.get("ELASTIC_VERIFY_EVERY", VERIFY_EVERY)),
            on_nonfinite=OnNonfinite(env.get("ELASTIC_ON_NONFINITE", OnNonfinite.STOP)),
            agent_version=version_in(env.get("ELASTIC_PROTOCOL", "")),
        )


def connect_agent(settings: WorkerSettings) -> Channel:
    """Connect to the agent and announce this worker's version. Raises ChannelClosed."""
    channel = connect_unix(settings.agent)
    channel.send(m.Hello(settings.local_rank, os.getpid(), CHANNEL_VERSION))
    channel.peer = settings.agent_version
    return channel


class TrainingPosition:
    """Progress of the main thread, which writes it; the heartbeat thread reads it. Threads that
    copy or fetch data for the main thread call `advance`."""

    def __init__(self) -> None:
        self.counter, self.activity, self.step, self.microbatch = 0, "idle", 0, 0
        self.measured: m.MicrobatchTiming | None = None
        """Compute times of the newest measured step; None: no step was measured yet."""

    def update(self, activity: str, step: int | None = None, microbatch: int | None = None) -> None:
        """Record progress. A `step` or `microbatch` of None keeps the former one."""
        self.counter += 1
        self.activity = activity
        self.step = self.step if step is None else step
        self.microbatch = self.microbatch if microbatch is None else microbatch

    def advance(self) -> None:
        """Record progress of the present activity: a part of a large copy is done."""
        self.counter += 1


class AgentClient:
    """Receives orders from the agent, and sends reports."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Connect and announce this worker's version. Raises ChannelClosed without an agent."""
        self._channel = connect_agent(settings)
        self._orders: queue.Queue[m.Install | m.Stop] = queue.Queue()
        self._lock = threading.Lock()
        self._abandon = AbandonSignal()
        self._epoch = 0
        self._halt = threading.Condition(self._lock)
        self._newest = m.Halt(0)
        self._stopping = False
        self._closing = threading.Event()
        self.position = TrainingPosition()
        self.meeting = MeetingPoint(settings.node)

    def start(self, on_acked: Callable[[m.BundleAcknowledged], None]) -> None:
        """Start to receive messages and to send heartbeats. Send `Attach` before this call.

        The receiving thread calls `on_acked(message)` for every acknowledgement.
        """
        listen = partial(self._listen, on_acked)
        threading.Thread(target=listen, name="elastic-orders", daemon=True).start()
        threading.Thread(
            target=self._send_heartbeats, name="elastic-heartbeat", daemon=True
        ).start()

    def send(self, message: Any) -> None:
        self._channel.send(message)

    def next_order(self) -> m.Install | m.Stop:
        """Wait for the next order and return it."""
        return self._orders.get()

    def begin_epoch(self, epoch: int) -> AbandonSignal:
        """Return the signal that ends `epoch`.

        The signal is already set if a newer epoch was announced, except by a boundary halt, or if
        the job is over.
        """
        with self._lock:
            self._epoch = epoch
            self.meeting.begin_epoch(epoch)
            self._abandon = AbandonSignal()
            if self._newest.epoch > epoch and not self._newest.boundary:
                self._abandon.set(f"epoch {self._newest.epoch}")
            if self._stopping:
                self._abandon.set("the job is over")
            return self._abandon

    def boundary_requested(self) -> int:
        """Return the newer epoch that a boundary halt has announced, or 0 if there is none."""
        with self._lock:
            newest = self._newest
            return newest.epoch if newest.boundary and newest.epoch > self._epoch else 0

    def await_halt(self, epoch: int) -> int | None:
        """Wait for a `Halt` newer than `epoch`; return its epoch, or None if the job is over."""
        with self._halt:
            self._halt.wait_for(lambda: self._stopping or self._newest.epoch > epoch)
            return None if self._stopping else self._newest.epoch

    def _listen(self, on_acked: Callable[[m.BundleAcknowledged], None]) -> None:
        try:
            while True:
                with contextlib.suppress(UnknownMessage):  # of a newer agent
                    self._receive(self._channel.receive(), on_acked)
        except FieldError as error:
            text = f"it cannot read a message of its agent: {describe(error)}"
            with contextlib.suppress(ChannelClosed):
                self.send(m.Crashed(text))
            os._exit(EXIT_FAILURE)
        except (ChannelClosed, OSError):
            os._exit(70)  # the agent has ended, and a worker must not outlive it
        except BaseException:  # noqa: BLE001 - a worker without orders would wait for ever
            traceback.print_exc()
            os._exit(70)

    def _receive(self, message: Any, on_acked: Callable[[m.BundleAcknowledged], None]) -> None:
        match message:
            case m.BundleAcknowledged():
                on_acked(message)
            case m.Halt():
                self._on_halt(message)
            case m.Stop():
                with self._halt:
                    self._stopping = True
                    self._abandon.set(f"stop: {message.reason}")
                    self._halt.notify_all()
                self._orders.put(message)
            case _:
                self._orders.put(message)

    def _on_halt(self, halt: m.Halt) -> None:
        """End the epoch, or promise to end it at the meeting point.

        The promise is sent before `await_halt` returns, so it precedes `Halted`.
        """
        promise = None if halt.boundary else self.meeting.order(halt)
        if promise is not None:
            self.send(promise)
        with self._halt:
            self._newest = halt
            ends = not halt.boundary and halt.epoch > self._epoch
            # A worker that still computes finds its promise when it arrives.
            if ends and (promise is None or self.meeting.arrived):
                self._abandon.set(f"epoch {halt.epoch}", gently=promise is not None)
            self._halt.notify_all()

    def _send_heartbeats(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            p = self.position
            try:
                self.send(m.Progress(p.counter, p.activity, p.step, p.microbatch, p.measured))
            except (ChannelClosed, OSError):
                return

    def close(self) -> None:
        """Stop the heartbeats."""
        self._closing.set()
