"""Values of index expressions: ints or arrays where their atoms are given, or other expressions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from weft_codegen.loops.index import (
    Atom,
    IndexExpr,
    Least,
    Pair,
    Quotient,
    Remainder,
    floordiv,
    from_atoms,
    index,
    least,
    mod,
    operands,
)

_REBUILD: dict[type[Pair], Callable[[IndexExpr, IndexExpr], IndexExpr]] = {
    Quotient: floordiv,
    Remainder: mod,
    Least: least,
}
_VALUE: dict[type[Pair], Callable[[Any, Any], Any]] = {
    Quotient: operator.floordiv,
    Remainder: operator.mod,
    Least: lambda left, right: left - (left - right) * (left > right),
}


def substitute(expr: IndexExpr, replace: Callable[[Atom], IndexExpr | None]) -> IndexExpr:
    """`expr` with each leaf (Axis, Size, ComputedIndex) for which `replace` gives one replaced."""

    def leaf(atom: Atom) -> IndexExpr:
        new = replace(atom)
        return from_atoms((atom,)) if new is None else new

    return index(evaluate(expr, leaf))


def evaluate(expr: IndexExpr, leaf: Callable[[Atom], Any]) -> Any:
    """The value of `expr`, where `leaf` gives that of each Axis, Size or ComputedIndex.

    These may be ints, arrays of ints or index expressions.
    """
    total: Any = 0
    for monomial, scale in expr.terms:
        term: Any = scale
        for atom in monomial:
            if not isinstance(atom, Pair):
                term = term * leaf(atom)
                continue
            pieces = [evaluate(piece, leaf) for piece in operands(atom)]
            if any(isinstance(piece, IndexExpr) for piece in pieces):
                term = term * _REBUILD[type(atom)](*map(index, pieces))
            else:
                term = term * _VALUE[type(atom)](*pieces)
        total = total + term
    return total
