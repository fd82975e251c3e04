"""`elastic run --backend ray`: agents are actors, one on a Ray node. The only module of elastic that imports ray.

The least number of nodes is a placement group, one bundle a node, which Ray puts up as a whole and repairs by itself;
further agents are bound to their nodes. Actors belong to this driver: they end with it, and with the raylet of their
node. Only text and bytes travel through Ray, so nothing of ours is pickled.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import exceptions
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from elastic.core.job import fleet
from elastic.domain.errors import FieldError
from elastic.launcher.flags.addresses import local_address
from elastic.launcher.flags.ray_options import AUTO, CLIENT
from elastic.launcher.flags.request import Request
from elastic.launcher.ray.remote_agent import REACH_S, AgentHost
from elastic.launcher.ray.supervisor import ClusterSupervisor, Host
from elastic.launcher.run.rundir import RunDir, free_port
from elastic.rpc.security import tls

ZONE = "ray.io/availability-zone"
"""The label of a Ray node that is its failure domain."""
THREADS = 4
"""One serves; logs are fetched and orders taken meanwhile."""
GOODBYE_S = 5.0
"""How long the last logs of an agent are waited for."""
BY_NAME = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resources that Ray's actors take by another name."""


def launch(request: Request) -> int:
    """Run the job on the cluster to its end; return the exit code. Raises FieldError where there is none."""
    options = request.ray
    assert options is not None
    connect(options.address)
    try:
        host = request.config.local_addr or _own_host(options.address)
        address = request.config.coordinator or f"{host}:{free_port(host)}"
        if request.guard.warning:
            print(f"elastic: {request.guard.warning}", file=sys.stderr)
        run_dir = RunDir(request)
        tls.use(tls.load(run_dir.path, run_dir.config.certs, run_dir.config.certs_name))
        try:
            resources = dict(options.resources) or usual(request.config.nproc_per_node)
            cluster = RayCluster(resources, request.config.min_nodes)
            try:
                return ClusterSupervisor(request, run_dir, address, cluster, options.spares).run()
            finally:
                cluster.close()
        finally:
            run_dir.close()
    finally:
        ray.shutdown()


def connect(address: str) -> None:
    """Become a driver of the cluster. Raises FieldError when there is none."""
    given = os.environ.get("RAY_ADDRESS", AUTO) if address == AUTO else address
    if ":" in given:
        _reach(given)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, exceptions.RayError) as error:
        remedy = f"a Ray cluster must run there: {' '.join(str(error).split())[:300]}"
        raise FieldError("--address", address, remedy) from error


def _reach(address: str) -> None:
    """Ray itself tries an address for minutes. Raises FieldError where nobody listens."""
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise FieldError("--address", address, f"a Ray cluster must run there: {error}") from error


def usual(workers: int) -> dict[str, float]:
    """What an agent takes if nothing is said: a CPU for each worker, and a GPU where the cluster has any."""
    gpus = any(node["Resources"].get("GPU", 0) >= workers for node in ray.nodes() if node["Alive"])
    return {"CPU": float(workers), **({"GPU": float(workers)} if gpus else {})}


