"""Values of index expressions: ints or arrays where their atoms are given, or other expressions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from weft_codegen.loops import index as ix

_REBUILD: dict[type[ix.Pair], Callable[[ix.IndexExpr, ix.IndexExpr], ix.IndexExpr]] = {
    ix.Quotient: ix.floordiv,
    ix.Remainder: ix.mod,
    ix.Least: ix.least,
}
_VALUE: dict[type[ix.Pair], Callable[[Any, Any], Any]] = {
    ix.Quotient: operator.floordiv,
    ix.Remainder: operator.mod,
    ix.Least: lambda left, right: left - (left - right) * (left > right),
}


def substitute(
    expr: ix.IndexExpr, replace: Callable[[ix.Atom], ix.IndexExpr | None]
) -> ix.IndexExpr:
    """`expr` with each leaf (Axis, Size, ComputedIndex) for which `replace` gives one replaced."""

    def leaf(atom: ix.Atom) -> ix.IndexExpr:
        new = replace(atom)
        return ix.from_atoms((atom,)) if new is None else new

    return ix.index(evaluate(expr, leaf))


def evaluate(expr: ix.IndexExpr, leaf: Callable[[ix.Atom], Any]) -> Any:
    """The value of `expr`, where `leaf` gives that of each Axis, Size or ComputedIndex.

    These may be ints, arrays of ints or index expressions.
    """
    total: Any = 0
    for monomial, scale in expr.terms:
        term: Any = scale
        for atom in monomial:
            if not isinstance(atom, ix.Pair):
                term = term * leaf(atom)
                continue
            pieces = [evaluate(piece, leaf) for piece in ix.operands(atom)]
            if any(isinstance(piece, ix.IndexExpr) for piece in pieces):
                term = term * _REBUILD[type(atom)](*map(ix.index, pieces))
            else:
                term = term * _VALUE[type(atom)](*pieces)
        total = total + term
    return total


def evaluate_known(expr: ix.IndexExpr, known: Mapping[str, int]) -> int | None:
    """The value of `expr` where `known` has every size in it, else None."""
    try:
        return int(evaluate(expr, lambda atom: known[atom.key]))
    except KeyError:
        return None
