"""Execute code symbolically for what it shows: guards, operations, whether it has effects."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.fx import Node

from weft_capture.breaks import Break
from weft_capture.effects import engine
from weft_capture.effects.runtime_asserts import CHECK
from weft_capture.model.containers import SequenceValue
from weft_capture.model.protocol import BIRTHS, Raised, Tracer, Value
from weft_capture.model.region_marks import modes_of, nodes_after
from weft_capture.tensors.tensor import TensorValue


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
        raise Break("higher-order-op", f"{name} uses tensors that are not its arguments")
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
        raise Break("higher-order-op", f"{name} raises {error.value.describe()}") from None
    if has_effects() or tx.graph.collectives != sent:
        raise Break("higher-order-op", f"{name} has effects outside of itself")
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


def _nodes_of(values: Sequence[Value]) -> set[Node]:
    found: set[Node] = set()
    for value in values:
        if isinstance(value, TensorValue):
            found.add(value.node)
        elif isinstance(value, SequenceValue):
            found |= _nodes_of(value.items)
    return found
