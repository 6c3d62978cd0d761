"""Loops of scans, in blocks, cut so that all but the scan itself runs in vector lanes.

for i:  t sum= f(i);  a[i] = g(t)      becomes      for i:  row[i] = f(i)
                                                    for i:  t sum= row[i];  row[i] = t
                                                    for i:  a[i] = g(row[i])
"""

from __future__ import annotations

from collections.abc import Callable

from weft_codegen.loops.expr import Apply, Expr, Local, read, walk
from weft_codegen.loops.index import ZERO, Axis, axis, const
from weft_codegen.loops.program import Body, Loop, Reduce, Set, Stmt, locals_read, stmt_exprs
from weft_codegen.loops.rewrite import Rewriter
from weft_codegen.loops.schedule.align import replacing
from weft_codegen.loops.schedule.split import rewritten
from weft_codegen.loops.schedule.tile import blocked

# A row of float64 is 2 KiB then: it stays in the first-level cache.
_BLOCK = 256


def split_scan(
    statements: list[Stmt], loop: Axis, new_local: Callable[..., Local], notes: tuple[str, ...]
) -> Body:
    """`statements` in loops over `loop`: one, unless there are scans and something to vectorise."""
    exprs = stmt_exprs(*statements)
    reads = locals_read(*exprs)
    scans = [stmt for stmt in statements if isinstance(stmt, Reduce) and stmt.targets[0] in reads]
    if not scans or not any(isinstance(node, Apply) for node in walk(*exprs)):
        return (Loop(loop, tuple(statements), notes=notes),)
    size = min(loop.extent.value or _BLOCK, _BLOCK) if loop.extent.is_const else _BLOCK
    cut = blocked(loop, size, "scan")
    here = axis("scan", size)
    at = Rewriter(at=replacing({loop: cut.position}))
    rows: dict[Expr, Expr] = {}
    parts: list[Stmt] = []
    rest: list[Stmt] = []
    for stmt in statements:
        moved = rewritten(rewritten(stmt, at), Rewriter(rows.get))
        if stmt not in scans:
            rest.append(moved)
            continue
        assert isinstance(moved, Reduce)
        (target,), (value,) = moved.targets, moved.values
        row = new_local(target.dtype, const(size))
        so_far, kept = read(target, ZERO), read(row, here)
        running = (Reduce(moved.op, (target,), ZERO, (kept,)), Set(row, here, so_far))
        parts.append(Loop(cut.inner, (Set(row, here, value),), limit=cut.limit, notes=notes))
        parts.append(Loop(cut.inner, running, limit=cut.limit))
        rows[so_far] = kept
    parts.append(Loop(cut.inner, tuple(rest), limit=cut.limit))
    return tuple(parts) if cut.block is None else (Loop(cut.block, tuple(parts)),)
