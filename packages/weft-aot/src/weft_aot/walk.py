"""Walks over an aten graph that more than one step needs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx


def ancestors(
    nodes: Iterable[fx.Node | None],
    known: Collection[fx.Node] = (),
    sources: Callable[[fx.Node], list[fx.Node]] = operator.attrgetter("all_input_nodes"),
) -> set[fx.Node]:
    """What computing `nodes` takes, they included, when `known` are given."""
    pending = [node for node in nodes if node is not None and node not in known]
    found = set(pending)
    while pending:
        for source in sources(pending.pop()):
            if source not in found and source not in known:
                found.add(source)
                pending.append(source)
    return found


def made_of(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """For each tensor whose history leads to others, its number and theirs."""
    ends = {(t.grad_fn, t.output_nr): 1 << k for k, t in enumerate(tensors) if t.grad_fn}
    reached: dict[Any, int] = {}
    for k, tensor in enumerate(tensors):
        pending = [tensor.grad_fn] if len(ends) > 1 else []
        while pending:
            node = pending.pop()
            edges: Any = [edge for edge in node.next_functions if edge[0]] if node else ()
            if missing := [before for before, _ in edges if before not in reached]:
                pending += [node, *missing]
            else:
                sets = (reached[edge[0]] | ends.get(edge, 0) for edge in edges)
                reached[node] = functools.reduce(operator.or_, sets, 0)
        if bits := reached.get(tensor.grad_fn, 0):
            yield k, tuple(other for other in range(len(tensors)) if bits >> other & 1)


def is_view(node: Any) -> bool:
    """Whether a node is a view op."""
    return isinstance(node, fx.Node) and getattr(node.target, "is_view", False)


def view_chain(node: fx.Node) -> Iterator[fx.Node]:
    """`node` and what it is a view of; last the node whose memory it shares."""
    yield node
    while is_view(made := node.args[0] if node.target is operator.getitem else node):
        node = made.args[0]  # type: ignore[assignment, union-attr]
        yield node


def view_root(node: fx.Node) -> fx.Node:
    """The node whose memory `node` shares."""
    return [*view_chain(node)][-1]


def copies_input(node: fx.Node) -> bool:
    """Whether a node is a copy of an input, which the program may write to before the backward."""
    root = view_root(node.args[0]) if node.target is torch.ops.aten.clone.default else node  # type: ignore[arg-type]
    return node.op == "call_function" and root.op == "placeholder"
