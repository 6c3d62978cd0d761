"""Writes scalar and index expressions as C.

A value that a body uses more than once, or that is costly, becomes a named constant before the
statement that needs it.  That keeps the text short, and it makes costly calls unconditional:
a call inside `?:` would keep the loop from being vectorised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from weft_codegen.kernels.c_types import C_TYPES, HALVES, convert, literal, wrap
from weft_codegen.loops.expr import Cast, Const, Expr, Index, Load, Local, Op, Read, walk
from weft_codegen.loops.index import (
    Atom,
    IndexExpr,
    Least,
    Quotient,
    Remainder,
    Value,
    nonnegative,
)
from weft_codegen.loops.ops import OPS
from weft_codegen.loops.render import render

COSTLY = 4


def _operand(text: str) -> str:
    return text if text.replace("_", "").isalnum() else f"({text})"


def _divide(sign: str, exact: str) -> Callable[[Atom, str, str], str]:
    """C's / and % round towards zero, which is floor only where nothing is negative."""

    def write(atom: Atom, left: str, right: str) -> str:
        assert isinstance(atom, Quotient | Remainder)
        if nonnegative(atom.num):
            return f"({_operand(left)} {sign} {_operand(right)})"
        return f"{exact}({left}, {right})"

    return write


_STYLE: dict[type[Atom], Callable[[Atom, str, str], str]] = {
    Quotient: _divide("/", "weft_floordiv"),
    Remainder: _divide("%", "weft_mod"),
    Least: lambda _, left, right: f"weft_min({left}, {right})",
}


def index_c(where: IndexExpr, leaf: Callable[[Atom], str] = lambda atom: atom.key) -> str:
    """C for an index expression; `leaf` writes axes, sizes and computed integers."""
    return render(where, leaf, _STYLE)


def _rounds(node: Expr) -> bool:
    """Whether `node` makes 16 bits of a float."""
    return isinstance(node, Cast) and node.dtype in HALVES and node.arg.dtype is torch.float32


def is_scalar(local: Local) -> bool:
    """Whether a local is a single value, written without an index."""
    return local.extent.is_const and local.extent.value == 1


def locals_read(node: Expr) -> frozenset[str]:
    """The names of the locals that `node` reads."""
    return frozenset(item.local.name for item in walk(node) if isinstance(item, Read))


class ExprWriter:
    """C text of the expressions in nested bodies.

    `define` yields the constants an expression needs; `text` then writes it.  A name made in an
    outer body serves inner bodies too, until a local it was computed from changes.
    """

    def __init__(self) -> None:
        self._names: dict[Expr, str] = {}
        self._uses: dict[Expr, int] = {}
        self._count = 0

    def enter(self, exprs: Iterable[Expr]) -> tuple[dict[Expr, str], dict[Expr, int]]:
        """Begin a body that evaluates `exprs`; give the result to `leave`."""
        saved = (dict(self._names), self._uses)
        self._uses = {}
        for root in (roots := tuple(exprs)):
            self._uses[root] = self._uses.get(root, 0) + 1
        for node in reversed(list(walk(*roots))):
            # A value that is rounded to 16 bits gets the name, for all who use either.
            times = self._uses[node] if _rounds(node) else 1
            for child in node.children:
                self._uses[child] = self._uses.get(child, 0) + times
        return saved

    def leave(self, saved: tuple[dict[Expr, str], dict[Expr, int]]) -> None:
        """End a body: its names go out of scope."""
        names, self._uses = saved
        self._names = {node: name for node, name in names.items() if node in self._names}

    def forget(self, changed: Iterable[str]) -> None:
        """Drop names computed from locals that are about to change."""
        gone = frozenset(changed)
        if gone:
            self._names = {
                node: name for node, name in self._names.items() if not locals_read(node) & gone
            }

    def name(self, node: Expr, text: str) -> None:
        """Write `node` as `text` until the body ends."""
        self._names[node] = text

    def define(self, root: Expr) -> Iterator[str]:
        """Declarations of the values under `root` that deserve a name."""
        for node in walk(root):
            if node not in self._names and self._wants_name(node):
                text = self._write(node)
                self._names[node] = f"v{self._count}"
                self._count += 1
                yield f"const {C_TYPES[node.dtype].value} {self._names[node]} = {text};"

    def _wants_name(self, node: Expr) -> bool:
        if isinstance(node, Const | Read | Index) or _rounds(node):
            return False
        if isinstance(node, Op) and OPS[node.name].cost >= COSTLY:
            return True
        return self._uses.get(node, 0) > 1

    def text(self, node: Expr) -> str:
        """`node` as C."""
        name = self._names.get(node)
        return name if name is not None else self._write(node)

    def index(self, where: IndexExpr) -> str:
        """`where` as C."""
        return index_c(where, self._leaf)

    def local(self, local: Local, where: IndexExpr) -> str:
        """An element of a local as C."""
        return local.name if is_scalar(local) else f"{local.name}[{self.index(where)}]"

    def _leaf(self, atom: Atom) -> str:
        return f"(int64_t){self.text(atom.expr)}" if isinstance(atom, Value) else atom.key

    def _write(self, node: Expr) -> str:
        if isinstance(node, Const):
            return literal(node.value, node.dtype)
        if isinstance(node, Index):
            return f"(({C_TYPES[node.dtype].value})({self.index(node.index)}))"
        if isinstance(node, Load):
            return self._load(node)
        if isinstance(node, Read):
            return self.local(node.local, node.index)
        if isinstance(node, Cast):
            if node.dtype is torch.float32 and isinstance(node.arg, Cast) and _rounds(node.arg):
                kind = C_TYPES[node.arg.dtype].suffix
                return f"rounded_{kind}({self.text(node.arg.arg)})"
            return convert(self.text(node.arg), node.arg.dtype, node.dtype)
        assert isinstance(node, Op)
        args = [self.text(arg) for arg in node.args]
        if node.name == "where":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        text = OPS[node.name].c.format(*args, t=C_TYPES[node.args[0].dtype].suffix)
        return wrap(text, node.dtype)

    def _load(self, node: Load) -> str:
        text = f"{node.buffer}[{self.index(node.index)}]"
        if node.mask is not None:
            text = f"({self.text(node.mask)} ? {text} : 0)"
        kind = C_TYPES[node.dtype]
        return text if kind.value == kind.memory else f"({kind.value}){text}"
