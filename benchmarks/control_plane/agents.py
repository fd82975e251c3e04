r"""Many simulated agents in one process, without workers.

    python -m benchmarks.control_plane.agents --address HOST:PORT --first 0 --count 500 \
        --layers 96 --microbatches 1024

The gRPC streams, the messages and the node logic (`elastic.core.node.node`) are the real ones. Each
agent has its own connection, sends its heartbeats on time and carries out each instruction at once:
its workers attach, halt, install and protect in no time. The inventory of its vault lists the
states of its own layers and of the layers that it backs up.

Standard input takes two commands. `close NODE` ends the connection of an agent, as when its machine
is lost. `mute NODE` leaves the connection open, but the agent sends nothing more. Standard output
gets one JSON line whenever all agents run in a new epoch, and one for each live agent that the
coordinator declares lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import random
import socket
import sys
import time
from dataclasses import replace
from typing import Any

import grpc

from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.core.protocol.timeouts import SILENCE_S, budget
from elastic.domain.types import STATE, Assignment, Copy, JobSpec, LayerSpec, NodeInfo, Plan
from elastic.open_files import raise_limit
from elastic.rpc.control.channel_options import CONNECT_TIMEOUT_S, client_options, retry_max_s
from elastic.rpc.control.client import ANNOUNCEMENT, CoordinatorStub, _channel, _proof
from elastic.rpc.control.connection_watch import together_s
from elastic.rpc.control.envelope import (
    CHALLENGE,
    Envelope,
    encode_body,
    from_wire,
    pack,
    pack_call,
    unpack,
    unpack_call,
)
from elastic.rpc.control.event_loop import GrpcEventLoop
from elastic.rpc.security import tls
from elastic.rpc.security.token_proof import new_nonce

MEMORY_BYTES = 24 << 30
"""Memory of a node: a pipeline of the model needs a dozen nodes."""
NO_RECIPES = encode_body("Install", [])
RAMP_S = 0.5
"""Time over which the first heartbeats of the agents are spread."""


def spec_of(layers: int, microbatches: int) -> JobSpec:
    """Return a model of equal layers, 100 M parameters each, in a transformer's proportions."""
    layer = LayerSpec(
        200 << 20, 1200 << 20, 400 << 20, 0.02, 0.04, activation_bytes=1 << 24, output_bytes=1 << 24
    )
    return JobSpec((layer,) * layers, microbatches, 1_000_000)


def read(envelope: Envelope) -> Any:
    """Return an instruction, decoded once for all agents: they differ only in unused recipes."""
    return _decoded(
        envelope.kind, NO_RECIPES if envelope.common else envelope.body, envelope.common
    )


@functools.lru_cache(maxsize=64)
def _decoded(kind: str, body: bytes, common: bytes) -> Any:
    return unpack(Envelope(0, 0, kind, body, common=common))


