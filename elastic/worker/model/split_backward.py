"""A backward pass in two parts: the gradient of the input first, those of the parameters later.

The graph of a forward pass is cut where parameters enter the way from the input to the output: at every operation
that has the input behind one of its arguments and parameters alone behind another (a matrix product with a weight, a
sum with a bias). The first part runs all operations on the way, but none towards the parameters, and keeps what
arrives at those places. The second part goes on from there, towards the parameters only. So every operation sees the
very tensors that it would see in a whole backward pass, and the results are the same, bit for bit.

A parameter that enters at several places would need their gradients added in the order of a whole pass: its gradient
is found in the first part. Tensor hooks that a layer puts on what it computes may run in both parts.

torch.distributed.pipelining (`_backward.py`) splits in the same way; Qi et al. 2023 describe what it is good for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass(eq=False)
class _Entry:
    """A place where parameters enter."""

    node: Node
    parameters: list[Tensor] = field(default_factory=list)
    """Those that enter here and nowhere else."""
    gradients: tuple[Tensor | None, ...] = ()
    """What arrived here in the first part."""

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        self.gradients = tuple(gradients)


@dataclass
class WeightPart:
    """What is left of a backward pass after `backward_input`."""

    entries: list[_Entry]
    found: list[tuple[Tensor, Tensor | None]]
    """Parameters whose gradients are there already."""

    def run(self) -> None:
        """Put the gradients into the parameters' `.grad`, which must be empty. Once."""
        for parameter, gradient in self.found:
            parameter.grad = gradient
        for entry in self.entries:
            arrived = [
                (GradientEdge(entry.node, i), g) for i, g in enumerate(entry.gradients) if g is not None
            ]
            if arrived:
                edges, gradients = zip(*arrived, strict=True)
                torch.autograd.backward(edges, gradients, inputs=entry.parameters)
        self.entries, self.found = [], []


def backward_input(
    output: Tensor, gradient: Tensor, source: Tensor, parameters: Iterable[Tensor]
) -> WeightPart:
    """Find the gradient of `source` (put into its `.grad`), and keep what the parameters' gradients need.

    Args:
        output: what was computed from `source` and `parameters`.
        gradient: that of `output`.
        source: a leaf that requires a gradient.
        parameters: leaves whose `.grad` is empty, and stays so.
    """
    wanted = [p for p in parameters if p.requires_grad]
    entries, rest = _entries(output, source, wanted)
    handles = [entry.node.register_prehook(entry.keep) for entry in entries]
    try:
        torch.autograd.backward(output, gradient, inputs=[source, *rest], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    found = [(parameter, parameter.grad) for parameter in rest]
    for parameter in rest:
        parameter.grad = None
    return WeightPart(entries, found)


def _entries(
    output: Tensor, source: Tensor, parameters: Sequence[Tensor]
) -> tuple[list[_Entry], list[Tensor]]:
    """The places where parameters enter, and the parameters that cannot be left for later."""
    start = get_gradient_edge(source).node
    order = _children_first(get_gradient_edge(output).node)
    inside = {start}
    for node in order:
        if any(child in inside for child, _ in node.next_functions):
            inside.add(node)
    owners = {get_gradient_edge(p).node: p for p in parameters}
    entering: dict[Node, list[_Entry]] = {node: [] for node in owners}
    entries = [_Entry(node) for node in order if node in inside and node is not start]
    for entry in entries:
        for node in _behind(entry.node, inside):
            if node in entering:
                entering[node].append(entry)
    rest: list[Tensor] = []
    for node, parameter in owners.items():
        if len(entering[node]) == 1:
            entering[node][0].parameters.append(parameter)
        else:
            rest.append(parameter)
    return [entry for entry in entries if entry.parameters], rest


def _behind(node: Node, inside: set[Node]) -> set[Node]:
    """All operations behind `node` that do not lead to the input, parameters' leaves among them."""
    found: set[Node] = set()
    left = [child for child, _ in node.next_functions if child is not None and child not in inside]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [child for child, _ in node.next_functions if child is not None]
    return found


def _children_first(root: Node) -> list[Node]:
    """All operations of a graph, each after those behind it."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order
