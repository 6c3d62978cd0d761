"""Suppress and record warnings; `catch_warnings` would forget which the program has seen."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class _RecordingPattern:
    """In the place of a filter's pattern: fits all that the thread which made it warns of."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.texts: list[str] = []

    def match(self, text: str) -> bool:
        if self.thread != threading.get_ident():
            return False
        self.texts.append(text)
        return True


@contextmanager
def suppress_warnings(action: str = "ignore") -> Iterator[list[str]]:
    """Note this thread's warnings only, those too that torch gives once in a process.

    Args:
        action: what comes of them, as in `warnings.simplefilter`.
    """
    noted, always = _RecordingPattern(), torch.is_warn_always_enabled()
    filters: Any = warnings.filters
    entry = (action, noted, Warning, None, 0)
    filters.insert(0, entry)
    torch.set_warn_always(True)
    try:
        yield noted.texts
    finally:
        torch.set_warn_always(always)
        noted.thread = 0  # for copies of the list
        with suppress(ValueError):
            filters.remove(entry)
