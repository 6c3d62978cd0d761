"""Decides which innermost loops may run in vector lanes, and what they carry between iterations,
and which loops around them pay to be treated apart.

`#pragma omp simd` promises the compiler that iterations are independent apart from the named
reductions, so the promise is made only where it can be shown from the statements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft_codegen.loops.expr import Load, Local, index_value, is_product, walk
from weft_codegen.loops.index import ONE, ZERO, Axis, ComputedIndex, IndexExpr, atoms
from weft_codegen.loops.program import Body, Loop, Reduce, Set, Store, locals_read, stmt_exprs
from weft_codegen.loops.steps import are_distinct, coefficient

# Elements of a block whose rows are unrolled.
_IN_REGISTERS = 256
# Column reductions of at most so many operations take several rows at once.
_CHEAP = 12
_SIMD_REDUCTIONS = ("sum", "prod", "max", "min", "any", "all")


@dataclass(frozen=True)
class SimdLoop:
    """A vectorisable loop, and what it needs around it.

    carried: reductions whose target does not move with the axis, so lanes accumulate apart.
    private: scalar locals that live within one iteration.
    """

    loop: Loop
    carried: tuple[Reduce, ...]
    private: tuple[Local, ...]


def depends_on(where: IndexExpr, axis: Axis) -> bool:
    """Whether `where` changes with `axis`, directly or through a computed integer."""
    return axis in index_value(where).axes


def walks(where: IndexExpr, along: Axis) -> bool:
    """Whether `where` takes every element in turn, from a place that no memory is read for."""
    computed = any(isinstance(atom, ComputedIndex) for atom in atoms(where))
    return coefficient(where, along) is ONE and not computed


def analyse(loop: Loop, elsewhere: frozenset[Local]) -> SimdLoop | None:
    """How to vectorise `loop`, or None when it has to run one iteration after another.

    Args:
        elsewhere: locals that statements outside this loop use.
    """
    if mixes_masked(loop):
        return None
    carried: list[Reduce] = []
    private: dict[Local, None] = {}
    for position, stmt in enumerate(loop.body):
        if isinstance(stmt, Loop):
            return None
        if isinstance(stmt, Store) and stmt.mode != "set":
            step = coefficient(stmt.index, loop.axis)
            if step is None or not step.is_const or step is ZERO:
                return None
        if isinstance(stmt, Reduce) and not depends_on(stmt.index, loop.axis):
            if stmt.op not in _SIMD_REDUCTIONS:
                return None
            carried.append(stmt)
        if isinstance(stmt, Set) and not depends_on(stmt.index, loop.axis):
            read = locals_read(*stmt_exprs(*loop.body[: position + 1]))
            if stmt.local in elsewhere or stmt.local in read:
                return None
            private[stmt.local] = None
    if not _carried_independently(loop.body, carried):
        return None
    return SimdLoop(loop, tuple(carried), tuple(private))


def mixes_masked(loop: Loop) -> bool:
    """Whether a loop reads several places of a row under masks, and skips elements of it.

    gcc 12 takes such elements for neighbours in memory, in whatever order they are read.
    """
    loads = {x for x in walk(*stmt_exprs(*loop.body)) if isinstance(x, Load) and x.mask is not None}
    places = {(load.buffer, load.index) for load in loads}
    steps = [(buffer, coefficient(where, loop.axis)) for buffer, where in places]
    skipping = [buffer for buffer, step in steps if step and step.is_const and abs(step.value) > 1]
    return len(set(skipping)) < len(skipping)


def _carried_independently(body: Body, carried: list[Reduce]) -> bool:
    """Whether accumulators are only accumulated into: once each, and not read meanwhile."""
    targets = [local for stmt in carried for local in stmt.targets]
    written = {stmt.local for stmt in body if isinstance(stmt, Set)}
    return len(set(targets)) == len(targets) and not set(targets) & (
        locals_read(*stmt_exprs(*body)) | written
    )


def collides(store: Store, parallel: tuple[Axis, ...]) -> bool:
    """Whether two iterations of the parallel loops may add to the same element."""
    if store.mode == "set":
        return False
    if any(isinstance(atom, ComputedIndex) for atom in atoms(store.index)):
        return not are_distinct(store.index, parallel)
    return not all(depends_on(store.index, axis) for axis in parallel)


def in_registers(loop: Loop) -> bool:
    """Whether a loop is the rows of a small block: unrolled, its sums stay in registers."""
    match loop:
        case Loop(body=(Loop(limit=None) as inner,), limit=None):
            rows, columns = loop.axis.extent, inner.axis.extent
            known = rows.is_const and columns.is_const and rows.value <= 8
            return known and inner.is_innermost and rows.value * columns.value <= _IN_REGISTERS
    return False


def adds_rows(loop: Loop) -> bool:
    """Whether iterations only add to the same row of accumulators, at little cost."""
    inner = loop.body[0]
    if len(loop.body) > 1 or not isinstance(inner, Loop) or loop.limit is not None:
        return False
    nodes = list(walk(*stmt_exprs(*inner.body)))
    loads = [x.index for x in nodes if isinstance(x, Load) and depends_on(x.index, inner.axis)]
    if not all(walks(where, inner.axis) for where in loads):
        return False  # gcc 12 needs minutes for such rows
    if any(is_product(x) or x.dtype is torch.float16 for x in nodes):
        return False
    return len(nodes) <= _CHEAP and all(
        isinstance(stmt, Reduce)
        and depends_on(stmt.index, inner.axis)
        and not depends_on(stmt.index, loop.axis)
        for stmt in inner.body
    )
