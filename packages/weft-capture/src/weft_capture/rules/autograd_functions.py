"""Calls of `torch.autograd.Function` subclasses.

The call becomes one node that applies the user's class, so the graph has its own forward and its
own backward whatever traces it next. Before that, both are executed symbolically and thrown away:
this finds the guards they need, and refuses what must not be baked in (side effects, tensors that
are not arguments, branches on values).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import function as autograd_function
from torch.fx import Node

from weft_capture import engine
from weft_capture.breaks import Break, Raised
from weft_capture.classes import ClassValue
from weft_capture.regions import modes_of, nodes_after
from weft_capture.rules.checks import CHECK
from weft_capture.rules.table import rule
from weft_capture.values.base import BIRTHS, Tracer, Value
from weft_capture.values.constant import NONE, constant
from weft_capture.values.containers import SequenceValue, TupleValue
from weft_capture.values.objects import UserObject
from weft_capture.values.tensor import TensorValue

_APPLY: Any = torch.autograd.Function.apply
_NO_SETUP = autograd_function._SingleLevelFunction.setup_context


@rule(_APPLY.__func__)
def _apply(tx: Tracer, cls: Value, *args: Value, **kwargs: Value) -> Value:
    assert isinstance(cls, ClassValue)
    if kwargs:
        raise Break("unknown-call", f"{cls.obj.__name__}.apply with keyword arguments")
    given = [tx.force(arg) for arg in args]
    _rehearse(tx, cls, given)
    return tx.graph.emit("call_function", _node_target(cls.obj), given, {})


def _node_target(cls: Any) -> Callable[..., Any]:
    """Return a plain function for the graph's node; a bound class method has no name there."""

    def apply(*args: Any) -> Any:
        return cls.apply(*args)

    apply.__name__ = apply.__qualname__ = f"{cls.__name__}_apply"
    return apply


def _rehearse(tx: Tracer, cls: ClassValue, args: list[Value]) -> None:
    """Execute forward and backward for their guards; nothing of it stays in the graph."""
    needs = [isinstance(arg, TensorValue) and arg.fake.requires_grad for arg in args]
    recorded = torch.is_grad_enabled()
    with rehearsal(tx, cls.obj.__name__, args):
        ctx = UserObject(autograd_function.FunctionCtx)
        ctx.attrs["needs_input_grad"] = TupleValue([constant(need) for need in needs])
        outputs = _forward(tx, cls, ctx, args)
        if recorded and any(needs):
            _backward(tx, cls, ctx, outputs)


@contextmanager
def rehearsal(tx: Tracer, name: str, args: Sequence[Value]) -> Iterator[None]:
    """Execute code of the program symbolically that whatever traces the graph will call.

    Raises:
        Break: when it cannot be captured, or does more than compute with `args`.
    """
    before = torch.is_grad_enabled()
    policy, tx.policy = tx.policy, None  # numbers it reads may not become inputs of the graph
    try:
        with apart(tx, name) as made, engine.kept_inside(tx):
            tx.set_grad_mode(False)
            yield
            tx.set_grad_mode(before)
    finally:
        tx.policy = policy
    foreign = {n for node in made for n in node.all_input_nodes} - set(made) - _nodes_of(args)
    if foreign:
        raise Break("unsupported-value", f"{name} uses tensors that are not its arguments")
    for node in reversed(made):
        tx.graph.discard(node)


@contextmanager
def apart(tx: Tracer, name: str) -> Iterator[list[Node]]:
    """Execute code that does nothing but compute; the operations it adds are then in the list.

    Raises:
        Break: when it does more, such as changing an object that was there before.
    """
    made: list[Node] = []
    last, sent = next(iter(reversed(tx.graph.graph.nodes)), None), tx.graph.collectives
    try:
        with watched(tx) as has_effects:
            yield made
    except Raised as error:
        raise Break("unknown-call", f"{name} raises {error.value.describe()}") from None
    if has_effects() or tx.graph.collectives != sent:
        raise Break("unsupported-value", f"{name} has effects outside of itself")
    made += nodes_after(tx, last)
    if any(node.target is CHECK for node in made):
        raise Break("data-dependent-branch", f"{name} may raise")


@contextmanager
def watched(tx: Tracer) -> Iterator[Callable[[], bool]]:
    """Execute code of which, behind the block, can be asked whether it did more than compute."""
    journal = tx.journal
    begun, journal.oldest_touched = journal.oldest_touched, sys.maxsize
    born, before = next(BIRTHS), _outside(tx)
    touched = born
    try:
        yield lambda: touched < born or _outside(tx) != before
    finally:
        touched = journal.oldest_touched
        journal.oldest_touched = min(begun, touched)


def _outside(tx: Tracer) -> tuple[object, ...]:
    """Return what changes with effects, and with the modes that the program is in."""
    effects = len(tx.effects.changed), len(tx.effects.globals), tx.calls.count
    return *effects, *modes_of(tx)


def _forward(tx: Tracer, cls: ClassValue, ctx: UserObject, args: list[Value]) -> list[Value]:
    forward = cls.getattr(tx, "forward")
    if cls.obj.setup_context is _NO_SETUP:
        result = forward.call(tx, [ctx, *args], {})
    else:
        result = forward.call(tx, list(args), {})
        cls.getattr(tx, "setup_context").call(tx, [ctx, tx.tuple_of(args), result], {})
    return list(result.items) if isinstance(result, SequenceValue) else [result]


def _backward(tx: Tracer, cls: ClassValue, ctx: UserObject, outputs: list[Value]) -> None:
    ctx.attrs["saved_tensors"] = ctx.attrs.get("to_save", TupleValue([]))
    grads = []
    for output in outputs:
        assert isinstance(output, TensorValue) or output.is_constant()
        is_tensor = isinstance(output, TensorValue)
        grads.append(output.call_method(tx, "clone", [], {}) if is_tensor else NONE)
    cls.getattr(tx, "backward").call(tx, [ctx, *grads], {})


def _nodes_of(values: Sequence[Value]) -> set[Node]:
    found: set[Node] = set()
    for value in values:
        if isinstance(value, TensorValue):
            found.add(value.node)
        elif isinstance(value, SequenceValue):
            found |= _nodes_of(value.items)
    return found
