"""Undo for speculative execution.

Capture executes each instruction of the outermost frame speculatively: if it breaks, everything
the instruction did (also inside the calls it inlined) must be as if it had not begun. Whoever
changes captured state calls `touch` first; the state before the change is saved once per
instruction of the outermost frame, so a loop of a thousand appends costs one copy each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Undoable(Protocol):
    """State that can be saved: `epoch` is owned by the journal."""

    epoch: int

    def snapshot(self) -> Callable[[], None]:
        """Return a function that puts the state back to what it is now."""
        ...


class Journal:
    """The undo log of one traced frame."""

    def __init__(self) -> None:
        self.epoch = 0
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Start a new speculative step; what was done before can no longer be undone."""
        self.epoch += 1
        if self._undo:
            self._undo.clear()

    def touch(self, state: Undoable) -> None:
        """Save `state` before its first change in this step."""
        if state.epoch != self.epoch:
            state.epoch = self.epoch
            self._undo.append(state.snapshot())

    def on_rollback(self, undo: Callable[[], None]) -> None:
        """Run `undo` if this step is rolled back."""
        self._undo.append(undo)

    def rollback(self) -> None:
        """Undo everything since `begin`, newest first."""
        self.epoch += 1
        while self._undo:
            self._undo.pop()()
