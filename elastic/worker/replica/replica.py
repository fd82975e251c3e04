"""One layer on one worker: module, gradient sum with ledger, optimizer, and state as bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from elastic.domain.errors import LedgerError, OtherModel, VaultError
from elastic.domain.types import WHOLE, Portion, StepRecord
from elastic.worker.model import gradients
from elastic.worker.model import rng as randomness
from elastic.worker.model.gradients import Accumulator, FlatLayout
from elastic.worker.model.layer_checks import LayerChecks, layer_name
from elastic.worker.model.layers import TensorParallel, is_frozen, trained
from elastic.worker.model.loss_scale import LossScale, RunningScale
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import LayerOptimizer
from elastic.worker.model.state_codec import (
    NamedTensor,
    StatePlan,
    plan_state,
    read_state,
)
from elastic.worker.model.values import Value, separated
from elastic.worker.replica.digest import host_digest, parameter_digest
from elastic.worker.replica.gradient_sum import GradientSum

FROZEN_HASH = "frozen/hash"
OPTIMIZER_TEXTS = ("optim/", "group/")
"""Prefixes of the optimizer's entries among the texts of a state."""
SKIPPED = b"\0"
"""Bytes of a copy of an update that was left out. Other copies of updates are longer."""


class LayerReplica(GradientSum):
    """A layer that this worker holds, and the gradient sum of the micro-batches run here.

    The state has version `version`, and the gradient belongs to the step of that number. `shard` is
    this worker's TP rank. Under `reduce` a replica has several sums with disjoint ledgers: its own,
    `common`, and the sums of rounds that are not finished.
    """

    def __init__(
        self,
        index: int,
        tp: TensorParallel,
        module: nn.Module,
        optimizer: LayerOptimizer,
        accumulator: Accumulator,
        *,
        seed: int,
        outside_norm: frozenset[str] = frozenset(),
        last: bool = False,
        loss_scale: LossScale | None = None,
        initial: Callable[[], nn.Module] | None = None,
    ) -> None:
        """`outside_norm`: names of parameters that another worker counts in the gradient norm.
        `last`: whether the layer returns the loss. `initial`: builds the module with its initial
        values, if `module` has arbitrary ones; then `fill_frozen` must follow before a pass."""
        super().__init__(index, accumulator)
        self.shard, self.tp_size, self.module, self.seed = tp.rank, tp.size, module, seed
        self.version = 0
        self.owner = ""
        """Node of this worker."""
        self.common: GradientSum | None = None
        """Under `reduce`: the sum of finished rounds, equal on all holders of the layer."""
        self.record: StepRecord | None = None
        """On the last layer, the record of the newest step whose update began here; None: none, or
        the state was loaded since then."""
        self.loss_scale = RunningScale(loss_scale)
        self.complete = True
        """Whether all parameters have this version; if not, only the optimizer's portion has it
        (`elastic.worker.engine.sharded_update`)."""
        self._rounds: deque[GradientSum] = deque()
        self._spare: list[GradientSum] = []
        self.layout = accumulator.layout
        self.device = accumulator.flat.device
        self._optimizer = optimizer
        self._targets = FlatLayout.of(optimizer.targets.items())
        """Layout of an update's input: the gradients of the tensors that the update changes."""
        self._in_norm = [place for place in self.layout.ranges if place.name not in outside_norm]
        self._parameters = dict(trained(module.named_parameters()))
        self._frozen = {name: p for name, p in module.named_parameters() if is_frozen(p)}
        self._frozen_digest = 0
        self._frozen_hash = ""
        """Hash of the frozen parameters with which the training began; "": none, or unknown."""
        self._initial = initial
        if self._frozen and initial is None:
            self._know_frozen()
        self._plan: StatePlan | None = None
        self._checks, self._last = LayerChecks(index, module, last=last), last

    # ---- a micro-batch ----

    def forward(self, hidden: Value | None, microbatch: Microbatch) -> Value:
        """Run the layer with random numbers keyed by (seed, step, micro-batch, layer). Raises
        FieldError if the layer breaks the rules of `LayerStack`."""
        step, index = microbatch.step, microbatch.index
        randomness.seed_forward(self.seed, step, index, self.index, self.device)
        self._checks.begin(hidden, microbatch)
        try:
            out = self.module(hidden, microbatch)
        except RuntimeError as error:
            translated = self._checks.translated(error)
            if translated is error:
                raise
            raise translated from error
        return separated(self._checks.end(hidden, microbatch, out))

    def collect(self, index: int, *, skip: bool, weight: float = 0.0) -> None:
        """Move the gradients of micro-batch `index` into the sum, and `index` into the ledger.

        Call after the backward pass. With `skip` the gradients are dropped, because the ledger of
        another sum has the micro-batch. `weight`: weight of the micro-batch; 0 if this is not the
        last layer. Raises LedgerError if this ledger has the micro-batch already.
        """
        found = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if skip:
            return
        self._refuse_doubled({index})
        self.settle()
        self.accumulator.add(found, weight, self.loss_scale.value)
        self.ledger.add(index)

    def gradient_slice(self, name: str) -> slice:
        """Return the slice of `gradient` that belongs to parameter `name`."""
        place = next(place for place in self.layout.ranges if place.name == name)
        return slice(place.start, place.stop)

    def add_gradient(
        self,
        data: Tensor,
        microbatches: Iterable[int],
        losses: Mapping[int, float] | Iterable[tuple[int, float]],
    ) -> None:
        """Add `data`, which `write_gradient` of another sum wrote, with its ledger and losses.

        Raises LedgerError if a micro-batch would count twice, VaultError for a wrong size.
        """
        added = set(microbatches)
        self._refuse_doubled(added)
        if data.numel() != self.gradient_nbytes:
            sizes = f"gradient of {data.numel()} bytes, not {self.gradient_nbytes}"
            raise VaultError(f"layer {self.index}: {sizes}")
        aligned = data.clone() if data.storage_offset() % 8 or data.data_ptr() % 8 else data
        self.add(aligned.view(self.gradient.dtype), added, dict(losses))

    def clear(self) -> None:
        """Empty all sums and ledgers, as the next step begins."""
        super().clear()
        while self._rounds:
            self._retire_round()
        if self.common is not None:
            self.common.clear()

    def set_aside(self, reuse: GradientSum | None = None) -> GradientSum:
        """Return the replica's own sum and start an empty one; clear the common sum and all rounds.
        The empty sum takes the memory of `reuse`, an old sum that is overwritten."""
        final = self._detach(reuse)
        self.clear()
        return final

    def _detach(self, empty: GradientSum | None) -> GradientSum:
        """Return the replica's own sum, which `empty` (None: a new sum) replaces."""
        self.settle()
        sum_ = GradientSum(self.index, self.accumulator, self.ledger, self.losses)
        empty = empty or GradientSum(self.index, self.accumulator.new_empty())
        self.accumulator, self.ledger, self.losses = empty.accumulator, empty.ledger, empty.losses
        return sum_

    def _refuse_doubled(self, microbatches: set[int]) -> None:
        doubled = sorted(self.ledger & microbatches)
        if doubled:
            text = f"layer {self.index} already holds micro-batches {doubled}"
            raise LedgerError(f"{text} of step {self.version}")

    # ---- rounds of sums over the holders (elastic.worker.engine.incremental_allreduce) ----

    def start_round(self) -> GradientSum:
        """Return the replica's own sum for an all-reduce; an empty sum replaces it."""
        self._rounds.append(self._detach(self._spare.pop() if self._spare else None))
        return self._rounds[-1]

    def finish_round(self, total: Tensor, ledger: set[int], losses: Mapping[int, float]) -> None:
        """Add `total`, the all-reduced sum of the oldest round, to `common`.

        Raises LedgerError if `ledger` lacks this worker's part, or contains some of `common`.
        """
        if self.common is None:
            self.common = GradientSum(self.index, self.accumulator.new_empty())
        lost = sorted(self._rounds[0].ledger - ledger)
        doubled = sorted(self.common.ledger & ledger)
        if lost or doubled:
            text = f"layer {self.index}: a sum over its holders lacks {lost} and doubles {doubled}"
            raise LedgerError(f"{text} of step {self.version}")
        self.common.add(total, ledger, losses)
        self._retire_round()

    def cancel_rounds(self) -> None:
        """Called when the epoch ends: put the sums of unfinished rounds back into the own sum."""
        self.settle()
        while self._rounds:
            self.absorb(self._rounds[0])
            self._retire_round()

    def keep(self, ledgers: Collection[frozenset[int]]) -> None:
        """Merge the sums whose ledger is in `ledgers` into the own sum; drop the others."""
        self.cancel_rounds()
        common, self.common = self.common, None
        self._spare.clear()
        if frozenset(self.ledger) not in ledgers:
            self.clear()
        if common is not None and frozenset(common.ledger) in ledgers:
            self.absorb(common)

    @property
    def parts(self) -> tuple[GradientSum, ...]:
        """The sums that are not empty: `common`, and the replica's own."""
        found = (self.common, self) if self.common is not None else (self,)
        return tuple(part for part in found if part.ledger)

    def _retire_round(self) -> None:
        part = self._rounds.popleft()
        part.clear()
        self._spare.append(part)

    # ---- the update ----

    def norm_sq(self, reduced: Tensor) -> float:
        """Return this replica's part of the squared norm of the model's gradient, in float64.

        Parameters that TP ranks do not split count on rank 0 only, tied ones at their first owner.
        """
        return gradients.norm_sq(reduced, self._in_norm)

    def weight(self, reduced: Tensor) -> float:
        """Return the weight of the micro-batches in `reduced`; 0 if this is not the last layer."""
        return gradients.weight_of(reduced) if self._last else 0.0

    def update(self, reduced: Tensor, clip: float, lr: float) -> None:
        """Update the state with `clip` times the flat gradient `reduced`; increment the version."""
        self._step(self._portions(gradients.to_flat(reduced, clip)), lr)

    @property
    def portion(self) -> Portion:
        """Portion of the optimizer's state held here; an update changes only these parameters."""
        return self._optimizer.portion

    @property
    def parameters(self) -> Iterable[Parameter]:
        """All parameters that are trained, whole."""
        return self._parameters.values()

    @property
    def update_nbytes(self) -> int:
        """Bytes of the input of an update."""
        return 4 * max(self._targets.numel, 1)

    def skip_update(self) -> None:
        """Leave an update out: the state stays as it is, and the version is incremented."""
        self.settle()
        self.version += 1
        self.loss_scale.skipped(self.version)

    def update_input(self, reduced: Tensor, clip: float) -> Tensor:
        """Return the float32 gradient that `update` applies, as a new flat tensor."""
        flat = gradients.to_flat(reduced[: self.layout.numel], clip)
        if self.portion == WHOLE and flat.numel():
            return flat
        mine = flat.new_zeros(max(self._targets.numel, 1))
        for view, part in zip(self._targets.views(mine), self._portions(flat), strict=True):
            view.copy_(part)
        return mine

    def apply_update(self, data: Tensor, lr: float) -> None:
        """Repeat an update from the bytes of `update_input`; increment the version.

        SKIPPED leaves the state as it is. Raises VaultError for any other size.
        """
        if bytes(data[:2].numpy()) == SKIPPED:
            self.skip_update()
            return
        if data.numel() != self.update_nbytes:
            sizes = f"update of {data.numel()} bytes, not {self.update_nbytes}"
            raise VaultError(f"layer {self.index}: {sizes}")
        aligned = data.clone() if data.data_ptr() % 4 else data
        self._step(self._targets.views(aligned.view(torch.float32).to(self.device)), lr)

    def _step(self, parts: Sequence[Tensor], lr: float) -> None:
        """Update from `parts`: the portion of each parameter's gradient, in parameter order."""
        self.settle()
        self._optimizer.step(parts, lr)
        self.complete = self.portion == WHOLE
        self.version += 1
        self.loss_scale.updated(self.version)

    def _portions(self, flat: Tensor) -> list[Tensor]:
        """Return the optimizer's portion of each parameter's gradient."""
        return [self._optimizer.portion_of(view) for view in self.layout.views(flat)]

    def optimizer_bytes(self) -> dict[str, int]:
        """Return bytes of optimizer state and masters by parameter; complete after an update."""
        found = {name: master.nbytes for name, master in self._optimizer.masters.items()}
        for name, _, value in self._optimizer.tensors():
            found[name] = found.get(name, 0) + value.nbytes
        return found

    def digest(self) -> int:
        """Return a 64-bit hash of all parameters, whole, also of those that are frozen."""
        return parameter_digest([*self.parameters, *self._frozen.values()])

    # ---- frozen parameters, which no state has ----

    def fill_frozen(self) -> None:
        """Give frozen parameters their initial values, unless they have them.

        Raises OtherModel if they are not those with which the training began.
        """
        build, self._initial = self._initial, None
        if not self._frozen or build is None:
            return
        module = build()
        with torch.no_grad():
            for name, parameter in self._frozen.items():
                parameter.copy_(module.get_parameter(name))
        self._know_frozen()

    def frozen_intact(self) -> bool:
        """Return whether the frozen parameters are still those that were built."""
        return not self._frozen or parameter_digest(self._frozen.values()) == self._frozen_digest

    def _know_frozen(self) -> None:
        """Note the values of the frozen parameters. Raises OtherModel if others were expected."""
        self._frozen_digest = parameter_digest(self._frozen.values())
        self._expect_frozen(host_digest(self._frozen.values()))

    def _expect_frozen(self, found: str) -> None:
        if found and self._frozen_hash and found != self._frozen_hash:
            name = layer_name(self.index, self.module)
            text = f"{name}: its frozen parameters are not those with which the training began"
            raise OtherModel(f"{text}: give this node the files of the model that the others have")
        self._frozen_hash = self._frozen_hash or found

    # ---- the state as bytes ----

    def state_nbytes(self) -> int:
        """Return the bytes of the current state. Most optimizers enlarge it at the first update."""
        return self._state_plan(self._tensors()).nbytes

    def write_state(self, out: Tensor) -> None:
        """Write the state to the first `state_nbytes()` of `out`, uint8 [n] in host memory."""
        tensors = self._tensors()
        self._state_plan(tensors).write(out, tensors)

    def state_run(self) -> Tensor:
        """Return the state as a new run, uint8 [state_nbytes()] in host memory."""
        run = torch.empty(self.state_nbytes(), dtype=torch.uint8)
        self.write_state(run)
        return run

    def read_state(self, data: Tensor) -> None:
        """Load state and version from a run of the whole state, or of this replica's portion.

        The optimizer keeps only its portion of a whole state. A run of a portion leaves the replica
        not `complete`. Raises VaultError if the state is not of this layer.
        """
        self.settle()
        header, tensors = read_state(data)
        if header.portion not in (WHOLE, self.portion):
            text = f"portion {header.portion} of a state, not {self.portion}"
            raise VaultError(f"layer {self.index}: {text}")
        whole, optimizer = header.portion == WHOLE, self._optimizer
        found = {named.name: named for named in tensors}
        mine = self._parameters if whole else optimizer.parameters
        values: dict[str, Tensor] = {f"param/{name}": p for name, p in mine.items()}
        masters = {f"master/{name}": m for name, m in optimizer.masters.items()}
        moments = {n: named.tensor for n, named in found.items() if n.startswith("optim/")}
        self._match({**values, **masters}, {n: t for n, t in found.items() if n not in moments})

        def take(tensor: Tensor) -> Tensor:
            return optimizer.portion_of(tensor) if whole else tensor

        with torch.no_grad():
            for name, value in values.items():
                value.copy_(found[name].tensor)
            for name, value in masters.items():
                value.copy_(take(found[name].tensor))
        split = {name: _split(name) for name in moments}
        state = {
            split[name]: take(tensor)
            for name, tensor in moments.items()
            if optimizer.targets[split[name][0]].numel()
        }
        texts = {k: v for k, v in header.extra.items() if k.startswith(OPTIMIZER_TEXTS)}
        optimizer.load(state, {k: v for k, v in texts.items() if self._in_portion(k)})
        self.loss_scale.read(header.extra, header.version)
        if self._frozen:
            self._expect_frozen(header.extra.get(FROZEN_HASH, ""))
        self.complete, self.version, self.record = whole, header.version, None

    def _in_portion(self, path: str) -> bool:
        """Return whether this replica's portion of the state includes the text named `path`."""
        kind = path.partition("/")[0]
        return kind != "optim" or bool(self._optimizer.targets[_split(path)[0]].numel())

    def _match(self, mine: Mapping[str, Tensor], theirs: Mapping[str, NamedTensor]) -> None:
        """Raise VaultError unless both have the same names, shapes and dtypes."""
        shapes = {name: self._parameters[name.split("/", 1)[1]].shape for name in mine}
        wanted = {name: f"{tuple(shapes[name])} {t.dtype}" for name, t in mine.items()}
        found = {
            name: f"{tuple(named.shape or named.tensor.shape)} {named.tensor.dtype}"
            for name, named in theirs.items()
        }
        for name in sorted(wanted.keys() | found.keys()):
            if found.get(name) != wanted.get(name):
                text = f"{found.get(name, 'nothing')}, not {wanted.get(name, 'nothing')}"
                raise VaultError(f"layer {self.index}: state of {name} is {text}")

    def _tensors(self) -> list[NamedTensor]:
        optimizer = self._optimizer
        tensors = [self._named(f"param/{n}", p, n) for n, p in optimizer.parameters.items()]
        tensors += [self._named(f"master/{n}", m, n) for n, m in optimizer.masters.items()]
        for name, key, value in optimizer.tensors():
            like_parameter = value.ndim and value.shape == optimizer.parameters[name].shape
            path = f"optim/{name}/{key}"
            named = self._named(path, value, name) if like_parameter else NamedTensor(path, value)
            tensors.append(named)
        return tensors

    def _named(self, path: str, value: Tensor, name: str) -> NamedTensor:
        """Return `value` with a name. It has the shape of parameter `name` or of its portion."""
        parameter = self._parameters[name]
        return NamedTensor(path, value, shard_dim(parameter), tuple(parameter.shape))

    def _state_plan(self, tensors: list[NamedTensor]) -> StatePlan:
        """Return the layout of the state, made from the layout of another version if possible."""
        extra, plan = {**self._optimizer.extra(), **self.loss_scale.texts()}, self._plan
        if self._frozen_hash:
            extra[FROZEN_HASH] = self._frozen_hash
        if plan is not None and plan.header.version != self.version:
            plan = plan.at(self.version)
        if plan is None or not plan.fits(tensors, extra):
            plan = plan_state(self.version, tensors, extra, self.portion)
        self._plan = plan
        return plan


def shard_dim(parameter: Tensor) -> int:
    """Return the dimension along which TP ranks split the parameter; -1: not split."""
    return int(getattr(parameter, "partition_dim", -1))


def _split(path: str) -> tuple[str, str]:
    """Split optim/NAME/KEY into (NAME, KEY)."""
    name, key = path.removeprefix("optim/").rsplit("/", 1)
    return name, key
