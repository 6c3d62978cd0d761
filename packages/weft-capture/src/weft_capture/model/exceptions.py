"""Exceptions that the user's program makes, raises and catches during capture.

`chain` does what CPython's `_PyErr_SetObject` does: an exception that is raised while another is
being handled gets the other one as its `__context__`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from weft_guards.sources import CallSource, ItemSource, Source

from weft_capture.breaks import Break, NotConstant
from weft_capture.model import attributes
from weft_capture.model.constant import FALSE, NONE, TRUE, class_value, constant
from weft_capture.model.containers import TupleValue
from weft_capture.model.dicts import LazyValue
from weft_capture.model.protocol import (
    Frame,
    InstanceValue,
    Kwargs,
    Output,
    Tracer,
    Value,
    method,
)
from weft_capture.python_compat import add_note, error_text, type_name


class TracebackValue(Value):
    """The traceback of a raised exception, of which only the existence is known."""

    cls = types.TracebackType

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        if tx.frame is not None and "tb_frame" in tx.frame.function.code.co_names:
            error = Break("exception-state", f"{name} of a traceback, whose frames are read")
            error.eager_frame = tx.frame  # its resume functions would be separate frames
            raise error
        return super().tp_getattro(tx, name)


TRACEBACK = TracebackValue()
_UNSET: dict[str, Value] = {
    "__context__": NONE,
    "__cause__": NONE,
    "__traceback__": NONE,
    "__suppress_context__": FALSE,
}


_SETTABLE = ("args", "__cause__", "__context__", "__suppress_context__")
_FIELDS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (ImportError, ("name", "path")),
    (AttributeError, ("name", "obj")),
    (NameError, ("name",)),
)
"""Keyword arguments of builtin exceptions, which the interpreter sets, too."""


@dataclass(eq=False)
class ExceptionValue(InstanceValue):
    """An exception instance.

    Args:
        cls: its class.
        args: its `args`.
        source: where it comes from, for one that existed before the frame.
    """

    cls: type
    args: list[Value]
    source: Source | None = None
    attributes: dict[str, Value] = field(default_factory=dict)
    raised: bool = False
    stated_in: Frame | None = None  # the frame where capture raised it
    changing = ("args", "attributes", "raised")

    def describe(self) -> str:
        return f"{self.cls.__name__}({', '.join(arg.describe() for arg in self.args)})"

    def builtin(self) -> Any:
        """Return a real exception of the nearest builtin class with the same arguments.

        Raises:
            NotConstant: when the arguments are not constants.
        """
        builtin_class = next(k for k in self.cls.__mro__ if not k.__flags__ & _HEAP_TYPE)
        try:
            return builtin_class(*(arg.as_constant() for arg in self.args))
        except TypeError:
            raise NotConstant(self.describe()) from None

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        self.refuse("__getattribute__")
        return attributes.plain_attribute(tx, self, name)

    def own_attribute(self, tx: Tracer, name: str) -> Value | None:
        if name not in self.attributes and self.source is not None:
            tx.guard(self.source, "ATTR_ABSENT", name)
        return tx.force(self.attributes[name]) if name in self.attributes else None

    def tp_member(self, tx: Tracer, definer: type, name: str) -> Value | None:
        if name in self.attributes:
            return tx.force(self.attributes[name])
        if name == "args":
            return tx.tuple_of(self.args)
        if name == "__traceback__" and self.raised:
            return TRACEBACK
        if name in _UNSET and self.source is None:
            if name == "__context__" and self.raised:
                check_outside_handlers(tx)
            return _UNSET[name]
        if name == "value" and issubclass(self.cls, StopIteration):
            return self.args[0] if self.args else NONE
        if issubclass(self.cls, BaseExceptionGroup) and name in ("message", "exceptions"):
            message, members = self.args
            return message if name == "message" else tx.tuple_of(members.unpack(tx))
        if name == "__class__" or "__slots__" in vars(definer):
            return None
        unknown = (
            self.raised and name in _fields(self.cls) and not issubclass(self.cls, ImportError)
        )
        if unknown or self.source is not None or name == "__dict__":
            raise Break("exception-state", f"{name} of {self.describe()} of the current state")
        return tx.literal(getattr(self.builtin(), name))

    def refuse(self, name: str) -> None:
        """Break where the program overrides a method of `object`."""
        mro_entry = attributes.lookup(self.cls, name)
        if mro_entry is not None and not isinstance(mro_entry[1], types.WrapperDescriptorType):
            raise Break("special-method", f"{self.cls.__name__}.{name}")

    def call_method(self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        mro_entry = attributes.lookup(self.cls, name)
        if mro_entry is not None and attributes.is_python_code(mro_entry[1]):
            return attributes.bind(tx, mro_entry, name, self, self.cls).tp_call(tx, args, kwargs)
        return super().call_method(tx, name, args, kwargs)

    def call_base_method(
        self, tx: Tracer, base_class: type, name: str, args: list[Value], kwargs: Kwargs
    ) -> Value:
        return super().call_method(tx, name, args, kwargs)

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        self.refuse("__setattr__")
        mro_entry = attributes.lookup(self.cls, name)
        checked = name in ("__cause__", "__context__") and value is not NONE
        refused = checked and not isinstance(value, ExceptionValue)
        settable = mro_entry is None or not hasattr(type(mro_entry[1]), "__set__")
        if not settable and name not in _SETTABLE:
            refused = name != "__traceback__" or value is not TRACEBACK
        if refused:
            raise Break("exception-state", f"setting {name} of {self.describe()}")
        if name == "args":
            self._check_is_ours()
        if name == "args":
            tx.mutate(self)
            self.args = value.unpack(tx)
            return
        self.store(tx, name, value)
        if name == "__cause__":
            self.attributes["__suppress_context__"] = TRUE

    def store(self, tx: Tracer, name: str, value: Value) -> None:
        tx.mutate(self)
        self.attributes[name] = value

    def tp_delattro(self, tx: Tracer, name: str) -> None:
        self.refuse("__delattr__")
        if name not in self.attributes:
            tx.raise_(AttributeError, f"'{type_name(self.cls)}' object has no attribute '{name}'")
        self._check_is_ours()
        tx.mutate(self)
        del self.attributes[name]

    def _check_is_ours(self) -> None:
        if self.source is not None:
            raise Break("exception-state", "a change of args of an input exception")

    def replay(self, out: Output) -> None:
        out.replay_attributes(self, self.attributes)

    def reconstruct(self, out: Output) -> None:
        if self.raised:
            raise Break("exception-state", f"a caught {self.cls.__name__} with its traceback")
        out.call(new_exception, [class_value(self.cls), *self.args])
        out.remember(self)
        out.fill_attributes(self, {"args": TupleValue(self.args), **self.attributes})


def wrap_exception(tx: Tracer, obj: BaseException, source: Source) -> Value:
    """Wrap an input exception, bypassing any `__getattribute__` of its class."""

    def read(name: str) -> Any:
        return object.__getattribute__(obj, name), attributes.read_past(source, obj, name)

    value = ExceptionValue(type(obj), tx.wrap(*read("args")).unpack(tx), source)
    traceback, base = read("__traceback__")
    if traceback is not None:
        tx.guard(base, "TYPE", type(traceback))
        value.raised = True
    namespace, base = read("__dict__")
    tx.check_namespace(namespace)
    value.attributes = {
        name: LazyValue(item, ItemSource(base, name)) for name, item in namespace.items()
    }
    if issubclass(type(obj), StopIteration):  # it can be set independently of args
        value.attributes["value"] = LazyValue(*read("value"))
    return value


def _fields(cls: type) -> tuple[str, ...]:
    return next((names for base, names in _FIELDS if issubclass(cls, base)), ())


_HEAP_TYPE = 1 << 9


def new_exception(cls: type[BaseException], *args: object) -> BaseException:
    """Create an exception without a Python `__init__`; the builtin one sets its fields."""
    error = cls.__new__(cls, *args)
    builtin: Any = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)
    with suppress(TypeError):
        builtin.__init__(error, *args)
    return error


def check_outside_handlers(tx: Tracer) -> None:
    """Break where a caller outside of the capture handles an exception, which is not known here."""
    if tx.in_handler:
        raise Break("exception-state", "the exception that a caller handles")
    tx.guard(CallSource(sys.exception, ()), "CONST", None)


def handled(tx: Tracer) -> Value | None:
    """Return the exception being handled, in this frame or one that called it in the capture."""
    return next((f.exception for f in tx.active_frames() if f.exception is not None), None)


def chain(tx: Tracer, value: Value, *thrown_into: Value | None) -> Value:
    """Mark an exception as raised, with the exception being handled as its context.

    For an exception thrown into a generator, only `thrown_into`'s handlers count.
    """
    if not isinstance(value, ExceptionValue):
        return value
    tx.journal.touch(value)
    value.raised = True
    context = thrown_into[0] if thrown_into else handled(tx)
    if not isinstance(context, ExceptionValue) or context is value:
        return value
    link: Value = context
    seen: set[Value] = set()  # the program can create a cycle
    while isinstance(link, ExceptionValue) and link not in seen:
        seen.add(link)
        further = link.attributes.get("__context__", NONE)
        if further is value:  # the chain must not become a cycle
            tx.journal.touch(link)
            link.attributes["__context__"] = NONE
        link = further
    value.attributes["__context__"] = context
    return value


def generator_error(tx: Tracer, stop: Value) -> Value:
    """Convert an exception that leaves the body of a generator (PEP 479)."""
    if not issubclass(stop.python_type(), StopIteration):
        return stop
    text = constant("generator raised StopIteration")
    error = ExceptionValue(RuntimeError, [text])
    chain(tx, error)
    error.tp_setattro(tx, "__cause__", stop)
    error.attributes["__context__"] = stop
    return error


@method(ExceptionValue, "__init__")
def _init(tx: Tracer, self: ExceptionValue, *args: Value, **kwargs: Value) -> None:
    fields = _fields(self.cls)
    if not kwargs.keys() <= set(fields):
        raise Break("builtin-error", f"keyword arguments of {self.describe()}")
    self._check_is_ours()
    tx.mutate(self)
    self.args = self.args if issubclass(self.cls, BaseExceptionGroup) else list(args)
    for name in fields:
        self.attributes.pop(name, None)
    self.attributes.update(kwargs)


@method(ExceptionValue, "with_traceback")
def _with_traceback(tx: Tracer, self: ExceptionValue, traceback: Value) -> Value:
    if traceback is not TRACEBACK and traceback is not NONE:
        raise Break("exception-state", "with_traceback of a traceback from outside")
    return self


@method(ExceptionValue, "add_note")
def _add_note(tx: Tracer, self: ExceptionValue, note: Value) -> Value:
    if not issubclass(note.python_type(), str):
        tx.raise_(TypeError, error_text(add_note, note.python_type()))
    if "__notes__" not in self.attributes:
        self.tp_setattro(tx, "__notes__", tx.literal([]))
    notes = tx.force(self.attributes["__notes__"])
    if not issubclass(notes.python_type(), list):
        tx.raise_(TypeError, "Cannot add note: __notes__ is not a list")
    return notes.call_method(tx, "append", [note], {})


_WITH_OTHER_TEXTS = (OSError, SyntaxError, UnicodeError, ImportError, BaseExceptionGroup)
"""Classes whose messages use more than `args`."""


def _text(tx: Tracer, self: ExceptionValue, function: Callable[[Any], str]) -> Value:
    if self.source is not None and issubclass(self.cls, _WITH_OTHER_TEXTS):
        raise Break("exception-state", f"text of a {self.cls.__name__} from outside the frame")
    try:
        return constant(function(self.builtin()))
    except NotConstant:
        raise Break("string-conversion", "str of an exception with tensors as args") from None


_TEXTS_OF_ARGS: Any = {BaseException.__str__: str, KeyError.__str__: repr}  # of one argument


@method(ExceptionValue, "__str__")
def _str(tx: Tracer, self: ExceptionValue) -> Value:
    shown = _TEXTS_OF_ARGS.get(self.cls.__str__)
    if shown is None or not self.args:
        return _text(tx, self, str)
    one = len(self.args) == 1
    return tx.builtin(shown if one else str, self.args[0] if one else tx.tuple_of(self.args))


def class_by_number(cls: type[OSError], args: list[Value]) -> type[OSError]:
    """Return the class that OSError chooses by an error's number (CPython: Objects/exceptions.c).

    Raises:
        Break: where that depends on unknown values, or the class changes the arguments.
    """
    plain = cls.__module__ == "builtins" and len(args) == 2  # with a third, `args` leaves it out
    if not (plain and all(arg.is_constant() for arg in args)):
        raise Break("object-creation", f"making a {cls.__qualname__}")
    return type(cls(*(arg.as_constant() for arg in args)))


@method(ExceptionValue, "__repr__")
def _repr(tx: Tracer, self: ExceptionValue) -> Value:
    if issubclass(self.cls, _WITH_OTHER_TEXTS):
        real = _text(tx, self, repr).as_constant()
        return constant(self.cls.__name__ + real[real.index("(") :])
    one = len(self.args) == 1
    text = tx.builtin(repr, self.args[0] if one else tx.tuple_of(self.args)).as_constant()
    return constant(self.cls.__name__ + (f"({text})" if one else text))
