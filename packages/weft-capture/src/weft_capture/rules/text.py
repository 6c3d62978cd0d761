"""str, repr, format and the two old ways of formatting, of every kind of value."""

from __future__ import annotations

import collections
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from weft_capture.breaks import Break, NotConstant
from weft_capture.rules.table import rule
from weft_capture.values.base import Kwargs, Value
from weft_capture.values.constant import Constant, constant, fold
from weft_capture.values.containers import ListValue, NamedTupleValue, SetValue, TupleValue
from weft_capture.values.dicts import DictValue, DictView
from weft_capture.values.exceptions import ExceptionValue
from weft_capture.values.floats import FloatValue
from weft_capture.values.functions import ClassValue
from weft_capture.values.made import MadeValue, TextValue
from weft_capture.values.objects import UserObject
from weft_capture.values.tensor import SymValue, TensorValue

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer

Function = Callable[[Any], str]
_state = threading.local()
_INSIDE_ITSELF: dict[type, str] = {
    list: "[...]",
    tuple: "(...)",
    dict: "{...}",
    set: "set(...)",
    frozenset: "frozenset(...)",
    collections.deque: "[...]",
}
"""What the text of a container shows where it contains itself."""


def text_of(tx: Tracer, value: Value, function: Function) -> str:
    """Return `function(value)` for str, repr or ascii.

    Raises:
        Break: when the text depends on a tensor or on an object's address.
    """
    value = tx.force(value)
    writer = next((w for kind, w in _WRITERS if isinstance(value, kind)), _plain_text)
    active: list[Value] = _state.__dict__.setdefault("active", [])
    if any(one is value for one in active) and not isinstance(value, UserObject):
        return _INSIDE_ITSELF.get(value.python_type(), "...")
    active.append(value)
    try:
        text = writer(tx, value, function)
    finally:
        active.pop()
    return ascii(text)[1:-1] if function is ascii and not text.isascii() else text


def _plain_text(tx: Tracer, value: Value, function: Function) -> str:
    try:
        return function(value.data(tx))
    except NotConstant:
        raise Break("unsupported-value", f"text of {value.describe()}") from None


def _tensor_text(tx: Tracer, value: Value, function: Function) -> str:
    raise Break("data-dependent-value", f"text of {value.describe()}")


def _joined(tx: Tracer, items: list[Value]) -> str:
    return ", ".join(text_of(tx, item, repr) for item in items)


def _list_text(tx: Tracer, value: Any, function: Function) -> str:
    return f"[{_joined(tx, value.items)}]" if type(value) is ListValue else _deque(tx, value)


def _deque(tx: Tracer, value: Any) -> str:
    end = "" if value.maxlen is None else f", maxlen={value.maxlen}"
    return f"deque([{_joined(tx, value.items)}]{end})"


def _tuple_text(tx: Tracer, value: Any, function: Function) -> str:
    if isinstance(value, NamedTupleValue) and value.find_python("__repr__"):
        text = value.getattr(tx, "__repr__").call(tx, [], {}).as_constant()
        return str(text)
    if type(value) is not TupleValue:
        return _plain_text(tx, value, function)
    end = "," if len(value.items) == 1 else ""
    return f"({_joined(tx, list(value.items))}{end})"


def _set_text(tx: Tracer, value: Any, function: Function) -> str:
    if not value.entries:
        return f"{value.cls.__name__}()"
    text = f"{{{_joined(tx, value.unpack(tx))}}}"
    return text if value.cls is set else f"{value.cls.__name__}({text})"


def _dict_text(tx: Tracer, value: Any, function: Function) -> str:
    pairs = [(text_of(tx, k, repr), text_of(tx, v, repr)) for k, v in value.pairs(tx)]
    text = "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
    if value.cls is collections.OrderedDict:
        return _plain_text(tx, value, function)
    if value.cls is collections.defaultdict:
        return f"defaultdict({text_of(tx, value.default_factory, repr)}, {text})"
    if value.cls is types.MappingProxyType:
        return f"mappingproxy({text})"
    return text


def _view_text(tx: Tracer, value: Any, function: Function) -> str:
    return f"dict_{value.kind}([{_joined(tx, value.unpack(tx))}])"


def _object_text(tx: Tracer, value: Any, function: Function) -> str:
    names = ("__str__", "__repr__") if function is str else ("__repr__",)
    for name in names:
        if value.has_special(name):
            text = value.special(tx, name).call(tx, [], {})
            if not issubclass(text.python_type(), str):
                found = text.python_type().__name__
                tx.raise_(TypeError, f"{name} returned non-string (type {found})")
            return str(text.as_constant())
    if value.base is not None and value.base.python_type() in _NAMELESS:
        return text_of(tx, value.base, function)
    raise Break("unsupported-value", f"the address in the text of a {value.describe()}")


