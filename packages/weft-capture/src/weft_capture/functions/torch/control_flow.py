"""torch.cond and torch.while_loop as nodes of the graph; map and scans unrolled.

A branch is executed symbolically at the call, and its operations are moved into a subgraph. Tensors
from outside, such as closures and parameters, become operands. torch's Python around these
operators is inlined; it assumes that a compiler is active.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import Node
from torch.utils import _pytree as pytree
from weft_core.graph_copy import copy_nodes
from weft_core.inlinable import inlinable
from weft_core.tensor_versions import version_of

from weft_capture.breaks import Break
from weft_capture.effects.rehearsals import isolated, one_graph_call
from weft_capture.functions.language.polyfilled import polyfill
from weft_capture.functions.table import rule
from weft_capture.functions.torch.pytree import real_tree, tree_value
from weft_capture.model.containers import TupleValue
from weft_capture.model.protocol import Tracer, Value
from weft_capture.tensors import control_ops
from weft_capture.tensors.tensor import SymValue, TensorValue, is_data


def _higher_order(name: str) -> list[Any]:
    """Return an operator that this torch may lack, as a list."""
    home = importlib.import_module(f"torch._higher_order_ops.{name}")
    return [vars(home)[name]] if name in vars(home) else []


@dataclass(frozen=True)
class Branch:
    """The result of tracing a branch.

    Args:
        name: for messages.
        made: its operations, in order.
        leaves: its results, the leaves of a tree of the shape `spec`.
    """

    name: str
    nodes: list[Node]
    leaves: list[Value]
    spec: pytree.TreeSpec

    @property
    def tensors(self) -> list[TensorValue]:
        """The results that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorValue)]

    @property
    def outputs(self) -> list[Node]:
        """Their nodes."""
        return [tensor.node for tensor in self.tensors]

    def check_like(self, leaves: Sequence[Value], spec: pytree.TreeSpec) -> None:
        """Check that the results have the structure of another branch's.

        Raises:
            Break: when they are not.
        """
        leaf_kinds = [_kind(leaf) for leaf in leaves]
        if spec != self.spec or leaf_kinds != [_kind(leaf) for leaf in self.leaves]:
            raise Break("higher-order-op", f"results of {self.name} that differ in structure")


def _kind(value: Value) -> object:
    if isinstance(value, TensorValue):
        fake = value.fake
        return fake.shape, fake.stride(), fake.dtype, fake.device, value.cls
    return value.as_constant()


def trace_branch(tx: Tracer, name: str, function: Value, args: Sequence[Value]) -> Branch:
    """Execute a branch; its results share no memory with anything else.

    Raises:
        Break: when it has side effects, or writes to a tensor from outside.
    """
    graph = tx.graph
    if tx.transforms or graph.has_wrappers or _reads_data(tx):
        raise Break("higher-order-op", f"{name} in such a graph")
    old = list(graph.tensors())
    versions, written = [version_of(value.fake) for value in old], graph.writes()
    with isolated(tx, name) as nodes, one_graph_call(tx):
        result = function.tp_call(tx, list(args), {})
        leaves, spec = pytree.tree_flatten(real_tree(tx, result, None))
        inside = {id(value) for value in graph.tensors()} - set(map(id, old))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, SymValue) or (
                not isinstance(leaf, TensorValue) and not leaf.is_constant()
            ):
                raise Break("higher-order-op", f"{leaf.describe()} as a result of {name}")
            if isinstance(leaf, TensorValue):
                existing = [v for v in graph.tensors() if id(v) not in inside or v.source]
                existing += leaves[:index]
                if any(_shares(leaf, other) for other in existing):
                    leaves[index] = leaf.call_method(tx, "clone", [], {})
    if versions != [version_of(value.fake) for value in old] or graph.writes() != written:
        raise Break("higher-order-op", f"{name} writes to a tensor from outside")
    return Branch(name, nodes, leaves, spec)


