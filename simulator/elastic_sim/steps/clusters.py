"""What is trained on what: jobs with their batches, node types with their devices, links and prices.

Times come from `elastic.planning.cost.published_profiles` (public sizes and rates), unless a measured profile is given. Prices are list
prices of us-east-1 in dollars an hour; spot prices are what they were when the traces were recorded, or a typical
share of the list price where that is said.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.domain.errors import FieldError
from elastic.planning.cost.profile import LinkProfile

LATENCY_S = 50e-6
"""Between nodes of a cloud (assumed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """A machine that can be rented."""

    name: str
    device: str
    """As `elastic.planning.cost.catalogue` names it."""
    devices: int = 1
    """They form one unit: tensor parallelism inside a node."""
    link_bytes_per_s: float
    """Between nodes, all devices of a node together."""
    inside_bytes_per_s: float = 0.0
    """Between devices of a node; 0: there is only one."""
    on_demand: float
    """Dollars an hour."""
    spot: float
    source: str

    @property
    def link(self) -> LinkProfile:
        """Of one device: its share."""
        return LinkProfile(self.link_bytes_per_s / self.devices, LATENCY_S)

    @property
    def inside(self) -> LinkProfile:
        return LinkProfile(self.inside_bytes_per_s, 5e-6) if self.inside_bytes_per_s else LinkProfile()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A job."""

    model: str
    samples: int
    """Sequences of a step."""
    microbatch: int
    """Sequences of a micro-batch."""
    source: str

    @property
    def microbatches(self) -> int:
        return self.samples // self.microbatch


def _gbit(rate: float) -> float:
    return rate * 1e9 / 8


_ARTIFACT = "Oobleck's artifact (SOSP 2023): samples a step; micro-batch assumed"
_LLAMA = "Grattafiori et al. 2024, section 3.4.1: tokens a step (8k sequences); micro-batch of one sequence"
JOBS = (
    Training(model="bert-large", samples=8192, microbatch=32, source=_ARTIFACT),
    Training(model="gpt2", samples=1024, microbatch=8, source=_ARTIFACT),
    Training(model="gpt3-medium", samples=819, microbatch=7, source=_ARTIFACT),
    Training(model="gpt3-2.7b", samples=512, microbatch=4, source=_ARTIFACT),
    Training(model="gpt3-6.7b", samples=1024, microbatch=4, source=_ARTIFACT),
    Training(model="llama3-8b", samples=512, microbatch=1, source="4M tokens a step (assumed)"),
    Training(model="llama3-70b", samples=2048, microbatch=1, source=_LLAMA),
    Training(model="llama3-405b", samples=2048, microbatch=1, source=_LLAMA),
)

_AWS = "AWS list price, us-east-1; network bandwidth of the instance type"
_SHARE = "; spot taken as 35 % of it"
NODE_TYPES = (
    NodeType(
        name="p3.2xlarge",
        device="V100",
        link_bytes_per_s=_gbit(10),
        on_demand=3.06,
        spot=0.91,
        source="AWS; spot as in Oobleck's artifact; 'up to 10 Gbit/s'",
    ),
    NodeType(
        name="g4dn.xlarge",
        device="T4",
        link_bytes_per_s=_gbit(25),
        on_demand=0.526,
        spot=0.158,
        source="AWS; spot at 30 %; 'up to 25 Gbit/s'",
    ),
    NodeType(
        name="a40",
        device="A40",
        link_bytes_per_s=_gbit(10),
        on_demand=3.06,
        spot=0.91,
        source="one device a node as in Oobleck's artifact, and its prices; the link as p3.2xlarge's",
    ),
    NodeType(
        name="g6e.12xlarge",
        device="L40S",
        devices=4,
        link_bytes_per_s=_gbit(100),
        inside_bytes_per_s=25e9,
        on_demand=10.49,
        spot=3.67,
        source=_AWS + _SHARE,
    ),
    NodeType(
        name="p4d.24xlarge",
        device="A100-40",
        devices=8,
        link_bytes_per_s=_gbit(400),
        inside_bytes_per_s=300e9,
        on_demand=32.77,
        spot=11.47,
        source=_AWS + _SHARE,
    ),
    NodeType(
        name="p4de.24xlarge",
        device="A100-80",
        devices=8,
        link_bytes_per_s=_gbit(400),
        inside_bytes_per_s=300e9,
        on_demand=40.97,
        spot=14.34,
        source=_AWS + _SHARE,
    ),
    NodeType(
        name="p5.48xlarge",
        device="H100",
        devices=8,
        link_bytes_per_s=_gbit(3200),
        inside_bytes_per_s=450e9,
        on_demand=98.32,
        spot=34.41,
        source=_AWS + _SHARE,
    ),
)


def training_of(model: str) -> Training:
    """The job of a model. Raises FieldError."""
    found = next((job for job in JOBS if job.model == model), None)
    if found is None:
        remedy = f"one of {', '.join(job.model for job in JOBS)}; or the file of a measured profile"
        raise FieldError("--model", model, remedy)
    return found


def node_type_of(name: str) -> NodeType:
    """A node type. Raises FieldError."""
    found = next((kind for kind in NODE_TYPES if kind.name == name), None)
    if found is None:
        raise FieldError("--nodes-of", name, f"one of {', '.join(kind.name for kind in NODE_TYPES)}")
    return found