class Places:
    """Locations of the copies under a plan, computed once for all agents of the process."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.nodes = plan, frozenset(plan.nodes())
        self.layers: dict[str, tuple[int, ...]] = {}
        for _, _, stage in plan.stages():
            self.layers[stage.unit.node] = (*self.layers.get(stage.unit.node, ()), *stage.layers)
        self.owners: dict[str, tuple[str, ...]] = {node: (node,) for node in self.nodes}
        """Nodes whose copies a node has: itself, and the nodes that it keeps backups for."""
        for node, peer in plan.peers:
            self.owners[peer] = (*self.owners.get(peer, ()), node)


class Agent:
    """A simulated agent: the real node logic and connection, but no workers."""

    def __init__(self, crowd: SimulatedAgents, name: str) -> None:
        self.crowd, self.name, self.term, self.muted = crowd, name, 0, False
        self.port = socket.create_server(("127.0.0.1", 0))
        """Port of the vault. The coordinator connects to it."""
        vault = f"127.0.0.1:{self.port.getsockname()[1]}"
        self.state = core.NodeState(NodeInfo(name, f"{name}-1", vault, memory_bytes=MEMORY_BYTES))
        self.assignment: Assignment | None = None
        self._written_at = 0.0
        self._told, self._heartbeat = (-1, -1), Envelope(0, 0, "", b"")
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        """Connect, again after each loss of the connection, until the coordinator lets go."""
        while self.name in self.crowd.agents:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._speak()
            await asyncio.sleep(random.uniform(0.5, 1.0) * self.crowd.retry_s)

    async def _speak(self) -> None:
        options, secure = self.crowd.options, tls.current()
        metadata: tuple[tuple[str, str], ...] = (("sender", self.name), ANNOUNCEMENT)
        async with _channel(grpc.aio, self.crowd.address, options, secure) as channel:
            stub = CoordinatorStub(channel)
            if secure.token:
                mine = new_nonce()
                asked = pack_call(CHALLENGE, {"nonce": mine})
                reply = unpack_call(from_wire(await stub.call(asked, wait_for_ready=True)))
                metadata += _proof(secure.token, mine, reply, "session", self.name)
            self._call = stub.session(metadata=metadata, wait_for_ready=True)
            await self._call.wait_for_connection()
            self._writing = asyncio.Lock()
            await self._say(core.report(self.state))
            beats = asyncio.create_task(self._beat())
            try:
                async for data in self._call:
                    await self._hear(from_wire(data))
            finally:
                beats.cancel()

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        next_beat = loop.time() + hash(self.name) % 997 / 997 * RAMP_S
        while not self.muted:
            await asyncio.sleep(max(0.0, next_beat - loop.time()))
            self.crowd.late_s = max(self.crowd.late_s, loop.time() - next_beat)
            next_beat += self.crowd.heartbeat_s
            if (self.state.epoch, self.term) != self._told:  # nothing else in a heartbeat changes
                self._told = self.state.epoch, self.term
                self._heartbeat = self._packed(core.heartbeat(self.state))
            await self._write(self._heartbeat)

    async def _say(self, message: Any) -> None:
        if not self.muted:
            await self._write(self._packed(message))

    async def _write(self, envelope: Envelope) -> None:
        async with self._writing:
            await self._call.write(envelope)
            self._written_at = time.monotonic()

    def _packed(self, message: Any) -> Envelope:
        return pack(message, term=self.term, epoch=self.state.epoch, sender=self.name)

    async def _hear(self, envelope: Envelope) -> None:
        self.term = max(self.term, envelope.term)
        message = read(envelope)
        if isinstance(message, m.Fenced) and not self.muted:
            self.crowd.fenced(self.name, message.reason, time.monotonic() - self._written_at)
        elif not isinstance(message, m.Trim):
            async with self.crowd.turn:
                await self._take(message)
                await asyncio.sleep(0)

    async def _take(self, event: Any) -> None:
        """Pass an event to the node logic, and carry out its actions as the node's parts would."""
        self.state, actions, _ = core.transition(self.state, event, time.monotonic())
        for action in actions:
            match action:
                case core.SpawnWorkers():  # on GPUs, where all nodes halt at once
                    await self._take(
                        core.WorkerMessage(0, m.Attach(0, 1, self.crowd.spec, "127.0.0.1:9", True))
                    )
                case core.SendToWorkers(m.Halt(epoch)):
                    self.crowd.halted(epoch)
                    await self._take(core.WorkerMessage(0, m.Halted(epoch, 0)))
                case core.EnterEpoch(install):
                    self.assignment = install.assignment
                case core.SendToWorkers(m.Install(epoch)):
                    await self._take(core.WorkerMessage(0, m.Ready(epoch, 0.0, 0.0)))
                    await self._take(core.WorkerMessage(0, m.Resumed(epoch, time.time())))
                    await self._take(core.WorkerMessage(0, m.Protected(epoch)))
                    self.crowd.installed(self, epoch)
                case core.SendReport():
                    await self._report()

    async def _report(self) -> None:
        report = core.report(self.state)
        if report.phase is m.NodePhase.HALTED:
            report = replace(report, inventory=self._inventory())
        await self._say(report)

    def _inventory(self) -> tuple[Copy, ...]:
        if self.assignment is None:
            return ()
        places = self.crowd.places(self.assignment.plan)
        epoch = places.plan.epoch
        return tuple(
            Copy(STATE, layer, 0, 0, epoch, owner, layer + 1, 1400 << 20, "0" * 16, node=self.name)
            for owner in places.owners.get(self.name, ())
            for layer in places.layers.get(owner, ())
        )


