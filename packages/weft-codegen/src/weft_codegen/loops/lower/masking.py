"""Guarding loads: an expression whose loads only touch memory where a condition holds."""

from __future__ import annotations

from weft_codegen.loops.expr import Const, Expr, Load, Rewriter, apply, load


def masked(value: Expr, condition: Expr) -> Expr:
    """`value` with every load masked by `condition`; elsewhere its value is unspecified."""
    if isinstance(condition, Const) and condition.value:
        return value

    def leaf(node: Expr) -> Expr | None:
        if not isinstance(node, Load):
            return None
        mask = condition if node.mask is None else apply("and", condition, node.mask)
        # An index that is loaded itself is masked too.
        return load(node.buffer, rewrite.index(node.index), node.dtype, mask)

    rewrite = Rewriter(leaf)
    return rewrite(value)
