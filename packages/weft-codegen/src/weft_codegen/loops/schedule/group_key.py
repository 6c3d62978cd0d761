"""What makes two groups one kernel: their structure, whatever buffers and axes are called.

Repeated layers give equal groups, of which one is assembled (see schedule/__init__.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from weft_codegen.loops.expr import Apply, Expr, Index, Load, computed_operands, walk
from weft_codegen.loops.index import Atom, Axis, ComputedIndex, IndexExpr, Pair
from weft_codegen.loops.program import Buffers
from weft_codegen.loops.schedule.group import Group


def group_key(
    group: Group, needed: frozenset[str], mutated: frozenset[str], buffers: Buffers
) -> tuple[Any, list[str]]:
    """Return a key, equal for groups of the same structure, and the buffers in the key's order.

    Args:
        needed, mutated, buffers: as for `assemble`; what they say of the group's is in the key.
    """
    writer = _KeyWriter()
    axes = tuple(map(writer.atom, group.axes)), frozenset(map(writer.atom, group.reduced))
    members = tuple(map(writer.member, group.members))
    orders = [member.order for member in group.members]
    ranks = tuple(sorted(range(len(orders)), key=orders.__getitem__))
    names = list(writer.buffers)
    kinds = [(buffers[n].dtype, buffers[n].device, n in needed, n in mutated) for n in names]
    return (axes, ranks, members, tuple(writer.nodes.values()), tuple(kinds)), names


class _KeyWriter:
    """Numbers buffers, axes and expressions in the order in which a group names them."""

    def __init__(self) -> None:
        self.buffers: dict[str, int] = {}
        self.nodes: dict[int, Any] = {}
        self._numbers: dict[Expr, int] = {}
        self._axes: dict[Axis, Any] = {}
        self._indices: dict[IndexExpr, Any] = {}

    def member(self, member: Any) -> Any:
        """A loop node of the group."""
        node = member.node
        values = self._expressions((*node.values, *computed_operands(node.index)))
        loops = [tuple(map(self.atom, x)) for x in (node.axes, node.reduced, node.along)]
        kind = (node.op, node.update, node.scan)
        return (self._buffer(node.result), *loops, *kind, values, self._index(node.index))

    def _buffer(self, name: str) -> int:
        return self.buffers.setdefault(name, len(self.buffers))

    def _expressions(self, roots: Iterable[Expr]) -> tuple[int, ...]:
        roots = tuple(roots)
        for node in walk(*roots):
            if node not in self._numbers:
                number = self._numbers[node] = len(self._numbers)
                self.nodes[number] = self._node(node)
        return tuple(self._numbers[root] for root in roots)

    def _node(self, node: Expr) -> Any:
        own: Any = getattr(node, "name", None)
        if isinstance(node, Load):
            own = (self._buffer(node.buffer), self._index(node.index), node.mask is None)
        elif isinstance(node, Index):
            own = self._index(node.index)
        elif not node.children and not isinstance(node, Apply):
            return node  # a constant
        return type(node), node.dtype, own, tuple(self._numbers[child] for child in node.children)

    def _index(self, where: IndexExpr) -> Any:
        found = self._indices.get(where)
        if found is None:
            terms = ((Counter(map(self.atom, monomial)), scale) for monomial, scale in where.terms)
            found = frozenset((frozenset(counts.items()), scale) for counts, scale in terms)
            self._indices[where] = found
        return found

    def atom(self, atom: Atom) -> Any:
        """A factor of an index expression; a size is itself."""
        if isinstance(atom, Axis):
            if atom not in self._axes:
                self._axes[atom] = (len(self._axes), self._index(atom.extent))
            return self._axes[atom]
        if isinstance(atom, Pair):
            return type(atom), self._index(atom.left), self._index(atom.right)
        if isinstance(atom, ComputedIndex):
            return self._numbers[atom.expr], self._index(atom.extent)
        return atom
