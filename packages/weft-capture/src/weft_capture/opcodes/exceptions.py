"""raise, except, finally and with, as the exception table of 3.11 and later has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft_capture.breaks import Break, Raised
from weft_capture.opcodes.table import opcode
from weft_capture.values.base import Value
from weft_capture.values.constant import NONE, constant
from weft_capture.values.exceptions import ExceptionValue
from weft_capture.values.functions import ClassValue

if TYPE_CHECKING:
    from weft_capture.bytecode import Instr
    from weft_capture.frames import Frame

_STOPITERATION_ERROR = 3


@opcode("RAISE_VARARGS")
def _raise_varargs(frame: Frame, instr: Instr) -> None:
    tx = frame.tx
    cause = frame.stack.pop() if instr.arg == 2 else None
    if instr.arg == 0:
        if frame.exception is None:
            tx.raise_(RuntimeError, "No active exception to reraise")
        raise Raised(frame.exception)
    value = frame.stack.pop()
    if isinstance(value, ClassValue):
        value = value.call(tx, [], {})
    if not issubclass(value.python_type(), BaseException):
        tx.raise_(TypeError, "exceptions must derive from BaseException")
    if cause is not None and isinstance(value, ExceptionValue):
        tx.journal.touch(value)
        value.attributes["__cause__"] = cause
        value.attributes["__suppress_context__"] = constant(True)
    raise Raised(value)


@opcode("PUSH_EXC_INFO")
def _push_exc_info(frame: Frame, instr: Instr) -> None:
    raised = frame.stack.pop()
    frame.stack.extend((NONE if frame.exception is None else frame.exception, raised))
    frame.exception = raised


@opcode("POP_EXCEPT")
def _pop_except(frame: Frame, instr: Instr) -> None:
    previous = frame.stack.pop()
    frame.exception = None if previous is NONE else previous


@opcode("RERAISE")
def _reraise(frame: Frame, instr: Instr) -> None:
    raise Raised(frame.stack.pop())


@opcode("CALL_INTRINSIC_1")
def _intrinsic(frame: Frame, instr: Instr) -> None:
    """INTRINSIC_STOPITERATION_ERROR, with which 3.12 and later end a generator's body (PEP 479)."""
    if instr.arg != _STOPITERATION_ERROR:
        raise Break("unsupported-opcode", f"CALL_INTRINSIC_1 {instr.arg}")
    if issubclass(frame.stack[-1].python_type(), StopIteration):
        frame.tx.raise_(RuntimeError, "generator raised StopIteration")


@opcode("CHECK_EXC_MATCH")
def _check_exc_match(frame: Frame, instr: Instr) -> None:
    wanted = frame.stack.pop()
    classes = (
        tuple(item.as_constant() for item in wanted.unpack(frame.tx))
        if issubclass(wanted.python_type(), tuple)
        else wanted.as_constant()
    )
    frame.stack.append(constant(issubclass(frame.stack[-1].python_type(), classes)))


@opcode("CHECK_EG_MATCH", "PREP_RERAISE_STAR")
def _exception_groups(frame: Frame, instr: Instr) -> None:
    raise Break("unsupported-opcode", "except*")


@opcode("BEFORE_WITH")
def _before_with(frame: Frame, instr: Instr) -> None:
    tx = frame.tx
    manager = frame.stack.pop()
    leave = manager.getattr(tx, "__exit__")
    entered = manager.call_method(tx, "__enter__", [], {})
    frame.stack.extend((leave, entered))


@opcode("WITH_EXCEPT_START")
def _with_except_start(frame: Frame, instr: Instr) -> None:
    tx, raised = frame.tx, frame.stack[-1]
    leave = frame.stack[-4]
    kind: Value = tx.const_object(raised.python_type())
    frame.stack.append(leave.call(tx, [kind, raised, NONE], {}))
