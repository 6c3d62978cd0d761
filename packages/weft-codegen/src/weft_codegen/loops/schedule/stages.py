"""Reductions of nearly everything, in two stages so that threads can share them.

    total = sum over i of x[i]      becomes     parts[b] = sum over j of x[b*size + j]
                                                total    = sum over b of parts[b]

Only where the blocks are even and the work is worth a parallel region.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft_codegen.loops.expr import Rewriter, load
from weft_codegen.loops.index import Axis, as_axis, const, product
from weft_codegen.loops.lower.values import contiguous_strides, flatten
from weft_codegen.loops.ops import REDUCTIONS
from weft_codegen.loops.program import CPU, Buffer, Compute, Program, Step
from weft_codegen.loops.schedule.align import new_axis, replacing
from weft_codegen.loops.schedule.group import single

# Fewer kept elements than this leave threads idle.
_FEW = 16
_LEAST_ELEMENTS = 65536
_LEAST_BLOCK = 4096
_BLOCKS = range(64, 7, -1)


def in_stages(lowered: Program) -> Program:
    """`lowered` with each large reduction that leaves few elements cut in two."""
    buffers = dict(lowered.buffers)
    steps = tuple(part for item in lowered.steps for part in _parts(item, buffers))
    return replace(lowered, steps=steps, buffers=buffers)


def _parts(item: Step, buffers: dict[str, Buffer]) -> Iterator[Step]:
    cut = _cut(item, buffers) if isinstance(item, Compute) and item.op is not None else None
    if cut is None:
        yield item
        return
    assert isinstance(item, Compute)
    loop, blocks = cut
    outer = new_axis(const(blocks))
    size = const(loop.extent.value // blocks)
    inner = new_axis(size)
    rewrite = Rewriter(at=replacing({loop: outer * size + inner}))
    name = f"{item.result}_parts"
    shape = (*(kept.extent for kept in item.axes), const(blocks))
    dtype = item.values[0].dtype
    buffers[name] = Buffer(name, dtype, shape, contiguous_strides(shape))
    places = [kept.at for kept in item.axes]
    reduced = tuple(as_axis(inner) if other is loop else other for other in item.reduced)
    yield replace(
        item,
        result=name,
        axes=(*item.axes, as_axis(outer)),
        reduced=reduced,
        values=tuple(rewrite(value) for value in item.values),
        index=flatten([*places, outer], shape),
    )
    last = new_axis(const(blocks))
    value = load(name, flatten([*places, last], shape), dtype)
    yield replace(item, reduced=(as_axis(last),), values=(value,))


def _cut(item: Compute, buffers: dict[str, Buffer]) -> tuple[Axis, int] | None:
    """The axis to cut, the one with the longest steps that divides evenly, and in how many."""
    assert item.op is not None
    kept = product(loop.extent for loop in item.axes)
    total = product(loop.extent for loop in item.reduced)
    if not kept.is_const or not total.is_const or kept.value > _FEW:
        return None
    if REDUCTIONS[item.op].states > 1 or buffers[item.result].device != CPU:
        return None
    if kept.value * total.value < _LEAST_ELEMENTS:
        return None
    for loop in single(0, item).axes:
        extent = loop.extent.value
        for blocks in _BLOCKS if loop in item.reduced else ():
            if extent % blocks == 0 and total.value // blocks >= _LEAST_BLOCK:
                return loop, blocks
    return None
