"""Whether a graph break is an error here, as `error_on_graph_break` says; None: as `fullgraph`."""

from __future__ import annotations

import threading


class _Modes(threading.local):
    def __init__(self) -> None:
        self.stack: list[bool] = []


_modes = _Modes()


def push(error: bool) -> None:
    """Enter a block in which breaks are errors, or not."""
    _modes.stack.append(error)


def pop() -> None:
    """Leave it; the blocks of a program that an error ended are left already."""
    if _modes.stack:
        _modes.stack.pop()


def current(fullgraph: bool) -> bool:
    """Say whether a break is an error: as the innermost block says, else as `fullgraph` does."""
    return _modes.stack[-1] if _modes.stack else fullgraph


def clear() -> None:
    """Leave all blocks: an error ends the program that is in them."""
    _modes.stack.clear()
