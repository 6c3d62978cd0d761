"""The values that a value refers to, as far as capture knows."""

from __future__ import annotations

from collections.abc import Iterator

from weft_capture.model.containers import ListValue, SequenceValue, SetValue
from weft_capture.model.dicts import DictValue
from weft_capture.model.functions import BoundMethod, CellValue, FunctionValue
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import MethodOf, Value


def children(value: Value) -> Iterator[Value]:
    """Yield the values that an object refers to, as far as capture knows."""
    if isinstance(value, SequenceValue):
        yield from value.added if isinstance(value, ListValue) else value.items
    elif isinstance(value, DictValue):
        for pair in (value.own if value.read else value.entries).values():
            yield from pair
    elif isinstance(value, SetValue):
        yield from value.entries.values()
    elif isinstance(value, UserObject):
        yield from value.attrs.values()
        if value.base is not None:
            yield value.base
    elif isinstance(value, CellValue):
        if value.contents is not None:
            yield value.contents
    elif isinstance(value, FunctionValue):
        yield from value.cells
        yield from value.attributes.values()
    elif isinstance(value, BoundMethod | MethodOf):
        if isinstance(value, BoundMethod):
            yield value.function
        yield value.owner


def leads_to(pending: list[Value], target: Value) -> bool:
    """Say whether one of these values is, or refers to, a new value, directly or indirectly."""
    seen: set[int] = set()
    for value in pending:  # breadth first: the list grows
        if value is target:
            return True
        if id(value) not in seen and value.source is None:
            seen.add(id(value))
            pending.extend(children(value))
    return False