def _reads_data(tx: Tracer) -> bool:
    """Say whether the graph has numbers or sizes out of tensors."""
    if tx.graph.shape_env is None:
        return False
    examples = [node.meta.get("example_value") for node in tx.graph.graph.nodes]
    return any(is_data(e) for e in examples if isinstance(e, torch.Tensor | torch.SymInt))


def _shares(tensor: TensorValue, other: Value) -> bool:
    if not isinstance(other, TensorValue) or is_functorch_wrapped_tensor(other.fake):
        return False  # one of a transform that has ended
    return bool(tensor.fake.untyped_storage()._cdata == other.fake.untyped_storage()._cdata)


def free_nodes(branches: Sequence[Branch], given: Sequence[Node]) -> list[Node]:
    """Return the nodes from outside that branches use, other than those `given`."""
    used = [n for b in branches for node in b.nodes for n in node.all_input_nodes]
    inside = {node for branch in branches for node in branch.nodes}
    outer = [*used, *(node for branch in branches for node in branch.outputs)]
    return list(dict.fromkeys(n for n in outer if n not in inside and n not in given))


def _emit(
    tx: Tracer, target: Any, first: list[TensorValue], carried: list[Node], branches: list[Branch]
) -> list[Value]:
    """Move the branches into submodules, and add the node that calls one or the other."""
    graph = tx.graph
    free = free_nodes(branches, carried)
    operands = carried + free
    modules = [
        copy_nodes(graph.root, branch.nodes, branch.outputs, operands) for branch in branches
    ]
    for branch in branches:
        for node in reversed(branch.nodes):
            graph.discard(node)
    lists = (carried, free) if carried else (operands,)
    examples = [[node.meta["example_value"] for node in nodes] for nodes in lists]
    outputs = target(*(value.fake for value in first), *modules, *examples)
    names = [graph.submodule(module) for module in modules]
    nodes = (*(value.node for value in first), *names, *map(tuple, lists))
    result = graph.node("call_function", target, nodes, {}, outputs)
    return graph.result(result, outputs).unpack(tx)


def _rebuilt(tx: Tracer, branch: Branch, tensors: Sequence[Value]) -> Value:
    """Replace the tensors of a branch's results."""
    rest = iter(tensors)
    leaves = [next(rest) if isinstance(leaf, TensorValue) else leaf for leaf in branch.leaves]
    return tree_value(tx, pytree.tree_unflatten(leaves, branch.spec))


@rule(*_higher_order("wrap"))
def _call_inside(tx: Tracer, function: Value, *args: Value, **kwargs: Value) -> Value:
    """Inline the function of an operator that only calls it."""
    return function.tp_call(tx, list(args), kwargs)


@rule(*_higher_order("strict_mode"))
def _strict(tx: Tracer, function: Value, operands: Value) -> Value:
    return function.tp_call(tx, operands.unpack(tx), {})


@rule(*_higher_order("print"))
def _print_text(tx: Tracer, text: Value, *args: Value, **kwargs: Value) -> None:
    formatted = text.call_method(tx, "format", list(args), kwargs)
    tx.call_builtin(print, [formatted], {})


@rule(torch.cond)
def _cond(
    tx: Tracer, pred: Value, true_fn: Value, false_fn: Value, operands: Value | None = None
) -> Value:
    args = [] if operands is None else operands.unpack(tx)
    pred = tx.force(pred)
    if not isinstance(pred, TensorValue):
        return (true_fn if pred.nb_bool(tx) else false_fn).tp_call(tx, args, {})
    if pred.fake.numel() != 1 or pred.fake.dtype is not torch.bool:
        raise Break("higher-order-op", "torch.cond with a predicate that is not a single bool")
    true_branch = trace_branch(tx, "the true branch of torch.cond", true_fn, args)
    other = trace_branch(tx, "the false branch of torch.cond", false_fn, args)
    other.check_like(true_branch.leaves, true_branch.spec)
    tensors = (
        _emit(tx, control_ops.cond, [pred], [], [true_branch, other]) if true_branch.outputs else []
    )
    return _rebuilt(tx, true_branch, tensors)


