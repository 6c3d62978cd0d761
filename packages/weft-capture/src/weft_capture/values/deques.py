"""collections.deque: a list with a limit."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weft_capture.values.base import Value
from weft_capture.values.constant import constant
from weft_capture.values.containers import ListValue

if TYPE_CHECKING:
    from weft_capture.output.reconstruct import Output
    from weft_capture.tracer import Tracer
    from weft_guards.sources import Source


class DequeValue(ListValue):
    """A deque."""

    __slots__ = ("maxlen",)

    def __init__(
        self, items: Sequence[Value], source: Source | None = None, maxlen: int | None = None
    ) -> None:
        super().__init__(items, source)
        self.maxlen = maxlen

    def python_type(self) -> type:
        return collections.deque

    def data(self, tx: Tracer) -> Any:
        return collections.deque(super().data(tx), self.maxlen)

    def getattr(self, tx: Tracer, name: str) -> Value:
        if name == "maxlen":
            return constant(self.maxlen)
        return super().getattr(tx, name)

    def with_items(self, items: Sequence[Value]) -> Value:
        kept = list(items)
        if self.maxlen is not None:
            kept = kept[max(len(kept) - self.maxlen, 0) :]
        return DequeValue(kept, None, self.maxlen)

    def reconstruct(self, out: Output) -> None:
        out.writer.begin_call()
        out.writer.load_const(collections.deque)
        super().reconstruct(out)
        out.writer.load_const(self.maxlen)
        out.writer.call(2)

    def replay(self, out: Output) -> Callable[[], None]:
        out.load_all(self.items)
        out.writer.build_list(len(self.items))
        final = out.store_temp()

        def write() -> None:
            out.call_on(self, "clear")
            out.call_on(self, "extend", final)

        return write
