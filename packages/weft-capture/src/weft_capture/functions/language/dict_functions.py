"""dict, OrderedDict, defaultdict, set and frozenset: construction, methods, views."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, NoReturn

from weft_capture.breaks import Break
from weft_capture.functions.table import rule, rule_of_each
from weft_capture.model.attributes import lookup
from weft_capture.model.constant import NONE, NOT_IMPLEMENTED, constant, real_call
from weft_capture.model.containers import SetValue, TupleValue
from weft_capture.model.dicts import DictValue, DictView, MappingProxy
from weft_capture.model.exceptions import ExceptionValue, chain
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Raised, Tracer, Value, key_in, method, method_of_each
from weft_capture.model.slots import (
    BINARY,
    COMPARE,
    contains_by_iteration,
    length,
    listed,
    optional_attribute,
    steps,
    without_class,
)


def missing_key(tx: Tracer, key: Value, of: Value | None = None) -> NoReturn:
    """Raise KeyError in the program."""
    if of is not None and of.python_type() is OrderedDict:  # it unpacks a tuple
        tx.check_call(OrderedDict.pop, [of, key], {})
    raise Raised(chain(tx, ExceptionValue(KeyError, [key])))


def fill(tx: Tracer, target: DictValue, items: Value | None, kwargs: dict[str, Value]) -> None:
    """Do what `dict.update(items, **kwargs)` does; the caller has recorded the change.

    CPython: dict_update_arg and dict_merge, which copies a dict whose class has no `__iter__`;
    mutablemapping_update of an OrderedDict, which asks for `keys` and each item. A class over
    OrderedDict always has an `__iter__`.
    """
    base = getattr(items, "base", None)
    if isinstance(items, UserObject) and isinstance(base, DictValue):
        ordered = OrderedDict in (target.cls, base.cls)
        specials = ("keys", "__getitem__") if ordered else ("__iter__",)
        if not any(map(items.has_special, specials)):
            _has_keys(tx, items)  # is asked in any case
            items = base
    if isinstance(items, DictValue):
        for key, value in items.entries.values():
            target.put(key, value)
    elif items is not None and _has_keys(tx, items):
        for key in listed(tx, items.call_method(tx, "keys", [], {})):
            target.put(key, items.mp_subscript(tx, key))
    elif items is not None:
        for number, pair in enumerate(steps(tx, items, hinted=False)):
            pair_items = _pair(tx, pair, number, target)
            if len(pair_items) != 2:  # their messages differ
                real: Any = target.cls()
                real_call(tx, real.update, [(0, 0)] * number + [pair_items])
            target.put(pair_items[0], pair_items[1])
    for name, value in kwargs.items():
        target.put(constant(name), value)


def _pair(tx: Tracer, pair: Value, number: int, target: DictValue) -> list[Value]:
    """Return the items of a pair; all but OrderedDict word the error (PyDict_MergeFromSeq2)."""
    try:
        return listed(tx, pair)
    except Raised as raised:
        if target.cls is OrderedDict or not issubclass(raised.value.python_type(), TypeError):
            raise
        text = f"cannot convert dictionary update sequence element #{number} to a sequence"
        tx.raise_(TypeError, text)


def _has_keys(tx: Tracer, items: Value) -> bool:
    if not isinstance(items, UserObject):
        return hasattr(items.python_type(), "keys")
    return optional_attribute(tx, items, "keys") is not None


@rule_of_each(dict, OrderedDict)
def _dict(cls: type, tx: Tracer, items: Value | None = None, /, **kwargs: Value) -> Value:
    target = DictValue(cls=cls)
    fill(tx, target, items, kwargs)
    return target


@rule_of_each(dict.fromkeys, OrderedDict.fromkeys, defaultdict.fromkeys)
def _from_keys(function: Any, tx: Tracer, keys: Value, value: Value = NONE) -> Value:
    pairs = ((key, value) for key in steps(tx, keys, hinted=False))
    return DictValue(pairs, cls=function.__self__)


@rule(defaultdict)
def _defaultdict(
    tx: Tracer, factory: Value = NONE, items: Value | None = None, /, **kwargs: Value
) -> Value:
    if factory is not NONE and lookup(factory.python_type(), "__call__") is None:
        tx.raise_(TypeError, "first argument must be callable or None")
    target = DictValue(cls=defaultdict, default_factory=factory)
    fill(tx, target, items, kwargs)
    return target


@rule(MappingProxyType)
def _mapping_proxy(tx: Tracer, mapping: Value) -> Value:
    if not isinstance(mapping, DictValue):
        raise Break("unsupported-arguments", f"a mappingproxy of {mapping.describe()}")
    return MappingProxy(getattr(mapping, "inner", mapping))


# Reading.


@method(DictValue, "__getitem__")
def _getitem(tx: Tracer, self: DictValue, key: Value) -> Value:
    current = self.get(tx, key)
    if current is not None:
        return current
    if self.cls is defaultdict and self.default_factory is not NONE:
        value = self.default_factory.tp_call(tx, [], {})
        tx.mutate(self)
        self.put(key, value)
        return value
    missing_key(tx, key)


@method(DictValue, "get")
def _get(tx: Tracer, self: DictValue, key: Value, default: Value = NONE) -> Value:
    value = self.get(tx, key)
    return default if value is None else value


method_of_each(DictValue, "keys", "values", "items")(
    lambda view_name, tx, self: DictView(getattr(self, "inner", self), view_name)
)


method(DictValue, "copy", "__copy__")(lambda tx, self: self.copy())
method(DictValue, "__contains__")(lambda tx, self, key: constant(self.find(tx, key) is not None))
method(DictValue, "__len__")(lambda tx, self: tx.unread_length(self) or constant(len(self.entries)))


@method_of_each(DictValue, "__or__", "__ror__")
def _or(name: str, tx: Tracer, self: DictValue, other: Value) -> Value:
    if not isinstance(other, DictValue):
        if issubclass(other.python_type(), dict):
            raise Break("unsupported-arguments", "a union with a dict of a subclass")
        return NOT_IMPLEMENTED
    operands = (self, other) if name == "__or__" else (other, self)
    left, right = (getattr(operand, "inner", operand) for operand in operands)
    if left.cls is not right.cls:
        raise Break("unsupported-arguments", "a union of dicts of different classes")
    target: DictValue = left.copy()
    fill(tx, target, right, {})
    return target


@method(DictValue, "__ior__")
def _ior(tx: Tracer, self: DictValue, other: Value) -> Value:
    tx.mutate(self)
    fill(tx, self, other, {})
    return self


@method(DictView, "__contains__")
def _view_contains(tx: Tracer, self: DictView, item: Value) -> Value:
    if self.view_name == "keys":
        return constant(key_in(dict, item) in self.owner.entries)
    return constant(contains_by_iteration(tx, self, item))


method(DictView, "__len__")(lambda tx, self: length(tx, self.owner))


_SET_OPERATORS = {f"__{op.name}__": op for op in (BINARY[symbol] for symbol in "&|-^")}
_SET_OPERATORS |= {f"__{op.reflected}__": op for op in [*_SET_OPERATORS.values()]}


@method_of_each(DictView, *_SET_OPERATORS)
def _view_algebra(name: str, tx: Tracer, self: DictView, other: Value) -> Value:
    op = _SET_OPERATORS[name]
    operands = (other, self) if name.startswith("__r") else (self, other)
    items = [operand.unpack(tx) for operand in operands]
    keys = [[item.tp_hash() for item in side] for side in items]
    values_by_key = dict(zip(keys[1] + keys[0], items[1] + items[0], strict=True))
    real = map(as_real, operands, keys)
    return set_of(real_call(tx, op.function, *real), values_by_key)


@method_of_each(DictView, *(f"__{op.name}__" for op in COMPARE.values()))
def _compare_views(name: str, tx: Tracer, self: DictView, other: Value) -> Value:
    other = without_class(other)
    if not isinstance(other, SetValue | DictView) or "values" in (self.view_name, _kind(other)):
        return NOT_IMPLEMENTED
    if isinstance(other, DictView) and self.view_name == other.view_name == "items":
        views = [view.owner.with_proxies(tx).items() for view in (self, other)]
        return tx.literal(real_call(tx, getattr(views[0], name), views[1]))
    keys = ({item.tp_hash() for item in side.unpack(tx)} for side in (self, other))
    return constant(getattr(next(keys), name)(next(keys)))


def _kind(value: Value) -> str:
    return value.view_name if isinstance(value, DictView) else ""


method(DictView, "isdisjoint")(
    lambda tx, self, other: SetValue(self.unpack(tx)).call_method(tx, "isdisjoint", [other], {})
)


# Writing.


@method(DictValue, "__setitem__")
def _setitem(tx: Tracer, self: DictValue, key: Value, value: Value) -> Value:
    tx.mutate(self, self.undo_put(self.slot(key, writes=True)))
    self.put(key, value)
    return NONE


@method(DictValue, "__delitem__")
def _delitem(tx: Tracer, self: DictValue, key: Value) -> Value:
    if key_in(dict, key) not in self.entries:
        missing_key(tx, key)
    tx.mutate(self)
    self.drop(key.tp_hash())
    return NONE


@method(DictValue, "setdefault")
def _setdefault(tx: Tracer, self: DictValue, key: Value, default: Value = NONE) -> Value:
    value = self.get(tx, key)
    if value is not None:
        return value
    _setitem(tx, self, key, default)
    return default


@method_of_each(DictValue, "update", "__init__")
def _update(
    name: str, tx: Tracer, self: DictValue, items: Value | None = None, /, **kw: Value
) -> None:
    if name == "__init__" and self.cls is defaultdict:
        raise Break("c-function", "defaultdict.__init__ of an existing object")
    tx.mutate(self)
    fill(tx, self, items, kw)


@method(DictValue, "pop")
def _pop(tx: Tracer, self: DictValue, key: Value, default: Value | None = None) -> Value:
    value = self.get(tx, key)
    if value is None:
        return missing_key(tx, key, self) if default is None else default
    _delitem(tx, self, key)
    return value


@method(DictValue, "popitem")
def _popitem(tx: Tracer, self: DictValue, last: Value = constant(True)) -> Value:  # noqa: B008
    if not self.entries:
        tx.raise_(KeyError, "popitem(): dictionary is empty")
    tx.mutate(self)
    key = next(reversed(self.entries) if last.nb_bool(tx) else iter(self.entries))
    pair = self.drop(key)
    return tx.tuple_of([pair[0], tx.force(pair[1])])


@method(DictValue, "clear")
def _clear(tx: Tracer, self: DictValue) -> None:
    tx.mutate(self)
    for hashed in list(self.entries):
        self.drop(hashed)


@method(DictValue, "move_to_end")
def _move_to_end(
    tx: Tracer,
    self: DictValue,
    key: Value,
    last: Value = constant(True),  # noqa: B008
) -> None:
    hashed = key.tp_hash()
    if hashed not in self.entries:
        missing_key(tx, key, self)
    tx.mutate(self)
    entry = self.drop(hashed)
    rest = [] if last.nb_bool(tx) else [self.drop(other) for other in list(self.entries)]
    for pair in (entry, *rest):
        self.put(*pair)


# ---- set and frozenset: the methods of a real set of the elements' hash keys


_OF_ONE = ("add", "discard", "remove")
_SOUGHT = ("discard", "remove")
_GROWING = ("add", "update", "__ior__")
_ALGEBRA = ("intersection", "difference", "symmetric_difference")
_CHANGING = frozenset(
    (*_OF_ONE, "pop", "clear", "update", "__init__", "__ior__", "__iand__", "__isub__", "__ixor__")
    + tuple(f"{name}_update" for name in _ALGEBRA)
)
_ASKING = (*_ALGEBRA, "union", "issubset", "issuperset", "isdisjoint")
_MEETING = ("intersection", "intersection_update", "__and__", "__iand__")
"""Methods whose result has the elements of the smaller set, else of the other operand."""
_OPERATORS = {f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne")}
for _side in ("", "r", "i"):
    _OPERATORS |= {f"__{_side}{name}__" for name in ("and", "or", "sub", "xor")}


def sought(item: Value) -> object:
    """Return the key under which a set looks an element up; a set stands for its frozenset."""
    plain = getattr(item, "base", None) or item
    if isinstance(plain, SetValue) and getattr(item.python_type(), "__hash__", None) is None:
        return frozenset(plain.entries)
    return key_in(set, item)


def call_set(tx: Tracer, self: SetValue, name: str, *args: Value) -> Value:
    """Call a method of a set, an operator's included; operands of an operator are sets."""
    if _one_by_one(tx, self, name, args):
        return NONE
    values_by_key: dict[object, Value] = {}
    loose = self.loose or any(getattr(getattr(arg, "base", arg), "loose", False) for arg in args)
    real: list[object] = []
    operands: list[Value] = []
    for operand in args:
        base = getattr(operand, "base", None)
        arg = base if isinstance(base, SetValue) else operand  # its `__iter__` is not called
        every = arg.elements() if isinstance(arg, SetValue) else None
        if name in _ASKING and every is None and not isinstance(arg, DictValue | DictView):
            real.append(_keys(tx, arg, values_by_key))  # read on demand
            continue
        items = [operand] if name in _OF_ONE else arg.unpack(tx) if every is None else every
        keys = [sought(item) if name in _SOUGHT else key_in(set, item) for item in items]
        values_by_key |= zip(keys, items, strict=True)
        as_is = name in _OF_ONE or isinstance(arg, SetValue | DictValue)
        operands.append(operand if as_is else TupleValue(items))
        real.append(keys[0] if name in _OF_ONE else as_real(arg, keys))
    if name == "remove" and real[0] not in self.entries:
        missing_key(tx, args[0])
    smaller = name in _MEETING and not any(len(o) > len(self.order) for o in _sets(real))
    if name in _CHANGING and hasattr(self.cls, "add"):
        tx.mutate(self)
        if self.source is not None:
            _log_change(tx, self, name, operands)
    result = real_call(tx, getattr(self.order, name), *real)
    values_by_key = (
        {**self.entries, **values_by_key} if smaller else {**values_by_key, **self.entries}
    )
    if name in _CHANGING:
        _update_entries(self, name, values_by_key)
        self.loose |= loose or (name not in _OF_ONE and self.by_address())
    if result is self.order:
        return self
    if isinstance(result, set | frozenset):
        return set_of(result, values_by_key, self.cls, loose)
    return values_by_key[result] if name == "pop" else constant(result)


