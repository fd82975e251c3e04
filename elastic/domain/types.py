"""The shared nouns: plans, copies, recipes, and descriptions of jobs and nodes.

All are frozen dataclasses of plain values, so that they can be compared, printed, stored and sent
(`elastic.domain.codec`). A set of micro-batches is a `frozenset[int]` of indices 0..M-1 of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

STATE, GRADIENT, REDUCED, UPDATE = "state", "gradient", "reduced", "update"
"""Kinds of copies. A reduced gradient belongs to a layer with shared tensors and is the sum over
all their owners, so that its update needs no other gradient. An update is the optimizer's input:
reduced, clipped, float32. It turns state v into v+1 without any record."""
Portion = tuple[int, int]
"""(index, number of portions): a share of a layer's state (`elastic.domain.state_layout.span`)."""
WHOLE: Portion = (0, 1)
Slot = tuple[int, ...]
"""(layer, TP rank), or (layer, TP rank, *portion): the unit that has a version."""
LOGS = ACTIVATION, COTANGENT = "activation", "cotangent"
"""Kinds of logged messages between stages for one micro-batch: the input of layer `Copy.layer`, and
the gradient with respect to it."""


def slot_of(layer: int, shard: int, portion: Portion = WHOLE) -> Slot:
    """The slot of a layer, TP rank and portion."""
    return (layer, shard) if portion == WHOLE else (layer, shard, *portion)


def whole_slots(slots: Iterable[Slot]) -> set[Slot]:
    """Every (layer, TP rank) that `slots` has whole, or in all portions of some division."""
    found = set(slots)
    return {
        slot[:2]
        for slot in found
        if len(slot) == 2 or all((*slot[:2], index, slot[3]) in found for index in range(slot[3]))
    }


