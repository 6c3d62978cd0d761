"""Code that is one call in the graph: symbolic execution of it, and who captures backward passes.

It is executed symbolically only to learn its guards, its operations and its side effects. Where
another stage captures backward passes, `backward()` and `autograd.grad` of a captured program are
eager calls between its graphs, made under the flags of the calling function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node
from weft_guards.sources import CallSource

from weft_capture import frame
from weft_capture.breaks import Break
from weft_capture.effects.checks import CHECK
from weft_capture.model.containers import SequenceValue
from weft_capture.model.protocol import BIRTHS, Raised, Tracer, Value
from weft_capture.model.region_marks import modes_of, nodes_after
from weft_capture.tensors.tensor import TensorValue


def _never() -> bool:
    return False


class _Engine:
    is_elsewhere: Callable[[], bool] = staticmethod(_never)


def leave_backwards(predicate: Callable[[], bool]) -> None:
    """Leave backward passes to another stage where `predicate()` is true in the current thread."""
    _Engine.is_elsewhere = staticmethod(predicate)


def is_elsewhere() -> bool:
    """Say whether another stage captures a backward pass that begins now in this thread."""
    return _Engine.is_elsewhere()


def running() -> Any:
    """Return the `Capture` whose function this thread runs, None outside of optimised calls."""
    return frame.current()


@contextmanager
def one_graph_call(tx: Tracer) -> Iterator[None]:
    """Execute code that is one call of the graph, with the backward passes in it."""
    tx.opaque_depth += 1
    try:
        yield
    finally:
        tx.opaque_depth -= 1


def check_backward(tx: Tracer, detail: str) -> None:
    """Break at a backward pass that another stage captures; guard who does."""
    if tx.opaque_depth:
        return
    elsewhere = is_elsewhere()
    tx.guard(CallSource(is_elsewhere, ()), "CONST", elsewhere)
    if elsewhere:
        raise Break("backward", detail)


@contextmanager
def rehearsal(tx: Tracer, name: str, args: Sequence[Value]) -> Iterator[None]:
    """Execute a function of the program symbolically that the tracer of the graph will call.

    Raises:
        Break: when it cannot be captured, or does more than compute with `args`.
    """
    before = torch.is_grad_enabled()
    policy, tx.policy = tx.policy, None  # numbers it reads may not become inputs of the graph
    try:
        with isolated(tx, name) as nodes, one_graph_call(tx):
            tx.set_grad_mode(False)
            yield
            tx.set_grad_mode(before)
    finally:
        tx.policy = policy
    foreign = {n for node in nodes for n in node.all_input_nodes} - set(nodes) - _nodes_of(args)
    if foreign:
        raise Break("higher-order-op", f"{name} uses tensors that are not its arguments")
    for node in reversed(nodes):
        tx.graph.discard(node)


@contextmanager
def isolated(tx: Tracer, name: str) -> Iterator[list[Node]]:
    """Execute code that only computes; afterwards the list holds the operations that it added.

    Raises:
        Break: when it has side effects, such as a change of an existing object.
    """
    nodes: list[Node] = []
    last, sent = next(iter(reversed(tx.graph.graph.nodes)), None), tx.graph.collectives
    try:
        with watched(tx) as has_effects:
            yield nodes
    except Raised as error:
        raise Break("higher-order-op", f"{name} raises {error.value.describe()}") from None
    if has_effects() or tx.graph.collectives != sent:
        raise Break("higher-order-op", f"{name} has side effects")
    nodes += nodes_after(tx, last)
    if any(node.target is CHECK for node in nodes):
        raise Break("data-dependent-branch", f"{name} may raise")


@contextmanager
def watched(tx: Tracer) -> Iterator[Callable[[], bool]]:
    """Yield a function that says, after the block, whether the block had side effects."""
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
    """Return the state that side effects and changes of modes alter."""
    effects = len(tx.effects.changed), len(tx.effects.globals), tx.calls.count
    return *effects, *modes_of(tx)


def _nodes_of(values: Sequence[Value]) -> set[Node]:
    nodes: set[Node] = set()
    for value in values:
        if isinstance(value, TensorValue):
            nodes.add(value.node)
        elif isinstance(value, SequenceValue):
            nodes |= _nodes_of(value.items)
    return nodes
