"""Views and movement: operators that only change where an element comes from.

True views remember their root, so that one of a realised tensor is an Alias, never a copy.  The
others (cat, pad, flip, repeat) are index functions with masked loads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft_codegen.loops.expr import Expr, apply, cast, compute_dtype, constant, index_value, where
from weft_codegen.loops.index import (
    ONE,
    ZERO,
    IndexExpr,
    const,
    in_range,
    least,
    nonnegative,
    product,
)
from weft_codegen.loops.lower.lazy_tensor import (
    Element,
    Indices,
    LazyTensor,
    broadcast_index,
    contiguous_strides,
    flatten,
    offset_of,
    replaced,
    unflatten,
)
from weft_codegen.loops.lower.lowering import Call, lowers, normalise_dim, require
from weft_codegen.loops.lower.masking import masked, within
from weft_codegen.loops.lower.pointwise import SUPPORTED
from weft_codegen.loops.lower.shapes import number, to_index, to_shape

View = tuple[Callable[[Indices], Indices], IndexExpr]
"""Where in its argument an element of a view is, and how many elements after that it begins."""


def views(*names: str) -> Callable[[Callable[..., View]], Callable[..., LazyTensor]]:
    """Register the lowering of views: the function returns where their elements are."""

    def register(function: Callable[..., View]) -> Callable[..., LazyTensor]:
        def lowering(call: Call, x: LazyTensor, *args: Any, **kwargs: Any) -> LazyTensor:
            source, offset = function(call, x, *args, **kwargs)
            return call.view(x, lambda idx: x.at(source(idx)), offset)

        return lowers(*names)(lowering)

    return register


@views("aten.view", "aten._unsafe_view", "aten.reshape", "aten.unsqueeze", "aten.squeeze")
def _view(call: Call, x: LazyTensor, *args: Any) -> View:
    """The same elements in row-major order under another shape."""
    require(call.fake.dtype is x.dtype, "view as another dtype")
    shape = to_shape(call.fake.shape)
    pairs = zip(shape, x.shape, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], pairs))

    def source(idx: Indices) -> Indices:
        position = flatten(idx[common:], shape[common:])
        return [*idx[:common], *unflatten(position, x.shape[common:])]

    return source, ZERO


@views("aten.alias", "aten.detach", "aten.lift_fresh")
def _identity(call: Call, x: LazyTensor) -> View:
    return lambda idx: idx, ZERO


@views("aten.as_strided")
def _as_strided(
    call: Call, x: LazyTensor, size: Any, stride: Any, storage_offset: Any = None
) -> View:
    """Positions in the memory of `x`, when all of them are inside it and it is contiguous."""
    whole = x.root is None or (x.offset == ZERO and product(x.root.shape) == product(x.shape))
    require(whole and x.strides == contiguous_strides(x.shape), "as_strided of a part of a tensor")
    shape, strides = to_shape(size), to_shape(stride)
    offset = to_index(storage_offset or 0)
    last = offset + offset_of([extent - 1 for extent in shape], strides)
    require(in_range(last, product(x.shape)), "as_strided outside its argument")
    return lambda idx: unflatten(offset + offset_of(idx, strides), x.shape), offset


@views("aten.permute")
def _permute(call: Call, x: LazyTensor, dims: Sequence[int]) -> View:
    source = [normalise_dim(dim, len(x.shape)) for dim in dims]
    return lambda idx: [idx[source.index(dim)] for dim in range(len(source))], ZERO


@lowers("aten.transpose")
def _transpose(call: Call, x: LazyTensor, first: int, second: int) -> LazyTensor:
    dims = list(range(len(x.shape)))
    if dims:
        a, b = normalise_dim(first, len(dims)), normalise_dim(second, len(dims))
        dims[a], dims[b] = dims[b], dims[a]
    return _permute(call, x, dims)


@views("aten.expand")
def _expand(call: Call, x: LazyTensor, size: Any, implicit: bool = False) -> View:
    return lambda idx: broadcast_index(x.shape, idx), ZERO


def _clamped(bound: Any, extent: IndexExpr, default: IndexExpr) -> IndexExpr:
    """A Python slice bound as an index in [0, extent]; its sign must be known."""
    if bound is None:
        return default
    at: IndexExpr = to_index(bound)
    if at.is_const and at.value >= 2**62:
        return extent
    if nonnegative(at):
        return least(at, extent)
    require(nonnegative(-at), "slice bound of unknown sign")
    return extent - least(-at, extent)


@views("aten.slice")
def _slice(
    call: Call, x: LazyTensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> View:
    dim = normalise_dim(dim, len(x.shape))
    begin, stride = _clamped(start, x.shape[dim], ZERO), to_index(step)
    offset = begin * x.strides[dim]
    return lambda idx: replaced(idx, dim, begin + idx[dim] * stride), offset


@views("aten.select")
def _select(call: Call, x: LazyTensor, dim: int, index: Any) -> View:
    dim = normalise_dim(dim, len(x.shape))
    where_ = to_index(index)
    if not nonnegative(where_):
        require(nonnegative(-where_ - 1), "index of unknown sign")
        where_ = where_ + x.shape[dim]
    return lambda idx: [*idx[:dim], where_, *idx[dim:]], where_ * x.strides[dim]


@lowers("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split")
def _split(call: Call, x: LazyTensor, sizes: Any, dim: int = 0) -> tuple[LazyTensor, ...]:
    """Consecutive slices of `x` along `dim`, as long as the node's results are."""
    dim = normalise_dim(dim, len(x.shape))
    begins = itertools.accumulate((to_index(f.shape[dim]) for f in call.fake), initial=ZERO)
    return tuple(
        _slice(part, x, dim, begin) for part, begin in zip(call.results, begins, strict=False)
    )


