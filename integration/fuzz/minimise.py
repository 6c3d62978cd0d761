"""The smallest program that fails as a given one does: what is not needed is dropped."""

from __future__ import annotations

import ast
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .program import Program

Fails = Callable[[Program], bool]


def minimise(program: Program, fails: Fails, seconds: float = 120.0) -> Program:
    """Drop calls, statements, operands and results as long as `fails` stays true."""
    end = time.monotonic() + seconds
    changed = True
    while changed and time.monotonic() < end:
        changed, tried = False, 0
        while (found := _first(program, fails, tried, end)) is not None:
            program, tried = found
            changed = True
    return program


def _first(program: Program, fails: Fails, tried: int, end: float) -> tuple[Program, int] | None:
    """Return the first smaller program that fails, of those after the `tried` first."""
    for number, smaller in enumerate(_smaller(program)):
        if time.monotonic() > end:
            return None
        if number >= tried and fails(smaller):
            return smaller, number
    return None


def split(program: Program) -> list[Program]:
    """The independent programs that the statements of `f` are, by the variables that they share.

    Parameters are shared by all. What is no single function of plain statements is one program.
    """
    tree = ast.parse(program.source)
    function = tree.body[-1]
    if len(tree.body) != 1 or not isinstance(function, ast.FunctionDef):
        return [program]
    *body, last = function.body
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Tuple):
        return [program]
    shared = {"torch", "F", "float", *(one.arg for one in function.args.args)}
    groups: list[tuple[set[str], list[ast.AST]]] = []
    for node in [*body, *last.value.elts]:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - shared
        joined = [group for group in groups if group[0] & names]
        if len(joined) > 1 and node in last.value.elts:
            continue  # a result made of others
        groups = [group for group in groups if not group[0] & names]
        nodes = [one for _, members in joined for one in members]
        groups.append((names.union(*(group[0] for group in joined)), [*nodes, node]))
    return [_part(program, tree, nodes) for _, nodes in groups]


def _part(program: Program, tree: ast.Module, nodes: list[ast.AST]) -> Program:
    """`f` with some of its statements and results alone."""
    tree = copy.deepcopy(tree)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    texts = {ast.unparse(node) for node in nodes}
    last = function.body[-1]
    assert isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple)
    last.value.elts = [one for one in last.value.elts if ast.unparse(one) in texts]
    function.body = [one for one in function.body[:-1] if ast.unparse(one) in texts] + [last]
    return replace(program, source=ast.unparse(tree) + "\n", parts=1)


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with something less, those with much less first."""
    calls = program.calls
    if len(calls) > 1:
        yield from (replace(program, calls=(call,)) for call in calls)
        yield from (replace(program, calls=calls[:n] + calls[n + 1 :]) for n in range(len(calls)))
    if program.order:
        yield replace(program, order=program.order - 1)
    if program.dynamic is not None:
        yield replace(program, dynamic=None)
    tree = ast.parse(program.source)
    yield from _fewer_arguments(program, tree)
    for smaller in _trees(tree):
        text = ast.unparse(smaller)
        if text != ast.unparse(tree):
            yield replace(program, source=text + "\n", parts=1)


def _blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    """The lists of statements of a tree, always in the same order: that of `f` comes early."""
    fields = ("body", "orelse", "finalbody", "handlers")
    todo, found = [tree], []
    for node in todo:
        todo += reversed(list(ast.iter_child_nodes(node)))
        found += [getattr(node, field, None) for field in fields]
    return [block for block in found if isinstance(block, list) and block]


def _trees(tree: ast.Module) -> Iterator[ast.Module]:
    sizes = [len(block) for block in _blocks(tree)]
    for number, size in enumerate(sizes):
        for step in _steps(size):
            for start in range(0, size, step):
                yield _without(tree, number, start, step)
    yield from _fewer_results(tree)
    for number, size in enumerate(sizes):
        for place in range(size):
            yield from _unwrapped(tree, number, place)
            yield from _plainer(tree, number, place)
    for number, node in enumerate(_expressions(tree)):
        for part in range(len(_operands(node))):
            smaller = copy.deepcopy(tree)
            found = _expressions(smaller)[number]
            yield _replaced(smaller, found, _operands(found)[part])


def _steps(size: int) -> Iterator[int]:
    step = size // 2
    while step:
        yield step
        step //= 2
    if size == 1:
        yield 1


def _without(tree: ast.Module, number: int, start: int, step: int) -> ast.Module:
    tree = copy.deepcopy(tree)
    block = _blocks(tree)[number]
    del block[start : start + step]
    if not block and number:
        block.append(ast.Pass())
    return tree


def _unwrapped(tree: ast.Module, number: int, place: int) -> Iterator[ast.Module]:
    """With what a compound statement holds in its place."""
    node = _blocks(tree)[number][place]
    if isinstance(node, ast.If | ast.For | ast.While | ast.With | ast.Try | ast.Match):
        smaller = copy.deepcopy(tree)
        block = _blocks(smaller)[number]
        inside = block[place].cases[0].body if isinstance(node, ast.Match) else block[place].body
        block[place : place + 1] = inside
        yield smaller


def _expressions(tree: ast.AST) -> list[ast.expr]:
    """The expressions that are evaluated and hold others, always in the same order."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.expr) and _operands(node)]
    return [node for node in found if isinstance(getattr(node, "ctx", ast.Load()), ast.Load)]


