"""Turn symbolic sizes back into fx nodes. Read this only when a graph has dynamic shapes.

A SymInt met while tracing is an expression over size symbols (`2*s0 + 1`). A graph needs nodes
for it, so `SymbolTable` remembers which node yields which symbol and writes the arithmetic out
once per expression. Static graphs never come here, so sympy is not imported at module level.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from weft_core.errors import Unsupported
from weft_core.jagged import is_ragged_size

if TYPE_CHECKING:
    import sympy

SymValue = torch.SymInt | torch.SymFloat | torch.SymBool
"""A symbolic Python scalar."""


def hint(number: Any, unknown: int = 4096) -> int:
    """The example value of a size; `unknown` for one that only the data decides."""
    if isinstance(number, int):
        return number
    return int(number.node.hint) if number.node.has_hint() else unknown


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
    "TruncToInt": torch.sym_int,
    "CeilToInt": math.ceil,
    "FloorToInt": math.floor,
    "Abs": operator.abs,
    "BitwiseFn_bitwise_and": operator.and_,
    "BitwiseFn_bitwise_or": operator.or_,
    "BitwiseFn_bitwise_xor": operator.xor,
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
        meta: the key of `Node.meta` that holds a node's symbolic value.
        raw: know values by their expressions as they were made, not by what was found out since.
    """

    def __init__(self, graph: fx.Graph, meta: str = "val", raw: bool = False) -> None:
        self._graph = graph
        self._meta = meta
        self._expr_of = operator.attrgetter("node._expr" if raw else "node.expr")
        self._known: dict[sympy.Basic, fx.Node] = {}
        self._carriers: list[tuple[sympy.Basic, fx.Node, int, torch.SymInt]] = []

    def bind(self, value: SymValue, node: fx.Node) -> None:
        """Record that `node` yields `value`; the first node of an expression wins."""
        self._known.setdefault(self._expr_of(value), node)

    def bind_sizes(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Record that `node`, a tensor, carries the symbols among its sizes."""
        for dim, size in enumerate(tensor.shape):
            if not isinstance(size, torch.SymInt) or is_ragged_size(size):
                continue
            if self._expr_of(size) not in self._known:
                self._carriers.append((self._expr_of(size), node, dim, size))

    def bind_value(self, value: Any, node: fx.Node) -> None:
        """Record what `node` yields: a symbolic value, or a tensor with its sizes."""
        if isinstance(value, torch.Tensor):
            self.bind_sizes(value, node)
        elif isinstance(value, SymValue):
            self.bind(value, node)

    def node_of(self, value: SymValue) -> fx.Node | int | float | bool:
        """Return the node that yields `value`, or its Python constant when it has no symbol left.

        Raises:
            Unsupported: a symbol that no input and no earlier tensor carries.
        """
        node: fx.Node | int | float | bool = self.build(value.node.expr, value)
        return node

    def build(self, expr: sympy.Basic, value: Any = None) -> Any:
        """Return what yields an expression, of the symbolic value `value` if it is at hand.

        Raises:
            Unsupported: as `node_of` does.
        """
        if not expr.free_symbols:
            return _constant(expr)
        if expr in self._known:
            return self._known[expr]
        for carried, tensor_node, dim, size in self._carriers:
            if carried == expr:
                return self._emit(expr, torch.ops.aten.sym_size.int, (tensor_node, dim), size)
        kind = type(expr).__name__
        if kind not in _OPERATIONS:
            raise Unsupported(
                "size-arithmetic",
                f"no node yields the symbolic value {expr}",
                "keep the number in a tensor",
            )
        operands = [self.build(part) for part in expr.args]
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
        if value is None:
            value = function(*(a.meta[self._meta] if isinstance(a, fx.Node) else a for a in args))
        node.meta[self._meta] = value
        if expr is not None:
            self._known[expr] = node
        return node


def _constant(expr: sympy.Basic) -> int | float | bool:
    if expr.is_Boolean:
        return bool(expr)
    return int(expr) if expr.is_integer else float(expr)


def equal_sizes(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether sizes are equal for every value of their symbols; asks for no guards."""
    return len(left) == len(right) and all(
        a == b if isinstance(a, int) and isinstance(b, int) else _expression(a) == _expression(b)
        for a, b in zip(left, right, strict=True)
    )


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr
