"""Iteration over any value, with the same calls in the same order as the interpreter's C code."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from weft_capture.breaks import Break
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Raised, Tracer, Value

_HINT = "__length_hint__"


def steps(tx: Tracer, items: Value, hinted: bool = True) -> Iterator[Value]:
    """Yield the items of a value, one by one.

    Args:
        hinted: read an object's length first, as `list` does (PyObject_LengthHint).
    """
    if not isinstance(items, UserObject) and not hasattr(items.python_type(), "__next__"):
        yield from items.unpack(tx)  # this runs no code of the program
        return
    iterator = items.tp_iter(tx)
    if hinted and isinstance(items, UserObject) and any(map(items.has_special, ("__len__", _HINT))):
        tx.builtin(operator.length_hint, items)
    elif hinted and items.python_type() is reversed and getattr(items, "frame", None) is not None:
        tx.builtin(len, items.args[0])  # type: ignore[attr-defined]
    while (item := iterator.tp_iternext(tx)) is not None:
        yield item


def listed(tx: Tracer, items: Value) -> list[Value]:
    """Return the items as PySequence_Fast does, which calls `iter` of the iterator, too.

    Raises:
        Break: when it is not iterable: the message depends on the C function.
    """
    if not hasattr(items.python_type(), "__iter__") and not isinstance(items, UserObject):
        raise Break("builtin-error", f"{items.describe()} as a sequence")
    try:
        iterator = items.tp_iter(tx) if isinstance(items, UserObject) else items
    except Raised as raised:
        if issubclass(raised.value.python_type(), TypeError):
            raise Break("builtin-error", f"{items.describe()} as a sequence") from None
        raise
    return list(steps(tx, iterator))
