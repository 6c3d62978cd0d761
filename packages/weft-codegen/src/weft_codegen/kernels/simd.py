"""Decides which innermost loops may run in vector lanes, and what they carry between iterations.

`#pragma omp simd` promises the compiler that iterations are independent apart from the named
reductions, so the promise is made only where it can be shown from the statements.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft_codegen.loops.expr import Expr, Local, Read, walk
from weft_codegen.loops.index import Axis, IndexExpr, Value, atoms, coefficient
from weft_codegen.loops.program import Loop, Reduce, Set, Stmt, Store, stmt_exprs

_SIMD_REDUCTIONS = ("sum", "prod", "max", "min", "any", "all")


@dataclass(frozen=True)
class SimdLoop:
    """What a vectorisable loop needs around it.

    carried: reductions whose target does not move with the axis, so lanes accumulate apart.
    private: scalar locals that live within one iteration.
    """

    carried: tuple[Reduce, ...]
    private: tuple[Local, ...]


def depends_on(where: IndexExpr, axis: Axis) -> bool:
    """Whether `where` changes with `axis`, directly or through a computed integer."""
    return any(
        atom is axis or (isinstance(atom, Value) and axis in atom.expr.axes)
        for atom in atoms(where)
    )


def analyse(loop: Loop, local_elsewhere: frozenset[str]) -> SimdLoop | None:
    """How to vectorise `loop`, or None when it has to run one iteration after another.

    Args:
        local_elsewhere: names of locals that statements outside this loop use.
    """
    carried: list[Reduce] = []
    private: dict[str, Local] = {}
    for position, stmt in enumerate(loop.body):
        if isinstance(stmt, Loop):
            return None
        if isinstance(stmt, Store) and not _store_is_independent(stmt, loop.axis):
            return None
        if isinstance(stmt, Reduce) and not depends_on(stmt.index, loop.axis):
            if stmt.op not in _SIMD_REDUCTIONS:
                return None
            carried.append(stmt)
        if isinstance(stmt, Set) and not depends_on(stmt.index, loop.axis):
            if stmt.local.name in local_elsewhere or not _set_first(loop.body, position):
                return None
            private[stmt.local.name] = stmt.local
    if not _carried_apart(loop.body, carried, private):
        return None
    return SimdLoop(tuple(carried), tuple(private.values()))


def _store_is_independent(stmt: Store, axis: Axis) -> bool:
    if stmt.mode == "set":
        return True
    step = coefficient(stmt.index, axis)
    return step is not None and step.is_const and step.value != 0


def _read_names(exprs: tuple[Expr, ...]) -> frozenset[str]:
    return frozenset(node.local.name for node in walk(*exprs) if isinstance(node, Read))


def _set_first(body: tuple[Stmt, ...], position: int) -> bool:
    """Whether no statement up to and including this Set reads its local."""
    stmt = body[position]
    assert isinstance(stmt, Set)
    before = tuple(expr for earlier in body[: position + 1] for expr in stmt_exprs(earlier))
    return stmt.local.name not in _read_names(before)


def _carried_apart(
    body: tuple[Stmt, ...], carried: list[Reduce], private: dict[str, Local]
) -> bool:
    """Whether accumulators are only accumulated into: once each, and not read meanwhile."""
    names = [local.name for stmt in carried for local in stmt.targets]
    reads = _read_names(tuple(expr for stmt in body for expr in stmt_exprs(stmt)))
    written = [stmt.local.name for stmt in body if isinstance(stmt, Set)]
    return (
        len(set(names)) == len(names)
        and not reads & set(names)
        and not set(names) & {*written, *private}
    )


def collides(store: Store, parallel: tuple[Axis, ...]) -> bool:
    """Whether two iterations of the parallel loops may add to the same element."""
    if store.mode == "set":
        return False
    if any(isinstance(atom, Value) for atom in atoms(store.index)):
        return True
    return not all(depends_on(store.index, axis) for axis in parallel)