class Accumulate(StrEnum):
    """Arithmetic of gradient sums."""

    FAST = "fast"
    """float32 sums; their last bits depend on the order."""
    EXACT = "exact"
    """int64 fixed-point sums; independent of the order, so runs are bit-identical."""


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """A TP group of workers inside one node; a stage is placed on it."""

    node: str
    group: int = 0
    """Index of the TP group within its node, with local ranks group*tp .. group*tp+tp-1."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous range of layers [first, last) on one unit."""

    unit: Unit
    first: int
    last: int
    recompute: bool = False
    """Keep only the stage's input, and run the forward pass again before the backward pass."""

    @property
    def layers(self) -> range:
        return range(self.first, self.last)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages that cover all layers once, and the pipeline's micro-batches in a full step.

    In the interleaved schedule a unit has several stages: stage s lies on the unit of stage s % U,
    with U units.
    """

    stages: tuple[Stage, ...]
    microbatches: tuple[int, ...]
    schedule: str = "1f1b"
    """1f1b | interleaved | zero-bubble (`elastic.planning.schedule.schedule`)."""


@dataclass(frozen=True)
class Plan:
    """Assignment of layers and micro-batches to units. Text form: `elastic.planning.plan.plan`."""

    epoch: int
    n_layers: int
    n_microbatches: int
    tp: int
    pipelines: tuple[Pipeline, ...]
    spares: tuple[str, ...] = ()
    """Nodes without a stage; they keep backups and wait."""
    peers: tuple[tuple[str, str], ...] = ()
    """(node, its peer, which keeps its backups); nodes without a peer are absent."""
    gradients: str = "stream"
    """Gradient backup scheme: stream | stream:K | reduce | reduce:K | log | recompute | none
    (`elastic.planning.plan.schemes`)."""
    state: str = "snapshot"
    """State backup scheme: snapshot | replica | replay | replay:N | none. With the suffix /sharded
    the pipelines share the optimizer state."""
    reason: str = ""

    def stages(self) -> Iterator[tuple[int, int, Stage]]:
        """All stages as (pipeline index, stage index, stage)."""
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                yield p, s, stage

    def holders(self, layer: int) -> tuple[Unit, ...]:
        """Units that hold `layer`, one per pipeline, in pipeline order."""
        stages = (stage for pipeline in self.pipelines for stage in pipeline.stages)
        return tuple(st.unit for st in stages if st.first <= layer < st.last)

    def units(self) -> tuple[Unit, ...]:
        """Every unit that holds a stage, in (pipeline, stage) order."""
        return tuple(stage.unit for _, _, stage in self.stages())

    def nodes(self) -> tuple[str, ...]:
        """Every node that holds a stage, in order of appearance."""
        return self._nodes

    @functools.cached_property
    def _nodes(self) -> tuple[str, ...]:
        """Cached: with thousands of members, rules ask for it many times per second."""
        return tuple(dict.fromkeys(unit.node for unit in self.units()))

    @functools.cached_property
    def stages_by_unit(self) -> dict[Unit, list[tuple[int, Stage]]]:
        """(pipeline index, stage) of each unit. Cached: every heartbeat needs it."""
        found: dict[Unit, list[tuple[int, Stage]]] = {}
        for p, _, stage in self.stages():
            found.setdefault(stage.unit, []).append((p, stage))
        return found

    @functools.cached_property
    def alike(self) -> dict[str, list[str]]:
        """Node: all nodes with exactly its layers, itself included. Cached likewise."""
        layers: dict[str, list[tuple[int, int]]] = {}
        for _, _, stage in self.stages():
            layers.setdefault(stage.unit.node, []).append((stage.first, stage.last))
        groups: dict[tuple[tuple[int, int], ...], list[str]] = {}
        for node, ranges in layers.items():
            groups.setdefault(tuple(ranges), []).append(node)
        return {node: group for group in groups.values() for node in group}

    def peer_of(self, node: str) -> str | None:
        """The node that keeps the backups of `node`, if there is one."""
        return dict(self.peers).get(node)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Costs of a layer for the planner. Bytes are of the whole layer, before any TP split."""

    param_bytes: int
    state_bytes: int
    """Optimizer state besides the parameters (master weights included)."""
    gradient_bytes: int
    """Bytes of one accumulated gradient in a backup."""
    forward_s: float
    """Seconds per micro-batch, or any figure proportional to them."""
    backward_s: float
    activation_bytes: int = 0
    """Bytes kept from forward to backward, per micro-batch in flight."""
    output_bytes: int = 0
    """Bytes sent to the next stage, per micro-batch."""
    backward_input_s: float = 0.0
    """Seconds of the part of the backward pass for the input's gradient, run alone; 0: unknown."""
    backward_weight_s: float = 0.0
    """Seconds of the part for the parameters' gradients, run alone; 0: unknown."""
    update_s: float = 0.0
    """Seconds of the optimizer's update."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Description of a training script; equal on every worker."""

    layers: tuple[LayerSpec, ...]
    n_microbatches: int
    n_steps: int
    tp: int = 1
    seed: int = 0
    tokens_per_microbatch: int = 0
    tied: tuple[tuple[int, int], ...] = ()
    """Pairs of layers that share a tensor."""
    checkpoint_every: int = 0
    """Steps between durable checkpoints; 0: none."""
    everywhere_the_same: ClassVar[bool] = True

    @property
    def n_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class Copy:
    """One whole copy in a vault: a layer's state, gradient or update, or a logged message.

    `key` is its address. Only whole, checksummed copies are ever listed.
    """

    kind: str
    layer: int
    shard: int
    """TP rank."""
    step: int
    """For a state its version v, the state before the update of step v; else the step."""
    epoch: int
    owner: str
    """Node of the worker that made it."""
    sequence: int
    """Grows with every copy that this owner's worker makes."""
    nbytes: int
    checksum: str
    """xxh3-64 of the bytes, hexadecimal."""
    microbatches: frozenset[int] = frozenset()
    """A gradient's ledger, or the micro-batches of logged messages."""
    losses: tuple[tuple[int, float], ...] = ()
    """(micro-batch, loss) for `microbatches`; only on the last layer."""
    node: str = ""
    """Node of the vault that holds it."""
    portion: Portion = WHOLE
    """Portion of a state or update."""

    @property
    def slot(self) -> Slot:
        return slot_of(self.layer, self.shard, self.portion)

    @property
    def key(self) -> str:
        made = f"{self.owner}/{self.epoch}/{self.sequence}"
        return f"{self.kind}/{self.layer}/{self.shard}/{self.step}/{made}"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Inputs of an optimizer update besides state and gradient; equal on every worker."""

    step: int
    clip: float
    """Factor of the gradient; 1.0: not clipped."""
    grad_norm: float
    loss: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """Instructions that bring one (layer, TP rank) to the target version on its new holder.

    1. If the holder's live state has version `version`, keep it. Else fetch `state`; without it
       read `checkpoint`; without either initialise.
    2. Apply `updates`, for the steps from the state's version on, in order, none missing.
    3. If `replay` is not empty, the state is now at version-1. Add those gradients, which together
       hold all M micro-batches of step version-1, and apply the update with the step's record.
    4. The accumulator of step `version` is the sum of `gradients`; its ledger is their union.

    If `portions` is not empty, `state` and `updates` are empty: the state is joined from the
    results of these recipes, one per portion in order, all of one version.
    """

    layer: int
    shard: int
    version: int
    state: Copy | None = None
    replay: tuple[Copy, ...] = ()
    gradients: tuple[Copy, ...] = ()
    checkpoint: str = ""
    updates: tuple[Copy, ...] = ()
    portions: tuple[Recipe, ...] = ()

    @property
    def states(self) -> tuple[Copy, ...]:
        """The state that it starts from, or those of its portions."""
        return tuple(r.state for r in (self, *self.portions) if r.state is not None)


@dataclass(frozen=True, slots=True)
class PartialRun:
    """A micro-batch that only layers [first, last) run again, between two logged messages."""

    pipeline: int
    """Index of the pipeline that runs it."""
    microbatch: int
    first: int
    last: int
    inputs: tuple[Copy, ...] = ()
    """Input of layer `first`, one per TP rank; empty for layer 0, which reads the data."""
    gradients: tuple[Copy, ...] = ()
    """Gradient of the output of layer `last` - 1, one per TP rank; empty for the last layer."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Everything that workers need to enter an epoch; equal for all nodes."""

    plan: Plan
    step: int
    """The step to run next: every layer enters with state version `step`."""
    recipes: tuple[tuple[str, Recipe], ...] = ()
    """(node, recipe) for the node's unit with the layer; layers without a recipe initialise."""
    covered: tuple[tuple[int, frozenset[int]], ...] = ()
    """(layer, micro-batches of the current step that some holder has)."""
    todo: tuple[tuple[int, ...], ...] = ()
    """Micro-batches of the current step that run through all layers, per pipeline."""
    record: StepRecord | None = None
    """Record of the step before, for replays."""
    store: str = ""
    """host:port of the rendezvous store of this epoch."""
    vaults: tuple[tuple[str, str], ...] = ()
    """(node, host:port of its vault)."""
    partial: tuple[PartialRun, ...] = ()
    """Runs through some layers only, before `todo` and in this order; disjoint from it."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Description of a node that joins."""

    node: str
    incarnation: str
    """Unique per start of the agent; a restarted agent is a new member."""
    vault: str
    """host:port of its vault."""
    domain: str = ""
    """Failure domain (zone, rack, spot pool): its nodes may fail together; "": unknown."""
    workers: int = 1
    memory_bytes: int = 0
    """Memory that a unit of this node may use; 0: unknown, treated as unlimited."""
    host: str = "127.0.0.1"
    labels: tuple[tuple[str, str], ...] = ()
    device: str = ""
    """Device type as a profile names it; "": the profile's first."""
    lifetime_s: float = 0.0
    """Expected remaining lifetime in seconds; 0: unknown."""
    standing: int = 0
    """Speed class from the pre-flight, in steps of a quarter; higher is preferred, 0 is unknown."""