class RayCluster:
    """The cluster as the supervisor sees it."""

    def __init__(self, resources: Mapping[str, float], gang: int) -> None:
        """Ask for the places of the first `gang` agents; nothing is waited for."""
        self._resources, self._gang = dict(resources), gang
        self._group = placement_group([self._resources] * gang, strategy="STRICT_SPREAD")
        self._asked = False
        self._seen = fleet.ClusterObserved((), gang)

    def look(self) -> fleet.ClusterObserved:
        """As it was, while the cluster cannot say: Ray ends this process when that lasts."""
        with contextlib.suppress(OSError, RuntimeError, exceptions.RayError):
            self._seen = self._look()
        return self._seen

    def _look(self) -> fleet.ClusterObserved:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        alive = {node["NodeID"] for node in nodes}
        table = placement_group_table(self._group)
        placed: dict[str, int] = {}
        if table.get("state") in ("CREATED", "RESCHEDULING"):
            for index, node in (table.get("bundles_to_node_id") or {}).items():
                if node in alive:
                    placed.setdefault(node, int(index))
        free = _free()
        machines = tuple(self._machine(node, placed, free) for node in nodes)
        return fleet.ClusterObserved(machines, self._gang - len(placed))

    def _machine(
        self, node: Mapping[str, Any], placed: Mapping[str, int], free: Mapping[str, Any] | None
    ) -> fleet.Machine:
        there = node["Resources"] if free is None else free.get(node["NodeID"], {})
        return fleet.Machine(
            id=node["NodeID"],
            host=node["NodeManagerAddress"],
            domain=(node.get("Labels") or {}).get(ZONE, ""),
            reserved=placed.get(node["NodeID"]),
            room=all(there.get(name, 0) >= amount for name, amount in self._resources.items()),
        )

    def start(self, machine: fleet.Machine, node: str, order: str, secrets: Mapping[str, bytes]) -> Host:
        strategy: Any = NodeAffinitySchedulingStrategy(machine.id, soft=False)
        if machine.reserved is not None:
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=machine.reserved
            )
        own = {name: amount for name, amount in self._resources.items() if name not in BY_NAME}
        named = {BY_NAME[name]: amount for name, amount in self._resources.items() if name in BY_NAME}
        actor = (
            ray.remote(AgentHost)
            .options(
                **{"num_cpus": 0, **named},
                resources=own,
                max_concurrency=THREADS,
                max_restarts=0,
                scheduling_strategy=strategy,
            )
            .remote(order, dict(secrets))
        )
        return ActorHost(node, actor)

    def ask(self, nodes: int) -> str:
        bundles = [self._resources] * nodes
        try:
            if ray.util.client.ray.is_connected():
                ray.get(ray.remote(num_cpus=0)(request_resources).remote(bundles=bundles), timeout=GOODBYE_S)
            else:
                request_resources(bundles=bundles)
        except (OSError, RuntimeError, exceptions.RayError) as error:
            return str(error)
        self._asked = nodes > 0
        return ""

    def close(self) -> None:
        """Give the places back and withdraw the request for nodes."""
        if self._asked:
            self.ask(0)
        with contextlib.suppress(OSError, RuntimeError, exceptions.RayError):
            remove_placement_group(self._group)


class ActorHost(Host):
    """An agent in an actor."""

    def __init__(self, name: str, actor: Any) -> None:
        super().__init__(name)
        self._actor = actor
        self._served = actor.serve.remote()
        self._logs: Any = None
        self._last: list[tuple[str, int, bytes]] = []

    def ended(self) -> bool:
        if self.returncode is None and ray.wait([self._served], timeout=0)[0]:
            try:
                self.returncode, self.problem = ray.get(self._served)
            except exceptions.RayError as error:
                self._lose(error)
            else:
                self._leave()
        return self.returncode is not None

    def fetch(self) -> list[tuple[str, int, bytes]]:
        found, self._last = self._last, []
        if self.returncode is None:
            if self._logs is None:
                self._logs = self._actor.logs.remote(self.offsets)
            elif ray.wait([self._logs], timeout=0)[0]:
                ref, self._logs = self._logs, None
                with contextlib.suppress(exceptions.RayError):  # `ended` will know
                    found += self._read(ref)
        return found

    def terminate(self) -> None:
        if not self.ended():
            self._actor.stop.remote()

    def kill(self) -> None:
        if not self.ended():
            self._lose(None)

    def _read(self, ref: Any, timeout_s: float = GOODBYE_S) -> list[tuple[str, int, bytes]]:
        pieces: list[tuple[str, int, bytes]] = ray.get(ref, timeout=timeout_s)
        for name, offset, data in pieces:
            self.offsets[name] = offset + len(data)
        return pieces

    def _leave(self) -> None:
        """Fetch the rest of the logs, then let go of the machine."""
        end = time.monotonic() + GOODBYE_S
        with contextlib.suppress(exceptions.RayError):
            if self._logs is not None:
                self._last += self._read(self._logs)
            while time.monotonic() < end:
                pieces = self._read(self._actor.logs.remote(self.offsets))
                self._last += pieces
                if not pieces:
                    break
            ray.get(self._actor.close.remote(), timeout=GOODBYE_S)
        self._kill_actor()

    def _lose(self, error: exceptions.RayError | None) -> None:
        self.returncode, self.lost = -9, True
        self.problem = "" if error is None else _first_line(error)
        self._kill_actor()

    def _kill_actor(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError, exceptions.RayError):
            ray.kill(self._actor, no_restart=True)


def _first_line(error: exceptions.RayError) -> str:
    """What Ray says of the end of an actor, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] or type(error).__name__


def _free() -> Mapping[str, Mapping[str, float]] | None:
    """What is free on each node, by its id; None where this Ray does not tell: then all of a node counts."""
    if ray.util.client.ray.is_connected():
        return None
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:
        return None
    found: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return found


def _own_host(address: str) -> str:
    """Address of this machine for the agents."""
    if address.startswith(CLIENT):
        return local_address(address.removeprefix(CLIENT))
    return str(ray.util.get_node_ip_address())
