"""The check of a condition in a graph, and its place before the first write.

A failed check runs the frame again, which is right only while the graph has written to no input.
After a write, what the condition is computed from is computed once more before it, if that reads
nothing written. Random numbers are drawn there instead, if no others come first. Later stages merge
the equal operations.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import Node
from torch.fx.node import has_side_effect, map_arg
from torch.utils._pytree import tree_leaves
from weft_core.adapters import for_fakes
from weft_core.collectives import is_collective
from weft_core.node_effects import is_effect
from weft_core.tensor_subclass import is_distributed
from weft_core.tensor_versions import version_of
from weft_guards.payloads import shares_memory

from weft_capture.model.protocol import Tracer
from weft_capture.tensors.graph import GraphBuilder
from weft_capture.tensors.tensor import TensorValue

_COMPUTED_AGAIN = 200
"""How many nodes a check may need once more."""

_library = torch.library.Library("weft_capture", "FRAGMENT")
_library.define("check(Tensor condition, bool wanted) -> ()")


class CheckFailed(Exception):
    """A check of the program failed in its graph: the program itself knows what to raise."""


def _check(condition: torch.Tensor, expected: bool) -> None:
    if bool(condition) is not expected:
        raise CheckFailed(f"a tensor is {not expected} where the captured program would raise")


def _nothing(condition: torch.Tensor, expected: bool) -> None:
    pass


_library.impl("check", _check, "CompositeExplicitAutograd")
_library.impl("check", _nothing, "Meta")
CHECK: Any = has_side_effect(torch.ops.weft_capture.check.default)


def has_checks(graph: GraphBuilder) -> bool:
    """Say whether there are checks in a graph."""
    return any(node.target is CHECK for node in graph.graph.nodes)


def is_repeatable(node: Node) -> bool:
    """Say whether an operation can run twice without the program noticing."""
    target: Any = node.target
    of_program = isinstance(target, types.FunctionType) and target.__module__.split(".")[0]
    return (
        of_program in (False, "torch", "weft_capture", "weft_core")
        and not is_collective(target)
        and not is_distributed(type(node.meta.get("example_value")))
        and (target is CHECK or not (is_effect(target) and not target._schema.returns))
    )


def before_writes(graph: GraphBuilder) -> list[Node]:
    """Return the operations before the first that writes; all of them where none does."""
    steps = graph.step_of_node
    return list(
        itertools.takewhile(lambda n: steps.get(n, -1) < graph.first_write, graph.graph.nodes)
    )


def check_before_writes(tx: Tracer, condition: TensorValue, expected: bool) -> bool:
    """Add a check before the first write; False where it cannot be known or differs there."""
    graph, root = tx.graph, condition.node
    early = set(before_writes(graph))
    late = [node for node in graph.graph.nodes if node not in early]
    draws = _draws(graph, late)
    filled = {base: draw for draw, base in draws.items() if base is not draw}
    needed, todo = {root}, [root]
    while todo:
        node = todo.pop()
        found = {*node.all_input_nodes, filled.get(node, node)} - needed
        needed |= found
        todo += found - early
    used = [draw for draw in draws if draw in needed]
    moved = {*used, *(draws[draw] for draw in used)}
    again = [node for node in late if node in needed and node not in moved]
    if used != list(draws)[: len(used)] or not _can_move(early, moved) or late[0] in moved:
        return False  # in another order, draws would give other numbers
    if graph.has_wrappers or len(again) > _COMPUTED_AGAIN or _are_written(graph, needed - moved):
        return False
    examples = {node: _computed_again(graph, node) for node in again}
    if not all(isinstance(example, _COMPUTED) for example in examples.values()):
        return False
    copies: dict[Node, Node] = {}
    for node, example in examples.items():
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
        copies[node] = graph.node(node.op, node.target, args, kwargs, example)
    check = graph.node("call_function", CHECK, (copies.get(root, root), expected), {}, None)
    for node in (*(copies.get(n, n) for n in late if n in copies or n in moved), check):
        undo = functools.partial(node.prev.append, node)
        tx.journal.on_rollback(functools.partial(_put, graph, graph.step_of_node[node], undo, node))
        _put(graph, graph.first_write - 1, functools.partial(late[0].prepend, node), node)
    return True


def _put(graph: GraphBuilder, step: int, place: Callable[[], None], node: Node) -> None:
    if not node._erased:
        place()
        graph.step_of_node[node] = step


_COMPUTED = (torch.Tensor, torch.SymInt, int, tuple, list)


def _draws(graph: GraphBuilder, late: list[Node]) -> dict[Node, Node]:
    """Return the late nodes that draw random numbers, each with the node that it fills or is."""
    draws, count = {}, 0
    for node in graph.step_of_node:  # as they were added
        before, count = count, node.meta.get("draws", count)
        if count > before:
            base = node.args[0] if node.args and isinstance(node.args[0], Node) else node
            fills = base.meta["example_value"] is node.meta["example_value"]
            draws[node] = base if fills else node
    return {node: draws[node] for node in late if node in draws}


def _can_move(early: set[Node], moved: set[Node]) -> bool:
    """Say whether new tensors, each filled at most once, can be made and drawn before the rest."""
    for node in moved:
        example = node.meta["example_value"]
        if node in early or not early.union(moved).issuperset(node.all_input_nodes):
            return False
        if not isinstance(example, torch.Tensor) or example.requires_grad or example._is_view():
            return False
        if version_of(example) > 1 or not is_repeatable(node):
            return False
    return True


def _are_written(graph: GraphBuilder, nodes: set[Node]) -> bool:
    """Say whether the graph writes to the memory of nodes."""
    entries = {entry.node: entry for entry in graph.inputs}
    computed = [node.meta.get("example_value") for node in nodes - entries.keys()]
    if any(map(version_of, tree_leaves(computed))):
        return True
    tensors = {n: entry for n, entry in entries.items() if isinstance(entry.example, torch.Tensor)}
    read: list[Any] = [entry.example for n, entry in tensors.items() if n in nodes]
    written: list[Any] = [entry.example for entry in tensors.values() if entry.is_written()]
    has_storage = all(map(torch._C._has_storage, (*read, *written)))
    return not has_storage or shares_memory(written, read)


def _computed_again(graph: GraphBuilder, node: Node) -> Any:
    """Compute a node again on fakes; None where it is random, writes, or differs here."""
    if node.op not in ("call_function", "call_method") or not is_repeatable(node):
        return None
    mode, before = graph.mode, (graph.mode.writes, graph.mode.drawn)
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
    function = for_fakes(node.target)
    if isinstance(node.target, str):
        function = operator.methodcaller(node.target, *args[1:], **kwargs)
        args, kwargs = args[:1], {}
    try:
        with torch.no_grad():
            result = function(*args, **kwargs)
    except RuntimeError:
        return None
    finally:
        after = mode.writes, mode.drawn
        mode.drawn = before[1]
    is_like_it = _layouts(result) == _layouts(node.meta["example_value"])
    return result if is_like_it and after == before else None


def _layouts(value: object) -> list[object]:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [(t.shape, t.stride(), t.dtype, is_functorch_wrapped_tensor(t)) for t in tensors]
