"""Extraction of subgraphs: modules that one node of another graph calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from weft_core.graph_copy import copy_nodes


@dataclass(frozen=True)
class Subgraph:
    """Nodes of a graph copied into a module of their own.

    Args:
        module: returns a tuple.
        given: the nodes from outside whose values are its inputs, in order.
        outputs: the nodes whose values it returns: those that others use.
    """

    module: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]

    def call(
        self, graph: fx.Graph, run: Callable[..., Any], copies: dict[fx.Node, fx.Node]
    ) -> None:
        """Add a call of `run`, the compiled module, to a copy of the whole graph."""
        result = graph.call_function(run, tuple(map(copies.__getitem__, self.inputs)))
        for index, node in enumerate(self.outputs):
            copies[node] = graph.call_function(operator.getitem, (result, index))


def extract_subgraph(root: torch.nn.Module, nodes: Sequence[fx.Node]) -> Subgraph:
    """Copy nodes, given in order, out of a graph; `root` has what its `get_attr` nodes name."""
    inside = set(nodes)
    outputs = [node for node in nodes if not inside.issuperset(node.users)]
    used = (arg for node in nodes for arg in node.all_input_nodes)
    inputs = list(dict.fromkeys(node for node in used if node not in inside))
    return Subgraph(copy_nodes(root, nodes, outputs, inputs), inputs, outputs)
