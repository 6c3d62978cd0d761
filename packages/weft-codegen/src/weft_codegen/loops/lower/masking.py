"""Conditions on places, and expressions whose loads only touch memory where one holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weft_codegen.loops.expr import Const, Expr, Load, constant, index_value, load, where
from weft_codegen.loops.index import IndexExpr
from weft_codegen.loops.rewrite import Rewriter


def masked(value: Expr, condition: Expr) -> Expr:
    """`value` with every load masked by `condition`; elsewhere its value is unspecified."""
    if isinstance(condition, Const) and condition.value:
        return value

    def leaf(node: Expr) -> Expr | None:
        if not isinstance(node, Load):
            return None
        mask = condition if node.mask is None else condition & node.mask
        # An index that is loaded itself is masked too.
        return load(node.buffer, rewrite.index(node.index), node.dtype, mask)

    rewrite = Rewriter(leaf)
    return rewrite(value)


def sum_inside(terms: Iterable[tuple[Expr, Expr]], dtype: torch.dtype) -> Expr:
    """The sum of values, each with the condition where it counts."""
    zero: Expr = constant(0, dtype)
    return sum((where(inside, value, zero) for inside, value in terms), start=zero)


def within(at: IndexExpr, first: IndexExpr, end: IndexExpr) -> Expr:
    """Whether first <= at < end."""
    return (index_value(at) >= index_value(first)) & (index_value(at) < index_value(end))
