"""Which sums of floats are added up in parts: their rounding errors grow little with their length.

A scalar that is added to once per row, or by a loop without lanes, is a double. A row of
accumulators, as of a sum over columns, gets partial sums of ROW_CHUNK iterations each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from weft_codegen.kernels.c_types import C_TYPES
from weft_codegen.kernels.simd import SimdLoop, depends_on
from weft_codegen.loops.expr import Local
from weft_codegen.loops.program import (
    Body,
    Loop,
    Reduce,
    Set,
    locals_changed,
    locals_read,
    statements,
    stmt_exprs,
)

SUM_CHUNK = 512  # elements that an innermost loop adds up before they are added to the total
LANES_CHUNK = 4096  # the same, with more lanes
ROW_CHUNK = 256  # iterations of a loop around one over accumulators
_LARGEST = 16384  # bytes of accumulators: they and their partial sums stay in the first cache


def is_long(loop: Loop, most: int) -> bool:
    """Whether a loop has, or may have, more iterations than `most`."""
    return not loop.axis.extent.is_const or loop.axis.extent.value > most


def long_chains(body: Body, simd: Callable[[Loop], SimdLoop | None]) -> frozenset[Local]:
    """The scalars of float32 that many additions follow one another in."""
    found: set[Local] = set()

    def visit(body: Body, around: dict[Local, int], loops: tuple[Loop, ...]) -> None:
        for stmt in body:
            if isinstance(stmt, Loop):
                visit(stmt.body, around, (*loops, stmt))
            elif isinstance(stmt, Set):
                around[stmt.local] = len(loops)
            elif isinstance(stmt, Reduce) and adds_floats(stmt) and stmt.targets[0].is_scalar:
                inside = loops[around.get(stmt.targets[0], 0) :]
                several = len(inside) > 1 or any(is_long(loop, SUM_CHUNK) for loop in inside)
                narrow = stmt.targets[0].dtype is torch.float32
                if narrow and (several or any(simd(loop) is None for loop in inside)):
                    found.add(stmt.targets[0])

    visit(body, {}, ())
    return frozenset(found)


def rows_to_part(loop: Loop) -> list[Local]:
    """The rows of accumulators that many iterations of `loop`, not innermost, only add to."""
    if not is_long(loop, 2 * ROW_CHUNK):
        return []
    inside = list(statements(loop.body))
    simple = [stmt for stmt in inside if not isinstance(stmt, Loop)]
    adding = [stmt for stmt in simple if isinstance(stmt, Reduce) and adds_floats(stmt)]
    others = [stmt for stmt in simple if stmt not in adding]
    used = locals_read(*stmt_exprs(*simple)) | locals_changed(tuple(others))
    used |= {stmt.targets[0] for stmt in adding if depends_on(stmt.index, loop.axis)}
    targets = dict.fromkeys(stmt.targets[0] for stmt in adding)
    return [local for local in targets if local not in used and _is_small_row(local)]


def added_to_often(body: Body) -> frozenset[Local]:
    """The floats that several statements add to."""
    adding = [stmt for stmt in statements(body) if isinstance(stmt, Reduce)]
    count = Counter(stmt.targets[0] for stmt in adding if stmt.op in ("sum", "prod"))
    often = (local for local, times in count.items() if times > 1 and local.is_scalar)
    return frozenset(local for local in often if local.dtype.is_floating_point)


def adds_long(stmt: Reduce, loop: Loop, most: int) -> bool:
    """Whether to add up in chunks: the rounding error of one long chain would show."""
    return adds_floats(stmt) and is_long(loop, most)


def adds_floats(stmt: Reduce) -> bool:
    """Whether a statement adds to a float."""
    return stmt.op == "sum" and stmt.targets[0].dtype.is_floating_point


def _is_small_row(local: Local) -> bool:
    size = local.extent
    small = size.is_const and size.value * C_TYPES[local.dtype].bytes <= _LARGEST
    return small and not local.is_scalar
