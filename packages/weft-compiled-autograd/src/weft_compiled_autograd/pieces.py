"""Compiles a captured backward without capturing it again: aten ops between calls of user code.

A captured graph is aten ops already, so a graph backend can take it as it is; only the calls of
the user's Python (hooks, autograd.Functions, `.grad` assignments) must stay Python. The graph is
cut at those calls, each piece becomes a flat graph in torch.compile's backend protocol, and a
program of pieces and calls takes the graph's place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from weft_core.events import counters
from weft_core.graph_copy import copy_nodes

from weft_compiled_autograd.accumulation import set_grad, set_grad_copy
from weft_compiled_autograd.cache import Compiler
from weft_compiled_autograd.hooks import call_backward_dense, call_cpp_hook, call_hook
from weft_compiled_autograd.lower import USER_CODE, is_effect
from weft_compiled_autograd.ownership import release_inputs, storage_of
from weft_compiled_autograd.saved_tensor_hooks import restore_layout

Backend = Callable[[GraphModule, list[Any]], Callable[..., Sequence[Any]]]


class Piece:
    """Consecutive aten ops, compiled with their first real inputs. A target of fx nodes.

    `inputs` are sizes, then `taken`, then other tensors. What is taken is an element of the
    backward's `inputs` that nothing else uses: the piece takes it out of there, so that the
    compiled code may drop it early.
    """

    def __init__(self, nodes: list[Node], backend: Backend, name: str) -> None:
        self.__name__ = name
        self.__module__ = __name__
        self.nodes = nodes
        self.backend = backend
        self.function: Callable[..., Sequence[Any]] | None = None
        self.owning: Callable[[list[Any]], Sequence[Any]] | None = None
        inside = set(nodes)
        used = dict.fromkeys(used for node in nodes for used in node.all_input_nodes)
        given = [node for node in used if node not in inside]
        sizes = [node for node in given if storage_of(node) is None]
        tensors = [node for node in given if storage_of(node) is not None]
        self.taken = [n for n in tensors if _is_input(n) and set(n.users) <= inside]
        rest = [node for node in tensors if node not in self.taken]
        self.inputs = [*sizes, *self.taken, *rest]
        self.passed = [*sizes, *rest]
        self.outputs = [n for n in nodes if any(user not in inside for user in n.users)]
        self.places: list[Any] = [node.args[1] for node in self.taken]
        self.before = len(sizes)

    def __call__(self, inputs: list[Any], *passed: Any) -> Sequence[Any]:
        args = [*passed[: self.before], *[inputs[k] for k in self.places], *passed[self.before :]]
        for place in self.places:
            inputs[place] = None
        if self.function is None:
            self.function = self.backend(self.module(), list(args))
            self.owning = getattr(self.function, "call_owning", None)
            counters["stats"]["unique_graphs"] += 1
        return self.function(*args) if self.owning is None else self.owning(args)

    def module(self) -> GraphModule:
        """The piece as a graph of its own: sizes first, then tensors; a tuple of outputs."""
        module = copy_nodes(torch.nn.Module(), self.nodes, self.outputs, self.inputs)
        for node in module.graph.nodes:
            if "val" in node.meta:
                node.meta["example_value"] = node.meta["val"]
        places = module.graph.find_nodes(op="placeholder")
        for place, node in zip(places, self.inputs, strict=True):
            # No `val`: the ops are neither functional nor decomposed, so not yet an aten graph.
            place.meta.update(example_value=node.meta["val"], source_name=node.name)
        return module


def _is_access(node: Node) -> bool:
    """Whether a node only takes something out of what the engine passes, or of a call's result."""
    source = node.args[0] if node.args else None
    return (
        node.target is operator.getitem
        and isinstance(source, Node)
        and (source.op == "placeholder" or is_effect(source))
    )


def _is_input(node: Node) -> bool:
    """Whether a node takes a tensor out of the backward's `inputs`."""
    return _is_access(node) and node.args[0].target == "inputs"  # type: ignore[union-attr]


# Calls that ops may be moved before.
_MOVABLE: frozenset[Any] = frozenset(
    {restore_layout, call_hook, call_cpp_hook, set_grad, set_grad_copy}
)

# After these, ops stay behind: the hook may free what it is called for, or anything else.
_BARRIERS = ("post_acc_grad_hook",)


