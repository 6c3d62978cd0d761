"""Calls of `torch.autograd.Function` subclasses.

Forward and backward are executed symbolically for their guards. Then the call of the class itself
is the node, where the class only computes with its arguments. One that uses other tensors
(closures, globals, parameters of a module that it calls) or gets objects becomes a node of the
traced forward and backward, whose operands are all tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import function as autograd_function
from torch.fx import Node
from weft_core.graph_copy import copy_nodes

from weft_capture import torch_compat
from weft_capture.breaks import Break
from weft_capture.effects.rehearsals import isolated, one_graph_call
from weft_capture.functions.classes import ClassValue
from weft_capture.functions.table import rule
from weft_capture.model.constant import NONE, constant
from weft_capture.model.containers import SequenceValue, TupleValue
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Tracer, Value
from weft_capture.tensors.tensor import TensorValue

_NO_SETUP = autograd_function._SingleLevelFunction.setup_context


@rule(torch_compat.FUNCTION_APPLY)
def _apply(tx: Tracer, cls: Value, *args: Value, **kwargs: Value) -> Value:
    assert isinstance(cls, ClassValue)
    if kwargs:
        raise Break("unsupported-arguments", f"{cls.obj.__name__}.apply with keyword arguments")
    arguments = [tx.force(arg) for arg in args]
    traced = _trace(tx, cls, arguments)
    own = {*traced.forward, *traced.backward}
    used = {n for node in own for n in node.all_input_nodes} - own
    if used <= traced.arguments.keys() | set(traced.stand_ins) and all(map(_is_operand, arguments)):
        traced.discard(tx)
        return tx.graph.emit("call_function", _node_target(cls.obj), arguments, {})
    if tx.transforms or tx.graph.has_wrappers:
        raise Break(
            "higher-order-op", f"{cls.obj.__name__} uses tensors that are not its arguments"
        )
    return traced.emit(tx)


def _is_operand(value: Value) -> bool:
    try:
        value.graph_arg()
    except Break:
        return False
    return True


def _node_target(cls: Any) -> Callable[..., Any]:
    """Return a plain function for the graph's node, since a bound class method has no name."""

    def apply(*args: Any) -> Any:
        return cls.apply(*args)

    apply.__name__ = apply.__qualname__ = f"{cls.__name__}_apply"
    return apply


@dataclass
class _Traced:
    """A call, executed symbolically.

    Args:
        arguments: node of an argument -> its positions.
        forward, backward: the operations.
        stand_ins: nodes that stand for the gradients of the outputs.
        gradients: what the backward returns, for each argument.
    """

    cls: Any
    ctx: UserObject
    result: Value
    outputs: list[Value]
    arguments: dict[Node, list[int]]
    forward: list[Node]
    backward: list[Node]
    stand_ins: list[Node]
    gradients: list[Value]

    def discard(self, tx: Tracer) -> None:
        """Remove the operations from the graph."""
        for node in reversed(self.forward + self.stand_ins + self.backward):
            tx.graph.discard(node)

    def emit(self, tx: Tracer) -> Value:
        """Add a node that runs the traced forward and backward."""
        name, tensors = self.cls.__name__, [o for o in self.outputs if isinstance(o, TensorValue)]
        state = {"dirty_tensors", "materialize_grads", "non_differentiable"} & self.ctx.attrs.keys()
        if state or len(tensors) < len(self.outputs):
            raise Break("higher-order-op", f"{name} with other results than tensors, or {state}")
        outputs = [tensor.node for tensor in tensors]
        grads = [
            (at, value.node)
            for at, value in enumerate(self.gradients)
            if isinstance(value, TensorValue)
        ]
        inner = set(self.backward) | set(self.stand_ins)
        read = [n for node in self.backward for n in node.all_input_nodes] + [n for _, n in grads]
        saved = list(dict.fromkeys(node for node in read if node not in inner))
        inputs = [n for node in self.forward for n in node.all_input_nodes] + outputs + saved
        operands = list(
            dict.fromkeys(n for n in [*self.arguments, *inputs] if n not in self.forward)
        )
        root = tx.graph.root
        forward = copy_nodes(root, self.forward, outputs + saved, operands)
        backward = copy_nodes(
            root, self.backward, [node for _, node in grads], saved + self.stand_ins
        )
        where: list[int | None] = [None] * len(operands)
        for index, (at, _) in enumerate(grads):
            node = next((n for n, places in self.arguments.items() if at in places), None)
            if node is not None and where[operands.index(node)] is not None:
                raise Break("higher-order-op", f"{name} of the same tensor twice")
            if node is not None:
                where[operands.index(node)] = index
        self.discard(tx)
        target = _traced_target(name, forward, backward, len(outputs), tuple(where))
        examples = [node.meta["example_value"] for node in operands]
        results = target(*examples)
        node = tx.graph.node("call_function", target, tuple(operands), {}, results)
        values = tx.graph.result(node, results).unpack(tx)
        if not isinstance(self.result, SequenceValue):
            return values[0]
        return TupleValue(values)


