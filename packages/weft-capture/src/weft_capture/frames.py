"""A symbolic frame: locals, cells, operand stack and instruction pointer, and its loop.

`Frame.run` executes an inlined call to its end. `OuterFrame` executes the captured frame itself,
one speculative step an instruction: a break takes back that one instruction and nothing else.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from weft_capture.breaks import Break, Raised
from weft_capture.bytecode import Decoded, Instr, decode
from weft_capture.opcodes import HANDLERS
from weft_capture.opcodes.table import unsupported
from weft_capture.values.base import MutableValue, Value
from weft_capture.values.constant import NONE, constant

if TYPE_CHECKING:
    from weft_capture.output.reconstruct import Output
    from weft_capture.tracer import Tracer
    from weft_capture.values.functions import CellValue, FunctionValue

Program = list[tuple[Callable[["Frame", Instr], None], Instr]]


def program_of(decoded: Decoded) -> Program:
    """Return the instructions with their handlers, kept with the decoded code."""
    program: Program | None = decoded.derived.get("handlers")
    if program is None:
        program = [(HANDLERS.get(i.opname, unsupported), i) for i in decoded.instrs]
        decoded.derived["handlers"] = program
    return program


class Frame:
    """One executing function."""

    __slots__ = (
        "cells",
        "decoded",
        "exception",
        "function",
        "ip",
        "locals",
        "parent",
        "program",
        "result",
        "stack",
        "tx",
        "yielded",
    )

    def __init__(
        self,
        tx: Tracer,
        function: FunctionValue,
        local_values: dict[str, Value],
        cells: dict[str, CellValue],
    ) -> None:
        self.tx = tx
        self.function = function
        self.decoded = decode(function.code)
        self.program = program_of(self.decoded)
        self.locals = local_values
        self.cells = cells
        self.stack: list[Value] = []
        self.ip = 0
        self.parent: Frame | None = None
        self.exception: Value | None = None
        self.result: Value | None = None
        self.yielded: Value | None = None

    def pop_many(self, count: int) -> list[Value]:
        """Pop `count` values, returned in the order they were pushed."""
        if count == 0:
            return []
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def finish(self, value: Value) -> None:
        """End the frame with a result."""
        self.result = value

    def suspend(self, value: Value) -> None:
        """Stop at a yield."""
        self.yielded = value

    def send_result(self, inner: Value) -> list[Value]:
        """Return what SEND leaves on the stack when the inner iterator has ended.

        Up to 3.11 that is the result; from 3.12 the iterator stays for END_SEND.
        """
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
        try:
            while True:
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
        finally:
            tx.leave_frame(self)

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

    def summary(self) -> traceback.FrameSummary:
        """Return where the frame stands, for messages."""
        decoded = self.decoded
        line = self.instr.lineno or decoded.firstlineno
        known: traceback.FrameSummary | None = decoded.derived.get(("summary", line))
        if known is None:
            known = traceback.FrameSummary(decoded.filename, line, decoded.name, lookup_line=False)
            decoded.derived["summary", line] = known
        return known


class RaisesAtStep(Exception):
    """The exception raised at instruction number `step` has to be raised by the real instruction.

    Either it leaves the frame, and the user's traceback must be right, or a break lies in its
    handler, where the interpreter must know it as the exception being handled: capture again.
    """

    def __init__(self, step: int, reason: Break) -> None:
        super().__init__(step)
        self.step = step
        self.reason = reason


class OuterFrame(Frame):
    """The frame that is captured."""

    __slots__ = ()

    def step_until_break(
        self, limit: int, break_at: int = -1, reason: Break | None = None
    ) -> Break | None:
        """Execute until the function returns (None) or breaks.

        At a break, `ip` is the breaking instruction and the state is as before it.

        Args:
            limit: how many instructions to execute at most.
            break_at: the number of the instruction to break at in any case.
            reason: why to break there.

        Raises:
            RaisesAtStep: when an exception that a handler saw leaves the frame in the end, or a
                break lies in the handler of an exception.
        """
        raised_at: dict[Value, int] = {}
        tx = self.tx
        journal = tx.journal
        program = self.program
        tx.enter_frame(self)
        for step in range(limit):
            at = self.ip
            handler, instr = program[at]
            journal.begin()
            saved = self.stack.copy()
            self.ip = at + 1
            try:
                try:
                    if step == break_at:
                        raise reason or Break("uncaught-exception")
                    handler(self, instr)
                except Raised as raised:
                    raised_at.setdefault(raised.value, step)
                    self.unwind(raised, instr)
            except Break as error:
                active = saved if self.exception is None else [*saved, self.exception]
                handled = [raised_at[value] for value in active if value in raised_at]
                if handled:
                    error.user_stack = error.user_stack or tx.user_stack()
                    raise RaisesAtStep(min(handled), error) from None
                return self._take_back(error, at, saved)
            except RecursionError:
                return self._take_back(Break("recursion", "calls nest too deeply"), at, saved)
            except Raised as raised:
                uncaught = Break("uncaught-exception", raised.value.describe())
                if raised_at[raised.value] != step:
                    raise RaisesAtStep(raised_at[raised.value], uncaught) from None
                return self._take_back(uncaught, at, saved)
            if self.result is not None:
                return None
        too_long = Break("too-long", f"{limit} instructions")
        return self._take_back(too_long, self.ip, self.stack.copy())

    def _take_back(self, error: Break, at: int, saved: list[Value]) -> Break:
        if not error.user_stack:
            error.user_stack = self.tx.user_stack()
        self.tx.journal.rollback()
        self.tx.frame = self
        self.stack = saved
        self.ip = at
        return error


class GeneratorValue(MutableValue):
    """A generator made by the program: a frame that runs one yield at a time."""

    __slots__ = ("args", "frame", "function", "kwargs", "returned", "started")

    def __init__(
        self, frame: Frame, function: FunctionValue, args: list[Value], kwargs: dict[str, Value]
    ) -> None:
        super().__init__(None)
        self.frame: Frame | None = frame
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.started = False
        self.returned: Value | None = None

    def python_type(self) -> type:
        return type(_ for _ in ())

    def snapshot(self) -> Callable[[], None]:
        frame, started, returned = self.frame, self.started, self.returned
        if frame is None:
            state = None
        else:
            state = (frame.stack.copy(), frame.locals.copy(), frame.ip, frame.exception)

        def restore() -> None:
            self.frame, self.started, self.returned = frame, started, returned
            if frame is not None and state is not None:
                frame.stack, frame.locals, frame.ip, frame.exception = state
                frame.result = None

        return restore

    def truth(self, tx: Tracer) -> bool:
        return True

    def hash_key(self) -> object:
        return self

    def iterate(self, tx: Tracer) -> Value:
        return self

    def next(self, tx: Tracer) -> Value | None:
        return self.send(tx, NONE)

    def send(self, tx: Tracer, value: Value) -> Value | None:
        """Run to the next yield; None when the generator returned (its value in `returned`)."""
        frame = self.frame
        if frame is None:
            return None
        tx.journal.touch(self)
        if self.started:
            frame.stack.append(value)
        self.started = True
        try:
            item = frame.run()
        except Raised as raised:
            self.frame = None
            if issubclass(raised.value.python_type(), StopIteration):
                tx.raise_(RuntimeError, "generator raised StopIteration")
            raise
        if frame.result is None:
            return item
        self.frame = None
        self.returned = item
        return None

    def throw(self, tx: Tracer, error: Value) -> Value | None:
        """Raise `error` at the yield where the generator stands, and run to the next yield."""
        frame = self.frame
        if frame is None or not self.started:
            self.frame = None
            raise Raised(error)
        tx.journal.touch(self)
        try:
            frame.unwind(Raised(error), frame.instr)
            item = frame.run()
        except Raised:
            self.frame = None
            raise
        if frame.result is None:
            return item
        self.frame = None
        self.returned = item
        return None

    def reconstruct(self, out: Output) -> None:
        if self.started:
            raise Break("generator", "a generator that has started is needed after a graph break")
        out.writer.begin_call()
        out.load(self.function)
        out.load_all(self.args)
        out.load_all(self.kwargs.values())
        out.writer.call(len(self.args) + len(self.kwargs), tuple(self.kwargs))
