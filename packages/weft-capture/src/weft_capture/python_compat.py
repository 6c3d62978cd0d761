"""Differences between the supported versions of CPython: flags, messages, warnings.

Only `bytecode/` asks the flags; every other difference has a name here.

A message is taken from the interpreter, with an object of a class `{0}` in a module `{1}`.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from types import GetSetDescriptorType, NoneType
from typing import Any, TypeVar

PY312 = sys.version_info >= (3, 12)
PY313 = sys.version_info >= (3, 13)
PY314 = sys.version_info >= (3, 14)

_WARNINGS: Any = warnings
#: What `catch_warnings` calls in C: a lock's functions, and what forgets what was given.
WARNINGS_LOCK: tuple[Any, ...] = ()
FILTERS_MUTATED: Any = _WARNINGS._filters_mutated
if PY314:
    WARNINGS_LOCK = (_WARNINGS._acquire_lock, _WARNINGS._release_lock)
    FILTERS_MUTATED = _WARNINGS._filters_mutated_lock_held
TUPLE_ASKS_LENGTH = not PY314
"""Whether `tuple` asks an object how long it is, as `list` does."""
HASH_NAMES_CONTAINER = PY314
"""Whether the error of an unhashable key or element says what it was to be in."""
ANNOTATE = ("__annotate__",) * PY314
"""What functions have that computes their annotations."""
THROW_WARNS_OF_CLASSES = PY312
"""Whether `throw(class, value)` warns."""
SORT_TAKES_TRUTH = PY312
"""Whether `reverse` of a sort is asked for its truth; before, it has to be an integer."""
CLOSE_RETURNS = PY313
"""Whether `close` gives what the generator returned."""
FRAME_KEEPS_LOCALS = not PY313
"""Whether a frame has one dict for `locals()`, which keeps what was put into it."""
WITH_CALLS_SPECIAL_METHODS = PY314
"""Whether `with` looks methods up as LOAD_SPECIAL does: two slots for the call at its end."""


def type_name(cls: type) -> str:
    """Return the name that the interpreter's errors give a class: one made in C has its module."""
    in_c = cls.__flags__ & 1 << 8 and cls.__module__ != "builtins"  # Py_TPFLAGS_IMMUTABLETYPE
    return f"{cls.__module__}.{cls.__name__}" if in_c else cls.__name__


def full_name(cls: type) -> str:
    """Return the name that newer errors give a class: with its module, except for a builtin one."""
    if not cls.__flags__ & 1 << 9 or cls.__module__ in ("builtins", "__main__"):  # no heap type
        return type_name(cls)
    return f"{cls.__module__}.{cls.__qualname__}"


def error_text(run: Callable[[Any], object], cls: type, methods: Iterable[str] = ()) -> str:
    """Return the text of the error of `run` for an object of a class with these special methods."""
    template = _template(run, (None,) if cls is NoneType else tuple(methods))
    return template.format(type_name(cls), full_name(cls))


@functools.cache
def _template(run: Callable[[Any], object], methods: tuple[str | None, ...]) -> str:
    special = dict.fromkeys(methods, lambda *_: None)
    namespace: Any = {"__module__": "{1}", "__hash__": None, **special}
    try:
        run(None if None in methods else type("{0}", (), namespace)())
    except (TypeError, ValueError) as error:
        return str(error).replace("{1}.{0}", "{1}")
    raise AssertionError("the interpreter takes what it should refuse")


def enters(manager: Any) -> None:
    """Use an object in a `with` statement."""
    with manager:
        pass


def add_note(note: Any) -> None:
    """Add a note to an exception."""
    Exception().add_note(note)


def unhashable(cls: type) -> str:
    """Return the text of the error of `hash`."""
    return error_text(hash, cls)


def unhashable_in(container: type, cls: type, text: str) -> str:
    """Return the text of the error of a dict or set whose key or element raised one in `hash`."""
    template = _template(_as_key if container is dict else _as_element, ())
    return template.replace(_template(hash, ()), "{2}").format(None, full_name(cls), text)


def _as_key(key: Any) -> object:
    return {key: None}


def _as_element(element: Any) -> object:
    return {element}


def too_many_values(cls: type, expected: int, got: int) -> str:
    """Return the text of the error of unpacking; some kinds say how many values there were."""
    template = _too_many(cls if cls in (list, tuple, dict) else iter)
    return template.format(expected, got)


@functools.cache
def _too_many(make: Callable[[Any], Any]) -> str:
    try:
        _, _ = make(dict.fromkeys(range(7)))
    except ValueError as error:
        return str(error).replace("2", "{0}").replace("7", "{1}")
    raise AssertionError("the interpreter takes what it should refuse")


TYPE_VARIABLE_FIELDS = [
    descriptor
    for name in ("__bound__", "__constraints__")
    if isinstance(descriptor := vars(TypeVar).get(name), GetSetDescriptorType)
]
"""Attributes of a TypeVar that never change; from CPython 3.12 on its class is one of C."""
