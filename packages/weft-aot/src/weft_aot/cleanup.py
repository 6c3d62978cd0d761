"""Cheap simplifications of a joint graph before the cut: no-ops, common subexpressions, dead code.

Forward values that leave the graph keep their own memory: two results that happen to be equal must
not become one tensor, because the caller may write to one of them. The nodes those values are made
of (`escaping`) are therefore never replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from weft_core.tracing import drop_dead_nodes, has_effect

aten = torch.ops.aten


def clean(module: fx.GraphModule, num_values: int) -> None:
    """Simplify `module` in place; its first `num_values` outputs are the forward values."""
    graph = module.graph
    escaping = _escaping(graph, num_values)
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node in escaping or has_effect(node):
            _remember(node, seen)
            continue
        simpler = _simplify(node)
        if simpler is None:
            simpler = seen.setdefault(_key(node), node)
        if simpler is not node:
            node.replace_all_uses_with(simpler)
            graph.erase_node(node)
    drop_dead_nodes(graph)
    module.recompile()


def _remember(node: fx.Node, seen: dict[Any, fx.Node]) -> None:
    if node.op == "call_function" and not has_effect(node):
        seen.setdefault(_key(node), node)


def _escaping(graph: fx.Graph, num_values: int) -> set[fx.Node]:
    """Nodes whose memory a forward value is, found through views."""
    output = next(iter(reversed(graph.nodes)))
    results: Any = output.args[0]
    pending = [node for node in results[:num_values] if isinstance(node, fx.Node)]
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        found.add(node)
        is_view = isinstance(node.target, OpOverload) and node.target.is_view
        if is_view and isinstance(node.args[0], fx.Node):
            pending.append(node.args[0])
    return found


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
    if rule is None or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if node.target is aten.t.default:
        # A transpose undoes a transpose; equal sizes alone would not make it a no-op.
        twice = source.target is aten.t.default
        return source.args[0] if twice else None  # type: ignore[return-value]
    return source if rule(node, source) and _same_value(node, source) else None


def _same_value(node: fx.Node, source: fx.Node) -> bool:
    """Same dtype, device, sizes and strides: then a no-op is one whatever its arguments."""
    a, b = node.meta["val"], source.meta["val"]
    return bool(
        a.dtype == b.dtype and a.device == b.device and a.dim() == b.dim()
        and all(_surely_equal(m, n) for m, n in zip(a.shape, b.shape))
        and all(_surely_equal(m, n) for m, n in zip(a.stride(), b.stride()))
    )  # fmt: skip


def _surely_equal(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a is b or (hasattr(a, "node") and hasattr(b, "node") and a.node.expr == b.node.expr)


def _always(node: fx.Node, source: fx.Node) -> bool:
    return True


def _by_one(node: fx.Node, source: fx.Node) -> bool:
    factor = node.args[1]
    return isinstance(factor, (int, float)) and factor == 1 and not node.kwargs


def _identity_permutation(node: fx.Node, source: fx.Node) -> bool:
    order = node.args[1]
    return list(order) == list(range(len(order)))  # type: ignore[arg-type]


_RULES: dict[Any, Callable[[fx.Node, fx.Node], bool]] = {
    aten.view.default: _always,
    aten._unsafe_view.default: _always,
    aten.expand.default: _always,
    aten.clone.default: _always,
    aten._to_copy.default: _always,
    aten.t.default: _always,
    aten.permute.default: _identity_permutation,
    aten.mul.Tensor: _by_one,
    aten.mul.Scalar: _by_one,
    aten.div.Tensor: _by_one,
    aten.div.Scalar: _by_one,
}
