"""A backward pass in two parts: first the input's gradient, later the parameters' gradients.

The autograd graph is cut at each operation that has the input behind one argument and only
parameters behind another, such as a product with a weight or a sum with a bias. The first part runs
all operations between the output and the input, and keeps the gradients that arrive at the cuts.
The second part continues from the cuts towards the parameters. Each operation sees the same tensors
as in a whole backward pass, so the results are equal bit for bit.

If a parameter is used in several places, the order in which its gradients are added matters, so the
first part computes its gradient. Tensor hooks that a layer sets may run in both parts.

torch.distributed.pipelining (`_backward.py`) splits in the same way; Qi et al. 2023 describe the
schedules that use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass(eq=False)
class _CutPoint:
    """An operation at which the graph is cut."""

    node: Node
    parameters: list[Tensor] = field(default_factory=list)
    """Parameters that are used here and nowhere else."""
    gradients: tuple[Tensor | None, ...] = ()
    """Gradients that arrived here in the first part."""

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        self.gradients = tuple(gradients)


@dataclass
class WeightBackward:
    """The rest of a backward pass after `backward_input`."""

    cuts: list[_CutPoint]
    found: list[tuple[Tensor, Tensor | None]]
    """Parameters with gradients that the first part has computed."""

    def run(self) -> None:
        """Set the parameters' `.grad`, which must be empty. Call once."""
        for parameter, gradient in self.found:
            parameter.grad = gradient
        for cut in self.cuts:
            arrived = [(i, g) for i, g in enumerate(cut.gradients) if g is not None]
            if arrived:
                edges = [GradientEdge(cut.node, i) for i, _ in arrived]
                torch.autograd.backward(edges, [g for _, g in arrived], inputs=cut.parameters)
        self.cuts, self.found = [], []


def backward_input(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    sources: Sequence[Tensor],
    parameters: Iterable[Tensor],
) -> WeightBackward:
    """Set the `.grad` of `sources`, and return the rest of the backward pass.

    Args:
        outputs: results, with a graph, of a forward pass on `sources` and `parameters`.
        gradients: gradients of `outputs`.
        sources: leaves that require a gradient; none behind frozen layers alone.
        parameters: leaves with an empty `.grad`, which stays empty.
    """
    wanted = [p for p in parameters if p.requires_grad]
    cuts, rest = _cut(outputs, sources, wanted)
    if not outputs or not (sources or rest):
        return WeightBackward([], [])
    handles = [cut.node.register_prehook(cut.keep) for cut in cuts]
    try:
        torch.autograd.backward(outputs, gradients, inputs=[*sources, *rest], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    found = [(parameter, parameter.grad) for parameter in rest]
    for parameter in rest:
        parameter.grad = None
    return WeightBackward(cuts, found)


def _cut(
    outputs: Sequence[Tensor], sources: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[list[_CutPoint], list[Tensor]]:
    """Return the cuts of the graph, and the parameters that cannot be left for later."""
    starts = {get_gradient_edge(source).node for source in sources}
    order = _children_first([get_gradient_edge(output).node for output in outputs])
    inside = set(starts)
    for node in order:
        if any(child in inside for child, _ in node.next_functions):
            inside.add(node)
    owners = {get_gradient_edge(p).node: p for p in parameters}
    entering: dict[Node, list[_CutPoint]] = {node: [] for node in owners}
    cuts = [_CutPoint(node) for node in order if node in inside and node not in starts]
    for cut in cuts:
        for node in _behind(cut.node, inside):
            if node in entering:
                entering[node].append(cut)
    # A result that depends on parameters alone is not inside: its gradient comes in the first part.
    beside: set[Node] = set()
    for output in outputs:
        root = get_gradient_edge(output).node
        if root not in inside:
            beside |= {root, *_behind(root, inside)}
    rest: list[Tensor] = []
    for node, parameter in owners.items():
        if len(entering[node]) == 1 and node not in beside:
            entering[node][0].parameters.append(parameter)
        else:
            rest.append(parameter)
    return [cut for cut in cuts if cut.parameters], rest


def _behind(node: Node, inside: set[Node]) -> set[Node]:
    """Return all operations behind `node` that do not lead to the input, parameters included."""
    found: set[Node] = set()
    left = [child for child, _ in node.next_functions if child is not None and child not in inside]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [child for child, _ in node.next_functions if child is not None]
    return found


def _children_first(roots: Iterable[Node]) -> list[Node]:
    """Return all operations of a graph, each after the operations behind it."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order
