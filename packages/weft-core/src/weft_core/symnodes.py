"""Turn symbolic sizes back into fx nodes. Read this only when a graph has dynamic shapes.

A SymInt met while tracing is an expression over size symbols (`2*s0 + 1`). A graph needs nodes
for it, so `SymbolTable` remembers which node yields which symbol and writes the arithmetic out
once per expression. Static graphs never come here, so sympy is not imported at module level.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    import sympy

SymValue = torch.SymInt | torch.SymFloat | torch.SymBool
"""A symbolic Python scalar."""

# sympy class name -> Python function of the same operands. Names, so that sympy stays unloaded.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloatPow": operator.pow,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "ToFloat": torch.sym_float,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictGreaterThan": operator.gt,
    "StrictLessThan": operator.lt,
    "GreaterThan": operator.ge,
    "LessThan": operator.le,
    "Not": torch.sym_not,
    "And": operator.and_,
    "Or": operator.or_,
}
_FOLDED = {"Add", "Mul", "Max", "Min", "And", "Or"}


class SymbolTable:
    """Which node of `graph` yields each symbolic expression.

    Args:
        graph: where new nodes go, at the graph's current insert point.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._known: dict[sympy.Basic, fx.Node] = {}
        self._carriers: list[tuple[sympy.Basic, fx.Node, int]] = []

    def bind(self, value: SymValue, node: fx.Node) -> None:
        """Record that `node` yields `value`; the first node of an expression wins."""
        self._known.setdefault(value.node.expr, node)

    def bind_sizes(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Record that `node`, a tensor, carries the symbols among its sizes."""
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt) and size.node.expr not in self._known:
                self._carriers.append((size.node.expr, node, dim))

    def node_of(self, value: SymValue) -> fx.Node | int | float | bool:
        """Return the node that yields `value`, or its Python constant when it has no symbol left.

        Raises:
            KeyError: a symbol that no input and no earlier tensor carries.
        """
        node: fx.Node | int | float | bool = self._build(value.node.expr, value)
        return node

    def _build(self, expr: sympy.Basic, value: Any) -> Any:
        if expr in self._known:
            return self._known[expr]
        if not expr.free_symbols:
            return _constant(expr)
        for carried, tensor_node, dim in self._carriers:
            if carried == expr:
                size = tensor_node.meta["val"].shape[dim]
                return self._emit(expr, torch.ops.aten.sym_size.int, (tensor_node, dim), size)
        kind = type(expr).__name__
        if kind not in _OPERATIONS:
            raise KeyError(f"no node yields the symbolic value {expr}")
        operands = [self._build(part, None) for part in expr.args]
        function = _OPERATIONS[kind]
        while kind in _FOLDED and len(operands) > 2:
            operands[:2] = [self._emit(None, function, tuple(operands[:2]), None)]
        return self._emit(expr, function, tuple(operands), value)

    def _emit(
        self,
        expr: sympy.Basic | None,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        value: Any,
    ) -> fx.Node:
        node = self._graph.call_function(function, args)
        node.meta["val"] = value if value is not None else function(*map(_value, args))
        if expr is not None:
            self._known[expr] = node
        return node


def _value(operand: Any) -> Any:
    return operand.meta["val"] if isinstance(operand, fx.Node) else operand


def _constant(expr: sympy.Basic) -> int | float | bool:
    if expr.is_Boolean:
        return bool(expr)
    return int(expr) if expr.is_integer else float(expr)
