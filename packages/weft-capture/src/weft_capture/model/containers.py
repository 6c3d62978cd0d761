"""Sequences and sets: list, tuple (torch.Size, named tuples), set, slice, range.

Items are values. A list or set that existed before the frame keeps its source; `replay` writes its
changes back.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence, Set
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from weft_guards.sources import CallSource, Source

from weft_capture import config
from weft_capture.breaks import Break, NotConstant
from weft_capture.model.constant import (
    FRAME_CLASSES,
    Constant,
    class_value,
    constant,
    is_constant_object,
)
from weft_capture.model.protocol import MutableValue, Output, Tracer, Value, key_in
from weft_capture.model.proxy import Proxy


def check_keys(keys: Iterable[object]) -> None:
    """Check that a dict or set can be rebuilt although its keys have a `__hash__` in Python.

    Raises:
        Break: for a key whose `__hash__` may return another value.
    """
    hashed: list[Any] = [key for key in keys if type(key).__name__ == "ObjectKey"]
    seen = set[int]()
    for key in hashed:
        if not key.is_repeatable() or key.number in seen:
            detail = "rebuilding a dict or set runs a key's __hash__ again"
            raise Break("dict-key", detail, key.step)
        seen.add(key.number)


class Container(Value):
    """Base of containers of values, which can be built as real containers of other objects."""

    def build(self, each: Callable[[Value], Any]) -> Any:
        """Return a real container of this kind of what `each` makes of the items."""
        raise NotImplementedError(type(self).__name__)

    def with_proxies(self, tx: Tracer) -> Any:
        """Return a real container of proxies, which compares as the program's container does."""
        return self.build(functools.partial(Proxy, tx))

    def is_untouched(self) -> bool:
        """Say whether the program has neither read nor changed this input container."""
        return False

    def data(self, tx: Tracer) -> Any:
        return self.build(lambda item: tx.force(item).data(tx))

    def graph_arg(self) -> Any:
        return self.build(lambda item: item.graph_arg())

    def example(self) -> Any:
        return self.build(lambda item: item.example())


class SequenceValue(Container):
    """A list, a tuple, or a similar sequence."""

    items: Any

    def unpack(self, tx: Tracer) -> list[Value]:
        return list(self.items)

    def tp_iter(self, tx: Tracer) -> Value:
        return tx.iterator_over(self)

    def tp_traverse(self) -> Iterable[Value]:
        return self.items  # type: ignore[no-any-return]

    def with_items(self, items: Sequence[Value]) -> Value:
        """Return the result of slicing or adding sequences of this class."""
        return type(self)(items)  # type: ignore[call-arg]


class TupleValue(SequenceValue):
    """A tuple."""

    cls: type = tuple

    def __init__(self, items: Sequence[Value], source: Source | None = None) -> None:
        self.items: tuple[Value, ...] = tuple(items)
        self.source = source

    def build(self, each: Callable[[Value], Any]) -> Any:
        return tuple(each(item) for item in self.items)

    def as_constant(self) -> Any:
        return self.build(lambda item: item.as_constant())

    def is_constant(self) -> bool:
        return all(item.is_constant() for item in self.items)

    def reconstruct(self, out: Output) -> None:
        out.load_all(self.items)
        out.writer.build_tuple(len(self.items))

    def tp_hash(self) -> object:
        return tuple(item.tp_hash() for item in self.items)

    def same_object(self, other: Value) -> bool:
        empty = not self.items and type(self) is type(other) is TupleValue and not other.items
        return self is other or empty  # the empty tuple is a singleton


class SizeValue(TupleValue):
    """A torch.Size; its items are constants and symbolic ints."""

    cls = torch.Size

    def data(self, tx: Tracer) -> Any:
        return torch.Size(super().data(tx))

    def as_constant(self) -> Any:
        return torch.Size(super().as_constant())

    def reconstruct(self, out: Output) -> None:
        out.call(torch.Size, [TupleValue(self.items)])


class NamedTupleValue(TupleValue):
    """A named tuple, or one of torch's structseq results (`torch.return_types`)."""

    def __init__(self, cls: type, items: Sequence[Value], source: Source | None = None) -> None:
        super().__init__(items, source)
        self.cls = cls

    def build(self, each: Callable[[Value], Any]) -> Any:
        items = super().build(each)
        return tuple.__new__(self.cls, items) if hasattr(self.cls, "_fields") else self.cls(items)

    def graph_arg(self) -> Any:
        """Return a plain tuple if fx, which writes items by their repr, cannot write this one."""
        arg = super().graph_arg()
        writable = not any(isinstance(item, Enum) or hasattr(item, "_fields") for item in arg)
        return arg if writable else tuple(arg)

    def reconstruct(self, out: Output) -> None:
        items = TupleValue(self.items)
        if hasattr(self.cls, "_fields"):
            out.call(tuple.__new__, [class_value(self.cls), items])
        else:
            out.call(self.cls, [items])

    def with_items(self, items: Sequence[Value]) -> Value:
        return TupleValue(items)

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        fields = getattr(self.cls, "_fields", getattr(self.cls, "__match_args__", ()))
        if name in fields:
            return self.items[fields.index(name)]
        if name == "_fields":
            return tx.literal(fields)
        return tx.class_attribute(self, self.cls, name)