@views("aten.diagonal")
def _diagonal(call: Call, x: LazyTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> View:
    rank = len(x.shape)
    first, second = normalise_dim(dim1, rank), normalise_dim(dim2, rank)
    down, right = const(max(0, -offset)), const(max(0, offset))

    def source(idx: Indices) -> Indices:
        rest, along = list(idx[:-1]), idx[-1]
        diagonal = {first: along + down, second: along + right}
        return [diagonal[k] if k in diagonal else rest.pop(0) for k in range(rank)]

    return source, down * x.strides[first] + right * x.strides[second]


@lowers("aten.cat")
def _cat(call: Call, tensors: Sequence[Any], dim: int = 0) -> LazyTensor:
    """Each element from the piece its index falls into: nested selects over masked loads."""
    parts = [t for t in tensors if not (len(t.shape) == 1 and t.shape[0] is ZERO)]
    require(0 < len(parts) <= 8, "number of pieces")
    require(call.fake.dtype in SUPPORTED, "dtype")
    dim = normalise_dim(dim, len(parts[0].shape))
    dtype = compute_dtype(call.fake.dtype)

    def element(idx: Indices) -> Expr:
        begin, choices = ZERO, list[tuple[Expr, Expr]]()
        for part in parts:
            inside = within(idx[dim], begin, begin + part.shape[dim])
            value = cast(part.at(replaced(idx, dim, idx[dim] - begin)), dtype)
            choices.append((inside, masked(value, inside)))
            begin = begin + part.shape[dim]
        (_, last), *others = reversed(choices)
        return functools.reduce(
            lambda rest, choice: where(choice[0], choice[1], rest), others, last
        )

    return call.lazy(element)


@lowers("aten.constant_pad_nd")
def _constant_pad(call: Call, x: LazyTensor, pad: Sequence[Any], value: Any = 0) -> LazyTensor:
    require(call.fake.dtype in SUPPORTED, "dtype")
    rank = len(x.shape)
    before = [ZERO] * rank
    after = [ZERO] * rank
    for k in range(len(pad) // 2):
        before[rank - 1 - k], after[rank - 1 - k] = to_index(pad[2 * k]), to_index(pad[2 * k + 1])
    dtype = compute_dtype(call.fake.dtype)

    def element(idx: Indices) -> Expr:
        inside: Expr = constant(True, torch.bool)
        inner = [at - low for at, low in zip(idx, before, strict=True)]
        for at, low, high, extent in zip(inner, before, after, x.shape, strict=True):
            first = at if low is ZERO else ZERO
            inside &= within(at, first, extent if high is not ZERO else at + 1)
        return where(inside, masked(x.at(inner), inside), number(value, dtype))

    return call.lazy(element)


@lowers("aten.flip")
def _flip(call: Call, x: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    flipped = {normalise_dim(dim, len(x.shape)) for dim in dims}

    def element(idx: Indices) -> Expr:
        dims = enumerate(zip(idx, x.shape, strict=True))
        return x.at([extent - 1 - at if k in flipped else at for k, (at, extent) in dims])

    return call.lazy(element)


def _in_pieces(at: Element, dim: int, pieces: Sequence[tuple[int, int]]) -> Element:
    """`at` with an offset taken from its index along `dim`, another one in each piece of it.

    Args:
        pieces: where each begins, and its offset.
    """

    def element(idx: Indices) -> Expr:
        result, end = None, None
        for begin, offset in reversed(pieces):
            inside = index_value(idx[dim]) >= index_value(const(begin))
            if end is not None:
                inside &= index_value(idx[dim]) < index_value(const(end))
            value = masked(at(replaced(idx, dim, idx[dim] - offset)), inside)
            result, end = value if result is None else where(inside, value, result), begin
        assert result is not None
        return result

    return element


@lowers("aten.roll")
def _roll(call: Call, x: LazyTensor, shifts: Any, dims: Sequence[int] = ()) -> LazyTensor:
    require(call.fake.dtype in SUPPORTED and len(dims) == len(shifts) > 0, "dtype or no dimension")
    element: Element = x.at
    for shift, each in zip(shifts, dims, strict=True):
        dim = normalise_dim(each, len(x.shape))
        require(x.shape[dim].is_const and isinstance(shift, int), "sizes")
        count = x.shape[dim].value
        first = shift % max(count, 1)
        if first:
            element = _in_pieces(element, dim, [(0, first - count), (first, first)])
    return call.lazy(element)


@views("aten.unfold")
def _unfold(call: Call, x: LazyTensor, dim: int, size: Any, step: Any) -> View:
    require(len(x.shape) > 0, "unfold of a scalar")
    dim, stride = normalise_dim(dim, len(x.shape)), to_index(step)
    return lambda idx: replaced(idx[:-1], dim, idx[dim] * stride + idx[-1]), ZERO


@lowers("aten.repeat")
def _repeat(call: Call, x: LazyTensor, repeats: Sequence[Any]) -> LazyTensor:
    """Remainders of an index, but along the last dimension pieces, which the loop is cut for."""
    count, rank = len(x.shape), len(repeats)
    last = repeats[-1] if count and x.shape[-1].is_const and call.fake.dtype in SUPPORTED else 0
    cut = isinstance(last, int) and 1 < last <= 8

    def element(idx: Indices) -> Expr:
        inner = [at % extent for at, extent in zip(idx[rank - count :], x.shape, strict=True)]
        return x.at([*inner[:-1], idx[-1]] if cut else inner)

    if not cut:
        return call.lazy(element)
    begins = [x.shape[-1].value * k for k in range(last)]
    return call.lazy(_in_pieces(element, rank - 1, list(zip(begins, begins, strict=True))))


def _scatter_into(
    call: Call, x: LazyTensor, source: LazyTensor, inside: Element, inner: Callable[..., Indices]
) -> LazyTensor:
    """`x` with the elements where `inside` holds taken from `source` at `inner`."""
    require(call.fake.dtype in SUPPORTED and source.dtype is x.dtype, "dtype")

    def element(idx: Indices) -> Expr:
        test = inside(idx)
        return where(test, masked(source.at(inner(idx)), test), x.at(idx))

    return call.lazy(element)


@lowers("aten.slice_scatter")
def _slice_scatter(
    call: Call,
    x: LazyTensor,
    source: LazyTensor,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> LazyTensor:
    dim = normalise_dim(dim, len(x.shape))
    begin = _clamped(start, x.shape[dim], ZERO)
    stride = to_index(step)
    last = begin + (source.shape[dim] - 1) * stride + 1
    require(source.shape[dim] is not ZERO, "empty slice")
    if stride is ONE and source.shape[dim] == x.shape[dim] and source.dtype is x.dtype:
        return call.lazy(source.at)

    def inside(idx: Indices) -> Expr:
        at = idx[dim]
        test = within(at, begin, last)
        if stride is not ONE:
            test &= apply("eq", index_value((at - begin) % stride), index_value(ZERO))
        return test

    def inner(idx: Indices) -> list[IndexExpr]:
        at = idx[dim] - begin
        return replaced(idx, dim, at if stride is ONE else at // stride)

    return _scatter_into(call, x, source, inside, inner)


@lowers("aten.diagonal_scatter")
def _diagonal_scatter(
    call: Call, x: LazyTensor, source: LazyTensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> LazyTensor:
    first, second = normalise_dim(dim1, len(x.shape)), normalise_dim(dim2, len(x.shape))
    down = max(0, -offset)

    def inner(idx: Indices) -> list[IndexExpr]:
        rest = [at for k, at in enumerate(idx) if k not in (first, second)]
        return [*rest, idx[first] - down]

    def inside(idx: Indices) -> Expr:
        return apply("eq", index_value(idx[first] + offset), index_value(idx[second]))

    return _scatter_into(call, x, source, inside, inner)
