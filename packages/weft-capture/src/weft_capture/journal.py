"""Undo for speculative execution.

Whoever changes captured state calls `touch` first, with what takes the change back, or the state
before it is saved once per step. A step can be part of a longer one: `begin(keep=True)` keeps what
was saved before, and `rollback` to the `mark` of the longer step undoes both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from weft_capture.breaks import Break


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
        self.oldest_touched = sys.maxsize  # by `born`, see `MutableValue`

    def begin(self, keep: bool = False) -> None:
        """Start a new speculative step.

        Args:
            keep: what was done before can still be undone.
        """
        self.epoch += 1
        if not keep:
            self._forgotten += 1
            self._undo.clear()

    def mark(self) -> tuple[int, int]:
        """Return the present state, for `rollback`."""
        return self._forgotten, len(self._undo)

    def can_undo(self, mark: tuple[int, int]) -> bool:
        """Say whether everything since `mark` can still be undone."""
        return mark[0] == self._forgotten

    def touch(self, state: Undoable, undo: Callable[[], object] | None = None) -> None:
        """Save `state` before a change, unless it was in this step, or know what undoes that."""
        self.oldest_touched = min(self.oldest_touched, state.born)
        state.epoch = self.epoch
        if state.saved != self.epoch:
            if undo is None:
                state.saved = self.epoch
                undo = state.snapshot()
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
            raise Break("unsupported-value", what)

    def rollback(self, mark: tuple[int, int]) -> None:
        """Undo everything since `mark`, newest first."""
        self.epoch += 1
        while len(self._undo) > mark[1]:
            self._undo.pop()()
