"""Reductions over some dimensions, and scans: running sums, products and extrema along one.

Softmax, norms and losses reach here decomposed.  Variance takes two steps, mean then squared
deviations, which vectorises and is as accurate as Welford's update for rows that stay in cache.
A scan's loop carries its result so far, and what comes before and after shares that loop.  The
result accumulates in the dtype that eager takes (float64 for float32), so it is eager's exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft_codegen.loops.expr import (
    Apply,
    Cast,
    Const,
    Expr,
    apply,
    cast,
    compute_dtype,
    constant,
    index_of,
    index_value,
    where,
)
from weft_codegen.loops.index import ONE, ZERO, Axis, IndexExpr, in_range, product, single
from weft_codegen.loops.lower.lazy_tensor import (
    Element,
    Indices,
    LazyTensor,
    contiguous_strides,
    flatten,
    index_space,
)
from weft_codegen.loops.lower.lowering import Call, lowers, lowers_each, normalise_dim, require
from weft_codegen.loops.lower.pointwise import SUPPORTED, literal
from weft_codegen.loops.lower.shapes import number
from weft_codegen.loops.rewrite import Rewriter


def reduced_dims(dims: Any, rank: int) -> list[int]:
    """The dimensions to reduce; None and the empty list mean all."""
    if isinstance(dims, int):
        dims = [dims]
    if dims is None or len(dims) == 0 or rank == 0:
        return list(range(rank))
    return sorted({normalise_dim(dim, rank) for dim in dims})


def _hit_inside(node: Expr, over: Axis) -> Expr | None:
    """For where(over == place, value, 0), which is zero but at one place along `over`: whether that
    place is one of `over`'s. Else None."""
    match node:
        case Apply(_, "where", (Apply(_, "eq", sides), value, Const(_, 0))):
            for here, there in (sides, sides[::-1]):
                walks = index_of(here)
                if walks is None or single(walks) is not over or over in value.axes | there.axes:
                    continue
                known, end = index_of(there), index_value(over.extent, there.dtype)
                if known is not None and in_range(known, over.extent):
                    return constant(True, torch.bool)
                return (there >= constant(0, there.dtype)) & (there < end)
    return None


def _one_hot_sum(value: Expr, over: Axis) -> Expr | None:
    """The sum over `over` of a product with a factor that is zero but at one index, without a loop;
    of a cast of one likewise.

    The other terms are zero times the rest, which is nan where that is nan or infinite.
    """
    factor = value
    while isinstance(factor, Cast) or (isinstance(factor, Apply) and factor.name == "mul"):
        if isinstance(factor, Cast):
            factor = factor.arg
            continue
        left, right = factor.args
        if over in left.axes and over in right.axes:
            return None
        factor = left if over in left.axes else right
    inside = _hit_inside(factor, over)
    if inside is None or not isinstance(factor, Apply):
        return None

    def replaced(part: Expr) -> Expr:
        return Rewriter(lambda node: part if node is factor else None)(value)

    nothing = replaced(factor.args[2])
    return where(inside, replaced(factor.args[1]), nothing) + nothing


def reduce(
    call: Call,
    op: str,
    x: LazyTensor,
    dims: Sequence[int],
    keepdim: bool,
    value: Callable[[list[IndexExpr]], tuple[Expr, ...]],
    dtype: torch.dtype,
) -> LazyTensor:
    """A realised reduction of `value(idx)` over `dims` of x's index space.

    The result has x's shape with the dims removed (or of size one).
    """
    where, over = index_space(x.shape)
    inside = [single(where[k]) for k in dims]
    reduced = tuple(loop for loop in over if loop in inside)
    axes = tuple(loop for loop in over if loop not in inside)
    values = value(where)
    alone = _one_hot_sum(values[0], reduced[0]) if op == "sum" and len(reduced) == 1 else None
    if alone is not None:
        values, reduced = (alone,), ()
    raw = call.graph.reduction(call, op, axes, reduced, values, dtype)
    return _shown(raw, x, dims, keepdim, call.uses)


