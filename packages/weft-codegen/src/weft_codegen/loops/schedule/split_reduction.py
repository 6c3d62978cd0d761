"""Reductions of nearly everything, and of columns that are few, in two stages for threads to share.

    total = sum over i of x[i]      becomes     parts[b] = sum over j of x[b*size + j]
                                                total    = sum over b of parts[b]

Only where the blocks are even and the work is worth a parallel region.  Columns could be shared as
they are, but then a thread walks through a piece of each row, of every page; so it has whole rows.
On a GPU a symbolic length is cut, too, in blocks of a known size: the one that suits the example.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod

import torch

from weft_codegen.loops.evaluate import evaluate_known
from weft_codegen.loops.expr import is_product, load, where
from weft_codegen.loops.index import ZERO, Axis, IndexExpr, as_axis, const, product
from weft_codegen.loops.lower.lazy_tensor import contiguous_strides
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


def split_reductions(lowered: Program) -> Program:
    """`lowered` with each large reduction that leaves few elements cut in two."""
    return expanded(lowered, partial(_split_one, lowered.hints))


def _split_one(hints: dict[str, int], item: Step, buffers: Buffers) -> Iterator[Step]:
    cut = _cut(item, buffers, hints) if isinstance(item, Compute) and item.op else None
    if cut is None:
        yield item
        return
    item, loop, blocks, size = cut
    outer, last, inner = new_axis(blocks), new_axis(blocks), new_axis(const(size))
    place = outer * size + inner
    rewrite = Rewriter(at=replacing({loop: place}))
    values = tuple(rewrite(value) for value in item.values)
    if blocks * size is not loop.extent:
        # Past the end of `loop` is what changes nothing.
        inside, nothing = within(place, ZERO, loop.extent), identity(str(item.op), values[0].dtype)
        values = (where(inside, masked(values[0], inside), nothing),)
    name = f"{item.result}_parts"
    dtype = item.values[0].dtype
    axes = (as_axis(outer), *item.axes)
    shape = tuple(kept.extent for kept in axes)
    device = buffers[item.result].device
    buffers[name] = Buffer(name, dtype, shape, contiguous_strides(shape), device)
    # With as many blocks as iterations nothing is left of the axis.
    left = [as_axis(inner)] if size > 1 else []
    reduced = [part for other in item.reduced for part in (left if other is loop else [other])]
    index = row_major(axes)
    yield replace(item, result=name, axes=axes, reduced=tuple(reduced), values=values, index=index)
    value = load(name, row_major((as_axis(last), *item.axes)), dtype)
    yield replace(item, reduced=(as_axis(last),), values=(value,))


def _cut(
    item: Compute, buffers: Buffers, hints: dict[str, int]
) -> tuple[Compute, Axis, IndexExpr, int] | None:
    """The item (its axes may be merged), its axis to cut, how many blocks, iterations in each."""
    assert item.op is not None
    if REDUCTIONS[item.op].states > 1:
        return None
    known = all(loop.extent.is_const for loop in (*item.axes, *item.reduced))
    if buffers[item.result].device != CPU:
        if not known and not item.axes:  # pieces of a row may be too short
            merged = merge_axes(single(0, item))
            item = replace(item, reduced=merged.axes, values=merged.members[0].node.values)
        cut = _cut_for_gpu(item, hints)
        return cut and (item, *cut)
    found = _cut_for_cpu(item) if known else None
    return found and (item, found[0], const(found[1]), found[0].extent.value // found[1])


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


def _cut_for_gpu(item: Compute, hints: dict[str, int]) -> tuple[Axis, IndexExpr, int] | None:
    """The axis that is reduced and best cut, so that there are programs for the whole GPU."""
    axes = single(0, item).axes
    lengths = {loop: evaluate_known(loop.extent, hints) for loop in (*item.axes, *item.reduced)}
    known = {loop: length for loop, length in lengths.items() if length is not None}
    if len(known) < len(lengths) or _is_product(item):
        return None
    kept, total = (prod(known[loop] for loop in loops) for loops in (item.axes, item.reduced))
    inner = axes[-1] in item.reduced
    programs = kept if inner else -(-kept // GPU_COLUMNS)
    most = min(_GPU_PROGRAMS // max(programs, 1), total // (_LEAST_BLOCK if inner else _LEAST_ROWS))

    def blocks_of(loop: Axis) -> int:
        # A row that is read along its memory is cut in pieces worth reading.
        extent = known[loop]
        blocks = min(most, extent // (_LEAST_BLOCK if inner and loop is axes[-1] else 1))
        even = (n for n in range(blocks, blocks // 2, -1) if extent % n == 0)
        return next(even, blocks) if loop.extent.is_const else blocks

    best = max(item.reduced, key=blocks_of)  # the outermost of equals
    blocks = blocks_of(best)
    if blocks <= 1:
        return None
    size = -(-known[best] // blocks)
    if best.extent.is_const:
        return best, const(blocks), size
    size = 1 << (size.bit_length() - 1)  # all lanes of a block have work
    return best, (best.extent + size - 1) // size, size


def _is_product(item: Compute) -> bool:
    return any(map(is_product, item.values))
