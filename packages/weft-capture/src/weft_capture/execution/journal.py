"""Undo for speculative execution.

Code that changes captured state calls `touch` first, with a function that undoes the change;
without one the state is saved once per step. All steps of a capture can be rolled back, as far as
memory allows.
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
        """Return a function that restores the current state."""
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
        """Forget all undo entries so far."""
        self._forgotten += len(self._undo)
        self._undo.clear()
        self._copied = 0

    def mark(self) -> int:
        """Return the present state, for `rollback`."""
        return self._forgotten + len(self._undo)

    def can_undo(self, mark: int) -> bool:
        """Say whether all changes since `mark` can still be undone."""
        return mark >= self._forgotten

    def touch(self, state: Undoable, undo: Callable[[], object] | None = None) -> None:
        """Save `state` before a change, once per step, or record the `undo` of the change."""
        self.oldest_touched = min(self.oldest_touched, state.born)
        state.epoch = self.epoch
        if state.saved != self.epoch:
            if undo is None:
                state.saved = self.epoch
                undo = state.snapshot()
                changing = [getattr(state, name) for name in getattr(state, "changing", ())]
                self._copied += sum(len(c) for c in changing if isinstance(c, Sized))
            self._undo.append(undo)

    def on_rollback(self, undo: Callable[[], object]) -> None:
        """Run `undo` if this step is rolled back."""
        self._undo.append(undo)

    @contextmanager
    def unchanged(self, detail: str) -> Iterator[None]:
        """Break where the block changes existing state.

        Raises:
            Break: after such a block.
        """
        before = self.mark()
        yield
        if self.mark() != before:
            raise Break("special-method", detail)

    def rollback(self, mark: int) -> None:
        """Undo everything since `mark`, newest first."""
        self.epoch += 1
        while self.mark() > mark:
            self._undo.pop()()
