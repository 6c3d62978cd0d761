"""Control flow on tensors as nodes of a graph, and cutting pieces out of a graph.

`cond` and `while_loop` are call_function targets whose branches are submodules (`get_attr` nodes)
with flat arguments and flat results. Run on real tensors they do what their names say, and autograd
differentiates what they did. On fakes, where nobody knows which way the program goes, they give
results of the right shape that depend on all that either way would depend on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

Tensors = tuple[Any, ...]
Branch = Callable[..., Tensors]


def cond(pred: torch.Tensor, true_fn: Branch, false_fn: Branch, operands: Sequence[Any]) -> Tensors:
    """Return the results of one of two functions, which agree in shape, dtype and device.

    Args:
        pred: bool tensor of one element.
        true_fn, false_fn: called with `operands`; give a tuple of tensors.
        operands: tensors and numbers.
    """
    if _is_unknown(pred):
        return _either(pred, true_fn(*operands), false_fn(*operands))
    return true_fn(*operands) if pred else false_fn(*operands)


def while_loop(
    cond_fn: Branch, body_fn: Branch, carried: Sequence[Any], extra: Sequence[Any]
) -> Tensors:
    """Apply a function to its own results for as long as a condition on them holds.

    Args:
        cond_fn: called with `carried` and `extra`; gives a tuple of one bool tensor.
        body_fn: called with the same; gives tensors of the shapes and dtypes of `carried`.
        carried: the tensors to begin with.
        extra: tensors and numbers that stay the same.
    """
    values = tuple(carried)
    (going_on,) = cond_fn(*values, *extra)
    if _is_unknown(going_on):
        return _either(going_on, body_fn(*values, *extra), values)
    while going_on:
        values = body_fn(*values, *extra)
        (going_on,) = cond_fn(*values, *extra)
    return values


def _is_unknown(value: object) -> bool:
    return isinstance(value, FakeTensor)


def _either(pred: torch.Tensor, left: Tensors, right: Tensors) -> Tensors:
    return tuple(map(torch.where, [pred.reshape(())] * len(left), left, right))


TARGETS = frozenset((cond, while_loop))
"""Targets of nodes that stay between the graphs that are compiled."""


@dataclass(frozen=True)
class Subgraph:
    """Nodes of a graph copied into a module of their own.

    Args:
        module: returns a tuple.
        given: the nodes from outside whose values are its inputs, in order.
        outputs: the nodes whose values it returns: those that others use.
    """

    module: fx.GraphModule
    given: list[fx.Node]
    outputs: list[fx.Node]

    def call(
        self, graph: fx.Graph, run: Callable[..., Any], copies: dict[fx.Node, fx.Node]
    ) -> None:
        """Add a call of `run`, which does what the module does, to a copy of the whole graph."""
        result = graph.call_function(run, tuple(map(copies.__getitem__, self.given)))
        for index, node in enumerate(self.outputs):
            copies[node] = graph.call_function(operator.getitem, (result, index))


def extract_subgraph(root: torch.nn.Module, nodes: Sequence[fx.Node]) -> Subgraph:
    """Copy nodes, given in order, out of a graph; `root` has what its `get_attr` nodes name."""
    inside = set(nodes)
    outputs = [node for node in nodes if not inside.issuperset(node.users)]
    used = (arg for node in nodes for arg in node.all_input_nodes)
    given = list(dict.fromkeys(node for node in used if node not in inside))
    return Subgraph(copy_nodes(root, nodes, outputs, given), given, outputs)


def copy_nodes(
    root: torch.nn.Module,
    nodes: Iterable[fx.Node],
    outputs: Sequence[fx.Node],
    given: Sequence[fx.Node],
) -> fx.GraphModule:
    """Return a module of copies of `nodes` that takes the values of the nodes `given`."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in given}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(root, graph)
