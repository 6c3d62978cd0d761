"""Results differentiated apart, as eager does it: one node for autograd for each part of a graph.

Results that have history in common are a *part*: their gradients meet in the backward graph. That
they meet in the gradient of an input does not count, for there the engine adds gradients up. The
engine runs and frees parts one by one, and comes to an input only from parts that depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg
from weft_core.node_effects import drop_dead_nodes
from weft_core.symnodes import SymbolTable

from weft_aot.cleanup import same_shape
from weft_aot.records import BackwardComponent, JointGraph, Partition
from weft_aot.walk import Bits, ancestors, depending, union

aten = torch.ops.aten


def split_backward(joint: JointGraph, cut: Partition) -> list[BackwardComponent]:
    """The parts of a graph that was cut, in the order of their first results."""
    graph = cut.backward.graph
    results: Any = graph.output_node().args[0]
    sums = _Sums(results)
    tangents = graph.find_nodes(op="placeholder")[len(cut.saved) :]
    behind = depending(graph.nodes, tangents)
    parts = _meeting(graph, behind, sums)
    if len(parts) == 1:
        return [_part(joint, cut, cut.backward, range(len(cut.saved)), parts[0], results, behind)]
    return [_extract(joint, cut, part, sums, behind) for part in parts]


class _Sums:
    """Gradients of inputs that are sums of gradients; `nodes` are the additions."""

    def __init__(self, results: Sequence[fx.Node | None]) -> None:
        self.nodes: set[fx.Node] = set()
        self.terms = [self._terms(result, results.count(result) == 1) for result in results]

    def _terms(self, result: fx.Node | None, alone: bool) -> list[fx.Node]:
        terms, pending = [], [] if result is None else [result]
        while pending:
            node = pending.pop()
            if alone and len(node.users) == 1 and _is_sum(node):
                self.nodes.add(node)
                pending += reversed(node.all_input_nodes)
            else:
                terms.append(node)
        return terms


def _is_sum(node: fx.Node) -> bool:
    """Whether a node adds two tensors of its size and dtype, in whatever memory layout."""
    terms = node.all_input_nodes
    if node.target is not aten.add.Tensor or node.kwargs or len(terms) != 2:
        return False
    tensors = all(isinstance(term.meta["val"], torch.Tensor) for term in terms)  # and no size
    return tensors and all(same_shape(node, term) for term in terms)


def _meeting(graph: fx.Graph, behind: dict[fx.Node, Bits], sums: _Sums) -> list[Bits]:
    """Tangents that meet in a node that is no sum for an input."""
    parts = [bits for node, bits in behind.items() if node.op == "placeholder" and bits]
    for node in graph.nodes:
        bits = behind[node]
        if bits & (bits - 1) and node.op != "output" and node not in sums.nodes:
            joined = sum(part for part in parts if part & bits)
            parts = [part for part in parts if not part & bits] + [joined]
    return sorted(parts, key=lambda part: part & -part)


def _extract(
    joint: JointGraph, cut: Partition, part: Bits, sums: _Sums, behind: dict[fx.Node, Bits]
) -> BackwardComponent:
    """One part with a backward graph of its own.

    A term that depends on no tangent goes to the first part that has others beside it.
    """
    firsts = [union(map(behind.__getitem__, found)) or 1 for found in sums.terms]
    terms = [
        [term for term in found if (behind[term] or first & -first) & part]
        for found, first in zip(sums.terms, firsts, strict=True)
    ]
    needed = ancestors(term for found in terms for term in found)
    given = cut.backward.graph.find_nodes(op="placeholder")
    copied = [saved.source.kind == "copy" for saved in cut.saved]
    places = [k for k, is_copied in enumerate(copied) if is_copied or given[k] in needed]
    new, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for k, node in enumerate(given):
        if k in places or behind[node] & part:
            copies[node] = new.node_copy(node)
    for node in cut.backward.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = new.node_copy(node, copies.__getitem__)
    results = [_sum(new, [copies[term] for term in found]) for found in terms]
    new.output(tuple(results))
    module = _LazyGraphModule(cut.backward, new, "Backward")
    reach = {copy: behind[node] for node, copy in copies.items()}
    for found, result in zip(terms, results, strict=True):
        if result is not None:
            reach[result] = union(map(behind.__getitem__, found))
    return _part(joint, cut, module, places, part, results, reach)


def _sum(graph: fx.Graph, terms: list[fx.Node]) -> fx.Node | None:
    if not terms:
        return None
    total = terms[0]
    for term in terms[1:]:
        made = graph.call_function(aten.add.Tensor, (total, term))
        made.meta.update(total.meta)
        total = made
    return total


def without_tangents(part: BackwardComponent, places: Collection[int]) -> fx.GraphModule | None:
    """The backward of a part where the gradients at `places` are missing, or None.

    Zeros in their place make 0 * inf of what eager does not compute. So what depends on them alone
    is left out; where it meets other gradients, these go on alone, or with zeros. None: it is
    moved, scaled and added up only, for which zeros do.
    """
    graph = part.backward.graph
    given = graph.find_nodes(op="placeholder")
    tangents = given[len(part.saved) :]
    missing = sum(1 << place for place in places)
    behind = depending(graph.nodes, tangents)
    absent = {node for node, bits in behind.items() if bits and not bits & ~missing}
    moved = [node for node in absent if node.op != "placeholder" and node.op != "output"]
    alone = all(absent.issuperset(node.all_input_nodes) for node in moved)
    if alone and not any(map(_loses_zeros, moved)):
        return None
    new, copies = fx.Graph(), dict[fx.Node, Any]()
    table = SymbolTable(new)
    for node in graph.nodes:
        left = [term for term in node.all_input_nodes if term not in absent]
        if node.op == "placeholder":
            copies[node] = new.node_copy(node)
            table.bind_value(node.meta.get("val"), copies[node])
        elif node.op == "output":
            new.output(map_arg(node.args[0], lambda one: None if one in absent else copies[one]))
        elif node not in absent and _is_sum(node) and len(left) == 1:
            copies[node] = copies[left[0]]
        elif node not in absent:
            for term in absent.difference(copies).intersection(node.all_input_nodes):
                copies[term] = _zeros(new, table, term)
            copies[node] = new.node_copy(node, copies.__getitem__)
            table.bind_value(node.meta.get("val"), copies[node])
    drop_dead_nodes(new)
    return _LazyGraphModule(part.backward, new, "Backward")


def _loses_zeros(node: fx.Node) -> bool:
    """Whether a node divides by zero, or multiplies by an infinity or NaN."""
    numbers = [arg for arg in node.args if isinstance(arg, int | float)]
    if getattr(node.target, "overloadpacket", None) is aten.div:
        return 0 in numbers
    return not all(map(math.isfinite, numbers))


def _zeros(graph: fx.Graph, table: SymbolTable, like: fx.Node) -> fx.Node:
    value = like.meta["val"]
    size = [table.node_of(n) if isinstance(n, torch.SymInt) else n for n in value.shape]
    made = graph.call_function(
        aten.full.default, (size, 0), {"dtype": value.dtype, "device": value.device}
    )
    made.meta["val"] = value.new_empty(value.shape)
    return made


def _part(
    joint: JointGraph,
    cut: Partition,
    backward: fx.GraphModule,
    places: Sequence[int],
    part: Bits,
    results: Sequence[fx.Node | None],
    behind: dict[fx.Node, Bits],
) -> BackwardComponent:
    own = [k for k in range(len(joint.tangents)) if part >> k & 1]
    return BackwardComponent(
        backward,
        saved=tuple(cut.saved[place] for place in places),
        tangents=tuple(joint.tangents[k] for k in own),
        gradients=tuple(
            index if result is not None else None
            for index, result in zip(joint.gradients, results, strict=True)
        ),
        behind=tuple(
            tuple(place for place, k in enumerate(own) if result and behind[result] >> k & 1)
            for result in results
        ),
        inner=tuple(
            (place, users)
            for place, k in enumerate(own)
            if (users := tuple(own.index(c) for c, of in joint.made_of if k in of and c in own))
        ),
    )
