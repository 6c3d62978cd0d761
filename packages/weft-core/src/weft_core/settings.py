"""Typed groups of settings.

A package declares its settings as a dataclass over `Settings` and keeps one instance in its
`config.py`. A wrong name or a value of the wrong type is an error at the assignment, and
`patch` changes values for a while, as a context manager or as a decorator.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin

from weft_core.errors import InvalidOption


@cache
def _types(group: type) -> dict[str, Any]:
    """Return the declared type of each setting of a group."""
    hints = typing.get_type_hints(group)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not typing.ClassVar}


def _fits(value: object, hint: Any) -> bool:
    """Say whether a value is of a declared type; types not listed here are not checked."""
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arm) for arm in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is None or hint is type(None):
        return value is None
    return not isinstance(hint, type) or isinstance(value, hint)


@dataclass
class Settings:
    """Base of a settings group; subclasses are dataclasses whose fields all have defaults."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set one setting.

        Raises:
            InvalidOption: for an unknown name, or a value that its declared type does not allow.
        """
        group: type = type(self)
        known = _types(group)
        if name not in known:
            raise InvalidOption(name, known)
        if not _fits(value, known[name]):
            detail = f"{name} takes {_type_name(known[name])}, not {value!r}."
            raise InvalidOption(name, detail=detail)
        super().__setattr__(name, value)

    @contextmanager
    def patch(self, **changes: object) -> Iterator[None]:
        """Change settings inside a `with` block or a decorated function; restored afterwards.

        Raises:
            InvalidOption: as assignment does; nothing is changed then.
        """
        before: dict[str, object] = {}
        try:
            for name, value in changes.items():
                old = getattr(self, name, None)
                setattr(self, name, value)
                before[name] = old
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def as_dict(self) -> dict[str, Any]:
        """Return all settings by name; with `repr`, a stable cache key."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def reset(self) -> None:
        """Put every setting back to its default."""
        for name, value in type(self)().as_dict().items():
            setattr(self, name, value)


def _type_name(hint: Any) -> str:
    """Print a declared type as it was written."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
