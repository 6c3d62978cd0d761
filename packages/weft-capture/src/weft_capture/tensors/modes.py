"""The program's function modes that are active around a frame.

They would see capture's and the compiler's own calls of torch, so both work with the modes taken
off torch's stack. Code made under modes is looked for, and does its part before a real step,
with all handlers switched off.
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
    """Keep modes from seeing guards; only here is code found that was made under modes."""
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
        taken = [torch._C._pop_torch_function_stack() for _ in range(count)][::-1]
        around.modes = tuple(taken)
        try:
            yield
        finally:
            around.modes, around.state = before
            for mode in taken:
                torch._C._push_on_torch_function_stack(mode)


def handlers_off() -> Any:
    """Switch all handlers off; returns what switches them on again when it is called."""
    context = torch._C.DisableTorchFunction()
    context.__enter__()
    return functools.partial(context.__exit__, None, None, None)
