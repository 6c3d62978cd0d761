"""Operators, calls, subscripts, attributes and constants; matching; making functions."""

from __future__ import annotations

import builtins
import sys

from weft_capture.breaks import Break
from weft_capture.bytecode import Instr
from weft_capture.functions.language.type_checks import identical
from weft_capture.model import attributes
from weft_capture.model.constant import NULL, constant, is_constant_object
from weft_capture.model.containers import TupleValue
from weft_capture.model.dicts import DictValue
from weft_capture.model.functions import CellValue, FunctionValue
from weft_capture.model.objects import ModuleValue
from weft_capture.model.protocol import Frame, Kwargs, Raised, Tracer, Value
from weft_capture.model.region_marks import mark_call
from weft_capture.model.slots import binary, compare, contains, steps, unary, unsure_errors
from weft_capture.opcodes.dispatch import on_values, opcode
from weft_capture.python_compat import TUPLE_ASKS_LENGTH


def _load_const(tx: Tracer, value: object) -> Value:
    return constant(value) if is_constant_object(value) else tx.literal(value)


on_values(
    {
        "BINARY_OP": (2, binary),
        "COMPARE_OP": (2, compare),
        "UNARY_NEGATIVE": (1, lambda tx, _, x: unary(tx, "-", x)),
        "UNARY_POSITIVE": (1, lambda tx, _, x: unary(tx, "+", x)),
        "UNARY_INVERT": (1, lambda tx, _, x: unary(tx, "~", x)),
        "UNARY_NOT": (1, lambda tx, _, x: constant(not x.nb_bool(tx))),
        "IS_OP": (2, lambda tx, inverted, a, b: constant(identical(tx, a, b) is not inverted)),
        "BINARY_SUBSCR": (2, lambda tx, _, owner, key: owner.mp_subscript(tx, key)),
        "STORE_SUBSCR": (3, lambda tx, _, item, owner, key: owner.mp_ass_subscript(tx, key, item)),
        "DELETE_SUBSCR": (2, lambda tx, _, owner, key: owner.mp_del_subscript(tx, key)),
        "LOAD_ATTR": (1, lambda tx, name, owner: owner.tp_getattro(tx, name)),
        "STORE_ATTR": (2, lambda tx, name, value, owner: owner.tp_setattro(tx, name, value)),
        "DELETE_ATTR": (1, lambda tx, name, owner: owner.tp_delattro(tx, name)),
        "GET_ITER": (1, lambda tx, _, x: x.tp_iter(tx)),
        "LIST_TO_TUPLE": (1, lambda tx, _, x: TupleValue(x.unpack(tx))),
        "LOAD_CONST": (0, _load_const),
        "LOAD_COMMON_CONSTANT": (0, lambda tx, value: tx.const_object(value)),
        "LOAD_BUILD_CLASS": (0, lambda tx, _: tx.const_object(builtins.__build_class__)),
        "LOAD_ASSERTION_ERROR": (0, lambda tx, _: tx.const_object(AssertionError)),
        "PUSH_NULL": (0, lambda tx, _: NULL),
    }
)


@opcode("CONTAINS_OP")
def _contains_op(frame: Frame, instr: Instr) -> None:
    item, container = frame.pop_many(2)
    result = contains(frame.tx, container, item)
    frame.stack.append(constant(not result.nb_bool(frame.tx)) if instr.argval else result)


_MATCHES = {"MATCH_MAPPING": 1 << 6, "MATCH_SEQUENCE": 1 << 5}
"""Py_TPFLAGS_MAPPING and Py_TPFLAGS_SEQUENCE."""


@opcode(*_MATCHES)
def _match_kind(frame: Frame, instr: Instr) -> None:
    flags = frame.stack[-1].python_type().__flags__
    frame.stack.append(constant(bool(flags & _MATCHES[instr.opname])))


_MISSING = object()


@opcode("MATCH_KEYS")
def _match_keys(frame: Frame, instr: Instr) -> None:
    """CPython: match_keys in Python/ceval.c, which asks `get` for each key."""
    tx, keys, subject = frame.tx, frame.stack[-1], frame.stack[-2]
    get, missing = subject.tp_getattro(tx, "get"), constant(_MISSING)
    values = []
    seen: set[object] = set()
    for key in keys.unpack(tx):
        if key.tp_hash() in seen:
            text = f"mapping pattern checks duplicate key ({key.as_constant()!r})"
            tx.raise_(ValueError, text)
        seen.add(key.tp_hash())
        values.append(get.tp_call(tx, [key, missing], {}))
        if values[-1] is missing:
            frame.stack.append(constant(None))
            return
    frame.stack.append(tx.tuple_of(values))


def _match_args(tx: Tracer, cls: type) -> list[str]:
    """Return `__match_args__` of a class."""
    fields = getattr(cls, "__match_args__", ())
    if not isinstance(fields, tuple):
        got = type(fields).__name__
        tx.raise_(TypeError, f"{cls.__name__}.__match_args__ must be a tuple (got {got})")
    for field in fields:
        if not isinstance(field, str):
            got = type(field).__name__
            tx.raise_(TypeError, f"__match_args__ elements must be strings (got {got})")
    return list(fields)


@opcode("MATCH_CLASS")
def _match_class(frame: Frame, instr: Instr) -> None:
    tx = frame.tx
    names = frame.stack.pop().as_constant()
    cls = frame.stack.pop()
    subject = frame.stack.pop()
    if not tx.builtin(isinstance, subject, cls).nb_bool(tx):
        frame.stack.append(constant(None))
        return
    real = cls.as_constant()
    fields = _match_args(tx, real) if instr.arg else []
    allowed = len(fields)
    matches_self = bool(real.__flags__ & _MATCH_SELF) and "__match_args__" not in dir(real)
    if matches_self:
        allowed = 1
    if instr.arg > allowed:
        plural = "" if allowed == 1 else "s"
        text = f"accepts {allowed} positional sub-pattern{plural} ({instr.arg} given)"
        tx.raise_(TypeError, f"{real.__name__}() {text}")
    values = [subject] if matches_self and instr.arg else []
    attributes = [*([] if matches_self else fields[: instr.arg]), *names]
    for number, name in enumerate(attributes):
        if name in attributes[:number]:
            text = f"got multiple sub-patterns for attribute {name!r}"
            tx.raise_(TypeError, f"{real.__name__}() {text}")
    try:
        values += [subject.tp_getattro(tx, name) for name in attributes]
    except Raised as raised:
        if not issubclass(raised.value.python_type(), AttributeError):
            raise
        frame.stack.append(constant(None))
        return
    frame.stack.append(tx.tuple_of(values))


_MATCH_SELF = 1 << 22
"""_Py_TPFLAGS_MATCH_SELF: int(n) matches the object itself."""


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
    with unsure_errors("arguments after * that may not be iterable"):  # it names the function, too
        arguments = list(steps(tx, frame.stack.pop(), TUPLE_ASKS_LENGTH))
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