def truth_now(tx: Tracer, container: Any) -> bool:
    """Return the truth of an untouched input container, whose length may be symbolic."""
    if not isinstance(tx.unread_length(container), Constant):
        tx.guard(CallSource(operator.truth, (container.source,)), "CONST", bool(container.real))
    return bool(container.real)


def refill(target: Any, contents: Any) -> None:
    """Replace the contents of a list, deque or dict."""
    target.clear()
    (target.extend if hasattr(target, "extend") else target.update)(contents)


class ListValue(SequenceValue, MutableValue):
    """A list.

    An input list, `real`, is read, and its length guarded, when the program first reads it. Items
    appended before that are in `added`, so that code which only appends works for every length.
    Once the length has varied, reads of the length, or of single items, do not read the list.
    """

    cls: type = list

    changing = ("added", "read")
    several = True

    real: Any = None
    read: Callable[[], list[Value]] | None = None
    singly = False  # items are read one by one

    def __init__(self, items: Sequence[Value], source: Source | None = None) -> None:
        super().__init__()
        self.added: Any = list(items)
        self.source = source

    @property
    def items(self) -> Any:
        """The items, read from the real list if need be."""
        if self.read is not None:
            before, self.read = self.read(), None
            refill(self.added, [*before, *self.added])
        return self.added

    @items.setter
    def items(self, items: Any) -> None:
        self.added = items

    def nb_bool(self, tx: Tracer) -> bool:
        return truth_now(tx, self) if self.is_untouched() else super().nb_bool(tx)

    def is_untouched(self) -> bool:
        return self.read is not None and not self.added

    def tp_traverse(self) -> Iterable[Value]:
        return self.added  # type: ignore[no-any-return]

    def build(self, each: Callable[[Value], Any]) -> Any:
        return [each(item) for item in self.items]

    def reconstruct(self, out: Output) -> None:
        if out.is_cyclic(self):
            out.writer.build_list(0)
            out.remember(self)
            out.do(refill, self, TupleValue(self.items))
        else:
            out.load_all(self.items)
            out.writer.build_list(len(self.items))

    def replay(self, out: Output) -> None:
        change = refill if self.read is None else self.cls.extend  # type: ignore[attr-defined]
        out.later(change, self, TupleValue(self.added))


def is_named(cls: type) -> bool:
    """Say whether a class is a named tuple without attributes or operators of its own."""
    if not issubclass(cls, tuple) or not hasattr(cls, "_fields") or cls.__dictoffset__:
        return False
    items = (item for base_class in cls.__mro__ for item in vars(base_class).items())
    return not any(name in _ACTING and isinstance(item, FunctionType) for name, item in items)


_ACTING = frozenset(
    f"__{name}__"
    for name in (
        "add", "radd", "mul", "rmul", "iadd", "imul", "eq", "ne", "lt", "le", "gt", "ge", "hash",
        "contains", "getitem", "iter", "len", "bool", "index", "getattribute",
    )
)  # fmt: skip
"""What an operator asks the class of a tuple for."""


def gives_others(cls: type) -> bool:
    """Say whether a subclass of list or tuple overrides how its items are read."""
    names = ("__len__", "__getitem__", "__iter__")
    return any(isinstance(getattr(cls, name), FunctionType) for name in names)


def plain_items(obj: Any) -> Any:
    """Return the items of an instance of a subclass of list or tuple, bypassing its methods."""
    base_class = list if issubclass(type(obj), list) else tuple
    return base_class.__getitem__(obj, slice(None))


def sequence_of(cls: type, items: Sequence[Value], source: Source | None = None) -> Value:
    """Return the value of a list, a tuple, or a tuple of another class."""
    if cls is list:
        return ListValue(items, source)
    plain: dict[type, type[TupleValue]] = {tuple: TupleValue, torch.Size: SizeValue}
    return plain[cls](items, source) if cls in plain else NamedTupleValue(cls, items, source)


