"""Calls, and making functions."""

from __future__ import annotations

import sys

from weft_capture.breaks import Break
from weft_capture.bytecode import Instr
from weft_capture.model import attributes
from weft_capture.model.constant import NULL
from weft_capture.model.dicts import DictValue
from weft_capture.model.functions import CellValue, FunctionValue
from weft_capture.model.objects import ModuleValue
from weft_capture.model.protocol import Frame, Kwargs, Raised, Value
from weft_capture.model.region_marks import mark_call
from weft_capture.model.slots import steps
from weft_capture.opcodes.dispatch import opcode
from weft_capture.python_compat import TUPLE_ASKS_LENGTH


def _callee(frame: Frame, args: list[Value]) -> tuple[Value, list[Value]]:
    """Pop the two slots below the arguments; see CALL in the vocabulary (docs/architecture)."""
    second = frame.stack.pop()
    first = frame.stack.pop()
    if first is NULL:
        return second, args
    if second is NULL:
        return first, args
    return first, [second, *args]


def _call_in(frame: Frame, callee: Value, args: list[Value], kwargs: Kwargs) -> Value:
    """Call from a frame, whose stack must be what lies below the call already."""
    tx = frame.tx
    if isinstance(callee, ModuleValue):
        with mark_call(tx, callee.cls.__qualname__):
            return _call_in(frame, *attributes.module_call(tx, callee, args, kwargs))
    depth = 0
    while (forwarded := callee.forwards(tx, args, kwargs)) is not None:
        callee, args, kwargs = forwarded
        depth += 1
        if depth > sys.getrecursionlimit():  # an object whose class has it as its `__call__`
            raise Break("recursion", "calls nest too deeply")
    if type(callee) is FunctionValue:
        return tx.call_function(callee, args, kwargs, stepped=frame.stepped)
    return callee.tp_call(tx, args, kwargs)


@opcode("CALL")
def _call(frame: Frame, instr: Instr) -> None:
    names = instr.argval
    arguments = frame.pop_many(instr.arg)
    kwargs: Kwargs = {}
    if names:
        positional = len(arguments) - len(names)
        kwargs = dict(zip(names, arguments[positional:], strict=True))
        arguments = arguments[:positional]
    callee, args = _callee(frame, arguments)
    frame.stack.append(_call_in(frame, callee, args, kwargs))


@opcode("CALL_FUNCTION_EX")
def _call_function_ex(frame: Frame, instr: Instr) -> None:
    tx = frame.tx
    kwargs: Kwargs = {}
    if instr.arg & 1:
        kwargs = tx.keyword_arguments(frame.stack.pop())
    try:
        arguments = list(steps(tx, frame.stack.pop(), TUPLE_ASKS_LENGTH))
    except Raised as raised:  # the interpreter names the function, too
        if issubclass(raised.value.python_type(), TypeError):
            raise Break("builtin-error", "arguments after * that may not be iterable") from None
        raise
    callee, args = _callee(frame, arguments)
    frame.stack.append(_call_in(frame, callee, args, kwargs))


@opcode("MAKE_FUNCTION")
def _make_function(frame: Frame, instr: Instr) -> None:
    tx, stack = frame.tx, frame.stack
    code = stack.pop().as_constant()
    cells: tuple[CellValue, ...] = ()
    if instr.arg & 8:
        cells = tuple(cell for cell in stack.pop().unpack(tx) if isinstance(cell, CellValue))
    annotate = stack.pop() if instr.arg & 16 else None
    annotations = stack.pop().unpack(tx) if instr.arg & 4 else None
    kwdefaults: Kwargs = {}
    if instr.arg & 2:
        value = stack.pop()
        assert isinstance(value, DictValue)
        kwdefaults = {key.as_constant(): item for key, item in value.pairs(tx)}
    defaults = stack.pop().unpack(tx) if instr.arg & 1 else []
    function = FunctionValue(
        code,
        frame.function.globals,
        name=code.co_qualname,
        defaults=defaults,
        kwdefaults=kwdefaults,
        cells=cells,
    )
    if annotations is not None:
        pairs = zip(annotations[::2], annotations[1::2], strict=True)
        function.attributes["__annotations__"] = DictValue(list(pairs))
    if annotate is not None:
        function.attributes["__annotate__"] = annotate
    stack.append(function)
