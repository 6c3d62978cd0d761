"""Undo for speculative execution.

Whoever changes captured state calls `touch` first, with what takes the change back, or the state
before it is saved once per step. All steps of a capture can be taken back, as far as memory allows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Protocol

from weft_capture.breaks import Break

_KEPT = 200_000
_COPIED = 5_000_000
"""How many changes, and how many items of containers copied for them, are kept for `rollback`."""


class Undoable(Protocol):
    """State that can be saved: `born` grows with each object, the journal owns the rest.

    `epoch` is when it was last changed, `saved` when it was last saved.
    """

    epoch: int
    saved: int
    born: int

    def snapshot(self) -> Callable[[], None]:
        """Return a function that puts the state back to what it is now."""
        ...


class Journal:
    """The undo log of one traced frame."""

    def __init__(self) -> None:
        self.epoch = 0
        self._undo: list[Callable[[], object]] = []
        self._forgotten = 0
        self._copied = 0
        self.oldest_touched = sys.maxsize  # by `born`, see `MutableValue`

    def begin(self) -> int:
        """Start a new speculative step; returns its mark."""
        self.epoch += 1
        if len(self._undo) > _KEPT or self._copied > _COPIED:
            self.forget()
        return self.mark()

    def forget(self) -> None:
        """Let nothing that was done so far be undone any more."""
        self._forgotten += len(self._undo)
        self._undo.clear()
        self._copied = 0

    def mark(self) -> int:
        """Return the present state, for `rollback`."""
        return self._forgotten + len(self._undo)

    def can_undo(self, mark: int) -> bool:
        """Say whether everything since `mark` can still be undone."""
        return mark >= self._forgotten

    def touch(self, state: Undoable, undo: Callable[[], object] | None = None) -> None:
        """Save `state` before a change, unless it was in this step, or know what undoes that."""
        self.oldest_touched = min(self.oldest_touched, state.born)
        state.epoch = self.epoch
        if state.saved != self.epoch:
            if undo is None:
                state.saved = self.epoch
                undo = state.snapshot()
                changing = [getattr(state, name) for name in getattr(state, "changing", ())]
                self._copied += sum(
                    len(container) for container in changing if isinstance(container, Sized)
                )
            self._undo.append(undo)

    def on_rollback(self, undo: Callable[[], object]) -> None:
        """Run `undo` if this step is rolled back."""
        self._undo.append(undo)

    @contextmanager
    def unchanged(self, what: str) -> Iterator[None]:
        """Refuse changes of existing state in the block.

        Raises:
            Break: when there were any.
        """
        before = self.mark()
        yield
        if self.mark() != before:
            raise Break("special-method", what)

    def rollback(self, mark: int) -> None:
        """Undo everything since `mark`, newest first."""
        self.epoch += 1
        while self.mark() > mark:
            self._undo.pop()()