class SetValue(MutableValue):
    """A set or frozenset: hash key -> element.

    `order` is a real set of the keys that goes through the same operations, so that it iterates in
    the order of the program's set, unless that is `loose`: it depends on more than the elements.
    `log` has the changes of an input set: methods, their arguments, the states of sets among these,
    and the step.
    """

    changing = ("entries", "log", "loose", "order")
    several = True

    def __init__(
        self,
        items: Iterable[Value],
        source: Source | None = None,
        cls: type = set,
        order: Set[object] | None = None,
    ) -> None:
        """Make the value; `order` has the elements' keys as a set, when they come from one."""
        super().__init__()
        self.source = source
        self.cls = cls
        self.entries: dict[object, Value] = {}
        self.order: set[object] = set()
        self.loose = False
        self.log: list[tuple[str, tuple[Value, ...], list[object], int]] = []
        self.removals = 0  # ever, taken back or not
        keys = []
        for item in items:
            keys.append(key_in(set, item))
            self.entries.setdefault(keys[-1], item)
        if cls is frozenset and isinstance(order, frozenset):
            self.order = order  # type: ignore[assignment]
        else:
            self.order.update(keys if order is None else order)
            self.loose = order is not None and list(order) != list(self.order)
        self.loose |= order is not None and self.by_address()

    def snapshot(self) -> Callable[[], None]:
        restore = super().snapshot()

        def undo() -> None:
            restore()
            self.loose = True  # a copy may have another layout

        return undo

    def elements(self) -> list[Value]:
        """Return the elements as their keys are laid out."""
        return [self.entries[key] for key in self.order]

    def by_address(self) -> bool:
        """Say whether elements hash by address, unlike their keys, so that the order is unknown."""
        return not all(map(_same_hash, self.order))

    def in_order(self) -> list[Value]:
        """Return the elements in the order of the program's set; break where it is unknown."""
        if len(self.entries) > 1 and (self.loose or self.by_address()):
            cause = "objects, which addresses decide" if self.by_address() else "what has changed"
            raise Break("object-identity", f"the order of a set of {cause}")
        return self.elements()

    def data(self, tx: Tracer) -> Any:
        return self._real([tx.force(item).data(tx) for item in self.unpack(tx)])

    def as_constant(self) -> Any:
        if self.cls is not frozenset:
            return super().as_constant()
        return self._real([item.as_constant() for item in self.elements()])

    def _real(self, items: list[Any]) -> Any:
        ordered = len(items) < 2 or not (self.loose or self.by_address())
        for real in (self.cls(items), self.cls(self.cls(items))):
            if ordered and list(real) == items:
                return real
        raise NotConstant("a set whose order cannot be rebuilt")

    def tp_hash(self) -> object:
        return frozenset(self.entries) if self.cls is frozenset else super().tp_hash()

    def reconstruct(self, out: Output) -> None:
        check_keys(self.entries)
        items = list(self.entries.values()) if self.by_address() else self.elements()
        added = SetValue([*items])  # one by one; a copy of it is laid out differently
        for added_items, built in ((TupleValue(items), added.order), (added, set(added.order))):
            if _layout(built) == _layout(self.order) and not (self.removals or self.loose):
                out.call(self.cls, [added_items])
                return
        raise Break("object-identity", "a set whose order cannot be rebuilt")

    def tp_traverse(self) -> Iterable[Value]:
        return self.entries.values()

    def state(self) -> object:
        """Return the state of the set, for comparison."""
        return list(self.entries), self.removals, len(self.log)

    def replay(self, out: Output) -> None:
        for name, args, states, step in self.log:
            sets = [arg for arg in args if isinstance(arg, SetValue)] if states else []
            if states != [arg.state() for arg in sets]:
                detail = f"{name} of a set from outside, with one that changes later"
                raise Break("container-mutation", detail, step)
            out.later(getattr(set, name), self, *args)

    def unpack(self, tx: Tracer) -> list[Value]:
        if len(self.order) > 1 and not all(isinstance(key, int | float) for key in self.order):
            tx.process_bound = "the order of a set"
        return self.in_order()

    def tp_iter(self, tx: Tracer) -> Value:
        return tx.set_iterator(self)


def _layout(items: Set[object]) -> tuple[list[object], int]:
    """Return the visible facts that decide the layout of a set's hash table."""
    return list(items), sys.getsizeof(items)


def _same_hash(key: Any) -> bool:
    """Say whether the object of a hash key hashes as the key does, in each process."""
    return type(key).__name__ == "ObjectKey" or (is_element(key) and key not in FRAME_CLASSES)


def is_element(obj: Any) -> bool:
    """Say whether an element of a set never changes, and is not kept alive by a guard on it."""
    if type(obj) in (tuple, frozenset):
        return all(map(is_element, obj))
    return is_constant_object(obj) or isinstance(obj, type | BuiltinFunctionType)


class SliceValue(Container):
    """A slice whose bounds may be symbolic."""

    cls = slice

    def __init__(self, start: Value, stop: Value, step: Value) -> None:
        self.parts = (start, stop, step)

    def build(self, each: Callable[[Value], Any]) -> Any:
        return slice(*map(each, self.parts))

    def as_constant(self) -> Any:
        return self.build(lambda item: item.as_constant())

    def reconstruct(self, out: Output) -> None:
        out.load_all(self.parts)
        out.writer.build_slice(3)

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        names = ("start", "stop", "step")
        return self.parts[names.index(name)] if name in names else super().tp_getattro(tx, name)


class RangeValue(Value):
    """A range with known bounds."""

    cls = range

    def __init__(self, value: range) -> None:
        self.range = value

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        if name in ("start", "stop", "step"):
            return constant(getattr(self.range, name))
        return super().tp_getattro(tx, name)

    def nb_bool(self, tx: Tracer) -> bool:
        return bool(self.range)

    def as_constant(self) -> Any:
        return self.range

    def unpack(self, tx: Tracer) -> list[Value]:
        if self.range[config.settings.instruction_limit :]:
            raise Break("too-long", f"all of {self.range}")
        return [constant(number) for number in self.range]

    def tp_iter(self, tx: Tracer) -> Value:
        return tx.iterator_over(self)
