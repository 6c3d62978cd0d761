"""Methods of list, tuple, torch.Size, set, frozenset and range."""

from __future__ import annotations

import operator
from collections.abc import Set
from typing import TYPE_CHECKING

from weft_capture.breaks import Break, NotConstant, Raised
from weft_capture.rules.builtins import sort_values
from weft_capture.rules.operators import binary, equal
from weft_capture.rules.text import text_of
from weft_capture.values.base import Value, method
from weft_capture.values.constant import FALSE, NONE, constant, fold
from weft_capture.values.containers import (
    ListValue,
    RangeValue,
    SetValue,
    SizeValue,
    SliceValue,
    TupleValue,
)
from weft_capture.values.exceptions import ExceptionValue, chain
from weft_capture.values.objects import UserObject

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer

Sequence = ListValue | TupleValue


# Reading.


def as_index(tx: Tracer, key: Value) -> int | None:
    """Return what `operator.index` gives; None when the value is no integer."""
    if isinstance(key, UserObject) and key.has_special("__index__"):
        key = key.call_method(tx, "__index__", [], {})
    try:
        return operator.index(key.as_constant())
    except (TypeError, NotConstant):
        return None


def _position(tx: Tracer, key: Value, owner: Value | None = None) -> int:
    position = as_index(tx, key)
    if position is not None:
        return position
    found = key.python_type().__name__
    if owner is None:
        tx.raise_(TypeError, f"'{found}' object cannot be interpreted as an integer")
    kind = owner.python_type().__name__
    tx.raise_(TypeError, f"{kind} indices must be integers or slices, not {found}")


@method(ListValue, "__getitem__")
@method(TupleValue, "__getitem__")
def _getitem(tx: Tracer, self: Sequence, key: Value) -> Value:
    if key.python_type() is slice:
        return self.with_items(self.items[key.as_constant()])
    position = _position(tx, key, self)
    if not -len(self.items) <= position < len(self.items):
        kind = "list" if isinstance(self, ListValue) else "tuple"
        tx.raise_(IndexError, f"{kind} index out of range")
    return tx.force(self.items[position])


@method(RangeValue, "__getitem__")
def _range_getitem(tx: Tracer, self: RangeValue, key: Value) -> Value:
    if key.python_type() is slice:
        return RangeValue(self.range[key.as_constant()])
    try:
        return constant(self.range[_position(tx, key, self)])
    except IndexError as error:
        tx.raise_real(error)


@method(ListValue, "index")
@method(TupleValue, "index")
def _index(tx: Tracer, self: Sequence, item: Value, *bounds: Value) -> Value:
    limits = [_position(tx, bound) for bound in bounds] or [0]
    start, stop, _ = slice(limits[0], limits[1] if len(limits) > 1 else None).indices(
        len(self.items)
    )
    for position in range(start, stop):
        if equal(tx, self.items[position], item):
            return constant(position)
    if not isinstance(self, ListValue):
        tx.raise_(ValueError, "tuple.index(x): x not in tuple")
    tx.raise_(ValueError, f"{text_of(tx, item, repr)} is not in list")


@method(ListValue, "count")
@method(TupleValue, "count")
def _count(tx: Tracer, self: Sequence, item: Value) -> Value:
    return constant(sum(equal(tx, each, item) for each in self.items))


@method(SizeValue, "numel")
def _numel(tx: Tracer, self: SizeValue) -> Value:
    total: Value = constant(1)
    for item in self.items:
        total = binary(tx, "*", total, item)
    return total


def _range_method(name: str) -> None:
    @method(RangeValue, name)
    def run(tx: Tracer, self: RangeValue, item: Value) -> Value:
        return fold(tx, getattr(self.range, name), [item], {})


_range_method("index")
_range_method("count")


@method(ListValue, "copy", "__copy__")
def _copy(tx: Tracer, self: ListValue) -> Value:
    return ListValue(self.items)


@method(ListValue, "__len__")
@method(TupleValue, "__len__")
def _len(tx: Tracer, self: Sequence) -> Value:
    return constant(len(self.items))


# Writing.


@method(ListValue, "append")
def _append(tx: Tracer, self: ListValue, item: Value) -> Value:
    tx.mutate(self)
    self.items.append(item)
    return NONE


@method(ListValue, "extend")
def _extend(tx: Tracer, self: ListValue, items: Value) -> Value:
    new = items.unpack(tx)
    tx.mutate(self)
    self.items.extend(new)
    return NONE


@method(ListValue, "insert")
def _insert(tx: Tracer, self: ListValue, position: Value, item: Value) -> Value:
    tx.mutate(self)
    self.items.insert(_position(tx, position), item)
    return NONE


@method(ListValue, "pop")
def _pop(tx: Tracer, self: ListValue, position: Value = constant(-1)) -> Value:  # noqa: B008
    index = _position(tx, position)
    if not self.items:
        tx.raise_(IndexError, "pop from empty list")
    if not -len(self.items) <= index < len(self.items):
        tx.raise_(IndexError, "pop index out of range")
    tx.mutate(self)
    return tx.force(self.items.pop(index))


@method(ListValue, "remove")
def _remove(tx: Tracer, self: ListValue, item: Value) -> Value:
    for position, each in enumerate(self.items):
        if equal(tx, each, item):
            tx.mutate(self)
            del self.items[position]
            return NONE
    tx.raise_(ValueError, "list.remove(x): x not in list")


@method(ListValue, "clear")
def _clear(tx: Tracer, self: ListValue) -> Value:
    tx.mutate(self)
    self.items.clear()
    return NONE


