"""Scans: running sums, products and extrema along a dimension.

A scan's loop carries its result so far, and what comes before and after shares that loop.  The
result accumulates in the dtype that eager takes (float64 for float32), so it is eager's exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft_codegen.loops.expr import Expr, apply, cast, compute_dtype, constant, index_value, where
from weft_codegen.loops.index import ONE
from weft_codegen.loops.lower.pointwise import SUPPORTED
from weft_codegen.loops.lower.table import Call, lowers, normalise_dim, require
from weft_codegen.loops.lower.values import Indices, LazyTensor


def _scanned(call: Call, op: str, x: LazyTensor, dim: int, inner: torch.dtype) -> LazyTensor:
    require(x.dtype in SUPPORTED and call.fake.dtype in SUPPORTED, "dtype")
    require(x.device.type == "cpu" and len(x.shape) > 0, "a scalar, or another device")
    dim = normalise_dim(dim, len(x.shape))
    require(x.shape[dim] is not ONE, "one element")
    dtype = compute_dtype(call.fake.dtype)
    return call.graph.scanned(call, op, dim, lambda i: cast(x.at(i), dtype), inner)


def _accumulated(op: str) -> Callable[..., LazyTensor]:
    def lowering(call: Call, x: LazyTensor, dim: int, dtype: Any = None) -> LazyTensor:
        inner = compute_dtype(call.fake.dtype)
        wide = torch.float64 if call.fake.dtype is torch.float32 else inner
        return _scanned(call, op, x, dim, wide)

    return lowering


for _name, _op in {"cumsum": "sum", "cumprod": "prod", "logcumsumexp": "logsumexp"}.items():
    lowers(f"aten.{_name}")(_accumulated(_op))


def _extreme(op: str) -> Callable[..., tuple[LazyTensor, LazyTensor]]:
    def lowering(call: Call, x: LazyTensor, dim: int) -> tuple[LazyTensor, LazyTensor]:
        """The extreme so far, and the last place that has it (or the last nan's)."""
        values, places = call.results
        inner = compute_dtype(x.dtype)
        dim = normalise_dim(dim, len(x.shape))
        best = _scanned(values, op, x, dim, inner)

        def place(i: Indices) -> Expr:
            value = cast(x.at(i), inner)
            hit = apply("eq", value, cast(best.at(i), inner))
            if inner.is_floating_point:
                hit |= apply("isnan", value)
            return where(hit, index_value(i[dim]), constant(0, torch.int64))

        return best, places.graph.scanned(places, "max", dim, place, torch.int64)

    return lowering


lowers("aten.cummax")(_extreme("max"))
lowers("aten.cummin")(_extreme("min"))
