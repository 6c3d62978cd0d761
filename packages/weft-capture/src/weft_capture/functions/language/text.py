"""str, repr, format, str.format and `%` of all values."""

from __future__ import annotations

import collections
import ctypes
import operator
import re
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft_capture.breaks import Break, NotConstant
from weft_capture.functions.classes import ClassValue
from weft_capture.functions.table import rule, rule_of_each
from weft_capture.model.constant import Constant, constant, fold, real_call
from weft_capture.model.containers import (
    Container,
    NamedTupleValue,
    SetValue,
    SizeValue,
    TupleValue,
)
from weft_capture.model.dicts import DictValue, DictView
from weft_capture.model.exceptions import ExceptionValue
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Tracer, Value, method
from weft_capture.model.proxy import Proxy
from weft_capture.model.slots import listed, without_class
from weft_capture.tensors.runtime_values import RuntimeValue, TextValue, join_texts
from weft_capture.tensors.symbolic_scalars import SymFloatValue
from weft_capture.tensors.tensor import SymValue, TensorValue

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
"""The text of a container inside itself."""


_thread_state = ctypes.pythonapi.PyThreadState_GetDict
_thread_state.restype = ctypes.c_void_p  # a borrowed reference


def _inside_real_text() -> bool:
    """Say whether the interpreter is inside the repr of a container (Py_ReprEnter)."""
    notes = ctypes.cast(_thread_state(), ctypes.py_object).value
    return bool(notes.get("Py_Repr"))


def text_of(tx: Tracer, value: Value, function: Function) -> str:
    """Return `function(value)` for str, repr or ascii.

    Raises:
        Break: when the text depends on a tensor or on an object's address.
    """
    value = tx.force(value)
    writer = next((w for value_class, w in _WRITERS if isinstance(value, value_class)), _plain_text)
    active: list[Value] = _state.__dict__.setdefault("active", [])
    if not active and _inside_real_text():
        raise Break("string-conversion", "a repr inside the repr of a real container")
    if any(current is value for current in active) and not isinstance(value, UserObject):
        if isinstance(value, DictValue) and value.cls is collections.defaultdict:
            return f"defaultdict({text_of(tx, value.default_factory, repr)}, {{...}})"
        return _INSIDE_ITSELF.get(value.python_type(), "...")
    active.append(value)
    try:
        text = writer(tx, value, function)
    finally:
        active.pop()
    return ascii(text)[1:-1] if function is ascii and not text.isascii() else text


def _plain_text(tx: Tracer, value: Value, function: Function) -> str:
    try:
        real = value.data(tx)
    except NotConstant:
        raise Break("string-conversion", f"text of {value.describe()}") from None
    if tx.effects and tx.effects.touches(real):
        raise Break("pending-mutation", f"text of {value.describe()}, which was changed")
    return function(real)


def _tensor_text(tx: Tracer, value: Value, function: Function) -> str:
    raise Break("data-dependent-value", f"text of {value.describe()}")


def _real_text(tx: Tracer, value: Any, function: Function) -> str:
    """The text of a real container of proxies, whose texts are those of the items."""
    name = _method(value.python_type(), function)
    overridden = isinstance(getattr(value.python_type(), name), types.FunctionType)
    if isinstance(value, NamedTupleValue) and overridden:
        text = value.tp_getattro(tx, name).tp_call(tx, [], {})
        return str(_checked(tx, name, text).as_constant())
    if isinstance(value, SizeValue):
        return _plain_text(tx, value, function)
    container = value.owner if isinstance(value, DictView) else value
    real = container.build(lambda item: Proxy(tx, item))
    return repr(getattr(real, value.view_name)() if isinstance(value, DictView) else real)


def _set_text(tx: Tracer, value: Any, function: Function) -> str:
    if not value.entries:
        return f"{value.cls.__name__}()"
    text = f"{{{', '.join(text_of(tx, item, repr) for item in value.unpack(tx))}}}"
    return text if value.cls is set else f"{value.cls.__name__}({text})"


def _method(cls: Any, function: Function) -> str:
    """Return the method for a text: `__repr__` where `object.__str__` would call it."""
    return "__repr__" if function is not str or cls.__str__ is object.__str__ else "__str__"


def _own_text(tx: Tracer, value: Any, function: Function) -> Value | None:
    """Return the text of an object's own method, perhaps a deferred text."""
    name = _method(value.cls, function)
    if not value.has_special(name):
        return None
    return _checked(tx, name, value.special(tx, name).tp_call(tx, [], {}))


