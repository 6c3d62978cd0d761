"""Resampling: interpolation to other sizes and its backward, separable in the dimensions.

Element i of an output dimension lies at num / den in the input, whole numbers: where it lies and
how far from its neighbours follows without rounding, and a place is an index expression that needs
no check.  Cases where eager rounds a factor first and could take another element are externs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft_codegen.loops.expr import Expr, apply, compute_dtype, constant, index_value, where
from weft_codegen.loops.index import ONE, ZERO, IndexExpr, const, least
from weft_codegen.loops.lower.lazy_tensor import Indices, LazyTensor
from weft_codegen.loops.lower.lowering import Call, lowers, lowers_each, require
from weft_codegen.loops.lower.masking import masked, sum_inside, within
from weft_codegen.loops.lower.pointwise import SUPPORTED
from weft_codegen.loops.lower.pooling import MOST, stored
from weft_codegen.loops.lower.shapes import number, to_shape

Tap = tuple[IndexExpr, Expr]  # a place in the input, its weight


@dataclass(frozen=True)
class _Dimension:
    """One dimension of `inner` elements in the input and `outer` in the output."""

    inner: IndexExpr
    outer: IndexExpr
    aligned: bool

    def source(self, at: IndexExpr) -> tuple[IndexExpr, IndexExpr]:
        """(num + den, den) of output element `at`; num is at least -den."""
        if self.aligned:
            den = self.outer - 1 if self.outer is not ONE else ONE
            return at * (self.inner - 1) + den, den
        return (at * 2 + 1) * self.inner + self.outer, self.outer * 2

    def clamped(self, at: IndexExpr) -> IndexExpr:
        """`at` moved into the input."""
        return least(at - least(at, ZERO), self.inner - 1)


Taps = Callable[[_Dimension, IndexExpr, torch.dtype], list[Tap]]


def _linear(dimension: _Dimension, at: IndexExpr, dtype: torch.dtype) -> list[Tap]:
    num, den = dimension.source(at)
    right = num // den
    share = number(num % den, dtype) / number(den, dtype)
    return [(dimension.clamped(right - 1), 1 - share), (dimension.clamped(right), share)]


def _cubic(dimension: _Dimension, at: IndexExpr, dtype: torch.dtype) -> list[Tap]:
    """Keys' cubic convolution with a = -0.75, over the four nearest elements."""
    num, den = dimension.source(at)
    right = num // den
    share = number(num % den, dtype) / number(den, dtype)
    a = -0.75

    def near(x: Expr) -> Expr:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Expr) -> Expr:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    weights = (far(share + 1), near(share), near(1 - share), far(2 - share))
    return [(dimension.clamped(right + k - 2), weight) for k, weight in enumerate(weights)]


def _sizes(
    inner: Sequence[Any], outer: Sequence[Any], scales: Sequence[Any]
) -> list[tuple[IndexExpr, IndexExpr, float | None]]:
    """(size in the input, size in the output, the factor that was given) of each dimension."""
    given = [*scales, *[None] * (len(inner) - len(scales))]
    require(all(isinstance(scale, float | None) for scale in given), "symbolic factor")
    return list(zip(to_shape(inner), to_shape(outer), given, strict=True))


def _dimensions(
    inner: Sequence[Any], outer: Sequence[Any], aligned: bool, scales: Sequence[Any]
) -> list[_Dimension]:
    """The resampled dimensions, where a given factor is the quotient of the sizes."""
    found = []
    for n, m, scale in _sizes(inner, outer, scales):
        known = n.is_const and m.is_const
        if scale is not None and not aligned:
            exact = n.value * scale == m.value if known else m is n * int(scale)
            require(exact, "a factor that is rounded")
        require(m.is_const or not aligned, "aligned corners of a symbolic size")
        found.append(_Dimension(n, m, aligned))
    return found


_LINEAR = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")


