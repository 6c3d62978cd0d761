"""Walks over an aten graph, and over autograd's nodes, that more than one step needs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from weft_core.node_effects import draws

from weft_aot.records import BackwardComponent, JointGraph


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


Bits = int
"""A set of numbers: bit `k` for `k`."""

# Op -> index of the flag under which these arguments have no influence on gradients.
_IGNORED: dict[Any, tuple[int, tuple[int, ...]]] = {
    torch.ops.aten._native_batch_norm_legit_functional.default: (5, (3, 4)),
    torch.ops.aten.native_batch_norm_backward.default: (7, (3, 4)),
}


def _sources(node: fx.Node) -> list[fx.Node]:
    flag, ignored = _IGNORED.get(node.target, (0, ()))
    if not ignored or node.args[flag] is not True:
        return node.all_input_nodes
    rest = [arg for index, arg in enumerate(node.args) if index not in ignored]
    return [arg for arg in rest if isinstance(arg, fx.Node)]


def inputs_of(joint: JointGraph, nodes: Iterable[fx.Node | None]) -> set[int]:
    """Inputs whose contents some of `nodes` depend on."""
    found = ancestors(nodes, sources=_sources)
    holders = joint.placeholders()[: joint.num_inputs]
    return {index for index, node in enumerate(holders) if node in found}


def needed_inputs(joint: JointGraph, part: BackwardComponent | None = None) -> set[int]:
    """Inputs whose contents some gradient depends on, or one of a part."""
    found = inputs_of(joint, joint.results()[joint.num_values :])
    if part is not None:
        nodes = {node.name: node for node in joint.module.graph.nodes}
        found &= inputs_of(joint, [nodes[saved.name] for saved in part.saved])
    return found


def random_ops(joint: JointGraph) -> list[fx.Node]:
    """The nodes that draw random numbers; all: drawing fewer would change what is drawn later."""
    return [node for node in joint.module.graph.nodes if draws(node)]


def copied_inputs(joint: JointGraph) -> set[int]:
    """Inputs of which copies are made before the program changes them, so that it can run again."""
    changed = {mutation.index for mutation in joint.mutations}
    reshaped = {mutation.index for mutation in joint.mutations if mutation.layout is not None}
    return changed & needed_inputs(joint) | reshaped


def history(starts: Iterable[Any]) -> Iterator[Any]:
    """The autograd nodes that `starts` lead to, they included, each after those it leads to."""
    seen, pending = set(), [*starts]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if missing := [after for after, _ in node.next_functions if after and after not in seen]:
            pending += [node, *missing]
        else:
            seen.add(node)
            yield node


def leaves_of(starts: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The leaves that a backward from these autograd nodes comes to."""
    for node in history(starts):
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            yield leaf


def reached(
    tensors: Sequence[torch.Tensor],
    ends: Sequence[torch.Tensor],
    passes: Callable[[Any], bool] = lambda node: True,
) -> list[Bits]:
    """For each tensor those of `ends` that its history leads to, by nodes that let pass."""
    edges = {(t.grad_fn, t.output_nr): 1 << k for k, t in enumerate(ends)}
    leaves = {id(t): 1 << k for k, t in enumerate(ends) if t.is_leaf}
    found: dict[Any, Bits] = {}
    for node in history(tensor.grad_fn for tensor in tensors):
        after = [edge for edge in node.next_functions if edge[0] and passes(node)]
        found[node] = union(found[edge[0]] | edges.get(edge, 0) for edge in after)
        found[node] |= leaves.get(id(getattr(node, "variable", None)), 0)
    return [found.get(tensor.grad_fn, 0) for tensor in tensors]


def leading(tensors: Sequence[torch.Tensor]) -> dict[Any, Bits]:
    """For each autograd node those of `tensors` that lead to it."""
    order = [*history(tensor.grad_fn for tensor in tensors)]
    found = dict.fromkeys(order, 0)
    for k, tensor in enumerate(tensors):
        found[tensor.grad_fn] |= 1 << k
    for node in reversed(order):
        for after, _ in node.next_functions:
            if after is not None:
                found[after] |= found[node]
    return found


def depending(nodes: Iterable[fx.Node], starts: Iterable[fx.Node]) -> dict[fx.Node, Bits]:
    """Those of `starts` that each of `nodes`, in order, depends on."""
    found = {node: 1 << k for k, node in enumerate(starts)}
    for node in nodes:
        if node not in found:
            found[node] = union(map(found.__getitem__, node.all_input_nodes))
    return found


def union(sets: Iterable[Bits]) -> Bits:
    """What is in one of the sets."""
    return functools.reduce(operator.or_, sets, 0)


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