class _Cutting:
    """Assigns every op to a stage: stage k lies between the calls number k - 1 and k.

    An op goes to the earliest stage that has its inputs, so that hooks on the gradients of
    parameters do not cut the ops apart. Calls keep their order; an op that mutates stays after the
    calls that precede it, and so does an op that reads memory that such a call has seen.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.calls: list[list[Node]] = []
        self.ops: dict[int, list[Node]] = {}
        self.accesses: list[Node] = []
        self._stage: dict[Node, int] = {}
        self._touched: dict[int, int] = {}
        self._barrier = 0

    def run(self) -> list[list[Node] | Node]:
        """The graph as runs of ops and single calls, in order."""
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._assign(node)
        parts: list[list[Node] | Node] = [*self.accesses]
        for stage in range(len(self.calls) + 1):
            if stage in self.ops:
                parts.append(self.ops[stage])
            parts += self.calls[stage] if stage < len(self.calls) else []
        return parts

    def _assign(self, node: Node) -> None:
        if is_effect(node):
            self.calls.append([node])
            self._after(node, len(self.calls))
            if node.kwargs.get("hook_type") in _BARRIERS or node.target not in _MOVABLE:
                self._barrier = len(self.calls)
        elif _is_access(node):
            source = node.args[0]
            assert isinstance(source, Node)
            if source.op == "placeholder":
                self.accesses.append(node)
            else:
                self.calls[self._stage[source] - 1].append(node)
                self._stage[node] = self._stage[source]
        else:
            stage = self._earliest(node)
            self.ops.setdefault(stage, []).append(node)
            self._stage[node] = stage

    def _after(self, node: Node, stage: int) -> None:
        """Let everything that shares memory with a node's arguments be read from `stage` on."""
        self._stage[node] = stage
        for used in node.all_input_nodes:
            storage = storage_of(used)
            if storage is not None:
                self._touched[storage] = stage

    def _earliest(self, node: Node) -> int:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            self._after(node, len(self.calls))
            return len(self.calls)
        stage = self._barrier
        for used in node.all_input_nodes:
            touched = self._touched.get(storage_of(used) or 0, 0)
            stage = max(stage, self._stage.get(used, 0), touched)
        return stage


def compile_pieces(module: GraphModule, backend: Backend) -> GraphModule:
    """Return a program with the interface of `module` that runs its pieces compiled.

    Args:
        module: a captured backward.
        backend: `(gm, example_inputs) -> callable`, called once for each piece, at its first run.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        copies[node] = graph.placeholder(node.name)
    parts = [
        Piece(part, backend, f"piece_{index}") if isinstance(part, list) else part
        for index, part in enumerate(_Cutting(module.graph).run())
    ]
    taken = {node for part in parts if isinstance(part, Piece) for node in part.taken}
    inputs = next(iter(graph.nodes))
    for part in parts:
        if part in taken:
            continue
        if isinstance(part, Node):
            copies[part] = graph.node_copy(part, copies.__getitem__)
            continue
        call = graph.call_function(part, (inputs, *[copies[node] for node in part.passed]))
        for position, node in enumerate(part.outputs):
            copies[node] = graph.call_function(operator.getitem, (call, position))
    graph.output(map_arg(module.graph.output_node().args[0], copies.__getitem__))
    release_inputs(graph)
    return GraphModule(torch.nn.Module(), graph, "CompiledAutogradProgram")


def runs_user_code(module: GraphModule) -> bool:
    """Whether a captured backward calls hooks or autograd.Functions."""
    return any(node.target in USER_CODE for node in module.graph.nodes)


def op_only_inputs(module: GraphModule) -> list[int]:
    """Indices of the elements of a captured backward's `inputs` that only its own ops use."""
    inputs = filter(_is_input, module.graph.nodes)
    return [int(n.args[1]) for n in inputs if all(_is_op(user, n) for user in n.users)]


def _is_op(user: Node, value: Node) -> bool:
    """Whether a use of a value is an op; what a function gets in case it stops is none."""
    if user.target is call_backward_dense:
        saved, grads = user.args[1], user.args[4]
        return value not in (*saved, *grads)  # type: ignore[misc]
    return user.op == "call_function" and not is_effect(user)


def graph_compiler(backend: Backend) -> Compiler:
    """Make a compiler for `enable` out of a graph backend.

    Args:
        backend: `(gm, example_inputs) -> callable`, torch.compile's backend protocol. Each graph
            it gets is flat, made of aten ops that may mutate, with `meta["example_value"]`.
    """
    return partial(compile_pieces, backend=backend)
