"""Iterators that the executor can step: over sequences, and the lazy builtins around them.

Each can be rebuilt at its position, so that a graph break inside a loop keeps it.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, ClassVar, NoReturn

from weft_guards.payloads import find_in_class
from weft_guards.sources import Source

from weft_capture import polyfills
from weft_capture.breaks import Break
from weft_capture.model.constant import NONE, NULL, Constant, constant, real_call
from weft_capture.model.containers import (
    ListValue,
    RangeValue,
    SequenceValue,
    SetValue,
    TupleValue,
)
from weft_capture.model.dicts import DictValue
from weft_capture.model.exceptions import ExceptionValue
from weft_capture.model.protocol import MutableValue, Output, Raised, Tracer, Value, method
from weft_capture.model.proxy import Proxy

EXHAUSTED = sys.maxsize
"""The position of an iterator that has ended."""


@dataclass(eq=False)
class IteratorValue(MutableValue):
    """Base of iterators: state is `position` and what subclasses add."""

    position: int = field(default=0, init=False)
    changing: ClassVar[tuple[str, ...]] = ("position",)


@dataclass(eq=False)
class SequenceIterator(IteratorValue):
    """`iter` or `reversed` of a sequence: a real one over the real container of values.

    It sees changes of the container. `position` is the number of steps taken.

    Args:
        over: the sequence, or a plain list of values.
        cls: the class of the program's iterator, where that is another one.
        factory: `iter` or `reversed`.
    """

    over: SequenceValue | RangeValue | Constant | Sequence[Value]
    cls: Any = None
    factory: Any = iter

    def __post_init__(self) -> None:
        over = self.over
        self.items: Any = over.items if isinstance(over, SequenceValue) else over
        if isinstance(over, RangeValue):
            self.items = over.range
        if isinstance(over, Constant):
            self.items = [constant(item) for item in over.as_constant()]
        self.real = self.factory(self.items)
        self.cls = self.cls or type(self.factory(getattr(over, "value", self.items)))
        by_count = self.factory is reversed or isinstance(self.items, deque)
        self.end = len(self.items) if by_count else EXHAUSTED

    def tp_iternext(self, tx: Tracer) -> Value | None:
        tx.journal.touch(self)
        try:
            item = next(self.real, None)
        except RuntimeError as error:
            tx.raise_real(error)
        self.position = self.end if item is None else self.position + 1
        if isinstance(self.over, RangeValue) and item is not None:
            return constant(item)
        return None if item is None else tx.force(item)

    def reconstruct(self, out: Output) -> None:
        over: Any = self.over
        backwards = self.factory is reversed
        if isinstance(over, RangeValue):
            out.call(iter, [constant(over.range[self.position :])])
        elif isinstance(self.items, deque):
            try:
                next(self.real, None)
            except RuntimeError:
                detail = "an iterator over what has changed since"
                raise Break("loop", detail) from None
            if over in out.tx.effects.changed:
                raise Break("loop", "an iterator over a container that is written after the graph")
            out.call(self.cls, [over, constant(self.position)])
        elif backwards or (isinstance(over, Constant | ListValue) and self.position != EXHAUSTED):
            offset = self.end - 1 - self.position if backwards else self.position
            out.call(self.factory, [over])
            out.remember(self)
            step = methodcaller("__setstate__", offset)  # no further than the end of the list
            if over in out.tx.effects.changed:
                out.last.append((step, self))
            else:
                out.do(step, self)
        elif isinstance(over, Constant):
            out.call(iter, [constant(over.as_constant()[:0])])
        else:
            out.call(iter, [TupleValue(list(self.items)[self.position :])])


class ListedIterator(SequenceIterator):
    """An iterator of the library whose items are listed at once; a break needs the real one."""

    def reconstruct(self, out: Output) -> None:
        raise Break("generator", f"a {self.cls.__name__} is needed after a graph break")


@dataclass(eq=False)
class DictIterator(SequenceIterator):
    """An iterator over a dict, a view of it or a set, which must not change size meanwhile.

    Args:
        owner: the dict or set.
        view: the method of the owner whose result is iterated over.
    """

    owner: Any = None
    view: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.size, self.removals = len(self.owner.entries), self.owner.removals

    def tp_iternext(self, tx: Tracer) -> Value | None:
        ordered = getattr(self.owner, "cls", None) is OrderedDict
        if self.position != EXHAUSTED and len(self.owner.entries) != self.size and not ordered:
            container_name = "Set" if isinstance(self.owner, SetValue) else "dictionary"
            tx.raise_(RuntimeError, f"{container_name} changed size during iteration")
        changed = len(self.owner.entries) != self.size or self.owner.removals != self.removals
        if self.position != EXHAUSTED and changed:
            raise Break("loop", "the keys change during the iteration")
        return super().tp_iternext(tx)

    def reconstruct(self, out: Output) -> None:
        owner = self.owner
        changed = len(owner.entries) != self.size or owner.removals != self.removals
        if isinstance(owner, DictValue) and owner.source and owner.log:  # written after all loads
            same_keys = owner.real is not None and len(owner.real) == self.size
            changed = changed or not (same_keys and all(writes for _, _, writes in owner.log))
        if changed or isinstance(owner, SetValue) or "reverse" in self.cls.__name__:
            detail = "a reversed iterator, or one over a set, or over what has changed since"
            raise Break("loop", detail)
        if self.position == EXHAUSTED:
            super().reconstruct(out)
            return
        out.call(iterator_at, [owner, constant(self.view), constant(self.position)])


def iterator_at(owner: dict[Any, Any], view: str, position: int) -> Any:
    """Return an iterator over a dict's view that has given its first `position` items."""
    iterator = iter(getattr(owner, view)())
    for _ in range(position):
        next(iterator)
    return iterator


