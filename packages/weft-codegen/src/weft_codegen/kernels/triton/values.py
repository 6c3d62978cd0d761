"""Text of values and indices in a Triton kernel, with names for what is used twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from weft_core.errors import WeftError

from weft_codegen.loops.expr import Cast, Const, Expr, Index, Load, Local, Op, Read, walk
from weft_codegen.loops.index import (
    Atom,
    Axis,
    IndexExpr,
    Least,
    Quotient,
    Remainder,
    Value,
    atoms,
    nonnegative,
    upper,
)
from weft_codegen.loops.ops import OPS
from weft_codegen.loops.program import Kernel
from weft_codegen.loops.render import render

TYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}


class NoTritonForm(WeftError):
    """The nest has no Triton form here; the message says which statement and why."""


@dataclass
class Lanes:
    """The block that the current statements are spread over."""

    size: int
    mask: str | None
    axes: frozenset[Axis]


@dataclass
class ValueWriter:
    """Writes the lines of one function; `lanes` is set while statements run on a block."""

    kernel: Kernel
    name: str
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    lanes: Lanes | None = None
    known: dict[Expr, str] = field(default_factory=dict)
    counter: int = 0

    def line(self, text: str) -> None:
        """Add a line at the present depth."""
        self.lines.append("    " * self.depth + text)

    def fresh(self) -> str:
        """A name that is not in use."""
        self.counter += 1
        return f"v{self.counter - 1}"

    def check_row_index(self, local: Local, where: IndexExpr) -> None:
        """Refuse a row that is not indexed by the lane it lives in."""
        if is_scalar(local) or self.lanes is None:
            if not is_scalar(local):
                raise NoTritonForm(f"row {local.name} is used outside its lanes")
            return
        axes = [atom for atom in atoms(where) if isinstance(atom, Axis)]
        one_to_one = len(axes) == 1 and where.terms == (((axes[0],), 1),)
        if not one_to_one or axes[0] not in self.lanes.axes:
            raise NoTritonForm(f"row {local.name} is indexed by {where}, not by its lane")

    def forget(self, local: Local) -> None:
        """Values computed from a local that has changed are no longer known."""
        self.known = {
            node: name
            for node, name in self.known.items()
            if not any(isinstance(n, Read) and n.local is local for n in walk(node))
        }

    # Values.

    def value(self, root: Expr) -> str:
        """Text of an expression; nodes used twice get a name, in this scope."""
        uses: dict[Expr, int] = {}
        for node in walk(root):
            for child in node.children:
                uses[child] = uses.get(child, 0) + 1
        for node in walk(root):
            named = uses.get(node, 0) > 1 or isinstance(node, Load)
            if named and node not in self.known and not isinstance(node, Const | Index | Read):
                text = self.node(node)
                self.known[node] = self.fresh()
                self.line(f"{self.known[node]} = {text}")
        return self.node(root)

    def node(self, node: Expr) -> str:
        """Text of one node, operands in place unless they are named."""
        if node in self.known:
            return self.known[node]
        return _WRITERS[type(node)](self, node)

    def _const(self, node: Const) -> str:
        return f"tl.full((), {literal(node.value)}, {TYPES[node.dtype]})"

    def _index(self, node: Index) -> str:
        return f"tl.cast({self.index(node.index)}, {TYPES[node.dtype]})"

    def _load(self, node: Load) -> str:
        masks = [self.lanes.mask] if self.lanes and self.lanes.mask else []
        masks += [f"({self.node(node.mask)})"] if node.mask is not None else []
        # A scalar address takes no block mask: every lane would read the same valid element.
        on_lanes = node.mask is not None or bool(self.lanes and node.axes & self.lanes.axes)
        tail = f", mask={' & '.join(masks)}, other=0" if masks and on_lanes else ""
        address = f"{node.buffer} + {self.address(node.index)}"
        if tail and self.lanes:
            address = f"{node.buffer} + tl.broadcast_to({self.address(node.index)}, "
            address += f"[{self.lanes.size}])"
        return f"tl.load({address}{tail})"

    def _read(self, node: Read) -> str:
        self.check_row_index(node.local, node.index)
        return node.local.name

    def _op(self, node: Op) -> str:
        return OPS[node.name].triton.format(*(self.node(arg) for arg in node.args))

    def _cast(self, node: Cast) -> str:
        if node.dtype is torch.bool:
            return f"({self.node(node.arg)} != 0)"
        return f"tl.cast({self.node(node.arg)}, {TYPES[node.dtype]})"

    # Indices.

    def index(self, where: IndexExpr) -> str:
        """Text of an index expression."""
        return f"({render(where, self._leaf, _DIVISIONS)})" if where.terms else "0"

    def address(self, where: IndexExpr) -> str:
        """Text of an element offset, in 64 bits unless it surely fits 32."""
        top = upper(where)
        small = top is not None and top.is_const and top.value < 2**31
        return self.index(where) if small else f"tl.cast({self.index(where)}, tl.int64)"

    def _leaf(self, atom: Atom) -> str:
        if isinstance(atom, Value):
            return f"tl.cast({self.node(atom.expr)}, tl.int64)"
        return atom.key


_WRITERS: dict[type[Expr], Callable[[ValueWriter, Any], str]] = {
    Const: ValueWriter._const,
    Index: ValueWriter._index,
    Load: ValueWriter._load,
    Read: ValueWriter._read,
    Op: ValueWriter._op,
    Cast: ValueWriter._cast,
}


def _division(atom: Atom, left: str, right: str, exact: str, sign: str) -> str:
    """Triton's integer / and % truncate: equal to floor for non-negative numerators only."""
    assert isinstance(atom, Quotient | Remainder)
    if nonnegative(atom.num):
        return f"(({left}) {sign} ({right}))"
    return f"{exact}(tl.cast({left}, tl.int64), tl.cast({right}, tl.int64))"


_DIVISIONS = {
    Quotient: lambda atom, a, b: _division(atom, a, b, "floordiv", "//"),
    Remainder: lambda atom, a, b: _division(atom, a, b, "remainder", "%"),
    Least: lambda atom, a, b: f"tl.minimum({a}, {b})",
}


def is_scalar(local: Local) -> bool:
    """Whether a local is one variable, not a row."""
    return local.extent.is_const and local.extent.value == 1


def literal(value: float) -> str:
    """A Python literal; infinities and nan in the form Triton knows."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(int(value) if isinstance(value, bool) else value)
