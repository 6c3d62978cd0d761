"""How an index moves along loop axes."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from weft_codegen.loops.index import (
    ZERO,
    Axis,
    ComputedIndex,
    IndexExpr,
    Size,
    atoms,
    from_atoms,
    in_range,
    operands,
)


@functools.lru_cache(1 << 14)  # layers that are alike ask for the same things
def coefficient(expr: IndexExpr, loop: Axis) -> IndexExpr | None:
    """The stride of `expr` along `loop`: zero when absent, None when not linear in it."""
    total = ZERO
    for monomial, scale in expr.terms:
        if loop in monomial:
            rest = list(monomial)
            rest.remove(loop)
            if loop in rest:
                return None
            total = total + from_atoms(rest) * scale
            monomial = tuple(rest)
        for atom in monomial:
            if any(inner is loop for piece in operands(atom) for inner in atoms(piece)):
                return None
            if isinstance(atom, ComputedIndex) and loop in atom.expr.axes:
                return None
    return total


def are_distinct(position: IndexExpr, axes: Iterable[Axis]) -> bool:
    """Whether other values of `axes`, outermost first, are certain to give other positions.

    What comes on top of an axis's steps may depend on it: it only has to stay below one step.
    """
    for loop in axes:
        step = ZERO
        for monomial, scale in position.terms:
            if loop in monomial:
                step = step + from_atoms(a for a in monomial if a is not loop) * scale
        position = position - step * loop.at
        if not (in_range(position, step) and all(isinstance(a, Size) for a in atoms(step))):
            return False
    return True
