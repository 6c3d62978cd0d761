"""Canonical kernels: names abstracted, so that equal loop nests become one kernel.

Axes are numbered in loop order (i0, i1, ...), buffers by first use (a0, ...), size symbols (n0,
...) and locals (t0, ...) likewise.  The printed nest is then the kernel's identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft_codegen.loops.expr import Expr, Load, Local, Read, Rewriter, load, read, walk
from weft_codegen.loops.index import Atom, Axis, IndexExpr, Size, as_axis, atoms, axis, size
from weft_codegen.loops.index import substitute as substitute_index
from weft_codegen.loops.printer import body_text, signature_text
from weft_codegen.loops.program import (
    Buffer,
    Kernel,
    Launch,
    Loop,
    Param,
    Reduce,
    Set,
    Stmt,
    Store,
    statements,
    stmt_exprs,
)
from weft_codegen.loops.schedule.assemble import Nest


class KernelTable:
    """The kernels of a program so far, by their text."""

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        self._by_key: dict[str, Kernel] = {}

    def launch(self, nest: Nest, buffers: dict[str, Buffer], origins: tuple[str, ...]) -> Launch:
        """The launch that runs `nest`, its kernel entered in the table unless it is there."""
        naming = _Naming()
        body = naming.body(nest.body)
        params = tuple(
            Param(formal, buffers[actual].dtype, actual in naming.written)
            for actual, formal in naming.buffers.items()
        )
        kernel = Kernel(
            f"kernel{len(self.kernels)}",
            params,
            tuple(naming.sizes.values()),
            tuple(naming.locals.values()),
            body,
            tuple(_in_place(body, params)),
        )
        key = f"{signature_text(kernel)}\n{body_text(body)}"
        found = self._by_key.get(key)
        if found is None:
            found = replace(kernel, key=key)
            self._by_key[key] = self.kernels[found.name] = found
        actual_sizes = tuple(size(name) for name in naming.sizes)
        return Launch(found.name, tuple(naming.buffers), actual_sizes, origins)


class _Naming:
    """Renames one nest; dicts keep the order of first use."""

    def __init__(self) -> None:
        self.buffers: dict[str, str] = {}
        self.sizes: dict[str, str] = {}
        self.locals: dict[Local, Local] = {}
        self.written: set[str] = set()
        self._axes: dict[Axis, IndexExpr] = {}
        self._rewrite = Rewriter(self._leaf, self._at)

    def body(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(self._stmt(stmt) for stmt in body)

    def _stmt(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, Loop):
            limit = None if stmt.limit is None else self._at(stmt.limit)
            loop = as_axis(self._axis(stmt.axis))
            return Loop(loop, self.body(stmt.body), stmt.kind, limit, stmt.notes)
        if isinstance(stmt, Reduce):
            values = tuple(self._rewrite(value) for value in stmt.values)
            targets = tuple(self._local(target) for target in stmt.targets)
            return Reduce(stmt.op, targets, self._at(stmt.index), values)
        value = self._rewrite(stmt.value)
        if isinstance(stmt, Set):
            return Set(self._local(stmt.local), self._at(stmt.index), value)
        self.written.add(stmt.buffer)
        index = self._rewrite.index(stmt.index)
        return Store(self._buffer(stmt.buffer), index, value, stmt.mode)

    def _leaf(self, node: Expr) -> Expr | None:
        if isinstance(node, Load):
            mask = None if node.mask is None else self._rewrite(node.mask)
            where = self._rewrite.index(node.index)
            return load(self._buffer(node.buffer), where, node.dtype, mask)
        if isinstance(node, Read):
            return read(self._local(node.local), self._at(node.index))
        return None

    def _at(self, where: IndexExpr) -> IndexExpr:
        return substitute_index(where, self._atom)

    def _atom(self, atom: Atom) -> IndexExpr | None:
        if isinstance(atom, Axis):
            return self._axis(atom)
        if isinstance(atom, Size):
            return size(self.sizes.setdefault(atom.key, f"n{len(self.sizes)}"))
        return None

    def _axis(self, loop: Axis) -> IndexExpr:
        if loop not in self._axes:
            self._axes[loop] = axis(f"i{len(self._axes)}", self._at(loop.extent))
        return self._axes[loop]

    def _buffer(self, name: str) -> str:
        return self.buffers.setdefault(name, f"a{len(self.buffers)}")

    def _local(self, local: Local) -> Local:
        if local not in self.locals:
            name = f"t{len(self.locals)}"
            self.locals[local] = Local(name, local.dtype, self._at(local.extent))
        return self.locals[local]


def _in_place(body: tuple[Stmt, ...], params: tuple[Param, ...]) -> Iterator[tuple[str, str]]:
    """(written, read) parameters of one dtype where each element is read only up to its store.

    A load in a later statement counts as after the store even within one iteration, unless only
    the stored value needs it: a body computes each of its values once.
    """
    dtypes = {param.name: param.dtype for param in params}
    stores: dict[str, tuple[int, Store]] = {}
    loads: dict[str, list[tuple[int, IndexExpr]]] = {}
    for place, (stmt, stored) in enumerate(_with_stored(body)):
        todo, seen = [*stmt_exprs(stmt)], set(stored)
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            todo += node.children
            if isinstance(node, Load):
                loads.setdefault(node.buffer, []).append((place, node.index))
        if isinstance(stmt, Store):
            stores[stmt.buffer] = (place, stmt)
    axes = {stmt.axis for stmt in statements(body) if isinstance(stmt, Loop)}
    for written, (place, store) in stores.items():
        if written in loads or {a for a in atoms(store.index) if isinstance(a, Axis)} != axes:
            continue
        for name, accesses in loads.items():
            if name in stores or dtypes[name] is not dtypes[written]:
                continue
            if all(where is store.index and at <= place for at, where in accesses):
                yield written, name


def _with_stored(body: tuple[Stmt, ...]) -> Iterator[tuple[Stmt, frozenset[Expr]]]:
    """`statements(body)`, each with the values that its own body has stored and still knows."""
    stored: frozenset[Expr] = frozenset()
    for stmt in body:
        yield stmt, stored
        if isinstance(stmt, Loop):
            yield from _with_stored(stmt.body)
        elif isinstance(stmt, Store) and not any(isinstance(n, Read) for n in walk(stmt.value)):
            stored |= {stmt.value}
