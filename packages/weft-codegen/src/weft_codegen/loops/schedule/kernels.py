"""Canonical kernels: names abstracted, so that equal loop nests become one kernel.

Axes are numbered in loop order (i0, i1, ...), buffers by first use (a0, ...), size symbols (n0,
...) and locals (t0, ...) likewise.  The printed nest is then the kernel's identity.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft_codegen.loops import program as ir
from weft_codegen.loops.evaluate import substitute
from weft_codegen.loops.expr import Expr, Load, Local, Read, walk
from weft_codegen.loops.index import Atom, Axis, IndexExpr, Size, as_axis, atoms, axis, size
from weft_codegen.loops.printer import body_text, signature_text
from weft_codegen.loops.rewrite import Rewriter
from weft_codegen.loops.schedule.split import rewritten


def launch(
    nest: ir.Body,
    buffers: ir.Buffers,
    origins: tuple[str, ...],
    known: dict[str, ir.Kernel],
) -> ir.Launch:
    """The launch that runs `nest`; its kernel is found in `known` by its text, or entered there."""
    naming = _Naming()
    body = tuple(rewritten(stmt, naming) for stmt in nest)
    written = {stmt.buffer for stmt in ir.statements(body) if isinstance(stmt, ir.Store)}
    names = naming.buffers.items()
    params = tuple(ir.Param(new, buffers[old].dtype, new in written) for old, new in names)
    sizes, own = tuple(naming.sizes.values()), tuple(naming.locals.values())
    in_place = tuple(_in_place(body, params))
    kernel = ir.Kernel(f"kernel{len(known)}", params, sizes, own, body, in_place)
    kernel = known.setdefault(f"{signature_text(kernel)}\n{body_text(body)}", kernel)
    actual_sizes = tuple(size(name) for name in naming.sizes)
    return ir.Launch(kernel.name, tuple(naming.buffers), actual_sizes, origins)


_LETTERS = {1: "n", 0: "z", -1: "m"}


class _Naming(Rewriter):
    """Renames one nest; dicts keep the order of first use."""

    def __init__(self) -> None:
        super().__init__(at=lambda where: substitute(where, self._atom))
        self.buffers: dict[str, str] = {}
        self.sizes: dict[str, str] = {}
        self.locals: dict[Local, Local] = {}
        self._axes: dict[Axis, IndexExpr] = {}

    def _atom(self, atom: Atom) -> IndexExpr | None:
        if isinstance(atom, Axis):
            if atom not in self._axes:
                self._axes[atom] = axis(f"i{len(self._axes)}", self.index(atom.extent))
            return self._axes[atom]
        if isinstance(atom, Size):
            # The sign is part of the name, since equal texts are one kernel.
            name = f"{_LETTERS[atom.sign]}{len(self.sizes)}"
            return size(self.sizes.setdefault(atom.key, name), atom.sign)
        return None

    def axis(self, loop: Axis) -> Axis:
        return as_axis(self.index(loop.at))

    def buffer(self, name: str) -> str:
        return self.buffers.setdefault(name, f"a{len(self.buffers)}")

    def local(self, local: Local) -> Local:
        if local not in self.locals:
            name = f"t{len(self.locals)}"
            self.locals[local] = Local(name, local.dtype, self.index(local.extent))
        return self.locals[local]


def _in_place(body: ir.Body, params: tuple[ir.Param, ...]) -> Iterator[tuple[str, str]]:
    """(written, read) parameters of one dtype where each element is read only up to its store.

    A load in a later statement counts as after the store even within one iteration, unless only
    the stored value needs it: a body computes each of its values once.
    """
    dtypes = {param.name: param.dtype for param in params}
    stores: dict[str, tuple[int, ir.Store]] = {}
    loads: dict[str, list[tuple[int, IndexExpr]]] = {}
    for place, (stmt, stored) in enumerate(_with_stored(body)):
        todo, seen = [*ir.stmt_exprs(stmt)], set(stored)
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            todo += node.children
            if isinstance(node, Load):
                loads.setdefault(node.buffer, []).append((place, node.index))
        if isinstance(stmt, ir.Store):
            stores[stmt.buffer] = (place, stmt)
    axes = {stmt.axis for stmt in ir.statements(body) if isinstance(stmt, ir.Loop)}
    for written, (place, store) in stores.items():
        if written in loads or {a for a in atoms(store.index) if isinstance(a, Axis)} != axes:
            continue
        for name, accesses in loads.items():
            if name in stores or dtypes[name] is not dtypes[written]:
                continue
            if all(where is store.index and at <= place for at, where in accesses):
                yield written, name


def _with_stored(body: ir.Body) -> Iterator[tuple[ir.Stmt, frozenset[Expr]]]:
    """`statements(body)`, each with the values that its own body has stored and still knows."""
    stored: frozenset[Expr] = frozenset()
    for stmt in body:
        yield stmt, stored
        if isinstance(stmt, ir.Loop):
            yield from _with_stored(stmt.body)
        elif isinstance(stmt, ir.Store) and not any(isinstance(n, Read) for n in walk(stmt.value)):
            stored |= {stmt.value}
