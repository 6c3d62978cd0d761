"""The table of opcode handlers and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft_capture.breaks import Break
from weft_capture.bytecode import Instr
from weft_capture.model.protocol import Frame, Value

Handler = Callable[["Frame", "Instr"], object]
HANDLERS: dict[str, Handler] = {}


def opcode(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for opcodes."""

    def add(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return add


def on_values(rows: Mapping[str, tuple[int, Callable[..., Value | None]]]) -> None:
    """Register opcodes that only turn values of the stack into one.

    Args:
        rows: the number of operands by opcode, and a function (tx, argval, *operands) of which
            the result is pushed, unless it is None.
    """

    def handler_of(count: int, function: Callable[..., Value | None]) -> Handler:
        def handler(frame: Frame, instr: Instr) -> None:
            result = function(frame.tx, instr.argval, *frame.pop_many(count))
            if result is not None:
                frame.stack.append(result)

        return handler

    HANDLERS.update({name: handler_of(*row) for name, row in rows.items()})


def unsupported(frame: Frame, instr: Instr) -> None:
    """Break at an opcode without handler."""
    raise Break("unsupported-opcode", instr.opname)
