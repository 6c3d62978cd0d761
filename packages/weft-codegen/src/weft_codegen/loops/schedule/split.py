"""Index-set splitting: a loop whose body asks on which side of a point it is becomes several.

Concatenation and padding lower to selects such as `where(i < 128, a[i], b[i - 128])` over masked
loads.  Cutting the loop at 128 decides the condition in each part, so that the selects, the masks
and the work for the other pieces disappear.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from weft_codegen.loops.evaluate import substitute
from weft_codegen.loops.expr import Apply, index_of, walk
from weft_codegen.loops.index import ZERO, Axis, IndexExpr, as_axis, axis, nonnegative, upper
from weft_codegen.loops.program import Body, Loop, Reduce, Set, Stmt, statements, stmt_exprs
from weft_codegen.loops.rewrite import Rewriter
from weft_codegen.loops.schedule.align import replacing
from weft_codegen.loops.steps import coefficient

# More parts than this cost more in code than they save.
_MOST_CUTS = 8


def split_loops(body: Body) -> Body:
    """`body` with each loop cut at the constants its comparisons name."""
    result: list[Stmt] = []
    for stmt in body:
        parts: Iterable[Stmt] = [stmt]
        if isinstance(stmt, Loop) and (cuts := _cuts(stmt)):
            parts = _segments(stmt, cuts)
        for part in parts:
            if isinstance(part, Loop):
                part = replace(part, body=split_loops(part.body))
            result.append(part)
    return tuple(result)


def _cuts(loop: Loop) -> list[int]:
    """The points inside the loop's range where some comparison changes its answer for good."""
    if loop.limit is not None or not loop.axis.extent.is_const:
        return []
    found: set[int] = set()
    for node in walk(*stmt_exprs(*statements(loop.body))):
        if isinstance(node, Apply) and node.name in ("lt", "ge", "eq"):
            difference = _difference(node)
            found.update(_cut(difference, loop.axis))
            if node.name == "eq" and difference is not None:
                found.update(_cut(difference - 1, loop.axis))
    inside = sorted(cut for cut in found if 0 < cut < loop.axis.extent.value)
    return inside if len(inside) <= _MOST_CUTS else []


def _difference(node: Apply) -> IndexExpr | None:
    sides = [index_of(arg) for arg in node.args]
    if sides[0] is None or sides[1] is None:
        return None
    return sides[0] - sides[1]


def _cut(difference: IndexExpr | None, loop: Axis) -> Iterator[int]:
    """Where `difference < 0` turns false along `loop`, if it does so at one point.

    difference = c*loop + rest with low <= rest <= high: the point p has c*(p-1) + high < 0 and
    c*p + low >= 0.
    """
    step = None if difference is None else coefficient(difference, loop)
    if difference is None or step is None or not step.is_const or step.value <= 0:
        return
    rest = substitute(difference, lambda atom: ZERO if atom is loop else None)
    low = sum(scale for monomial, scale in rest.terms if not monomial)
    high = upper(rest)
    if high is None or not high.is_const or not nonnegative(rest - low):
        return
    point = -(low // step.value)
    if step.value * (point - 1) + high.value < 0:
        yield point


def _segments(loop: Loop, cuts: list[int]) -> Iterator[Stmt]:
    edges = [0, *cuts, loop.axis.extent.value]
    for number, (begin, end) in enumerate(itertools.pairwise(edges)):
        part = axis(f"{loop.axis.key}.{number}", end - begin)
        rewrite = Rewriter(at=replacing({loop.axis: part + begin}))
        body = tuple(rewritten(stmt, rewrite) for stmt in loop.body)
        if part is ZERO:
            yield from body
        else:
            yield replace(loop, axis=as_axis(part), body=body)


def rewritten(stmt: Stmt, rewrite: Rewriter) -> Stmt:
    """`stmt` with its expressions, places and names rewritten."""
    if isinstance(stmt, Loop):
        limit = None if stmt.limit is None else rewrite.index(stmt.limit)
        axis = rewrite.axis(stmt.axis)
        body = tuple(rewritten(inner, rewrite) for inner in stmt.body)
        return replace(stmt, axis=axis, body=body, limit=limit)
    if isinstance(stmt, Reduce):
        values = tuple(rewrite(value) for value in stmt.values)
        targets = tuple(rewrite.local(target) for target in stmt.targets)
        return replace(stmt, index=rewrite.index(stmt.index), targets=targets, values=values)
    value = rewrite(stmt.value)
    index = rewrite.index(stmt.index)
    if isinstance(stmt, Set):
        return Set(rewrite.local(stmt.local), index, value)
    return replace(stmt, buffer=rewrite.buffer(stmt.buffer), index=index, value=value)