def _operands(node: ast.AST) -> list[ast.expr]:
    """What may stand in the place of an expression."""
    inside = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
    return [one for one in inside if not isinstance(one, ast.Starred | ast.Constant)]


def _replaced(tree: ast.Module, old: ast.expr, new: ast.expr) -> ast.Module:
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if value is old:
                setattr(node, field, new)
            elif isinstance(value, list) and any(one is old for one in value):
                setattr(node, field, [new if one is old else one for one in value])
    return tree


def _fewer_results(tree: ast.Module) -> Iterator[ast.Module]:
    """Without one of what is returned, or with one alone."""
    returns = [n for n in ast.walk(tree) if isinstance(n, ast.Return)]
    for number, node in enumerate(returns):
        if isinstance(node.value, ast.Tuple):
            for place in range(len(node.value.elts)):
                for alone in (True, False):
                    smaller = copy.deepcopy(tree)
                    found = [n for n in ast.walk(smaller) if isinstance(n, ast.Return)][number]
                    assert isinstance(found.value, ast.Tuple)
                    if alone:
                        found.value = found.value.elts[place]
                    else:
                        del found.value.elts[place]
                    yield smaller


def _plainer(tree: ast.Module, number: int, place: int) -> Iterator[ast.Module]:
    """With one of its operands in the place of what a statement computes."""
    node = _blocks(tree)[number][place]
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return
    names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
    for name in sorted(names - {"torch", "F", node.targets[0].id}):
        smaller = copy.deepcopy(tree)
        block = _blocks(smaller)[number]
        del block[place]
        for later in block[place:]:
            for found in ast.walk(later):
                if isinstance(found, ast.Name) and found.id == node.targets[0].id:
                    found.id = name
        yield smaller


def _fewer_arguments(program: Program, tree: ast.Module) -> Iterator[Program]:
    """Without the parameters that nothing uses, in the definition and in all calls."""
    named = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "f"]
    if not named or named[0].args.defaults:
        return
    used = {n.id for n in ast.walk(named[0]) if isinstance(n, ast.Name)}
    unused = [n for n, one in enumerate(named[0].args.args) if one.arg not in used]
    for places in [unused] if len(unused) == 1 else [unused, *([place] for place in unused)]:
        if places:
            smaller = copy.deepcopy(tree)
            found = next(n for n in smaller.body if getattr(n, "name", "") == "f")
            assert isinstance(found, ast.FunctionDef)
            for place in reversed(places):
                del found.args.args[place]
            calls = tuple(_without_arguments(call, places) for call in program.calls)
            yield replace(program, source=ast.unparse(smaller) + "\n", calls=calls)


def _without_arguments(call: str, places: list[int]) -> str:
    tree = ast.parse(call)
    last = tree.body[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Tuple):
        for place in reversed(places):
            del last.value.elts[place : place + 1]
    return ast.unparse(tree)
