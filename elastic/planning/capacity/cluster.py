"""The cluster file: a TOML file with a model, nodes and links, for capacity planning.

    [model]
    name = "gpt3-6.7b"          # in the catalogue; or profile = "measured.json"
    microbatches = 64
    microbatch_size = 2         # sequences
    [[nodes]]
    count = 8
    device = "A100-40"
    devices = 4                 # per node
    [links]
    inside = { bandwidth = "300GB/s" }
    link = { bandwidth = "100Gbit", latency = "10us" }

`Cluster`, `Group` and docs/guide/capacity.md list all keys and defaults. `capacity` makes planner
requests from a cluster. Nothing here reads files.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.domain.errors import FieldError
from elastic.planning.cost.catalogue import find_hardware, find_model
from elastic.planning.cost.profile import LinkProfile
from elastic.planning.plan.units import duration_of, rate_of, size_of

SCHEDULES = ("auto", "1f1b", "interleaved", "zero-bubble")
MAX_NODES = 100_000
LINKS = ("inside", "link", "across")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A number of equal nodes."""

    count: int = 1
    name: str = ""
    """Prefix of node names NAME0, NAME1, ...; "": the prefix is "node", and nodes of all such
    groups are numbered together."""
    device: str = ""
    """Device type of the catalogue or the profile; "": the profile's first."""
    devices: int = 1
    """Devices per node."""
    memory_bytes: int = 0
    """Memory that a worker may use; 0: that of the device type."""
    domain: str = ""
    lifetime_s: float = 0.0
    """Expected seconds until a node leaves; 0: unknown."""
    slow: float = 1.0
    """Factor on the times of the device type; above 1: slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Content of a cluster file."""

    model: str = ""
    """Name of a model in the catalogue; "": `profile_file` is given."""
    profile_file: str = ""
    """File with a measured profile; "": `model` is given."""
    microbatches: int
    """Micro-batches per step."""
    microbatch_size: int = 0
    """Sequences per micro-batch; 0: unknown with a measured profile, otherwise 1."""
    sequence: int = 0
    """Tokens per sequence; 0: as published, or as in the measured profile."""
    tp: int = 0
    """Workers per unit; 0: as in the measured profile, otherwise 1."""
    schedule: str = "auto"
    backup: str = "auto"
    shape: str = "auto"
    groups: tuple[Group, ...]
    inside: LinkProfile | None = None
    link: LinkProfile | None = None
    across: LinkProfile | None = None

    @property
    def n_nodes(self) -> int:
        return sum(group.count for group in self.groups)