@rule("torch._higher_order_ops.while_loop.while_loop")
def _while_loop(tx: Tracer, cond_fn: Value, body_fn: Value, carried_inputs: Value) -> Value:
    """The body works on copies: a loop without iterations returns its initial values."""
    values: list[Any] = [tx.force(value) for value in carried_inputs.unpack(tx)]
    while True:  # conditions that are known unroll the loop
        condition = cond_fn.tp_call(tx, values, {})
        if isinstance(condition, TensorValue):
            break
        if not condition.nb_bool(tx):
            return TupleValue(values)
        values = body_fn.tp_call(tx, values, {}).unpack(tx)
    leaves, spec = pytree.tree_flatten(real_tree(tx, TupleValue(values), None))
    if not all(isinstance(leaf, TensorValue) for leaf in leaves):
        raise Break("higher-order-op", "torch.while_loop over numbers, on a tensor's condition")
    if condition.fake.numel() != 1 or condition.fake.dtype is not torch.bool:
        raise Break(
            "higher-order-op", "torch.while_loop with a condition that is not a single bool"
        )
    leaves = [leaf.call_method(tx, "clone", [], {}) for leaf in leaves]
    args = [tree_value(tx, tree) for tree in pytree.tree_unflatten(leaves, spec)]
    condition_branch = trace_branch(tx, "the condition of torch.while_loop", cond_fn, args)
    body = trace_branch(tx, "the body of torch.while_loop", body_fn, args)
    body.check_like(leaves, spec)
    carried = [leaf.node for leaf in leaves]
    return _rebuilt(
        tx, body, _emit(tx, control_ops.while_loop, [], carried, [condition_branch, body])
    )


# ---- operators over the rows of tensors: torch's own Python around them, and their meaning here


@inlinable
def scan_rows(f: Any, init: Sequence[Any], xs: Sequence[Any], additional_inputs: Any = ()) -> Any:
    """Carry values over the rows of tensors: the last ones, and the stacked results of each."""
    carry, outs = list(init), []
    for row in zip(*xs, strict=True):
        outputs = list(f(*carry, *row, *additional_inputs))
        carry = outputs[: len(carry)]
        outs.append(outputs[len(carry) :])
    return (*carry, *(_stacked(column) for column in zip(*outs, strict=True)))


@inlinable
def _stacked(column: Sequence[Any]) -> Any:
    return None if column[0] is None else torch.stack(list(column))


@inlinable
def call_hinted(owner: Any, body: Any, args: Any, kwargs: Any, hints: Any) -> Any:
    """Call a function; hints are for compilers that know them."""
    return body(*args, **kwargs)


@inlinable
def call_subgraph(owner: Any, subgraph: Any, *operands: Any, **hints: Any) -> Any:
    """Call the function of an operator that has keywords for compilers only."""
    return subgraph(*operands)


@inlinable
def map_lists(op: Any, *operands: Any, **hints: Any) -> Any:
    """Call a function for each row of lists; other operands are the same for all rows."""
    counts = [len(one) for one in operands if isinstance(one, list | tuple)]
    if not counts:
        return op(*operands)
    columns = [x if isinstance(x, list | tuple) else [x] * min(counts) for x in operands]
    return [op(*row) for row in zip(*columns, strict=False)]


polyfill("torch._higher_order_ops.hints_wrap.HintsWrapper.__call__", call_hinted)
polyfill("torch._higher_order_ops.base_hop.BaseHOP.__call__", call_subgraph)
polyfill("torch._higher_order_ops.foreach_map.foreach_map", map_lists)


_OPERATORS = (
    ("map", "map_impl", "map_dense"),
    ("scan", "scan_op", scan_rows),
    ("associative_scan", "associative_scan_op", "generic_associative_scan"),
)
for _module, _name, _version in _OPERATORS:
    _home = importlib.import_module(f"torch._higher_order_ops.{_module}")
    polyfill(getattr(_home, _name), getattr(_home, str(_version), _version))
