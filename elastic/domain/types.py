"""The nouns of the system: plans, copies, ledgers, recipes.

Everything here is a frozen dataclass of plain values, so that it can be compared, printed, stored and sent
(`elastic.domain.codec`). Micro-batch sets are `frozenset[int]` of indices 0..M-1 of one step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

STATE, GRADIENT, REDUCED, UPDATE = "state", "gradient", "reduced", "update"
"""Kinds of copies. A reduced gradient is that of a layer with shared tensors after the sum over all of their
owners: what its update takes, whatever becomes of the other owners' gradients. An update is what the optimizer takes
at last: reduced, clipped, float32; it makes version v+1 of state v without any record."""
Portion = tuple[int, int]
"""(index, of how many): which elements of every tensor of a layer's state, where holders share it (`span`)."""
WHOLE: Portion = (0, 1)
Slot = tuple[int, ...]
"""What versions are of: (layer, TP rank), or with two more numbers a portion of it."""
LOGS = ACTIVATION, COTANGENT = "activation", "cotangent"
"""Copies of what stages sent each other for one micro-batch: the input of layer `Copy.layer`, and the gradient
with respect to it."""


def slot_of(layer: int, shard: int, portion: Portion = WHOLE) -> Slot:
    return (layer, shard) if portion == WHOLE else (layer, shard, *portion)


def whole_slots(slots: Iterable[Slot]) -> set[Slot]:
    """The (layer, TP rank)s of which `slots` has the whole, or all portions of some division."""
    found = set(slots)
    return {
        slot[:2]
        for slot in found
        if len(slot) == 2 or all((*slot[:2], index, slot[3]) in found for index in range(slot[3]))
    }


class Accumulate(StrEnum):
    """How micro-batch gradients are summed."""

    FAST = "fast"
    """float32 sums; the order of additions shows in the last bits."""
    EXACT = "exact"
    """fixed-point int64 sums; free of order, so runs are bit-identical."""


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """A TP group of workers inside one node; what a stage is placed on."""

    node: str
    group: int = 0
    """Index of the TP group within its node; its workers are local ranks group*tp .. group*tp+tp-1."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous range of layers [first, last) on one unit."""

    unit: Unit
    first: int
    last: int
    recompute: bool = False
    """Keep only the stage's input from forward to backward, and run the forward pass again: memory for time."""

    @property
    def layers(self) -> range:
        return range(self.first, self.last)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages that cover all layers once, and the micro-batches that this pipeline runs in a full step.

    Under the interleaved schedule a unit takes several stages: with U units stage s lies on the unit of stage s % U.
    """

    stages: tuple[Stage, ...]
    microbatches: tuple[int, ...]
    schedule: str = "1f1b"
    """1f1b | interleaved | zero-bubble (`elastic.planning.schedule.schedule`)."""


@dataclass(frozen=True)
class Plan:
    """Who holds which layers and runs which micro-batches. Text form: `elastic.planning.plan.plan`."""

    epoch: int
    n_layers: int
    n_microbatches: int
    tp: int
    pipelines: tuple[Pipeline, ...]
    spares: tuple[str, ...] = ()
    """Nodes that hold no stage; they keep backups and wait."""
    peers: tuple[tuple[str, str], ...] = ()
    """(node, node that keeps its backups); nodes without a peer are absent."""
    gradients: str = "stream"
    """Gradient backup scheme: stream | stream:K | reduce | reduce:K | log | recompute | none
    (`elastic.planning.plan.schemes`)."""
    state: str = "snapshot"
    """State backup scheme: snapshot | replica | replay | replay:N | none; with /sharded after it the pipelines share
    the optimizer state."""
    reason: str = ""

    def stages(self) -> Iterator[tuple[int, int, Stage]]:
        """All stages as (pipeline index, stage index, stage)."""
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                yield p, s, stage

    def holders(self, layer: int) -> tuple[Unit, ...]:
        """Units that hold `layer`, one a pipeline, in pipeline order."""
        return tuple(st.unit for p in self.pipelines for st in p.stages if st.first <= layer < st.last)

    def units(self) -> tuple[Unit, ...]:
        """Every unit that holds a stage, in (pipeline, stage) order."""
        return tuple(stage.unit for _, _, stage in self.stages())

    def nodes(self) -> tuple[str, ...]:
        """Every node that holds a stage, first appearance first."""
        return self._nodes

    @functools.cached_property
    def _nodes(self) -> tuple[str, ...]:
        """Found once: with thousands of members the rules ask for it many times per second."""
        return tuple(dict.fromkeys(unit.node for unit in self.units()))

    def peer_of(self, node: str) -> str | None:
        return dict(self.peers).get(node)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What the planner must know of a layer. Bytes are those of the whole layer, before any TP split."""

    param_bytes: int
    state_bytes: int
    """Optimizer state besides the parameters (master weights included)."""
    gradient_bytes: int
    """Bytes of one accumulated gradient as it is backed up."""
    forward_s: float
    """Seconds for one micro-batch, or any figure proportional to them."""
    backward_s: float
    activation_bytes: int = 0
    """Kept from forward to backward, per micro-batch in flight."""
    output_bytes: int = 0
    """Sent to the next stage, per micro-batch."""
    backward_input_s: float = 0.0
    """The part of a backward pass that finds the input's gradient, when run by itself; 0: unknown."""
    backward_weight_s: float = 0.0
    """The part that finds the parameters' gradients, when run by itself; 0: unknown."""
    update_s: float = 0.0
    """Seconds of the optimizer's update."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a training script tells the coordinator of itself; the same from every worker."""

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
    """One whole copy of a layer's state or accumulated gradient, or of a message, as it lies in a vault.

    A copy is addressed by `key`; the vault that holds it is `node`. Only whole, checksummed copies are ever
    listed. State of version v is the state before the update of step v; a gradient's or update's `step` is the step
    that it belongs to and `microbatches` is a gradient's ledger.
    """

    kind: str
    layer: int
    shard: int
    """TP rank."""
    step: int
    epoch: int
    owner: str
    """Node whose worker made it."""
    sequence: int
    """Grows with every copy that this owner's worker makes."""
    nbytes: int
    checksum: str
    """xxh3-64 of the bytes, hexadecimal."""
    microbatches: frozenset[int] = frozenset()
    losses: tuple[tuple[int, float], ...] = ()
    """(micro-batch, loss) for those in `microbatches`; only on the last layer."""
    node: str = ""
    """Where this copy lies."""
    portion: Portion = WHOLE
    """Of a state or update."""

    @property
    def slot(self) -> Slot:
        return slot_of(self.layer, self.shard, self.portion)

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.layer}/{self.shard}/{self.step}/{self.owner}/{self.epoch}/{self.sequence}"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What an optimizer update needs besides state and gradient; the same on every worker."""

    step: int
    clip: float
    """Coefficient that the gradient is multiplied with (1.0: not clipped)."""
    grad_norm: float
    loss: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one (layer, TP rank) comes to the target version and ledger on its new holder.

    1. If the holder's live state already has version `version`: keep it. Else fetch `state`; or, when `state` is
       None, read `checkpoint`; or, without either, initialise.
    2. Apply `updates`: of the steps from the state's version on, in order, none missing.
    3. If `replay` is not empty that made version-1: add those gradients (together they hold all M micro-batches of
       step version-1) and apply the update with the step's record.
    4. The accumulator of step `version` becomes the sum of `gradients` (disjoint); its ledger their union.

    If `portions` is not empty, there is no `state` and there are no `updates`: the state is put together of what these
    recipes bring, in their order, one for each portion, all of one version.
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
        """The state that it begins with, or those of its portions."""
        return tuple(r.state for r in (self, *self.portions) if r.state is not None)


