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
from weft_codegen.loops.index import ONE, ZERO, IndexExpr
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
    match outer.body:
        case (Loop(body=(Set(local, target, Load(mask=None) as source),)) as inner,):
            pass
        case _:
            return None
    kind = C_TYPES[local.dtype]
    if kind.value != kind.memory or kind.bytes not in _BYTES:
        return None
    axes = (outer.axis, inner.axis)
    across, width = (coefficient(target, loop) for loop in axes)
    step, along = (coefficient(source.index, loop) for loop in axes)
    if across is not ONE or along is not ONE or step is None or width is not outer.axis.extent:
        return None
    base = substitute(source.index, lambda atom: ZERO if atom in axes else None)
    return TransposeTile(local, source.buffer, base, step, inner, outer)
