"""copy.copy and copy.deepcopy."""

from __future__ import annotations

import copy

from weft_capture.breaks import Break
from weft_capture.rules.table import rule
from weft_capture.values.base import Tracer, Value
from weft_capture.values.constant import Constant, is_constant_object
from weft_capture.values.containers import ListValue, SetValue, TupleValue
from weft_capture.values.dicts import DictValue
from weft_capture.values.functions import FunctionValue, ObjectConstant
from weft_capture.values.objects import ModuleValue, UserObject
from weft_capture.values.tensor import TensorValue

_SHARED = (Constant, FunctionValue, ObjectConstant)


@rule(copy.copy)
def _copy(tx: Tracer, value: Value) -> Value:
    _check_plain(value)
    if isinstance(value, (ListValue, DictValue, SetValue)):
        return value.call_method(tx, "copy", [], {})
    if isinstance(value, (*_SHARED, TupleValue)):
        return value
    if isinstance(value, UserObject) and not value.has_special("__copy__"):
        return _copied_object(tx, value, deep=None)
    return value.call_method(tx, "__copy__", [], {})


def _check_plain(value: Value) -> None:
    """Refuse a state dict, and an instance of a subclass of int and the like.

    Its class may say how it is copied.
    """
    odd = isinstance(value, Constant) and not is_constant_object(value.value)
    if odd or getattr(value, "metadata", None) is not None:
        raise Break("unknown-call", f"a copy of {value.describe()}")


class _Memo(DictValue):
    """The memo that a `__deepcopy__` of the program gets."""


def _copied_object(tx: Tracer, value: UserObject, deep: dict[Value, Value] | None) -> Value:
    hooks = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs__",
             "__getnewargs_ex__")  # fmt: skip
    slots = not value.cls.__dictoffset__ or hasattr(value.cls, "__slots__")
    odd = value.base is not None or slots or isinstance(value, ModuleValue)
    odd = odd or getattr(value.cls, "__reduce__", None) is not getattr(object, "__reduce__")  # noqa: B009
    if odd or any(value.has_special(name) for name in hooks):
        raise Break("unknown-call", f"a copy of {value.describe()}")
    fresh = UserObject(value.cls)
    if deep is not None:
        deep[value] = fresh
    members = tx.instance_dict(value)
    assert isinstance(members, DictValue)
    for key, item in list(members.pairs(tx)):
        fresh.attrs[key.as_constant()] = item if deep is None else _deep(tx, item, deep)
    return fresh


@rule(copy.deepcopy)
def _deepcopy(tx: Tracer, value: Value, memo: Value | None = None) -> Value:
    if memo is not None and (not isinstance(memo, _Memo) or memo.entries):
        raise Break("unknown-call", "deepcopy with a memo")
    return _deep(tx, value, {})


def _deep(tx: Tracer, value: Value, memo: dict[Value, Value]) -> Value:
    value = tx.force(value)
    if value in memo:
        return memo[value]
    _check_plain(value)
    if isinstance(value, _SHARED):
        return value
    if isinstance(value, TupleValue):
        items = [_deep(tx, item, memo) for item in value.items]
        if value in memo:  # copied on the way: it holds itself
            return memo[value]
        same = all(new is tx.force(old) for new, old in zip(items, value.items, strict=True))
        memo[value] = value if same else value.with_items(items)
    elif isinstance(value, ListValue):
        fresh = memo[value] = value.with_items([])
        assert isinstance(fresh, ListValue)
        fresh.items = [_deep(tx, item, memo) for item in value.items]
    elif isinstance(value, DictValue):
        target = DictValue(None, None, value.cls, value.default_factory)
        memo[value] = target
        for key, item in value.pairs(tx):
            target.put(_deep(tx, key, memo), _deep(tx, item, memo))
    elif isinstance(value, SetValue):
        items = [_deep(tx, item, memo) for item in value.unpack(tx)]
        memo[value] = SetValue(items, cls=value.cls, order=value.order)
    elif isinstance(value, UserObject):
        if value.has_special("__deepcopy__"):
            memo[value] = value.call_method(tx, "__deepcopy__", [_Memo()], {})
        else:
            _copied_object(tx, value, memo)
    else:
        return _leaf(tx, value, memo)
    return memo[value]


def _leaf(tx: Tracer, value: Value, memo: dict[Value, Value]) -> Value:
    if type(value) is TensorValue and not value.fake.requires_grad:
        memo[value] = tx.graph.emit("call_method", "clone", [value], {})
        return memo[value]
    if value.is_constant():
        return value
    raise Break("unknown-call", f"deepcopy of {value.describe()}")