def _one_by_one(tx: Tracer, self: SetValue, name: str, args: tuple[Value, ...]) -> bool:
    """Call a method of a set for each operand or item, where the result is the same."""
    sets = any(isinstance(getattr(arg, "base", None), SetValue) for arg in args)
    sets = sets or any(isinstance(arg, SetValue | DictValue) for arg in args)
    if name == "update" and not sets:
        for item in (item for arg in args for item in steps(tx, arg, hinted=False)):
            call_set(tx, self, "add", item)  # an error keeps the items added before
        return True
    several = name in ("update", "difference_update") and len(args) > 1
    for operand in args if several else ():
        call_set(tx, self, name, operand)
    return several


def _sets(operands: list[Any]) -> Iterator[set[Any] | frozenset[Any]]:
    return (operand for operand in operands if isinstance(operand, set | frozenset))


def _keys(tx: Tracer, items: Value, values_by_key: dict[object, Value]) -> Iterator[object]:
    """Yield the hash keys of the items of a value, which are added to `values_by_key`."""
    for item in steps(tx, items, hinted=False):
        key = item.tp_hash()
        values_by_key[key] = item
        yield key


def _log_change(tx: Tracer, self: SetValue, name: str, operands: list[Value]) -> None:
    """Log a change of an input set, which is repeated after the graph."""
    sets = [arg for arg in operands if name not in _OF_ONE and type(arg) is not TupleValue]
    plain = all(isinstance(arg, SetValue) and not arg.log for arg in sets)
    if name in ("pop", "__init__") or not plain or self in sets:
        raise Break("container-mutation", f"{name} of a set from outside")
    self.loose = True  # its layout is unknown
    states = [arg.state() for arg in sets if isinstance(arg, SetValue)]
    self.log.append((name, (*operands,), states, tx.steps.now))


