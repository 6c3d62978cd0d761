"""Sizes of fake tensors as index expressions.

Static graphs only see ints here and never load sympy.  A SymInt's sympy expression is converted
node by node; what the index language lacks raises NoLowering and the graph runs eagerly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from weft_codegen.loops.index import IndexExpr, const, least, nonnegative, product, size


class NoLowering(Exception):
    """This operator or size has no loop form; the caller falls back to an extern call."""


def to_index(value: Any) -> IndexExpr:
    """An int, SymInt or IndexExpr as an index expression.  Raises NoLowering."""
    if isinstance(value, IndexExpr):
        return value
    if isinstance(value, int):
        return const(int(value))
    if isinstance(value, torch.SymInt):
        known = value.node.maybe_as_int()
        return const(known) if known is not None else _from_sympy(value.node.expr)
    raise NoLowering(f"{value!r} is not a size")


def to_shape(sizes: Any) -> tuple[IndexExpr, ...]:
    """A sequence of sizes as index expressions."""
    return tuple(const(n) if type(n) is int else to_index(n) for n in sizes)


def _from_sympy(expr: Any) -> IndexExpr:
    if expr.is_Integer:
        return const(int(expr))
    if expr.is_Symbol:
        if _is_data(expr):  # may be 0 or 1, unlike other sizes
            raise NoLowering(f"size {expr} is only known while running")
        return size(expr.name)
    name = type(expr).__name__
    if name in _ROUNDED and (quotient := _ratio(expr.args[0])):
        return _ROUNDED[name](*quotient)
    parts = [_from_sympy(arg) for arg in expr.args] if name in _BUILD else []
    if name == "Pow" and expr.exp.is_Integer and expr.exp > 0:
        return product([_from_sympy(expr.base)] * int(expr.exp))
    if not parts:
        raise NoLowering(f"size expression {expr}")
    return _BUILD[name](parts)


def _ratio(expr: Any) -> tuple[IndexExpr, IndexExpr] | None:
    """The two sizes whose true quotient a float is, where floats are exact enough to round it.

    A factor of few binary digits times a size is exact below 2**53, and a quotient of two sizes
    is never rounded to an integer that it is not.
    """
    factor, ints = 1.0, const(1)
    for part in expr.args if expr.is_Mul else (expr,):
        match type(part).__name__:
            case "ToFloat":
                ints = ints * _from_sympy(part.args[0])
            case "Float":
                factor *= float(part)
            case "IntTrueDiv" if not expr.is_Mul:
                top, bottom = map(_from_sympy, part.args)
                return (top, bottom) if nonnegative(top) and nonnegative(bottom) else None
            case _:
                return None
    over, under = factor.as_integer_ratio()
    exact = max(over, under) < _FEW and over >= 0 and nonnegative(ints)
    return (const(over) * ints, const(under)) if exact else None


_FEW = 2**12
_ROUNDED: dict[str, Callable[[IndexExpr, IndexExpr], IndexExpr]] = {
    "TruncToInt": lambda over, under: over // under,
    "FloorToInt": lambda over, under: over // under,
    "CeilToInt": lambda over, under: (over + under - 1) // under,
}


def _is_data(symbol: Any) -> bool:
    from torch.utils._sympy.symbol import SymT, symbol_is_type  # noqa: PLC0415 - sympy is loaded

    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


_BUILD: dict[str, Callable[[list[IndexExpr]], IndexExpr]] = {
    "Add": lambda parts: sum(parts, start=const(0)),
    "Mul": product,
    "FloorDiv": lambda parts: parts[0] // parts[1],
    "CleanDiv": lambda parts: parts[0] // parts[1],
    "Mod": lambda parts: parts[0] % parts[1],
    "PythonMod": lambda parts: parts[0] % parts[1],
    "Abs": lambda parts: parts[0] - 2 * least(parts[0], const(0)),
    "Min": lambda parts: functools.reduce(least, parts),
    "Max": lambda parts: functools.reduce(lambda a, b: a + b - least(a, b), parts),
}
