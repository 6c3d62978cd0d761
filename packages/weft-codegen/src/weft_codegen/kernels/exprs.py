"""Names for what nested bodies evaluate more than once, in any target language.

A value that a body uses twice, or that its language wants on a line of its own, becomes a named
constant before the statement that needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weft_codegen.kernels.c_types import HALVES
from weft_codegen.loops.expr import Apply, Cast, Const, Expr, Index, Local, Read, walk
from weft_codegen.loops.index import Atom, ComputedIndex, Pair, nonnegative
from weft_codegen.loops.program import (
    Body,
    Stmt,
    locals_changed,
    locals_read,
    statements,
    stmt_exprs,
)


class ExprWriter:
    """Text of the expressions in nested bodies.

    `define` yields the declarations an expression needs; `text` then writes it.  A name made in an
    outer body serves inner bodies too, until a local it was computed from changes.  A language is
    a subclass with the methods below that are not written, and one for each kind of node: _const,
    _index, _load, _read, _op, _cast.
    """

    def __init__(self) -> None:
        self._names: dict[Expr, str] = {}
        self._uses: Counter[Expr] = Counter()
        self._count = 0

    def _always_named(self, node: Expr, chosen: bool) -> bool:
        """Whether `node` gets a name even when it is used once; `chosen`: in an arm of a select."""
        raise NotImplementedError

    def _declaration(self, node: Expr, name: str, text: str) -> str:
        """The line that gives `text`, the value of `node`, a name."""
        raise NotImplementedError

    def _integer(self, text: str) -> str:
        """A value as an integer for an address."""
        raise NotImplementedError

    @contextmanager
    def scope(self, body: Iterable[Stmt] = ()) -> Iterator[None]:
        """What is named while `body` is written goes out of scope with it."""
        names, uses = dict(self._names), self._uses
        roots = stmt_exprs(*body)
        self._uses = Counter(roots)
        for node in reversed(list(walk(*roots))):
            # A value that is rounded to 16 bits gets the name, for all who use either.
            times = self._uses[node] if rounds(node) else 1
            for child in node.children:
                self._uses[child] += times
        yield
        self._uses = uses
        self._names = {node: name for node, name in names.items() if node in self._names}

    def forget(self, changed: Iterable[Local]) -> None:
        """Drop names computed from locals that are about to change."""
        gone = frozenset(changed)
        if gone:
            self._names = {
                node: name for node, name in self._names.items() if not locals_read(node) & gone
            }

    def name(self, node: Expr, text: str) -> None:
        """Write `node` as `text` until the body ends."""
        self._names[node] = text

    def define(self, *roots: Expr) -> Iterator[str]:
        """Declarations of the values under `roots` that deserve a name."""
        nodes = list(walk(*roots))
        selects = (node for node in nodes if isinstance(node, Apply) and node.name == "where")
        chosen = set(walk(*(arm for node in selects for arm in node.args[1:])))
        for node in nodes:
            if node in self._names or isinstance(node, Const | Read | Index) or rounds(node):
                continue
            if self._uses[node] > 1 or self._always_named(node, node in chosen):
                name, text = f"v{self._count}", self._write(node)
                self._names[node] = name
                self._count += 1
                yield self._declaration(node, name, text)

    def text(self, node: Expr) -> str:
        """`node` in the target language."""
        name = self._names.get(node)
        return name if name is not None else self._write(node)

    def leaf(self, atom: Atom) -> str:
        """An axis, a size or a computed integer in an index expression."""
        return self._integer(self.text(atom.expr)) if isinstance(atom, ComputedIndex) else atom.key

    def _write(self, node: Any) -> str:
        return str(getattr(self, f"_{type(node).__name__.lower()}")(node))


def rounds(node: Expr) -> bool:
    """Whether `node` makes 16 bits of a float."""
    return isinstance(node, Cast) and node.dtype in HALVES and node.arg.dtype is torch.float32


def division(sign: str, exact: str) -> Callable[[Atom, str, str], str]:
    """Writes a quotient or remainder: C's and Triton's integer operators round towards zero, which
    is floor only where nothing is negative; elsewhere the format `exact` calls a function."""

    def write(atom: Atom, left: str, right: str) -> str:
        assert isinstance(atom, Pair)
        if nonnegative(atom.left) and nonnegative(atom.right):
            return f"({_operand(left)} {sign} {_operand(right)})"
        return exact.format(left, right)

    return write


def _operand(text: str) -> str:
    return text if text.replace("_", "").isalnum() else f"({text})"


def locals_of(body: Body) -> frozenset[Local]:
    """The locals that `body` reads or changes."""
    return locals_read(*stmt_exprs(*statements(body))) | locals_changed(body)
