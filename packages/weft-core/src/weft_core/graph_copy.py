"""Copy nodes of a graph into a module of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx


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
