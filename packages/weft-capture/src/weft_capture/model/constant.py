"""Constants: immutable Python objects whose value is known while capturing.

Numbers, strings, None, dtypes, devices, enum members and the like. The guard that makes a value
from outside constant is added where it is wrapped (`functions.wrap`), so constants need no source.
"""

from __future__ import annotations

import contextlib
import enum
import operator
import types
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from weft_core.warnings_capture import suppress_warnings
from weft_guards.payloads import name_of
from weft_guards.sources import (
    AttrSource,
    ConstSource,
    DictSource,
    ItemSource,
    NamedSource,
    Source,
)

from weft_capture.breaks import Break, NotConstant
from weft_capture.library_traits import SCALAR_LIBRARIES, scalar_library
from weft_capture.model.protocol import Call, Kwargs, MethodOf, Operator, Output, Tracer, Value
from weft_capture.python_compat import type_name

SCALARS = (int, float, bool, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented))
CONSTANT_TYPES: set[type] = {
    *SCALARS,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    types.CodeType,
    type(torch.finfo(torch.float32)),
    type(torch.iinfo(torch.int32)),
}
"""Exact types whose instances are wrapped as `Constant`; rules add theirs."""

VARYING_TYPES: set[type] = {str, bytes, complex}
"""Types, except float, whose instances become a `RuntimeValue` once they have varied."""

PLACEMENTS = "torch.distributed.tensor.placement_types"  # further such types

_RAISES_ARE_PYTHONS = (
    ArithmeticError, LookupError, ValueError, TypeError, AttributeError, SyntaxError, ImportError,
)  # fmt: skip


def is_constant_object(obj: object) -> bool:
    """Say whether a Python object is wrapped as `Constant`."""
    cls = type(obj)
    return cls in CONSTANT_TYPES or issubclass(cls, enum.Enum) or cls.__module__ == PLACEMENTS


def fits_graph(number: int) -> bool:
    """Say whether the graph, whose ints have 64 bits, holds an int."""
    return number.bit_length() < 63


def is_shared(obj: object) -> bool:
    """Say whether all equal objects are one object."""
    if type(obj) in (int, bool):
        return -5 <= obj <= 256  # type: ignore[operator]
    return isinstance(obj, _SINGLE) or (type(obj) in (str, bytes) and not obj)


_SINGLE = (
    *(type(singleton) for singleton in (None, ..., NotImplemented)),
    *(enum.Enum, torch.dtype, torch.layout, torch.memory_format),
)