def _checked(tx: Tracer, name: str, text: Value) -> Value:
    """What a method for a text returned, which must be one."""
    if not issubclass(text.python_type(), str):
        result_type = text.python_type().__name__
        tx.raise_(TypeError, f"{name} returned non-string (type {result_type})")
    return text


def _object_text(tx: Tracer, value: Any, function: Function) -> str:
    own_text = _own_text(tx, value, function)
    if own_text is not None:
        return str(own_text.as_constant())
    if value.base is not None and getattr(value.cls, _method(value.cls, function)) in _NAMELESS:
        return text_of(tx, value.base, function)
    raise Break("string-conversion", f"the text of a {value.describe()}, which may hold an address")


_NAMELESS = {t.__repr__ for t in (int, float, complex, str, bytes, list, tuple, dict)}
_NAMELESS |= {str.__str__, bytes.__str__}
"""Methods whose text does not contain the class name, so that subclasses share it."""


def _exception_text(tx: Tracer, value: Value, function: Function) -> str:
    name = "__str__" if function is str else "__repr__"
    return str(_checked(tx, name, value.call_method(tx, name, [], {})).as_constant())


_WRITERS: tuple[tuple[type[Value], Callable[[Any, Any, Any], str]], ...] = (
    (TensorValue, _tensor_text),
    (SymValue, _tensor_text),
    (Container, _real_text),
    (DictView, _real_text),
    (SetValue, _set_text),
    (UserObject, _object_text),
    (ExceptionValue, _exception_text),
)


# ---- formatting

HOLES = (TensorValue, SymFloatValue, SymValue, RuntimeValue, TextValue)
"""Values whose text is formatted at run time."""


def format_argument(tx: Tracer, value: Value) -> Any:
    """Return a value as an argument of a format call."""
    value = tx.force(value)
    try:
        return value.data(tx)
    except NotConstant:
        return Proxy(tx, value)


_NOT_MAPPED = collections.deque.__getitem__
"""Of a sequence without `mp_subscript`, which PyMapping_Check looks for."""


def percent_text(tx: Tracer, text: str, right: Value) -> Value:
    """Evaluate `text % right`."""
    plain, operand_type = without_class(right), right.python_type()
    if "%" not in text and getattr(operand_type, "__getitem__", _NOT_MAPPED) is not _NOT_MAPPED:
        if not issubclass(operand_type, tuple | str):  # any other one may be a mapping
            return constant(text)
    operands = plain.unpack(tx) if isinstance(plain, TupleValue) else [right]
    if not isinstance(plain, DictValue) and any(isinstance(tx.force(p), HOLES) for p in operands):
        if "c" in (conversion[-1] for conversion in _PLACES.findall(text)):
            raise Break("symbolic-number", "%c of a symbolic number")
        shows_objects = _OBJECTS.search(text) is not None
        return _with_holes(tx, _interpolated, [constant(text)], operands, not shows_objects)
    if isinstance(plain, TupleValue):
        operand: Any = tuple(format_argument(tx, value) for value in operands)
    elif isinstance(plain, DictValue) and (plain is right or "%(" in text):
        if plain is not right:  # whose methods are asked
            raise Break("builtin-error", "% with an instance of a subclass of dict")
        operand = plain.build(lambda item: format_argument(tx, item))
    else:
        operand = format_argument(tx, right)
    return constant(real_call(tx, operator.mod, text, operand))


@method(Constant, "__mod__")
def _mod(tx: Tracer, self: Constant, right: Value) -> Value:
    if isinstance(self.value, str):
        text = percent_text(tx, self.value, right)
        # The format itself, even of a subclass (CPython: _PyUnicodeWriter_Finish).
        return self if self.value and "%" not in self.value else text
    cls: Any = type(self.value)
    own = operator.mod if cls is bytes else cls.__mod__  # which may return NotImplemented
    return fold(tx, own, [self, right], {})


@method(Constant, "format")
def _format_text(tx: Tracer, self: Constant, *args: Value, **kwargs: Value) -> Value:
    text: Any = self.value
    if text and "{" not in text and "}" not in text:
        return self
    if any(isinstance(tx.force(arg), HOLES) for arg in (*args, *kwargs.values())):
        head = [self, constant(len(args)), constant(tuple(kwargs))]
        return _with_holes(tx, _filled, head, [*args, *kwargs.values()], "!" not in text)
    real = [format_argument(tx, arg) for arg in args]
    keywords = {name: format_argument(tx, value) for name, value in kwargs.items()}
    pairs = zip((*args, *kwargs.values()), (*real, *keywords.values()), strict=True)
    if _PARTS.search(text) and any(type(s) is not arg.python_type() for arg, s in pairs):
        raise Break("string-conversion", "a format with attributes or items in its fields")
    return constant(real_call(tx, text.format, *real, **keywords))


