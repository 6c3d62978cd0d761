"""Operators that make tensors from nothing."""

from __future__ import annotations

from typing import Any

from weft_codegen.loops.expr import cast, compute_dtype, index_value
from weft_codegen.loops.index import IndexExpr
from weft_codegen.loops.lower.pointwise import SUPPORTED, pointwise
from weft_codegen.loops.lower.table import Call, lowers, require
from weft_codegen.loops.lower.values import LazyTensor


def _filled(call: Call, value: Any) -> LazyTensor:
    require(call.fake.dtype in SUPPORTED, f"a tensor of {call.fake.dtype}")
    return pointwise(call, lambda value: value, (value,), compute_dtype(call.fake.dtype))


@lowers("aten.full", "aten.full_like", "aten.new_full", "aten.fill", "aten.scalar_tensor")
def _full(call: Call, *args: Any, **kwargs: Any) -> LazyTensor:
    return _filled(call, kwargs.get("fill_value", args[-1]))


# Uninitialised memory may as well be zero: as a constant it vanishes when it is overwritten.
@lowers("aten.empty", "aten.empty_like", "aten.empty_permuted", "aten.empty_strided")
@lowers("aten.new_empty", "aten.new_empty_strided")
def _empty(call: Call, *args: Any, **kwargs: Any) -> LazyTensor:
    return _filled(call, 0)


@lowers("prims.iota")
def _iota(call: Call, length: Any, *, start: Any, step: Any, **kwargs: Any) -> LazyTensor:
    dtype = call.fake.dtype
    integral = all(isinstance(v, int | IndexExpr) for v in (start, step))
    require(integral and dtype in SUPPORTED, "float range")
    return call.lazy(lambda place: cast(index_value(place[0] * step + start), compute_dtype(dtype)))


@lowers("aten.arange")
def _arange(call: Call, *args: Any, **kwargs: Any) -> LazyTensor:
    start, step = args[0] if len(args) > 1 else 0, args[2] if len(args) > 2 else 1
    return _iota(call, None, start=start, step=step)