def parse_cluster(text: str) -> Cluster:
    """Return the cluster of a cluster file. Raises FieldError with field, value and remedy."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FieldError("cluster file", text.strip()[:40], f"it is not TOML: {error}") from error
    _known("", data, ("model", "nodes", "links"))
    model, entries, links = (
        _table("model", data.get("model")),
        data.get("nodes"),
        data.get("links", {}),
    )
    if not isinstance(entries, list) or not entries:
        raise FieldError(
            "nodes", entries, "write at least one [[nodes]] table with count and device"
        )
    groups = tuple(
        _group(f"nodes[{i}]", _table(f"nodes[{i}]", entry)) for i, entry in enumerate(entries)
    )
    cluster = Cluster(groups=groups, **{**_model(model), **_links(_table("links", links))})
    _check_groups(cluster)
    return cluster


def _model(data: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("microbatches", "microbatch_size", "sequence", "tp", "schedule", "backup", "shape")
    _known("model.", data, ("name", "profile", *keys))
    name, file = (
        _word("model.name", data.get("name", "")),
        _word("model.profile", data.get("profile", "")),
    )
    if bool(name) == bool(file):
        raise FieldError("model.name", name, "give either name = MODEL or profile = FILE")
    if name:
        find_model(name)
    if file and "sequence" in data:
        raise FieldError("model.sequence", data["sequence"], "the profile fixes it; leave it out")
    if "microbatches" not in data:
        raise FieldError("model.microbatches", None, "say how many micro-batches a step has")
    found: dict[str, Any] = {"model": name, "profile_file": file}
    for key in keys[:4]:
        if key in data:
            found[key] = _whole(f"model.{key}", data[key], 1 << 20)
    for key in keys[4:]:
        if key in data:
            found[key] = _word(f"model.{key}", data[key])
    if found.get("schedule", "auto") not in SCHEDULES:
        raise FieldError("model.schedule", found["schedule"], f"one of {', '.join(SCHEDULES)}")
    return found


def _group(path: str, data: Mapping[str, Any]) -> Group:
    _known(
        f"{path}.",
        data,
        ("count", "name", "device", "devices", "memory", "domain", "lifetime", "slow"),
    )
    name = _word(f"{path}.name", data.get("name", ""))
    if name and not re.fullmatch(r"[A-Za-z0-9_.:\-]+", name):
        raise FieldError(f"{path}.name", name, "use letters, digits, and . : _ - only")
    slow = data.get("slow", 1.0)
    if isinstance(slow, bool) or not isinstance(slow, (int, float)) or not 0.01 <= slow <= 1000:
        raise FieldError(f"{path}.slow", slow, "a factor on the times, as 2.0; from 0.01 to 1000")
    return Group(
        count=_whole(f"{path}.count", data.get("count", 1), MAX_NODES),
        name=name,
        device=_word(f"{path}.device", data.get("device", "")),
        devices=_whole(f"{path}.devices", data.get("devices", 1), 1024),
        memory_bytes=size_of(f"{path}.memory", data["memory"]) if "memory" in data else 0,
        domain=_word(f"{path}.domain", data.get("domain", "")),
        lifetime_s=duration_of(f"{path}.lifetime", data.get("lifetime", 0)),
        slow=float(slow),
    )


def _check_groups(cluster: Cluster) -> None:
    """Raise FieldError if groups do not fit the model or each other."""
    if cluster.n_nodes > MAX_NODES:
        raise FieldError("nodes", cluster.n_nodes, f"at most {MAX_NODES} nodes in all")
    prefixes = [group.name for group in cluster.groups if group.name]
    for i, group in enumerate(cluster.groups):
        if group.devices < cluster.tp:
            remedy = f"a unit needs model.tp = {cluster.tp} devices of one node"
            raise FieldError(f"nodes[{i}].devices", group.devices, remedy)
        if prefixes.count(group.name) > 1 or group.name == "node":
            raise FieldError(
                f"nodes[{i}].name", group.name, "each group needs a name of its own, not node"
            )
        if group.name[-1:].isdigit():
            raise FieldError(
                f"nodes[{i}].name", group.name, "it must not end in a digit: a number follows it"
            )
        if cluster.model:
            check_name(f"nodes[{i}].device", group.device, lambda name: find_hardware(name).name)


def check_name(path: str, name: str, find: Callable[[str], object]) -> None:
    """Raise FieldError with `path` if `find` does not know the device type `name`."""
    try:
        find(name)
    except FieldError as error:
        raise FieldError(path, name, error.remedy) from error


def _links(data: Mapping[str, Any]) -> dict[str, Any]:
    _known("links.", data, LINKS)
    return {
        name: _link(f"links.{name}", _table(f"links.{name}", value)) for name, value in data.items()
    }


def _link(path: str, data: Mapping[str, Any]) -> LinkProfile:
    _known(f"{path}.", data, ("bandwidth", "latency"))
    if "bandwidth" not in data:
        raise FieldError(
            f"{path}.bandwidth", None, 'give it, as bandwidth = "25Gbit"; or leave the link out'
        )
    rate = rate_of(f"{path}.bandwidth", data["bandwidth"])
    return LinkProfile(rate, duration_of(f"{path}.latency", data.get("latency", 0)))


def _table(path: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(path, value, f"a table: [{path}] and lines of KEY = VALUE")
    return value


def _known(prefix: str, data: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key, value in data.items():
        if key not in keys:
            raise FieldError(
                f"{prefix}{key}", value, f"there is no such key; known are {', '.join(keys)}"
            )


def _whole(path: str, value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise FieldError(path, value, f"a whole number from 1 to {most}")
    return value


def _word(path: str, value: object) -> str:
    if not isinstance(value, str) or any(ord(char) < 32 for char in value):
        raise FieldError(path, value, "text on one line, in quotes")
    return value
