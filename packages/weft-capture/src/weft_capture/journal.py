"""Undo for speculative execution.

Whoever changes captured state calls `touch` first; the state before the change is saved once per
step. A step can be part of a longer one: `begin(keep=True)` keeps what was saved before, and
`rollback` to the `mark` of the longer step undoes both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from weft_capture.breaks import Break


class Undoable(Protocol):
    """State that can be saved: `epoch` is owned by the journal, `born` grows with each object."""

    epoch: int
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

    def touch(self, state: Undoable) -> None:
        """Save `state` before its first change in this step."""
        self.oldest_touched = min(self.oldest_touched, state.born)
        if state.epoch != self.epoch:
            state.epoch = self.epoch
            self._undo.append(state.snapshot())

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
