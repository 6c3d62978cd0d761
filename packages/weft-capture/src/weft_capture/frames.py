"""A symbolic frame: locals, cells, operand stack and instruction pointer, and its loop.

`Frame.run` executes a call to its end within one step of the frame that needs it; `steps` has the
frames whose every instruction can be taken back on its own.
"""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass

from weft_capture import config
from weft_capture.breaks import Break, Raised
from weft_capture.bytecode import Decoded, Instr, decode
from weft_capture.opcodes import HANDLERS
from weft_capture.opcodes.table import unsupported
from weft_capture.values.base import Output, Tracer, Value
from weft_capture.values.constant import NONE, constant
from weft_capture.values.exceptions import chain, generator_error
from weft_capture.values.functions import CellValue, FunctionValue
from weft_capture.values.iterators import IteratorValue

Program = list[tuple[Callable[["Frame", Instr], None], Instr]]


def program_of(decoded: Decoded) -> Program:
    """Return the instructions with their handlers, kept with the decoded code."""
    program: Program | None = decoded.derived.get("handlers")
    if program is None:
        program = [(HANDLERS.get(i.opname, unsupported), i) for i in decoded.instrs]
        decoded.derived["handlers"] = program
    return program


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
    stepped = False
    """Whether each instruction is a step of its own (see `steps`)."""

    def __post_init__(self) -> None:
        self.decoded = decode(self.function.code)
        self.program = program_of(self.decoded)
        self.stack: list[Value] = []

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
        """Go on behind a `yield from` whose iterator has ended by being thrown into."""
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
            result = getattr(inner, "returned", None) or NONE
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
            left = max(config.settings.instruction_limit - tx.unstepped, 0)
            for executed in range(left):  # noqa: B007 - counted below
                handler, instr = program[self.ip]
                self.ip += 1
                try:
                    handler(self, instr)
                except Raised as raised:
                    self.unwind(raised, instr)
                except Break as error:
                    if not error.user_stack:
                        error.user_stack = tx.user_stack()
                    raise
                if self.result is not None:
                    return self.result
                if self.yielded is not None:
                    value, self.yielded = self.yielded, None
                    return value
            raise Break("too-long", "in what one instruction calls")
        finally:
            tx.leave_frame(self)
            tx.unstepped += executed + 1

    def unwind(self, raised: Raised, instr: Instr) -> None:
        """Go to the handler of the instruction that raised, or let the exception out."""
        handler = instr.handler
        if handler is None:
            raise raised
        del self.stack[handler.depth :]
        if handler.lasti:
            self.stack.append(constant(instr.offset))
        self.stack.append(raised.value)
        self.ip = handler.target

    @property
    def instr(self) -> Instr:
        """The instruction being executed."""
        return self.decoded.instrs[max(self.ip - 1, 0)]

    def place(self) -> tuple[traceback.FrameSummary, str]:
        """Return where the frame stands, for messages, and as a traceback prints it."""
        decoded = self.decoded
        line = self.instr.lineno or decoded.firstlineno
        known: tuple[traceback.FrameSummary, str] | None = decoded.derived.get(("place", line))
        if known is None:
            at = traceback.FrameSummary(decoded.filename, line, decoded.name, lookup_line=False)
            known = decoded.derived["place", line] = (at, traceback.format_list([at])[0])
        return known


@dataclass(eq=False)
class GeneratorValue(IteratorValue):
    """A generator made by the program: a frame that runs one yield at a time."""

    frame: Frame | None
    function: FunctionValue
    args: list[Value]
    kwargs: dict[str, Value]
    started: bool = False
    running: bool = False
    returned: Value | None = None
    cls: type = types.GeneratorType  # or the class of the library that this is a version of

    def __post_init__(self) -> None:
        assert self.frame is not None
        self.made_at = self.frame.tx.steps.now

    def snapshot(self) -> Callable[[], None]:
        frame, started, returned = self.frame, self.started, self.returned
        if frame is None:
            state = None
        else:
            state = (frame.stack.copy(), frame.locals.copy(), frame.ip, frame.exception)

        def restore() -> None:
            self.frame, self.started, self.returned = frame, started, returned
            self.running = False
            if frame is not None and state is not None:
                frame.stack, frame.locals, frame.ip, frame.exception = state
                frame.result = None

        return restore

    def next(self, tx: Tracer) -> Value | None:
        return self.send(tx, NONE)

    def send(self, tx: Tracer, value: Value) -> Value | None:
        """Run to the next yield; None when the generator returned (its value in `returned`)."""
        frame = self.frame
        if frame is None:
            self.returned = None
            return None
        self._enter(tx)
        if self.started:
            frame.stack.append(value)
        self.started = True
        return self._run(tx, frame)

    def throw(self, tx: Tracer, error: Value) -> Value | None:
        """Raise `error` at the yield where the generator stands, and run to the next yield."""
        frame = self.frame
        if frame is None or not self.started:
            self.frame = None
            raise Raised(chain(tx, error))
        self._enter(tx)
        inner = frame.delegate()
        try:
            if inner is not None and issubclass(error.python_type(), GeneratorExit):
                inner.call_method(tx, "close", [], {})
            elif isinstance(inner, GeneratorValue):
                item = inner.throw(tx, error)
                if item is not None:
                    self.running = False
                    return item
                frame.end_delegation(inner)
                return self._run(tx, frame)
            elif inner is not None and hasattr(inner.python_type(), "throw"):
                raise Break("generator", "throwing into an iterator that is no generator")
        except Raised as raised:
            error = raised.value
        try:
            frame.unwind(Raised(chain(tx, error)), frame.instr)
        except Raised:
            self.frame = None
            raise
        return self._run(tx, frame)

    def _enter(self, tx: Tracer) -> None:
        if self.running:
            tx.raise_(ValueError, "generator already executing")
        tx.journal.touch(self)
        self.running = True

    def _run(self, tx: Tracer, frame: Frame) -> Value | None:
        try:
            item = frame.run()
        except Raised as raised:
            self.frame = None
            if issubclass(raised.value.python_type(), StopIteration):
                raise Raised(generator_error(tx, raised.value)) from None
            raise
        finally:
            self.running = False
        if frame.result is None:
            return item
        self.frame = None
        self.returned = item
        return None

    def reconstruct(self, out: Output) -> None:
        plain = self.cls is types.GeneratorType
        version = plain and self.function.globals.get("__name__") == "weft_capture.polyfills"
        if self.started or self.function.attributes or version:
            what = "has started" if self.started else "may have had another name"
            text = f"a generator that {what} is needed after a graph break"
            raise Break("generator", text, self.made_at)
        out.call(self.function if plain else self.cls, self.args, self.kwargs)
