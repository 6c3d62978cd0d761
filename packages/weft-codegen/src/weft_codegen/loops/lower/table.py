"""The lowering table: operator name -> function, filled by the modules that rows.py imports.

A lowering takes a `Call` (what the graph says about the node) and the node's arguments, tensors as
LazyTensor, and returns a LazyTensor or a tuple of them.  It raises NoLowering for a case it does
not cover; the graph then calls the operator through the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from weft_codegen.loops.expr import Expr
from weft_codegen.loops.index import ZERO, Axis, IndexExpr
from weft_codegen.loops.lower.lazy_tensor import Element, Indices, LazyTensor
from weft_codegen.loops.lower.shapes import NoLowering, to_shape

Lowering = Callable[..., Any]
LOWERINGS: dict[str, Lowering] = {}
Shape = tuple[IndexExpr, ...]
IndexMap = Callable[[Indices], Sequence[IndexExpr]]


class LoweringContext(Protocol):
    """What a lowering may ask of the graph's: memory, reductions, scans, checks, random numbers."""

    fallback_random: bool
    seed: LazyTensor | None
    draws: int

    def realise(self, tensor: LazyTensor) -> None:
        """Compute `tensor` into a buffer of its own."""

    def extern(self, call: Call, target: Any, args: Any, kwargs: Any) -> Any:
        """The results of a call through the dispatcher, shaped like the fake ones of `call`."""

    def reduction(
        self,
        call: Call,
        op: str,
        axes: tuple[Axis, ...],
        reduced: tuple[Axis, ...],
        values: tuple[Expr, ...],
        dtype: torch.dtype,
    ) -> LazyTensor:
        """A buffer of the extents of `axes` that holds the reduction of `values`."""

    def scanned(
        self, call: Call, op: str, dim: int, value: Element, inner: torch.dtype
    ) -> LazyTensor:
        """A buffer like the node's result, holding at each index what `op` makes of all values up
        to there along `dim`; it accumulates in `inner`, the dtype of the values."""

    def updated(
        self, call: Call, base: LazyTensor, over: Shape, target: IndexMap, value: Element, mode: str
    ) -> LazyTensor:
        """A copy of `base` in which value(i) is stored at (or with mode "add", added to) target(i),
        for every index i of the shape `over`."""

    def check_index(
        self, call: Call, index: LazyTensor, extent: IndexExpr, *, dim: int, wraps: bool, kind: str
    ) -> None:
        """Raise eager's exception at run time if an element is outside [0, extent) ([-extent,
        extent) if it `wraps`): a reduction finds it, a call raises."""


@dataclass(frozen=True)
class Call:
    """One fx node being lowered: the fake result, how often it is used, where it came from."""

    graph: LoweringContext
    fake: Any
    uses: int
    origins: tuple[str, ...]
    node: Any = None

    @property
    def results(self) -> tuple[Call, ...]:
        """A call for each tensor of a node that returns several."""
        return tuple(replace(self, fake=fake) for fake in self.fake)

    def lazy(self, element: Element) -> LazyTensor:
        """A new tensor shaped like the node's result, computed by `element`."""
        return LazyTensor(
            to_shape(self.fake.shape),
            self.fake.dtype,
            to_shape(self.fake.stride()),
            element,
            uses=self.uses,
            origins=self.origins,
            device=self.fake.device,
        )

    def view(self, base: LazyTensor, element: Element, offset: IndexExpr = ZERO) -> LazyTensor:
        """A view of `base` shaped like the node's result.

        `offset` is how many elements its first one lies after base's.
        """
        view = self.lazy(element)
        view.origins = base.origins
        view.root = base.root or base
        view.offset = base.offset + offset
        return view


Row = TypeVar("Row", bound=Lowering)


def lowers(*names: str) -> Callable[[Row], Row]:
    """Register a lowering for these operators (`aten.add`: every functional overload)."""

    def register(function: Row) -> Row:
        for name in names:
            LOWERINGS[name] = function
        return function

    return register


def normalise_dim(dim: int, rank: int) -> int:
    """`dim` counted from the front."""
    return dim % rank if rank else 0


def require(condition: bool, reason: str) -> None:
    """Raise NoLowering(reason) unless `condition`."""
    if not condition:
        raise NoLowering(reason)
