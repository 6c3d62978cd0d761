"""Rewriting of expressions."""

from __future__ import annotations

from collections.abc import Callable

from weft_codegen.loops import expr
from weft_codegen.loops.evaluate import substitute
from weft_codegen.loops.index import Atom, Axis, ComputedIndex, IndexExpr, computed


class Rewriter:
    """Rebuilds expressions bottom-up, once per node.

    at(index) gives the new index expression; leaf(node) may replace a node before its children
    are looked at, None leaves it to the default.  A subclass may give buffers, locals and the axes
    of loops (`split.rewritten`) other names.
    """

    def __init__(
        self,
        leaf: Callable[[expr.Expr], expr.Expr | None] = lambda node: None,
        at: Callable[[IndexExpr], IndexExpr] | None = None,
    ) -> None:
        self._leaf = leaf
        self._at = at or (lambda where: where)
        self._done: dict[expr.Expr, expr.Expr] = {}

    def buffer(self, name: str) -> str:
        """The new name of a buffer."""
        return name

    def local(self, local: expr.Local) -> expr.Local:
        """What takes the place of a local."""
        return local

    def axis(self, loop: Axis) -> Axis:
        """What takes the place of a loop's axis."""
        return loop

    def __call__(self, node: expr.Expr) -> expr.Expr:
        """`node` rebuilt."""
        found = self._done.get(node)
        if found is None:
            found = self._leaf(node)
            if found is None:
                found = self._rebuild(node)
            self._done[node] = found
        return found

    def _rebuild(self, node: expr.Expr) -> expr.Expr:
        if isinstance(node, expr.Apply):
            args = tuple(self(arg) for arg in node.args)
            same = all(a is b for a, b in zip(args, node.args, strict=True))
            return node if same else expr.apply(node.name, *args)
        if isinstance(node, expr.Cast):
            return expr.cast(self(node.arg), node.dtype)
        if isinstance(node, expr.Load):
            mask = None if node.mask is None else self(node.mask)
            where = self.index(node.index)
            return expr.load(self.buffer(node.buffer), where, node.dtype, mask)
        if isinstance(node, expr.Index):
            return expr.index_value(self.index(node.index), node.dtype)
        if isinstance(node, expr.Read):
            return expr.read(self.local(node.local), self.index(node.index))
        return node

    def index(self, where: IndexExpr) -> IndexExpr:
        """`where` rebuilt, the computed integers in it included."""
        where = self._at(where)

        def leaf(atom: Atom) -> IndexExpr | None:
            return (
                computed(self(atom.expr), atom.extent) if isinstance(atom, ComputedIndex) else None
            )

        return substitute(where, leaf) if expr.computed_operands(where) else where
