"""What a loop over rows, or along one, looks like: whether it pays to treat it apart."""

from __future__ import annotations

from weft_codegen.kernels.simd import depends_on
from weft_codegen.kernels.staged import find_staged
from weft_codegen.loops.expr import Op, walk
from weft_codegen.loops.program import Loop, Reduce, stmt_exprs

# Elements of a block whose rows are unrolled.
_IN_REGISTERS = 256
# Column reductions of at most so many operations take several rows at once.
_CHEAP = 12


def in_registers(loop: Loop) -> bool:
    """Whether a loop is the rows of a small block: unrolled, its sums stay in registers."""
    inner = loop.body[0]
    if len(loop.body) > 1 or not isinstance(inner, Loop):
        return False
    if loop.limit is not None or inner.limit is not None:
        return False
    rows, columns = loop.axis.extent, inner.axis.extent
    known = rows.is_const and columns.is_const and rows.value <= 8
    innermost = not any(isinstance(stmt, Loop) for stmt in inner.body)
    return known and innermost and rows.value * columns.value <= _IN_REGISTERS


def adds_rows(loop: Loop) -> bool:
    """Whether iterations only add to the same row of accumulators, at little cost."""
    inner = loop.body[0]
    if len(loop.body) > 1 or not isinstance(inner, Loop) or loop.limit is not None:
        return False
    nodes = list(walk(*(e for stmt in inner.body for e in stmt_exprs(stmt))))
    if find_staged(inner) or any(isinstance(x, Op) and x.name == "product" for x in nodes):
        return False
    return len(nodes) <= _CHEAP and all(
        isinstance(stmt, Reduce)
        and depends_on(stmt.index, inner.axis)
        and not depends_on(stmt.index, loop.axis)
        for stmt in inner.body
    )
