"""A symbolic frame: locals, cells, operand stack and instruction pointer, and its loop.

`Frame.run` executes a call to its end within one step of its caller; `stepping` has the frames in
which each instruction can be rolled back.
"""

from __future__ import annotations

import functools
import linecache
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from weft_core.events import enabled, logger

from weft_capture.breaks import Break
from weft_capture.bytecode import Decoded, Instr, decode
from weft_capture.model.constant import NONE, constant
from weft_capture.model.containers import SequenceValue
from weft_capture.model.functions import CellValue, FunctionValue
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Raised, Tracer, Value
from weft_capture.model.weakrefs import pop_dying
from weft_capture.opcodes import HANDLERS
from weft_capture.opcodes.dispatch import Handler, unsupported

Program = list[tuple[Handler, Instr]]
_source_log = logger("capture", "trace_source")


def program_of(decoded: Decoded) -> Program:
    """Return the instructions with their handlers, kept with the decoded code."""
    program: Program | None = decoded.derived.get("handlers")
    if program is None:
        program = [(HANDLERS.get(i.opname, unsupported), i) for i in decoded.instrs]
        decoded.derived["handlers"] = program
    return program


def _with_line_log(program: Program) -> Iterator[tuple[Handler, Instr]]:
    """Yield a program that logs each line of the source as it is reached."""
    line: int | None = None
    for handler, instr in program:
        begins = instr.lineno not in (None, line) and instr.opname != "RESUME"
        line = instr.lineno if begins else line
        yield functools.partial(_log_line, handler) if begins else handler, instr


def _log_line(handler: Handler, frame: Frame, instr: Instr) -> None:
    decoded, depth = frame.decoded, sum(1 for _ in frame.callers())
    text = linecache.getline(decoded.filename, instr.lineno or 0).rstrip()
    where = f"{decoded.filename}:{instr.lineno} in {decoded.name}"
    _source_log.info("%s (depth %d)\n%s", where, depth, text)
    handler(frame, instr)


