"""Tensors during lowering: lazily computed functions of an index, or buffers.

A `LazyTensor` is evaluated by asking for its element at an index (`at`).  Pointwise operators and
views only wrap such functions, so whole chains collapse into one expression; `Lowering.realise`
(graph.py) turns one into a buffer when somebody needs memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from weft_codegen.loops.expr import Expr, cast, compute_dtype, load
from weft_codegen.loops.index import ONE, ZERO, Axis, IndexExpr, as_axis, axis, least
from weft_codegen.loops.program import CPU, Buffer

ROUNDS: ContextVar[bool] = ContextVar("rounds", default=False)
"""Whether what `at` computes in 16 bits is rounded at each operator, though nothing is stored."""
Indices = Sequence[IndexExpr]
Element = Callable[[Indices], Expr]


@dataclass(eq=False)
class LazyTensor:
    """A tensor whose element at an index is an expression of `compute_dtype(dtype)`.

    `strides` are those eager gives it.  `root` and `offset` say that it is a view: it lies
    `offset` elements into the memory of `root` if that is ever a buffer with eager's strides.
    `buffer` is set once the tensor lives in memory, where it is rounded as eager's if it
    `is_compared`.
    """

    shape: tuple[IndexExpr, ...]
    dtype: torch.dtype
    strides: tuple[IndexExpr, ...]
    element: Element | None = None
    root: LazyTensor | None = None
    offset: IndexExpr = ZERO
    buffer: Buffer | None = None
    uses: int = 1
    origins: tuple[str, ...] = ()
    device: torch.device = CPU
    is_compared: bool = False
    _seen: dict[tuple[Any, ...], Expr] = field(default_factory=dict)

    @property
    def in_memory(self) -> bool:
        """Whether reading it is a load."""
        return self.buffer is not None or (self.root is not None and self.root.buffer is not None)

    def at(self, where: Indices) -> Expr:
        """The element at `where`, one index a dimension."""
        if self.buffer is not None:
            return self._load(self.buffer, self.buffer.strides, ZERO, where)
        root = self.root
        if root is not None and root.buffer is not None and root.buffer.strides == root.strides:
            return self._load(root.buffer, self.strides, self.offset, where)
        rounds = ROUNDS.get()
        key = (rounds, *where)
        found = self._seen.get(key)
        if found is None:
            assert self.element is not None
            found = self.element(tuple(where))
            if rounds:
                found = cast(cast(found, self.dtype), found.dtype)
            self._seen[key] = found
        return found

    def rounded_at(self, where: Indices) -> Expr:
        """The element as eager has it, for what compares elements: each operator's result is of its
        dtype, where `at` rounds to 16 bits only what is stored. A forward and a backward that
        makes a value again then agree."""
        token = ROUNDS.set(True)
        try:
            return self.at(where)
        finally:
            ROUNDS.reset(token)

    def _load(self, buffer: Buffer, strides: Indices, offset: IndexExpr, where: Indices) -> Expr:
        position = offset + offset_of(where, strides)
        return cast(load(buffer.name, position, buffer.dtype), compute_dtype(self.dtype))


def index_space(shape: Indices, letter: str = "d") -> tuple[list[IndexExpr], tuple[Axis, ...]]:
    """An index over `shape` and its axes: one a dimension, none where there is one element."""
    where = [axis(f"{letter}{k}", extent) for k, extent in enumerate(shape)]
    return where, tuple(as_axis(at) for at in where if at is not ZERO)


def offset_of(where: Indices, strides: Indices) -> IndexExpr:
    """How many elements into its memory the one at `where` lies."""
    return sum((at * step for at, step in zip(where, strides, strict=True)), start=ZERO)


def broadcast_at(tensor: LazyTensor, where: Indices) -> Expr:
    """The element of `tensor` that broadcasting pairs with `where` of a larger shape."""
    return tensor.at(broadcast_index(tensor.shape, where))


def broadcast_index(shape: Indices, where: Indices) -> list[IndexExpr]:
    """The index in `shape` that broadcasting pairs with `where` of a larger shape."""
    inner = where[len(where) - len(shape) :]
    return [ZERO if size is ONE else at for size, at in zip(shape, inner, strict=True)]


def replaced(where: Indices, dim: int, at: IndexExpr) -> list[IndexExpr]:
    """`where` with `at` as its index along `dim`."""
    return [*where[:dim], at, *where[dim + 1 :]]


def contiguous_strides(shape: Indices) -> tuple[IndexExpr, ...]:
    """Row-major strides for `shape`."""
    strides: list[IndexExpr] = []
    step = ONE
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent
    return tuple(reversed(strides))


def is_dense(shape: Indices, strides: Indices) -> bool:
    """Whether the strides fill memory without gaps or overlaps, in some order of dimensions."""
    dims = [(st, n) for st, n in zip(strides, shape, strict=True) if n is not ONE]
    steps = [ONE]
    while dims:
        found = (k for k, (stride, _) in enumerate(dims) if any(stride is s for s in steps))
        position = next(found, None)
        if position is None:
            return False
        stride, n = dims.pop(position)
        # torch counts an extent that may be nothing as at least one.
        steps = [stride * n, stride * (n + ONE - least(ONE, n))]
    return True


def flatten(where: Indices, shape: Indices) -> IndexExpr:
    """Row-major position of `where` in `shape`."""
    position = ZERO
    for at, extent in zip(where, shape, strict=True):
        position = position * extent + at
    return position


def unflatten(position: IndexExpr, shape: Indices) -> list[IndexExpr]:
    """The index of row-major `position` in `shape`."""
    where: list[IndexExpr] = []
    for extent in reversed(shape[1:]):
        where.append(ZERO if extent is ONE else position % extent)
        position = position // extent
    if shape:
        where.append(ZERO if shape[0] is ONE else position)
    return where[::-1]
