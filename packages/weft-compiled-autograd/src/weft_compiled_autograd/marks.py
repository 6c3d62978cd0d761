"""Marks for code of this package that is called from inside captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def inlinable(function: F) -> F:
    """Let weft's frame capture look inside a function, so that a hook joins the compiled graph."""
    function.__dict__["_weft_inline"] = True
    return function
