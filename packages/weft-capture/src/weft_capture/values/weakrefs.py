"""Weak references from outside: calling one gives the object it refers to, guarded as any other."""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any

from weft_capture.breaks import Break
from weft_capture.values.base import Kwargs, Value
from weft_guards.sources import CallSource, ConstSource, Source

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer


class WeakRefValue(Value):
    """A `weakref.ref` that existed before the frame."""

    __slots__ = ("ref",)

    def __init__(self, ref: weakref.ref[Any], source: Source) -> None:
        super().__init__(source)
        if type(ref) is not weakref.ref:
            raise Break("unsupported-value", "a weak proxy")
        self.ref = ref

    def python_type(self) -> type:
        return weakref.ref

    def hash_key(self) -> object:
        return self.ref

    def call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        assert self.source is not None
        target = self.ref()
        if id(target) in tx.let_go:
            raise Break("unsupported-value", "a weak reference whose object may have died here")
        if isinstance(self.source, ConstSource):
            return tx.const_object(target)
        return tx.wrap(target, CallSource(operator.call, (self.source,)))
