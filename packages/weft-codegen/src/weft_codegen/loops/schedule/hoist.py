"""Moving work out of loops: values that do not change inside, and reads before writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft_codegen.loops.expr import Apply, Expr, Load, Local, Read, cost, read, walk
from weft_codegen.loops.index import ZERO, Axis, nonnegative
from weft_codegen.loops.program import Reduce, Set, Stmt, Store, stmt_exprs
from weft_codegen.loops.rewrite import Rewriter
from weft_codegen.loops.schedule.split import rewritten

# A value is worth a local outside the loop when it costs more than this many float adds.
_WORTH = 3

NewLocal = Callable[..., Local]


def hoist(
    statements: list[Stmt], varying: frozenset[Axis], new_local: NewLocal
) -> tuple[list[Stmt], list[Stmt]]:
    """Split off the values that do not depend on `varying`: (statements before, statements).

    Where a loop may run zero times nothing is loaded before it: there may be nothing to load.
    """
    runs = all(nonnegative(axis.extent - 1) for axis in varying)
    before: list[Stmt] = []
    running = {local for stmt in statements if isinstance(stmt, Reduce) for local in stmt.targets}
    moved: dict[Expr, Expr] = {}

    def leaf(node: Expr) -> Expr | None:
        if node in moved:
            return moved[node]
        if isinstance(node, Apply) and not node.axes & varying and cost(walk(node)) > _WORTH:
            parts = list(walk(node))
            if running & {part.local for part in parts if isinstance(part, Read)}:
                return None  # a scan's result so far
            if not runs and any(isinstance(part, Load) for part in parts):
                return None
            local = new_local(node.dtype)
            before.append(Set(local, ZERO, node))
            moved[node] = read(local, ZERO)
            return moved[node]
        return None

    rewrite = Rewriter(leaf)
    return before, [rewritten(stmt, rewrite) for stmt in statements]


def split_conflicts(stores: list[Stmt], new_local: NewLocal) -> list[Stmt]:
    """Stores of one body in an order, and with locals, such that no load follows its store."""
    targets = {stmt.buffer for stmt in stores if isinstance(stmt, Store)}
    first: list[Stmt] = []
    then: list[Stmt] = []
    for position, stmt in enumerate(stores):
        assert isinstance(stmt, Store)
        loads = {n.buffer for n in walk(*stmt_exprs(stmt)) if isinstance(n, Load)}
        if position and loads & (targets - {stmt.buffer}):
            local = new_local(stmt.value.dtype)
            first.append(Set(local, ZERO, stmt.value))
            stmt = replace(stmt, value=read(local, ZERO))
        then.append(stmt)
    return first + then