@dataclass(eq=False)
class CombinedIterator(IteratorValue):
    """enumerate, zip, map, filter and the like: lazy, with the position as their only state.

    Each step is a step of a new real iterator over the remaining items.

    Args:
        factory: the real class, called with `prefix`, the inner iterators, and `suffix`.
        inner: the inner iterators.
        prefix: values that come before the iterators (map's function).
        suffix: given the number of steps taken, returns constants that follow (enumerate's start).
    """

    changing: ClassVar[tuple[str, ...]] = ("inner", "position", "returned")

    factory: Any
    inner: list[Value]
    prefix: Sequence[Value] = ()
    suffix: Callable[[int], list[object]] = lambda position: []
    keywords: dict[str, object] = field(default_factory=dict)

    def python_type(self) -> type:
        cls: type = self.factory
        return cls

    def real(self, tx: Tracer) -> Any:
        """Return a real iterator at this position."""
        before = [None if value is NONE else Proxy(tx, value) for value in self.prefix]
        iterators = [iter(Proxy(tx, value)) for value in self.inner]
        arguments = (*before, *iterators, *self.suffix(self.position))
        return real_call(tx, self.factory, *arguments, **self.keywords)

    def tp_iternext(self, tx: Tracer) -> Value | None:
        tx.journal.touch(self)
        return next_by_call(tx, self, functools.partial(self._step, tx))

    def _step(self, tx: Tracer) -> Value:
        item, returned = real_call(tx, _stepped, self.real(tx))
        if item is NULL:  # the StopIteration of an inner iterator, which most of these hand on
            raise Raised(ExceptionValue(StopIteration, [tx.literal(returned)]))
        self.position += 1
        return tx.literal(item)

    def reconstruct(self, out: Output) -> None:
        suffix = map(constant, self.suffix(self.position))
        keywords = {name: constant(item) for name, item in self.keywords.items()}
        out.call(self.factory, [*self.prefix, *self.inner, *suffix], keywords)


def next_by_call(tx: Tracer, iterator: Value, step: Callable[[], Value]) -> Value | None:
    """Step an iterator by the program's code; None when that raises StopIteration.

    Its value is kept in `returned` (CPython: _PyGen_FetchStopIterationValue).
    """
    try:
        return step()
    except Raised as raised:
        if not issubclass(raised.value.python_type(), StopIteration):
            raise
        iterator.returned = raised.value.tp_getattro(tx, "value")
        return None