class SimulatedAgents:
    """All agents of this process."""

    def __init__(self, address: str, spec: JobSpec, heartbeat_s: float, nodes: int) -> None:
        self.address, self.spec, self.heartbeat_s = address, spec, heartbeat_s
        connect_s = max(CONNECT_TIMEOUT_S, together_s(nodes))
        keepalive_s = budget(SILENCE_S).keepalive_s
        self.options = client_options(keepalive_s, connect_s, nodes)
        self.retry_s = retry_max_s(nodes)
        self.agents: dict[str, Agent] = {}
        self._places: Places | None = None
        self.turn = asyncio.Lock()
        """Held while an agent carries out an order. Heartbeats go on in between: on a machine of
        its own, an agent's heartbeat would not wait for the reports of a thousand others."""
        self.late_s = 0.0
        """Longest delay of a heartbeat since the last new epoch. This process has one core only."""
        self._epoch, self._halts, self._installs = 0, (0.0, 0.0), set[str]()

    def places(self, plan: Plan) -> Places:
        if self._places is None or self._places.plan is not plan:
            self._places = Places(plan)
        return self._places

    def halted(self, epoch: int) -> None:
        """Note that an agent was told to halt its workers."""
        if epoch > self._epoch:
            self._epoch, self._halts, self._installs = epoch, (time.time(), 0.0), set()
        self._halts = (self._halts[0], time.time())

    def installed(self, agent: Agent, epoch: int) -> None:
        if epoch < self._epoch:
            return
        if epoch > self._epoch:
            self._epoch, self._halts, self._installs = epoch, (0.0, 0.0), set()
        self._installs.add(agent.name)
        if len(self._installs) < len(self.agents) // 2:
            return
        plan = agent.assignment.plan if agent.assignment else None
        if plan is not None and self._installs >= self.places(plan).nodes & set(self.agents):
            first, last = self._halts
            told = {
                "epoch": epoch,
                "first_halt": first,
                "last_halt": last,
                "last_install": time.time(),
            }
            print(json.dumps(told | {"late_s": round(self.late_s, 3)}), flush=True)
            self.late_s = 0.0

    def fenced(self, name: str, why: str, since_s: float) -> None:
        """Report a live agent that was declared lost, and the time since its last message."""
        if self.agents.pop(name, None) is not None:
            print(
                json.dumps({"fenced": name, "why": why, "since_s": round(since_s, 3)}), flush=True
            )

    def failed(self, text: str) -> None:
        print(json.dumps({"failed": text}), flush=True)

    def obey(self, line: str) -> None:
        """Carry out `close NODE` or `mute NODE`."""
        word, name = line.split()
        agent = self.agents.pop(name, None)
        if agent is None:  # declared lost
            self.failed(f"{name} is gone already")
        elif word == "mute":
            agent.muted = True
        else:
            agent.port.close()
            agent.task.cancel()


async def live(crowd: SimulatedAgents, first: int, count: int) -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    for index in range(first, first + count):
        name = f"node{index}"
        crowd.agents[name] = Agent(crowd, name)
        if index % 20 == 0:
            await asyncio.sleep(0.01)
    while line := await lines.readline():
        crowd.obey(line.decode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--address", required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=0, help="of the whole job; 0: --count")
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--microbatches", type=int, default=1024)
    parser.add_argument("--heartbeat", type=float, default=0.5)
    parser.add_argument("--run-dir", default="", help="whose join token is proved")
    parser.add_argument("--certs", default="", help="certificates, for mutual TLS")
    args = parser.parse_args()
    raise_limit(args.count)
    if args.run_dir:
        tls.use(tls.load(args.run_dir, args.certs))
    crowd_spec = spec_of(args.layers, args.microbatches)

    async def start() -> None:
        await live(
            SimulatedAgents(args.address, crowd_spec, args.heartbeat, args.nodes or args.count),
            args.first,
            args.count,
        )

    with asyncio.Runner(loop_factory=GrpcEventLoop) as runner:
        runner.run(start())


if __name__ == "__main__":
    main()
