"""collections.deque: construction and the methods that lists do not have."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from weft_capture.rules.table import rule
from weft_capture.values.base import Value, method
from weft_capture.values.constant import NONE, Constant
from weft_capture.values.deques import DequeValue

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer


@rule(collections.deque)
def _deque(tx: Tracer, iterable: Value | None = None, maxlen: Value = NONE) -> Value:
    limit = maxlen.as_constant()
    if limit is not None and (not isinstance(limit, int) or limit < 0):
        text = "maxlen must be non-negative" if isinstance(limit, int) else "an integer is required"
        tx.raise_(ValueError if isinstance(limit, int) else TypeError, text)
    return DequeValue([], None, limit).with_items([] if iterable is None else iterable.unpack(tx))


def _shorten(self: DequeValue, *, at_left: bool) -> None:
    """Drop what is too much, at one end."""
    if self.maxlen is not None:
        extra = max(len(self.items) - self.maxlen, 0)
        kept = self.items[extra:] if at_left else self.items[: len(self.items) - extra]
        self.items[:] = kept


@method(DequeValue, "append")
def _append(tx: Tracer, self: DequeValue, item: Value) -> Value:
    tx.mutate(self)
    self.items.append(item)
    _shorten(self, at_left=True)
    return NONE


@method(DequeValue, "appendleft")
def _appendleft(tx: Tracer, self: DequeValue, item: Value) -> Value:
    tx.mutate(self)
    self.items.insert(0, item)
    _shorten(self, at_left=False)
    return NONE


@method(DequeValue, "extend", "__iadd__")
def _extend(tx: Tracer, self: DequeValue, items: Value) -> Value:
    new = items.unpack(tx)
    tx.mutate(self)
    self.items.extend(new)
    _shorten(self, at_left=True)
    return NONE


@method(DequeValue, "extendleft")
def _extendleft(tx: Tracer, self: DequeValue, items: Value) -> Value:
    new = items.unpack(tx)
    tx.mutate(self)
    self.items[:0] = new[::-1]
    _shorten(self, at_left=False)
    return NONE


def _take(tx: Tracer, self: DequeValue, position: int) -> Value:
    if not self.items:
        tx.raise_(IndexError, "pop from an empty deque")
    tx.mutate(self)
    return tx.force(self.items.pop(position))


@method(DequeValue, "pop")
def _pop(tx: Tracer, self: DequeValue) -> Value:
    return _take(tx, self, -1)


@method(DequeValue, "popleft")
def _popleft(tx: Tracer, self: DequeValue) -> Value:
    return _take(tx, self, 0)


@method(DequeValue, "rotate")
def _rotate(tx: Tracer, self: DequeValue, count: Value = Constant(1)) -> Value:  # noqa: B008
    tx.mutate(self)
    if self.items:
        by = count.as_constant() % len(self.items)
        self.items[:] = [*self.items[len(self.items) - by :], *self.items[: len(self.items) - by]]
    return NONE


@method(DequeValue, "copy", "__copy__")
def _copy(tx: Tracer, self: DequeValue) -> Value:
    return self.with_items(self.items)
