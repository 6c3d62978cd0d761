"""Rows of jagged tensors: views of the values between two offsets.

The offsets become symbolic sizes of the graph, also without `capture_scalar_outputs`.
"""

from __future__ import annotations

from typing import Any

import torch
from weft_core.inlinable import inlinable
from weft_core.jagged import is_jagged

from weft_capture.functions.language.polyfilled import polyfill
from weft_capture.functions.table import rule
from weft_capture.functions.torch.tensors import getitem
from weft_capture.model.constant import Constant, constant
from weft_capture.model.containers import TupleValue
from weft_capture.model.protocol import Tracer, Value, method
from weft_capture.tensors.subclass import WrapperValue
from weft_capture.tensors.tensor import SymValue


def _read(method: str, tensor: Any, *args: Any) -> Any:
    """Call a method while capture may read numbers and sizes from tensors."""


@rule(_read)
def _reading(tx: Tracer, method: Value, tensor: Value, *args: Value) -> Value:
    before, tx.graph.reading = tx.graph.reading, True
    try:
        return tensor.call_method(tx, method.as_constant(), list(args), {})
    finally:
        tx.graph.reading = before


@inlinable
def _rows(tensor: Any) -> Any:
    """Return all rows."""
    sizes = _read("tolist", tensor.offsets().diff().cpu())
    return _read("split", tensor.values(), sizes, tensor._ragged_idx - 1)


@inlinable
def _row(tensor: Any, at: int) -> Any:
    """Return one row, by splitting the values before and after it."""
    values, offsets, dim = tensor.values(), tensor.offsets(), tensor._ragged_idx - 1
    ends = offsets[at : at + 2]
    start, size = _read("tolist", torch.cat([ends[:1], ends.diff()]).cpu())
    return _read("split", values, [start, size, values.size(dim) - start - size], dim)[1]


@inlinable
def _select_masked(tensor: Any, mask: Any) -> Any:
    """Return the chosen elements of each row, as `torch.nested.masked_select` does."""
    if tensor.layout != torch.strided or mask.layout != torch.strided:
        raise RuntimeError("masked_select requires a strided tensor and a strided mask")
    chosen = _read("masked_select", tensor, mask)
    offsets = mask.expand(tensor.shape).sum(-1).view(-1).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(chosen, torch.nn.functional.pad(offsets, (1, 0)))


polyfill(torch.nested.masked_select, _select_masked)


def _is_whole(tx: Tracer, tensor: Value) -> bool:
    """Say whether the rows of a tensor are contiguous."""
    jagged = isinstance(tensor, WrapperValue) and is_jagged(tensor.cls)
    return jagged and tensor.fake._lengths is None and not tx.transforms  # type: ignore[attr-defined]


@method(WrapperValue, "unbind")
def _unbind(tx: Tracer, self: WrapperValue, dim: Value | None = None) -> Value:
    if _is_whole(tx, self) and (dim is None or dim.as_constant() == 0):
        return tx.const_object(_rows).tp_call(tx, [self], {})
    return tx.graph.emit("call_method", "unbind", [self, dim or constant(0)], {})


@rule(torch.unbind)
def _unbind_any(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    if args and _is_whole(tx, args[0]):
        return args[0].call_method(tx, "unbind", list(args[1:]), kwargs)
    return tx.graph.emit("call_function", torch.unbind, list(args), kwargs)


@method(WrapperValue, "__getitem__")
def _getitem(tx: Tracer, self: WrapperValue, key: Value) -> Value:
    first, *rest = key.items if type(key) is TupleValue and key.items else [key]
    fixed = isinstance(first, Constant) or (isinstance(first, SymValue) and not first.is_data())
    at: Any = first.as_constant() if fixed else None  # this fixes a size, like the number of rows
    count = int(self.fake.shape[0]) if type(at) is int and _is_whole(tx, self) else 0
    if not count or not -count <= at < count:
        return getitem(tx, self, key)
    row = tx.const_object(_row).tp_call(tx, [self, constant(at % count)], {})
    return row.call_method(tx, "__getitem__", [tx.tuple_of(rest)], {}) if rest else row
