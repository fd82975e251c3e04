"""The shared types: plans, copies, recipes, and descriptions of jobs and nodes.

They are frozen dataclasses of plain values, so that they can be compared, printed, stored and sent
(`elastic.domain.codec`). A micro-batch is an index from 0 to M-1 of a step with M micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

STATE, GRADIENT, REDUCED, UPDATE = "state", "gradient", "reduced", "update"
"""Kinds of copies. A reduced gradient of a layer that shares a tensor is the sum over all layers
that share it, so that the layer's update needs no other gradient. An update is the optimizer's
input (reduced and clipped gradient, float32). It turns state v into v+1 without a step record."""
Portion = tuple[int, int]
"""(index, number of portions) of a portion of a layer's state (`elastic.domain.state_layout`)."""
WHOLE: Portion = (0, 1)
Slot = tuple[int, ...]
"""(layer, TP rank), or (layer, TP rank, *portion): identifies a state that has a version."""
LOGS = ACTIVATION, COTANGENT = "activation", "cotangent"
"""Kinds of logged messages between stages for one micro-batch: the input of layer `Copy.layer`, and
the gradient of the loss with respect to this input."""


def slot_of(layer: int, shard: int, portion: Portion = WHOLE) -> Slot:
    """Return the slot of a layer, TP rank and portion."""
    return (layer, shard) if portion == WHOLE else (layer, shard, *portion)


def whole_slots(slots: Iterable[Slot]) -> set[Slot]:
    """Return every (layer, TP rank) that is whole in `slots`, or has all portions there."""
    found = set(slots)
    return {
        slot[:2]
        for slot in found
        if len(slot) == 2 or all((*slot[:2], index, slot[3]) in found for index in range(slot[3]))
    }


VERIFY_EVERY = 1
"""Default of the steps between two comparisons of the parameters of a layer's holders."""


class OnNonfinite(StrEnum):
    """Action in a step whose gradient norm is infinite or NaN."""

    STOP = "stop"
    """End the job before the update."""
    SKIP = "skip"
    """Leave the update out. The step counts, and all workers do the same."""
    CONTINUE = "continue"
    """Update as in every other step."""


