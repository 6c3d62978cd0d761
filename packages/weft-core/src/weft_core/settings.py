"""Typed groups of settings.

A package declares its settings as a dataclass over `Settings` and keeps one instance in its
`config.py`. A wrong name or a value of the wrong type is an error at the assignment, and
`patch` changes values for a while, as a context manager or as a decorator.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, get_origin

from weft_core.arguments import check, hints_of
from weft_core.errors import UnknownSetting
from weft_core.events import notify


@cache
def _types(group: type) -> dict[str, Any]:
    """Return the declared type of each setting of a group."""
    hints = hints_of(group)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not typing.ClassVar}


def environment_flag(name: str, default: bool = True) -> bool:
    """Return what an environment variable says of a setting: `0` is off, `1` is on.

    Another value than 0 and 1 is told, since it must not stop a program.
    """
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        notify(f"[settings] {name}={text} is not read: it takes 0 or 1")
    return {"0": False, "1": True}.get(text, default)


@dataclass
class Settings:
    """Base of a settings group; subclasses are dataclasses whose fields all have defaults."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set one setting.

        Raises:
            UnknownSetting: for an unknown name.
            InvalidArgument: for a value that its declared type does not allow.
        """
        group: type = type(self)
        known = _types(group)
        if name not in known:
            raise UnknownSetting(name, known)
        check(known, {name: value})
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
