"""Building and unpacking containers, strings and slices."""

from __future__ import annotations

from weft_guards.payloads import find_in_class

from weft_capture.breaks import Break
from weft_capture.bytecode import Instr
from weft_capture.model.constant import NULL, constant
from weft_capture.model.containers import ListValue, SetValue, SliceValue, TupleValue
from weft_capture.model.dicts import DictValue
from weft_capture.model.functions import FunctionValue
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Frame, Value
from weft_capture.model.slots import steps
from weft_capture.opcodes.dispatch import opcode
from weft_capture.python_compat import too_many_values, type_name
from weft_capture.tensors.runtime_values import join_texts

_CONTAINERS = {"BUILD_TUPLE": TupleValue, "BUILD_LIST": ListValue, "BUILD_SET": SetValue}


opcode(*_CONTAINERS)(
    lambda frame, instr: frame.stack.append(_CONTAINERS[instr.opname](frame.pop_many(instr.arg)))
)
opcode("BUILD_STRING")(
    lambda frame, instr: frame.stack.append(join_texts(frame.tx, frame.pop_many(instr.arg)))
)
opcode("CONVERT_VALUE")(lambda frame, instr: _convert(frame, instr.arg))


@opcode("BUILD_MAP")
def _build_map(frame: Frame, instr: Instr) -> None:
    flat = frame.pop_many(2 * instr.arg)
    frame.stack.append(DictValue(list(zip(flat[::2], flat[1::2], strict=True))))


@opcode("BUILD_CONST_KEY_MAP")
def _build_const_key_map(frame: Frame, instr: Instr) -> None:
    keys = frame.stack.pop().as_constant()
    values = frame.pop_many(len(keys))
    frame.stack.append(DictValue([(constant(k), v) for k, v in zip(keys, values, strict=True)]))


@opcode("FORMAT_VALUE")
def _format_value(frame: Frame, instr: Instr) -> None:
    spec = frame.stack.pop() if instr.arg & 4 else constant("")
    _convert(frame, instr.arg & 3)
    frame.stack.append(frame.tx.builtin(format, frame.stack.pop(), spec))


def _convert(frame: Frame, which: int) -> None:
    if which:
        function = (str, repr, ascii)[which - 1]
        frame.stack.append(frame.tx.builtin(function, frame.stack.pop()))


@opcode("BUILD_SLICE")
def _build_slice(frame: Frame, instr: Instr) -> None:
    bounds = frame.pop_many(instr.arg)
    if len(bounds) == 2:
        bounds.append(constant(None))
    frame.stack.append(SliceValue(*bounds))


@opcode("LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE")
def _extend(frame: Frame, instr: Instr) -> None:
    source = frame.stack.pop()
    name = "extend" if instr.opname == "LIST_EXTEND" else "update"
    target = frame.stack[-instr.arg]
    if instr.opname == "LIST_EXTEND" and not _is_iterable(source):
        source_type = type_name(source.python_type())
        frame.tx.raise_(TypeError, f"Value after * must be an iterable, not {source_type}")
    if instr.opname == "DICT_UPDATE" and not hasattr(source.python_type(), "keys"):
        source_type = type_name(source.python_type())
        frame.tx.raise_(TypeError, f"'{source_type}' object is not a mapping")
    if instr.opname == "DICT_MERGE":
        added = DictValue()
        if hasattr(source.python_type(), "keys"):
            added.call_method(frame.tx, name, [source], {})
        _check_names(frame, len(frame.stack) - instr.arg, added, source)
        source = added
    target.call_method(frame.tx, name, [source], {})


def _check_names(frame: Frame, depth: int, added: DictValue, source: Value) -> None:
    """Raise where `**source` is an error, which names the function (format_kwargs_error)."""
    tx, target = frame.tx, frame.stack[depth]
    existing = target.entries if isinstance(target, DictValue) else {}
    duplicate = next(
        (key for hashed, (key, _) in added.entries.items() if hashed in existing), None
    )
    if duplicate is None and hasattr(source.python_type(), "keys"):
        return
    callee = next(value for value in reversed(frame.stack[: depth - 1]) if value is not NULL)
    if duplicate is None or type(callee) is not FunctionValue:
        raise Break("builtin-error", "keyword arguments after ** that the callee refuses")
    names = (callee.tp_getattro(tx, f"__{name}__").as_constant() for name in ("module", "qualname"))
    text = f"got multiple values for keyword argument '{duplicate.as_constant()}'"
    tx.raise_(TypeError, f"{'.'.join(names)}() {text}")


@opcode("LIST_APPEND", "SET_ADD")
def _append(frame: Frame, instr: Instr) -> None:
    item = frame.stack.pop()
    name = "append" if instr.opname == "LIST_APPEND" else "add"
    frame.stack[-instr.arg].call_method(frame.tx, name, [item], {})


@opcode("MAP_ADD")
def _map_add(frame: Frame, instr: Instr) -> None:
    value = frame.stack.pop()
    key = frame.stack.pop()
    frame.stack[-instr.arg].mp_ass_subscript(frame.tx, key, value)


def _is_iterable(value: Value) -> bool:
    return any(find_in_class(value.python_type(), name) for name in ("__iter__", "__getitem__"))


def _first_items(
    frame: Frame, value: Value, count: int, left: list[Value] | None = None
) -> list[Value]:
    """Return up to `count` items, no more are taken from an iterator (CPython: unpack_iterable).

    Args:
        left: gets the iterator, unless it ended or all items were taken at once.
    """
    if not _is_iterable(value):
        value_type = type_name(value.python_type())
        frame.tx.raise_(TypeError, f"cannot unpack non-iterable {value_type} object")
    if not isinstance(value, UserObject) and not hasattr(value.python_type(), "__next__"):
        return value.unpack(frame.tx)
    iterator = value.tp_iter(frame.tx)
    items: list[Value] = []
    while len(items) < count and (item := iterator.tp_iternext(frame.tx)) is not None:
        items.append(item)
    if left is not None and len(items) == count:
        left.append(iterator)
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
    value = frame.stack.pop()
    left: list[Value] = []
    items = _first_items(frame, value, before, left)
    if left:
        items += steps(frame.tx, left[0])
    if len(items) < before + after:
        text = f"not enough values to unpack (expected at least {before + after}, got {len(items)})"
        frame.tx.raise_(ValueError, text)
    end = len(items) - after
    targets: list[Value] = [*items[:before], ListValue(items[before:end]), *items[end:]]
    frame.stack.extend(reversed(targets))