class Accumulate(StrEnum):
    """Arithmetic of gradient sums."""

    FAST = "fast"
    """float32 sums, whose last bits depend on the order of additions."""
    EXACT = "exact"
    """int64 fixed-point sums, which do not depend on the order, so that runs are bit-identical."""


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """A TP group of workers on one node. A stage runs on one unit."""

    node: str
    group: int = 0
    """Index of the TP group on its node. Its local ranks are group*tp .. group*tp+tp-1."""

    @property
    def name(self) -> str:
        """Name of a holder: that of its node, with the group if it is not the first one."""
        return f"{self.node}/{self.group}" if self.group else self.node


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

    In the interleaved schedule each of U units has several stages: stage s runs on the unit of
    stage s % U.
    """

    stages: tuple[Stage, ...]
    microbatches: tuple[int, ...]
    schedule: str = "1f1b"
    """1f1b | interleaved | zero-bubble (`elastic.planning.schedule.schedule`)."""


@dataclass(frozen=True)
class Plan:
    """Assignment of layers and micro-batches to units (as text: `elastic.planning.plan.plan`)."""

    epoch: int
    n_layers: int
    n_microbatches: int
    tp: int
    pipelines: tuple[Pipeline, ...]
    spares: tuple[str, ...] = ()
    """Nodes without a stage."""
    peers: tuple[tuple[str, str], ...] = ()
    """(node, its peer); nodes without a peer are absent."""
    gradients: str = "stream"
    """Gradient backup scheme: stream | stream:K | reduce | reduce:K | log | recompute | none
    (`elastic.planning.plan.schemes`)."""
    state: str = "snapshot"
    """State backup scheme: snapshot | replica | replay | replay:N | none. With the suffix /sharded
    the pipelines share the optimizer state."""
    reason: str = ""

    def stages(self) -> Iterator[tuple[int, int, Stage]]:
        """Yield all stages as (pipeline index, stage index, stage)."""
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                yield p, s, stage

    def holders(self, layer: int) -> tuple[Unit, ...]:
        """Return the units that hold `layer`, one per pipeline, in the order of pipelines."""
        return self._holders.get(layer, ())

    @functools.cached_property
    def _holders(self) -> dict[int, tuple[Unit, ...]]:
        """Result of `holders` by layer, cached because a recovery needs it for every layer."""
        found: dict[int, list[Unit]] = {}
        for _, _, stage in self.stages():
            for layer in stage.layers:
                found.setdefault(layer, []).append(stage.unit)
        return {layer: tuple(units) for layer, units in found.items()}

    def units(self) -> tuple[Unit, ...]:
        """Return the unit of every stage, in the order of (pipeline, stage)."""
        return tuple(stage.unit for _, _, stage in self.stages())

    def nodes(self) -> tuple[str, ...]:
        """Return every node that holds a stage, in order of first appearance."""
        return self._nodes

    @functools.cached_property
    def _nodes(self) -> tuple[str, ...]:
        """Result of `nodes`, cached because rules need it many times per second."""
        return tuple(dict.fromkeys(unit.node for unit in self.units()))

    @functools.cached_property
    def stages_by_unit(self) -> dict[Unit, list[tuple[int, Stage]]]:
        """(pipeline index, stage) of each unit, cached because every heartbeat needs it."""
        found: dict[Unit, list[tuple[int, Stage]]] = {}
        for p, _, stage in self.stages():
            found.setdefault(stage.unit, []).append((p, stage))
        return found

    @functools.cached_property
    def alike(self) -> dict[str, list[str]]:
        """For each node: all nodes with exactly the same layers, itself included."""
        layers: dict[str, list[tuple[int, int]]] = {}
        for _, _, stage in self.stages():
            layers.setdefault(stage.unit.node, []).append((stage.first, stage.last))
        groups: dict[tuple[tuple[int, int], ...], list[str]] = {}
        for node, ranges in layers.items():
            groups.setdefault(tuple(ranges), []).append(node)
        return {node: group for group in groups.values() for node in group}

    def peer_of(self, node: str) -> str | None:
        """Return the peer of `node`, which keeps its copies. None: it has no peer."""
        return dict(self.peers).get(node)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Costs of a layer for the planner. Bytes are of the whole layer, before any TP split."""

    param_bytes: int
    """Bytes of the parameters that are trained."""
    state_bytes: int
    """Bytes of the optimizer state and master weights, without the parameters."""
    gradient_bytes: int
    """Bytes of a copy of the gradient sum."""
    forward_s: float
    """Seconds per micro-batch. All times may instead be figures proportional to seconds."""
    backward_s: float
    activation_bytes: int = 0
    """Bytes kept from the forward to the backward pass, per micro-batch in flight."""
    output_bytes: int = 0
    """Bytes sent to the next stage, per micro-batch."""
    backward_input_s: float = 0.0
    """Time of the backward pass if it computes only the input's gradient; 0: unknown."""
    backward_weight_s: float = 0.0
    """Time of the backward pass if it computes only the parameters' gradients; 0: unknown."""
    update_s: float = 0.0
    """Time of the optimizer's update."""
    frozen_bytes: int = 0
    """Bytes of the frozen parameters. No copy has them, and no transfer."""

    @property
    def held_bytes(self) -> int:
        """Bytes that a holder of the layer needs, without activations."""
        return self.param_bytes + self.frozen_bytes + self.state_bytes + self.gradient_bytes


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Description of the training job by its script; equal on every worker."""

    layers: tuple[LayerSpec, ...]
    n_microbatches: int
    n_steps: int
    tp: int = 1
    seed: int = 0
    tokens_per_microbatch: int = 0
    tied: tuple[tuple[int, int], ...] = ()
    """Pairs of layers that share a tensor."""
    checkpoint_every: int = 0
    """Number of steps between durable checkpoints; 0: no checkpoints."""
    evaluate_every: int = 0
    """Number of steps between evaluations; 0: no evaluations."""
    evaluation_microbatches: int = 0
    """Micro-batches of an evaluation."""
    contents: tuple[str, ...] = ()
    """Per layer, its parameters as a short text; (): unknown. Checkpoints are compared by it."""
    optimizer: str = ""
    """Optimizer and its state as a short text; "": unknown. The former version has neither this
    field nor `contents`."""
    flops_per_microbatch: float = 0.0
    """Floating-point operations of the forward and the backward pass of a micro-batch, without
    recomputation; 0: unknown."""
    everywhere_the_same: ClassVar[bool] = True
    """All nodes send an equal value, so that one check of it is enough."""

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def evaluates(self, version: int) -> bool:
        """Return whether the parameters after `version` steps are evaluated."""
        if not self.evaluate_every or version <= 0:
            return False
        return version % self.evaluate_every == 0 or version == self.n_steps

    def joined(self, other: JobSpec) -> JobSpec | None:
        """Return what both descriptions tell about one job, or None if they are of two jobs. What
        one of them does not tell is taken from the other."""
        if self == other:
            return self
        mine, theirs = _completed(self, other), _completed(other, self)
        return mine if mine == theirs else None


def _completed(spec: JobSpec, other: JobSpec) -> JobSpec:
    """Return `spec` with the fields that it does not tell from `other`. The former version tells
    neither contents and optimizer nor evaluations and operations."""
    contents, optimizer = spec.contents or other.contents, spec.optimizer or other.optimizer
    flops = spec.flops_per_microbatch or other.flops_per_microbatch
    if not (spec.contents or spec.optimizer):
        spec = replace(
            spec,
            evaluate_every=other.evaluate_every,
            evaluation_microbatches=other.evaluation_microbatches,
        )
    return replace(spec, contents=contents, optimizer=optimizer, flops_per_microbatch=flops)


@dataclass(frozen=True, slots=True)
class SavedModel:
    """Description of the model in a durable checkpoint."""

    path: str
    n_layers: int
    contents: tuple[str, ...] = ()
    """As `JobSpec.contents`; (): the checkpoint does not tell."""
    optimizer: str = ""
    """As `JobSpec.optimizer`; "": the checkpoint does not tell."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Description of one whole copy in a vault: a layer's state, gradient or update, or a logged
    message. `key` is its address in the vault."""

    kind: str
    layer: int
    shard: int
    """TP rank."""
    step: int
    """Version of a state; of other kinds the step."""
    epoch: int
    owner: str
    """Node of the worker that made the copy."""
    sequence: int
    """Number of the copy; it grows with every copy that the worker makes."""
    nbytes: int
    checksum: str
    """Checksum of the bytes and of this description (`elastic.domain.checksum`)."""
    microbatches: frozenset[int] = frozenset()
    """Ledger of a gradient, or micro-batches of logged messages."""
    losses: tuple[tuple[int, float], ...] = ()
    """(micro-batch, loss) for `microbatches`; empty except for the last layer."""
    node: str = ""
    """Node of the vault that holds the copy."""
    portion: Portion = WHOLE
    """Portion of the state that this copy holds or updates."""
    record: StepRecord | None = None
    """Record of the step that made the state, or to which the update belongs; of the last layer
    only. All nodes that committed the step may be lost before they reported it."""

    @property
    def slot(self) -> Slot:
        return slot_of(self.layer, self.shard, self.portion)

    @property
    def key(self) -> str:
        made = f"{self.owner}/{self.epoch}/{self.sequence}"
        return f"{self.kind}/{self.layer}/{self.shard}/{self.step}/{made}"

    def undone_by(self, epoch: int, step: int) -> bool:
        """Return whether training went back behind this copy when `epoch` began at `step`.

        Training computes such a version again, with other last bits in floating point.
        """
        return self.epoch < epoch and self.step > (step - 1 if self.kind == UPDATE else step)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that layers reported in an evaluation, such as the accuracy."""

    name: str
    value: float
    """Mean over the micro-batches that reported it."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Result of an evaluation, equal on every worker."""

    step: int
    """Version of the evaluated parameters: the number of steps before."""
    epoch: int
    """Epoch in which they were evaluated."""
    loss: float
    """Mean loss of the evaluation's micro-batches, which are added in their order."""
    microbatches: int
    seconds: float
    """Time that the slowest worker needed."""
    figures: tuple[Figure, ...] = ()
    """In the order of names."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Results of a step's commit, equal on every worker. An update needs them."""

    step: int
    clip: float
    """Factor by which the gradient is multiplied; 1.0: not clipped."""
    grad_norm: float
    loss: float
    ledgers: int = 0
    """Number of ledgers, one per layer and TP rank, that the commit proved to be complete."""
    nonfinite: tuple[int, ...] = ()
    """Layers whose gradient is not finite."""
    skipped: bool = False
    """Whether the update was left out (`OnNonfinite.SKIP`)."""
    evaluation: EvaluationResult | None = None
    """Evaluation of the parameters before this step; None: none was due."""


