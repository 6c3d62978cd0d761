"""Tensor attributes and methods that are not simply nodes of the graph.

Sizes, strides and counts are constants where the shape is static and symbolic ints where it is not.
"""

from __future__ import annotations

from typing import Any

import torch

from weft_capture.breaks import Break
from weft_capture.rules.operators import combined
from weft_capture.rules.table import GRAPH
from weft_capture.values import floats
from weft_capture.values.base import Tracer, Value, method
from weft_capture.values.constant import NONE, constant
from weft_capture.values.containers import ListValue, SizeValue
from weft_capture.values.tensor import SymValue, TensorValue, tensor_attribute

Dim = Value | None
_COUNTERS = ("torch.optim.asgd",)  # modules in which a number of the state decides a branch
GRAPH.update((torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_not))


@tensor_attribute("shape")
def _shape(tx: Tracer, self: TensorValue) -> Value:
    return SizeValue([tx.graph.size(self, dim) for dim in range(self.fake.dim())])


@tensor_attribute("data")
def _data(tx: Tracer, self: TensorValue) -> Value:
    fake = self.fake.detach()  # which counts the tensor's own writes, so that none is missed
    node = tx.graph.node("call_function", getattr, (self.node, "data"), {}, fake)
    return tx.graph.result(node, fake)


@method(TensorValue, "set:data")
def _set_data(tx: Tracer, self: TensorValue, value: Value) -> None:
    """Let the value stand for another tensor; one from outside is changed after the graph."""
    if not isinstance(value, TensorValue) or tx.transforms or value.fake.requires_grad:
        raise Break("unsupported-value", "setting data of a tensor")
    fakes = self.fake, value.fake
    layouts = [(fake.shape, fake.stride(), fake.dtype, fake.device) for fake in fakes]
    if layouts[0] != layouts[1]:
        raise Break("unsupported-value", "setting data of another shape or dtype")
    if self.source is not None:
        self.store(tx, "data", value)
    elif self.fake.requires_grad:
        raise Break("unsupported-value", "setting data of a tensor with a history")
    else:
        tx.graph.replace(self, value.getattr(tx, "data"))


@method(TensorValue, "size")
def _size(tx: Tracer, self: TensorValue, dim: Dim = None) -> Value:
    if dim is None or dim is NONE:
        return _shape(tx, self)
    rank, number = self.fake.dim(), int(dim.as_constant())
    if not -rank <= number < rank:
        message = f"expected to be in range of [{-rank}, {rank - 1}], but got {number}"
        tx.raise_(IndexError, f"Dimension out of range ({message})")
    return tx.graph.size(self, number % rank)


@method(TensorValue, "numel", "nelement")
def _numel(tx: Tracer, self: TensorValue) -> Value:
    return combined(tx, "*", constant(1), _shape(tx, self))


@method(TensorValue, "__len__")
def _len(tx: Tracer, self: TensorValue) -> Value:
    if self.fake.dim() == 0:
        tx.raise_(TypeError, "len() of a 0-d tensor")
    return tx.graph.size(self, 0)


@method(TensorValue, "new")
def _new(tx: Tracer, self: TensorValue, *args: Value, **kwargs: Value) -> Value:
    """Make a tensor of a size, or of numbers: in a graph a size would be a tuple of numbers."""
    name = "new_empty" if any(isinstance(arg, SizeValue) for arg in args) else "new"
    return tx.graph.emit("call_method", name, [self, *args], kwargs)


@method(TensorValue, "item")
def _item(tx: Tracer, self: TensorValue) -> Value:
    """Read the number: a float stays a tensor of the graph as long as it can (`floats`)."""
    if tx.transforms:
        raise Break("data-dependent-value", "a number out of a tensor in a function transform")
    count = self.fake.numel()
    if isinstance(count, int) and count != 1:
        raise Break("op-failed", "item of a tensor with more than one element")
    if not self.fake.is_floating_point():
        if not tx.graph.reads_data():
            raise Break("data-dependent-value", "Tensor.item")
        return tx.graph.emit("call_method", "item", [self], {})
    scalar = self.call_method(tx, "reshape", [tx.tuple_of([])], {}) if self.fake.dim() else self
    if self.fake.dtype is torch.float64:  # no copy is made below, and the tensor may change
        scalar = scalar.call_method(tx, "clone", [], {})
    own = tx.frame is not None and tx.frame.function.globals.get("__name__") in _COUNTERS
    return floats.computed(tx, scalar, floats.before_graph(tx, self) if own else None)


@method(TensorValue, "__int__")
def _int(tx: Tracer, self: TensorValue) -> Value:
    if self.fake.is_floating_point():
        return tx.builtin(int, floats.symbol(tx, _item(tx, self)))
    whole = self.call_method(tx, "to", [constant(torch.int64)], {})
    return whole.call_method(tx, "item", [], {})


@method(TensorValue, "__float__")
def _float(tx: Tracer, self: TensorValue) -> Value:
    whole = not self.fake.is_floating_point()
    wide: Any = self.call_method(tx, "to", [constant(torch.float64)], {}) if whole else self
    return _item(tx, wide)


@method(TensorValue, "__bool__")
def _bool(tx: Tracer, self: TensorValue) -> Value:
    if not tx.graph.reads_data():
        return constant(self.truth(tx))
    return self.call_method(tx, "to", [constant(torch.bool)], {}).call_method(tx, "item", [], {})


@method(TensorValue, "tolist")
def _tolist(tx: Tracer, self: TensorValue) -> Value:
    if not tx.graph.reads_data():
        raise Break("data-dependent-value", "Tensor.tolist")
    if self.fake.dim() == 0:
        return self.call_method(tx, "item", [], {})
    rows = self.call_method(tx, "unbind", [constant(0)], {}).unpack(tx)
    return ListValue([row.call_method(tx, "tolist", [], {}) for row in rows])


@tensor_attribute("__class__")
def _class(tx: Tracer, self: TensorValue) -> Value:
    return tx.const_object(self.cls)


@method(SymValue, "__index__", "__int__")
def _index(tx: Tracer, self: SymValue) -> Value:
    return self


@method(SymValue, "is_integer")
def _is_integer(tx: Tracer, self: SymValue) -> Value:
    return constant(self.python_type() is int)
