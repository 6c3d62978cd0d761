"""Building and unpacking containers, strings and slices."""

from __future__ import annotations

from weft_capture.bytecode import Instr
from weft_capture.opcodes.table import opcode
from weft_capture.python_compat import too_many_values
from weft_capture.values.base import Frame, Value
from weft_capture.values.constant import constant
from weft_capture.values.containers import ListValue, SetValue, SliceValue, TupleValue
from weft_capture.values.dicts import DictValue
from weft_capture.values.made import joined
from weft_capture.values.objects import UserObject

_CONTAINERS = {"BUILD_TUPLE": TupleValue, "BUILD_LIST": ListValue, "BUILD_SET": SetValue}


@opcode(*_CONTAINERS)
def _build(frame: Frame, instr: Instr) -> None:
    frame.stack.append(_CONTAINERS[instr.opname](frame.pop_many(instr.arg)))


@opcode("BUILD_MAP")
def _build_map(frame: Frame, instr: Instr) -> None:
    flat = frame.pop_many(2 * instr.arg)
    frame.stack.append(DictValue(list(zip(flat[::2], flat[1::2], strict=True))))


@opcode("BUILD_CONST_KEY_MAP")
def _build_const_key_map(frame: Frame, instr: Instr) -> None:
    keys = frame.stack.pop().as_constant()
    values = frame.pop_many(len(keys))
    frame.stack.append(DictValue([(constant(k), v) for k, v in zip(keys, values, strict=True)]))


@opcode("BUILD_STRING")
def _build_string(frame: Frame, instr: Instr) -> None:
    parts = frame.pop_many(instr.arg)
    frame.stack.append(joined(frame.tx, parts))


@opcode("FORMAT_VALUE")
def _format_value(frame: Frame, instr: Instr) -> None:
    spec = frame.stack.pop() if instr.arg & 4 else constant("")
    _convert(frame, instr.arg & 3)
    frame.stack.append(frame.tx.builtin(format, frame.stack.pop(), spec))


@opcode("CONVERT_VALUE")
def _convert_value(frame: Frame, instr: Instr) -> None:
    _convert(frame, instr.arg)


def _convert(frame: Frame, which: int) -> None:
    if which:
        function = (str, repr, ascii)[which - 1]
        frame.stack.append(frame.tx.builtin(function, frame.stack.pop()))


@opcode("BUILD_SLICE")
def _build_slice(frame: Frame, instr: Instr) -> None:
    parts = frame.pop_many(instr.arg)
    if len(parts) == 2:
        parts.append(constant(None))
    frame.stack.append(SliceValue(*parts))


@opcode("LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE")
def _extend(frame: Frame, instr: Instr) -> None:
    source = frame.stack.pop()
    name = "extend" if instr.opname == "LIST_EXTEND" else "update"
    if instr.opname == "DICT_MERGE":
        _check_duplicates(frame, frame.stack[-instr.arg], source)
    frame.stack[-instr.arg].call_method(frame.tx, name, [source], {})


def _check_duplicates(frame: Frame, target: Value, source: Value) -> None:
    if not isinstance(target, DictValue) or not isinstance(source, DictValue):
        return
    for key, _ in source.entries.values():
        if key.hash_key() in target.entries:
            text = f"got multiple values for keyword argument {key.as_constant()!r}"
            frame.tx.raise_(TypeError, text)


@opcode("LIST_APPEND", "SET_ADD")
def _append(frame: Frame, instr: Instr) -> None:
    item = frame.stack.pop()
    name = "append" if instr.opname == "LIST_APPEND" else "add"
    frame.stack[-instr.arg].call_method(frame.tx, name, [item], {})


@opcode("MAP_ADD")
def _map_add(frame: Frame, instr: Instr) -> None:
    value = frame.stack.pop()
    key = frame.stack.pop()
    frame.stack[-instr.arg].setitem(frame.tx, key, value)


def _first_items(frame: Frame, value: Value, count: int) -> list[Value]:
    """Return up to `count` items; no more are taken from an iterator."""
    if not isinstance(value, UserObject) and not hasattr(value.python_type(), "__next__"):
        return value.unpack(frame.tx)
    iterator = value.iterate(frame.tx)
    items: list[Value] = []
    while len(items) < count and (item := iterator.next(frame.tx)) is not None:
        items.append(item)
    return items


@opcode("UNPACK_SEQUENCE")
def _unpack_sequence(frame: Frame, instr: Instr) -> None:
    count = instr.arg
    value = frame.stack.pop()
    items = _first_items(frame, value, count + 1)
    if len(items) < count:
        text = f"not enough values to unpack (expected {count}, got {len(items)})"
        frame.tx.raise_(ValueError, text)
    if len(items) > count:
        frame.tx.raise_(ValueError, too_many_values(value.python_type(), count, len(items)))
    frame.stack.extend(reversed(items))


@opcode("UNPACK_EX")
def _unpack_ex(frame: Frame, instr: Instr) -> None:
    before, after = instr.arg & 0xFF, instr.arg >> 8
    items = frame.stack.pop().unpack(frame.tx)
    if len(items) < before + after:
        text = f"not enough values to unpack (expected at least {before + after}, got {len(items)})"
        frame.tx.raise_(ValueError, text)
    end = len(items) - after
    parts: list[Value] = [*items[:before], ListValue(items[before:end]), *items[end:]]
    frame.stack.extend(reversed(parts))