NORM, PARAMETERS = "gradient norm", "parameters"
"""Values that the holders of a layer compare (`Divergence.what`)."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Holders of a layer that disagree, although they must have the same bits."""

    layer: int
    shard: int
    """TP rank."""
    what: str
    """NORM or PARAMETERS."""
    values: tuple[tuple[str, str], ...]
    """(name of its unit, its value as text) of each holder that was compared."""

    @property
    def text(self) -> str:
        values = ", ".join(f"{node} has {value}" for node, value in self.values)
        return f"layer {self.layer} (TP rank {self.shard}): {self.what} differ: {values}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Instructions that bring one (layer, TP rank) to the target version on its new holder.

    1. If the holder's live state has version `version`, keep the state. Else fetch `state`; if it
       is None, read `checkpoint`; if that is "", initialise the layer.
    2. Apply `updates` in order: one per step, beginning with the step of the state's version.
    3. If `replay` is not empty, the state is now at version-1. Sum these gradients, which together
       hold all M micro-batches of step version-1, and apply the update with the step's record.
    4. Sum `gradients`: this is the gradient sum of step `version`. Its ledger is the union of their
       ledgers.

    If `portions` is not empty, `state` and `updates` are empty. Carry out these recipes, one per
    portion in order, and join their states, which have the same version.
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
        """Copies of the state from which the recipe starts: one, or one per portion."""
        return tuple(r.state for r in (self, *self.portions) if r.state is not None)