_PARTS = re.compile(r"{[^{}:!]*[.\[]")
_PLACES = re.compile(r"%[^%a-zA-Z]*[hlL]?[a-zA-Z]")
_OBJECTS = re.compile(r"%(\(.*?\))?[-#0 +]*[\d*]*(\.[\d*]+)?[hlL]?[sra]")
"""Conversions of a `%` format that accept any object."""


def _filled(text: str, count: int, names: tuple[str, ...], *values: Any) -> str:
    return text.format(*values[:count], **dict(zip(names, values[count:], strict=True)))


def _interpolated(text: str, *values: Any) -> str:
    return text % values


def _with_holes(
    tx: Tracer,
    function: Callable[..., str],
    head: Sequence[Value],
    arguments: list[Value],
    numbers: bool,
) -> Value:
    """Defer formatting to run time; `numbers`: it shows only the value of a one-element tensor.

    Raises:
        Break: for an operand that is neither deferred nor data, or does not fit its conversion.
    """
    forced = [tx.force(arg) for arg in arguments]
    operands = [o if isinstance(o, HOLES) else constant(o.data(tx)) for o in forced]
    try:
        function(*(operand.as_constant() for operand in head), *map(_example, operands))
    except Exception as error:
        raise Break("builtin-error", str(error)) from None
    tensors = [operand for operand in operands if isinstance(operand, TensorValue)]
    return TextValue(
        tx, function, [*head, *operands], number=numbers and all(map(_is_number, tensors))
    )


def _is_number(tensor: TensorValue) -> bool:
    return tensor.cls is torch.Tensor and tensor.fake.dim() == 0


def _example(operand: Value) -> Any:
    """Return an object that accepts the same formats as the operand."""
    if isinstance(operand, TensorValue):
        number = 0.0 if operand.fake.dtype.is_floating_point else 0
        return number if _is_number(operand) else object()
    if isinstance(operand, SymValue | TextValue):
        return operand.python_type()()
    return (
        operand.hint if isinstance(operand, SymFloatValue | RuntimeValue) else operand.as_constant()
    )


@method(Constant, "join")
def _str_join(tx: Tracer, self: Constant, *args: Value, **kwargs: Value) -> Value:
    """Join strings of which some are known only at run time."""
    arguments = list(args)
    if isinstance(self.value, str) and arguments and not arguments[0].is_constant():
        texts = [tx.force(text) for text in listed(tx, arguments[0])]
        if len(arguments) == 1 and all(text.python_type() is str for text in texts):
            return join_texts(tx, [piece for text in texts for piece in (self, text)][1:])
        arguments[0] = tx.tuple_of(texts)
    return self.call_method_fallback(tx, "join", arguments, kwargs)


@rule(format)
def _format(tx: Tracer, value: Value, spec: Value = Constant("")) -> Value:  # noqa: B008
    if isinstance(value, UserObject):
        if value.has_special("__format__"):
            result = value.special(tx, "__format__").tp_call(tx, [spec], {})
            if not issubclass(result_type := result.python_type(), str):
                tx.raise_(TypeError, f"__format__ must return a str, not {result_type.__name__}")
            return result
        if value.base is None and spec.as_constant() == "":
            return _own_text(tx, value, str) or constant(text_of(tx, value, str))
        if value.base is None:
            text = f"unsupported format string passed to {value.cls.__name__}.__format__"
            tx.raise_(TypeError, text)
    if isinstance(value, HOLES):
        return _text_with_hole(tx, value, spec)
    if spec.as_constant() == "" and not isinstance(value, Constant | ClassValue):
        return constant(text_of(tx, value, str))
    return fold(tx, format, [value, spec], {})


def _text_with_hole(tx: Tracer, value: Value, spec: Value) -> Value:
    try:
        format(_example(value), spec.as_constant())
    except (TypeError, ValueError) as error:
        raise Break("builtin-error", str(error)) from None
    number = isinstance(value, TensorValue) and _is_number(value)
    return TextValue(tx, format, [value, spec], number=number)


@rule_of_each(str, repr, ascii)
def _text(function: Any, tx: Tracer, /, *args: Value, **kwargs: Value) -> Value:
    if len(args) == 1 and not kwargs and isinstance(args[0], HOLES):
        return TextValue(tx, function, list(args))
    if len(args) != 1 or kwargs or type(args[0]) is Constant:
        return fold(tx, function, list(args), kwargs)
    if function is str and isinstance(args[0], UserObject) and args[0].cls is not str:
        return _own_text(tx, args[0], str) or constant(text_of(tx, args[0], str))
    return constant(text_of(tx, args[0], function))
