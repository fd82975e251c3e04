"""`elastic run --backend ray`: one actor per Ray node runs an agent. Only this module imports ray.

The minimum number of nodes is a placement group with one place per node. Ray reserves it as a
whole and repairs it. Further agents have a place each, bound to their node. Actors end with this
driver and with the raylet of their node. Only text and bytes pass through Ray; nothing of ours is
pickled.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import exceptions
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic.core.job import fleet
from elastic.domain.errors import FieldError
from elastic.launcher.flags.addresses import local_address
from elastic.launcher.flags.ray_options import AUTO, CLIENT
from elastic.launcher.flags.request import Request
from elastic.launcher.ray.remote_agent import CONNECT_TIMEOUT_S, AgentHost
from elastic.launcher.ray.supervisor import ClusterSupervisor, RemoteAgent
from elastic.launcher.run.rundir import free_port
from elastic.launcher.run.supervisor import open_run_dir
from elastic.launcher.run.trackers import check_targets

ZONE = "ray.io/availability-zone"
"""Label of a Ray node that names its failure domain."""
NODE = "ray.io/node-id"
"""Label of a Ray node that Ray itself sets."""
CLAIM_S, FULL_S = 10.0, 60.0
"""A node that has not granted a claim within the first time has no room; it is asked again after
the second."""
THREADS = 4
"""Threads of an actor: one runs the agent, the others fetch logs and take calls."""
FINAL_LOGS_S = 5.0
"""Time to fetch the last logs of an agent."""
ACTOR_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Options of Ray's actors by resource; other resources have no option of their own."""
RAY_ERRORS = (OSError, RuntimeError, exceptions.RayError)


def launch(request: Request) -> int:
    """Run the job on the cluster to its end; return the exit code.

    Raises FieldError if no cluster answers.
    """
    options, config = request.ray, request.config
    assert options is not None
    check_targets(request.trackers)
    connect(options.address)
    try:
        host = config.local_addr or _own_host(options.address)
        address = config.coordinator or f"{host}:{free_port(host)}"
        with open_run_dir(request) as run_dir:
            resources = dict(options.resources) or default_resources(config.nproc_per_node)
            cluster = RayCluster(resources, config.min_nodes)
            try:
                return ClusterSupervisor(request, run_dir, address, cluster, options.spares).run()
            finally:
                cluster.close()
    finally:
        ray.shutdown()


