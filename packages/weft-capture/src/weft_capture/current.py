"""The capture that runs in this thread, for operations that Python itself calls back.

A dict looks its keys up by `__hash__` and `__eq__`, which get no tracer.
"""

from __future__ import annotations

import threading
import weakref

from weft_capture.values.base import Tracer

_state = threading.local()


def set_tracer(tx: Tracer) -> None:
    """Make a capture the current one of this thread; it is not kept alive."""
    _state.tracer = weakref.ref(tx)


def tracer() -> Tracer:
    """Return the current capture of this thread."""
    current: Tracer | None = _state.tracer()
    assert current is not None
    return current
