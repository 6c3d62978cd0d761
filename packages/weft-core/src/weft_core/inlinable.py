"""Marks for code of weft's own that frame capture looks into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def inlinable(function: F) -> F:
    """Let frame capture inline a function of weft, such as a hook or a version of one in C."""
    function.__dict__["_weft_inline"] = True
    return function