@dataclass(eq=False)
class Constant(Value):
    """A known immutable Python object.

    `origin` is the source of a number or string from outside, which keeps its identity: the guard
    on it tests its value.
    """

    value: object
    origin: Source | None = None

    def python_type(self) -> type:
        return type(self.value)

    def describe(self) -> str:
        return name_of(self.value)

    def as_constant(self) -> Any:
        return self.value

    def nb_bool(self, tx: Tracer) -> bool:
        if self.value is NotImplemented:
            raise Break("warns", "truth of NotImplemented, which warns")
        return bool(self.value)

    def tp_hash(self) -> object:
        return self.value

    def same_object(self, other: Value) -> bool:
        if not isinstance(other, Constant):
            return False
        if self.value is other.value:
            return True
        # Equal strings, numbers and devices may be one object or two; Python does not promise.
        return type(self.value) is type(other.value) and bool(self.value == other.value)

    def declines(self, name: str, argument: Value) -> bool:
        if isinstance(self.value, str | bytes):
            return _declines_count(name, argument)
        if not _is_builtin(self.value):
            return False
        base = getattr(argument, "base", None)  # the base of an instance
        data = isinstance(argument, Varying) or argument.is_constant()
        return not data and (base is None or base.in_graph)

    def inherits_comparison(self, name: str) -> bool:
        # The operators of a builtin class know builtin classes only.
        return _is_builtin(self.value) or super().inherits_comparison(name)

    def reconstruct(self, out: Output) -> None:
        if self.origin is None:
            super().reconstruct(out)
        else:
            self.origin.emit(out.writer)

    def forwards(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Call | None:
        call = getattr(type(self.value), "__call__", None)  # noqa: B004 - of an enum's member
        if not isinstance(call, types.FunctionType):
            return None
        return tx.const_object(call), [self, *args], kwargs

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        getter = getattr(type(self.value), name, None)
        if type(getter) is property and isinstance(getter.fget, types.FunctionType):
            return tx.const_object(getter.fget).tp_call(tx, [self], {})
        attribute = real_call(tx, getattr, self.value, name)
        owner = getattr(attribute, "__self__", None)
        if isinstance(getattr(attribute, "__func__", None), types.FunctionType):
            function = tx.const_object(attribute.__func__)
            return tx.bound_method(function, self if owner is self.value else constant(owner))
        if owner is self.value or (isinstance(owner, type) and isinstance(self.value, owner)):
            return MethodOf(self, name)
        if name in getattr(self.value, "__dict__", {}) and not name.startswith("_"):
            return tx.wrap(attribute, AttrSource(ConstSource(self.value), name))
        return tx.const_object(attribute)

    def call_base_method(
        self, tx: Tracer, base_class: type, name: str, args: list[Value], kwargs: Kwargs
    ) -> Value:
        name = "__repr__" if (base_class, name) == (object, "__str__") else name
        plain = type(self.value) is base_class or base_class not in (int, float, str, bytes)
        value = self.value if plain else plain_scalar(self.value)
        return constant(value).call_method(tx, name, args, kwargs)

    def call_method_fallback(
        self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs
    ) -> Value:
        bound = getattr(self.value, name, None)
        if bound is None and name.startswith("__"):
            raise Break("builtin-error", f"{self.python_type().__name__}.{name}")
        if isinstance(getattr(bound, "__func__", None), types.FunctionType) or bound is None:
            return self.tp_getattro(tx, name).tp_call(tx, args, kwargs)
        if isinstance(self.value, torch.device) and name in ("__enter__", "__exit__"):
            return tx.overrides.device_block(self, name)
        unbound = getattr(type(self.value), name)
        if isinstance(unbound, types.MethodDescriptorType):  # errors name it as for a call
            return fold(tx, unbound, [self, *args], kwargs)
        return fold(tx, bound, args, kwargs)

    def mp_subscript(self, tx: Tracer, key: Value) -> Value:
        return fold(tx, operator.getitem, [self, key], {})

    def tp_iter(self, tx: Tracer) -> Value:
        if isinstance(getattr(type(self.value), "__iter__", None), types.FunctionType):
            return self.call_method(tx, "__iter__", [], {}).tp_iter(tx)
        if isinstance(self.value, tuple):  # an enum's member
            return tx.literal(self.value[:]).tp_iter(tx)
        if not isinstance(self.value, (str, bytes)):
            tx.raise_(TypeError, f"'{type_name(type(self.value))}' object is not iterable")
        return tx.iterator_over(self)


def _declines_count(name: str, argument: Value) -> bool:
    """Say whether repeating a str or bytes returns NotImplemented (CPython: sequence_repeat)."""
    return name in ("__mul__", "__rmul__") and not hasattr(argument.python_type(), "__index__")


def _is_builtin(obj: object) -> bool:
    return type(obj).__module__ == "builtins"


class Varying(Value):
    """Immutable data known only at run time; where capture needs the value, a guard fixes it."""

    def declines(self, name: str, argument: Value) -> bool:
        text = issubclass(self.python_type(), str | bytes)
        return text and _declines_count(name, argument)

    def tp_richcompare(self, tx: Tracer, op: Operator, left: Value, right: Value) -> Value | None:
        return tx.compare_varying(op.function, left, right)

    def is_constant(self) -> bool:
        return False

    def tp_hash(self) -> object:
        return self.as_constant()

    def nb_bool(self, tx: Tracer) -> bool:
        outcome = tx.by_python(operator.truth, [self])
        return bool((outcome or self).as_constant())

    def call_method_fallback(
        self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs
    ) -> Value:
        method = getattr(self.python_type(), name, None)
        result = None if kwargs or method is None else tx.by_python(method, [self, *args])
        return result or tx.literal(self.as_constant()).call_method(tx, name, args, kwargs)


class NullValue(Value):
    """CPython's NULL stack slot, and an unbound local."""

    def describe(self) -> str:
        return "NULL"

    def reconstruct(self, out: Output) -> None:
        out.writer.push_null()


FRAME_CLASSES: weakref.WeakKeyDictionary[type, Value] = weakref.WeakKeyDictionary()
"""Real class -> the value of its class statement, for classes created during capture."""


def class_value(cls: type) -> Value:
    """Return the value of a class for generated code, which creates the frame's classes again."""
    return FRAME_CLASSES.get(cls) or Constant(cls)


NULL = NullValue()
NONE = Constant(None)
NOT_IMPLEMENTED = Constant(NotImplemented)
TRUE = Constant(True)
FALSE = Constant(False)


def constant(value: object) -> Constant:
    """Return the constant of a Python object; the singletons have one value each."""
    if value is None:
        return NONE
    if value is True:
        return TRUE
    if value is False:
        return FALSE
    return Constant(value)


_STABLE = (NamedSource, ItemSource, DictSource, AttrSource, ConstSource)


def is_stable(source: Source | None) -> bool:
    """Say whether a source gives the same object whenever the code of a capture asks it."""
    while isinstance(source, _STABLE):
        source = source.base
    return source is None


def sourced(obj: object, source: Source) -> Constant:
    """Return the constant of a Python object from outside, whose value is guarded."""
    if isinstance(source, ConstSource) or is_shared(obj):
        return constant(obj)
    return Constant(obj, source) if is_stable(source) else constant(obj)


def fold(tx: Tracer, function: Any, args: list[Value], kwargs: Kwargs) -> Value:
    """Run a side-effect-free Python function on constants now, on data that varies in each call.

    Raises:
        Break: when an argument is not constant.
        Raised: when the function raises.
    """
    varies = not kwargs and any(isinstance(arg, Varying) for arg in args)
    evaluated = tx.by_python(function, args) if varies else None
    if evaluated is not None:
        return evaluated
    try:
        real_args = [arg.data(tx) for arg in args]
        real_kwargs = {name: value.data(tx) for name, value in kwargs.items()}
    except NotConstant as error:
        name = getattr(function, "__qualname__", repr(function))
        raise Break("constant-required", f"{name} of {error}") from None
    default = SCALAR_LIBRARIES.get(getattr(function, "__module__", None) or "")
    library = next(filter(None, map(scalar_library, real_args)), default)
    with library.raising() if library else contextlib.nullcontext():
        result = real_call(tx, function, *real_args, **real_kwargs)
    if getattr(function, "__name__", "") in ("hash", "__hash__"):
        tx.process_bound = "a hash"
    same = (arg for arg in args if isinstance(arg, Constant) and arg.value is result)
    return next(same, None) or tx.fresh(result)


def real_call(tx: Tracer, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a real function now; the program raises its exceptions.

    Raises:
        Break: when it warns, which has to happen in each call.
    """
    failed = None
    with suppress_warnings("error") as warned:  # it stopped at the first warning
        try:
            result = function(*args, **kwargs)
        except Warning:
            if not warned:
                raise
        except FloatingPointError:
            raise Break("warns", "a floating point warning") from None
        except _RAISES_ARE_PYTHONS as error:
            failed = error.with_traceback(None)  # the traceback refers to frames of capture
    if warned:
        raise Break("warns", f"a call that warns: {warned[0]}")
    if failed is not None:
        tx.raise_real(failed)
    return result


def plain_scalar(obj: Any) -> Any:
    """Return the int, float, str or bytes of an instance of a subclass, bypassing its methods."""
    cls = type(obj)  # `isinstance` would ask the object for its `__class__`
    if issubclass(cls, str):
        return str.__str__(obj)
    if issubclass(cls, bytes):
        return bytes.__getitem__(obj, slice(None))
    if scalar_library(obj):
        return obj.item()
    return int.__int__(obj) if issubclass(cls, int) else float.__float__(obj)
