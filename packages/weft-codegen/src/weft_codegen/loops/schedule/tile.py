"""Tiles for pointwise nests that read one way and write the other (transposing copies).

In tiles what is read across its lines is first brought into a local, transposed, so that both sides
walk along their lines. That pair of loops is what an emitter may write as vector shuffles:

    for c in 0..64:  for r in 0..64:  t[r*64 + c] = source[c*stride + r]
    for r in 0..64:  for c in 0..64:  result[r*stride + c] = f(t[r*64 + c], ...)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft_codegen.loops.expr import Expr, Load, Local, read, walk
from weft_codegen.loops.index import ONE, ZERO, Axis, IndexExpr, as_axis, axis
from weft_codegen.loops.program import Body, Loop, Set, Stmt, Store, stmt_exprs
from weft_codegen.loops.rewrite import Rewriter
from weft_codegen.loops.schedule.align import row_major
from weft_codegen.loops.schedule.group import Group, rewritten
from weft_codegen.loops.schedule.split import rewritten as rewritten_stmt
from weft_codegen.loops.steps import coefficient

# Float32 elements in a cache line.
TILE = 16
# Sums of a matrix product that are kept in registers at once.
_SUMS = 256
# Rows and columns of a tile on a CPU (the local stays in its first cache), and otherwise.
CPU_TILE, OTHER_TILE = (64, 64), (32, 32)
# Smaller matrices stay in cache anyway.
_LEAST = 4 * TILE


@dataclass(frozen=True)
class Blocked:
    """An axis cut into blocks: axis = block * size + inner, while inner < limit.

    `block` is None when one block covers the axis; `limit` is None when blocks fit evenly.
    """

    block: Axis | None
    inner: Axis
    limit: IndexExpr | None
    position: IndexExpr


def blocked(loop: Axis, size: int, name: str) -> Blocked:
    """`loop` in blocks of `size`; `name` begins the names of the new axes."""
    blocks = axis(f"{name}_block", (loop.extent + size - 1) // size)
    inner = axis(name, size)
    even = loop.extent.is_const and loop.extent.value % size == 0
    return Blocked(
        None if blocks is ZERO else as_axis(blocks),
        as_axis(inner),
        None if even else loop.extent - blocks * size,
        blocks * size + inner,
    )


def product_block(rows: IndexExpr, columns: IndexExpr) -> tuple[int, int] | None:
    """(rows, columns) of a matrix product whose sums stay in registers; None if none fits evenly.

    16 AVX-512 registers of sums: each element of the right operand serves all rows of the block,
    each of the left one all columns, and as many additions are in flight as the latency asks for.
    """
    if not rows.is_const or not columns.is_const:
        return None
    height = next((n for n in range(8, 0, -1) if rows.value % n == 0), 1)
    for width in range(_SUMS // max(height, 2) // TILE * TILE, 0, -TILE):
        if columns.value and columns.value % width == 0:
            return height, width
    return None


def transposed(group: Group) -> tuple[Axis, Axis] | None:
    """(row, inner) axes to tile: some load is contiguous along `row`, not along the inner one."""
    inner = group.axes[-1]
    large = [loop for loop in group.axes[:-1] if _large(loop)]
    if not _large(inner):
        return None
    for member in group.members:
        for load in member.node.loads:
            if coefficient(load.index, inner) in (None, ZERO, ONE):
                continue
            for loop in large:
                if coefficient(load.index, loop) is ONE:
                    return loop, inner
    return None


def _large(loop: Axis) -> bool:
    return loop.extent.is_const and loop.extent.value >= _LEAST


def substituted(group: Group, blocks: dict[Axis, Blocked], axes: tuple[Axis, ...]) -> Group:
    """`group` over `axes`, each key of `blocks` replaced by its blocked position."""
    mapped = {loop: loop.at for loop in group.axes}
    mapped.update({loop: cut.position for loop, cut in blocks.items()})
    members = tuple(rewritten(member, mapped) for member in group.members)
    return Group(members, axes, group.reduced)


def inside_tile(
    statements: list[Stmt], outer: Blocked, inner: Blocked, notes: tuple[str, ...] = ()
) -> Body:
    """`statements` in the two loops within a tile, `notes` on the outer one."""
    body: Body = (Loop(inner.inner, tuple(statements), "serial", inner.limit),)
    return (Loop(outer.inner, body, "serial", outer.limit, notes),)


def transpose_reads(
    statements: list[Stmt], row: Blocked, column: Blocked, new_local: Callable[..., Local]
) -> tuple[Body, list[Stmt]]:
    """(loops that bring transposed reads into locals, `statements` reading those instead).

    Only stores are rewritten, and no load of a buffer that they write.
    """
    written = {stmt.buffer for stmt in statements if isinstance(stmt, Store)}
    loads = [node for node in walk(*stmt_exprs(*statements)) if isinstance(node, Load)]
    loads = [n for n in loads if n.buffer not in written and _is_transposed(n, row, column)]
    if not all(isinstance(stmt, Store) for stmt in statements):
        return (), statements
    place = row_major((row.inner, column.inner))
    fills: list[Stmt] = []
    held: dict[Expr, Expr] = {}
    for node in loads:
        local = new_local(node.dtype, row.inner.extent * column.inner.extent)
        fills += inside_tile([Set(local, place, node)], column, row)
        held[node] = read(local, place)
    rewrite = Rewriter(held.get)
    return tuple(fills), [rewritten_stmt(stmt, rewrite) for stmt in statements]


def _is_transposed(node: Load, row: Blocked, column: Blocked) -> bool:
    """Whether a load walks along rows of the tile, and far along its columns."""
    along = coefficient(node.index, row.inner)
    across = coefficient(node.index, column.inner)
    far = across is not None and across is not ZERO and across is not ONE
    return node.mask is None and along is ONE and far