_NAMELESS = frozenset([int, float, complex, str, bytes, list, tuple, dict])
"""Types whose text does not name the class, so that a subclass has the same."""


def _exception_text(tx: Tracer, value: Value, function: Function) -> str:
    name = "__str__" if function is str else "__repr__"
    return str(value.call_method(tx, name, [], {}).as_constant())


_WRITERS: tuple[tuple[type[Value], Callable[[Any, Any, Any], str]], ...] = (
    (TensorValue, _tensor_text),
    (SymValue, _tensor_text),
    (ListValue, _list_text),
    (TupleValue, _tuple_text),
    (SetValue, _set_text),
    (DictValue, _dict_text),
    (DictView, _view_text),
    (UserObject, _object_text),
    (ExceptionValue, _exception_text),
)


# ---- formatting

HOLES = (TensorValue, FloatValue, SymValue, MadeValue, TextValue)
"""Kinds whose text is made when it is needed."""


class Shown:
    """Stands for an object in a format call: its text is known, the object is not."""

    def __init__(self, tx: Tracer, value: Value) -> None:
        self.tx = tx
        self.value = value

    def __str__(self) -> str:
        return text_of(self.tx, self.value, str)

    def __repr__(self) -> str:
        return text_of(self.tx, self.value, repr)

    def __format__(self, spec: str) -> str:
        return str(_format(self.tx, self.value, constant(spec)).as_constant())


def shown(tx: Tracer, value: Value) -> Any:
    """Return a value as an argument of a format call."""
    value = tx.force(value)
    if isinstance(value, TensorValue | SymValue):
        return Shown(tx, value)
    try:
        return value.data(tx)
    except NotConstant:
        return Shown(tx, value)


def percent_text(tx: Tracer, text: str, right: Value) -> Value:
    """Evaluate `text % right`."""
    operand: Any
    if type(right) is TupleValue:
        operand = tuple(shown(tx, item) for item in right.items)
    elif isinstance(right, DictValue):
        operand = {key.as_constant(): shown(tx, item) for key, item in right.pairs(tx)}
    else:
        operand = shown(tx, right)
    try:
        return constant(text % operand)
    except (TypeError, ValueError, KeyError) as error:
        tx.raise_real(error)


def format_text(tx: Tracer, text: str, args: list[Value], kwargs: Kwargs) -> Value:
    """Evaluate `text.format(*args, **kwargs)`."""
    real = [shown(tx, arg) for arg in args]
    words = {name: shown(tx, value) for name, value in kwargs.items()}
    try:
        return constant(text.format(*real, **words))
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        tx.raise_real(error)


@rule(format)
def _format(tx: Tracer, value: Value, spec: Value = Constant("")) -> Value:  # noqa: B008
    if isinstance(value, UserObject):
        if value.has_special("__format__"):
            return value.special(tx, "__format__").call(tx, [spec], {})
        if value.base is None and spec.as_constant() == "":
            return constant(text_of(tx, value, str))
        if value.base is None:
            text = f"unsupported format string passed to {value.cls.__name__}.__format__"
            tx.raise_(TypeError, text)
    if isinstance(value, HOLES):
        return _text_with_hole(tx, value, spec)
    if spec.as_constant() == "" and not isinstance(value, Constant | ClassValue):
        return constant(text_of(tx, value, str))
    return fold(tx, format, [value, spec], {})


def _text_with_hole(tx: Tracer, value: Value, spec: Value) -> Value:
    number, spec_text = False, spec.as_constant()
    example: Any = getattr(value, "hint", "") if not isinstance(value, SymValue) else 0
    if isinstance(value, TensorValue):
        number = value.tensor_type is torch.Tensor and value.fake.dim() == 0
        example = (0.0 if value.fake.dtype.is_floating_point else 0) if number else object()
    try:
        format(example, spec_text)
    except (TypeError, ValueError) as error:
        raise Break("op-failed", str(error)) from None
    return TextValue(tx, format, [value, spec], number=number)


def _texts(function: Any) -> None:
    @rule(function)
    def text(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
        if len(args) == 1 and not kwargs and isinstance(args[0], HOLES):
            return TextValue(tx, function, list(args))
        if len(args) != 1 or kwargs or args[0].is_constant():
            return fold(tx, function, list(args), kwargs)
        if function is str and isinstance(args[0], UserObject) and args[0].cls is not str:
            return constant(text_of(tx, args[0], str))
        return constant(text_of(tx, args[0], function))


for _function in (str, repr, ascii):
    _texts(_function)
