"""Pooling over windows: a window's elements are so many masked loads in one expression.

Written out, the loop over the output stays the only one, so it vectorises along whatever dimension
is contiguous and fuses with what comes before and after.  Large windows, dilation and the backward
of max pooling (a scatter that libtorch does well) are externs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft_codegen.loops.expr import Expr, apply, cast, compute_dtype, constant, index_value, where
from weft_codegen.loops.index import ZERO, IndexExpr, const, least
from weft_codegen.loops.lower.lazy_tensor import Indices, LazyTensor
from weft_codegen.loops.lower.lowering import Call, lowers, require
from weft_codegen.loops.lower.masking import masked, sum_inside, within
from weft_codegen.loops.lower.pointwise import SUPPORTED
from weft_codegen.loops.lower.shapes import number

# Largest window that is written out.
MOST = 16


def _pair(value: Any, default: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """A window parameter as (vertical, horizontal); one number means both."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values:
        return default
    require(all(isinstance(v, int) for v in values), "symbolic window")
    return int(values[0]), int(values[-1])


@dataclass(frozen=True)
class _Window:
    """A 2-d window over the last two dimensions of a tensor of shape `shape`."""

    shape: tuple[IndexExpr, ...]
    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def elements(self, idx: Indices) -> Iterator[tuple[list[IndexExpr], Expr]]:
        """(index in the input, whether it is inside) for each position of the window at `idx`."""
        for offsets in itertools.product(*map(range, self.size)):
            inside: Expr = constant(True, torch.bool)
            at = list(idx[:-2])
            for k, offset in enumerate(offsets):
                position = idx[k - 2] * self.stride[k] + (offset - self.padding[k])
                at.append(position)
                inside &= within(position, ZERO, self.shape[k - 2])
            yield at, inside

    def begin(self, idx: Indices, k: int) -> IndexExpr:
        """The first row (k = 0) or column (k = 1) of the window that is inside."""
        start = idx[k - 2] * self.stride[k] - self.padding[k]
        return start - least(start, ZERO)

    def end(self, idx: Indices, k: int, padded: bool) -> IndexExpr:
        """Past the last one; with `padded`, padding counts as inside."""
        past = idx[k - 2] * self.stride[k] + (self.size[k] - self.padding[k])
        return least(past, self.shape[k - 2] + (self.padding[k] if padded else 0))

    def covering(self, idx: Indices, out: Indices) -> Iterator[tuple[list[IndexExpr], Expr]]:
        """(index in the output, whether it exists) of every window that covers input `idx`."""
        reach = [-(-size // step) for size, step in zip(self.size, self.stride, strict=True)]
        for back in itertools.product(*map(range, reach)):
            inside: Expr = constant(True, torch.bool)
            at = list(idx[:-2])
            for k, count in enumerate(back):
                shifted = idx[k - 2] + self.padding[k]
                window = shifted // const(self.stride[k]) - count
                at.append(window)
                reached = shifted % const(self.stride[k]) + count * self.stride[k]
                inside &= within(window, ZERO, out[k - 2])
                inside &= within(reached, ZERO, const(self.size[k]))
            yield at, inside


def _window(x: LazyTensor, size: Any, stride: Any, padding: Any) -> _Window:
    require(x.dtype in SUPPORTED and len(x.shape) >= 3, "dtype or rank")
    size = _pair(size)
    require(size[0] * size[1] <= MOST, "large window")
    return _Window(x.shape, size, _pair(stride, size), _pair(padding))


def stored(call: Call, x: LazyTensor) -> LazyTensor:
    """`x` in memory: windows overlap, so that its elements would be computed several times."""
    if x.buffer is None and x.root is None:
        call.graph.realise(x)
    return x


@lowers("aten.max_pool2d_with_indices")
def _max_pool(
    call: Call, x: LazyTensor, size: Any, stride: Any = (), padding: Any = 0, *rest: Any
) -> tuple[LazyTensor, LazyTensor]:
    window = _window(x, size, stride, padding)
    dilated = bool(rest) and _pair(rest[0]) != (1, 1)  # rest: (dilation, ceil_mode)
    require(x.dtype.is_floating_point and not dilated, "dilated window")
    x = stored(call, x)
    dtype = compute_dtype(x.dtype)
    lowest = constant(float("-inf"), dtype)

    def best(idx: Indices) -> tuple[Expr, Expr]:
        """The greatest element and where it is; as in eager the last nan wins."""
        value: Expr = lowest
        width = x.shape[-1]
        at = index_value(window.begin(idx, 0) * width + window.begin(idx, 1))
        for position, inside in window.elements(idx):
            element = where(inside, masked(cast(x.at(position), dtype), inside), lowest)
            better = (element > value) | apply("isnan", element)
            value = where(better, element, value)
            at = where(better, index_value(position[-2] * width + position[-1]), at)
        return value, at

    values, positions = call.results
    return values.lazy(lambda i: best(i)[0]), positions.lazy(lambda i: best(i)[1])


def _divisor(window: _Window, idx: Indices, rest: Sequence[Any], dtype: torch.dtype) -> Expr:
    """How many elements an average is over; `rest` as of `_avg_pool`."""
    counts_padding = len(rest) < 2 or rest[1]
    override = rest[2] if len(rest) > 2 else None
    if override is not None:
        return number(override, dtype)
    count = const(1)
    for k in (0, 1):
        start = idx[k - 2] * window.stride[k] - window.padding[k]
        begin = start if counts_padding else window.begin(idx, k)
        count = count * (window.end(idx, k, counts_padding) - begin)
    return number(count, dtype)


@lowers("aten.avg_pool2d")
def _avg_pool(
    call: Call, x: LazyTensor, size: Any, stride: Any = (), padding: Any = 0, *rest: Any
) -> LazyTensor:
    """The rest: ceil_mode, count_include_pad and divisor_override."""
    window = _window(x, size, stride, padding)
    require(x.dtype.is_floating_point, "integer average")
    x = stored(call, x)
    dtype = compute_dtype(x.dtype)

    def element(idx: Indices) -> Expr:
        parts = window.elements(idx)
        total = sum_inside(((m, masked(cast(x.at(at), dtype), m)) for at, m in parts), dtype)
        return total / _divisor(window, idx, rest, dtype)

    return call.lazy(element)


@lowers("aten.avg_pool2d_backward")
def _avg_pool_backward(
    call: Call, gradient: LazyTensor, x: LazyTensor, size: Any, stride: Any, pad: Any, *rest: Any
) -> LazyTensor:
    """Each input element gathers from the windows that cover it."""
    window = _window(x, size, stride, pad)
    require(x.dtype.is_floating_point, "integer average")
    gradient = stored(call, gradient)
    dtype = compute_dtype(x.dtype)

    def shares(idx: Indices) -> Iterator[tuple[Expr, Expr]]:
        for position, inside in window.covering(idx, gradient.shape):
            count = _divisor(window, position, rest, dtype)
            yield inside, masked(cast(gradient.at(position), dtype), inside) / count

    return call.lazy(lambda idx: sum_inside(shares(idx), dtype))


def _whole_windows(x: LazyTensor, size: Any) -> list[int]:
    """The window that makes an adaptive pool to `size` a plain one: where it divides x's sizes."""
    require(len(x.shape) >= 3 and x.dtype in SUPPORTED, "dtype or rank")
    window = []
    for extent, given in zip(x.shape[-2:], size, strict=True):
        known = extent.is_const and isinstance(given, int) and given > 0
        require(known and extent.value % given == 0 and extent.value > 0, "uneven windows")
        window.append(extent.value // given)
    return window


@lowers("aten._adaptive_avg_pool2d")
def _adaptive(call: Call, x: LazyTensor, size: Any) -> LazyTensor:
    window = _whole_windows(x, size)
    return _avg_pool(call, x, window, window)


@lowers("aten._adaptive_avg_pool2d_backward")
def _adaptive_backward(call: Call, gradient: LazyTensor, x: LazyTensor) -> LazyTensor:
    require(all(extent.is_const for extent in gradient.shape[-2:]), "symbolic size")
    window = _whole_windows(x, [extent.value for extent in gradient.shape[-2:]])
    return _avg_pool_backward(call, gradient, x, window, window, 0, False, True, None)