@lowers_each({f"aten.{name}": _linear for name in _LINEAR} | {"aten.upsample_bicubic2d": _cubic})
def _resampled(
    taps: Taps, call: Call, x: LazyTensor, size: Sequence[Any], aligned: bool, *scales: Any
) -> LazyTensor:
    """The weighted sum over the taps of each dimension, the last one first."""
    require(x.dtype in SUPPORTED and x.dtype.is_floating_point, "dtype")
    rank = len(size)
    dimensions = _dimensions(x.shape[-rank:], size, aligned, scales)
    x, dtype = stored(call, x), compute_dtype(x.dtype)

    def element(idx: Indices) -> Expr:
        chosen = [taps(d, at, dtype) for d, at in zip(dimensions, idx[-rank:], strict=True)]

        def total(fixed: tuple[IndexExpr, ...]) -> Expr:
            if len(fixed) == rank:
                return x.at([*idx[:-rank], *fixed])
            first, *others = (weight * total((*fixed, at)) for at, weight in chosen[len(fixed)])
            return sum(others, start=first)

        return total(())

    return call.lazy(element)


def _factors(inner: Sequence[Any], outer: Sequence[Any], scales: Sequence[Any]) -> list[int]:
    """The whole factors between known sizes."""
    factors = []
    for n, m, scale in _sizes(inner, outer, scales):
        require(n.is_const and m.is_const and n.value > 0, "symbolic size")
        factor, rest = divmod(m.value, n.value)
        require(rest == 0 and scale in (None, float(factor)), "fractional factor")
        factors.append(factor)
    return factors


_KINDS = ("upsample_nearest", "_upsample_nearest_exact")
_NEAREST = [f"aten.{kind}{rank}d" for kind in _KINDS for rank in (1, 2, 3)]


@lowers(*_NEAREST)
def _nearest(call: Call, x: LazyTensor, size: Sequence[Any], *scales: Any) -> LazyTensor:
    """Whole factors only: then element i comes from i // factor, without any rounding."""
    require(x.dtype in SUPPORTED, "dtype")
    rank = len(size)
    factors = _factors(x.shape[-rank:], size, scales)
    x = stored(call, x)

    def element(idx: Indices) -> Expr:
        inner = [at // const(f) for at, f in zip(idx[-rank:], factors, strict=True)]
        return x.at([*idx[:-rank], *inner])

    return call.lazy(element)


# ---- backwards: each input element gathers from the outputs that it went into


def _linear_users(at: IndexExpr, factor: int, last: IndexExpr, dtype: torch.dtype) -> list[Tap]:
    """`factor` outputs have the element on their right, as many more on their left.

    Beyond the first and the last element there is no other: outputs there have it whole.
    """
    before = (factor + 1) // 2
    taps = []
    for k in range(2 * factor):
        share = (2 * (k % factor) + 1 + factor - 2 * before) / (2 * factor)
        edge = apply("eq", index_value(at), index_value(ZERO if k < factor else last))
        weight = constant(share if k < factor else 1 - share, dtype)
        taps.append((at * factor + (k - before), where(edge, constant(1, dtype), weight)))
    return taps


@lowers_each({f"aten.{name}_backward": True for name in _LINEAR})
@lowers_each({f"{name}_backward": False for name in _NEAREST})
def _gathered(
    linear: bool, call: Call, gradient: LazyTensor, size: Any, whole: Sequence[Any], *rest: Any
) -> LazyTensor:
    """The sum of the gradients of an element's users; whole factors, few users."""
    rank, dtype = len(size), compute_dtype(gradient.dtype)
    require(gradient.dtype in SUPPORTED and not (linear and rest[0]), "dtype or aligned corners")
    inner = to_shape(whole[-rank:])
    factors = _factors(inner, size, rest[1:] if linear else rest)
    require(math.prod(factors) * (2**rank if linear else 1) <= MOST, "many users")
    grown = stored(call, gradient)

    def users(at: IndexExpr, factor: int, extent: IndexExpr) -> list[Tap]:
        if linear:
            return _linear_users(at, factor, extent - 1, dtype)
        return [(at * factor + k, constant(1, dtype)) for k in range(factor)]

    def terms(idx: Indices) -> Iterator[tuple[Expr, Expr]]:
        own = zip(idx[-rank:], factors, inner, strict=True)
        for taps in itertools.product(*(users(*each) for each in own)):
            inside: Expr = constant(True, torch.bool)
            weight: Expr = constant(1, dtype)
            for (at, share), extent in zip(taps, grown.shape[-rank:], strict=True):
                inside &= within(at, ZERO, extent)
                weight *= share
            yield inside, masked(grown.at([*idx[:-rank], *(at for at, _ in taps)]), inside) * weight

    return call.lazy(lambda idx: sum_inside(terms(idx), dtype))