@dataclass(eq=False)
class Frame:
    """One executing function."""

    tx: Tracer
    function: FunctionValue
    locals: dict[str, Value]
    cells: dict[str, CellValue]
    ip: int = 0
    parent: Frame | None = None
    exception: Value | None = None
    result: Value | None = None
    yielded: Value | None = None
    above: tuple[tuple[traceback.FrameSummary, ...], str] | None = None  # see `Tracer.user_stack`
    replaced: dict[int, Any] | None = None
    """Values by id that stand for other objects now; no graph may end before they are put back."""
    stepped = False
    """Whether each instruction is a step of its own (see `stepping`)."""

    def __post_init__(self) -> None:
        self.decoded = decode(self.function.code)
        self.program = program_of(self.decoded)
        if enabled("trace_source"):
            self.program = list(_with_line_log(self.program))
        self.stack: list[Value] = []

    def callers(self) -> Iterator[Frame]:
        """Yield this frame and its callers."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    def bind(self, name: str, value: Value | None, cell: bool = False) -> Value | None:
        """Set a variable, or with None unset it; returns its old value."""
        variables: dict[str, Any] = self.cells if cell else self.locals
        old: Value | None = variables.get(name)
        if self.stepped:
            before = variables.copy() if value is None else {name: old}
            self.tx.journal.on_rollback(functools.partial(_restore, variables, before))
        if value is not None:
            variables[name] = value
        else:
            variables.pop(name, None)
        return old

    def pop_many(self, count: int) -> list[Value]:
        """Pop `count` values, returned in the order they were pushed."""
        start = len(self.stack) - count
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def delegate(self) -> Value | None:
        """Return the iterator that a suspended generator is in `yield from` of, if it is."""
        after = self.decoded.instrs[self.ip]
        in_yield_from = after.opname == "RESUME" and after.arg & 3 in (2, 3)
        return self.stack[-1] if in_yield_from else None

    def end_delegation(self, inner: Value) -> None:
        """Continue after a `yield from` whose iterator ended by an exception thrown into it."""
        back = self.decoded.instrs[self.ip + 1]
        assert back.target is not None
        self.ip = back.target + 1
        self.stack[-1:] = self.send_result(inner)
        self.ip = self.decoded.instrs[back.target].target or 0

    def send_result(self, inner: Value, result: Value | None = None) -> list[Value]:
        """Return what SEND, the last instruction, leaves when the inner iterator has ended.

        Up to 3.11 that is the result; from 3.12 the iterator stays for END_SEND.
        """
        if result is None:
            result = inner.returned or NONE
        after = self.decoded.instrs[self.ip].opname
        target_op = self.decoded.instrs[self.decoded.instrs[self.ip - 1].target or 0].opname
        keeps = target_op == "END_SEND" or after == "END_SEND"
        return [inner, result] if keeps else [result]

    def run(self) -> Value:
        """Execute until the function returns or yields; returns that value.

        Raises:
            Raised: when an exception leaves the frame.
            Break: when an instruction cannot be captured.
        """
        tx = self.tx
        self.parent = tx.frame
        tx.enter_frame(self)
        program = self.program
        executed = 0
        try:
            left = max(tx.steps.limit - tx.unstepped, 0)
            for executed in range(left):  # noqa: B007 - counted below
                handler, instr = program[self.ip]
                self.ip += 1
                before = self.stack.copy()
                try:
                    handler(self, instr)
                except Raised as raised:
                    check_names(raised.value, before)
                    if not self.unwind(raised.value, instr):
                        raise
                except Break as error:
                    if not error.user_stack:
                        error.user_stack = tx.user_stack()
                    raise
                if self.result is not None:
                    return self.result
                if self.yielded is not None:
                    value, self.yielded = self.yielded, None
                    return value
            raise Break("too-long", "the instruction limit inside one call")
        finally:
            tx.leave_frame(self)
            tx.unstepped += executed + 1

    def unwind(self, error: Value, instr: Instr) -> bool:
        """Go to the handler of the instruction that raised; False when there is none."""
        handler = instr.handler
        if handler is None:
            return False
        while len(self.stack) > handler.depth:
            pop_dying(self, self.stack.pop())
        if handler.lasti:
            self.stack.append(constant(instr.offset))
        self.stack.append(error)
        self.ip = handler.target
        return True

    @property
    def instr(self) -> Instr:
        """The instruction being executed."""
        return self.decoded.instrs[max(self.ip - 1, 0)]

    def location(self) -> tuple[traceback.FrameSummary, str]:
        """Return the frame's current line, as a summary and as a traceback prints it."""
        decoded = self.decoded
        line = self.instr.lineno or decoded.firstlineno
        location: tuple[traceback.FrameSummary, str] | None = decoded.derived.get(("place", line))
        if location is None:
            at = traceback.FrameSummary(decoded.filename, line, decoded.name, lookup_line=False)
            location = decoded.derived["place", line] = (at, traceback.format_list([at])[0])
        return location


def check_names(error: Any, operands: Iterable[Value]) -> None:
    """Break where an error's message may name the builtin base of an operand."""
    text = " ".join(str(arg.as_constant()) for arg in error.args if arg.is_constant())
    for operand in operands:
        owner = getattr(operand, "forced", None) or getattr(operand, "owner", operand)
        if isinstance(owner, SequenceValue):
            check_names(error, (item for item in owner.items if isinstance(item, UserObject)))
        if not isinstance(owner, UserObject) or owner.base is None:
            continue
        error_type, base = error.python_type(), owner.base.python_type()
        names_base = issubclass(error_type, TypeError) and base.__name__ in text
        if names_base or (issubclass(error_type, ValueError) and owner.base.is_constant()):
            raise Break("builtin-error", f"an error of a {owner.describe()}") from None


def _restore(variables: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore variables and their order, which decides the order of reconstruction."""
    if len(before) > 1:
        variables.clear()
    for name, old in before.items():
        if old is None:
            variables.pop(name, None)
        else:
            variables[name] = old
