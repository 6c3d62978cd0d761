"""The table of opcode handlers and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from weft_capture.breaks import Break

if TYPE_CHECKING:
    from weft_capture.bytecode import Instr
    from weft_capture.frames import Frame

Handler = Callable[["Frame", "Instr"], None]
HANDLERS: dict[str, Handler] = {}


def opcode(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for opcodes."""

    def add(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return add


def unsupported(frame: Frame, instr: Instr) -> None:
    """Break at an opcode without handler."""
    raise Break("unsupported-opcode", instr.opname)
