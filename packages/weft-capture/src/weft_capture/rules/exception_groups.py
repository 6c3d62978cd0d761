"""except*: splitting exception groups, and putting together what is left to raise.

Follows `exception_group_match` and `_PyExc_PrepReraiseStar` of CPython. A part remembers the group
it was split from (`origin`), which is how parts that were raised again are told from new errors.
"""

from __future__ import annotations

from weft_capture.breaks import Break
from weft_capture.values.base import Tracer, Value, method
from weft_capture.values.constant import NONE, constant
from weft_capture.values.containers import ListValue
from weft_capture.values.exceptions import ExceptionValue

Classes = tuple[type, ...]


def make_group(message: Value, parts: list[Value]) -> ExceptionValue:
    """Return a new group; an ExceptionGroup when all parts are Exceptions."""
    plain = all(issubclass(part.python_type(), Exception) for part in parts)
    return ExceptionValue(
        ExceptionGroup if plain else BaseExceptionGroup, [message, ListValue(parts)]
    )


def _parts(group: ExceptionValue) -> list[Value]:
    if group.cls not in (ExceptionGroup, BaseExceptionGroup):
        raise Break("unsupported-value", f"splitting a {group.cls.__name__}")
    parts = group.args[1]
    return list(parts.items)  # type: ignore[attr-defined]


def _derive(group: ExceptionValue, parts: list[Value]) -> Value:
    if not parts:
        return NONE
    part = make_group(group.args[0], parts)
    part.attributes = dict(group.attributes)
    part.origin = group.origin or group
    part.raised = group.raised
    return part


def split(tx: Tracer, error: Value, classes: Classes) -> tuple[Value, Value]:
    """Return the parts of an exception that match and that do not; None for an empty part."""
    if issubclass(error.python_type(), classes):
        return error, NONE
    if not isinstance(error, ExceptionValue) or not issubclass(error.cls, BaseExceptionGroup):
        return NONE, error
    pairs = [split(tx, part, classes) for part in _parts(error)]
    matched = [match for match, _ in pairs if match is not NONE]
    others = [rest for _, rest in pairs if rest is not NONE]
    if not matched:
        return NONE, error
    return _derive(error, matched), _derive(error, others)


def match(tx: Tracer, error: Value, classes: Classes) -> tuple[Value, Value]:
    """Return (what an except* clause takes, what is left)."""
    if error is NONE:
        return NONE, NONE
    if any(issubclass(kind, BaseExceptionGroup) for kind in classes):
        text = "catching ExceptionGroup with except* is not allowed. Use except instead."
        tx.raise_(TypeError, text)
    taken, rest = split(tx, error, classes)
    is_group = issubclass(error.python_type(), BaseExceptionGroup)
    if taken is not NONE and not is_group:
        wrapped = make_group(constant(""), [taken])
        wrapped.raised = True
        return wrapped, NONE
    return taken, rest


def rest_to_raise(tx: Tracer, original: Value, raised: list[Value]) -> Value:
    """Return what the try statement raises in the end; None for nothing."""
    errors = [error for error in raised if error is not NONE]
    if not errors:
        return NONE
    assert isinstance(original, ExceptionValue)
    if not issubclass(original.cls, BaseExceptionGroup):
        return errors[0]
    again = {id(leaf) for error in errors if _is_part(error, original) for leaf in _leaves(error)}
    fresh = [error for error in errors if not _is_part(error, original)]
    kept = _project(original, again)
    if not fresh:
        return kept
    return make_group(constant(""), [*fresh, *([kept] if kept is not NONE else [])])


def _is_part(error: Value, original: ExceptionValue) -> bool:
    return error is original or (
        isinstance(error, ExceptionValue) and error.origin is (original.origin or original)
    )


def _leaves(error: Value) -> list[Value]:
    if isinstance(error, ExceptionValue) and issubclass(error.cls, BaseExceptionGroup):
        return [leaf for part in _parts(error) for leaf in _leaves(part)]
    return [error]


def _project(error: Value, leaves: set[int]) -> Value:
    """Return the part of a group that holds these leaves, nested as in the original."""
    if isinstance(error, ExceptionValue) and issubclass(error.cls, BaseExceptionGroup):
        parts = [_project(part, leaves) for part in _parts(error)]
        kept = [part for part in parts if part is not NONE]
        return error if kept == _parts(error) else _derive(error, kept)
    return error if id(error) in leaves else NONE


@method(ExceptionValue, "split")
def _split(tx: Tracer, self: ExceptionValue, condition: Value) -> Value:
    return tx.tuple_of(list(split(tx, self, _condition(tx, condition))))


@method(ExceptionValue, "subgroup")
def _subgroup(tx: Tracer, self: ExceptionValue, condition: Value) -> Value:
    return split(tx, self, _condition(tx, condition))[0]


def _condition(tx: Tracer, condition: Value) -> Classes:
    items = condition.unpack(tx) if issubclass(condition.python_type(), tuple) else [condition]
    classes = tuple(item.as_constant() for item in items)
    if not all(isinstance(kind, type) for kind in classes):
        raise Break("unsupported-method", "splitting an exception group by a function")
    return classes
