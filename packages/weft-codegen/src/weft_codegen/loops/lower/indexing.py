"""Indirect reads and writes: index, gather, embedding, scatter and their backwards.

An index tensor's element becomes an integer inside an index expression (`index.computed`), so a
gather is a load like any other and fuses with what surrounds it.  Indices are checked apart from
their use; see checks.py.  An index that is an expression of the axes (position embeddings,
interpolation) needs neither check nor clamp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from weft_codegen.loops.checks import clamped
from weft_codegen.loops.expr import Expr, apply, cast, compute_dtype, index_of, index_value, where
from weft_codegen.loops.index import ONE, ZERO, IndexExpr, computed, in_range, nonnegative, product
from weft_codegen.loops.lower.lazy_tensor import (
    Indices,
    LazyTensor,
    broadcast_at,
    index_space,
    replaced,
)
from weft_codegen.loops.lower.lowering import Call, lowers, lowers_each, normalise_dim, require
from weft_codegen.loops.lower.pointwise import SUPPORTED, operand_at

_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class _Positions:
    """The elements of an index tensor as positions along a dimension of size `extent`.

    wraps: negative ones count from the end.
    """

    index: LazyTensor
    extent: IndexExpr
    wraps: bool

    def at(self, idx: Indices) -> IndexExpr:
        value = cast(broadcast_at(self.index, idx), torch.int64)
        known = index_of(value)
        if known is not None and in_range(known, self.extent):
            return known
        if self.extent is ONE:
            return ZERO
        return computed(clamped(value, self.extent, self.wraps), self.extent)


def _positions(
    call: Call, index: LazyTensor, extent: IndexExpr, dim: int, kind: str, wraps: bool = False
) -> _Positions:
    """`index` as positions, with the check that it needs.

    kind: whose exception a bad one raises (checks.py); "" where all are known to be good.
    """
    require(index.dtype in _INTEGERS, f"index of {index.dtype}")
    require(index.device == call.fake.device, "index on another device")
    require(extent is not ZERO, "index into nothing")
    where_, _ = index_space(index.shape)
    known = index_of(cast(index.at(where_), torch.int64))
    good = known is not None and in_range(known, extent)
    if kind and not good and product(index.shape) is not ZERO:
        call.graph.check_index(call, index, extent, dim=dim, wraps=wraps, kind=kind)
    return _Positions(index, extent, wraps)


def _source(call: Call, x: LazyTensor) -> LazyTensor:
    """`x`, stored first if reading it element by element would compute some of them repeatedly."""
    require(x.dtype in SUPPORTED and call.fake.dtype in SUPPORTED, "dtype")
    result = product(call.lazy(x.at).shape)
    if x.buffer is None and x.root is None and nonnegative(result - product(x.shape)):
        call.graph.realise(x)
    return x


def _slices(call: Call, x: LazyTensor, dim: int, index: LazyTensor) -> LazyTensor:
    """The slices of `x` along `dim` that `index` names, its dimensions in the place of `dim`."""
    rows = _positions(call, index, x.shape[dim], dim, "lookup")
    x, end = _source(call, x), dim + len(index.shape)
    return call.lazy(lambda idx: x.at([*idx[:dim], rows.at(idx[dim:end]), *idx[end:]]))


@lowers("aten.embedding")
def _embedding(call: Call, weight: LazyTensor, indices: LazyTensor, *rest: Any) -> LazyTensor:
    return _slices(call, weight, 0, indices)


@lowers("aten.index_select")
def _index_select(call: Call, x: LazyTensor, dim: int, index: LazyTensor) -> LazyTensor:
    require(len(x.shape) > 0 and len(index.shape) == 1, "index_select of a scalar")
    return _slices(call, x, normalise_dim(dim, len(x.shape)), index)


@lowers("aten.gather")
def _gather(call: Call, x: LazyTensor, dim: int, index: LazyTensor, **kwargs: Any) -> LazyTensor:
    require(len(x.shape) == len(index.shape) > 0, "gather of a scalar")
    dim = normalise_dim(dim, len(x.shape))
    along = _positions(call, index, x.shape[dim], dim, "scatter")
    x = _source(call, x)
    return call.lazy(lambda idx: x.at(replaced(idx, dim, along.at(idx))))


@dataclass(frozen=True)
class _Advanced:
    """x[:, i, j, :]: which dimensions are indexed, and where the indices' own dimensions go."""

    rank: int
    indexed: dict[int, _Positions]
    own: int

    @property
    def begin(self) -> int:
        """The first of the indices' dimensions in the result: in front unless they are adjacent."""
        dims = sorted(self.indexed)
        return dims[0] if dims[-1] - dims[0] + 1 == len(dims) else 0

    def source(self, idx: Indices) -> list[IndexExpr]:
        """The index in x of the element at `idx` of the result."""
        end = self.begin + self.own
        inner, rest = idx[self.begin : end], [*idx[: self.begin], *idx[end:]]
        return [
            self.indexed[k].at(inner) if k in self.indexed else rest.pop(0)
            for k in range(self.rank)
        ]


