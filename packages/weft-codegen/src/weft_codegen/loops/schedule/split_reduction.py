"""Reductions of nearly everything, and of columns that are few, in two stages for threads to share.

    total = sum over i of x[i]      becomes     parts[b] = sum over j of x[b*size + j]
                                                total    = sum over b of parts[b]

Only where the blocks are even and the work is worth a parallel region.  Columns could be shared as
they are, but then a thread walks through a piece of each row, of every page; so it has whole rows.
On a GPU a symbolic length is cut, too, in blocks of a known size: the one that suits the example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch

from weft_codegen.loops.evaluate import evaluate_known
from weft_codegen.loops.expr import is_product, load, where
from weft_codegen.loops.index import ZERO, Axis, IndexExpr, as_axis, const, product
from weft_codegen.loops.lower.lazy_tensor import contiguous_strides, flatten
from weft_codegen.loops.lower.masking import masked, within
from weft_codegen.loops.ops import REDUCTIONS
from weft_codegen.loops.program import CPU, Buffer, Buffers, Compute, Program, Step, expanded
from weft_codegen.loops.rewrite import Rewriter
from weft_codegen.loops.schedule import row_column_fusion
from weft_codegen.loops.schedule.align import new_axis, replacing, row_major
from weft_codegen.loops.schedule.assemble import GPU_COLUMNS, identity
from weft_codegen.loops.schedule.group import single
from weft_codegen.loops.schedule.merge import merge_axes

_LEAST_ELEMENTS = 65536
# At most so many kept elements leave threads idle; the blocks of such a reduction, in elements.
_FEW, _LEAST_BLOCK, _BLOCKS = 16, 4096, range(64, 7, -1)
# Fewer columns a thread are narrow pieces of rows; the blocks of their reduction, in rows.
_NARROW, _LEAST_ROWS = 1024, 16
# Programs of a reduction that keep a GPU busy.
_GPU_PROGRAMS = 2048
# More parts of few columns take longer to add up than they save.
_MOST_PARTS = 512
# Fewer elements that follow each other leave lanes idle.
_SHORT = 32


def split_reductions(lowered: Program) -> Program:
    """`lowered` with each large reduction that leaves few elements cut in two."""
    return expanded(lowered, partial(_split_one, lowered.hints))


@dataclass(frozen=True)
class _Cut:
    """`loop` of a reduction in blocks; each iteration of the loops `around` it has its own."""

    item: Compute
    loop: Axis
    blocks: IndexExpr
    size: int  # iterations of a block
    around: tuple[Axis, ...] = ()
    # A kept loop and a short one in it that is reduced: both are columns of the parts.
    pair: tuple[Axis, Axis] | None = None


def _split_one(hints: dict[str, int], item: Step, buffers: Buffers) -> Iterator[Step]:
    cut = _cut(item, buffers, hints) if isinstance(item, Compute) and item.op else None
    if cut is None:
        yield item
        return
    item, loop, size = cut.item, cut.loop, cut.size
    outer, inner = new_axis(cut.blocks), new_axis(const(size))
    place = outer * size + inner
    places, columns = {loop: place}, item.axes
    if cut.pair is not None:
        kept, short = cut.pair
        column = new_axis(kept.extent * short.extent)
        places[kept] = column // short.extent
        places[short] = column - places[kept] * short.extent
        columns = (*_without(item.axes, kept), as_axis(column))
    rewrite = Rewriter(at=replacing(places))
    values = tuple(rewrite(value) for value in item.values)
    if cut.blocks * size is not loop.extent:
        # Past the end of `loop` is what changes nothing.
        inside, nothing = within(place, ZERO, loop.extent), identity(str(item.op), values[0].dtype)
        values = (where(inside, masked(values[0], inside), nothing),)
    name = f"{item.result}_parts"
    dtype = item.values[0].dtype
    parts = (*cut.around, *([] if outer is ZERO else [as_axis(outer)]))
    axes = (*parts, *columns)
    shape = tuple(kept.extent for kept in axes)
    device = buffers[item.result].device
    buffers[name] = Buffer(name, dtype, shape, contiguous_strides(shape), device)
    # With as many blocks as iterations nothing is left of the axis.
    left = [as_axis(inner)] if size > 1 else []
    rest = _without(item.reduced, *cut.around, *(cut.pair or ()))
    reduced = [part for other in rest for part in (left if other is loop else [other])]
    index = row_major(axes)
    yield replace(item, result=name, axes=axes, reduced=tuple(reduced), values=values, index=index)
    last: Sequence[Axis] = [as_axis(new_axis(part.extent)) for part in parts]
    at = row_major((*last, *item.axes))
    if cut.pair is not None:
        # One loop over what is left, so that lanes have enough of it.
        kept, short = cut.pair
        count = product(part.extent for part in parts)
        both = new_axis(count * short.extent)
        part, others = both // short.extent, _without(item.axes, kept)
        spots = [part, *(loop.at for loop in (*others, kept)), both - part * short.extent]
        at = flatten(spots, [count, *(loop.extent for loop in (*others, kept, short))])
        last = [as_axis(both)]
    yield replace(item, reduced=tuple(last), values=(load(name, at, dtype),))


def _without(loops: Sequence[Axis], *others: Axis) -> tuple[Axis, ...]:
    return tuple(loop for loop in loops if loop not in others)


def _cut(item: Compute, buffers: Buffers, hints: dict[str, int]) -> _Cut | None:
    """Where to cut a reduction, whose axes may be merged for it."""
    assert item.op is not None
    if REDUCTIONS[item.op].states > 1:
        return None
    known = all(loop.extent.is_const for loop in (*item.axes, *item.reduced))
    if buffers[item.result].device != CPU:
        if not known and not item.axes:  # pieces of a row may be too short
            merged = merge_axes(single(0, item))
            item = replace(item, reduced=merged.axes, values=merged.members[0].node.values)
        return _cut_for_gpu(item, hints)
    found = _cut_for_cpu(item) if known else None
    if found is None:
        return None
    loop, blocks = found
    return _Cut(item, loop, const(blocks), loop.extent.value // blocks)


def _cut_for_cpu(item: Compute) -> tuple[Axis, int] | None:
    """The axis with the longest steps that divides evenly, and in how many blocks."""
    kept = product(loop.extent for loop in item.axes)
    total = product(loop.extent for loop in item.reduced)
    axes, size = single(0, item).axes, kept.value * total.value
    if size < _LEAST_ELEMENTS:
        return None
    least, counts = _LEAST_BLOCK, _BLOCKS
    if kept.value > _FEW:
        threads = torch.get_num_threads()
        taken = size * item.values[0].dtype.itemsize
        large = taken >= row_column_fusion.LARGE or kept.value >= _NARROW * threads
        if threads == 1 or large or axes[-1] in item.reduced or _is_product(item):
            return None
        least, counts = _LEAST_ROWS, range(2 * threads, threads - 1, -1)
    for loop in axes:
        for blocks in counts if loop in item.reduced else ():
            if loop.extent.value % blocks == 0 and total.value // blocks >= least:
                return loop, blocks
    return None


def _cut_for_gpu(item: Compute, hints: dict[str, int]) -> _Cut | None:
    """The cut that makes programs for the whole GPU, which read along memory."""
    axes = single(0, item).axes
    lengths = {loop: evaluate_known(loop.extent, hints) for loop in axes}
    known = {loop: length for loop, length in lengths.items() if length is not None}
    if len(known) < len(lengths) or _is_product(item):
        return None
    pair = _short_in_kept(item, axes)
    axes = axes[:-1] if pair else axes
    loops = [loop for loop in axes if loop in item.reduced]
    inner, total = axes[-1] in loops, prod(known[loop] for loop in loops)
    kept = prod(known.values()) // max(total, 1)
    programs = kept if inner else -(-kept // GPU_COLUMNS)
    most = min(_GPU_PROGRAMS // max(programs, 1), total // (_LEAST_BLOCK if inner else _LEAST_ROWS))

    def blocks_of(loop: Axis) -> int:
        # A row that is read along its memory is cut in pieces worth reading.
        extent = known[loop]
        blocks = min(most, extent // (_LEAST_BLOCK if inner and loop is axes[-1] else 1))
        return _divisor(extent, blocks) or blocks if loop.extent.is_const else blocks

    best = max(loops, key=blocks_of)  # the outermost of equals
    around: tuple[Axis, ...] = ()
    blocks = max(blocks_of(best), 1)
    rows = None if inner else _blocks_of_rows(loops, min(most, _MOST_PARTS))
    if rows and rows[1] * prod(known[loop] for loop in rows[2]) > blocks:
        best, blocks, around = rows
    if blocks == 1 and not around and not pair:
        return None
    size = -(-known[best] // blocks)
    if best.extent.is_const:
        return _Cut(item, best, const(blocks), size, around, pair)
    size = 1 << (size.bit_length() - 1)  # all lanes of a block have work
    return _Cut(item, best, (best.extent + size - 1) // size, size)


def _short_in_kept(item: Compute, axes: tuple[Axis, ...]) -> tuple[Axis, Axis] | None:
    """The two innermost loops, if the inner one is reduced, and too short for a block's lanes."""
    if len(item.reduced) < 2 or not all(loop.extent.is_const for loop in axes):
        return None
    kept, short = axes[-2:]
    pair = kept in item.axes and short in item.reduced and short.extent.value < _SHORT
    large = prod(loop.extent.value for loop in axes) >= _LEAST_ELEMENTS
    return (kept, short) if pair and large else None


def _divisor(extent: int, most: int) -> int | None:
    """The largest divisor that is above half of `most`, and not above it."""
    return next((n for n in range(most, most // 2, -1) if extent % n == 0), None)


def _blocks_of_rows(loops: Sequence[Axis], most: int) -> tuple[Axis, int, tuple[Axis, ...]] | None:
    """Up to `most` parts of columns, of rows that follow each other: a part is an iteration of the
    outer loops and a block of the next one. Returns that loop, its blocks, and the outer loops."""
    around: list[Axis] = []
    for loop in loops if all(loop.extent.is_const for loop in loops) else ():
        extent = loop.extent.value
        if extent > most:
            return loop, _divisor(extent, most) or 1, tuple(around)
        around.append(loop)
        most //= extent
    return None


def _is_product(item: Compute) -> bool:
    return any(map(is_product, item.values))
