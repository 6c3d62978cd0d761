"""Matching the axes of two loop nests by the memory they touch.

Both accesses are sorted by stride; walking up from the innermost, equal strides must meet, and
where the extents differ the longer axis is split. What comes out is the common refinement: one list
of pieces, and each old axis as a sum of pieces.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from weft_codegen.loops.evaluate import substitute
from weft_codegen.loops.index import ONE, ZERO, Atom, Axis, IndexExpr, atoms, axis, nonnegative
from weft_codegen.loops.lower.lazy_tensor import flatten
from weft_codegen.loops.steps import coefficient

_fresh = itertools.count()


@dataclass
class Mapping:
    """Old axes of the two nests as expressions over shared new ones."""

    left: dict[Axis, IndexExpr] = field(default_factory=dict)
    right: dict[Axis, IndexExpr] = field(default_factory=dict)


@dataclass
class _AxisRun:
    """An axis while it is taken apart: the part not yet matched, and the pieces so far."""

    axis: Axis
    stride: IndexExpr
    extent: IndexExpr
    weight: IndexExpr = ONE
    total: IndexExpr = ZERO

    def take(self, piece: IndexExpr, extent: IndexExpr) -> bool:
        """Match `piece` (innermost first); True when the axis is used up."""
        self.total = self.total + piece * self.weight
        self.weight = self.weight * extent
        self.stride = self.stride * extent
        self.extent = self.extent // extent
        return self.extent is ONE


def new_axis(extent: IndexExpr) -> IndexExpr:
    """A loop axis with a name of its own."""
    return axis(f"g{next(_fresh)}", extent)


def row_major(loops: Sequence[Axis]) -> IndexExpr:
    """The row-major place of an iteration of `loops` among all of them."""
    return flatten([loop.at for loop in loops], [x.extent for x in loops])


def linear(where: IndexExpr, axes: Iterable[Axis]) -> list[tuple[IndexExpr, Axis]] | None:
    """(stride, axis) of each axis `where` moves along, outermost first; None if not linear."""
    strides: list[tuple[IndexExpr, Axis]] = []
    for loop in axes:
        stride = coefficient(where, loop)
        if stride is None:
            return None
        if stride is not ZERO:
            strides.append((stride, loop))

    def order(a: tuple[IndexExpr, Axis], b: tuple[IndexExpr, Axis]) -> int:
        return 0 if a[0] is b[0] else -1 if nonnegative(a[0] - b[0]) else 1

    return sorted(strides, key=functools.cmp_to_key(order))


def walk_order(where: IndexExpr, axes: Sequence[Axis]) -> list[tuple[IndexExpr | None, Axis]]:
    """`linear`, but axes that `where` is not linear in come first, without a stride: those along
    which an index is looked up choose rows, and the others walk along these."""
    chosen = [loop for loop in axes if coefficient(where, loop) is None]
    along = linear(where, [loop for loop in axes if loop not in chosen]) or []
    return [*((None, loop) for loop in chosen), *along]


def origin(where: IndexExpr) -> IndexExpr:
    """`where` with every axis at zero."""
    return substitute(where, lambda atom: ZERO if isinstance(atom, Axis) else None)


def _divides(small: IndexExpr, large: IndexExpr) -> bool:
    return (large // small) * small is large


def _refine(left: list[_AxisRun], right: list[_AxisRun], mapping: Mapping) -> bool:
    """Match two lists of runs, innermost last, into `mapping`; False when they do not fit."""
    while left and right:
        a, b = left[-1], right[-1]
        if a.stride is not b.stride:
            return False
        if _divides(b.extent, a.extent):
            extent = b.extent
        elif _divides(a.extent, b.extent):
            extent = a.extent
        else:
            return False
        # An axis of the left nest that meets one as long stays what it is.
        piece = a.axis.at if a.axis.extent is b.axis.extent is extent else new_axis(extent)
        if a.take(piece, extent):
            mapping.left[a.axis] = left.pop().total
        if b.take(piece, extent):
            mapping.right[b.axis] = right.pop().total
    return not left and not right


def _rows(axes: Sequence[Axis]) -> list[_AxisRun]:
    """Runs of `axes` as if they indexed a row-major array."""
    runs: list[_AxisRun] = []
    stride = ONE
    for loop in reversed(axes):
        runs.append(_AxisRun(loop, stride, loop.extent))
        stride = stride * loop.extent
    return runs[::-1]


def align(
    left: IndexExpr, left_axes: Sequence[Axis], right: IndexExpr, right_axes: Sequence[Axis]
) -> Mapping | None:
    """Axes under which access `left` of one nest and `right` of another are the same.

    Axes that an access does not move along are matched in order when both nests have some; else
    they are kept (renamed), and one nest is the shallower.  None when there is no such mapping.
    """
    if origin(left) is not origin(right):
        return None
    if any(loop.extent is ZERO for loop in (*left_axes, *right_axes)):
        return None  # an empty nest has no pieces to match
    a, b = linear(left, left_axes), linear(right, right_axes)
    if a is None or b is None:
        return None
    mapping = Mapping()
    runs_a = [_AxisRun(loop, stride, loop.extent) for stride, loop in a]
    runs_b = [_AxisRun(loop, stride, loop.extent) for stride, loop in b]
    if not _refine(runs_a, runs_b, mapping):
        return None
    rest_a = [loop for loop in left_axes if loop not in mapping.left]
    rest_b = [loop for loop in right_axes if loop not in mapping.right]
    if rest_a and rest_b:
        return mapping if _refine(_rows(rest_a), _rows(rest_b), mapping) else None
    mapping.left.update({loop: loop.at for loop in rest_a})
    mapping.right.update({loop: new_axis(loop.extent) for loop in rest_b})
    return mapping


def pieces(mapped: dict[Axis, IndexExpr], axes: Iterable[Axis]) -> list[Axis]:
    """The new axes that `axes` became, outermost first."""
    found: list[Axis] = []
    for loop in axes:
        inside = [atom for atom in atoms(mapped[loop]) if isinstance(atom, Axis)]
        found += [piece for _, piece in linear(mapped[loop], inside) or []]
    return found


def replacing(mapped: dict[Axis, IndexExpr]) -> Callable[[IndexExpr], IndexExpr]:
    """A function that rewrites index expressions by `mapped`."""

    def leaf(atom: Atom) -> IndexExpr | None:
        return mapped.get(atom) if isinstance(atom, Axis) else None

    return lambda where: substitute(where, leaf)
