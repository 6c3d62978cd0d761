"""Opens the engine's extension point to one thread's backward, and to no other.

The extension point is process wide, and the engine reads it when a backward begins: while it is
set, any thread's backward would be captured. It is therefore set only from just before one thread
calls the engine until the engine first calls back; backwards that begin in that time wait for it,
and it is not opened while an eager backward runs (the engine would refuse, too).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_seam = torch._C._dynamo.compiled_autograd


class EngineLock:
    """A readers-writer lock: eager backwards read, an open extension point writes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._eager = 0
        self._open = False

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Hold the extension point closed during an eager backward."""
        with self._changed:
            while self._open:
                self._changed.wait()
            self._eager += 1
        try:
            yield
        finally:
            with self._changed:
                self._eager -= 1

    def open(self, factory: Callable[[], Any], log: Any, dynamic: bool = False) -> bool:
        """Set the extension point; False when an eager backward runs or it is open already.

        With `dynamic`, a backward that is new to the engine has all its sizes passed at run time.
        """
        with self._changed:
            if self._eager or self._open:
                return False
            _seam.set_verbose_logger(log)
            _seam.set_autograd_compiler(factory, dynamic)
            self._open = True
            return True

    def close(self) -> None:
        """Clear the extension point; closing twice is fine."""
        with self._changed:
            if self._open:
                _seam.set_autograd_compiler(None, False)
                self._open = False
                self._changed.notify_all()


engine_lock = EngineLock()
"""The one extension point of the process."""
