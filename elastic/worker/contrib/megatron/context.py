"""Context parallelism: the workers of a node split the sequences of a micro-batch.

Each rank computes every layer for its tokens. Attention gathers keys and values of all tokens. A
rank has two pieces of each sequence, one from the front and one from the back, so that all ranks
have equally many pairs of tokens to compare. The gradients of a layer are summed over the ranks in
the backward pass, so that every rank has those of the whole micro-batch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic.domain.errors import FieldError


class ContextParallel:
    """The ranks that split sequences, and the tokens of this one.

    Args:
        group: the process group of these ranks.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()

    def positions(self, length: int) -> Tensor:
        """Return the positions of this rank's tokens, int64 [length / size], in their order.

        Raises FieldError unless `length` can be cut into 2 * size pieces.
        """
        return torch.cat([torch.arange(start, end) for start, end in self._pieces(length)])

    def pieces(self, length: int) -> list[tuple[slice, int]]:
        """Return for each piece of this rank its place among the rank's tokens, and the position at
        which it ends."""
        (first, middle), (_, last) = self._pieces(length)
        size = middle - first
        return [(slice(0, size), middle), (slice(size, 2 * size), last)]

    def _pieces(self, length: int) -> list[tuple[int, int]]:
        """Return (first position, position after the last one) of this rank's two pieces."""
        count = 2 * self.size
        if length % count:
            remedy = f"it must be a multiple of 2 x context_parallel_size ({count})"
            raise FieldError("tokens per row", length, remedy)
        size = length // count
        return [(n * size, (n + 1) * size) for n in (self.rank, count - 1 - self.rank)]

    def part(self, field: Tensor) -> Tensor:
        """Return this rank's columns of a field, [rows, length] -> [rows, length / size]."""
        return field[:, self.positions(field.shape[1]).to(field.device)]

    def gather(self, mine: Tensor) -> Tensor:
        """Return the tokens of all ranks in their order, [length / size, ...] -> [length, ...]. The
        gradient of each rank's part is summed over the ranks."""
        return cast(Tensor, _Gather.apply(mine, self.group))  # type: ignore[no-untyped-call]

    def total(self, mine: Tensor) -> Tensor:
        """Return the sum of `mine` over the ranks. Its gradient is that of each part."""
        return cast(Tensor, _Total.apply(mine, self.group))  # type: ignore[no-untyped-call]

    def call(self, layer: nn.Module, *args: Any) -> Any:
        """Return `layer.compute(*args)`. Its parameters' gradients are summed over the ranks."""
        names, parameters = zip(*layer.named_parameters(prefix="layer"), strict=True)
        shared = _Shared.apply(self.group, *parameters)  # type: ignore[no-untyped-call]
        return torch.func.functional_call(
            _Compute(layer), dict(zip(names, shared, strict=True)), args
        )


class _Compute(nn.Module):
    """Calls `compute` of a layer, for `functional_call`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Any:
        return cast(Any, self.layer).compute(*args)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        halves = [part.chunk(2) for part in parts]
        return torch.cat([front for front, _ in halves] + [back for _, back in reversed(halves)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        summed, rank = gradients[0].contiguous().clone(), ctx.group.rank()
        dist.all_reduce(summed, group=ctx.group)
        pieces = summed.chunk(2 * ctx.group.size())
        return torch.cat([pieces[rank], pieces[-1 - rank]]), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = mine.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Shared(torch.autograd.Function):
    """Passes parameters on; sums their gradients over the ranks, all of them at once."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        flat = torch.cat([gradient.float().flatten() for gradient in gradients])
        dist.all_reduce(flat, group=ctx.group)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        summed = [p.view_as(g).to(g.dtype) for p, g in zip(parts, gradients, strict=True)]
        return None, *summed
