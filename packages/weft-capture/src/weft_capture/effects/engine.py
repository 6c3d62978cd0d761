"""Who captures backward passes: the graph of the caller, or another stage.

Where another stage does, `backward()` and `autograd.grad` of a captured program are eager calls
between its graphs, made under the flags of the calling function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from weft_guards.sources import CallSource

from weft_capture import frame
from weft_capture.breaks import Break
from weft_capture.model.protocol import Tracer


def _never() -> bool:
    return False


class _Engine:
    is_elsewhere: Callable[[], bool] = staticmethod(_never)


def leave_backwards(predicate: Callable[[], bool]) -> None:
    """Leave backward passes to another stage where `predicate()` is true in the current thread."""
    _Engine.is_elsewhere = staticmethod(predicate)


def is_elsewhere() -> bool:
    """Say whether another stage captures a backward pass that begins now in this thread."""
    return _Engine.is_elsewhere()


def running() -> Any:
    """Return the `Capture` whose function this thread runs, None outside of optimised calls."""
    return frame.current()


@contextmanager
def one_graph_call(tx: Tracer) -> Iterator[None]:
    """Execute code that is one call of the graph, with the backward passes in it."""
    tx.opaque_depth += 1
    try:
        yield
    finally:
        tx.opaque_depth -= 1


def check(tx: Tracer, detail: str) -> None:
    """Break at a backward pass that another stage captures; guard who does."""
    if tx.opaque_depth:
        return
    elsewhere = is_elsewhere()
    tx.guard(CallSource(is_elsewhere, ()), "CONST", elsewhere)
    if elsewhere:
        raise Break("backward", detail)
