"""Tensor attributes and methods that are not plain nodes of the graph.

Sizes, strides and counts are constants where the shape is static and symbolic ints where it is not.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from weft_guards.payloads import shares_memory

from weft_capture.breaks import Break
from weft_capture.functions.table import graph
from weft_capture.model.constant import FALSE, NONE, TRUE, constant
from weft_capture.model.containers import ListValue, SequenceValue, SizeValue, TupleValue
from weft_capture.model.protocol import Kwargs, Output, Tracer, Value, method
from weft_capture.model.slots import combined
from weft_capture.tensors import symbolic_scalars
from weft_capture.tensors.scalar_operands import before_graph, numbers
from weft_capture.tensors.subclass import WrapperValue
from weft_capture.tensors.tensor import SymValue, TensorValue, memory_of

Dim = Value | None
_COUNTERS = ("torch.optim.asgd",)  # modules in which a number of the state decides a branch
graph(torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_not)
graph(torch.nested.to_padded_tensor)


@method(TensorValue, "get:shape")
def _shape(tx: Tracer, self: TensorValue) -> Value:
    return SizeValue([tx.graph.size(self, dim) for dim in range(self.fake.dim())])


@method(TensorValue, "get:data")
def _data(tx: Tracer, self: TensorValue) -> Value:
    fake = self.fake.detach()  # shares the version counter of the tensor
    node = tx.graph.node("call_function", getattr, (self.node, "data"), {}, fake)
    return tx.graph.result(node, fake)


@method(TensorValue, "set:data")
def _set_data(tx: Tracer, self: TensorValue, value: Value) -> None:
    """Replace the tensor of the value; an input tensor is changed after the graph."""
    if not isinstance(value, TensorValue) or tx.transforms or value.fake.requires_grad:
        raise Break("tensor-storage", "setting data of a tensor")
    if self.source is not None and not self.fake.requires_grad and self.owner is None:
        data = value.tp_getattro(tx, "data")
        self.store(tx, "data", data)
        tx.graph.replace(self, data)  # an operation on the tensor uses the new memory
        return
    fakes = self.fake, value.fake
    layouts = [(fake.shape, fake.stride(), fake.dtype, fake.device) for fake in fakes]
    if layouts[0] != layouts[1]:
        raise Break("tensor-storage", "setting data of another shape or dtype")
    if self.source is not None:
        self.store(tx, "data", value)
    elif self.fake.requires_grad:
        raise Break("tensor-storage", "setting data of a tensor with a history")
    else:
        tx.graph.replace(self, value.tp_getattro(tx, "data"))


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
    if isinstance(self, WrapperValue):
        return tx.graph.emit("call_method", "numel", [self], {})
    return combined(tx, "*", constant(1), _shape(tx, self))


method(TensorValue, "__len__")(lambda tx, self: self.sq_length(tx))


@method(TensorValue, "new")
def _new(tx: Tracer, self: TensorValue, *args: Value, **kwargs: Value) -> Value:
    """Create a tensor from a size or numbers, which a graph could not distinguish."""
    name = "new_empty" if any(isinstance(arg, SizeValue) for arg in args) else "new"
    return tx.graph.emit("call_method", name, [self, *args], kwargs)


@method(TensorValue, "fill_diagonal_")
def _fill_diagonal(tx: Tracer, self: TensorValue, fill_value: Value, wrap: Value = FALSE) -> Value:
    """Fill a view: the operator computes one from strides, which are others where it is traced."""
    if self.fake.dim() != 2 or wrap.nb_bool(tx) or tx.transforms:
        raise Break(
            "unsupported-arguments", "fill_diagonal_ with wrap, or of more than two dimensions"
        )
    self.call_method(tx, "diagonal", [], {}).call_method(tx, "fill_", [fill_value], {})
    return self


@method(TensorValue, "item")
def _item(tx: Tracer, self: TensorValue) -> Value:
    """Read the number; a float becomes a symbolic float (`symbolic_scalars`)."""
    if tx.transforms:
        raise Break("data-dependent-value", "Tensor.item in a function transform")
    count = self.fake.numel()
    if isinstance(count, int) and count != 1:
        raise Break("operator-error", "Tensor.item of more than one element")
    if not self.fake.is_floating_point():
        values = numbers(self)
        if values is not None:
            return tx.literal(pytree.tree_leaves(values)[0])
        if not tx.graph.reads_data():
            raise Break("data-dependent-value", "Tensor.item")
        return tx.graph.emit("call_method", "item", [self], {})
    scalar = self.call_method(tx, "reshape", [tx.tuple_of([])], {}) if self.fake.dim() else self
    if self.fake.dtype is torch.float64:  # no copy is made below, and the tensor may change
        scalar = scalar.call_method(tx, "clone", [], {})
    is_counter = tx.frame is not None and tx.frame.function.globals.get("__name__") in _COUNTERS
    return symbolic_scalars.computed(tx, scalar, before_graph(tx, self) if is_counter else None)


@method(TensorValue, "__int__")
def _int(tx: Tracer, self: TensorValue) -> Value:
    if self.fake.is_floating_point():
        return tx.builtin(int, symbolic_scalars.symbol(tx, _item(tx, self)))
    truncated = self.call_method(tx, "to", [constant(torch.int64)], {})
    return truncated.call_method(tx, "item", [], {})


@method(TensorValue, "__float__")
def _float(tx: Tracer, self: TensorValue) -> Value:
    integral = not self.fake.is_floating_point()
    wide: Any = self.call_method(tx, "to", [constant(torch.float64)], {}) if integral else self
    return _item(tx, wide)


@method(TensorValue, "__bool__")
def _bool(tx: Tracer, self: TensorValue) -> Value:
    if not tx.graph.reads_data():
        return constant(self.nb_bool(tx))
    return self.call_method(tx, "to", [constant(torch.bool)], {}).call_method(tx, "item", [], {})


@method(TensorValue, "tolist")
def _tolist(tx: Tracer, self: TensorValue) -> Value:
    values = numbers(self)
    if values is not None:
        return tx.literal(values)
    if not tx.graph.reads_data():
        raise Break("data-dependent-value", "Tensor.tolist")
    if self.fake.dim() == 0:
        return self.call_method(tx, "item", [], {})
    rows = self.call_method(tx, "unbind", [constant(0)], {}).unpack(tx)
    return ListValue([row.call_method(tx, "tolist", [], {}) for row in rows])


method(SymValue, "__index__", "__int__")(lambda tx, self: self)
method(SymValue, "is_integer")(lambda tx, self: constant(self.python_type() is int))


# ---- items read and written, so that an index that is a symbolic int stays symbolic
#
# torch's C++ parser of an index turns every int into a plain one, which would compile each position
# of a cache anew. `select` takes a symbolic int, so such entries are selected first and the rest of
# the index is applied to what they leave: integers in an index of torch mean just that, also beside
# index tensors (`applySlicing` in torch/csrc/autograd/python_variable_indexing.cpp).


def _is_symbolic(entry: Value) -> bool:
    return isinstance(entry, SymValue) and entry.python_type() is int


def _width(entry: Value) -> int:
    """How many dimensions one entry of an index (no Ellipsis) consumes."""
    entry_type = entry.python_type()
    if issubclass(entry_type, torch.Tensor):
        masks = (torch.bool, torch.uint8)
        return entry.fake.dim() if entry.fake.dtype in masks else 1  # type: ignore[attr-defined]
    return 0 if entry_type in (type(None), bool) else 1


def _is_position(entry: Value) -> bool:
    """Say whether an entry is an integer in a tensor."""
    return isinstance(entry, TensorValue) and not entry.fake.dim() and entry.fake.dtype in _SIGNED


_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def _selected(
    tx: Tracer, tensor: TensorValue, key: Value, copied_by: Value | None = None
) -> tuple[Value, Value]:
    """The tensor after its symbolic entries, and what is left of the index.

    `copied_by`: integers in tensors are such entries, too, and what they select is a copy; the
    program's own index.
    """
    entries = list(key.items) if type(key) is TupleValue else [key]
    plain = type(tensor) is TensorValue and not (tx.overrides.modes or tx.transforms)
    copies = copied_by is not None and plain
    if not any(_is_symbolic(entry) or (copies and _is_position(entry)) for entry in entries):
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
    found = [i for i, entry in enumerate(entries) if copies and _is_position(entry)]
    if found and copied_by is not None:
        value = _copied(tx, tensor, {sum(widths[:i]): entries[i] for i in found}, copied_by)
    for i in reversed(found):
        del entries[i], widths[i]
    for i in reversed(range(len(entries))):
        if _is_symbolic(entries[i]):
            at = constant(sum(widths[:i]))
            value = tx.graph.emit("call_method", "select", [value, at, entries.pop(i)], {})
    return value, TupleValue(entries or [constant(...)])


def _as_row(tx: Tracer, key: Value) -> Value:
    """Make the integers in tensors with which an index begins tensors of one dimension.

    The place that they select has one dimension more in front, which an assignment takes no notice
    of, and their values are not read.
    """
    entries = list(key.items) if type(key) is TupleValue else [key]
    first = next((i for i, entry in enumerate(entries) if not _is_position(entry)), len(entries))
    rest = [entry.python_type() for entry in entries[first:]]
    if not all(e in (int, slice, type(...), type(None)) for e in rest):
        return key
    one = constant(1)
    for i in range(first):
        entries[i] = (
            entries[i].call_method(tx, "long", [], {}).call_method(tx, "reshape", [one], {})
        )
    return TupleValue(entries) if first else key


def _copied(tx: Tracer, tensor: TensorValue, at: dict[int, Value], key: Value) -> Value:
    """Select an item by gathering it, where the program cannot tell that this is a copy.

    Args:
        at: dimension -> the position in it, whose value is not read.
        key: the whole index, with which the program may write the item back.
    """
    if not tensor.fake.is_contiguous() or tensor.fake.layout is not torch.strided:
        raise Break("data-dependent-value", "a number in a tensor as an index")
    index: list[Value] = [NONE] * (max(at) + 1)
    for dim, position in at.items():
        index[dim] = position.call_method(tx, "long", [], {})
    args = [tensor, ListValue(index)]
    copy = tx.graph.emit("call_function", torch.ops.aten.index.Tensor, args, {})
    assert isinstance(copy, TensorValue)
    tx.watch(_Copied(tx.steps.now, tensor.fake, copy.fake, list(at), key, tx.graph.mode.writes))
    return copy


@dataclass(eq=False)
class _Copied:
    """A copy of an item of `base`, which eager's result shares memory with.

    `item` is what the whole index selects; `stored` are the steps that write it back, as
    `x[i] += 1` does.
    """

    step: int
    base: torch.Tensor
    copy: torch.Tensor
    dims: list[int]
    key: Value
    writes: int
    item: object = None
    stored: list[int] = field(default_factory=list)

    def check(self, tx: Tracer, out: Output) -> None:
        """Break at the step where the program could tell."""
        memory, bases = memory_of(self.copy), self._bases(tx)
        uncounted = self.base.is_inference() or self.copy.is_inference()
        if uncounted and tx.graph.mode.writes != self.writes:
            raise Break("data-dependent-value", "a write in inference mode", self.step)
        after = [row for row in tx.graph.written if row[0] >= self.step]
        changed = [at for at, where in after if bases & where and at not in self.stored]
        told = changed and max(self._reads(tx, memory), default=-1) >= min(changed)
        for at in (at for at, where in after if memory in where):
            back = min((to for to in self.stored if to >= at), default=sys.maxsize)
            between = (*self._reads(tx, *bases), *changed)
            told = told or back == sys.maxsize or any(at < n < back for n in between)
        if told:
            raise Break("data-dependent-value", "a write to an item, or around it", self.step)
        leaving = {memory_of(node.meta.get("example_value")) for node in out.graph_outputs}
        if memory not in leaving:
            return
        view = functools.reduce(lambda t, dim: t.select(dim, 0), sorted(self.dims)[::-1], self.base)
        others = [w for w in tx.watched if isinstance(w, _Copied) and w is not self]
        alike = [memory_of(w.copy) for w in others if bases & w._bases(tx)]
        outside = bases & (leaving | tx.graph.input_memory()) or leaving.intersection(alike)
        if changed or outside or view.stride() != self.copy.stride():
            raise Break("data-dependent-value", "an item leaves the graph, as a view", self.step)

    def _bases(self, tx: Tracer) -> set[object]:
        """Return the memory of the base, and of what it is a copied item of in turn."""
        found = {memory_of(self.base)}
        for watcher in reversed(tx.watched):
            if isinstance(watcher, _Copied) and memory_of(watcher.copy) in found:
                found.add(memory_of(watcher.base))
        inputs = tx.graph.input_memory()  # which may share their memory
        return found | inputs if found & inputs else found

    def _reads(self, tx: Tracer, *memory: object) -> list[int]:
        """Return the steps that read some memory."""
        return [
            step
            for node, step in tx.graph.step_of_node.items()
            if not node._erased and step >= self.step
            for source in node.all_input_nodes
            if memory_of(source.meta.get("example_value")) in memory
        ]


def _note_stored(tx: Tracer, tensor: TensorValue, key: Value, value: TensorValue) -> None:
    """Note that an item is written back where it was read."""
    for watcher in tx.watched:
        known = isinstance(watcher, _Copied) and watcher.item is value.fake
        if known and watcher.base is tensor.fake and watcher.key is key:
            watcher.stored.append(tx.steps.now)
            tx.journal.on_rollback(watcher.stored.pop)


def _positions(tx: Tracer, tensor: TensorValue, key: Value) -> Value | None:
    """An index of ints and tensors as tensors; None for any other."""
    entries = list(key.items) if isinstance(key, SequenceValue) else [key]
    entry_types = [entry.python_type() for entry in entries]
    if not all(e is int or issubclass(e, torch.Tensor) for e in entry_types):
        return None
    where: Kwargs = {"device": constant(tensor.fake.device)}
    numbers = [
        entry if isinstance(entry, TensorValue) else tx.call_builtin(torch.tensor, [entry], where)
        for entry in entries
    ]
    return ListValue(numbers)


AS_INDEX: dict[type[Value], Callable[[Tracer, TensorValue, Any], Value]] = {}
"""Class of a value -> function that converts it to a tensor index."""


def _plain_index(tx: Tracer, tensor: TensorValue, key: Value) -> Value:
    """Return an index with tensors for arrays of integers and masks, and ints for scalars."""
    if type(key) is TupleValue:
        return TupleValue([_plain_index(tx, tensor, tx.force(item)) for item in key.items])
    if isinstance(key, symbolic_scalars.SymFloatValue):
        return key.size()
    convert = AS_INDEX.get(type(key))
    return key if convert is None else convert(tx, tensor, key)


@method(TensorValue, "__getitem__")
def getitem(tx: Tracer, self: TensorValue, key: Value) -> Value:
    """Index a tensor."""
    own, key = key, _plain_index(tx, self, key)
    if tx.gathering and (positions := _positions(tx, self, key)):
        return tx.graph.emit("call_function", torch.ops.aten.index.Tensor, [self, positions], {})
    masks = isinstance(key, TensorValue) and key.fake.dtype is torch.bool and key.fake.dim() == 1
    mask = numbers(key, fix=True) if masks else None
    if mask and len(mask) == self.fake.shape[0] and any(mask):
        key = tx.builtin(torch.tensor, tx.literal([i for i, s in enumerate(mask) if s]))
    result, rest = _selected(tx, self, key, own)
    if rest is key or not rest.is_constant() or rest.as_constant() != (...,):
        result = tx.graph.emit("call_function", operator.getitem, [result, rest], {})
    last = tx.watched[-1] if tx.watched else None
    if isinstance(last, _Copied) and last.key is own and last.step == tx.steps.now:
        last.item = result.example()
    return result


@method(TensorValue, "__setitem__")
def _setitem(tx: Tracer, self: TensorValue, key: Value, value: Value) -> None:
    plain = _plain_index(tx, self, key)
    row = _as_row(tx, plain)
    if row is not plain and isinstance(value, TensorValue):
        _note_stored(tx, self, key, value)
        reals: list[Any] = [self.real, value.real]
        if None not in reals and shares_memory(reals[:1], reals[1:]):  # the item, after `+=`
            raise Break("data-dependent-value", "an item that is set to itself")
        value = value.call_method(tx, "to", [constant(self.fake.dtype)], {"copy": TRUE})
    tensor, rest = _selected(tx, self, row)
    truth = isinstance(rest, TensorValue) and rest.fake.dtype is torch.bool and not rest.fake.dim()
    if truth and self.fake.is_floating_point() and value.python_type() in (bool, int, float):
        # An index would be read.
        tx.graph.emit("call_method", "masked_fill_", [tensor, rest, value], {})
    else:
        tx.graph.emit("call_function", operator.setitem, [tensor, rest, value], {})
