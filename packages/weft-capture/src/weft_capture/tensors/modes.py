"""The program's function modes that are active around a frame.

They would see the torch calls of capture and of the compiler, so both remove the modes from torch's
stack while they work. Code compiled under modes is looked up, and runs up to an eager step, with
all handlers disabled.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from weft_guards.sources import CallSource, ConstSource, Source
from weft_guards.state import TorchState


class _Around(threading.local):
    level = -1
    modes: tuple[Any, ...] = ()
    state: TorchState | None = None


around = _Around()
"""While capture works: the modes, outermost first, torch's state with them (None: as it is), and
whether the program has switched off the handlers of classes (1), or all (2)."""


def mode_source(index: int) -> Source:
    """Return where the mode at a place of the stack comes from."""
    return CallSource(torch._C._get_function_stack_at, (ConstSource(index),))


def level_around() -> int:
    """Return the program's own level inside of `lookup_under_modes`, else -1."""
    return around.level


@contextmanager
def lookup_under_modes() -> Iterator[None]:
    """Hide guards from modes; code that was compiled under modes is only looked up in here."""
    if not torch._C._len_torch_function_stack():
        yield
        return
    before = around.level
    around.level = int(not torch._C._is_torch_function_enabled())
    around.level += torch._C._is_torch_function_all_disabled()
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        around.level = before


@contextmanager
def modes_put_away() -> Iterator[None]:
    """Take the modes off the stack, inside of `lookup_under_modes`."""
    count = torch._C._len_torch_function_stack()
    if not count:
        yield
        return
    before = around.modes, around.state
    around.state = TorchState.now()
    with torch._C._EnableTorchFunction():
        popped = [torch._C._pop_torch_function_stack() for _ in range(count)][::-1]
        around.modes = tuple(popped)
        try:
            yield
        finally:
            around.modes, around.state = before
            for mode in popped:
                torch._C._push_on_torch_function_stack(mode)


def handlers_off() -> Any:
    """Disable all handlers; returns a function that enables them again."""
    context = torch._C.DisableTorchFunction()
    context.__enter__()
    return functools.partial(context.__exit__, None, None, None)