@method(ListValue, "reverse")
def _reverse(tx: Tracer, self: ListValue) -> Value:
    tx.mutate(self)
    self.items.reverse()
    return NONE


@method(ListValue, "sort")
def _sort(tx: Tracer, self: ListValue, *, key: Value = NONE, reverse: Value = FALSE) -> Value:
    new = sort_values(tx, list(self.items), key, reverse)
    tx.mutate(self)
    self.items[:] = new
    return NONE


@method(ListValue, "__setitem__")
def _setitem(tx: Tracer, self: ListValue, key: Value, item: Value) -> Value:
    if isinstance(key, SliceValue) or key.python_type() is slice:
        new = item.unpack(tx)
        tx.mutate(self)
        try:
            self.items[key.as_constant()] = new
        except ValueError as error:
            tx.raise_real(error)
        return NONE
    position = _position(tx, key, self)
    if not -len(self.items) <= position < len(self.items):
        tx.raise_(IndexError, "list assignment index out of range")
    tx.mutate(self)
    self.items[position] = item
    return NONE


@method(ListValue, "__delitem__")
def _delitem(tx: Tracer, self: ListValue, key: Value) -> Value:
    tx.mutate(self)
    try:
        del self.items[key.as_constant()]
    except IndexError as error:
        tx.raise_real(error)
    return NONE


# Sets.


def _changeable(self: SetValue) -> None:
    if self.cls is not set:
        raise Break("unsupported-method", f"changing a {self.cls.__name__}")


@method(SetValue, "add")
def _add(tx: Tracer, self: SetValue, item: Value) -> Value:
    _changeable(self)
    tx.mutate(self)
    self.put([item])
    return NONE


def keys_of(tx: Tracer, items: Value) -> tuple[list[Value], Set[object] | None]:
    """Return the elements of an iterable, and their keys as a set when it is one."""
    return items.unpack(tx), items.order if isinstance(items, SetValue) else None


@method(SetValue, "__init__")
def _set_init(tx: Tracer, self: SetValue, *others: Value) -> Value:
    items, order = keys_of(tx, others[0]) if others else ([], None)
    if self.cls is set:
        _set_clear(tx, self)
        self.put(items, order)
    return NONE


@method(SetValue, "update")
def _update(tx: Tracer, self: SetValue, *others: Value) -> Value:
    _changeable(self)
    for other in others:
        items, order = keys_of(tx, other)
        tx.mutate(self)
        self.put(items, order)
    return NONE


@method(SetValue, "discard")
def _discard(tx: Tracer, self: SetValue, item: Value) -> Value:
    _changeable(self)
    tx.mutate(self)
    self.drop(item.hash_key())
    return NONE


@method(SetValue, "remove")
def _set_remove(tx: Tracer, self: SetValue, item: Value) -> Value:
    if item.hash_key() not in self.entries:
        raise Raised(chain(tx, ExceptionValue(KeyError, [item])))
    return _discard(tx, self, item)


@method(SetValue, "pop")
def _set_pop(tx: Tracer, self: SetValue) -> Value:
    _changeable(self)
    if not self.entries:
        tx.raise_(KeyError, "pop from an empty set")
    tx.mutate(self)
    self.removals += 1
    return self.entries.pop(self.order.pop())


@method(SetValue, "clear")
def _set_clear(tx: Tracer, self: SetValue) -> Value:
    _changeable(self)
    tx.mutate(self)
    self.entries.clear()
    self.order.clear()
    return NONE


@method(SetValue, "copy", "__copy__")
def _set_copy(tx: Tracer, self: SetValue) -> Value:
    if self.cls is frozenset:
        return self
    return SetValue(self.unpack(tx), cls=self.cls, order=self.order)


@method(SetValue, "__len__")
def _set_len(tx: Tracer, self: SetValue) -> Value:
    return constant(len(self.entries))


@method(SetValue, "__contains__")
def _set_contains(tx: Tracer, self: SetValue, item: Value) -> Value:
    return constant(item.hash_key() in self.entries)


@method(SetValue, "__iter__")
@method(ListValue, "__iter__")
@method(TupleValue, "__iter__")
def _iter(tx: Tracer, self: SetValue | ListValue | TupleValue) -> Value:
    return self.iterate(tx)


def _algebra(name: str, symbol: str, in_place: str | None) -> None:
    @method(SetValue, name)
    def combine(tx: Tracer, self: SetValue, *others: Value) -> Value:
        result: Value = SetValue(self.unpack(tx), cls=self.cls, order=self.order)
        for other in others:
            items, order = keys_of(tx, other)
            result = binary(tx, symbol, result, SetValue(items, order=order))
        return result

    @method(SetValue, in_place or f"__i{name}__")
    def change(tx: Tracer, self: SetValue, *others: Value) -> Value:
        _changeable(self)
        for other in others:
            binary(tx, f"{symbol}=", self, SetValue(*keys_of(tx, other)[:1]))
        return NONE


_algebra("union", "|", None)
_algebra("intersection", "&", "intersection_update")
_algebra("difference", "-", "difference_update")
_algebra("symmetric_difference", "^", "symmetric_difference_update")


def _set_test(name: str, test: str) -> None:
    @method(SetValue, name)
    def compare_sets(tx: Tracer, self: SetValue, other: Value) -> Value:
        keys = {item.hash_key() for item in other.unpack(tx)}
        return constant(getattr(set(self.entries), test)(keys))


for _name in ("issubset", "issuperset", "isdisjoint"):
    _set_test(_name, _name)
