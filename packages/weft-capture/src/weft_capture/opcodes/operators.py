"""Unary, binary and comparison operators, subscripts, identity and membership."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft_capture.breaks import Raised
from weft_capture.opcodes.table import opcode
from weft_capture.rules.operators import binary, compare, contains, identical, unary
from weft_capture.values.constant import FALSE, TRUE, constant

if TYPE_CHECKING:
    from weft_capture.bytecode import Instr
    from weft_capture.frames import Frame
    from weft_capture.tracer import Tracer

_UNARY = {"UNARY_NEGATIVE": "-", "UNARY_POSITIVE": "+", "UNARY_INVERT": "~"}


@opcode("BINARY_OP")
def _binary_op(frame: Frame, instr: Instr) -> None:
    right = frame.stack.pop()
    left = frame.stack.pop()
    frame.stack.append(binary(frame.tx, instr.argval, left, right))


@opcode("COMPARE_OP")
def _compare_op(frame: Frame, instr: Instr) -> None:
    right = frame.stack.pop()
    left = frame.stack.pop()
    frame.stack.append(compare(frame.tx, instr.argval, left, right))


@opcode(*_UNARY)
def _unary(frame: Frame, instr: Instr) -> None:
    frame.stack.append(unary(frame.tx, _UNARY[instr.opname], frame.stack.pop()))


@opcode("UNARY_NOT")
def _unary_not(frame: Frame, instr: Instr) -> None:
    frame.stack.append(constant(not frame.stack.pop().truth(frame.tx)))


@opcode("IS_OP")
def _is_op(frame: Frame, instr: Instr) -> None:
    right = frame.stack.pop()
    left = frame.stack.pop()
    frame.stack.append(TRUE if identical(left, right) is not instr.argval else FALSE)


@opcode("CONTAINS_OP")
def _contains_op(frame: Frame, instr: Instr) -> None:
    container = frame.stack.pop()
    item = frame.stack.pop()
    found = contains(frame.tx, container, item)
    frame.stack.append(constant(not found.truth(frame.tx)) if instr.argval else found)


@opcode("BINARY_SUBSCR")
def _binary_subscr(frame: Frame, instr: Instr) -> None:
    key = frame.stack.pop()
    frame.stack[-1] = frame.stack[-1].getitem(frame.tx, key)


@opcode("STORE_SUBSCR")
def _store_subscr(frame: Frame, instr: Instr) -> None:
    key = frame.stack.pop()
    container = frame.stack.pop()
    container.setitem(frame.tx, key, frame.stack.pop())


@opcode("DELETE_SUBSCR")
def _delete_subscr(frame: Frame, instr: Instr) -> None:
    key = frame.stack.pop()
    frame.stack.pop().delitem(frame.tx, key)


_MATCHES = {"MATCH_MAPPING": 1 << 6, "MATCH_SEQUENCE": 1 << 5}
"""Py_TPFLAGS_MAPPING and Py_TPFLAGS_SEQUENCE."""


@opcode(*_MATCHES)
def _match_kind(frame: Frame, instr: Instr) -> None:
    flags = frame.stack[-1].python_type().__flags__
    frame.stack.append(constant(bool(flags & _MATCHES[instr.opname])))


@opcode("MATCH_KEYS")
def _match_keys(frame: Frame, instr: Instr) -> None:
    tx, keys, subject = frame.tx, frame.stack[-1], frame.stack[-2]
    found = []
    seen: set[object] = set()
    for key in keys.unpack(tx):
        if key.hash_key() in seen:
            text = f"mapping pattern checks duplicate key ({key.as_constant()!r})"
            tx.raise_(ValueError, text)
        seen.add(key.hash_key())
        if not contains(tx, subject, key).truth(tx):
            frame.stack.append(constant(None))
            return
        found.append(subject.getitem(tx, key))
    frame.stack.append(tx.tuple_of(found))


def _match_args(tx: Tracer, cls: type) -> list[str]:
    """Return `__match_args__` of a class."""
    fields = getattr(cls, "__match_args__", ())
    if not isinstance(fields, tuple):
        kind = type(fields).__name__
        tx.raise_(TypeError, f"{cls.__name__}.__match_args__ must be a tuple (got {kind})")
    for field in fields:
        if not isinstance(field, str):
            kind = type(field).__name__
            tx.raise_(TypeError, f"__match_args__ elements must be strings (got {kind})")
    return list(fields)


@opcode("MATCH_CLASS")
def _match_class(frame: Frame, instr: Instr) -> None:
    tx = frame.tx
    names = frame.stack.pop().as_constant()
    cls = frame.stack.pop()
    subject = frame.stack.pop()
    if not tx.builtin(isinstance, subject, cls).truth(tx):
        frame.stack.append(constant(None))
        return
    real = cls.as_constant()
    fields = _match_args(tx, real) if instr.arg else []
    allowed = len(fields)
    whole = bool(real.__flags__ & _MATCH_SELF) and "__match_args__" not in dir(real)
    if whole:
        allowed = 1
    if instr.arg > allowed:
        plural = "" if allowed == 1 else "s"
        text = f"accepts {allowed} positional sub-pattern{plural} ({instr.arg} given)"
        tx.raise_(TypeError, f"{real.__name__}() {text}")
    parts = [subject] if whole and instr.arg else []
    wanted = [*([] if whole else fields[: instr.arg]), *names]
    for number, name in enumerate(wanted):
        if name in wanted[:number]:
            text = f"got multiple sub-patterns for attribute {name!r}"
            tx.raise_(TypeError, f"{real.__name__}() {text}")
    try:
        parts += [subject.getattr(tx, name) for name in wanted]
    except Raised as raised:
        if not issubclass(raised.value.python_type(), AttributeError):
            raise
        frame.stack.append(constant(None))
        return
    frame.stack.append(tx.tuple_of(parts))


_MATCH_SELF = 1 << 22
"""_Py_TPFLAGS_MATCH_SELF: int(n) matches the object itself."""