def _shown(
    raw: LazyTensor, x: LazyTensor, dims: Sequence[int], keepdim: bool, uses: int = 1
) -> LazyTensor:
    """What reducing `dims` of x made, with those dims removed or of size one."""
    kept = [k for k in range(len(x.shape)) if k not in dims]
    shape = [x.shape[k] for k in kept]
    if keepdim:
        shape = [ONE if k in dims else n for k, n in enumerate(x.shape)]

    def element(idx: Indices) -> Expr:
        inner = [idx[k] for k in kept] if keepdim else list(idx)
        inner = [at for at, k in zip(inner, kept, strict=True) if x.shape[k] is not ONE]
        return raw.at(inner)

    # The reduction's buffer is row-major over the kept dims: the result is a view of it.
    return _derived(raw, shape, element, uses, root=raw)


def _derived(
    base: LazyTensor, shape: Indices, element: Element, uses: int = 1, root: Any = None
) -> LazyTensor:
    """A row-major tensor of `base`'s dtype that is computed from it."""
    strides, seen = contiguous_strides(shape), dict[tuple[IndexExpr, ...], Expr]()
    made = replace(base, shape=tuple(shape), strides=strides, buffer=None, root=root, _seen=seen)
    return replace(made, element=element, uses=uses)


_OF_TRUTH_VALUES = {"sum": "any", "prod": "all"}


