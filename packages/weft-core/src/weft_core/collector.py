"""Keep Python's cyclic garbage collector out of a compile.

Importing and tracing make objects by the hundred thousand, nearly all of which stay. Every one of
the full collections that this sets off walks the whole heap of a program that has loaded torch,
0.1 s a time, and frees next to nothing: a fifth of the first compile's time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Switch the collector off within the block, for all threads; blocks may nest and overlap.

    When the last one ends the collector is on again if it was on before the first.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
