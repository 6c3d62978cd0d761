"""`Proxy`: an object through which the interpreter's containers and iterators work on values.

A real list of proxies sorts, searches and compares as the program's list would, a real `zip` or
`map` over them makes the same steps in the same order, and the errors are the real ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator
from typing import Any

from weft_capture.model.protocol import Tracer, Value

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class Proxy:
    """A proxy of a value, which forwards special methods to it. `tx.literal` unwraps it."""

    __slots__ = ("tx", "value")
    __hash__ = object.__hash__

    def __init__(self, tx: Tracer, value: Value) -> None:
        self.tx = tx
        self.value = tx.force(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and self.tx.is_equal(self.value, other.value)

    def __bool__(self) -> bool:
        return self.value.nb_bool(self.tx)

    def __iter__(self) -> Iterator[Proxy]:
        return self._steps(self.value.tp_iter(self.tx))

    def _steps(self, iterator: Value) -> Generator[Proxy, None, Proxy | None]:
        while (item := iterator.tp_iternext(self.tx)) is not None:
            yield Proxy(self.tx, item)
        return None if iterator.returned is None else Proxy(self.tx, iterator.returned)

    def __length_hint__(self) -> Any:
        """Return the hint of an object of the program; of others nobody can see the question."""
        if not self.value.python_type().__flags__ & _HEAP_TYPE:
            return NotImplemented
        return self.tx.builtin(operator.length_hint, self.value).as_constant()

    def __call__(self, *args: Proxy) -> Proxy:
        return Proxy(self.tx, self.value.tp_call(self.tx, [arg.value for arg in args], {}))

    def __str__(self) -> str:
        return self.tx.text_of(self.value, str)

    def __repr__(self) -> str:
        return self.tx.text_of(self.value, repr)

    def __format__(self, spec: str) -> str:
        text = self.tx.builtin(format, self.value, self.tx.literal(spec))
        return str(text.as_constant())


def _ordering(function: Callable[[Any, Any], Any]) -> Callable[[Proxy, Proxy], Proxy]:
    def compare(self: Proxy, other: Proxy) -> Proxy:
        return Proxy(self.tx, self.tx.builtin(function, self.value, other.value))

    return compare


for _name in ("lt", "le", "gt", "ge"):
    setattr(Proxy, f"__{_name}__", _ordering(getattr(operator, _name)))
