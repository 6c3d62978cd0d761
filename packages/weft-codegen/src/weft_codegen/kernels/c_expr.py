"""Writes scalar and index expressions as C.

A costly value gets a name besides those that a body uses twice: a call inside `?:` would keep the
loop from being vectorised, and the name makes it unconditional. So does a load there, of which the
compiler cannot know that it may be made for every element.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft_codegen.config import settings
from weft_codegen.kernels.c_types import C_TYPES, convert, literal, wrap
from weft_codegen.kernels.exprs import ExprWriter, division, rounds
from weft_codegen.loops import index as ix
from weft_codegen.loops.expr import Apply, Cast, Const, Expr, Index, Load, Local, Read, walk
from weft_codegen.loops.ops import OPS

COSTLY = 4

_STYLE: ix.Style = {
    ix.Quotient: division("/", "weft_floordiv({}, {})"),
    ix.Remainder: division("%", "weft_mod({}, {})"),
    ix.Least: lambda _, left, right: f"weft_min({left}, {right})",
}


def index_c(where: ix.IndexExpr, leaf: Callable[[ix.Atom], str] = lambda atom: atom.key) -> str:
    """C for an index expression; `leaf` writes axes, sizes and computed integers."""
    return ix.render(where, leaf, _STYLE)


class CExprWriter(ExprWriter):
    """C text of the expressions in nested bodies.

    Locals that are `wide` hold doubles; those that are `renamed` have other names for a while, and
    an element of those in `registers` is a variable.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide: frozenset[Local] = frozenset()
        self.renamed: dict[Local, str] = {}
        self.registers: dict[Local, str] = {}

    def _always_named(self, node: Expr, chosen: bool) -> bool:
        if isinstance(node, Load):
            return chosen and node.mask is None and not any(node.children)
        return isinstance(node, Apply) and OPS[node.name].cost >= COSTLY

    def _declaration(self, node: Expr, name: str, text: str) -> str:
        return f"const {C_TYPES[node.dtype].value} {name} = {text};"

    def leaf(self, atom: ix.Atom) -> str:
        """An axis, a size or a computed integer, which gcc must not take for a truth value."""
        text = super().leaf(atom)
        chosen = isinstance(atom, ix.ComputedIndex) and any(map(_two_valued, walk(atom.expr)))
        return f"weft_place({text})" if chosen else text

    def _integer(self, text: str) -> str:
        return f"(int64_t){text}"

    def at(self, where: ix.IndexExpr) -> str:
        """`where` as C."""
        return index_c(where, self.leaf)

    def element(self, buffer: str, where: str) -> str:
        """An element of a parameter."""
        return f"WEFT_AT({buffer}, {where})" if settings.check_bounds else f"{buffer}[{where}]"

    def block(self, buffer: str, where: str, count: str | int) -> str:
        """A pointer to `count` elements of a parameter."""
        if settings.check_bounds:
            return f"WEFT_BLOCK({buffer}, {where}, {count})"
        return f"{buffer} + {where}"

    def local(self, local: Local, where: ix.IndexExpr) -> str:
        """An element of a local."""
        if local.is_scalar or local in self.registers:
            return self.registers.get(local, local.name)
        return f"{self.renamed.get(local, local.name)}[{self.at(where)}]"

    def _const(self, node: Const) -> str:
        return literal(node.value, node.dtype)

    def _index(self, node: Index) -> str:
        return f"(({C_TYPES[node.dtype].value})({self.at(node.index)}))"

    def _load(self, node: Load) -> str:
        text = self.element(node.buffer, self.at(node.index))
        if node.mask is not None:
            text = f"({self.text(node.mask)} ? {text} : 0)"
        kind = C_TYPES[node.dtype]
        return text if kind.value == kind.memory else f"({kind.value}){text}"

    def _read(self, node: Read) -> str:
        text = self.local(node.local, node.index)
        return f"(float){text}" if node.local in self.wide else text

    def _apply(self, node: Apply) -> str:
        args = [self.text(arg) for arg in node.args]
        if node.name == "where":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        text = OPS[node.name].c.format(*args, t=C_TYPES[node.args[0].dtype].suffix)
        return wrap(text, node.dtype)

    def _cast(self, node: Cast) -> str:
        inner = node.arg
        if node.dtype is torch.float32 and isinstance(inner, Cast) and rounds(inner):
            return f"rounded_{C_TYPES[inner.dtype].suffix}({self.text(inner.arg)})"
        return convert(self.text(inner), inner.dtype, node.dtype)


def _two_valued(node: Expr) -> bool:
    """Whether C can see an integer as one of two, which a truth value chooses."""
    if isinstance(node, Apply) and node.name == "where":
        return not any(isinstance(inner, Load) for inner in walk(*node.args[1:]))
    return isinstance(node, Read) or (isinstance(node, Cast) and node.arg.dtype is torch.bool)
