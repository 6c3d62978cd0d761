"""Recognises the loops that transpose a tile of memory (see loops/schedule/tile.py).

    for c in 0..C:  for r in 0..R:  t[r*C + c] = a[base + c*step + r]

No compiler makes vector shuffles of these, so they become one call of weft_transpose_<bytes>
(weft_memory.h), which takes tiles at a ragged edge too.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft_codegen.kernels.c_types import C_TYPES
from weft_codegen.loops.evaluate import substitute
from weft_codegen.loops.expr import Load, Local
from weft_codegen.loops.index import ONE, ZERO, Axis, IndexExpr
from weft_codegen.loops.program import Loop, Set
from weft_codegen.loops.steps import coefficient

_BYTES = (2, 4, 8)


@dataclass(frozen=True)
class TransposeTile:
    """local[r*C + c] = buffer[base + c*step + r] for the rows and columns of a tile."""

    local: Local
    buffer: str
    base: IndexExpr
    step: IndexExpr
    row: Loop
    column: Loop


def match_transpose_tile(outer: Loop) -> TransposeTile | None:
    """The tile that `outer` transposes, if that is all it does."""
    inner = outer.body[0] if len(outer.body) == 1 else None
    if not isinstance(inner, Loop) or len(inner.body) != 1:
        return None
    stmt = inner.body[0]
    if not isinstance(stmt, Set) or not isinstance(stmt.value, Load) or stmt.value.mask:
        return None
    kind = C_TYPES[stmt.local.dtype]
    if kind.value != kind.memory or kind.bytes not in _BYTES:
        return None
    where = stmt.value.index
    width = coefficient(stmt.index, inner.axis)
    step = coefficient(where, outer.axis)
    if coefficient(stmt.index, outer.axis) is not ONE or coefficient(where, inner.axis) is not ONE:
        return None
    if step is None or width is not outer.axis.extent:
        return None
    axes: tuple[Axis, ...] = (outer.axis, inner.axis)
    base = substitute(where, lambda atom: ZERO if atom in axes else None)
    return TransposeTile(stmt.local, stmt.value.buffer, base, step, inner, outer)
