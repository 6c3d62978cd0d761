"""Jumps, loops, returns and yields."""

from __future__ import annotations

from weft_capture.breaks import Break, Raised
from weft_capture.bytecode import Instr
from weft_capture.opcodes.table import opcode
from weft_capture.rules.checks import is_checked
from weft_capture.values.base import Frame
from weft_capture.values.constant import NONE, Constant
from weft_capture.values.objects import UserObject


def _target(instr: Instr) -> int:
    assert instr.target is not None
    return instr.target


@opcode("JUMP")
def _jump(frame: Frame, instr: Instr) -> None:
    frame.ip = _target(instr)


@opcode("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE")
def _pop_jump_if(frame: Frame, instr: Instr) -> None:
    value = frame.stack.pop()
    wanted = instr.opname == "POP_JUMP_IF_TRUE"
    jumps = is_checked(frame, instr, value)
    if value.truth(frame.tx) is wanted if jumps is None else jumps:
        frame.ip = _target(instr)


@opcode("POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE")
def _pop_jump_if_none(frame: Frame, instr: Instr) -> None:
    value = frame.stack.pop()
    is_none = isinstance(value, Constant) and value.value is None
    if is_none is (instr.opname == "POP_JUMP_IF_NONE"):
        frame.ip = _target(instr)


@opcode("FOR_ITER")
def _for_iter(frame: Frame, instr: Instr) -> None:
    item = frame.stack[-1].next(frame.tx)
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
    frame.stack.append(NONE)


@opcode("YIELD_VALUE")
def _yield_value(frame: Frame, instr: Instr) -> None:
    frame.yielded = frame.stack.pop()


@opcode("SEND")
def _send(frame: Frame, instr: Instr) -> None:
    """`yield from` and `await`: step the inner iterator; at its end go on with its result."""
    tx = frame.tx
    sent = frame.stack.pop()
    inner = frame.stack[-1]
    result = None
    try:
        if sent is NONE and not isinstance(inner, UserObject):
            item = inner.next(tx)
        else:
            name, args = ("__next__", []) if sent is NONE else ("send", [sent])
            item = inner.call_method(tx, name, args, {})
    except Raised as raised:
        if not issubclass(raised.value.python_type(), StopIteration):
            raise
        item, result = None, raised.value.getattr(tx, "value")
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
    frame.stack[-3:] = [NONE, raised.getattr(frame.tx, "value")]


@opcode("END_SEND")
def _end_send(frame: Frame, instr: Instr) -> None:
    frame.stack.pop(-2)


@opcode("GET_AWAITABLE", "GET_AITER", "GET_ANEXT", "BEFORE_ASYNC_WITH", "ASYNC_GEN_WRAP")
def _asynchronous(frame: Frame, instr: Instr) -> None:
    raise Break("unsupported-opcode", "async code")
