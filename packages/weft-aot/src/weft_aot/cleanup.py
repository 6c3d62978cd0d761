"""Cheap simplifications of a joint graph before the cut: no-ops, common subexpressions, dead code.

Forward values that leave the graph keep their own memory: two results that happen to be equal must
not become one tensor, because the caller may write to one of them. The nodes those values are made
of (`escaping`) are therefore never replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from weft_core.node_effects import drop_dead_nodes, has_effect
from weft_core.symnodes import equal_sizes

from weft_aot.walk import copies_input, view_chain

aten = torch.ops.aten


def clean(module: fx.GraphModule, num_values: int) -> None:
    """Simplify `module` in place; its first `num_values` outputs are the forward values."""
    graph = module.graph
    results: Any = graph.output_node().args[0]
    values = [value for value in results[:num_values] if isinstance(value, fx.Node)]
    escaping = {node for value in values for node in _memory_of(value)}
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node in escaping or has_effect(node):
            if node.op == "call_function" and not has_effect(node):
                seen.setdefault(_key(node), node)
            continue
        simpler = _simplify(node)
        if simpler is None:
            simpler = seen.setdefault(_key(node), node)
        if simpler is not node:
            node.replace_all_uses_with(simpler)
            graph.erase_node(node)
    _settle_writes(graph)
    drop_dead_nodes(graph)
    module.recompile()


_SCATTERS = (
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.as_strided_scatter.default,
)
_EMPTY = (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided)


def _settle_writes(graph: fx.Graph) -> None:
    """Take writes through an `expand` that changes nothing for what they are.

    C++ functionalisation makes `base + (written - base)` of them, which is NaN where the base is
    memory that nothing was written to yet. (`is_grads_batched` fills its results like this.)
    """
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        base, change = (*node.args, None)[:2]
        if not isinstance(change, fx.Node) or change.target is not aten.sub.Tensor:
            continue
        written: Any = change.args[0]
        if node.kwargs or change.kwargs or change.args[1] is not base:
            continue
        made_of = written.target in _SCATTERS and written.args[0] is base and written
        while made_of and made_of.target in _SCATTERS:
            made_of = made_of.args[0]
        packet = getattr(made_of and made_of.target, "overloadpacket", None)
        if packet in _EMPTY and same_layout(node, written):
            node.replace_all_uses_with(written)


def _memory_of(node: fx.Node) -> Iterator[fx.Node]:
    """`node` and what it shares memory with, on to where that is made."""
    for one in view_chain(node):
        yield one
        if one.target is operator.getitem:  # a result of several
            yield one.args[0]  # type: ignore[misc]
        if one.target is aten._unsafe_view.default:  # of a copy, which a reshape made
            yield from _memory_of(one.args[0])  # type: ignore[arg-type]


def _key(node: fx.Node) -> Any:
    return (node.target, _freeze(node.args), _freeze(node.kwargs))


def _freeze(argument: Any) -> Any:
    """A hashable twin; the type tells 1, 1.0 and True apart, and repr -0.0 and nan."""
    if isinstance(argument, (list, tuple)):
        return tuple(map(_freeze, argument))
    if isinstance(argument, dict):
        return tuple((name, _freeze(value)) for name, value in argument.items())
    if isinstance(argument, float):
        return (float, repr(argument))
    return (type(argument), argument)


def _simplify(node: fx.Node) -> fx.Node | None:
    """The node that `node` merely repeats, or None."""
    rule = _RULES.get(node.target)
    source = node.args[0] if node.args else None
    return rule(node, source) if rule and isinstance(source, fx.Node) else None


def _unchanged(node: fx.Node, source: fx.Node) -> fx.Node | None:
    """For ops that keep the elements: a no-op if dtype, device, sizes and strides are the same."""
    return source if same_layout(node, source) else None


def same_shape(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes' tensors have one dtype, device and size."""
    a, b = node.meta["val"], other.meta["val"]
    same = a.dtype == b.dtype and a.device == b.device and a.dim() == b.dim()
    return same and equal_sizes(a.shape, b.shape)


def same_layout(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes' tensors have one dtype, device, size and strides."""
    strides = (one.meta["val"].stride() for one in (node, other))
    return same_shape(node, other) and equal_sizes(*strides)


def _by_one(node: fx.Node, source: fx.Node) -> fx.Node | None:
    factor = node.args[1]
    one = isinstance(factor, (int, float)) and factor == 1 and not node.kwargs
    return _unchanged(node, source) if one else None


def _twice(node: fx.Node, source: fx.Node) -> fx.Node | None:
    """t(t(x)) = x. Equal sizes alone would not do: a square matrix is not its transpose."""
    back = source.target is node.target and set(source.args[1:]) == set(node.args[1:])
    undone = source.args[0] if back else None
    return undone if isinstance(undone, fx.Node) else None


def _in_order(node: fx.Node, source: fx.Node) -> fx.Node | None:
    order: Any = node.args[1]
    return source if list(order) == list(range(len(order))) else None


_RULES: dict[Any, Callable[[fx.Node, fx.Node], fx.Node | None]] = {
    aten.view.default: _unchanged,
    aten._unsafe_view.default: _unchanged,
    aten.expand.default: _unchanged,
    aten.clone.default: lambda node, of: None if copies_input(node) else _unchanged(node, of),
    aten._to_copy.default: _unchanged,
    aten.permute.default: _in_order,
    aten.t.default: _twice,
    aten.transpose.int: _twice,
    aten.mul.Tensor: _by_one,
    aten.mul.Scalar: _by_one,
    aten.div.Tensor: _by_one,
    aten.div.Scalar: _by_one,
}
