"""collections.deque: a list with a limit, whose items are held in a real one."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

from weft_capture.breaks import Break
from weft_capture.values.base import Output, Tracer, Value
from weft_capture.values.constant import constant
from weft_capture.values.containers import ListValue, TupleValue
from weft_capture.values.iterators import RealIterator
from weft_guards.sources import Source


class DequeValue(ListValue):
    """A deque."""

    cls = collections.deque

    def __init__(
        self, items: Iterable[Value], source: Source | None = None, maxlen: int | None = None
    ) -> None:
        super().__init__([], source)
        self.items: Any = collections.deque(items, maxlen)

    def build(self, each: Callable[[Value], Any]) -> Any:
        return collections.deque(super().build(each), self.items.maxlen)

    def getattr(self, tx: Tracer, name: str) -> Value:
        if name == "maxlen":
            return constant(self.items.maxlen)
        return super().getattr(tx, name)

    def iterate(self, tx: Tracer) -> Value:
        return RealIterator(self, iter, tx.steps.now)

    def with_items(self, items: Iterable[Value]) -> Value:
        return DequeValue(items, None, self.items.maxlen)

    def reconstruct(self, out: Output) -> None:
        if out.is_cyclic(self):
            raise Break("unsupported-value", "rebuilding a deque that holds itself")
        out.call(collections.deque, [TupleValue(self.items), constant(self.items.maxlen)])
