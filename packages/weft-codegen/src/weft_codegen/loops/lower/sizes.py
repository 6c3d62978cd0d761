"""What a graph's lowering knows of its symbolic sizes, and which integers a call shows it.

The fake tensors are right under conditions that were asked of the sizes while they were made: a
size of `s // 4` that is broadcast was found to be 1. A lowering compares index expressions, so what
those conditions say of one rewrites every expression with it (`Facts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from weft_codegen.loops import index as ix
from weft_codegen.loops import program as ir
from weft_codegen.loops.lower.shapes import NoLowering, from_sympy, rewritten, to_index


class Facts:
    """Equations about sizes, each a rule that replaces a product of atoms or else a sum of them."""

    def __init__(self) -> None:
        self._rules: list[tuple[ix.IndexExpr, ix.IndexExpr]] = []

    def __call__(self, expr: ix.IndexExpr) -> ix.IndexExpr:
        """`expr` as these equations give it."""
        for old, new in self._rules:
            before = None
            while expr is not before:
                before = expr
                expr = _replaced(expr, old, new)
        return expr

    def add(self, left: ix.IndexExpr, right: ix.IndexExpr, bound: frozenset[str]) -> None:
        """Learn that two expressions are equal; `bound` are the sizes that a call shows.

        What is replaced is a quotient, a remainder or a minimum, else a size, else a sum that is a
        constant; and what takes its place is made of bound sizes.
        """
        difference = self(left - right)
        kinds: tuple[type, ...] = (ix.Pair, ix.Size)
        for kind in kinds:
            for monomial, scale in difference.terms:
                if len(monomial) != 1 or not isinstance(monomial[0], kind):
                    continue
                rest = difference - ix.from_atoms(monomial) * scale
                if all(c % scale == 0 for _, c in rest.terms):
                    value = _divided(rest, -scale)
                    if monomial[0] not in ix.atoms(value) and sizes_in(value) <= bound:
                        self._rules.append((ix.from_atoms(monomial), value))
                        return
        constant = sum((scale for monomial, scale in difference.terms if not monomial), start=0)
        if (total := difference - constant).terms:
            self._rules.append((total, ix.const(-constant)))

    def name(self, given: ix.IndexExpr, name: str, bound: frozenset[str]) -> None:
        """Let the input `name` stand for `given`, which has sizes that no input shows alone."""
        for monomial, scale in reversed(given.terms):
            if abs(scale) == 1 and not sizes_in(ix.from_atoms(monomial)) <= bound:
                alone = ix.size(name, int(ix.nonnegative(given - ix.ONE)))
                rest = given - ix.from_atoms(monomial) * scale
                self._rules.append((ix.from_atoms(monomial), (alone - rest) * scale))
                return


def _replaced(expr: ix.IndexExpr, old: ix.IndexExpr, new: ix.IndexExpr) -> ix.IndexExpr:
    """`expr` with `new` for one multiple of `old` in it."""
    given = dict(expr.terms)
    (leading, by), *_ = old.terms
    for monomial, scale in expr.terms:
        rest = ix.without(monomial, leading)
        if rest is not None and scale % by == 0:
            factor = ix.from_atoms(rest) * (scale // by)
            if all(given.get(m) == c for m, c in (factor * old).terms):
                return expr + factor * (new - old)
    return expr


def _divided(expr: ix.IndexExpr, by: int) -> ix.IndexExpr:
    """`expr` / `by`, which divides every coefficient."""
    terms = (ix.from_atoms(monomial) * (scale // by) for monomial, scale in expr.terms)
    return sum(terms, start=ix.ZERO)


def sizes_in(expr: ix.IndexExpr) -> frozenset[str]:
    """The names of the sizes in `expr`."""
    return frozenset(atom.key for atom in ix.atoms(expr) if isinstance(atom, ix.Size))


def learn(gm: fx.GraphModule) -> Facts:
    """The facts about a graph's sizes.

    A size that is 0 or 1 in the example is assumed to stay that (a guard), as sizes of inputs are:
    broadcasting and emptiness give them a meaning of their own.
    """
    facts = Facts()
    sizes = list(_sizes(node.meta.get("val") for node in gm.graph.nodes))
    given = _given(gm)
    with rewritten(facts):
        bound = frozenset(
            str(shown) for _, shown in _convertible(given) if isinstance(ix.single(shown), ix.Size)
        )
        for amount, where in _convertible(sizes):
            node = amount.node
            if not where.is_const and node.has_hint() and node.hint in (0, 1):
                assert amount == node.hint
                facts.add(where, ix.const(node.hint), bound)
        if sizes or given:
            _equations((sizes or given)[0].node.shape_env, facts, bound)
        for position, (_, shown) in enumerate(_convertible(given)):
            if not sizes_in(shown) <= bound:
                facts.name(shown, f"given{position}", bound)
                bound |= {f"given{position}"}
    return facts


def size_hints(gm: fx.GraphModule) -> dict[str, int]:
    """The values that the sizes which inputs show had in the example, by name."""
    atoms = [(ix.single(where), amount.node) for amount, where in _convertible(_given(gm))]
    return {a.key: n.hint for a, n in atoms if isinstance(a, ix.Size) and n.has_hint()}


def _given(gm: fx.GraphModule) -> list[torch.SymInt]:
    """The symbolic integers that the inputs show: those that are inputs, then sizes of tensors."""
    inputs = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return [n for n in inputs if isinstance(n, torch.SymInt)] + list(_sizes(inputs))


def _sizes(values: Iterable[Any]) -> Iterator[torch.SymInt]:
    """The symbolic sizes of tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            sizes: Sequence[Any] = value.shape
            yield from (n for n in sizes if isinstance(n, torch.SymInt))
        elif isinstance(value, list | tuple):
            yield from _sizes(value)


def _convertible(amounts: Iterable[torch.SymInt]) -> Iterator[tuple[torch.SymInt, ix.IndexExpr]]:
    """Those of symbolic integers that have an index expression, with it."""
    for amount in amounts:
        try:
            where = to_index(amount)
        except NoLowering:
            continue
        yield amount, where


def _equations(env: Any, facts: Facts, bound: frozenset[str]) -> None:
    """Learn from the equations among the guards of a ShapeEnv."""
    for guard in env.guards:
        expr = env.replace(guard.expr)
        if type(expr).__name__ == "Equality":
            try:
                left, right = (from_sympy(side, env) for side in expr.args)
            except NoLowering:
                continue
            facts.add(left, right, bound)


def bound_sizes(program: ir.Program) -> tuple[str, ...]:
    """The size symbols that inputs show.  Raises NoLowering if the program needs another."""
    bound = ir.size_positions(program)
    for where in ir.index_exprs(program):
        for atom in ix.atoms(where):
            if isinstance(atom, ix.Size) and atom.key not in bound:
                raise NoLowering(f"size {atom.key} is only known while running")
    return tuple(bound)
