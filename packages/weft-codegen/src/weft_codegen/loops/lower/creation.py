"""Operators that make tensors from nothing, and the triangular masks."""

from __future__ import annotations

from typing import Any

import torch

from weft_codegen.loops.expr import Expr, apply, cast, constant, index_value, where
from weft_codegen.loops.index import IndexExpr
from weft_codegen.loops.lower.pointwise import SUPPORTED, number, operand_at
from weft_codegen.loops.lower.table import Call, lowers, require
from weft_codegen.loops.lower.values import Indices, LazyTensor, compute_dtype


def _filled(call: Call, value: Any) -> LazyTensor:
    require(call.fake.dtype in SUPPORTED, f"dtype {call.fake.dtype}")
    element = number(value, compute_dtype(call.fake.dtype))
    return call.lazy(lambda place: element)


@lowers("aten.full", "aten.full_like", "aten.new_full")
def _full(call: Call, like: Any, *args: Any, **kwargs: Any) -> LazyTensor:
    return _filled(call, args[-1] if args else kwargs["fill_value"])


@lowers("aten.fill")
def _fill(call: Call, x: LazyTensor, value: Any) -> LazyTensor:
    if isinstance(value, LazyTensor):
        dtype = compute_dtype(call.fake.dtype)
        return call.lazy(lambda place: operand_at(value, place, dtype))
    return _filled(call, value)


# Uninitialised memory may as well be zero: as a constant it vanishes when it is overwritten.
@lowers("aten.empty", "aten.empty_like", "aten.empty_permuted", "aten.empty_strided")
@lowers("aten.new_empty", "aten.new_empty_strided")
@lowers("aten.zeros", "aten.zeros_like", "aten.new_zeros")
def _zeros(call: Call, *args: Any, **kwargs: Any) -> LazyTensor:
    return _filled(call, 0)


@lowers("aten.ones", "aten.ones_like", "aten.new_ones")
def _ones(call: Call, *args: Any, **kwargs: Any) -> LazyTensor:
    return _filled(call, 1)


@lowers("aten.scalar_tensor")
def _scalar_tensor(call: Call, value: Any, **kwargs: Any) -> LazyTensor:
    return _filled(call, value)


@lowers("prims.iota")
def _iota(call: Call, length: Any, *, start: Any, step: Any, **kwargs: Any) -> LazyTensor:
    dtype = call.fake.dtype
    require(isinstance(start, int) and isinstance(step, int), "float range")
    return call.lazy(lambda place: index_value(place[0] * step + start, dtype))


@lowers("aten.arange")
def _arange(call: Call, *args: Any, **kwargs: Any) -> LazyTensor:
    start, step = 0, 1
    if len(args) >= 2:
        start = args[0]
    if len(args) >= 3:
        step = args[2]
    dtype = call.fake.dtype
    integral = all(isinstance(v, int | IndexExpr) for v in (start, step))
    require(integral and dtype in SUPPORTED, "float range")
    return call.lazy(lambda place: cast(index_value(place[0] * step + start), compute_dtype(dtype)))


def _triangular(comparison: str) -> Any:
    """Keep x[..., i, j] where `j - i <comparison> diagonal`."""

    def lowering(call: Call, x: LazyTensor, diagonal: int = 0) -> LazyTensor:
        require(x.dtype in SUPPORTED, "dtype")

        def element(place: Indices) -> Expr:
            offset = index_value(place[-1] - place[-2])
            keep = apply(comparison, offset, constant(diagonal, torch.int64))
            value = x.at(place)
            return where(keep, value, constant(0, value.dtype))

        return call.lazy(element)

    return lowering


lowers("aten.tril")(_triangular("le"))
lowers("aten.triu")(_triangular("ge"))
