"""Text of values and indices in a Triton kernel."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from weft_core.errors import WeftError

from weft_codegen.kernels.exprs import ExprWriter, division
from weft_codegen.loops import index as ix
from weft_codegen.loops.expr import Apply, Cast, Const, Expr, Index, Load, Local, Read
from weft_codegen.loops.ops import OPS
from weft_codegen.loops.program import locals_read

_DIVISIONS = {
    ix.Quotient: division("//", "floordiv(tl.cast({}, tl.int64), tl.cast({}, tl.int64))"),
    ix.Remainder: division("%", "remainder(tl.cast({}, tl.int64), tl.cast({}, tl.int64))"),
    ix.Least: lambda atom, a, b: f"tl.minimum({a}, {b})",
}


# Bytes that the address of every buffer is a multiple of, where wide loads are compiled.
ALIGNED = 16


class NoTritonForm(WeftError):
    """The nest has no Triton form here; the message says which statement and why."""


@dataclass(frozen=True)
class Dimension:
    """A dimension of a block: the axes that run along it, and which of its places exist."""

    size: int
    axes: frozenset[ix.Axis] = frozenset()
    mask: str | None = None


@dataclass(frozen=True)
class Lanes:
    """The block that the current statements are spread over: lanes, or rows times lanes."""

    dimensions: tuple[Dimension, ...]

    @property
    def axes(self) -> frozenset[ix.Axis]:
        """Every axis that runs along it."""
        return frozenset[ix.Axis]().union(*(dimension.axes for dimension in self.dimensions))

    def shape(self, axes: Set[Any] | None = None) -> str:
        """Its shape, or the one of what varies along `axes` alone."""
        sizes = (d.size if axes is None or d.axes & axes else 1 for d in self.dimensions)
        return f"[{', '.join(map(str, sizes))}]"

    def masks(self, axes: Set[Any] | None = None) -> list[str]:
        """The masks of it, or of what varies along `axes` alone."""
        return [d.mask for d in self.dimensions if d.mask and (axes is None or d.axes & axes)]

    @property
    def mask(self) -> str | None:
        """Its mask as one text."""
        return " & ".join(self.masks()) or None


class ValueWriter(ExprWriter):
    """Writes the lines of one function; `lanes` is set while statements run on a block."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.depth = 1
        self.lanes: Lanes | None = None

    def line(self, text: str) -> None:
        """Add a line at the present depth."""
        self.lines.append("    " * self.depth + text)

    def check_row_index(self, local: Local, where: ix.IndexExpr) -> None:
        """Refuse a row that is not indexed by the lane it lives in."""
        if local.is_scalar:
            return
        if self.lanes is None:
            raise NoTritonForm(f"row {local.name} is used outside its lanes")
        axes = [atom for atom in ix.atoms(where) if isinstance(atom, ix.Axis)]
        one_to_one = len(axes) == 1 and where.terms == (((axes[0],), 1),)
        if not one_to_one or axes[0] not in self.lanes.axes:
            raise NoTritonForm(f"row {local.name} is indexed by {where}, not by its lane")

    def at(self, where: ix.IndexExpr) -> str:
        """Text of an index expression, in 64 bits unless 32 surely hold it and its parts."""
        if not where.terms:
            return "0"
        alone = isinstance(ix.single(where), (ix.Axis, ix.Size))
        leaf = self.leaf if alone or _fits_32_bits(where) else self._wide
        return f"({ix.render(where, leaf, _DIVISIONS)})"

    def _wide(self, atom: ix.Atom) -> str:
        return self.leaf(atom) if isinstance(atom, ix.ComputedIndex) else self._integer(atom.key)

    def _always_named(self, node: Expr, chosen: bool) -> bool:
        return isinstance(node, Load)

    def _declaration(self, node: Expr, name: str, text: str) -> str:
        return f"{name} = {text}"

    def _integer(self, text: str) -> str:
        return f"tl.cast({text}, tl.int64)"

    def _const(self, node: Const) -> str:
        return f"tl.full((), {literal(node.value)}, {type_name(node.dtype)})"

    def _index(self, node: Index) -> str:
        return f"tl.cast({self.at(node.index)}, {type_name(node.dtype)})"

    def _load(self, node: Load) -> str:
        # Where it is the same along a dimension, one place is read: a scalar takes no block mask.
        axes = None if node.mask is not None else self._varies(node)
        masks = self.lanes.masks(axes) if self.lanes else []
        masks += [self._mask(node.mask)] if node.mask is not None else []
        tail = f", mask={' & '.join(masks)}, other=0" if masks else ""
        place = self.places(node.index, axes) if tail else self.at(node.index)
        return f"tl.load({node.buffer} + {place}{tail})"

    def _varies(self, node: Load) -> Set[Any] | None:
        """The axes that decide where `node` loads; None: any, as a local may of a row."""
        rows = self.lanes is not None and len(self.lanes.dimensions) > 1
        return None if rows and locals_read(node) else node.axes

    def _mask(self, node: Expr) -> str:
        if self.lanes is None:
            return f"({self.text(node)})"
        # Through an integer: Triton's interpreter makes no mask of a bool that was spread.
        text = f"tl.cast({self.text(node)}, tl.int32)"
        if not all(dimension.axes & node.axes for dimension in self.lanes.dimensions):
            text = f"tl.broadcast_to({text}, {self.lanes.shape()})"
        return f"({text} != 0)"

    def places(self, where: ix.IndexExpr, axes: Set[Any] | None = None) -> str:
        """Text of an index expression with a value for each lane, or for each along `axes`."""
        if self.lanes is None:
            return self.at(where)
        shape = self.lanes.shape(axes)
        if where.is_const:
            return f"tl.full({shape}, {where.value}, tl.int64)"
        text = self.at(where)
        if self.lanes.axes.isdisjoint(ix.atoms(where)):
            text = self._integer(text)  # a counter of a loop is an int in Triton's interpreter
        return f"tl.broadcast_to({text}, {shape})"

    def _read(self, node: Read) -> str:
        self.check_row_index(node.local, node.index)
        return node.local.name

    def _apply(self, node: Apply) -> str:
        return OPS[node.name].triton.format(*(self.text(arg) for arg in node.args))

    def _cast(self, node: Cast) -> str:
        if node.dtype is torch.bool:
            return f"({self.text(node.arg)} != 0)"
        text = self.text(node.arg)
        if node.dtype is torch.uint8 and node.arg.dtype.is_floating_point:
            text = f"tl.cast({text}, tl.int64)"  # as eager: -1.0 becomes 255
        return f"tl.cast({text}, {type_name(node.dtype)})"


def _fits_32_bits(where: ix.IndexExpr) -> bool:
    parts_of = [where, *(part for atom in ix.atoms(where) for part in ix.operands(atom))]
    ends = [ix.upper(end) for part in parts_of for end in (part, -part)]
    return all(end is not None and end.is_const and end.value < 2**31 for end in ends)


def type_name(dtype: torch.dtype) -> str:
    """Triton's name of a dtype."""
    return "tl.int1" if dtype is torch.bool else f"tl.{dtype}".replace("torch.", "")


def literal(value: float) -> str:
    """A Python literal; infinities and nan in the form Triton knows."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(int(value) if isinstance(value, bool) else value)
