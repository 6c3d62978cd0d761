"""Methods of list, tuple, torch.Size, set, frozenset and range."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from weft_capture.breaks import Break
from weft_capture.rules.builtins import sort_values
from weft_capture.rules.operators import binary, equal
from weft_capture.values.base import Value, method
from weft_capture.values.constant import FALSE, NONE, constant
from weft_capture.values.containers import (
    ListValue,
    RangeValue,
    SetValue,
    SizeValue,
    SliceValue,
    TupleValue,
)

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer

Sequence = ListValue | TupleValue


# Reading.


def _position(tx: Tracer, key: Value) -> int:
    known = key.as_constant()
    try:
        return operator.index(known)
    except TypeError:
        tx.raise_(TypeError, f"indices must be integers or slices, not {type(known).__name__}")


@method(ListValue, "__getitem__")
@method(TupleValue, "__getitem__")
def _getitem(tx: Tracer, self: Sequence, key: Value) -> Value:
    if key.python_type() is slice:
        return self.with_items(self.items[key.as_constant()])
    position = _position(tx, key)
    if not -len(self.items) <= position < len(self.items):
        kind = "list" if isinstance(self, ListValue) else "tuple"
        tx.raise_(IndexError, f"{kind} index out of range")
    return tx.force(self.items[position])


@method(RangeValue, "__getitem__")
def _range_getitem(tx: Tracer, self: RangeValue, key: Value) -> Value:
    if key.python_type() is slice:
        return RangeValue(self.range[key.as_constant()])
    try:
        return constant(self.range[_position(tx, key)])
    except IndexError as error:
        tx.raise_real(error)


@method(ListValue, "index")
@method(TupleValue, "index")
def _index(tx: Tracer, self: Sequence, item: Value, *bounds: Value) -> Value:
    limits = [bound.as_constant() for bound in bounds] or [0]
    start, stop, _ = slice(limits[0], limits[1] if len(limits) > 1 else None).indices(
        len(self.items)
    )
    for position in range(start, stop):
        if equal(tx, self.items[position], item):
            return constant(position)
    tx.raise_(ValueError, f"{item.describe()} is not in list")


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


@method(ListValue, "copy")
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
    position = _position(tx, key)
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
    self.entries.setdefault(item.hash_key(), item)
    return NONE


@method(SetValue, "update")
def _update(tx: Tracer, self: SetValue, *others: Value) -> Value:
    for other in others:
        for item in other.unpack(tx):
            _add(tx, self, item)
    return NONE


@method(SetValue, "discard")
def _discard(tx: Tracer, self: SetValue, item: Value) -> Value:
    _changeable(self)
    tx.mutate(self)
    self.entries.pop(item.hash_key(), None)
    return NONE


@method(SetValue, "remove")
def _set_remove(tx: Tracer, self: SetValue, item: Value) -> Value:
    if item.hash_key() not in self.entries:
        tx.raise_(KeyError, item.as_constant())
    return _discard(tx, self, item)


@method(SetValue, "pop")
def _set_pop(tx: Tracer, self: SetValue) -> Value:
    # Which element goes depends on hashes and history; only one element leaves no choice.
    if len(self.entries) != 1:
        raise Break("unsupported-method", "set.pop")
    tx.mutate(self)
    return self.entries.popitem()[1]


@method(SetValue, "clear")
def _set_clear(tx: Tracer, self: SetValue) -> Value:
    _changeable(self)
    tx.mutate(self)
    self.entries.clear()
    return NONE


@method(SetValue, "copy")
def _set_copy(tx: Tracer, self: SetValue) -> Value:
    return SetValue(self.unpack(tx), cls=self.cls)


def _algebra(name: str, symbol: str) -> None:
    @method(SetValue, name)
    def combine(tx: Tracer, self: SetValue, *others: Value) -> Value:
        result: Value = SetValue(self.unpack(tx), cls=self.cls)
        for other in others:
            result = binary(tx, symbol, result, SetValue(other.unpack(tx)))
        return result


_algebra("union", "|")
_algebra("intersection", "&")
_algebra("difference", "-")
_algebra("symmetric_difference", "^")


def _set_test(name: str, test: str) -> None:
    @method(SetValue, name)
    def compare_sets(tx: Tracer, self: SetValue, other: Value) -> Value:
        keys = {item.hash_key() for item in other.unpack(tx)}
        return constant(getattr(set(self.entries), test)(keys))


for _name in ("issubset", "issuperset", "isdisjoint"):
    _set_test(_name, _name)
