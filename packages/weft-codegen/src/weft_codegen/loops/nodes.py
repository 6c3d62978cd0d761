"""What lowering hands to the scheduler: loop nodes, each filling one buffer.

    Lowered = (sizes, inputs, constants, buffers, items, outputs, mutations)    see program.py
    item    = Compute | Extern | Alias                                          in a valid order

A Compute is one perfect loop nest that no decision has been made about: for every point of `axes`,
combine `values` over `reduced` (when there is an `op`) and store at `index` of `result`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft_codegen.loops.expr import Expr, Load, computed_parts, walk
from weft_codegen.loops.index import Axis, IndexExpr
from weft_codegen.loops.program import Alias, Buffer, Extern, Input, Output


@dataclass(frozen=True)
class Compute:
    """result[index] = op over `reduced` of values, for every point of `axes`.

    Without `op`, `reduced` is empty and there is one value.  argmax and argmin have two values
    (the compared one, the position) and store the position.  With `update` ("set" or "add", no
    `op`) the buffer was filled before and some of its elements, at computed places perhaps, are
    stored or added to, in the order of `axes` where they meet.  With `scan` (an op of one state;
    no `op`) the element stored is that of all values up to here along the axes `along`.
    """

    result: str
    axes: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    op: str | None
    values: tuple[Expr, ...]
    index: IndexExpr
    origins: tuple[str, ...] = ()
    update: str | None = None
    scan: str | None = None
    along: tuple[Axis, ...] = ()

    @property
    def loads(self) -> tuple[Load, ...]:
        """Every distinct load of the node."""
        exprs = (*self.values, *computed_parts(self.index))
        return tuple(node for node in walk(*exprs) if isinstance(node, Load))


Item = Compute | Extern | Alias


@dataclass(frozen=True)
class Lowered:
    """A graph as loop nodes and extern calls, every buffer named."""

    sizes: tuple[str, ...]
    inputs: tuple[Input, ...]
    constants: dict[str, torch.Tensor]
    buffers: dict[str, Buffer]
    items: tuple[Item, ...]
    outputs: tuple[Output, ...]
    mutations: tuple[str, ...]
