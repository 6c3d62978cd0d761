"""Calls of `torch.autograd.Function` subclasses.

The call becomes one node that applies the user's class, so each later stage uses its forward and
backward. Before that, both are executed symbolically and discarded: this collects their guards, and
breaks for side effects, tensors that are not arguments, and branches on values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function as autograd_function

from weft_capture import torch_compat
from weft_capture.breaks import Break
from weft_capture.effects.rehearsals import rehearsal
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
    _rehearse(tx, cls, arguments)
    return tx.graph.emit("call_function", _node_target(cls.obj), arguments, {})


def _node_target(cls: Any) -> Callable[..., Any]:
    """Return a plain function for the graph's node, since a bound class method has no name."""

    def apply(*args: Any) -> Any:
        return cls.apply(*args)

    apply.__name__ = apply.__qualname__ = f"{cls.__name__}_apply"
    return apply


def _rehearse(tx: Tracer, cls: ClassValue, args: list[Value]) -> None:
    """Execute forward and backward for their guards; the graph keeps none of their nodes."""
    needs = [isinstance(arg, TensorValue) and arg.fake.requires_grad for arg in args]
    recorded = torch.is_grad_enabled()
    with rehearsal(tx, cls.obj.__name__, args):
        ctx = UserObject(autograd_function.FunctionCtx)
        ctx.attrs["needs_input_grad"] = TupleValue([constant(need) for need in needs])
        outputs = _forward(tx, cls, ctx, args)
        if recorded and any(needs):
            _backward(tx, cls, ctx, outputs)


def _forward(tx: Tracer, cls: ClassValue, ctx: UserObject, args: list[Value]) -> list[Value]:
    forward = cls.tp_getattro(tx, "forward")
    if cls.obj.setup_context is _NO_SETUP:
        result = forward.tp_call(tx, [ctx, *args], {})
    else:
        result = forward.tp_call(tx, list(args), {})
        cls.tp_getattro(tx, "setup_context").tp_call(tx, [ctx, tx.tuple_of(args), result], {})
    return list(result.items) if isinstance(result, SequenceValue) else [result]


def _backward(tx: Tracer, cls: ClassValue, ctx: UserObject, outputs: list[Value]) -> None:
    ctx.attrs["saved_tensors"] = ctx.attrs.get("to_save", TupleValue([]))
    grads = []
    for output in outputs:
        assert isinstance(output, TensorValue) or output.is_constant()
        is_tensor = isinstance(output, TensorValue)
        grads.append(output.call_method(tx, "clone", [], {}) if is_tensor else NONE)
    cls.tp_getattro(tx, "backward").tp_call(tx, [ctx, *grads], {})
