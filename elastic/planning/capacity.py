"""From a cluster file to a request to the planner."""

from __future__ import annotations

import re
from dataclasses import replace
from string import ascii_lowercase

from elastic.core.types import JobSpec, NodeInfo, Plan
from elastic.errors import FieldError
from elastic.planning.catalogue import hardware_of
from elastic.planning.cluster import LINKS, Cluster, Group, check_name
from elastic.planning.profile import Profile
from elastic.planning.search import PlanRequest
from elastic.planning.zoo import zoo_profile


def cluster_profile(cluster: Cluster, measured: Profile | None = None) -> Profile:
    """The profile that the cluster's plans are made from: the measured one, or the catalogue's. Raises FieldError."""
    links = {name: link for name in LINKS if (link := getattr(cluster, name)) is not None}
    if measured is None:
        return zoo_profile(
            cluster.model,
            [group.device for group in cluster.groups],
            microbatch=cluster.microbatch_size or 1,
            tp=cluster.tp or 1,
            sequence=cluster.sequence,
            **links,
        )
    if cluster.tp not in (0, measured.tp):
        raise FieldError("model.tp", cluster.tp, f"the profile was measured with {measured.tp}; leave it out")
    for i, group in enumerate(cluster.groups):
        check_name(f"nodes[{i}].device", group.device, lambda name: measured.device(name).name)
    return replace(measured, **links)


def cluster_nodes(cluster: Cluster, profile: Profile) -> tuple[NodeInfo, ...]:
    """Every node by itself, with the device type spelled as the profile does."""
    found, number = [], 0
    for group in cluster.groups:
        device = profile.device(group.device if cluster.profile_file else hardware_of(group.device).name)
        for i in range(group.count):
            name = f"{group.name}{i}" if group.name else f"node{number}"
            number += not group.name
            found.append(
                NodeInfo(
                    name,
                    incarnation="",
                    vault="",
                    domain=group.domain,
                    workers=group.devices,
                    memory_bytes=group.memory_bytes or device.memory_bytes,
                    device=device.name,
                    lifetime_s=group.lifetime_s,
                )
            )
    return tuple(found)


def cluster_slow(cluster: Cluster, nodes: tuple[NodeInfo, ...]) -> tuple[tuple[str, float], ...]:
    """(node, factor) of the nodes that are not as fast as their type."""
    factors = [group.slow for group in cluster.groups for _ in range(group.count)]
    return tuple((info.node, factor) for info, factor in zip(nodes, factors, strict=True) if factor != 1.0)


def check_plan(plan: Plan, profile: Profile, nodes: tuple[NodeInfo, ...]) -> None:
    """Raise FieldError if a plan is not for this model and these nodes."""
    if plan.n_layers != len(profile.layers):
        remedy = f"{profile.model} has {len(profile.layers)} layers"
        raise FieldError("plan.layers", plan.n_layers, remedy)
    if plan.tp != profile.tp:
        raise FieldError("plan.tp", plan.tp, f"the cluster's units have {profile.tp} workers")
    units = {info.node: info.workers // plan.tp for info in nodes}
    for unit in plan.units():
        if unit.group >= units.get(unit.node, 0):
            known = f"{unit.node} has {units[unit.node]}" if unit.node in units else "there is no such node"
            raise FieldError("plan.unit", f"{unit.node}/{unit.group}", f"{known} in the cluster file")


def with_more(cluster: Cluster, text: str) -> Cluster:
    """The cluster with nodes added: COUNTxDEVICE or COUNTxDEVICE:DEVICES with commas between them.

    They are in the failure domain of the first group. Raises FieldError.
    """
    groups, first = list(cluster.groups), cluster.groups[0]
    for letter, word in zip(ascii_lowercase, text.split(","), strict=False):
        added = re.fullmatch(r"\s*(\d{1,5})x([^:]+?)(?::(\d{1,4}))?\s*", word)
        if not added or int(added[1]) == 0 or added[3] == "0":
            raise FieldError("--add", word, "COUNTxDEVICE, or COUNTxDEVICE:DEVICES as 2xH100:8")
        groups.append(
            Group(
                count=int(added[1]),
                name=f"new-{letter}-",
                device=added[2],
                devices=int(added[3] or first.devices),
                domain=first.domain,
            )
        )
        if cluster.model:
            check_name("--add", added[2], lambda name: hardware_of(name).name)
    return replace(cluster, groups=tuple(groups))


def check_gone(gone: frozenset[str], nodes: tuple[NodeInfo, ...]) -> None:
    """Raise FieldError for a node that is not there, or if none is left."""
    names = {info.node for info in nodes}
    for name in sorted(gone - names):
        raise FieldError("--without", name, f"there is no such node; the first is {nodes[0].node}")
    if gone == names:
        raise FieldError("--without", ",".join(sorted(gone)), "leave at least one")


def plan_request(cluster: Cluster, profile: Profile) -> PlanRequest:
    """What to ask the planner."""
    nodes = cluster_nodes(cluster, profile)
    return PlanRequest(
        spec=JobSpec(
            layers=profile.layers,
            n_microbatches=cluster.microbatches,
            n_steps=1,
            tp=cluster.tp or profile.tp,
            tokens_per_microbatch=profile.tokens_per_microbatch,
        ),
        nodes=nodes,
        epoch=1,
        shape=cluster.shape,
        backup=cluster.backup,
        profile=profile,
        slow=cluster_slow(cluster, nodes),
        schedule=cluster.schedule,
    )
