"""Fewer temporaries in the statements that `decompile` writes; evaluation keeps its order."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Iterator, Set


def store(name: str) -> ast.Name:
    """A variable as the target of an assignment."""
    return ast.Name(name, ast.Store())


def delete(name: str) -> ast.Delete:
    """The statement that unbinds a variable."""
    return ast.Delete([ast.Name(name, ast.Del())])


def tidy(body: list[ast.stmt], temps: Set[str], unstable: Set[str]) -> list[ast.stmt]:
    """Return the statements with as few of the temporaries as can be.

    Args:
        body: the statements, which are changed.
        temps: variables that may vanish.
        unstable: variables that a call may change: cells and globals.
    """
    while _Pass(body, temps, unstable).changes():
        pass
    return body


class _Pass:
    """One look at every block, with the uses of each variable."""

    def __init__(self, body: list[ast.stmt], temps: Set[str], unstable: Set[str]) -> None:
        self.body, self.temps, self.unstable = body, temps, unstable
        self.loads, self.stores, self.deleted = Counter[str](), Counter[str](), set[str]()
        for node in (n for statement in body for n in ast.walk(statement)):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self.loads[node.target.id] += 1
            if not isinstance(node, ast.Name):
                continue
            if isinstance(node.ctx, ast.Del):
                self.deleted.add(node.id)
            else:
                (self.loads if isinstance(node.ctx, ast.Load) else self.stores)[node.id] += 1

    def changes(self) -> bool:
        """Do without temporaries; returns whether there were any to do without."""
        changed = False
        for block in _blocks(self.body):
            at = 0
            while at < len(block):
                name = _assigned(block[at])
                if name is not None and name in self.temps and self.stores[name] == 1:
                    if self._vanishes(block, at, name, block[at].value):  # type: ignore[attr-defined]
                        changed, at = True, max(at - 2, -1)
                        for other in _blocks(self.body) if name in self.deleted else ():
                            other[:] = [s for s in other if not _deletes(s, name)]
                at += 1
        return changed

    def _vanishes(self, block: list[ast.stmt], at: int, name: str, value: ast.expr) -> bool:
        if isinstance(value, ast.Constant) or self._is_fixed(value, name):
            del block[at]
            if isinstance(value, ast.Name) and value.id in self.deleted:
                self._keep(block, at, value.id)
            for statement in self.body if self.loads[name] else ():
                _Replace(name, value).visit(statement)
            if isinstance(value, ast.Name):
                self.loads[value.id] += self.loads[name] - 1
            return True
        if self.loads[name] == 0:
            block[at : at + 1] = [] if isinstance(value, ast.Name) else [ast.Expr(value)]
            return True
        if at + 1 == len(block):
            return False
        if self.loads[name] == 1 and self._comes_first(block[at + 1], name):
            _Replace(name, value).visit(block[at + 1])
            del block[at]
            return True
        return self._becomes(block, at, name)

    def _is_fixed(self, value: ast.expr, temp: str) -> bool:
        """Whether this is a variable that means the same as long as the temporary lives."""
        if not isinstance(value, ast.Name) or value.id in self.unstable:
            return False
        if value.id in self.deleted and temp in self.deleted:
            return False
        return self.stores[value.id] == (value.id in self.temps)

    def _keep(self, block: list[ast.stmt], at: int, name: str) -> None:
        """Do not unbind a variable from a statement on: the temporary has kept its object."""
        later = block[at:]
        for inner in _blocks(later):
            inner[:] = [statement for statement in inner if not _deletes(statement, name)]
        block[at:] = later

    def _comes_first(self, statement: ast.stmt, name: str) -> bool:
        """Whether a statement evaluates nothing of effect before a variable."""
        for node in _evaluated(statement):
            if isinstance(node, ast.Name) and node.id == name:
                return True
            stable = isinstance(node, ast.Name) and node.id not in self.unstable
            if not stable and not isinstance(node, ast.Constant | ast.Tuple | ast.List):
                return False
        return False

    def _becomes(self, block: list[ast.stmt], at: int, name: str) -> bool:
        """Assign to the variable that the temporary is moved to in the end."""
        for later in range(at + 1, len(block)):
            target = _assigned(block[later])
            if target is None or getattr(block[later].value, "id", None) != name:  # type: ignore[attr-defined]
                continue
            between = [n.id for s in block[at + 1 : later] for n in _names(s)]
            if target in between or target in self.unstable:
                return False
            if getattr(block[at].value, "id", None) == target:  # type: ignore[attr-defined]
                if self.loads[name] > 1 and (self.stores[target] > 1 or target in self.deleted):
                    return False
                for statement in block[at:]:
                    _Replace(name, ast.Name(target, ast.Load())).visit(statement)
                del block[later], block[at]
                return True
            if between.count(name) + 1 != self.loads[name] or target in map(
                _identifier, _names(block[at])
            ):
                return False
            for statement in block[at + 1 : later]:
                _Replace(name, ast.Name(target, ast.Load())).visit(statement)
            block[at].targets = [store(target)]  # type: ignore[attr-defined]
            self.loads[target] += self.loads[name] - 1
            del block[later]
            return True
        return False


def renumber(body: list[ast.stmt], temps: Set[str], taken: Set[str]) -> None:
    """Give the temporaries that are left the lowest numbers."""
    # A node may stand in two places.
    nodes = dict.fromkeys(node for statement in body for node in _names(statement))
    names = dict.fromkeys(node.id for node in nodes if node.id in temps)
    new: dict[str, str] = {}
    taken = taken - temps
    for name in names:
        base = name.rstrip("0123456789").rstrip("_")
        free = (f"{base}_{number}" if number else base for number in itertools.count())
        new[name] = next(n for n in free if n not in taken and n not in new.values())
    for node in nodes:
        node.id = new.get(node.id, node.id)


class _Replace(ast.NodeTransformer):
    """Puts an expression in the place of a variable."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_it = node.id == self.name and isinstance(node.ctx, ast.Load)
        return self.value if is_it else node


def _blocks(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    yield body
    for statement in body:
        for inner in (getattr(statement, name, None) for name in ("body", "orelse")):
            if isinstance(inner, list):
                yield from _blocks(inner)
        for clause in getattr(statement, "handlers", ()):
            yield from _blocks(clause.body)


def _names(statement: ast.stmt) -> Iterator[ast.Name]:
    return (node for node in ast.walk(statement) if isinstance(node, ast.Name))


def _identifier(node: ast.Name) -> str:
    return node.id


def _assigned(statement: ast.stmt) -> str | None:
    """The variable of `variable = value`."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def _deletes(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Delete) and getattr(statement.targets[0], "id", "") == name


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """What a statement or expression evaluates, in order, the inner before the outer."""
    if isinstance(node, ast.Assign):
        children: list[ast.AST] = [node.value, *node.targets]
    elif isinstance(node, ast.If):
        children = [node.test]
    elif isinstance(node, ast.Dict):
        children = [part for pair in zip(node.keys, node.values) for part in pair if part]
    elif isinstance(node, ast.Lambda | ast.Try | ast.AugAssign | ast.Delete):
        children = []
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _evaluated(child)
    if isinstance(node, ast.expr):
        yield node
