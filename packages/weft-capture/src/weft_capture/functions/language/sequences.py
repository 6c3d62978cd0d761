"""Methods of list, tuple, deque and torch.Size: the real ones, on real containers of values.

Methods that compare items work on proxies. Methods of all containers (`iter` and `reversed`, called
as methods) are here, too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from weft_guards.sources import CallSource, ConstSource, ItemSource, Source, is_literal

from weft_capture.breaks import Break, NotConstant
from weft_capture.functions.classes import new_object
from weft_capture.functions.language.builtins import sort_proxies
from weft_capture.functions.language.type_checks import indexed
from weft_capture.functions.table import rule
from weft_capture.model.constant import (
    FALSE,
    NONE,
    NOT_IMPLEMENTED,
    Constant,
    Varying,
    constant,
    fold,
    real_call,
)
from weft_capture.model.containers import (
    ListValue,
    NamedTupleValue,
    RangeValue,
    SequenceValue,
    SetValue,
    SizeValue,
    SliceValue,
    TupleValue,
    is_named,
)
from weft_capture.model.dicts import DictValue, DictView
from weft_capture.model.iterators import DequeValue
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Tracer, Value, method, method_of_each
from weft_capture.model.proxy import Proxy
from weft_capture.model.slots import (
    COMPARE,
    combined,
    contains_by_iteration,
    is_sequence,
    listed,
    steps,
    without_class,
)
from weft_capture.python_compat import type_name
from weft_capture.tensors.runtime_values import origins
from weft_capture.tensors.scalar_operands import numbers
from weft_capture.tensors.tensor import SymValue, TensorValue, selected


def _key(tx: Tracer, value: Value) -> Any:
    """Return an index or slice as an argument of a real method."""
    value = indexed(tx, value)
    if isinstance(value, SliceValue):
        return slice(*(_key(tx, bound) for bound in value.parts))
    key_type = value.python_type()
    if isinstance(value, UserObject) and not hasattr(key_type, "__index__"):
        return _named(key_type)
    try:
        return value.as_constant()
    except NotConstant:
        if hasattr(key_type, "__index__"):
            raise
        return _named(key_type)


def _named(cls: type) -> Any:
    """Return an object whose class has this name in error messages."""
    return type(type_name(cls), (), {})()


def _item(tx: Tracer, value: Value) -> Value:
    return value


_INVERSE = {
    ("append", 1): "pop", ("appendleft", 1): "popleft",
    ("pop", 0): "append", ("popleft", 0): "appendleft",
}  # fmt: skip


def _undo(self: Any, name: str, args: tuple[Value, ...], items: Any) -> Any:
    """Return the undo function of a change at an end of a list or deque; None for others."""
    inverse = _INVERSE.get((name, len(args)))
    if inverse is None or getattr(items, "maxlen", None) is not None or not (args or items):
        return None
    arguments = args[:0] if args else (items[-1 if name == "pop" else 0],)
    return lambda: getattr(self.added, inverse)(*arguments)


def _changing(
    value_class: type[Value], name: str, *converts: Callable[[Tracer, Value], Any]
) -> None:
    @method(value_class, name)
    def change(tx: Tracer, self: SequenceValue, *args: Value) -> Value:
        real = [convert(tx, arg) for convert, arg in zip(converts, args, strict=False)]
        items = self.added if name == "append" else self.items  # type: ignore[attr-defined]
        tx.mutate(self, _undo(self, name, args, items))  # type: ignore[arg-type]
        function = getattr(items, name)
        if name == "__delitem__":  # the message for a wrong index differs
            function = functools.partial(operator.delitem, items)
        result = real_call(tx, function, *real, *args[len(converts) :])
        return NONE if result is None else tx.force(result)


for _kind, _name, *_converts in (
    (ListValue, "append", _item),
    (ListValue, "insert", _key, _item),
    (ListValue, "pop", _key),
    (ListValue, "clear"),
    (ListValue, "reverse"),
    (ListValue, "__delitem__", _key),
    (DequeValue, "appendleft", _item),
    (DequeValue, "pop"),
    (DequeValue, "popleft"),
    (DequeValue, "rotate", _key),
):
    _changing(_kind, _name, *_converts)


def _extending(name: str, method_name: str) -> None:
    @method(ListValue, name)
    def extend(tx: Tracer, self: ListValue, items: Value) -> Value:
        if getattr(items, "base", None) is self and not isinstance(self, DequeValue):
            items = self  # CPython compares the objects, and then runs no `__iter__`
        hinted = not isinstance(self, DequeValue)
        new_items = list(items.items) if isinstance(items, ListValue) else steps(tx, items, hinted)
        if getattr(items, "base", None) is self:
            new_items = list(new_items)
        for item in new_items:  # an error keeps the items added before
            tx.mutate(self)
            getattr(self.added if method_name == "append" else self.items, method_name)(item)
        return NONE


_extending("extend", "append")
_extending("extendleft", "appendleft")


def _single(tx: Tracer, self: SequenceValue, key: Value) -> Value | None:
    """Read a single item of an untouched input list, without a guard on the other items."""
    if not isinstance(self, ListValue) or not self.is_untouched():
        return None
    index = tx.pregraph_value(key) if isinstance(key, Constant | Varying) else None
    if index is None or any(origins(index[0])) or type(index[1]) is not int:
        return None
    if not -len(self.real) <= index[1] < len(self.real):
        return None
    assert self.source is not None
    source: Source = CallSource(operator.getitem, (self.source, index[0]))
    fixed = isinstance(key, Constant) and not self.singly
    if fixed and isinstance(tx.unread_length(self), Constant):
        source = ItemSource(self.source, index[1] % len(self.real))
    else:
        self.singly = True
    return tx.wrap(self.real[index[1]], source)


def _item_at(tx: Tracer, self: SequenceValue, index: TensorValue) -> Value:
    """Read the item at a position that a tensor holds: of numbers, or of tensors of one layout.

    Raises:
        Break: where the items are other objects, or the gradient of a single one would be needed.
    """
    known = numbers(index)
    if known is not None:
        return self.mp_subscript(tx, constant(known))
    items: list[Any] = [tx.force(item) for item in self.items]
    if all(type(item) is TensorValue and not item.fake.requires_grad for item in items):
        fakes = [item.fake for item in items]
        layouts = {(f.dtype, f.device, tuple(f.shape)) for f in fakes if f.is_contiguous()}
        if len(layouts) == 1 and all(fake.is_contiguous() for fake in fakes):
            table = tx.call_builtin(torch.stack, [ListValue(items)], {})
            return selected(tx, _row(tx, table, index), items)
    item_types: set[Any] = {item.python_type() if item.is_constant() else None for item in items}
    dtype = {float: torch.float64, int: torch.int64}.get(next(iter(item_types)))
    if len(item_types) == 1 and dtype is not None:
        table = tx.call_builtin(torch.tensor, [ListValue(items)], {"dtype": constant(dtype)})
        return _row(tx, table, index).call_method(tx, "item", [], {})
    raise Break("data-dependent-value", f"{index.describe()} as an index of a {self.describe()}")


def _row(tx: Tracer, table: Value, index: TensorValue) -> Value:
    where = index.call_method(tx, "reshape", [constant(1)], {})
    row = table.call_method(tx, "index_select", [constant(0), where], {})
    return row.call_method(tx, "squeeze", [constant(0)], {})


@method(SequenceValue, "__getitem__")
def _getitem(tx: Tracer, self: SequenceValue, key: Value) -> Value:
    single = _single(tx, self, key)
    if single is not None:
        return single
    if type(key) is TensorValue and not key.fake.dim() and not key.fake.is_floating_point():
        return _item_at(tx, self, key)
    plain = isinstance(key, Varying) and type(self) in (ListValue, TupleValue)
    if plain and all(isinstance(tx.force(item), Constant) for item in self.items):
        table = constant(tuple(item.as_constant() for item in map(tx.force, self.items)))
        if (result := tx.by_python(operator.getitem, [table, key])) is not None:
            return result
    result = real_call(tx, operator.getitem, self.items, _key(tx, key))
    if result is self.items and type(self) is TupleValue:
        return self
    return tx.force(result) if isinstance(result, Value) else self.with_items(result)


method(RangeValue, "__getitem__")(
    lambda tx, self, key: tx.literal(real_call(tx, operator.getitem, self.range, _key(tx, key)))
)


@method(ListValue, "__setitem__")
def _setitem(tx: Tracer, self: ListValue, key: Value, item: Value) -> None:
    real = _key(tx, key)
    new = listed(tx, item) if isinstance(real, slice) else item
    if isinstance(self, DequeValue) and (self.source or isinstance(real, slice)):
        raise Break("container-mutation", "assigning to items of a deque")
    tx.mutate(self)
    real_call(tx, operator.setitem, self.items, real, new)


def _compared(tx: Tracer, self: Any, name: str, item: Value, *more: Any) -> tuple[Any, Any]:
    """Call a method on a real container of proxies; returns that and the result."""
    before = list(self.items)
    real = self.with_proxies(tx)
    result = real_call(tx, getattr(real, name), Proxy(tx, item), *more)
    if before != list(self.items):
        raise Break("container-mutation", "a container that changes during a comparison")
    return real, result


@method_of_each(SequenceValue, "index", "count")
def _comparing(name: str, tx: Tracer, self: SequenceValue, item: Value, *bounds: Value) -> Value:
    limits = [_key(tx, bound) for bound in bounds]
    return constant(_compared(tx, self, name, item, *limits)[1])


@method(ListValue, "remove")
def _remove(tx: Tracer, self: ListValue, item: Value) -> None:
    real, _ = _compared(tx, self, "remove", item)
    tx.mutate(self)
    self.items.clear()
    self.items.extend(proxy.value for proxy in real)


@method(ListValue, "sort")
def _sort(tx: Tracer, self: ListValue, *, key: Value = NONE, reverse: Value = FALSE) -> None:
    tx.mutate(self)
    real = [Proxy(tx, item) for item in self.items]
    self.items.clear()  # it is empty during the sort
    epoch, self.epoch = self.epoch, -1
    try:
        sort_proxies(tx, real, key, reverse)
    finally:  # after an error it is partly sorted
        if self.epoch != -1:
            raise Break("container-mutation", "a list that changes during sort")
        self.epoch = epoch
        self.items[:] = [proxy.value for proxy in real]


method(ListValue, "copy", "__copy__")(lambda tx, self: self.with_items(self.items))
method(SizeValue, "numel")(lambda tx, self: combined(tx, "*", constant(1), self))


@rule(type(DequeValue([]).items))
def _deque(tx: Tracer, iterable: Value | None = None, maxlen: Value = NONE) -> Value:
    empty = real_call(tx, DequeValue, [], None, maxlen.as_constant())
    items = [] if iterable is None else steps(tx, iterable, hinted=False)
    return empty.with_items(items)  # type: ignore[no-any-return]


# ---- operators


@method(SequenceValue, "__add__")
def _add(tx: Tracer, self: SequenceValue, other: Value) -> Value:
    other = without_class(other)
    if not isinstance(other, SequenceValue) or type(self.items) is not type(other.items):
        return NOT_IMPLEMENTED
    if type(self) is type(other) is TupleValue and not (self.items and other.items):
        return self if self.items else other
    sized = isinstance(self, SizeValue) and all(map(_is_number, other.items))
    items = [*self.items, *other.items]
    return self.with_items(items) if sized or isinstance(self, ListValue) else TupleValue(items)


@method(SizeValue, "__radd__")
def _size_radd(tx: Tracer, self: SizeValue, other: Value) -> Value:
    other = without_class(other)
    if not isinstance(other, TupleValue | NamedTupleValue):
        return NOT_IMPLEMENTED
    if not all(map(_is_number, other.items)):
        raise Break("builtin-error", "a torch.Size of other objects than ints")
    return SizeValue([*other.items, *self.items])


def _is_number(item: Value) -> bool:
    return issubclass(item.python_type(), int | float)


@method(ListValue, "__iadd__")
def _iadd(tx: Tracer, self: ListValue, other: Value) -> Value:
    self.call_method(tx, "extend", [other], {})
    return self


@method_of_each(SequenceValue, "__mul__", "__rmul__")
def _mul(name: str, tx: Tracer, self: SequenceValue, count: Value) -> Value:
    if not hasattr(count.python_type(), "__index__"):
        # The error of two sequences names the type of the right one.
        data = isinstance(count, Constant | Varying)
        own_error = data and (name == "__mul__" or not is_sequence(count))
        return fold(tx, operator.mul, [self, count], {}) if own_error else NOT_IMPLEMENTED
    times = count.as_constant()
    if times == 1 and type(self) is TupleValue:
        return self
    return self.with_items(real_call(tx, operator.mul, self.items, times))


@method(ListValue, "__imul__")
def _imul(tx: Tracer, self: ListValue, count: Value) -> Value:
    if not hasattr(count.python_type(), "__index__"):
        return NOT_IMPLEMENTED
    tx.mutate(self)
    self.items = real_call(tx, operator.imul, self.items, count.as_constant())
    return self


def _compare_real(name: str, tx: Tracer, self: Any, other: Any) -> Value:
    """Compare two containers as the interpreter does, item by item."""
    other = without_class(other)
    if not isinstance(other, SequenceValue | DictValue):
        return NOT_IMPLEMENTED
    sizes = [len(side.unpack(tx)) for side in (self, other)]
    left, right = (side.with_proxies(tx) for side in (self, other))
    result = real_call(tx, getattr(left, name), right)
    if sizes != [len(side.unpack(tx)) for side in (self, other)]:
        raise Break("container-mutation", "a container that changes during a comparison")
    return tx.literal(result)


method_of_each(SequenceValue, *(f"__{op.name}__" for op in COMPARE.values()))(_compare_real)
method_of_each(DictValue, "__eq__", "__ne__")(_compare_real)


@method(SequenceValue, "__contains__")
def _contains(tx: Tracer, self: SequenceValue, item: Value) -> Value:
    result = _among_constants(tx, self, item) if isinstance(item, SymValue) else None
    return constant(contains_by_iteration(tx, self, item) if result is None else result)


def _among_constants(tx: Tracer, container: SequenceValue, item: SymValue) -> bool | None:
    """Test by one guard whether a symbolic number is among literals; None for other operands."""
    entry, items = tx.graph.input_at.get(item.node), [tx.force(value) for value in container.items]
    constants = tuple(v.value for v in items if isinstance(v, Constant) and is_literal(v.value))
    if entry is None or item.source is None or len(constants) != len(items):
        return None
    contained = entry.example in constants
    tx.guard(
        CallSource(operator.contains, (ConstSource(constants), item.source)), "CONST", contained
    )
    return contained


@method(RangeValue, "__contains__")
def _range_contains(tx: Tracer, self: RangeValue, item: Value) -> Value:
    if item.is_constant():
        return constant(real_call(tx, operator.contains, self.range, item.as_constant()))
    return constant(contains_by_iteration(tx, self, item))


method(SequenceValue, "__len__")(
    lambda tx, self: tx.unread_length(self) or constant(len(self.items))
)
method(RangeValue, "__len__")(lambda tx, self: constant(real_call(tx, len, self.range)))


def _by_builtin(function: Any, tx: Tracer, self: Value) -> Value:
    return tx.builtin(function, self)


for _holder, _real in (
    (ListValue, [()]), (TupleValue, ()), (SetValue, set()), (DictValue, {}), (RangeValue, range(0)),
    (DictView, {}.keys()),
):  # fmt: skip
    for _name, _function in (("__iter__", iter), ("__reversed__", reversed)):
        if hasattr(_real, _name):
            method(_holder, _name)(functools.partial(_by_builtin, _function))


@rule(tuple.__new__)
def _tuple_new(tx: Tracer, cls: Value, items: Value) -> Value:
    real_class = cls.as_constant()
    if real_class is tuple:
        return TupleValue(items.unpack(tx))
    if is_named(real_class):
        return NamedTupleValue(real_class, items.unpack(tx))
    real_call(tx, tuple.__new__, real_class)  # raises for classes in C
    return new_object(tx, real_class, [items])