@dataclass(frozen=True, slots=True)
class PartialRun:
    """A micro-batch that only layers [first, last) run again, between two messages that were logged."""

    pipeline: int
    """Index of the pipeline whose stages do it."""
    microbatch: int
    first: int
    last: int
    inputs: tuple[Copy, ...] = ()
    """Input of layer `first`, one a TP rank; empty for layer 0, which reads the data."""
    gradients: tuple[Copy, ...] = ()
    """Gradient of the output of layer `last` - 1, one a TP rank; empty for the last layer, which gives the loss."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Everything that the workers need to enter an epoch; one and the same for all nodes."""

    plan: Plan
    step: int
    """The step to run next: every layer enters with state version `step`."""
    recipes: tuple[tuple[str, Recipe], ...] = ()
    """(node, recipe): what that node's unit holding the layer has to do; layers without a recipe initialise."""
    covered: tuple[tuple[int, frozenset[int]], ...] = ()
    """(layer, micro-batches that some holder already has for the current step)."""
    todo: tuple[tuple[int, ...], ...] = ()
    """Micro-batches to run in the current step through all layers, per pipeline; later steps follow the plan."""
    record: StepRecord | None = None
    """Record of step-1, for replays."""
    store: str = ""
    """host:port of the rendezvous store of this epoch."""
    vaults: tuple[tuple[str, str], ...] = ()
    """(node, host:port of its vault)."""
    partial: tuple[PartialRun, ...] = ()
    """What is run through some layers only, before `todo`, in this order; disjoint from it."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says of itself when it joins."""

    node: str
    incarnation: str
    """New at every start of the agent; a restarted agent is a new member."""
    vault: str
    """host:port of its vault."""
    domain: str = ""
    """Failure domain (zone, rack, spot pool); nodes with the same non-empty one fail together."""
    workers: int = 1
    memory_bytes: int = 0
    """Memory that a unit of this node may use; 0: unknown, taken as unlimited."""
    host: str = "127.0.0.1"
    labels: tuple[tuple[str, str], ...] = field(default=())
    device: str = ""
    """Type of its devices, as a profile names it; "": the profile's first."""
    lifetime_s: float = 0.0
    """Seconds that it is expected to stay; 0: unknown."""
    standing: int = 0
    """How quick its pre-flight found it, in steps of a quarter; the higher is taken first. 0: unknown."""
