"""Which first gradients may become `.grad` as they are, and which have to be copied.

A gradient that something else still uses (another variable, a hook, an output, an input that it is
a view of) must not be handed over: whoever changes `.grad` in place would change that too. The
eager engine counts references; a graph is looked at as a whole: a value's family is every node that
shares its storage, and a gradient is free when its family holds no input and only the hand-over
looks at it from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from weft_compiled_autograd import accumulation

_COPY = torch.ops.aten.clone.default


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _families(graph: Graph) -> dict[int, list[Node]]:
    families: dict[int, list[Node]] = {}
    for node in graph.nodes:
        storage = _storage(node)
        if storage is not None:
            families.setdefault(storage, []).append(node)
    return families


def _fresh(node: Node) -> bool:
    """Whether a node makes its storage itself: not an input, nor the result of user code."""
    source: Any = node
    while source.op == "call_function" and source.target.__name__ == "getitem":
        source = source.args[0]
    return source.op == "call_function" and isinstance(source.target, torch._ops.OpOverload)


def _free(value: Node, families: dict[int, list[Node]]) -> bool:
    storage = _storage(value)
    family = families.get(storage, []) if storage is not None else []
    if not family or not all(map(_fresh, family)):
        return False
    members = set(family)
    outside = [user for node in family for user in node.users if user not in members]
    return len(outside) == 1 and _mentions(outside[0], members) == 1


def _mentions(user: Node, members: set[Node]) -> int:
    """How often a node names one of `members`; `users` counts a node once."""
    count = 0

    def visit(node: Node) -> Node:
        nonlocal count
        count += node in members
        return node

    torch.fx.node.map_arg((user.args, user.kwargs), visit)
    return count


def copy_shared_gradients(graph: Graph, handed_over: Sequence[Any], mode: Any) -> None:
    """Insert copies before hand-overs of gradients that are not free.

    Args:
        graph: the traced backward; `meta["val"]` holds fake tensors.
        handed_over: nodes whose values become `.grad` by being outputs; `set_grad` calls are found.
        mode: the fake mode of the values.
    """
    families = _families(graph)
    shared: list[tuple[Node, Node]] = []
    output = next(iter(reversed(graph.nodes)))
    for value in handed_over:
        if not _free(value, families):
            shared.append((output, value))
    for node in graph.nodes:
        if node.target is accumulation.set_grad and not _free(node.args[1], families):
            shared.append((node, node.args[1]))
    for user, value in shared:
        with graph.inserting_before(user):
            copy = graph.call_function(_COPY, (value,))
        copy.meta.update(value.meta)
        with mode, torch.no_grad():
            copy.meta["val"] = value.meta["val"].clone()
        _replace_last(user, value, copy)


def _replace_last(user: Node, value: Node, copy: Node) -> None:
    """Replace one mention of a value, the last: outputs come before handed-over gradients."""
    if user.op != "output":
        user.args = (user.args[0], copy)
        return
    items = list(user.args[0])  # type: ignore[arg-type]
    position = len(items) - 1 - items[::-1].index(value)
    items[position] = copy
    user.args = (tuple(items),)
