"""Iterators that the executor can step: over sequences, and the lazy builtins around them.

Each can be rebuilt where it stands, so that a graph break inside a loop keeps the position.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weft_capture.breaks import Break, Raised
from weft_capture.values.base import MutableValue, Value
from weft_capture.values.constant import constant
from weft_capture.values.containers import ListValue, RangeValue, SetValue, TupleValue
from weft_capture.values.dicts import DictValue

if TYPE_CHECKING:
    from weft_capture.output.reconstruct import Output
    from weft_capture.tracer import Tracer
    from weft_guards.sources import Source


EXHAUSTED = sys.maxsize
"""The position of an iterator that has ended."""


class IteratorValue(MutableValue):
    """Base of iterators: state is `position` and what subclasses add."""

    __slots__ = ("position",)
    changing = ("position",)

    def __init__(self) -> None:
        super().__init__(None)
        self.position = 0

    def iterate(self, tx: Tracer) -> Value:
        return self

    def hash_key(self) -> object:
        return self


class SequenceIterator(IteratorValue):
    """An iterator over a list (read live), tuple, range, or a plain list of values."""

    __slots__ = ("over",)

    def __init__(self, over: ListValue | TupleValue | RangeValue | Sequence[Value]) -> None:
        super().__init__()
        self.over = over

    def python_type(self) -> type:
        return type(iter([]))

    def next(self, tx: Tracer) -> Value | None:
        over = self.over
        items: Any = over.range if isinstance(over, RangeValue) else over
        if isinstance(over, ListValue | TupleValue):
            items = over.items
        if self.position >= len(items):
            # Once at its end, an iterator stays there, also when the list grows.
            tx.journal.touch(self)
            self.position = EXHAUSTED
            return None
        item = items[self.position]
        item = constant(item) if isinstance(over, RangeValue) else tx.force(item)
        tx.journal.touch(self)
        self.position += 1
        return item

    def reconstruct(self, out: Output) -> None:
        writer = out.writer
        writer.begin_call()
        writer.load_const(iter)
        over = self.over
        if isinstance(over, RangeValue):
            writer.load_const(over.range[self.position :])
            writer.call(1)
            return
        is_list = isinstance(over, ListValue) and over.python_type() is list
        if is_list and self.position != EXHAUSTED:
            assert isinstance(over, ListValue)
            out.load(over)
            writer.call(1)
            writer.dup()
            writer.load_method("__setstate__")
            writer.load_const(self.position)
            writer.call_method(1)
            writer.pop()
            return
        items = over.items if isinstance(over, ListValue | TupleValue) else over
        rest = items[self.position :]
        out.load_all(rest)
        writer.build_tuple(len(rest))
        writer.call(1)


class ListedIterator(SequenceIterator):
    """An iterator of the library whose items are listed at once; a break needs the real one.

    Args:
        items: what it gives.
        kind: its class.
        made_at: the step that made it.
    """

    __slots__ = ("kind", "made_at")

    def __init__(self, items: Sequence[Value], kind: type, made_at: int) -> None:
        super().__init__(items)
        self.kind = kind
        self.made_at = made_at

    def python_type(self) -> type:
        return self.kind

    def reconstruct(self, out: Output) -> None:
        what = f"a {self.kind.__name__} is needed after a graph break"
        raise Break("generator", what, self.made_at)


class ItemIterator(IteratorValue):
    """An iterator over an object with `__getitem__` alone: items 0, 1, ... up to an IndexError."""

    __slots__ = ("over",)

    def __init__(self, over: Value) -> None:
        super().__init__()
        self.over = over

    def python_type(self) -> type:
        return type(iter(_Items()))

    def next(self, tx: Tracer) -> Value | None:
        if self.position == EXHAUSTED:
            return None
        tx.journal.touch(self)
        try:
            item = self.over.getitem(tx, constant(self.position))
        except Raised as raised:
            if issubclass(raised.value.python_type(), IndexError | StopIteration):
                self.position = EXHAUSTED
                return None
            raise
        self.position += 1
        return item

    def reconstruct(self, out: Output) -> None:
        raise Break("generator", "an iterator over __getitem__ is needed after a graph break")


class _Items:
    def __getitem__(self, index: int) -> None:
        raise IndexError(index)


class DictIterator(SequenceIterator):
    """An iterator over a dict, a view of it or a set, which must not change size meanwhile.

    Args:
        owner: the dict or set.
        items: what it gives.
        kind: its type.
        view: the method of the owner whose result is iterated over.
        made_at: the step that made it.
    """

    __slots__ = ("kind", "made_at", "owner", "removals", "size", "view")

    def __init__(
        self, owner: DictValue | SetValue, items: Sequence[Value], kind: type, view: str,
        made_at: int,
    ) -> None:  # fmt: skip
        super().__init__(items)
        self.owner = owner
        self.size = len(owner.entries)
        self.removals = owner.removals
        self.kind = kind
        self.view = view
        self.made_at = made_at

    def python_type(self) -> type:
        return self.kind

    def next(self, tx: Tracer) -> Value | None:
        ordered = getattr(self.owner, "cls", None) is OrderedDict
        if self.position != EXHAUSTED and len(self.owner.entries) != self.size and not ordered:
            what = "Set" if isinstance(self.owner, SetValue) else "dictionary"
            tx.raise_(RuntimeError, f"{what} changed size during iteration")
        changed = len(self.owner.entries) != self.size or self.owner.removals != self.removals
        if self.position != EXHAUSTED and changed:
            raise Break("loop", "the keys change during the iteration")
        return super().next(tx)

    def reconstruct(self, out: Output) -> None:
        owner, writer = self.owner, out.writer
        if len(owner.entries) != self.size or owner.removals != self.removals:
            raise Break("loop", "an iterator over what has changed since", self.made_at)
        if self.position == EXHAUSTED or isinstance(owner, SetValue):
            super().reconstruct(out)
            return
        writer.begin_call()
        writer.load_const(iterator_at)
        out.load(owner)
        writer.load_const(self.view)
        writer.load_const(self.position)
        writer.call(3)


def iterator_at(owner: dict[Any, Any], view: str, position: int) -> Any:
    """Return an iterator over a dict's view that has given its first `position` items."""
    iterator = iter(getattr(owner, view)())
    for _ in range(position):
        next(iterator)
    return iterator