def _traced_target(
    name: str, forward: Any, backward: Any, count: int, where: tuple[int | None, ...]
) -> Callable[..., Any]:
    """Return a function that runs a traced forward, with the traced backward as its derivative.

    Args:
        count: how many results of `forward` are outputs; the backward gets the others.
        where: for each operand, which result of `backward` is its gradient.
    """

    class Traced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *operands: Any) -> Any:
            results = forward(*operands)
            saved = results[count:]
            ctx.plain = [None if isinstance(s, torch.Tensor) else s for s in saved]
            ctx.save_for_backward(*(s if isinstance(s, torch.Tensor) else None for s in saved))
            return tuple(results[:count])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            pairs = zip(ctx.saved_tensors, ctx.plain, strict=True)
            results = backward(*(p if t is None else t for t, p in pairs), *grads)
            return tuple(None if at is None else results[at] for at in where)

    Traced.__name__ = Traced.__qualname__ = name

    def apply(*operands: Any) -> Any:
        return Traced.apply(*operands)  # type: ignore[no-untyped-call]

    apply.__name__ = apply.__qualname__ = f"{name}_apply"
    return apply


def _trace(tx: Tracer, cls: ClassValue, args: list[Value]) -> _Traced:
    """Execute forward and backward."""
    needs = [isinstance(arg, TensorValue) and arg.fake.requires_grad for arg in args]
    recorded = torch.is_grad_enabled()
    policy, tx.policy = tx.policy, None  # numbers it reads may not become inputs of the graph
    stand_ins: list[Node] = []
    gradients: list[Value] = []
    try:
        with isolated(tx, cls.obj.__name__) as nodes, one_graph_call(tx):
            tx.set_grad_mode(False)
            ctx = UserObject(autograd_function.FunctionCtx)
            ctx.attrs["needs_input_grad"] = TupleValue([constant(need) for need in needs])
            result = _forward(tx, cls, ctx, args)
            outputs = list(result.items) if isinstance(result, SequenceValue) else [result]
            if recorded and any(needs):
                gradients = _backward(tx, cls, ctx, outputs, stand_ins)
            tx.set_grad_mode(recorded)
    finally:
        tx.policy = policy
    around = {nodes[0], nodes[-1]} if recorded and nodes else set()  # the two changes of the mode
    for node in around:
        tx.graph.discard(node)
    own = [node for node in nodes if node not in around]
    middle = own.index(stand_ins[0]) if stand_ins else len(own)
    arguments: dict[Node, list[int]] = {}
    for at, arg in enumerate(args):
        if isinstance(arg, TensorValue):
            arguments.setdefault(arg.node, []).append(at)
    behind = [node for node in own[middle:] if node not in stand_ins]
    return _Traced(
        cls.obj, ctx, result, outputs, arguments, own[:middle], behind, stand_ins, gradients
    )


def _forward(tx: Tracer, cls: ClassValue, ctx: UserObject, args: list[Value]) -> Value:
    forward = cls.tp_getattro(tx, "forward")
    if cls.obj.setup_context is _NO_SETUP:
        result: Value = forward.tp_call(tx, [ctx, *args], {})
    else:
        result = forward.tp_call(tx, list(args), {})
        cls.tp_getattro(tx, "setup_context").tp_call(tx, [ctx, tx.tuple_of(args), result], {})
    return result


def _backward(
    tx: Tracer, cls: ClassValue, ctx: UserObject, outputs: list[Value], stand_ins: list[Node]
) -> list[Value]:
    """Execute the backward on copies of the outputs, which stand for gradients."""
    ctx.attrs["saved_tensors"] = ctx.attrs.get("to_save", TupleValue([]))
    grads: list[Value] = []
    for output in outputs:
        assert isinstance(output, TensorValue) or output.is_constant()
        grads.append(NONE)
        if isinstance(output, TensorValue):
            grads[-1] = output.call_method(tx, "clone", [], {})
            assert isinstance(grads[-1], TensorValue)
            stand_ins.append(grads[-1].node)
    result = tx.force(cls.tp_getattro(tx, "backward").tp_call(tx, [ctx, *grads], {}))
    return (
        [tx.force(item) for item in result.items] if isinstance(result, SequenceValue) else [result]
    )
