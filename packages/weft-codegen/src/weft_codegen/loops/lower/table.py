"""The lowering table: operator name -> function, filled by the sibling modules.

A lowering takes a `Call` (what the graph says about the node) and the node's arguments, tensors as
LazyTensor, and returns a LazyTensor or a tuple of them.  It raises NoLowering for a case it does
not cover; the graph then calls the operator through the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from weft_codegen.loops.index import ZERO, IndexExpr
from weft_codegen.loops.lower.shapes import NoLowering, to_shape
from weft_codegen.loops.lower.values import Element, Indices, LazyTensor

if TYPE_CHECKING:
    from weft_codegen.loops.lower.graph import Walk

Lowering = Callable[..., Any]
LOWERINGS: dict[str, Lowering] = {}
Shape = tuple[IndexExpr, ...]
Place = Callable[[Indices], Sequence[IndexExpr]]


@dataclass(frozen=True)
class Call:
    """One fx node being lowered: the fake result, how often it is used, where it came from.

    `graph` is what a lowering may ask for memory, reductions, scans and checks.
    """

    graph: Walk
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
