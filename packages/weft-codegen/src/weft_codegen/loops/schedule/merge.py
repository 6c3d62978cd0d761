"""Merging adjacent axes that every access walks through as one.

A 4-d pointwise operation on dense tensors becomes one loop over all elements: axes (outer, inner)
merge when each index expression's stride along `outer` is its stride along `inner` times the
extent of `inner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft_codegen.loops.expr import computed_operands, walk
from weft_codegen.loops.index import ZERO, Axis, IndexExpr, as_axis, product
from weft_codegen.loops.schedule.align import new_axis
from weft_codegen.loops.schedule.group import Group, rewritten
from weft_codegen.loops.steps import coefficient


def merge_axes(group: Group) -> Group:
    """`group` with as few axes as its accesses allow; kept and reduced axes stay apart."""
    wheres = _index_expressions(group)
    kept = _merge(group.kept, wheres)
    reduced = _merge(group.swept, wheres)
    mapped: dict[Axis, IndexExpr] = {}
    new_kept = _name(kept, mapped)
    new_reduced = _name(reduced, mapped)
    members = tuple(rewritten(member, mapped) for member in group.members)
    return replace(
        group, members=members, axes=tuple(new_kept + new_reduced), reduced=frozenset(new_reduced)
    )


def _index_expressions(group: Group) -> list[IndexExpr]:
    found: dict[IndexExpr, None] = {}
    for member in group.members:
        found[member.node.index] = None
        for node in walk(*member.node.values, *computed_operands(member.node.index)):
            for where in node.indices:
                found[where] = None
    return list(found)


def _merge(axes: Sequence[Axis], wheres: Sequence[IndexExpr]) -> list[list[Axis]]:
    """`axes` grouped into runs that merge."""
    runs: list[list[Axis]] = []
    for loop in axes:
        strides = [[coefficient(w, x) for x in (runs[-1][-1], loop)] for w in wheres if runs]
        if runs and all(b is not None and a is b * loop.extent for a, b in strides):
            runs[-1].append(loop)
        else:
            runs.append([loop])
    return runs


def _name(runs: list[list[Axis]], mapped: dict[Axis, IndexExpr]) -> list[Axis]:
    """A new axis for each run: the innermost old axis becomes it, the outer ones vanish."""
    named: list[Axis] = []
    for run in runs:
        if len(run) == 1:
            mapped[run[0]] = run[0].at
            named.append(run[0])
            continue
        merged = new_axis(product(loop.extent for loop in run))
        for loop in run[:-1]:
            mapped[loop] = ZERO
        mapped[run[-1]] = merged
        named.append(as_axis(merged))
    return named
