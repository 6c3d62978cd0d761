"""What generators make, and what running it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Text: lines that are run, then the tuple of arguments.
Call = str


@dataclass(frozen=True)
class Program:
    """A function `f` in a module's text, and the calls to make of it (see `__init__.py`)."""

    source: str
    calls: tuple[Call, ...]
    order: int = 0
    dynamic: bool | None = None
    parts: int = 1


Generator = Callable[[int], Program]

PASS, DOUBTFUL, EAGER = "pass", "doubtful", "eager fails"


@dataclass(frozen=True)
class Verdict:
    """How a program fared.

    Args:
        kind: `pass`, `doubtful`, `eager fails` (crashes or hangs), or the class of the failure
            (such as `values`, `strides`, `exception A -> B`, `crash`, `hang`). A reduced program
            must fail with the same kind.
        detail: what a person wants to read.
        notices: what weft said of graphs that run eagerly.
    """

    kind: str = PASS
    detail: str = ""
    notices: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        return self.kind not in (PASS, DOUBTFUL, EAGER)