@lowers_each({f"aten.{name}": name for name in ("sum", "prod", "any", "all")})
@lowers_each({"aten.amax": "max", "aten.amin": "min"})
def _plain(
    op: str, call: Call, x: LazyTensor, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> LazyTensor:
    require(x.dtype in SUPPORTED and call.fake.dtype in SUPPORTED, "dtype")
    inner, over = compute_dtype(call.fake.dtype), reduced_dims(dims, len(x.shape))
    # any and all of uint8 are uint8, but of truth values.
    through = torch.bool if op in ("any", "all") else inner
    op = _OF_TRUTH_VALUES.get(op, op) if inner is torch.bool else op

    at = x.rounded_at if op in ("max", "min") else x.at

    def value(idx: list[IndexExpr]) -> tuple[Expr, ...]:
        return (cast(cast(at(idx), through), inner),)

    return reduce(call, op, x, over, keepdim, value, call.fake.dtype)


@lowers_each({"aten.max": "max", "aten.min": "min"})
def _extrema(op: str, call: Call, x: LazyTensor, dim: Any = None, keepdim: bool = False) -> Any:
    """max() over everything, or (values, indices) along a dimension."""
    require(x.dtype in SUPPORTED, "dtype")
    require(ZERO not in x.shape, "nothing to compare, where the operator may raise")
    if dim is None:
        return _plain(op, call, x)
    require(isinstance(dim, int), "binary max")
    values, indices = call.results
    return _plain(op, values, x, [dim], keepdim), _arg(f"arg{op}", indices, x, dim, keepdim)


@lowers_each({"aten.argmax": "argmax", "aten.argmin": "argmin"})
def _arg(op: str, call: Call, x: LazyTensor, dim: Any = None, keepdim: bool = False) -> LazyTensor:
    require(x.dtype in SUPPORTED and len(x.shape) > 0, "dtype")
    dims = reduced_dims(dim, len(x.shape))
    inner = compute_dtype(x.dtype)

    def value(idx: list[IndexExpr]) -> tuple[Expr, ...]:
        position = flatten([idx[k] for k in dims], [x.shape[k] for k in dims])
        return cast(x.rounded_at(idx), inner), index_value(position)

    return reduce(call, op, x, dims, keepdim, value, torch.int64)


def _scaled(call: Call, total: LazyTensor, divisor: Expr, dtype: torch.dtype) -> LazyTensor:
    """total / divisor, pointwise."""
    scaled = _derived(total, total.shape, lambda idx: total.at(idx) / divisor, call.uses)
    return replace(scaled, dtype=dtype)


@lowers("aten.mean")
def _mean(
    call: Call, x: LazyTensor, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> LazyTensor:
    require(call.fake.dtype.is_floating_point and x.dtype in SUPPORTED, "dtype")
    inner = compute_dtype(call.fake.dtype)
    over = reduced_dims(dims, len(x.shape))
    total = reduce(call, "sum", x, over, keepdim, lambda p: (cast(x.at(p), inner),), inner)
    count = number(product(x.shape[k] for k in over), inner)
    return _scaled(call, total, count, call.fake.dtype)


def _freedom(count: IndexExpr, correction: Any, dtype: torch.dtype) -> Expr:
    """max(count - correction, 0), folded when the count is known."""
    if count.is_const:
        return number(max(count.value - correction, 0), dtype)
    freedom = number(count, dtype) - number(correction, dtype)
    return apply("maximum", freedom, literal(freedom, 0))


@lowers("aten.var", "aten.var_mean")
def _variance(
    call: Call, x: LazyTensor, dims: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    """The variance of x over `dims`; for var_mean, the mean too."""
    require(not isinstance(dims, bool), "legacy overload")
    require(x.dtype in SUPPORTED and x.dtype.is_floating_point, "dtype")
    inner = compute_dtype(x.dtype)
    over = reduced_dims(dims, len(x.shape))
    size = product(x.shape[k] for k in over)
    count = number(size, inner)
    several = isinstance(call.fake, tuple | list)
    # Sums of doubles are not exact: deviations from the first element are, of equal numbers.
    anchored = x.dtype is torch.float64 and not several

    def first(idx: Indices) -> list[IndexExpr]:
        return [ZERO if k in over else at for k, at in enumerate(idx)]

    def element(idx: Indices) -> Expr:
        return x.at(idx) - x.at(first(idx)) if anchored else cast(x.at(idx), inner)

    total = reduce(call, "sum", x, over, True, lambda p: (element(p),), inner)
    mean = _scaled(call, total, count, inner)

    def deviation(idx: Indices) -> Expr:
        return element(idx) - mean.at(first(idx))

    squares = reduce(call, "sum", x, over, keepdim, lambda p: (deviation(p) * deviation(p),), inner)
    freedom = _freedom(size, 1 if correction is None else correction, inner)
    if not several:
        return _scaled(call, squares, freedom, call.fake.dtype)
    dtype = call.fake[0].dtype
    assert total.root is not None
    shown = _scaled(call, total if keepdim else _shown(total.root, x, over, False), count, inner)
    if x.device.type == "cpu":
        rest = reduce(call, "sum", x, over, keepdim, lambda p: (deviation(p),), inner)
        shown = _corrected(call, shown, _scaled(call, rest, count, inner))
    return _scaled(call, squares, freedom, dtype), replace(shown, dtype=dtype)


def _corrected(call: Call, mean: LazyTensor, rest: LazyTensor) -> LazyTensor:
    """A mean with that of the deviations from it, which rounding left: exact of equal numbers.

    Without that where it is nan, as of infinities.
    """

    def element(idx: Indices) -> Expr:
        more = rest.at(idx)
        return mean.at(idx) + where(apply("eq", more, more), more, literal(more, 0))

    return _derived(mean, mean.shape, element, call.uses)


# ---- scans


def _scanned(call: Call, op: str, x: LazyTensor, dim: int, inner: torch.dtype) -> LazyTensor:
    require(x.dtype in SUPPORTED and call.fake.dtype in SUPPORTED, "dtype")
    require(x.device.type == "cpu" and len(x.shape) > 0, "a scalar, or another device")
    dim = normalise_dim(dim, len(x.shape))
    require(x.shape[dim] is not ONE, "one element")
    dtype = compute_dtype(call.fake.dtype)
    at = x.rounded_at if op in ("max", "min") else x.at
    return call.graph.scanned(call, op, dim, lambda i: cast(at(i), dtype), inner)


@lowers_each({"aten.cumsum": "sum", "aten.cumprod": "prod", "aten.logcumsumexp": "logsumexp"})
def _accumulated(op: str, call: Call, x: LazyTensor, dim: int, dtype: Any = None) -> LazyTensor:
    inner = compute_dtype(call.fake.dtype)
    wide = torch.float64 if call.fake.dtype is torch.float32 else inner
    return _scanned(call, op, x, dim, wide)


@lowers_each({"aten.cummax": "max", "aten.cummin": "min"})
def _extreme(op: str, call: Call, x: LazyTensor, dim: int) -> tuple[LazyTensor, LazyTensor]:
    """The extreme so far, and the last position that has it (or the last nan's)."""
    values, positions = call.results
    inner = compute_dtype(x.dtype)
    dim = normalise_dim(dim, len(x.shape))
    best = _scanned(values, op, x, dim, inner)

    def hit_position(idx: Indices) -> Expr:
        value = cast(x.rounded_at(idx), inner)
        hit = apply("eq", value, cast(best.at(idx), inner))
        if inner.is_floating_point:
            hit |= apply("isnan", value)
        return where(hit, index_value(idx[dim]), constant(0, torch.int64))

    return best, call.graph.scanned(positions, "max", dim, hit_position, torch.int64)
