"""Checks of indices at run time: a reduction looks, an operator raises.

A loop cannot raise, so `weft_codegen::check_index` is called when a reduction over the index tensor
is not zero (`Extern.when`); the reads and writes themselves clamp.

    code = 0             every index is inside
         = 2 * i + 1     i >= extent is outside
         = 2 * -i        i < 0 is
"""

from __future__ import annotations

import torch

from weft_codegen.loops.expr import Expr, apply, constant, index_value, where
from weft_codegen.loops.index import IndexExpr

_library = torch.library.Library("weft_codegen", "FRAGMENT")
_library.define("check_index(Tensor code, SymInt extent, int dim, str kind) -> ()")


def _raise(code: torch.Tensor, extent: int, dim: int, kind: str) -> None:
    number = int(code)
    index = number // 2 if number % 2 else -(number // 2)
    if kind == "lookup":
        raise IndexError("index out of range in self")
    error = RuntimeError if kind == "scatter" else IndexError
    said = "index_copy_(): " if kind == "copy" else ""
    raise error(f"{said}index {index} is out of bounds for dimension {dim} with size {extent}")


_library.impl("check_index", _raise, "CompositeExplicitAutograd")
check_index = torch.ops.weft_codegen.check_index.default


def violation(index: Expr, extent: IndexExpr, wraps: bool) -> Expr:
    """The code of one index (int64); negative ones count from the end if it `wraps`."""
    zero, size = constant(0, torch.int64), index_value(extent)
    below = where(index < (-size if wraps else zero), -index * 2, zero)
    return where(index >= size, index * 2 + 1, below)


def is_good(code: Expr) -> Expr:
    """Whether no index is outside."""
    return apply("eq", code, constant(0, torch.int64))


def clamped(index: Expr, extent: IndexExpr, wraps: bool) -> Expr:
    """`index` (int64) in [0, extent): what was inside stays, or is counted from the end."""
    zero, size = constant(0, torch.int64), index_value(extent)
    if wraps:
        index = where(index < zero, index + size, index)
    return apply("minimum", apply("maximum", index, zero), size - 1)
