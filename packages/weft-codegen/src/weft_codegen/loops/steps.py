"""How an index moves along loop axes."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from weft_codegen.loops import index as ix


@functools.lru_cache(1 << 14)  # layers that are alike ask for the same things
def coefficient(expr: ix.IndexExpr, loop: ix.Axis) -> ix.IndexExpr | None:
    """The stride of `expr` along `loop`: zero when absent, None when not linear in it."""
    total = ix.ZERO
    for monomial, scale in expr.terms:
        if loop in monomial:
            rest = list(monomial)
            rest.remove(loop)
            if loop in rest:
                return None
            total = total + ix.from_atoms(rest) * scale
            monomial = tuple(rest)
        for atom in monomial:
            if any(inner is loop for piece in ix.operands(atom) for inner in ix.atoms(piece)):
                return None
            if isinstance(atom, ix.ComputedIndex) and loop in atom.expr.axes:
                return None
    return total


def are_distinct(position: ix.IndexExpr, axes: Iterable[ix.Axis]) -> bool:
    """Whether other values of `axes`, outermost first, are certain to give other positions.

    What comes on top of an axis's steps may depend on it: it only has to stay below one step.
    """
    for loop in axes:
        step = ix.ZERO
        for monomial, scale in position.terms:
            if loop in monomial:
                step = step + ix.from_atoms(a for a in monomial if a is not loop) * scale
        position = position - step * loop.at
        known = all(isinstance(atom, ix.Size) for atom in ix.atoms(step))
        if not (known and ix.in_range(position, step)):
            return False
    return True
