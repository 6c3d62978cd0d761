"""Matrix products as loops: small ones, where calling the library costs more than the product, and
those of few rows, which take as long as reading the other operand.

    mm(a, b)            r[i, j] = sum over k of a[i, k] * b[k, j]; so _int_mm, of int8
    addmm(c, a, b)      r[i, j] = c[i, j] + that

As a loop node the product shares its kernel with bias, activation and residual. Others (and bmm)
become loops where a measurement says so: with `max_autotune`, see tune.py.

On a GPU the product of one row and a weight's transpose takes as long as reading the weight: each
result is the sum of one row of it, and what comes after is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from weft_codegen.loops.expr import Expr, apply, cast, compute_dtype
from weft_codegen.loops.index import ONE, ZERO, IndexExpr, as_axis, product
from weft_codegen.loops.lower.lazy_tensor import (
    LazyTensor,
    broadcast_at,
    contiguous_strides,
    offset_of,
)
from weft_codegen.loops.program import (
    CPU,
    Buffer,
    BufferRef,
    Buffers,
    Compute,
    Extern,
    Program,
    Step,
    expanded,
)
from weft_codegen.loops.schedule.align import new_axis
from weft_codegen.loops.schedule.assemble import GPU_ROW

_aten = torch.ops.aten
_PREFERRED = (_aten.bmm.default,)
_INTEGERS = _aten._int_mm.default
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _INTEGERS, *_PREFERRED)
# Whether a product should be a loop.
Prefer = Callable[[Extern, Buffers], bool]
# Multiplications up to which the loop wins.
_MOST = 16384
# Larger ones are worth no measurement: the library blocks for caches too.
_MOST_MEASURED = 1 << 26
# Where columns of `b` are contiguous (a weight's transpose), each result is a vector sum of its
# own: so many of them pay, for shorter sums and for those that fill the 64 lanes.
_SUMS = ((64, 512), (0, 128))
# Up to so many rows the loop reads a weight as fast as memory gives it, however large it is.
_FEW_ROWS = 4
# Terms that one program of a GPU adds up in registers, and results that keep a GPU busy.
_GPU_LENGTHS, _GPU_RESULTS = range(128, GPU_ROW + 1), 512


def small_products(lowered: Program, prefer: Prefer | None) -> Program:
    """`lowered` with the small matrix products among its externs as loop nodes, and those that
    `prefer` wants as such."""
    return expanded(lowered, lambda item, buffers: _expanded(item, buffers, prefer))


def _expanded(item: Step, buffers: Buffers, prefer: Prefer | None) -> Iterator[Step]:
    found = _operands(item, buffers, prefer) if isinstance(item, Extern) else None
    if found is None:
        yield item
        return
    assert isinstance(item, Extern)
    name = item.results[0]
    assert name is not None
    *bias, left, right = found
    target = buffers[name]
    if bias:
        name = f"{name}_product"
        strides, wide = contiguous_strides(target.shape), compute_dtype(target.dtype)
        buffers[name] = Buffer(name, wide, target.shape, strides, target.device)
    yield _product(buffers[name], left, right, item.origins)
    if bias:
        i, j = _places(target.shape)
        total = apply("add", _at(buffers[name], i, j), _at(bias[0], i, j))
        yield _node(target, (i, j), (), None, cast(total, target.dtype), item.origins)


def _places(shape: tuple[IndexExpr, ...]) -> list[IndexExpr]:
    """An axis for each dimension; none for one of a single element."""
    return [ZERO if extent is ONE else new_axis(extent) for extent in shape]


def _at(buffer: Buffer, *where: IndexExpr) -> Expr:
    """The element at `where`, broadcast as torch broadcasts, in the dtype of its arithmetic."""
    tensor = LazyTensor(buffer.shape, buffer.dtype, buffer.strides, buffer=buffer)
    return cast(broadcast_at(tensor, where), compute_dtype(buffer.dtype))


def _product(target: Buffer, left: Buffer, right: Buffer, origins: tuple[str, ...]) -> Compute:
    *batch, i, j = _places(target.shape)
    k = new_axis(left.shape[-1])
    op = "product" if target.dtype.is_floating_point else "mul"
    factors = _at(left, *batch, i, k), _at(right, *batch, k, j)
    value = apply(op, *(cast(factor, compute_dtype(target.dtype)) for factor in factors))
    return _node(target, (*batch, i, j), (k,), "sum", value, origins)


def _node(
    target: Buffer,
    kept: Sequence[IndexExpr],
    reduced: Sequence[IndexExpr],
    op: str | None,
    value: Expr,
    origins: tuple[str, ...],
) -> Compute:
    axes = tuple(as_axis(place) for place in kept if place is not ZERO)
    over, place = tuple(map(as_axis, reduced)), offset_of(kept, target.strides)
    return Compute(target.name, axes, over, op, (value,), place, origins)


def _operands(item: Extern, buffers: Buffers, prefer: Prefer | None) -> list[Buffer] | None:
    """The operands of a product that is small enough or preferred as a loop, or None."""
    if item.op not in _PRODUCTS or item.results[0] is None:
        return None
    if item.kwargs or not all(isinstance(arg, BufferRef) for arg in item.args):
        return None
    used = [buffers[arg.name] for arg in item.args] + [buffers[item.results[0]]]
    left, right = used[-3], used[-2]
    extents = (*left.shape, right.shape[-1])
    if any(buffer.device != CPU for buffer in used):
        alone = item.op not in _PREFERRED and _is_row_by_columns(left, right, used[-1])
        return used[:-1] if alone else None
    dtypes = {buffer.dtype for buffer in used}
    if dtypes != ({torch.int8, torch.int32} if item.op is _INTEGERS else {torch.float32}):
        return None
    if not all(extent.is_const for extent in extents):
        return None
    size, beside = product(extents).value, right.strides[-1] is ONE
    *batch, rows, length, columns = (extent.value for extent in extents)
    # An axis of one element is no axis. One row is what a single stream has; others are rare.
    if rows < 1 or min(*batch, length, columns) < 2:
        return None
    few = rows * columns <= next(most for least, most in _SUMS if length >= least)
    wanted = size <= _MOST and (beside or few)
    wanted |= rows <= _FEW_ROWS and right.strides[-2] is ONE and left.strides[-1] is ONE
    wanted &= item.op not in _PREFERRED
    if not wanted and prefer is not None and size <= _MOST_MEASURED:
        wanted = prefer(item, buffers)
    return used[:-1] if wanted else None


def _is_row_by_columns(left: Buffer, right: Buffer, result: Buffer) -> bool:
    """Whether a GPU multiplies one row by a matrix whose columns are contiguous."""
    length, columns = right.shape
    known = length.is_const and columns.is_const and result.dtype.is_floating_point
    return (
        known
        and left.shape[0] is ONE
        and left.strides[1] is ONE
        and right.strides[0] is ONE
        and length.value in _GPU_LENGTHS
        and columns.value >= _GPU_RESULTS
    )
