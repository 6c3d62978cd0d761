"""Who owns what: which first gradients may become `.grad` as they are, and when inputs are freed.

A gradient that something else still uses must not be handed over: whoever changes `.grad` in place
would change that too. A value's family is every node that shares its storage; a gradient is free
when its family holds no input and only the hand-over looks at it from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from weft_compiled_autograd import accumulation

_COPY = torch.ops.aten.clone.default


def storage_of(node: Node) -> int | None:
    """Identifies the memory of a node's value; None when it is no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _families(graph: Graph) -> dict[int, list[Node]]:
    families: dict[int, list[Node]] = {}
    for node in graph.nodes:
        storage = storage_of(node)
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
    storage = storage_of(value)
    family = families.get(storage, []) if storage is not None else []
    if not family or not all(map(_fresh, family)):
        return False
    members = set(family)
    outside = [user for node in family for user in node.users if user not in members]
    return len(outside) == 1 and _mentions(outside[0], members) == 1


def _mentions(user: Node, members: set[Node]) -> int:
    """How often a node names one of `members`; `users` counts a node once."""
    named: list[bool] = []
    map_arg((user.args, user.kwargs), lambda node: named.append(node in members))
    return sum(named)


def copy_shared_gradients(graph: Graph, handed_over: Sequence[Any], mode: Any) -> None:
    """Insert copies before hand-overs of gradients that are not free.

    Args:
        graph: the traced backward; `meta["val"]` holds fake tensors.
        handed_over: nodes whose values become `.grad` by being outputs; `set_grad` calls are found.
        mode: the fake mode of the values.
    """
    families = _families(graph)
    output = graph.output_node()
    for value in handed_over:
        if not _free(value, families):
            _copy_output(graph, output, value, mode)
    for node in graph.nodes:
        if node.target is accumulation.set_grad and not _free(node.args[1], families):
            node.target = accumulation.set_grad_copy


def _copy_output(graph: Graph, output: Node, value: Node, mode: Any) -> None:
    """Copy a gradient that is an output; the last mention, for the results come first."""
    with graph.inserting_before(output):
        copy = graph.call_function(_COPY, (value,))
    copy.meta.update(value.meta)
    with mode, torch.no_grad():
        copy.meta["val"] = value.meta["val"].clone()
    items: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    items[len(items) - 1 - items[::-1].index(value)] = copy
    output.args = (tuple(items),)


def clear_list(values: list[Any]) -> None:
    """Empty the list that the engine passed, so that each tensor dies with its last use."""
    values.clear()


def release_inputs(graph: Graph) -> None:
    """Let a captured backward drop its inputs once all are taken out of their list."""
    inputs = next(iter(graph.find_nodes(op="placeholder")))
    accesses = [node for node in graph.nodes if node in inputs.users]
    if accesses:
        with graph.inserting_after(accesses[-1]):
            graph.call_function(clear_list, (inputs,))
