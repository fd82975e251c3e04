"""A scenario: a trace or a failure rate, a model, and a kind of cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from elastic.command_line import content_errors, unreadable
from elastic.domain.errors import FieldError
from elastic.planning.cost.catalogue import HARDWARE
from elastic.planning.cost.profile import Profile, parse_profile
from elastic_sim.steps.clusters import NodeType, TrainingSetup, node_type_of, training_of
from elastic_sim.steps.physics import physics_from_settings
from elastic_sim.steps.world import SimulatedWorld
from elastic_sim.traces import importers
from elastic_sim.traces import trace as traces
from elastic_sim.traces.generate import Market, generate
from elastic_sim.traces.trace import Trace

MOST_MICROBATCHES = 1_000_000
"""Most micro-batches per step, as for a Trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a simulation needs except policy and seed."""

    trace: str = ""
    """A file in our format, events.jsonl of a run, or a trace of Bamboo, Oobleck or Parcae. "": the
    trace is generated from `market`."""
    first_s: float = 0.0
    last_s: float = 0.0
    """Seconds of the trace at which the simulation begins and ends; `last_s` 0: the trace's end."""
    market: Market | None = None
    duration_s: float = 86400.0
    """Length of a generated trace."""
    model: str = "gpt3-6.7b"
    """Name of a model, or file of a measured profile."""
    microbatches: int = 0
    """Micro-batches per step; 0: as in `clusters.JOBS`. A measured profile needs 1 or more."""
    nodes_of: tuple[str, ...] = ("a40",)
    """Names of node types. A node has the first type if the trace names no type for it."""
    notice_s: float = -1.0
    """Seconds of notice before every loss; below 0: as in the trace."""
    physics: tuple[str, ...] = ()
    """NAME=NUMBER settings of `ClusterPhysics`."""

    def name(self) -> str:
        """Return the name of the trace for reports."""
        if self.trace:
            return Path(self.trace).name
        assert self.market is not None
        return f"mtbf {self.market.mtbf_s:g} s"

    def files(self) -> dict[str, str]:
        """Return the paths of the input files, by field (`trace`, `model`)."""
        found = {"trace": self.trace, "model": self.model if _is_file(self.model) else ""}
        return {name: path for name, path in found.items() if path}

    def trace_of(self, seed: int) -> Trace:
        """Return the trace for a seed. Raises FieldError."""
        if self.trace:
            found = _read(self.trace)
        elif self.market is not None:
            found = generate(self.market, self.duration_s, seed)
        else:
            raise FieldError("TRACE", "", "name a trace, or a failure rate with --mtbf")
        if self.first_s or self.last_s:
            end = self.last_s or found.end_s
            if not self.first_s < end <= found.end_s:
                given = f"{self.first_s:g}, {end:g}"
                raise FieldError("--from, --to", given, f"a part of 0 to {found.end_s:g} s")
            found = traces.window(found, self.first_s, end)
        if self.notice_s >= 0:
            events = tuple(
                e if e.kind == traces.ADD else replace(e, notice_s=self.notice_s)
                for e in found.events
            )
            found = replace(found, events=events)
        return found

    def world(self) -> SimulatedWorld:
        """Return the simulated world. Cached, because plans are expensive. Raises FieldError."""
        return _world(self.model, self.microbatches, self.nodes_of, self.physics)


@lru_cache(maxsize=8)
def _read(path: str) -> Trace:
    """Read a trace whose first row, or the suffix of its file, tells the format."""
    file = Path(path)
    try:
        with file.open("rb") as opened:
            head = opened.read(4096).decode("utf-8-sig", "replace")
    except (OSError, ValueError) as error:
        raise unreadable("trace", path, error) from error
    first = next(
        (line for line in head.splitlines() if line.strip() and not line.startswith("#")), ""
    )
    if first.replace(" ", "") == ",".join(traces.HEADER):
        return traces.read(file)[0]
    if file.suffix == ".jsonl":
        return importers.elastic_events(traces.read_text(file), file.name)
    if first.startswith("["):
        return importers.parcae(traces.read_text(file), file.name)
    if first.count(",") == 2 and first.split(",")[1].strip() in ("add", "remove"):
        return importers.bamboo(traces.read_text(file), file.name)
    return traces.read(file)[0]  # raises the error that names the fault


@lru_cache(maxsize=8)
def _world(
    model: str, microbatches: int, nodes_of: tuple[str, ...], physics: tuple[str, ...]
) -> SimulatedWorld:
    settings = physics_from_settings(physics)
    if not 0 <= microbatches <= MOST_MICROBATCHES:
        raise FieldError("--microbatches", microbatches, f"from 1 to {MOST_MICROBATCHES}")
    if _is_file(model):
        return _measured(Path(model), microbatches, nodes_of, settings)
    training = training_of(model)
    if microbatches:
        training = replace(training, samples=microbatches * training.microbatch)
    return SimulatedWorld(training, tuple(node_type_of(name) for name in nodes_of), settings)


def _is_file(model: str) -> bool:
    return Path(model).suffix == ".json" or "/" in model


def _measured(
    path: Path, microbatches: int, nodes_of: tuple[str, ...], settings: Any
) -> SimulatedWorld:
    """Return the world of a profile that `elastic profile` wrote.

    It has one node type. Nodes cost nothing if `nodes_of` is the default.
    """
    text = traces.read_text(path, "--model")
    with content_errors("--model", path, "a profile that `elastic profile` wrote"):
        profile: Profile = parse_profile(text)
    if not microbatches:
        remedy = "a profile does not have their number per step; name it"
        raise FieldError("--microbatches", microbatches, remedy)
    if len(profile.devices) > 1:
        names = ", ".join(device.name for device in profile.devices)
        raise FieldError("--model", str(path), f"it has several device types ({names}); keep one")
    if len(nodes_of) > 1:
        raise FieldError(
            "--nodes-of", ",".join(nodes_of), "a profile is of one node type; name one"
        )
    device = profile.devices[0].name
    kind = NodeType(
        name="profile",
        device=device,
        devices=profile.tp,
        link_bytes_per_s=profile.link.bytes_per_s * profile.tp,
        inside_bytes_per_s=0.0,
        on_demand=0.0,
        spot=0.0,
        source=str(path),
    )
    if nodes_of != Scenario().nodes_of:
        known = node_type_of(nodes_of[0])
        check_profile_matches(known, profile)
        kind = replace(kind, name=known.name, on_demand=known.on_demand, spot=known.spot)
    training = TrainingSetup(profile.model, samples=microbatches, microbatch=1, source=str(path))
    return SimulatedWorld(training, (kind,), settings, profile)


def check_profile_matches(kind: NodeType, profile: Profile) -> None:
    """Raise FieldError if the devices of a measured profile are not those of the node type."""
    if kind.devices != profile.tp:
        remedy = (
            f"its nodes have {kind.devices} devices, the profile's {profile.tp} (tp); "
            "name a type that has as many"
        )
        raise FieldError("--nodes-of", kind.name, remedy)
    device = profile.devices[0].name
    if device != kind.device and device in (one.name for one in HARDWARE):
        remedy = (
            f"its nodes have a {kind.device}, the profile is of a {device}; "
            "name a type that has one"
        )
        raise FieldError("--nodes-of", kind.name, remedy)