def set_of(
    order: Any, values_by_key: dict[Any, Value], cls: type = set, loose: bool = False
) -> SetValue:
    """Return the value of a set of these keys."""
    result = SetValue([], cls=cls)
    result.order, result.entries = order, {key: values_by_key[key] for key in order}
    result.loose = loose or result.by_address()
    return result


def as_real(value: Value, keys: list[object]) -> Any:
    """Return a real container of the hash keys of a value's items, as an operand of a set."""
    if isinstance(value, SetValue):
        return value.order
    if isinstance(value, DictValue):
        return dict.fromkeys(keys)
    return dict.fromkeys(keys).keys() if isinstance(value, DictView) else keys


def _update_entries(self: SetValue, name: str, values_by_key: dict[object, Value]) -> None:
    """Make the entries those of the keys again; equal elements keep the first."""
    if name in _GROWING:
        self.entries |= values_by_key
    else:
        self.entries = {key: values_by_key[key] for key in self.order}
        self.removals += 1


@method_of_each(SetValue, *_CHANGING, *_ASKING, *_OPERATORS)
def _set_method(name: str, tx: Tracer, self: SetValue, *args: Value) -> Value:
    if name == "__init__" and self.cls is frozenset:
        return NONE
    several = name in ("update", "union", "intersection", "difference") or name[:-7] in _ALGEBRA[:2]
    fits = len(args) == (name not in ("pop", "clear", "copy")) or several or name == "__init__"
    if not fits or not hasattr(self.cls, name):
        raise Break("builtin-error", f"{len(args)} arguments of set.{name}")
    if name == "pop":
        self.in_order()
    if name not in _OPERATORS:
        return call_set(tx, self, name, *args)
    other = getattr(args[0], "base", args[0])
    if not isinstance(other, SetValue):
        return NOT_IMPLEMENTED
    if name.startswith("__r"):
        return call_set(tx, other, name.replace("__r", "__"), self)
    return call_set(tx, self, name, other)


method(SetValue, "__contains__")(lambda tx, self, item: constant(sought(item) in self.entries))
method(SetValue, "__len__")(lambda tx, self: constant(len(self.entries)))
method(SetValue, "copy")(
    lambda tx, self: self if self.cls is frozenset else call_set(tx, self, "copy")
)
