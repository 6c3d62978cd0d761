"""Reductions of nearly everything, and of columns that are few, in two stages for threads to share.

    total = sum over i of x[i]      becomes     parts[b] = sum over j of x[b*size + j]
                                                total    = sum over b of parts[b]

Only where the blocks are even and the work is worth a parallel region.  Columns could be shared as
they are, but then a thread walks through a piece of each row, of every page; so it has whole rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from weft_codegen.loops.expr import is_product, load, where
from weft_codegen.loops.index import ZERO, Axis, as_axis, const, product
from weft_codegen.loops.lower.lazy_tensor import contiguous_strides
from weft_codegen.loops.lower.masking import masked, within
from weft_codegen.loops.ops import REDUCTIONS
from weft_codegen.loops.program import CPU, Buffer, Buffers, Compute, Program, Step, expanded
from weft_codegen.loops.rewrite import Rewriter
from weft_codegen.loops.schedule import row_column_fusion
from weft_codegen.loops.schedule.align import new_axis, replacing, row_major
from weft_codegen.loops.schedule.assemble import GPU_COLUMNS, identity
from weft_codegen.loops.schedule.group import single

_LEAST_ELEMENTS = 65536
# At most so many kept elements leave threads idle; the blocks of such a reduction, in elements.
_FEW, _LEAST_BLOCK, _BLOCKS = 16, 4096, range(64, 7, -1)
# Fewer columns a thread are narrow pieces of rows; the blocks of their reduction, in rows.
_NARROW, _LEAST_ROWS = 1024, 16
# Programs of a reduction that keep a GPU busy.
_GPU_PROGRAMS = 2048


def split_reductions(lowered: Program) -> Program:
    """`lowered` with each large reduction that leaves few elements cut in two."""
    return expanded(lowered, _split_one)


def _split_one(item: Step, buffers: Buffers) -> Iterator[Step]:
    cut = _cut(item, buffers) if isinstance(item, Compute) and item.op is not None else None
    if cut is None:
        yield item
        return
    assert isinstance(item, Compute)
    loop, blocks = cut
    outer, last = new_axis(const(blocks)), new_axis(const(blocks))
    size = const(-(-loop.extent.value // blocks))
    inner = new_axis(size)
    place = outer * size + inner
    rewrite = Rewriter(at=replacing({loop: place}))
    values = tuple(rewrite(value) for value in item.values)
    if loop.extent.value % blocks:
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
    left = [as_axis(inner)] if loop.extent.value > blocks else []
    reduced = [part for other in item.reduced for part in (left if other is loop else [other])]
    index = row_major(axes)
    yield replace(item, result=name, axes=axes, reduced=tuple(reduced), values=values, index=index)
    value = load(name, row_major((as_axis(last), *item.axes)), dtype)
    yield replace(item, reduced=(as_axis(last),), values=(value,))


def _cut(item: Compute, buffers: Buffers) -> tuple[Axis, int] | None:
    """The axis to cut, the one with the longest steps that divides evenly, and in how many."""
    assert item.op is not None
    kept = product(loop.extent for loop in item.axes)
    total = product(loop.extent for loop in item.reduced)
    if not all(loop.extent.is_const for loop in (*item.axes, *item.reduced)):
        return None
    if REDUCTIONS[item.op].states > 1:
        return None
    axes, size = single(0, item).axes, kept.value * total.value
    if buffers[item.result].device != CPU:
        return _cut_for_gpu(item, axes, kept.value)
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


def _cut_for_gpu(item: Compute, axes: tuple[Axis, ...], kept: int) -> tuple[Axis, int] | None:
    """The axis that is reduced and best cut, so that there are programs for the whole GPU."""
    total = product(loop.extent for loop in item.reduced).value
    inner = axes[-1] in item.reduced
    programs = kept if inner else -(-kept // GPU_COLUMNS)
    most = min(_GPU_PROGRAMS // max(programs, 1), total // (_LEAST_BLOCK if inner else _LEAST_ROWS))

    def blocks_of(loop: Axis) -> int:
        # A row that is read along its memory is cut in pieces worth reading.
        extent = loop.extent.value
        blocks = min(most, extent // (_LEAST_BLOCK if inner and loop is axes[-1] else 1))
        return next((n for n in range(blocks, blocks // 2, -1) if extent % n == 0), blocks)

    best = max(item.reduced, key=blocks_of)  # the outermost of equals
    blocks = blocks_of(best)
    return (best, blocks) if blocks > 1 and not _is_product(item) else None


def _is_product(item: Compute) -> bool:
    return any(map(is_product, item.values))
