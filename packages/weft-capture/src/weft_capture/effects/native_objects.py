"""Objects of C types that capture creates and calls.

An object that one of `FACTORIES` creates depends only on its arguments, so capture can call its
methods and use their results. A log keeps the calls. They are made again, from the first, after a
step was rolled back, and in the replacement code where the object is needed.
"""

from __future__ import annotations

import array
import functools
import hashlib
import io
import marshal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft_capture.breaks import Break, NotConstant
from weft_capture.model.constant import constant
from weft_capture.model.iterators import items_of, next_by_call
from weft_capture.model.protocol import (
    BIRTHS,
    Kwargs,
    MethodOf,
    MutableValue,
    Output,
    Tracer,
    Value,
)

_HASHES = tuple(getattr(hashlib, name) for name in sorted(hashlib.algorithms_guaranteed))
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
NATIVE_TYPES = (io.StringIO, io.BytesIO, bytearray, memoryview, array.array)
FACTORIES = (*NATIVE_TYPES, *_HASHES, hashlib.new, threading.Lock, _LOCKS[1])
"""Callables that create such objects, from data or from one another."""
_TYPES = frozenset([*NATIVE_TYPES, *_LOCKS, *(type(make()) for make in _HASHES)])


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Call a function; return its result and the exception it raised, one of them None."""
    try:
        return function(*args, **kwargs), None
    except Exception as error:
        return None, error


def call_named(owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method."""
    return getattr(owner, name)(*args, **kwargs)


class CallLog:
    """The calls on objects that may depend on each other, in the program's order."""

    def __init__(self) -> None:
        self.epoch = self.saved = -1
        self.born = next(BIRTHS)
        self.calls: list[tuple[Callable[..., Any], list[Value], Kwargs]] = []
        self.values: dict[int, NativeObject] = {}
        self.results: list[tuple[Any, Any]] = []

    def snapshot(self) -> Callable[[], None]:
        """Return a function that forgets the calls made from now on, and what they did."""
        count = len(self.calls)

        def restore() -> None:
            del self.calls[count:]
            self.values = {at: value for at, value in self.values.items() if at < count}
            self.results = []

        return restore

    def run(self, tx: Tracer, function: Any, args: list[Value], kwargs: Kwargs) -> Value:
        """Make a call now, and again in the replacement code.

        Raises:
            Break: when an argument or the result is neither data nor an object of this log.
            Raised: when the call raises.
        """
        tx.journal.touch(self)
        keywords = {name: self._argument(tx, arg) for name, arg in kwargs.items()}
        self.calls.append((function, [self._argument(tx, arg) for arg in args], keywords))
        for call, operands, keyword_args in self.calls[len(self.results) :]:
            real = {name: self._real(tx, value) for name, value in keyword_args.items()}
            done = attempt(call, *(self._real(tx, value) for value in operands), **real)
            self.results.append(done)
        result, error = self.results[-1]
        if error is not None:
            tx.raise_real(error)
        if type(result) not in _TYPES:
            return tx.literal(_checked(result))
        before = next((v for at, v in self.values.items() if self.results[at][0] is result), None)
        at = len(self.calls) - 1
        return before or self.values.setdefault(at, NativeObject(self, at, type(result)))

    def _argument(self, tx: Tracer, value: Value) -> Value:
        value = tx.force(value)
        if isinstance(value, NativeObject) and value.log is self:
            return value
        return tx.literal(_checked(value.data(tx)))

    def _real(self, tx: Tracer, value: Value) -> Any:
        return self.results[value.at][0] if isinstance(value, NativeObject) else value.data(tx)

    def emit(self, out: Output) -> None:
        """Write all calls again."""
        for at, (function, args, kwargs) in enumerate(self.calls):
            out.call(attempt, [constant(function), *args], kwargs)
            if at in self.values:
                out.writer.load_const(0)
                out.writer.binary_subscr()
                out.remember(self.values[at])
            out.writer.pop()


@dataclass(eq=False)
class NativeObject(MutableValue):
    """The result of call number `at` of a log, an object of class `cls`."""

    log: CallLog
    at: int
    cls: type

    def data(self, tx: Tracer) -> Any:
        if self.cls not in (bytearray, memoryview):
            raise NotConstant(self.describe())
        content = self.log.run(tx, bytes, [self], {}).as_constant()
        return content if self.cls is memoryview else bytearray(content)

    def call_method(self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        if not callable(getattr(self.cls, name, None)):
            return super().call_method(tx, name, args, kwargs)
        locked = self.cls is _LOCKS[0] and self.log.run(
            tx, call_named, [self, constant("locked")], {}
        )
        if locked and locked.nb_bool(tx) and name in ("acquire", "__enter__"):
            raise Break("side-effect", "acquiring a lock that is held")
        return self.log.run(tx, call_named, [self, constant(name), *args], kwargs)

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        if name == "__class__" or not hasattr(self.cls, name) or callable(getattr(self.cls, name)):
            return super().tp_getattro(tx, name)
        return self.log.run(tx, getattr, [self, constant(name)], {})

    def tp_iter(self, tx: Tracer) -> Value:
        if hasattr(self.cls, "__next__"):
            return self
        return items_of(tx, self)

    def tp_iternext(self, tx: Tracer) -> Value | None:
        step = MethodOf(self, "__next__")
        return next_by_call(tx, self, functools.partial(step.tp_call, tx, [], {}))

    def reconstruct(self, out: Output) -> None:
        self.log.emit(out)
        out.load(self)


def _checked(obj: Any) -> Any:
    """Return data as it is.

    Raises:
        Break: for anything else.
    """
    try:
        if obj is not NotImplemented:
            marshal.dumps(obj.__reduce__()[1] if type(obj) is slice else obj)
    except ValueError:
        raise Break("constant-required", f"a {type(obj).__name__} where data is needed") from None
    return obj