def _stepped(iterator: Iterator[Any]) -> tuple[Any, Any]:
    """Return the item of an iterator, or NULL and the value of its StopIteration."""
    try:
        return next(iterator), None
    except StopIteration as stop:
        return NULL, stop.value


@dataclass(eq=False)
class Iterated(Value):
    """An iterator of the program whose `__iter__` was called before, and is not called again."""

    inner: Value

    def python_type(self) -> type:
        return Stepped

    def tp_iter(self, tx: Tracer) -> Value:
        return self

    def tp_iternext(self, tx: Tracer) -> Value | None:
        item = self.inner.tp_iternext(tx)
        self.returned = self.inner.returned
        return item

    def reconstruct(self, out: Output) -> None:
        out.call(Stepped, [self.inner])


class Stepped:
    """An iterator of the program inside an iterator in C, which does not call its `__iter__`."""

    def __init__(self, iterator: Iterator[object]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Stepped:
        return self

    def __next__(self) -> object:
        return next(self._iterator)


def iterated(tx: Tracer, iterable: Value) -> Value:
    """Return `iter` of a value, for code that calls `iter` once and then steps."""
    iterator = iterable.tp_iter(tx)
    mro_entry = find_in_class(iterator.python_type(), "__iter__")
    return (
        Iterated(iterator)
        if mro_entry and isinstance(mro_entry[1], types.FunctionType)
        else iterator
    )


def items_of(tx: Tracer, sequence: Value) -> Value:
    """Return `iter` of an object that has `__getitem__` alone (CPython: PySeqIter_New)."""
    iterator: Any = tx.const_object(polyfills.items_of).tp_call(tx, [sequence], {})
    iterator.cls, iterator.created_by = _ITEMS, iter
    return iterator  # type: ignore[no-any-return]


class _Sequence:
    def __getitem__(self, position: int) -> object:
        raise IndexError


_ITEMS: type = type(iter(_Sequence()))
OVER_ITEMS = (reversed, _ITEMS)
"""Iterators that ask the object below for its length when they are asked for a hint."""


@dataclass(eq=False)
class ExternalIterator(Value):
    """An iterator that existed before the frame: a step of it is a break, and runs eagerly.

    A loop over it therefore compiles its body once, not once for each position.
    """

    obj: object
    source: Source | None

    def python_type(self) -> type:
        return type(self.obj)

    def tp_iternext(self, tx: Tracer) -> Value | None:
        code = "generator" if isinstance(self.obj, types.GeneratorType) else "loop"
        raise Break(code, f"stepping a {type(self.obj).__name__} made outside the frame")


# ---- collections.deque: a list with a limit, whose items are held in a real one


class DequeValue(ListValue):
    """A deque."""

    cls = collections.deque

    def __init__(
        self, items: Iterable[Value], source: Source | None = None, maxlen: int | None = None
    ) -> None:
        super().__init__([], source)
        self.added = collections.deque(items, maxlen)

    def build(self, each: Callable[[Value], Any]) -> Any:
        return collections.deque(super().build(each), self.items.maxlen)

    def tp_iter(self, tx: Tracer) -> Value:
        return SequenceIterator(self)

    def with_items(self, items: Iterable[Value]) -> Value:
        return DequeValue(items, None, self.added.maxlen)

    def reconstruct(self, out: Output) -> None:
        if out.is_cyclic(self):
            raise Break("cannot-rebuild", "rebuilding a deque that contains itself")
        out.call(collections.deque, [TupleValue(self.items), constant(self.items.maxlen)])


method(DequeValue, "get:maxlen")(lambda tx, self: constant(self.added.maxlen))


@method(DequeValue, "get:__getitem__", "get:__setitem__", "get:__delitem__")
def _refuse(tx: Tracer, self: DequeValue) -> NoReturn:
    raise Break("builtin-error", "a method of a deque, whose error differs")
