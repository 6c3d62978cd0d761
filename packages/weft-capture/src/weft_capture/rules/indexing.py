"""Tensor items read and written, so that an index that is a symbolic int stays symbolic.

torch's C++ parser of an index turns every int into a plain one, which would compile each position
of a cache anew. `select` takes a symbolic int, so such entries are selected first and the rest of
the index is applied to what they leave: integers in an index of torch mean just that, also beside
index tensors (`applySlicing` in torch/csrc/autograd/python_variable_indexing.cpp).
"""

from __future__ import annotations

import operator

import torch

from weft_capture.values.base import Kwargs, Tracer, Value, method
from weft_capture.values.constant import constant
from weft_capture.values.containers import ListValue, TupleValue
from weft_capture.values.tensor import SymValue, TensorValue


def _is_symbolic(entry: Value) -> bool:
    return isinstance(entry, SymValue) and entry.python_type() is int


def _width(entry: Value) -> int:
    """How many dimensions one entry of an index (no Ellipsis) consumes."""
    kind = entry.python_type()
    if issubclass(kind, torch.Tensor):
        masks = (torch.bool, torch.uint8)
        return entry.fake.dim() if entry.fake.dtype in masks else 1  # type: ignore[attr-defined]
    return 0 if kind in (type(None), bool) else 1


def _selected(tx: Tracer, tensor: TensorValue, key: Value) -> tuple[Value, Value]:
    """The tensor after its symbolic entries, and what is left of the index."""
    entries = list(key.items) if type(key) is TupleValue else [key]
    if not any(map(_is_symbolic, entries)):
        return tensor, key
    dots = [i for i, entry in enumerate(entries) if entry.python_type() is type(Ellipsis)]
    if len(dots) > 1:
        return tensor, key
    widths = [0 if i in dots else _width(entry) for i, entry in enumerate(entries)]
    spare = tensor.fake.dim() - sum(widths)
    if spare < 0:  # too many indices: torch says so
        return tensor, key
    for i in dots:
        widths[i] = spare
    value: Value = tensor
    for i in reversed(range(len(entries))):
        if _is_symbolic(entries[i]):
            at = constant(sum(widths[:i]))
            value = tx.graph.emit("call_method", "select", [value, at, entries.pop(i)], {})
    return value, TupleValue(entries or [constant(...)])


def _positions(tx: Tracer, tensor: TensorValue, key: Value) -> Value | None:
    """An index of ints and tensors as tensors; None for any other."""
    entries = list(key.items) if isinstance(key, TupleValue | ListValue) else [key]
    kinds = [entry.python_type() for entry in entries]
    if not all(kind is int or issubclass(kind, torch.Tensor) for kind in kinds):
        return None
    where: Kwargs = {"device": constant(tensor.fake.device)}
    numbers = [
        entry if isinstance(entry, TensorValue) else tx.call_builtin(torch.tensor, [entry], where)
        for entry in entries
    ]
    return ListValue(numbers)


@method(TensorValue, "__getitem__")
def _getitem(tx: Tracer, self: TensorValue, key: Value) -> Value:
    if tx.gathering and (positions := _positions(tx, self, key)):
        return tx.graph.emit("call_function", torch.ops.aten.index.Tensor, [self, positions], {})
    tensor, rest = _selected(tx, self, key)
    return tx.graph.emit("call_function", operator.getitem, [tensor, rest], {})


@method(TensorValue, "__setitem__")
def _setitem(tx: Tracer, self: TensorValue, key: Value, value: Value) -> None:
    tensor, rest = _selected(tx, self, key)
    tx.graph.emit("call_function", operator.setitem, [tensor, rest, value], {})
