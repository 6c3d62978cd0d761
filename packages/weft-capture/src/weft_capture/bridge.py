"""What values ask of the tracer that lives in files which themselves need values.

`Tracer` inherits these; they exist to keep imports one way.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from weft_capture import attribute_writes, class_statements, classes, scope
from weft_capture.rules import table
from weft_capture.rules.operators import equal
from weft_capture.rules.text import format_text, text_of
from weft_capture.values.base import Kwargs, Value
from weft_capture.values.constant import fold
from weft_capture.values.containers import (
    ListValue,
    NamedTupleValue,
    RangeValue,
    SetValue,
    SizeValue,
    SliceValue,
    TupleValue,
)
from weft_capture.values.dicts import DictValue
from weft_capture.values.functions import ClassValue, ModuleObject
from weft_capture.values.iterators import DictIterator
from weft_capture.values.made_classes import MADE, MadeClass
from weft_capture.values.proxies import Proxy

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer
    from weft_capture.values.dicts import DictView


class Bridge:
    """Operations of the tracer on Python data, dicts, texts and classes."""

    @property
    def _tx(self) -> Tracer:
        return cast("Tracer", self)

    def literal(self, obj: Any) -> Value:
        """Turn fresh Python data (not owned by the program) into values; proxies become theirs."""
        kind = type(obj)
        if isinstance(obj, Value | Proxy):
            return obj if isinstance(obj, Value) else obj.value
        if kind in (tuple, list, torch.Size):
            items = [self.literal(item) for item in obj]
            made: dict[Any, Any] = {tuple: TupleValue, list: ListValue, torch.Size: SizeValue}
            value: Value = made[kind](items)
            return value
        if kind in (dict, OrderedDict, defaultdict):
            pairs = [(self.literal(k), self.literal(v)) for k, v in obj.items()]
            factory = self._tx.const_object(getattr(obj, "default_factory", None))
            return DictValue(pairs, cls=kind, default_factory=factory)
        if kind in (set, frozenset):
            return SetValue([self.literal(item) for item in obj], None, kind, obj)
        if kind is range:
            return RangeValue(obj)
        if kind is slice:
            return SliceValue(*(self.literal(p) for p in (obj.start, obj.stop, obj.step)))
        if isinstance(obj, tuple) and hasattr(kind, "_fields"):
            return NamedTupleValue(kind, [self.literal(item) for item in obj])
        return self._tx.const_object(obj)

    def forget(self) -> None:
        """Let go of the program's objects at once: the parts of a capture hold each other."""
        tx = self._tx
        for value, _ in tx.known.values():
            if isinstance(value, MadeClass):
                MADE.pop(value.obj, None)
        for held in (tx.known, tx.keep_alive, tx.effects.changed, tx.effects.globals,
                     tx.steps.raised_at):  # fmt: skip
            held.clear()
        tx.journal.begin()
        for frame in tx.frames:
            frame.locals.clear()
            frame.cells.clear()
            frame.stack.clear()
            frame.result = frame.exception = None
        tx.frames.clear()

    def has_rule(self, function: object) -> bool:
        """Say whether calls of a function have a rule."""
        return table.find(function) is not None

    def dict_iterator(self, view: DictView) -> Value:
        """Return an iterator over a dict or a view of it."""
        kind = type(iter(getattr({}, view.kind)()))
        items = view.unpack(self._tx)
        return DictIterator(view.owner, items, kind, view.kind, self._tx.steps.now)

    def set_iterator(self, items: SetValue) -> Value:
        """Return an iterator over a set."""
        kind: type = type(iter({0}))
        return DictIterator(items, items.unpack(self._tx), kind, "", self._tx.steps.now)

    def format_text(self, text: str, args: list[Value], kwargs: Kwargs) -> Value:
        """Evaluate `text.format(*args, **kwargs)`."""
        return format_text(self._tx, text, args, kwargs)

    def text_of(self, value: Value, function: Callable[[Any], str]) -> str:
        """Return `function(value)` for str or repr."""
        return text_of(self._tx, value, function)

    def is_equal(self, left: Value, right: Value) -> bool:
        """Evaluate `left is right or left == right`, as containers do."""
        return equal(self._tx, left, right)

    def fold_method(self, owner: Value, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        """Call a method of an immutable value whose parts are all known."""
        return fold(self._tx, getattr(owner.data(self._tx), name), args, kwargs)

    def set_class_attribute(self, cls: ClassValue, name: str, value: Value | None) -> None:
        """Set an attribute of a class, or delete it (None)."""
        if isinstance(cls, MadeClass):
            class_statements.set_class_attribute(self._tx, cls, name, value)
        else:
            attribute_writes.set_outside_class(self._tx, cls, name, value)

    def subscript_class(self, cls: ClassValue, key: Value) -> Value:
        """Evaluate `cls[key]`."""
        return classes.subscript_class(self._tx, cls, key)

    def set_module_attribute(self, module: ModuleObject, name: str, value: Value) -> None:
        """Write an attribute of a Python module."""
        scope.set_module_attribute(self._tx, module, name, value)

    def keyword_arguments(self, mapping: Value) -> Kwargs:
        """Return a mapping as keyword arguments."""
        if not isinstance(mapping, DictValue):
            fresh = DictValue()
            fresh.call_method(self._tx, "update", [mapping], {})
            mapping = fresh
        return {key.as_constant(): value for key, value in mapping.pairs(self._tx)}
