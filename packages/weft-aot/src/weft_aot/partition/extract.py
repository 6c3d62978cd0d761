"""Cut a joint graph along a set of saved nodes into a forward and a backward module."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from weft_core.collectives import REGATHER, is_collective

from weft_aot.partition.classify import Classes
from weft_aot.partition.policy import SCALAR
from weft_aot.records import JointGraph, Partition, SavedValue, ValueRef
from weft_aot.walk import ancestors, view_root

aten = torch.ops.aten


def extract(joint: JointGraph, classes: Classes, saved_nodes: list[fx.Node]) -> Partition:
    """Build both modules; `saved_nodes` must separate the gradients from the forward."""
    symbols = [node for node in saved_nodes if _is_symbolic(node)]
    nodes = symbols + [node for node in saved_nodes if not _is_symbolic(node)]
    forward, sources = _forward(joint, classes, nodes)
    backward = _backward(joint, classes, nodes)
    saved = tuple(
        SavedValue(node.name, source, _is_symbolic(node))
        for node, source in zip(nodes, sources, strict=True)
    )
    return Partition(forward, backward, saved)


def _gather_only_used(graph: fx.Graph, gather: fx.Node) -> None:
    """Drop the tensors of a coalesced all-gather whose results nobody takes, or would wait for."""
    tensors: Any = gather.args[0]
    items = {user.args[1]: user for user in gather.users if user.target is operator.getitem}
    used = [index for index in range(len(tensors)) if index in items]
    gather.args = ([tensors[index] for index in used], *gather.args[1:])
    gather.meta["val"] = [gather.meta["val"][index] for index in used]
    for place, index in enumerate(used):
        items[index].args = (gather, place)
    for index in set(range(len(tensors))).difference(used):
        node = tensors[index]
        while node.op == "call_function" and not node.users:  # a chain of casts and pads
            made, node = node, node.args[0]
            graph.erase_node(made)


def _is_symbolic(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), SCALAR)


def _forward(
    joint: JointGraph, classes: Classes, saved: list[fx.Node]
) -> tuple[fx.GraphModule, list[ValueRef]]:
    """The forward module, and where it leaves each saved node."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in classes.inputs:
        copies[node] = graph.node_copy(node)
    cloned = _saved_while_written(joint, classes, saved)
    needed = classes.forward | ancestors(saved, set(classes.inputs))
    for node in classes.order:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        if node in cloned:
            clone = graph.call_function(aten.clone.default, (copies[node],))
            clone.meta["val"] = node.meta["val"]
            cloned[node] = clone
    index_of_input = {node: i for i, node in enumerate(classes.inputs)}
    index_of_value = {node: i for i, node in reversed(list(enumerate(classes.values))) if node}
    extras: list[fx.Node] = []
    sources: list[ValueRef] = []
    for node in saved:
        if node in classes.copied:
            sources.append(ValueRef("copy", index_of_input[node]))
        elif node in index_of_input and node not in cloned:
            sources.append(ValueRef("input", index_of_input[node]))
        elif node in index_of_value and node not in cloned:
            sources.append(ValueRef("value", index_of_value[node]))
        else:
            sources.append(ValueRef("value", joint.num_values + len(extras)))
            extras.append(cloned.get(node) or copies[node])
    given = joint.results()[: joint.num_values]
    values = [copies[v] if isinstance(v, fx.Node) else v for v in given]
    graph.output((*values, *extras))
    return _LazyGraphModule(joint.module, graph, "Forward"), sources


def _saved_while_written(
    joint: JointGraph, classes: Classes, saved: list[fx.Node]
) -> dict[fx.Node, fx.Node | None]:
    """Saved nodes that live in the memory of an input the call writes: save copies of them."""
    written = {classes.inputs[mutation.index] for mutation in joint.mutations}
    nodes = [node for node in saved if node not in classes.copied]
    return {node: None for node in nodes if view_root(node) in written}


def _backward(joint: JointGraph, classes: Classes, saved: list[fx.Node]) -> fx.GraphModule:
    """The backward module; what it recomputes stands right before its first use."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in [*saved, *classes.tangents]:
        placeholder = graph.placeholder(node.name)
        placeholder.meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace")}
        copies[node] = placeholder

    def emit(target: fx.Node) -> None:
        pending = [target]
        while pending:
            node = pending[-1]
            missing = [source for source in node.all_input_nodes if source not in copies]
            if missing:
                pending += reversed(missing)
                continue
            pending.pop()
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)

    for node in classes.order:
        if node in classes.backward and node in classes.wanted:
            emit(node)
    for gradient in classes.gradients:
        if gradient is not None:
            emit(gradient)
    graph.output(tuple(copies[g] if g is not None else None for g in classes.gradients))
    for node in list(graph.nodes):
        several = isinstance(node.meta.get("val"), list | tuple)
        if several and REGATHER in node.meta and is_collective(node.target):
            _gather_only_used(graph, node)
    return _LazyGraphModule(joint.module, graph, "Backward")