def connect(address: str) -> None:
    """Connect this process to the cluster as a driver. Raises FieldError if there is no cluster."""
    given = os.environ.get("RAY_ADDRESS", AUTO) if address == AUTO else address
    try:
        if ":" in given:  # Ray itself would retry for minutes
            host, _, port = given.removeprefix(CLIENT).rpartition(":")
            place = host.strip("[]"), int(port)
            socket.create_connection(place, timeout=CONNECT_TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (*RAY_ERRORS, ValueError, OverflowError) as error:
        problem = " ".join(str(error).split())[:300]
        raise FieldError("--address", address, f"no Ray cluster answers: {problem}") from error


def default_resources(workers: int) -> dict[str, float]:
    """Return the resources per agent: a CPU per worker, and a GPU each if a node has enough."""
    gpus = any(node["Resources"].get("GPU", 0) >= workers for node in ray.nodes() if node["Alive"])
    return {"CPU": float(workers), **({"GPU": float(workers)} if gpus else {})}


@dataclass
class _Claim:
    """Resources of one node that Ray reserves for one agent."""

    group: Any
    since: float
    agent: RemoteAgent | None = None
    """The agent that uses them; None: it has not been started."""


class NodeClaims:
    """Claims of resources on named nodes, for agents that have no place in the first group.

    Ray's public interface does not tell the free resources of a node. So an agent starts there only
    after Ray has granted a claim: a placement group of one place, bound to the node.
    """

    def __init__(self, resources: Mapping[str, float]) -> None:
        self._resources = dict(resources)
        self._claims: dict[str, _Claim] = {}
        """Claims by node id."""
        self._full_until: dict[str, float] = {}
        """Time until which no claim is made, by id of a node without room."""

    def granted(self, nodes: Mapping[str, Mapping[str, Any]], agents: int) -> set[str]:
        """Keep claims on `nodes` (descriptions of Ray by id) for `agents` further agents. Return
        the nodes where one may start now."""
        now, granted = time.monotonic(), set[str]()
        for node, claim in tuple(self._claims.items()):
            agent = claim.agent
            if agent.ended() if agent is not None else not agents or node not in nodes:
                self._withdraw(node)
            elif agent is None and _state(claim.group) == "CREATED":
                granted.add(node)
            elif agent is None and now - claim.since > CLAIM_S:
                self._withdraw(node)
                self._full_until[node] = now + FULL_S
        open_claims = sum(claim.agent is None for claim in self._claims.values())
        for node, description in nodes.items():
            free = node not in self._claims and now >= self._full_until.get(node, now)
            if open_claims < agents and free and self._fits(description):
                self._claims[node] = _Claim(self._reserve(node), now)
                open_claims += 1
        return granted

    def use(self, node: str, agent: RemoteAgent) -> None:
        """Keep the claim on `node` until the agent has ended."""
        self._claims[node].agent = agent

    def group(self, node: str) -> Any:
        return self._claims[node].group

    def close(self) -> None:
        for node in tuple(self._claims):
            self._withdraw(node)

    def _fits(self, description: Mapping[str, Any]) -> bool:
        whole = description["Resources"]
        return all(whole.get(name, 0) >= amount for name, amount in self._resources.items())

    def _reserve(self, node: str) -> Any:
        return placement_group([self._resources], bundle_label_selector=[{NODE: node}])

    def _withdraw(self, node: str) -> None:
        with contextlib.suppress(*RAY_ERRORS):
            remove_placement_group(self._claims.pop(node).group)


class RayCluster:
    """Ray's implementation of `AgentCluster`."""

    def __init__(self, resources: Mapping[str, float], gang: int) -> None:
        """Request places for the first `gang` agents, without waiting until Ray assigns them."""
        self._resources, self._gang = dict(resources), gang
        self._group = placement_group([self._resources] * gang, strategy="STRICT_SPREAD")
        self._claims = NodeClaims(resources)
        self._requested = False
        self._observed = fleet.ClusterObserved((), gang)

    def observe(self, missing: int) -> fleet.ClusterObserved:
        """Return the machines now, or the last known ones if Ray gives no answer."""
        with contextlib.suppress(*RAY_ERRORS):
            self._observed = self._observe(missing)
        return self._observed

    def _observe(self, missing: int) -> fleet.ClusterObserved:
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        table = placement_group_table(self._group)
        placed: dict[str, int] = {}
        if table.get("state") in ("CREATED", "RESCHEDULING"):
            for index, node in (table.get("bundles_to_node_id") or {}).items():
                if node in nodes:
                    placed.setdefault(node, int(index))
        unplaced = self._gang - len(placed)
        others = {name: node for name, node in nodes.items() if name not in placed}
        granted = self._claims.granted(others, 0 if unplaced else missing)
        machines = tuple(
            fleet.Machine(
                id=name,
                host=node["NodeManagerAddress"],
                domain=(node.get("Labels") or {}).get(ZONE, ""),
                reserved=placed.get(name),
                room=name in granted,
            )
            for name, node in nodes.items()
        )
        return fleet.ClusterObserved(machines, unplaced)

    def start(
        self, machine: fleet.Machine, node: str, spec: str, secrets: Mapping[str, bytes]
    ) -> RemoteAgent:
        own = machine.reserved is None
        strategy = PlacementGroupSchedulingStrategy(
            self._claims.group(machine.id) if own else self._group,
            placement_group_bundle_index=machine.reserved or 0,
        )
        resources, named = self._resources.items(), ACTOR_OPTIONS
        custom = {name: amount for name, amount in resources if name not in named}
        options = {named[name]: amount for name, amount in resources if name in named}
        actor = (
            ray.remote(AgentHost)
            .options(
                **{"num_cpus": 0, **options},
                resources=custom,
                max_concurrency=THREADS,
                max_restarts=0,
                scheduling_strategy=strategy,
            )
            .remote(spec, dict(secrets))
        )
        agent = ActorAgent(node, actor)
        if own:
            self._claims.use(machine.id, agent)
        return agent

    def request_nodes(self, nodes: int) -> str:
        bundles = [self._resources] * nodes
        try:
            if ray.util.client.ray.is_connected():
                ray.get(
                    ray.remote(num_cpus=0)(request_resources).remote(bundles=bundles),
                    timeout=FINAL_LOGS_S,
                )
            else:
                request_resources(bundles=bundles)
        except RAY_ERRORS as error:
            return str(error)
        self._requested = nodes > 0
        return ""

    def close(self) -> None:
        """Release the places and withdraw the request for nodes."""
        if self._requested:
            self.request_nodes(0)
        self._claims.close()
        with contextlib.suppress(*RAY_ERRORS):
            remove_placement_group(self._group)


class ActorAgent(RemoteAgent):
    """An agent that runs in an actor of Ray."""

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
                self._finish()
        return self.returncode is not None

    def fetch(self) -> list[tuple[str, int, bytes]]:
        found, self._last = self._last, []
        if self.returncode is None:
            if self._logs is None:
                self._logs = self._actor.logs.remote(self.offsets)
            elif ray.wait([self._logs], timeout=0)[0]:
                ref, self._logs = self._logs, None
                with contextlib.suppress(exceptions.RayError):  # `ended` will report it
                    found += self._read(ref)
        return found

    def terminate(self) -> None:
        if not self.ended():
            self._actor.stop.remote()

    def kill(self) -> None:
        if not self.ended():
            self._lose(None)

    def _read(self, ref: Any, timeout_s: float = FINAL_LOGS_S) -> list[tuple[str, int, bytes]]:
        pieces: list[tuple[str, int, bytes]] = ray.get(ref, timeout=timeout_s)
        for name, offset, data in pieces:
            self.offsets[name] = offset + len(data)
        return pieces

    def _finish(self) -> None:
        """Fetch the last logs and release the machine."""
        end = time.monotonic() + FINAL_LOGS_S
        with contextlib.suppress(exceptions.RayError):
            if self._logs is not None:
                self._last += self._read(self._logs)
            while time.monotonic() < end:
                pieces = self._read(self._actor.logs.remote(self.offsets))
                self._last += pieces
                if not pieces:
                    break
            ray.get(self._actor.close.remote(), timeout=FINAL_LOGS_S)
        self._kill_actor()

    def _lose(self, error: exceptions.RayError | None) -> None:
        self.returncode, self.lost = -9, True
        self.problem = "" if error is None else _first_line(error)
        self._kill_actor()

    def _kill_actor(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError, exceptions.RayError):
            ray.kill(self._actor, no_restart=True)


def _first_line(error: exceptions.RayError) -> str:
    """Return Ray's reason for the end of an actor, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] or type(error).__name__


def _state(group: Any) -> str:
    """Return Ray's state of a placement group; CREATED: its resources are reserved."""
    return str(placement_group_table(group).get("state", ""))


def _own_host(address: str) -> str:
    """Return the address of this machine that agents can reach."""
    if address.startswith(CLIENT):
        return local_address(address.removeprefix(CLIENT))
    return str(ray.util.get_node_ip_address())
