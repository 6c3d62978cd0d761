"""raise, except, finally and with, as the exception table of 3.11 and later has them."""

from __future__ import annotations

from weft_capture.bytecode import Instr
from weft_capture.functions.classes import ClassValue
from weft_capture.model.constant import NONE, NULL, constant
from weft_capture.model.exceptions import (
    TRACEBACK,
    ExceptionValue,
    chain,
    generator_error,
    handled,
    match_group,
    rest_to_raise,
)
from weft_capture.model.protocol import Frame, Raised, Tracer, Value
from weft_capture.opcodes.dispatch import opcode
from weft_capture.python_compat import (
    WITH_CALLS_SPECIAL_METHODS,
    async_enters,
    enters,
    error_text,
)


@opcode("RAISE_VARARGS")
def _raise_varargs(frame: Frame, instr: Instr) -> None:
    tx = frame.tx
    cause = frame.stack.pop() if instr.arg == 2 else None
    if instr.arg == 0:
        active = handled(tx)
        if active is None:
            tx.raise_(RuntimeError, "No active exception to reraise")
        raise Raised(active)
    value = _instance(tx, frame.stack.pop(), "exceptions")
    if cause is not None:
        cause = cause if cause is NONE else _instance(tx, cause, "exception causes")
        value.tp_setattro(tx, "__cause__", cause)
    raise Raised(chain(tx, value))


def _instance(tx: Tracer, value: Value, role: str) -> Value:
    """Make an instance where an exception class was given; what is neither raises TypeError."""
    if isinstance(value, ClassValue) and issubclass(value.obj, BaseException):
        value = value.tp_call(tx, [], {})
    if not issubclass(value.python_type(), BaseException):
        tx.raise_(TypeError, f"{role} must derive from BaseException")
    return value


@opcode("PUSH_EXC_INFO")
def _push_exc_info(frame: Frame, instr: Instr) -> None:
    raised = frame.stack.pop()
    if isinstance(raised, ExceptionValue) and not raised.raised:  # raised by eager code
        frame.tx.journal.touch(raised)
        raised.raised = True
    frame.stack.extend((NONE if frame.exception is None else frame.exception, raised))
    frame.exception = raised


@opcode("POP_EXCEPT")
def _pop_except(frame: Frame, instr: Instr) -> None:
    previous = frame.stack.pop()
    frame.exception = None if previous is NONE else previous


@opcode("RERAISE")
def _reraise(frame: Frame, instr: Instr) -> None:
    raise Raised(frame.stack.pop())


@opcode("STOPITERATION_ERROR")
def _stopiteration_error(frame: Frame, instr: Instr) -> None:
    """With it 3.12 and later end a generator's body (PEP 479)."""
    frame.stack[-1] = generator_error(frame.tx, frame.stack[-1], frame.decoded.flags)


def _classes(frame: Frame, matched: Value) -> tuple[type, ...]:
    """Return the classes of an except clause; what is no exception class raises TypeError."""
    bad = "catching classes that do not inherit from BaseException is not allowed"
    items = matched.unpack(frame.tx) if issubclass(matched.python_type(), tuple) else [matched]
    classes = tuple(item.as_constant() for item in items)
    if not all(isinstance(c, type) and issubclass(c, BaseException) for c in classes):
        frame.tx.raise_(TypeError, bad)
    return classes


@opcode("CHECK_EXC_MATCH")
def _check_exc_match(frame: Frame, instr: Instr) -> None:
    classes = _classes(frame, frame.stack.pop())
    frame.stack.append(constant(issubclass(frame.stack[-1].python_type(), classes)))


@opcode("CHECK_EG_MATCH")
def _check_eg_match(frame: Frame, instr: Instr) -> None:
    """except*: replace the exception by (what does not match, what does)."""
    classes = _classes(frame, frame.stack.pop())
    match, rest = match_group(frame.tx, frame.stack.pop(), classes)
    frame.stack.extend((rest, match))
    if match is not NONE:
        frame.exception = match


@opcode("PREP_RERAISE_STAR")
def _prep_reraise_star(frame: Frame, instr: Instr) -> None:
    """The end of all except* clauses: what they raised and what none took, as one exception."""
    raised = frame.stack.pop().unpack(frame.tx)
    frame.stack.append(rest_to_raise(frame.tx, frame.stack.pop(), raised))


@opcode("BEFORE_WITH", "BEFORE_ASYNC_WITH")
def _before_with(frame: Frame, instr: Instr) -> None:
    tx = frame.tx
    manager = frame.stack.pop()
    cls = manager.python_type()
    a, use = ("a", async_enters) if instr.opname == "BEFORE_ASYNC_WITH" else ("", enters)
    names = enter, leave = f"__{a}enter__", f"__{a}exit__"
    present = [n for n in names if hasattr(cls, n) or manager.find_method(n) is not None]
    if len(present) < 2:
        tx.raise_(TypeError, error_text(use, cls, present))
    exit_method = manager.tp_getattro(tx, leave)
    entered = manager.call_method(tx, enter, [], {})
    slots = (exit_method, NULL) if WITH_CALLS_SPECIAL_METHODS else (exit_method,)
    frame.stack.extend((*slots, entered))


@opcode("WITH_EXCEPT_START")
def _with_except_start(frame: Frame, instr: Instr) -> None:
    tx, raised = frame.tx, frame.stack[-1]
    exc_type: Value = tx.const_object(raised.python_type())
    args: list[Value] = [exc_type, raised, TRACEBACK]
    leave = frame.stack[-4]
    if WITH_CALLS_SPECIAL_METHODS:  # the two slots of a call
        args = args if leave is NULL else [leave, *args]
        leave = frame.stack[-5]
    frame.stack.append(leave.tp_call(tx, args, {}))