class CombinedIterator(IteratorValue):
    """enumerate, zip, map, filter, itertools.chain and their like, over inner iterators.

    Args:
        factory: the real class or function that rebuilds it from `prefix` and the inner iterators.
        inner: the inner iterators.
        step: (tx, self) -> the next item, or None at the end.
        prefix: values that come before the iterators when it is rebuilt (map's function).
        suffix: called when it is rebuilt; returns constants that follow (enumerate's start).
    """

    __slots__ = ("factory", "inner", "keywords", "prefix", "step", "suffix")

    def __init__(
        self,
        factory: Any,
        inner: list[Value],
        step: Callable[[Tracer, CombinedIterator], Value | None],
        prefix: Sequence[Value] = (),
        suffix: Callable[[CombinedIterator], list[object]] | None = None,
        keywords: dict[str, object] | None = None,
    ) -> None:
        super().__init__()
        self.factory = factory
        self.inner = inner
        self.step = step
        self.prefix = prefix
        self.suffix = suffix
        self.keywords = keywords or {}

    def python_type(self) -> type:
        return self.factory if isinstance(self.factory, type) else itertools.chain

    def next(self, tx: Tracer) -> Value | None:
        return self.step(tx, self)

    def advance(self, tx: Tracer) -> None:
        """Move `position` on by one."""
        tx.journal.touch(self)
        self.position += 1

    def reconstruct(self, out: Output) -> None:
        writer = out.writer
        writer.begin_call()
        writer.load_const(self.factory)
        out.load_all(self.prefix)
        out.load_all(self.inner)
        extra = self.suffix(self) if self.suffix else []
        for item in extra:
            writer.load_const(item)
        for item in self.keywords.values():
            writer.load_const(item)
        count = len(self.prefix) + len(self.inner) + len(extra) + len(self.keywords)
        writer.call(count, tuple(self.keywords))


class ExternalIterator(Value):
    """An iterator that existed before the frame: stepping it is done for real, by a break.

    A loop over it therefore compiles its body once, not once for each position.
    """

    __slots__ = ("obj",)

    def __init__(self, obj: object, source: Source | None) -> None:
        super().__init__(source)
        self.obj = obj

    def python_type(self) -> type:
        return type(self.obj)

    def iterate(self, tx: Tracer) -> Value:
        return self

    def next(self, tx: Tracer) -> Value | None:
        kind = "generator" if isinstance(self.obj, types.GeneratorType) else "loop"
        raise Break(kind, f"stepping a {type(self.obj).__name__} made outside the frame")