@dataclass(frozen=True, slots=True)
class PartialRun:
    """A micro-batch that only layers [first, last) run again, from logged messages."""

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
    """All that workers need to enter an epoch; equal for all nodes."""

    plan: Plan
    step: int
    """First step of the epoch; every layer enters with this state version."""
    recipes: tuple[tuple[str, Recipe], ...] = ()
    """(node, recipe) for the node's unit with the layer; layers without a recipe initialise."""
    covered: tuple[tuple[int, frozenset[int]], ...] = ()
    """(layer, micro-batches of `step` whose gradients some holder gets by its recipe)."""
    todo: tuple[tuple[int, ...], ...] = ()
    """Per pipeline, micro-batches of `step` that run through all layers."""
    record: StepRecord | None = None
    """Record of the step before `step`, for `Recipe.replay`."""
    store: str = ""
    """host:port of the rendezvous store of this epoch."""
    vaults: tuple[tuple[str, str], ...] = ()
    """(node, host:port of its vault)."""
    partial: tuple[PartialRun, ...] = ()
    """Micro-batches that run through some layers only, in this order and before `todo`."""
    reload: tuple[tuple[str, int, int], ...] = ()
    """(node, layer, TP rank) whose live state must not be used, because it diverged."""
    rescued: tuple[Copy, ...] = ()
    """States of a checkpoint that were not reported to be on disk. The nodes that keep these copies
    write them, unless they have done so or are about to."""
    checkpointed: int = -1
    """Newest step whose checkpoint has all its files; -1: none. It is not written again."""
    starts: tuple[tuple[int, int], ...] = ()
    """(epoch, step) of this epoch and former ones: parts of checkpoints of later steps that earlier
    epochs wrote do not count (`elastic.core.recovery.lineage`). (): only this epoch is known."""
    run: str = ""
    """Name of the run, which marks the files of its checkpoints; "": unknown."""
    promised: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(pipeline, micro-batches of `step` that its workers have in their sums when they enter), for
    the pipelines whose workers promised that. Their layers have no recipes."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Description of a node that joins."""

    node: str
    incarnation: str
    """Unique name of this life of the node; a restarted agent gets another one."""
    vault: str
    """host:port of its vault."""
    domain: str = ""
    """Failure domain (zone, rack, spot pool) whose nodes may fail together; "": unknown."""
    workers: int = 1
    memory_bytes: int = 0
    """Memory that a worker of this node may use; 0: unknown, treated as unlimited."""
    host: str = "127.0.0.1"
    labels: tuple[tuple[str, str], ...] = ()
    device: str = ""
    """Device type as a profile names it; "": the first type of the profile."""
    lifetime_s: float = 0.0
    """Expected remaining lifetime in seconds; 0: unknown."""
    standing: int = 0
    """Speed class from the pre-flight; each class is a quarter faster than the one below; 0:
    unknown."""
    keeps: bool = True
    """Whether the node's vault can store copies of other nodes."""
    protocol: int = 0
    """Number of the node's protocol version (`elastic.core.protocol.version`); 0: unknown."""
    release: str = ""
    """Version of the node's package."""
    peak_tflops: float = 0.0
    """Peak rate of matrix products on a worker's device, in 10^12 operations per second; 0:
    unknown."""