def _advanced(call: Call, x: LazyTensor, indices: Sequence[Any], kind: str) -> _Advanced:
    require(any(index is not None for index in indices), "no index")
    if any(size is ZERO and index is None for size, index in zip_longest(x.shape, indices)):
        kind = ""  # eager takes nothing, and does not look at the indices
    indexed = {
        dim: _positions(call, index, x.shape[dim], dim, kind, wraps=True)
        for dim, index in enumerate(indices)
        if index is not None
    }
    own = max(len(positions.index.shape) for positions in indexed.values())
    return _Advanced(len(x.shape), indexed, own)


@lowers_each({"aten.index": "index", "aten._unsafe_index": ""})
def _index(kind: str, call: Call, x: LazyTensor, indices: Sequence[Any]) -> LazyTensor:
    advanced = _advanced(call, x, indices, kind)
    x = _source(call, x)
    return call.lazy(lambda idx: x.at(advanced.source(idx)))


# ---- writes


def _addable(call: Call, mode: str) -> None:
    require(call.fake.dtype in SUPPORTED, "dtype")
    fixed = mode == "set" and not torch.are_deterministic_algorithms_enabled()
    require(call.fake.device.type == "cpu" or fixed, "writes to equal places in no order on a GPU")
    require(mode == "set" or call.fake.dtype is not torch.bool, "sum of bool")


@lowers_each({"aten.index_put": "index", "aten._unsafe_index_put": ""})
def _index_put(
    kind: str, call: Call, x: LazyTensor, indices: Any, values: Any, add: bool = False, *_: Any
) -> LazyTensor:
    mode = "add" if add else "set"
    _addable(call, mode)
    advanced = _advanced(call, x, indices, kind)
    # The shape that the values broadcast to: x's, the indexed dimensions replaced.
    own = [ONE] * advanced.own
    for positions in advanced.indexed.values():
        shape = positions.index.shape
        for k, extent in enumerate(shape, advanced.own - len(shape)):
            own[k] = extent if own[k] is ONE else own[k]
    rest_dims = [n for k, n in enumerate(x.shape) if k not in advanced.indexed]
    over = (*rest_dims[: advanced.begin], *own, *rest_dims[advanced.begin :])
    dtype = compute_dtype(call.fake.dtype)
    return call.graph.updated(
        call, x, over, advanced.source, lambda i: operand_at(values, i, dtype), mode
    )


@lowers_each({"aten.scatter": "set", "aten.scatter_add": "add"})
def _scatter(
    mode: str, call: Call, x: LazyTensor, dim: int, index: LazyTensor, source: Any, **reduce: Any
) -> LazyTensor:
    """x with source[i] stored or added at i, whose coordinate along `dim` is index[i]."""
    if ZERO in index.shape:  # and the source has any shape
        return call.lazy(x.at)
    require(not reduce and len(x.shape) == len(index.shape) > 0, "scatter with reduce")
    _addable(call, mode)
    dim = normalise_dim(dim, len(x.shape))
    along = _positions(call, index, x.shape[dim], dim, "scatter")
    dtype = compute_dtype(call.fake.dtype)

    def value(idx: Indices) -> Expr:
        whole = isinstance(source, LazyTensor) and len(source.shape) == len(idx)
        return source.at(idx) if whole else operand_at(source, idx, dtype)

    def chosen(idx: Indices) -> Expr:
        """With one index along `dim` (a one-hot) each element knows whether it is the one."""
        at, old = replaced(idx, dim, ZERO), cast(x.at(idx), dtype)
        new = cast(value(at), dtype)
        kind = torch.int32 if x.shape[dim].is_const else torch.int64
        hit = apply("eq", index_value(idx[dim], kind), index_value(along.at(at), kind))
        return where(hit, new if mode == "set" else old + new, old)

    if [*index.shape] == replaced(x.shape, dim, ONE):
        return call.lazy(chosen)
    return call.graph.updated(
        call, x, index.shape, lambda i: replaced(i, dim, along.at(i)), value, mode
    )


@lowers_each({"aten.index_add": "scatter", "aten.index_copy": "copy", "aten.index_fill": "index"})
def _index_rows(
    kind: str, call: Call, x: LazyTensor, dim: int, index: LazyTensor, source: Any, alpha: Any = 1
) -> LazyTensor:
    """The slices of source along `dim`, or a number, go to the slices that index names."""
    fills = kind == "index"
    shape = x.shape if fills else source.shape
    require(len(x.shape) == len(shape) > 0 and len(index.shape) == 1, "scalars")
    mode = "add" if kind == "scatter" else "set"
    _addable(call, mode)
    dim = normalise_dim(dim, len(x.shape))
    rows = _positions(call, index, x.shape[dim], dim, kind, wraps=fills)
    dtype = compute_dtype(call.fake.dtype)

    def value(idx: Indices) -> Expr:
        return operand_at(source, idx, dtype) * operand_at(alpha, idx, dtype)

    over = (*shape[:dim], *(index.shape if fills else shape[dim : dim + 1]), *shape[dim + 1 :])
    return call.graph.updated(
        call, x, over, lambda i: replaced(i, dim, rows.at([i[dim]])), value, mode
    )
