"""Planner requests from a cluster file, and alternatives to a plan."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from math import inf
from string import ascii_lowercase
from typing import Any

from elastic.domain.errors import FieldError, InfeasiblePlan
from elastic.domain.types import JobSpec, NodeInfo, Plan
from elastic.planning.capacity.cluster import LINKS, Cluster, Group, check_name
from elastic.planning.cost.catalogue import find_hardware
from elastic.planning.cost.predict import predict
from elastic.planning.cost.profile import Profile
from elastic.planning.cost.published_profiles import published_profile
from elastic.planning.schedule.schedule import SCHEDULES, units_of
from elastic.planning.search.search import PlanRequest, make_plan


def cluster_profile(cluster: Cluster, measured: Profile | None = None) -> Profile:
    """Return the cluster's profile: the measured one, or one from the catalogue.

    Links of the cluster file replace those of the profile. Raises FieldError for unusable values.
    """
    links = {name: link for name in LINKS if (link := getattr(cluster, name)) is not None}
    if measured is None:
        return published_profile(
            cluster.model,
            [group.device for group in cluster.groups],
            microbatch=cluster.microbatch_size or 1,
            tp=cluster.tp or 1,
            sequence=cluster.sequence,
            **links,
        )
    if cluster.tp not in (0, measured.tp):
        raise FieldError(
            "model.tp", cluster.tp, f"the profile was measured with {measured.tp}; leave it out"
        )
    for i, group in enumerate(cluster.groups):
        check_name(f"nodes[{i}].device", group.device, lambda name: measured.device(name).name)
    return replace(measured, **links)


def cluster_nodes(cluster: Cluster, profile: Profile) -> tuple[NodeInfo, ...]:
    """Return all nodes of all groups, with device types spelled as in the profile."""
    found, number = [], 0
    for group in cluster.groups:
        device = profile.device(
            group.device if cluster.profile_file else find_hardware(group.device).name
        )
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
    """Return (node, slow factor) of the nodes whose factor is not 1."""
    factors = [group.slow for group in cluster.groups for _ in range(group.count)]
    return tuple(
        (info.node, factor) for info, factor in zip(nodes, factors, strict=True) if factor != 1.0
    )


def check_plan(plan: Plan, profile: Profile, nodes: tuple[NodeInfo, ...]) -> None:
    """Raise FieldError if the plan does not fit this model or these nodes."""
    if plan.n_layers != len(profile.layers):
        remedy = f"{profile.model} has {len(profile.layers)} layers"
        raise FieldError("plan.layers", plan.n_layers, remedy)
    if plan.tp != profile.tp:
        raise FieldError("plan.tp", plan.tp, f"the cluster's units have {profile.tp} workers")
    units = {info.node: info.workers // plan.tp for info in nodes}
    for unit in plan.units():
        if unit.group >= units.get(unit.node, 0):
            known = (
                f"{unit.node} has {units[unit.node]}"
                if unit.node in units
                else "there is no such node"
            )
            raise FieldError(
                "plan.unit", f"{unit.node}/{unit.group}", f"{known} in the cluster file"
            )


def with_more(cluster: Cluster, text: str) -> Cluster:
    """Return the cluster with nodes added: COUNTxDEVICE or COUNTxDEVICE:DEVICES, comma-separated.

    New nodes are in the failure domain of the first group. Raises FieldError.
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
            check_name("--add", added[2], lambda name: find_hardware(name).name)
    return replace(cluster, groups=tuple(groups))


def check_gone(gone: frozenset[str], nodes: tuple[NodeInfo, ...]) -> None:
    """Raise FieldError if a removed node does not exist, or if no node is left."""
    names = {info.node for info in nodes}
    for name in sorted(gone - names):
        raise FieldError("--without", name, f"there is no such node; the first is {nodes[0].node}")
    if gone == names:
        raise FieldError("--without", ",".join(sorted(gone)), "leave at least one")


def plan_request(cluster: Cluster, profile: Profile) -> PlanRequest:
    """Return the request to plan the job of the cluster file on all of its nodes."""
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


def alternatives(request: PlanRequest, best: Plan) -> tuple[tuple[str, float], ...]:
    """Return (description, predicted seconds per step) of other plans, the fastest first.

    They have another number of pipelines or another schedule, unless the request fixes these.
    Seconds are inf if memory is short.
    """
    asked: list[dict[str, Any]] = []
    if request.shape == "auto":
        k = len(best.pipelines)
        counts = sorted({1, k // 2, k - 1, k + 1, 2 * k} - {0, k})
        asked += [{"shape": str(count)} for count in counts if count <= len(request.nodes)]
    if request.schedule == "auto":
        used = {pipeline.schedule for pipeline in best.pipelines}
        asked += [{"schedule": name} for name in SCHEDULES if used != {name}]
    found = {}
    for change in asked:
        what = f"shape {change['shape']}" if "shape" in change else change["schedule"]
        try:
            plan = make_plan(replace(request, **change))
        except InfeasiblePlan:
            found[what] = inf
        else:
            if "shape" not in change or len(plan.pipelines) == int(change["shape"]):
                found[_describe(plan)] = predicted(request, plan)
    return tuple(
        sorted(
            ((what, s) for what, s in found.items() if what != _describe(best)),
            key=lambda item: item[1],
        )
    )


def predicted(request: PlanRequest, plan: Plan) -> float:
    """Return the predicted seconds per step of a plan on the request's nodes."""
    assert request.profile is not None, "requests of a cluster file have a profile"
    return predict(plan, request.profile, request.nodes, request.slow).step_s


def _describe(plan: Plan) -> str:
    """Return the shape and schedules of a plan in words."""
    depths = Counter(len(units_of(pipeline)) for pipeline in plan.pipelines)
    shape = " + ".join(
        f"{count} of depth {depth}" for depth, count in sorted(depths.items(), reverse=True)
    )
    schedules = ", ".join(sorted({pipeline.schedule for pipeline in plan.pipelines}))
    if len(plan.pipelines) == 1:
        return f"1 pipeline {shape[2:]}; {schedules}"
    return f"{len(plan.pipelines)} pipelines: {shape}; {schedules}"
