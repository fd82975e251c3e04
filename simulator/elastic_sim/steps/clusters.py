"""Catalogue of simulated jobs and node types, with batches, devices, links and prices.

Compute times come from `elastic.planning.cost.published_profiles` (public sizes and rates), unless
a measured profile is given. Prices are list prices of us-east-1 in dollars per hour. Spot prices
are those at the time of the recorded traces, or a typical share of the list price if `source` says
so."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.domain.errors import FieldError
from elastic.planning.cost.profile import LinkProfile

LATENCY_S = 50e-6
"""Seconds of latency between two nodes of a cloud (assumed)."""


@dataclass(frozen=True, slots=True)
class NodeType:
    """A kind of machine that can be rented."""

    name: str
    device: str
    """Name of the device in `elastic.planning.cost.catalogue`."""
    devices: int
    """Number of devices of a node. They form one unit (tensor parallelism)."""
    link_bytes_per_s: float
    """Bandwidth of a node to other nodes, shared by all its devices."""
    inside_bytes_per_s: float
    """Bandwidth between the devices of a node; 0: the node has one device."""
    on_demand: float
    """On-demand price in dollars per hour."""
    spot: float
    """Spot price in dollars per hour."""
    source: str

    @property
    def link(self) -> LinkProfile:
        """Link of one device: its share of the node's bandwidth."""
        return LinkProfile(self.link_bytes_per_s / self.devices, LATENCY_S)

    @property
    def inside(self) -> LinkProfile:
        return (
            LinkProfile(self.inside_bytes_per_s, 5e-6) if self.inside_bytes_per_s else LinkProfile()
        )


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """A model with the sizes of its batches and micro-batches."""

    model: str
    samples: int
    """Sequences per step."""
    microbatch: int
    """Sequences per micro-batch."""
    source: str

    @property
    def microbatches(self) -> int:
        return self.samples // self.microbatch


_ARTIFACT = "Oobleck's artifact (SOSP 2023): samples per step; micro-batch assumed"
_LLAMA = (
    "Grattafiori et al. 2024, section 3.4.1: tokens per step (8k sequences); "
    "micro-batch of one sequence"
)
JOBS = (
    TrainingSetup("bert-large", 8192, 32, _ARTIFACT),
    TrainingSetup("gpt2", 1024, 8, _ARTIFACT),
    TrainingSetup("gpt3-medium", 819, 7, _ARTIFACT),
    TrainingSetup("gpt3-2.7b", 512, 4, _ARTIFACT),
    TrainingSetup("gpt3-6.7b", 1024, 4, _ARTIFACT),
    TrainingSetup("llama3-8b", 512, 1, "4M tokens per step (assumed)"),
    TrainingSetup("llama3-70b", 2048, 1, _LLAMA),
    TrainingSetup("llama3-405b", 2048, 1, _LLAMA),
)

_AWS = "AWS list price, us-east-1; network bandwidth of the instance type; spot taken as 35 % of it"


NODE_TYPES = (
    NodeType("p3.2xlarge", "V100", 1, 1.25e9, 0.0, 3.06, 0.91,
             "AWS; spot as in Oobleck's artifact; 'up to 10 Gbit/s'"),
    NodeType("g4dn.xlarge", "T4", 1, 3.125e9, 0.0, 0.526, 0.158,
             "AWS; spot at 30 %; 'up to 25 Gbit/s'"),
    NodeType("a40", "A40", 1, 1.25e9, 0.0, 3.06, 0.91,
             "one device per node and prices as in Oobleck's artifact; the link as p3.2xlarge's"),
    NodeType("g6e.12xlarge", "L40S", 4, 12.5e9, 25e9, 10.49, 3.67, _AWS),
    NodeType("p4d.24xlarge", "A100-40", 8, 50e9, 300e9, 32.77, 11.47, _AWS),
    NodeType("p4de.24xlarge", "A100-80", 8, 50e9, 300e9, 40.97, 14.34, _AWS),
    NodeType("p5.48xlarge", "H100", 8, 400e9, 450e9, 98.32, 34.41, _AWS),
)  # fmt: skip


def training_of(model: str) -> TrainingSetup:
    """Return the job with this model. Raises FieldError if the name is unknown."""
    for job in JOBS:
        if job.model == model:
            return job
    remedy = f"one of {', '.join(job.model for job in JOBS)}; or the file of a measured profile"
    raise FieldError("--model", model, remedy)


def node_type_of(name: str) -> NodeType:
    """Return the node type of this name. Raises FieldError if the name is unknown."""
    for kind in NODE_TYPES:
        if kind.name == name:
            return kind
    raise FieldError("--nodes-of", name, f"one of {', '.join(kind.name for kind in NODE_TYPES)}")
