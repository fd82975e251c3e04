"""One layer on one worker: its module, its gradient with ledger, its optimizer, and all of it as bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from elastic.domain.errors import LedgerError, VaultError
from elastic.domain.types import WHOLE, Portion
from elastic.worker.model import gradients
from elastic.worker.model import rng as randomness
from elastic.worker.model.gradients import Accumulator
from elastic.worker.model.layers import Microbatch
from elastic.worker.model.optimizer import LayerOptimizer
from elastic.worker.model.state_codec import Named, StatePlan, as_bytes, plan_state, read_state
from elastic.worker.replica.gradient_sum import Part
from elastic.worker.replica.publishing import Waiting


class LayerReplica:
    """A layer that this worker holds. Its state has version `version`; its gradient belongs to that step."""

    def __init__(
        self,
        index: int,
        shard: int,
        module: nn.Module,
        optimizer: LayerOptimizer,
        accumulator: Accumulator,
        *,
        seed: int,
        uncounted: frozenset[str] = frozenset(),
    ) -> None:
        self.index, self.shard, self.module, self.seed = index, shard, module, seed
        self.version = 0
        self.owner = ""
        """Node of this worker; set by whoever places the layer."""
        self.ledger: set[int] = set()
        """Micro-batches whose gradients `gradient` holds."""
        self.losses: dict[int, float] = {}
        """Losses of the micro-batches in the ledger; on the last layer only."""
        self.common: Part | None = None
        """Under `reduce`: the sum that all holders of the layer have alike; disjoint from `gradient`."""
        self.complete = True
        """Every portion of the parameters is of this version; else only the optimizer's, whose state `write_state`
        writes (`elastic.worker.engine.sharded_update`)."""
        self.copying: Waiting | None = None
        """A copy of the state or of the gradients that is being written."""
        self._sent: deque[Part] = deque()
        self._idle: list[Part] = []
        self.layout = accumulator.layout
        self.device = accumulator.flat.device
        self._accumulator, self._optimizer = accumulator, optimizer
        self._counted = [slot for slot in self.layout.slots if slot.name not in uncounted]
        self._parameters = dict(module.named_parameters())
        self._plan: StatePlan | None = None

    # ---- a micro-batch ----

    @property
    def gradient(self) -> Tensor:
        """Sum of the ledger's micro-batch gradients: flat, int64 fixed point (exact) or float32 (fast)."""
        return self._accumulator.flat

    def gradient_slice(self, name: str) -> slice:
        """Where parameter `name` lies in `gradient`."""
        slot = self.layout.by_name[name]
        return slice(slot.start, slot.stop)

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        """Run the layer, random numbers keyed by (seed, step, micro-batch, layer)."""
        randomness.begin(self.seed, microbatch.step, microbatch.index, self.index, self.device)
        out: Tensor = self.module(hidden, microbatch)
        return out

    def collect(self, index: int, *, skip: bool) -> None:
        """After the backward pass of micro-batch `index`: move `.grad` into the sum, or (skip) drop it."""
        found = [parameter.grad for parameter in self._parameters.values()]
        for parameter in self._parameters.values():
            parameter.grad = None
        if skip:
            return
        self._refuse_doubled({index})
        self._settle()
        self._accumulator.add(found)
        self.ledger.add(index)

    def clear(self) -> None:
        """Forget all gradients, ledgers and losses: a step begins."""
        self._settle()
        self._accumulator.clear()
        self.ledger.clear()
        self.losses.clear()
        while self._sent:
            self._retire()
        if self.common is not None:
            self.common.clear()

    def set_aside(self, before: Part | None = None) -> Part:
        """Forget the gradients as `clear`, but return them; `before` is what was set aside last, to be used again."""
        self._settle()
        final = Part(self.index, self._accumulator, self.ledger, self.losses)
        fresh = before or Part(self.index, self._accumulator.sibling())
        self._accumulator, self.ledger, self.losses = fresh.accumulator, fresh.ledger, fresh.losses
        self.clear()
        return final

    # ---- rounds of sums over the holders (elastic.worker.engine.incremental_allreduce) ----

    def hand_over(self) -> Part:
        """Set aside what this holder has on its own, to be summed with that of the others; it begins anew."""
        self._settle()
        self._accumulator.check()
        sent = Part(self.index, self._accumulator, self.ledger, self.losses)
        fresh = self._idle.pop() if self._idle else Part(self.index, self._accumulator.sibling())
        self._accumulator, self.ledger, self.losses = fresh.accumulator, fresh.ledger, fresh.losses
        self._sent.append(sent)
        return sent

    def share(self, total: Tensor, ledger: set[int], losses: Mapping[int, float]) -> None:
        """What was handed over first is now with all holders: `total`, theirs included.

        Raises LedgerError if it lacks what went from here, or holds what all have already.
        """
        if self.common is None:
            self.common = Part(self.index, self._accumulator.sibling())
        lost, doubled = sorted(self._sent[0].ledger - ledger), sorted(self.common.ledger & ledger)
        if lost or doubled:
            text = f"layer {self.index}: a sum over its holders lacks {lost} and doubles {doubled}"
            raise LedgerError(f"{text} of step {self.version}")
        self.common.add(total, ledger, losses)
        self._retire()

    def recall(self) -> None:
        """Take back what was handed over and is not with all holders: the epoch is over."""
        self._settle()
        while self._sent:
            sent = self._sent[0]
            self._accumulator.absorb(sent.accumulator)
            self.ledger |= sent.ledger
            self.losses.update(sent.losses)
            self._retire()

    def keep(self, ledgers: Collection[frozenset[int]]) -> None:
        """Make the gradient the sum of those parts that have one of these ledgers; drop the others."""
        self.recall()
        common, self.common = self.common, None
        self._idle.clear()
        if frozenset(self.ledger) not in ledgers:
            self.clear()
        if common is not None and frozenset(common.ledger) in ledgers:
            self._accumulator.absorb(common.accumulator)
            self.ledger |= common.ledger
            self.losses.update(common.losses)

    @property
    def parts(self) -> tuple[LayerReplica | Part, ...]:
        """The sums that are not empty: what all holders have, and what this one has on its own."""
        found = (self.common, self) if self.common is not None else (self,)
        return tuple(part for part in found if part.ledger)

    def _settle(self) -> None:
        """Wait for a copy that is being written: what it reads is about to change."""
        copying, self.copying = self.copying, None
        if copying is not None:
            copying.wait()

    def _retire(self) -> None:
        part = self._sent.popleft()
        part.clear()
        self._idle.append(part)

    # ---- the gradient as bytes ----

    @property
    def gradient_nbytes(self) -> int:
        return self.gradient.nbytes

    def write_gradient(self, out: Tensor) -> None:
        """Copy the gradient to `out`, uint8 [gradient_nbytes] in host memory."""
        self._accumulator.check()
        out.copy_(as_bytes(self.gradient))

    def add_gradient(
        self,
        data: Tensor,
        microbatches: Iterable[int],
        losses: Mapping[int, float] | Iterable[tuple[int, float]],
    ) -> None:
        """Sum in what `write_gradient` wrote elsewhere, with its ledger. LedgerError if one is doubled."""
        added = set(microbatches)
        self._refuse_doubled(added)
        if data.numel() != self.gradient_nbytes:
            raise VaultError(
                f"layer {self.index}: gradient of {data.numel()} bytes, not {self.gradient_nbytes}"
            )
        whole = data.clone() if data.storage_offset() % 8 or data.data_ptr() % 8 else data
        self._settle()
        self._accumulator.merge(whole.view(self.gradient.dtype))
        self.ledger |= added
        self.losses.update(losses)

    def _refuse_doubled(self, microbatches: set[int]) -> None:
        doubled = sorted(self.ledger & microbatches)
        if doubled:
            raise LedgerError(
                f"layer {self.index} already holds micro-batches {doubled} of step {self.version}"
            )

    # ---- the update ----

    def norm_sq(self, reduced: Tensor) -> float:
        """Squared norm of this layer's share of the whole model's gradient, float64.

        Parameters that every TP rank has count on rank 0 only, tied ones at their first owner only.
        """
        self._accumulator.check()
        return gradients.norm_sq(reduced, self._counted)

    def update(self, reduced: Tensor, clip: float, lr: float) -> None:
        """Apply `clip` times the gradient `reduced` (flat, left as it is); the version goes up by one."""
        self._accumulator.check()
        self._step(gradients.to_flat(reduced, clip), lr)

    @property
    def portion(self) -> Portion:
        """What of the optimizer's state is here; the update changes this portion of the parameters alone."""
        return self._optimizer.portion

    @property
    def parameters(self) -> Iterable[Parameter]:
        """All of them, whole."""
        return self._parameters.values()

    @property
    def update_nbytes(self) -> int:
        """Bytes of what an update takes."""
        if self.portion == WHOLE:
            return 4 * self.layout.numel
        return 4 * max(self._taken, 1)

    def write_update(self, reduced: Tensor, clip: float, out: Tensor) -> None:
        """Write what `update` of the same `reduced` and `clip` takes to `out`, uint8 [update_nbytes] in host memory."""
        out.copy_(as_bytes(self.update_taken(reduced, clip)))

    def update_taken(self, reduced: Tensor, clip: float) -> Tensor:
        """The same as a new flat tensor."""
        flat = gradients.to_flat(reduced, clip)
        if self.portion == WHOLE:
            return flat
        parts = [part.reshape(-1) for part in self._parts(flat)]
        return torch.cat(parts) if self._taken else flat.new_zeros(1)  # a copy has a byte at least

    @property
    def _taken(self) -> int:
        """Elements that an update of this portion takes."""
        return sum(target.numel() for target in self._optimizer.targets.values())

    def apply_update(self, data: Tensor, lr: float) -> None:
        """Make the update that `write_update` wrote down elsewhere; the version goes up by one."""
        if data.numel() != self.update_nbytes:
            raise VaultError(f"layer {self.index}: update of {data.numel()} bytes, not {self.update_nbytes}")
        flat = (data.clone() if data.data_ptr() % 4 else data).view(torch.float32).to(self.device)
        if self.portion == WHOLE:
            self._step(flat, lr)
            return
        targets = list(self._optimizer.targets.values())
        parts = torch.split(flat[: self._taken], [target.numel() for target in targets])
        self._advance([part.view(target.shape) for part, target in zip(parts, targets, strict=True)], lr)

    def _step(self, flat: Tensor, lr: float) -> None:
        self._advance(self._parts(flat), lr)

    def _advance(self, parts: Sequence[Tensor], lr: float) -> None:
        """Update from these portions of the gradient, in parameter order."""
        self._settle()
        self._optimizer.step(parts, lr)
        self.complete = self.portion == WHOLE
        self.version += 1

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Of each parameter's gradient the optimizer's portion."""
        return [self._optimizer.part(view) for view in self.layout.views(flat)]

    def optimizer_bytes(self) -> dict[str, int]:
        """Bytes of optimizer state and masters, by parameter. Most optimizers make theirs at the first update."""
        found = {name: master.nbytes for name, master in self._optimizer.masters.items()}
        for name, _, value in self._optimizer.tensors():
            found[name] = found.get(name, 0) + value.nbytes
        return found

    # ---- the state as bytes ----

    def state_nbytes(self) -> int:
        """Bytes of the state as it is now. More after the first update, when most optimizers make theirs."""
        return self._planned(self._tensors()).nbytes

    def write_state(self, out: Tensor) -> None:
        """Write the state to the first `state_nbytes()` of `out`, uint8 [n] in host memory."""
        tensors = self._tensors()
        self._planned(tensors).write(out, tensors)

    def read_state(self, data: Tensor) -> None:
        """Take over a written state, version included: the whole one, of which the optimizer takes its portion, or just
        this portion (then the parameters are not complete). VaultError if it is not this layer's."""
        self._settle()
        header, tensors = read_state(data)
        if header.portion not in (WHOLE, self.portion):
            raise VaultError(f"layer {self.index}: portion {header.portion} of a state, not {self.portion}")
        whole = header.portion == WHOLE
        found = {named.name: named for named in tensors}
        values: dict[str, Tensor] = {f"param/{n}": p for n, p in self._parameters.items()}
        if not whole:
            values = {f"param/{n}": p for n, p in self._optimizer.parameters.items()}
        masters = {f"master/{n}": m for n, m in self._optimizer.masters.items()}
        moments = {n: t.tensor for n, t in found.items() if n.startswith("optim/")}
        self._match({**values, **masters}, {n: t for n, t in found.items() if n not in moments})
        take = self._optimizer.part if whole else _as_it_is
        with torch.no_grad():
            for name, value in values.items():
                value.copy_(found[name].tensor)
            for name, value in masters.items():
                value.copy_(take(found[name].tensor))
        targets = self._optimizer.targets
        state = {_split(n): take(t) for n, t in moments.items() if targets[_split(n)[0]].numel()}
        self._optimizer.load(state, {k: v for k, v in header.extra.items() if self._has(k)})
        self.complete, self.version = whole, header.version

    def _has(self, path: str) -> bool:
        """Whether a text of the state belongs to this portion of it."""
        kind, _, rest = path.partition("/")
        return kind != "optim" or bool(self._optimizer.targets[rest.rsplit("/", 1)[0]].numel())

    def _match(self, mine: Mapping[str, Tensor], theirs: Mapping[str, Named]) -> None:
        for name in sorted(mine.keys() | theirs.keys()):
            a, b = mine.get(name), theirs.get(name)
            shape = self._parameters[name.split("/", 1)[1]].shape if a is not None else ()
            if a is None or b is None or (b.shape or b.tensor.shape) != shape or a.dtype != b.tensor.dtype:
                told = [
                    f"{tuple(shape)} {a.dtype}" if a is not None else "nothing",
                    f"{tuple(b.shape or b.tensor.shape)} {b.tensor.dtype}" if b is not None else "nothing",
                ]
                raise VaultError(f"layer {self.index}: state of {name} is {told[1]}, not {told[0]}")

    def _tensors(self) -> list[Named]:
        optimizer = self._optimizer
        tensors = [self._named(f"param/{n}", p, n) for n, p in optimizer.parameters.items()]
        tensors += [self._named(f"master/{n}", m, n) for n, m in optimizer.masters.items()]
        for name, key, value in optimizer.tensors():
            same = value.shape == optimizer.parameters[name].shape
            path = f"optim/{name}/{key}"
            tensors.append(self._named(path, value, name) if same and value.ndim else Named(path, value))
        return tensors

    def _named(self, path: str, value: Tensor, name: str) -> Named:
        """`value` is of the form of parameter `name`, or of this portion of it."""
        parameter = self._parameters[name]
        return Named(path, value, shard_dim(parameter), tuple(parameter.shape))

    def _planned(self, tensors: list[Named]) -> StatePlan:
        """The layout at this version, from that of another one where possible."""
        extra, plan = self._optimizer.extra(), self._plan
        if plan is not None and plan.header.version != self.version:
            plan = plan.at(self.version)
        if plan is None or not plan.fits(tensors, extra):
            plan = plan_state(self.version, tensors, extra, self.portion)
        self._plan = plan
        return plan


def shard_dim(parameter: Tensor) -> int:
    return int(getattr(parameter, "partition_dim", -1))


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _split(name: str) -> tuple[str, str]:
    """optim/NAME/KEY -> (NAME, KEY)."""
    parameter, key = name.removeprefix("optim/").rsplit("/", 1)
    return parameter, key
