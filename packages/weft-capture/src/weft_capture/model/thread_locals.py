"""What each thread or task has of its own: `threading.local` and `contextvars.ContextVar`."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

from weft_guards.sources import AttrSource, CallSource, ConstSource, Source

from weft_capture.breaks import Break
from weft_capture.model.constant import NONE, constant
from weft_capture.model.protocol import MutableValue, Output, Tracer, Value, method


def own_of_thread(tx: Tracer, obj: Any, source: Source | None, name: str) -> Value | None:
    """Return the attribute that this thread has, or None; the guard asks the thread that runs."""
    if obj is None or source is None:
        return None
    exists = hasattr(obj, name)
    tx.guard(CallSource(hasattr, (source, ConstSource(name))), "CONST", exists)
    return tx.wrap(getattr(obj, name), AttrSource(source, name)) if exists else None


@dataclass(eq=False)
class ThreadLocal(MutableValue):
    """A `threading.local`; attributes are read and written in the thread that runs the code."""

    cls = threading.local
    changing = ("attrs",)

    obj: Any = None
    source: Source | None = None
    attrs: dict[str, Value] = field(default_factory=dict)

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        if name in self.attrs:
            return tx.force(self.attrs[name])
        value = own_of_thread(tx, self.obj, self.source, name)
        if value is None:
            tx.raise_(AttributeError, f"'_thread._local' object has no attribute '{name}'")
        return value

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        tx.mutate(self)
        self.attrs[name] = value

    def tp_traverse(self) -> Iterable[Value]:
        return self.attrs.values()

    def reconstruct(self, out: Output) -> None:
        out.call(threading.local, [])
        out.remember(self)
        for name, value in self.attrs.items():
            out.do(setattr, self, constant(name), value)

    def replay(self, out: Output) -> None:
        for name, value in self.attrs.items():
            out.later(setattr, self, constant(name), value)


@dataclass(eq=False)
class ContextVariable(MutableValue):
    """A `ContextVar` from outside; it is read and set in the context that runs the code.

    Args:
        obj: the variable.
        source: where it comes from.
        current: what the captured code set it to; None while it did not.
    """

    cls = ContextVar
    changing = ("current",)

    obj: Any
    source: Source
    current: Value | None = None

    def python_type(self) -> type:
        return ContextVar

    def replay(self, out: Output) -> None:
        if self.current is not None:
            out.later(ContextVar.set, self, self.current)


@dataclass(eq=False)
class TokenValue(Value):
    """What `ContextVar.set` returns; generated code makes none, so breaks are moved before it.

    Args:
        variable: the variable that was set.
        old: what it was before, as in `ContextVariable.current`.
    """

    variable: ContextVariable
    old: Value | None

    def python_type(self) -> type:
        return Token


def is_set(variable: ContextVar[Any]) -> bool:
    """Say whether the present context has a value of a variable."""
    return variable.get(_UNSET) is not _UNSET


_UNSET = object()


@method(ContextVariable, "get")
def _get(tx: Tracer, self: ContextVariable, *default: Value) -> Value:
    if self.current is not None:
        return self.current
    try:
        found = self.obj.get(*(_UNSET for _ in default))
    except LookupError:
        found = _UNSET
    if default or found is _UNSET:
        tx.guard(CallSource(is_set, (self.source,)), "CONST", found is not _UNSET)
    if found is not _UNSET:
        return tx.wrap(found, CallSource(ContextVar.get, (self.source,)))
    return default[0] if default else tx.raise_(LookupError, self)


@method(ContextVariable, "set")
def _set(tx: Tracer, self: ContextVariable, value: Value) -> Value:
    token = TokenValue(self, self.current)
    tx.mutate(self)
    self.current = value
    return token


@method(ContextVariable, "reset")
def _reset(tx: Tracer, self: ContextVariable, token: Value) -> Value:
    if not isinstance(token, TokenValue) or token.variable is not self:
        raise Break("c-function", "ContextVar.reset with a token from outside")
    tx.mutate(self)
    self.current = token.old
    return NONE


@method(ContextVariable, "get:name")
def _name(tx: Tracer, self: ContextVariable) -> Value:
    return tx.literal(self.obj.name)
