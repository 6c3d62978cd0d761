"""`threading.local`: attributes that each thread has of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from weft_guards.sources import AttrSource, CallSource, ConstSource, Source

from weft_capture.model.constant import constant
from weft_capture.model.protocol import MutableValue, Output, Tracer, Value


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
