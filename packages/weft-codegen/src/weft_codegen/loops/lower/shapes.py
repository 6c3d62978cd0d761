"""Sizes of fake tensors as index expressions, and numbers as scalar ones.

Static graphs only see ints here and never load sympy.  A SymInt's sympy expression is converted
node by node; what the index language lacks raises NoLowering and the graph runs eagerly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from weft_codegen.loops.expr import Expr, cast, compute_dtype, constant, index_value
from weft_codegen.loops.index import IndexExpr, const, least, nonnegative, product, size


class NoLowering(Exception):
    """This operator or size has no loop form; the caller falls back to an extern call.

    `operator` is the one whose lowering the whole graph fails at, where it does.
    """

    operator: str = ""


def require(condition: bool, reason: str) -> None:
    """Raise NoLowering(reason) unless `condition`."""
    if not condition:
        raise NoLowering(reason)


def to_index(value: Any) -> IndexExpr:
    """An int, SymInt or IndexExpr as an index expression.  Raises NoLowering."""
    if isinstance(value, IndexExpr):
        return value
    if isinstance(value, int):
        return const(int(value))
    if isinstance(value, torch.SymInt):
        known = value.node.maybe_as_int()
        if known is not None:
            return const(known)
        return from_sympy(value.node.expr, value.node.shape_env)
    raise NoLowering(f"{value!r} is not a size")


def to_shape(sizes: Any) -> tuple[IndexExpr, ...]:
    """A sequence of sizes as index expressions."""
    return tuple(const(n) if type(n) is int else to_index(n) for n in sizes)


NARROW = (torch.float16, torch.bfloat16)


def number(value: Any, dtype: torch.dtype) -> Expr:
    """A Python scalar, symbolic int or number computed from sizes as an expression of `dtype`."""
    if isinstance(value, Expr):
        return cast(value, dtype)
    if isinstance(value, IndexExpr | torch.SymInt):
        return cast(index_value(to_index(value)), dtype)
    require(isinstance(value, bool | int | float), f"operand {value!r}")
    if dtype in NARROW:
        value = torch.tensor(value, dtype=torch.float64).to(dtype).item()
        return constant(value, compute_dtype(dtype))
    return constant(value, dtype)


Rewrite = Callable[[IndexExpr], IndexExpr]
_rewrite: ContextVar[Rewrite] = ContextVar("_rewrite", default=lambda expr: expr)


@contextmanager
def rewritten(rewrite: Rewrite) -> Iterator[None]:
    """Every size converted meanwhile goes through `rewrite`, and so does each part of it."""
    token = _rewrite.set(rewrite)
    try:
        yield
    finally:
        _rewrite.reset(token)


def from_sympy(expr: Any, env: Any) -> IndexExpr:
    """A sympy expression of a ShapeEnv as an index expression.  Raises NoLowering."""
    return _rewrite.get()(_converted(expr, env))


def _converted(expr: Any, env: Any) -> IndexExpr:
    if expr.is_Integer:
        return const(int(expr))
    if expr.is_Symbol:
        if _is_data(expr):  # may be 0 or 1, unlike other sizes
            raise NoLowering(f"size {expr} is only known while running")
        bounds = env.var_to_range.get(expr)
        sign = 0 if bounds is None else bool(bounds.lower >= 1) - bool(bounds.upper <= -1)
        return size(expr.name, sign)
    name = type(expr).__name__
    if name in _ROUNDED and (quotient := _ratio(expr.args[0], env)):
        return _ROUNDED[name](*quotient)
    parts = [from_sympy(arg, env) for arg in expr.args] if name in _BUILD else []
    if name == "Pow" and expr.exp.is_Integer and expr.exp > 0:
        return product([from_sympy(expr.base, env)] * int(expr.exp))
    if not parts:
        raise NoLowering(f"size expression {expr}")
    return _BUILD[name](parts)


def _ratio(expr: Any, env: Any) -> tuple[IndexExpr, IndexExpr] | None:
    """The two sizes whose true quotient a float is, where floats are exact enough to round it.

    A factor of few binary digits times a size is exact below 2**53, and a quotient of two sizes
    is never rounded to an integer that it is not.
    """
    factor, ints = 1.0, const(1)
    for part in expr.args if expr.is_Mul else (expr,):
        match type(part).__name__:
            case "ToFloat":
                ints = ints * from_sympy(part.args[0], env)
            case "Float":
                factor *= float(part)
            case "IntTrueDiv" if not expr.is_Mul:
                top, bottom = (from_sympy(arg, env) for arg in part.args)
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
