"""Control flow: jumps, loops, returns and yields; raise, except, finally and with."""

from __future__ import annotations

import types

from weft_capture.breaks import Break
from weft_capture.bytecode import Instr
from weft_capture.effects.runtime_asserts import is_checked
from weft_capture.functions.classes import ClassValue
from weft_capture.model.constant import NONE, NULL, Constant, constant
from weft_capture.model.exceptions import (
    TRACEBACK,
    ExceptionValue,
    chain,
    check_outside_handlers,
    generator_error,
    handled,
)
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Frame, Raised, Tracer, Value
from weft_capture.opcodes.dispatch import opcode
from weft_capture.python_compat import (
    WITH_CALLS_SPECIAL_METHODS,
    enters,
    error_text,
)


def _target(instr: Instr) -> int:
    assert instr.target is not None
    return instr.target


@opcode("JUMP")
def _jump(frame: Frame, instr: Instr) -> None:
    frame.ip = _target(instr)


@opcode("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE")
def _pop_jump_if(frame: Frame, instr: Instr) -> None:
    value = frame.stack.pop()
    expected = instr.opname == "POP_JUMP_IF_TRUE"
    jumps = is_checked(frame, instr, value)
    if value.nb_bool(frame.tx) is expected if jumps is None else jumps:
        frame.ip = _target(instr)


@opcode("POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE")
def _pop_jump_if_none(frame: Frame, instr: Instr) -> None:
    value = frame.stack.pop()
    is_none = isinstance(value, Constant) and value.value is None
    if is_none is (instr.opname == "POP_JUMP_IF_NONE"):
        frame.ip = _target(instr)


@opcode("FOR_ITER")
def _for_iter(frame: Frame, instr: Instr) -> None:
    item = frame.stack[-1].tp_iternext(frame.tx)
    if item is None:
        frame.stack.pop()
        frame.ip = _target(instr)
    else:
        frame.stack.append(item)


@opcode("RETURN_VALUE")
def _return_value(frame: Frame, instr: Instr) -> None:
    frame.result = frame.stack.pop()


@opcode("RETURN_GENERATOR")
def _return_generator(frame: Frame, instr: Instr) -> None:
    # The generator object stands for the frame from here on; the POP_TOP behind this instruction
    # pops what the first resumption sends.
    if frame.stepped:
        error = Break("suspends", frame.function.describe())
        error.eager_frame = frame
        raise error
    frame.stack.append(NONE)


@opcode("YIELD_VALUE")
def _yield_value(frame: Frame, instr: Instr) -> None:
    frame.yielded = frame.stack.pop()


@opcode("GET_YIELD_FROM_ITER")
def _get_yield_from_iter(frame: Frame, instr: Instr) -> None:
    inner = frame.stack[-1]
    if issubclass(inner.python_type(), types.CoroutineType):
        raise Break("async", "a coroutine in a generator's yield from")
    frame.stack[-1] = inner.tp_iter(frame.tx)


@opcode("SEND")
def _send(frame: Frame, instr: Instr) -> None:
    """`yield from`: step the inner iterator; at its end go on with its result."""
    tx = frame.tx
    sent = frame.stack.pop()
    inner = frame.stack[-1]
    result = None
    try:
        if sent is NONE and not isinstance(inner, UserObject):
            item = inner.tp_iternext(tx)
        else:
            name, args = ("__next__", []) if sent is NONE else ("send", [sent])
            item = inner.call_method(tx, name, args, {})
    except Raised as raised:
        if not issubclass(raised.value.python_type(), StopIteration):
            raise
        item, result = None, raised.value.tp_getattro(tx, "value")
    if item is not None:
        frame.stack.append(item)
        return
    frame.stack[-1:] = frame.send_result(inner, result)
    frame.ip = _target(instr)


@opcode("CLEANUP_THROW")
def _cleanup_throw(frame: Frame, instr: Instr) -> None:
    """From 3.12: what was thrown into `yield from` came out of the inner iterator."""
    raised = frame.stack[-1]
    if not issubclass(raised.python_type(), StopIteration):
        raise Raised(raised)
    frame.stack[-3:] = [NONE, raised.tp_getattro(frame.tx, "value")]


# ---- raise, except, finally and with, as the exception table of 3.11 and later has them


@opcode("RAISE_VARARGS")
def _raise_varargs(frame: Frame, instr: Instr) -> None:
    tx = frame.tx
    cause = frame.stack.pop() if instr.arg == 2 else None
    if instr.arg == 0:
        active = handled(tx)
        if active is None:
            check_outside_handlers(tx)
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
    frame.stack[-1] = generator_error(frame.tx, frame.stack[-1])


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


@opcode("BEFORE_WITH")
def _before_with(frame: Frame, instr: Instr) -> None:
    tx = frame.tx
    manager = frame.stack.pop()
    cls = manager.python_type()
    names = enter, leave = "__enter__", "__exit__"
    present = [n for n in names if hasattr(cls, n) or manager.find_method(n) is not None]
    if len(present) < 2:
        tx.raise_(TypeError, error_text(enters, cls, present))
    if isinstance(manager, UserObject):  # past its attributes (CPython: _PyObject_LookupSpecial)
        exit_method = manager.special(tx, leave)
    else:
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
