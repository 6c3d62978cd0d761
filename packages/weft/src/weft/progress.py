"""Show on a terminal what is being compiled; say nothing in a pipe.

Compiling takes from milliseconds to seconds. A line appears only once a stage has taken longer
than `_QUIET`, is rewritten in place and is gone when the work is done.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weft_core import events

from weft.settings import umbrella

_QUIET = 0.5
_TICK = 0.25
_CLEAR = "\r\x1b[K"

_active = threading.Lock()


def is_shown() -> bool:
    """Say whether progress is to be shown: `config.progress`, or else when stderr is a terminal."""
    if umbrella.progress is not None:
        return umbrella.progress
    return sys.stderr.isatty()


@contextmanager
def stage(name: str, detail: str = "") -> Iterator[None]:
    """Time a stage as `events.span` does, and show it while it lasts.

    Args:
        name: the stage.
        detail: what is being compiled.
    """
    with events.span(name, detail):
        # One line is enough: nested stages and other threads leave it to the outermost.
        if not is_shown() or not _active.acquire(blocking=False):
            yield
            return
        done = threading.Event()
        shower = threading.Thread(target=_show, args=(done, detail or name), daemon=True)
        shower.start()
        try:
            yield
        finally:
            done.set()
            shower.join()
            _active.release()


def _show(done: threading.Event, what: str) -> None:
    waited = _QUIET
    if done.wait(_QUIET):
        return
    while not done.wait(_TICK):
        waited += _TICK
        sys.stderr.write(f"{_CLEAR}weft: compiling {what} ({waited:.0f} s)")
        sys.stderr.flush()
    sys.stderr.write(_CLEAR)
    sys.stderr.flush()
